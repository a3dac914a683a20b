"""Files that commands write: what exists is replaced only with --force, and refused at once."""

import os
import shutil

import pytest

SMALL = "--hidden 4 --steps 2 --batch 4 --probes 2 --quiet --split 1,0,0"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture
def here(trained, tmp_path, monkeypatch, coadjoint):
    """A folder with series.csv and a forecasting run, which the first test trains."""
    monkeypatch.chdir(trained)
    if not (trained / "run").exists():
        rows = [f"{t},{t % 5}" for t in range(60)]
        (trained / "series.csv").write_text("time,a\n" + "\n".join(rows) + "\n")
        words = f"train --train series.csv --kind next --lags 0 --out run {SMALL}"
        assert coadjoint(*words.split())[0] == 0
    shutil.copytree(trained, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def listing(folder):
    """Every file with its content."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


COMMANDS = {
    "predict run series.csv": ("--out", "predictions.csv"),
    "forecast run series.csv": ("--out", "forecast.csv"),
    "forecast run series.csv --page --out f.csv": ("--page", "f.html"),
    "explain run series.csv": ("--out", "explanation.csv"),
    "explain run series.csv --out e.csv": ("--page", "e.html"),
    "evaluate run series.csv --json figures.json": ("--json", "figures.json"),
    "evaluate run series.csv --page page.html": ("--page", "page.html"),
    "export run --to torch --out net": ("--out", "net.py"),
    "export run --to torch --out net.py": ("--out", "net.safetensors"),
}


@pytest.mark.parametrize("words", COMMANDS)
def test_a_file_that_exists_is_kept_unless_forced(words, here, coadjoint):
    option, name = COMMANDS[words]
    (here / name).write_text("mine")
    before = listing(here)
    code, out, err = coadjoint(*words.split())
    said = f"coadjoint: error: {name} exists. Pass another {option}, or --force to replace it.\n"
    assert (code, out, err) == (2, "", said)
    assert listing(here) == before
    code, _, err = coadjoint(*words.split(), "--force")
    assert (code, err) == (0, "")
    assert (here / name).read_bytes() != b"mine"


REFUSED = {
    "predict run series.csv --out series.csv --force": (4, "is the file the data were read from"),
    "evaluate run series.csv --json series.csv --force": (4, "is the file the data were read from"),
    "evaluate run series.csv --json run": (2, "run is a folder: pass the name of a file to --json"),
    "evaluate run series.csv --json p.json --page p.json": (2, "--page both name p.json"),
    "explain run series.csv --out p.csv --page ./p.csv": (2, "--out and --page both name p.csv"),
    "explain run series.csv --page -": (2, "--page needs the name of a file"),
    "predict run series.csv --out no/p.csv": (4, "its folder does not exist"),
    "export run --to onnx --out pipe --force": (2, "pipe is a pipe or device"),
    "export run --to torch --out run/model --force": (4, "the file the network was read from"),
    "export run/model.safetensors --to torch --out run/model --force": (4, "read from"),
    "predict series.csv run --out p.csv": (4, "series.csv is a table, not a run."),
    "report run --markdown tables.md": (2, "--markdown is for comparisons, and run is none"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_before_any_work(words, here, coadjoint):
    os.mkfifo(here / "pipe")
    before = listing(here)
    code, out, err = coadjoint(*words.split())
    expected, said = REFUSED[words]
    assert (code, out) == (expected, "")
    assert said in err
    assert listing(here) == before


MISTAKEN = {
    "predict nope series.csv": (4, "nope does not exist. Name a run folder"),
    "predict series.csv run": (4, "series.csv is a table, not a run."),
    "predict run serie.csv": (3, "serie.csv does not exist; did you mean 'series.csv'?"),
    "forecast nope series.csv": (4, "nope does not exist."),
    "forecast run serie.csv": (3, "serie.csv does not exist"),
    "forecast run series.csv --steps 0": (2, "--steps must be a whole number, at least 1; got 0"),
    "forecast run series.csv --level 2": (2, "--level must be a finite number"),
    "forecast run series.csv --rolling 0": (2, "--rolling must be a whole number"),
    "explain run serie.csv": (3, "serie.csv does not exist"),
    "evaluate nope series.csv --json forecast.csv": (4, "nope does not exist."),
    "export nope --to torch --out net": (4, "nope does not exist."),
    "sample nope --out forecast.csv": (4, "nope does not exist."),
}


@pytest.mark.parametrize("words", MISTAKEN)
def test_what_is_read_is_refused_before_what_is_written(words, here, coadjoint):
    for name in ("predictions.csv", "forecast.csv", "explanation.csv", "net.py"):
        (here / name).write_text("mine")
    before = listing(here)
    code, out, err = coadjoint(*words.split())
    expected, said = MISTAKEN[words]
    assert (code, out) == (expected, "")
    assert said in err
    assert "exists" not in err
    assert listing(here) == before


def test_the_page_in_the_run_folder_is_renewed(here, coadjoint):
    for _ in range(2):
        code, _, err = coadjoint("evaluate", "run", "series.csv", "--resamples", "0")
        assert (code, err) == (0, "")


def test_a_folder_of_tables_is_for_prepare(here, coadjoint):
    words = "train --train run --kind next --out other"
    code, _, err = coadjoint(*words.split())
    assert code == 2
    assert "run is a folder; --kind next reads a file" in err
    assert "coadjoint prepare run --out data.co" in err
    (here / "tables").mkdir()
    code, _, err = coadjoint("train", "--train", "tables", "--kind", "classify", "--out", "other")
    assert code == 3
    assert "`coadjoint prepare` makes one set of the tables" in err
    code, out, _ = coadjoint("prepare", "series.csv", "--kind", "next", "--out", "series.co")
    assert (code, out.splitlines()[-1]) == (0, "60 rows in 1 sequence -> series.co")
