"""The command line: every command works, and every wrong word gets one line and its exit code.

Nothing is left half-written.
"""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sampling
from coadjoint.cells import library, steps
from coadjoint.cli import compared_runs, program
from coadjoint.networks import initialisers
from coadjoint.objectives import penalties
from coadjoint.optimisers import recipes, schedules
from coadjoint.training import settings
from paths import read_table

SMALL = [
    "--hidden",
    "4",
    "--steps",
    "4",
    "--every",
    "2",
    "--tests",
    "8",
    "--confirm",
    "8",
    "--probes",
    "4",
    "--batch",
    "3",
]
XOR = ["train", "xor", "--length", "12", *SMALL]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("COADJOINT_DEBUG", raising=False)
    return tmp_path


LOOK = """
import sys
import coadjoint.cli
sys.argv = ["coadjoint", *sys.argv[1:]]
try:
    coadjoint.cli.main()
except SystemExit:
    print(*{name.split(".")[0] for name in sys.modules})
"""
OURS = {"torch", "numpy", "yaml", "jinja2", "safetensors"}
HEAVY = OURS | {"matplotlib", "pandas", "pyarrow", "scipy", "sklearn", "sympy"}


@pytest.mark.slow
def test_help_loads_nothing_that_takes_long():
    for words in (["--help"], ["train", "--help"]):
        done = subprocess.run([sys.executable, "-c", LOOK, *words], capture_output=True, text=True)
        loaded = set(done.stdout.splitlines()[-1].split())
        assert "coadjoint" in loaded
        assert not loaded & HEAVY
        assert "\x1b" not in done.stdout


COMMANDS = (
    "train",
    "online",
    "resume",
    "replay",
    "compare",
    "predict",
    "report",
    "diagnose",
    "tasks",
    "cells",
    "demo",
    "bench",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_fits_a_terminal(coadjoint, command):
    code, out, _ = coadjoint(command, "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80


def test_the_help_says_what_a_limit_is_and_what_is_required(coadjoint):
    assert "at most this many" in " ".join(coadjoint("explain", "--help")[1].split())
    assert "(required)" in coadjoint("export", "--help")[1]


def test_the_program_alone_prints_its_help_and_nothing_else(coadjoint):
    code, out, err = coadjoint()
    assert (code, err) == (2, "")
    assert "Commands" in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--std-in 1e39", "--std-in 1e+39 is too large for float32"),
        ("--std-in 1e38", "R are outside the range of float32: give a smaller --std-in."),
        ("--penalty log-ratio --weight 1e39", "--weight 1e+39 is too large for float32"),
        ("--cell cornn --dt 1e39", "--dt 1e+39 is too large for float32: lower it, or pass --prec"),
    ],
)
def test_what_float32_does_not_hold_is_refused_before_there_is_a_folder(
    coadjoint, tmp_path, monkeypatch, flags, said
):
    monkeypatch.chdir(tmp_path)
    words = ["train", "temporal-order", "--length", "10", "--steps", "1", *flags.split()]
    code, out, err = coadjoint(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert not list(tmp_path.iterdir())


def test_help_shows_groups_defaults_and_examples(coadjoint):
    out = coadjoint("train", "--help")[1]
    for text in (
        "Your own data",
        "The optimiser and its step size",
        "step size (default 1e-3; lbfgs: 1)",
        "Options of single cells",
        "coadjoint train temporal-order",
    ):
        assert text in out


def test_cells_are_listed_with_their_engines_and_papers(coadjoint):
    code, out, err = coadjoint("cells")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: " ".join(line.split()) for line in out.splitlines()[2:]}
    assert set(rows) == {*library.CELLS, *steps.STEPS, "reservoir"}
    assert "all but scan" in rows["elman"]
    assert "all but" not in rows["lru"]
    assert "Orvieto et al." in rows["lru"]
    assert " autograd layers; lstm: 2 layers Chung" in rows["gated-feedback"]
    assert "step.W step.R step.b" in rows["gru-before"]
    assert " W R b p.leak all but scan 1 Jaeger" in rows["reservoir"]
    assert " all but scan 2 Hochreiter" in rows["lstm"]


PAGES = {
    "lstm": ["c' = f c + i g, h' = o tanh(c')", "W  [28, 7]", "R  [28, 3]",
        "not scan, which is for recurrences without W"],
    "cornn": ["--dt          0.042", "--eps         4.7", "W  [7, 14]", "\n    2\n"],
    "lru": ["p.nu     [7]", "reference, eager, cpu, scan",
        "torch, gaussian, glorot, he, sigmoid, basic-tanh, keras, ring"],
    "inverse": ["--k           1\n", "W  [7, 7]", "paper\n    none"],
    "gated-feedback": ["s        = sum_i g_ij U_ij h_i", "step.levels.1.U         [7, 14]",
        "--unit    tanh", "autograd\n    not reference"],
    "deep-transition": ["--width       same as --hidden", "--shortcut    no"],
    "reservoir": ["W, R, b and leak are fixed", "with optimiser ridge", "p.leak  [7]"],
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_the_page_of_a_cell_says_everything_about_it(coadjoint, name):
    code, out, err = coadjoint("cells", name, "--hidden", "7", "--inputs", "3")
    assert (code, err) == (0, "")
    assert [text for text in PAGES[name] if text not in out] == []


# one name at a time
SINGLE = [
    *(["--cell", name] for name in library.CELLS),
    *(["--penalty", name] for name in penalties.PENALTIES),
    *(["--optimiser", name] for name in recipes.OPTIMISERS),
    *(["--init", name] for name in initialisers.INITIALISERS if name != "ring"),
    *(["--schedule", name] for name in schedules.SCHEDULES),
]


def together(**tables):
    """Words that give every name of these options, with as few runs as the longest table has."""
    runs = [[] for _ in range(max(map(len, tables.values())))]
    for option, names in tables.items():
        for words, name in zip(runs, names, strict=False):
            words += [f"--{option}", name]
    return runs


TOGETHER = [
    *together(
        cell=[*library.CELLS],
        penalty=[*penalties.PENALTIES],
        schedule=[*schedules.SCHEDULES],
    ),
    *together(
        optimiser=[*recipes.OPTIMISERS],
        init=[name for name in initialisers.INITIALISERS if name != "ring"],
    ),
]
NAMES = [
    *TOGETHER,
    *(sampling.later(words) for words in SINGLE if words not in TOGETHER),
    *(["--cell", name] for name in (*steps.STEPS, "reservoir")),
    ["--cell", "lru", "--init", "ring", "--inner", "0.9", "--radius", "0.99", "--skip"],
    ["--cell", "cornn", "--dt", "0.1", "--gamma", "1", "--eps", "2", "--freeze", "W,b"],
    ["--cell", "gated-feedback", "--layers", "3", "--unit", "gru"],
    ["--cell", "lstm,gru", "--residual", "--dropout", "0.1", "--penalty", "log-ratio"],
    ["--cell", "gru", "--hidden", "6,4", "--residual", "--penalty", "log-ratio"],
    ["--cell", "lstm,gru", "--dense", "--bidirectional", "--penalty", "log-ratio"],
    ["--cell", "lstm-1997", "--truncated", "--no-skip"],
    ["--layers", "2", "--bidirectional", "--deep", "6,5"],
    ["--structure", "orthogonal", "--readout", "attention", "--attention-steps", "5"],
    ["--method", "rtrl"],
    ["--method", "truncated", "--k1", "3", "--k2", "6"],
    ["--penalty", "variance", "--weight-schedule", "inverse-time", "--weight-rate", "1"],
    ["--penalty", "variance", "--weight-schedule", "exponential", "--weight-rate", "0.9"],
    ["--penalty", "variance", "--weight-schedule", "linear", "--weight-end", "0.1"],
    ["--penalty", "isometry", "--penalty-per", "sqrt-n"],
    ["--penalty", "log-ratio", "--hold", "source"],
    ["--penalty", "tangent", "--tangent", "random", "--tangent-directions", "2"],
    ["--precision", "64"],
]


@pytest.mark.slow
@pytest.mark.parametrize("words", NAMES, ids=" ".join)
def test_every_name_trains(coadjoint, words):
    code, _, err = coadjoint(*XOR, *words, "--quiet", "--out", "run")
    assert (code, err) == (0, "")
    assert settings.read_json(Path("run/result.json"))["status"] in ("finished", "success")
    assert Path("run/report.html").exists()


REFUSED = [tuple(row.values()) for row in read_table(__file__, "refused_commands.json")]
REFUSED.append(("train xor --out " + "a" * 300, 4, "200 characters"))


@pytest.mark.parametrize(("words", "code", "text"), REFUSED, ids=[w[:60] for w, _, _ in REFUSED])
def test_a_wrong_word_gets_one_line_and_leaves_nothing(coadjoint, here, words, code, text):
    Path("file").write_text("x")
    Path("full").mkdir()
    Path("full/note").write_text("x")
    found, out, err = coadjoint(*words.split())
    assert (found, out) == (code, "")
    assert text in err
    assert err.startswith("coadjoint: error: ")
    assert err.count("\n") == 1
    assert sorted(str(p.relative_to(here)) for p in here.rglob("*")) == [
        "file",
        "full",
        "full/note",
    ]


def test_a_name_with_a_newline_is_refused_and_not_printed_raw(coadjoint, here):
    code, _, err = coadjoint(*XOR, "--out", "a\nb\x1b[31m")
    assert code == 4
    assert "\x1b" not in err
    assert not list(here.iterdir())


def test_a_folder_that_holds_a_run_is_not_touched(coadjoint):
    assert coadjoint(*XOR, "--out", "run")[0] == 0
    before = Path("run/config.yaml").read_bytes()
    code, _, err = coadjoint(*XOR, "--lr", "0.5", "--out", "run")
    assert code == 4
    assert "coadjoint resume run" in err
    assert Path("run/config.yaml").read_bytes() == before


def test_a_run_that_has_only_begun_keeps_its_config(coadjoint):
    """Of two that begin at once in one folder, the second finds the first one's config and nothing
    else.
    """
    Path("run/checkpoints").mkdir(parents=True)
    Path("run/config.yaml").write_text("task: {name: xor}\n")
    assert coadjoint(*XOR, "--out", "run")[0] == 4
    assert Path("run/config.yaml").read_text() == "task: {name: xor}\n"


def test_runs_are_numbered_and_can_be_resumed(coadjoint):
    assert "runs/xor-1" in coadjoint(*XOR)[1]
    assert "runs/xor-2" in coadjoint(*XOR)[1]
    assert "has already ended" in coadjoint("resume", "runs/xor-1")[1]
    code, out, _ = coadjoint("resume", "runs/xor-1", "--steps", "6")
    assert code == 0
    assert "step 6" in out


@pytest.mark.parametrize(
    "words",
    [
        ["--cell", "rate", "--noise", "0.1"],
        ["--cell", "gru,lstm", "--dropout", "0.5"],
        ["--dropout", "0.5", "--penalty", "log-ratio", "--pretrain", "3"],
        ["--penalty", "log-ratio", "--weight-target", "0.01", "--weight-gain", "0.5"],
        ["--easiest", "0.4,3"],
    ],
    ids=" ".join,
)
@pytest.mark.slow
def test_schedules_continue_where_they_stopped(coadjoint, words):
    for name, steps_, more in (
        ("whole", "4", []),
        ("part", "2", ["resume", "part", "--steps", "4"]),
    ):
        run = [*XOR, *words, "--no-stop-on-success", "--quiet", "--out", name]
        run[run.index("--steps") + 1] = steps_
        assert coadjoint(*run)[0] == 0
        assert not more or coadjoint(*more, "--quiet")[0] == 0

    def rows(name):
        return [
            r
            for r in map(json.loads, Path(name, "metrics.jsonl").read_text().splitlines())
            if r["kind"] == "train"
        ]

    assert rows("whole") == rows("part")
    assert len(rows("part")) == 4


def test_a_fault_is_one_line_and_debug_shows_it(coadjoint, monkeypatch):
    def broken(*_):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("coadjoint.cli.build.build", broken)
    code, _, err = coadjoint(*XOR)
    assert (code, err.count("\n")) == (1, 1)
    assert "a bug in coadjoint: RuntimeError: two lines" in err
    monkeypatch.setattr("coadjoint.cli.build.build", lambda _: (_ for _ in ()).throw(MemoryError()))
    assert coadjoint(*XOR)[0] == 7
    monkeypatch.setattr("coadjoint.cli.build.build", broken)
    monkeypatch.setenv("COADJOINT_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["coadjoint", *XOR])
    with pytest.raises(RuntimeError):
        program.main()


# own data, from a file to predictions


def write(path, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def series(every, kind, n=40, T=6):
    rows = [["id", "time", "a", "b", "y"]]
    for i in range(n):
        sign = 1 if i % 2 else -1
        for t in range(T):
            a, b = sign * t + i / 100, (7 * i + 3 * t) % 11
            number = sign * 2 + (a if every else 0)
            y = (
                ("up" if (a > 1 if every else sign > 0) else "down")
                if kind == "classify"
                else number
            )
            rows.append([i, t, a, b, y])
    return rows


OWN = [
    ("classify", "last"),
    ("classify", "every"),
    ("regress", "last"),
    ("regress", "every"),
    ("next", None),
]
FINITE = ["--hidden", "4", "--epochs", "2", "--probes", "4", "--batch", "8", "--quiet"]


@pytest.mark.parametrize(("kind", "at"), OWN)
@pytest.mark.slow
def test_own_data_from_end_to_end(coadjoint, kind, at):
    rows = series(at == "every", kind)
    write("data.csv", rows)
    write("new.csv", [row[:4] for row in rows])
    chosen = ["--features", "a,b"] if kind == "next" else ["--target", "y", "--at", at]
    words = [
        "train",
        "--train",
        "data.csv",
        "--kind",
        kind,
        "--id",
        "id",
        "--time",
        "time",
        *chosen,
        *FINITE,
    ]
    if kind == "next":
        write("data.csv", [row[:4] for row in rows])
    for seed in ("0", "1"):
        code, _, err = coadjoint(*words, "--seed", seed, "--out", f"run{seed}")
        assert (code, err) == (0, "")
    code, out, _ = coadjoint("predict", "run0", "new.csv", "--out", "p.csv")
    assert code == 0
    assert "40 sequences -> p.csv" in out
    assert len(Path("p.csv").read_text().splitlines()) > 40
    code, out, _ = coadjoint("compare", "run0", "run1", "--out", "both")
    assert code == 0
    assert re.search(r"^run0 +2 ", out, re.M)


def test_predicting_from_other_columns_is_refused(coadjoint):
    write("data.csv", series(False, "classify"))
    write("wrong.csv", [row[:3] for row in series(False, "classify")])
    words = [
        "train",
        "--train",
        "data.csv",
        "--id",
        "id",
        "--time",
        "time",
        "--target",
        "y",
        *FINITE,
    ]
    assert coadjoint(*words, "--out", "run")[0] == 0
    code, _, err = coadjoint("predict", "run", "wrong.csv", "--out", "p.csv")
    assert code == 3
    assert "'b'" in err
    assert not Path("p.csv").exists()
    code, _, err = coadjoint(*words[:-2], "8", "--tests", "5", "--out", "other")
    assert (code, "--tests has no effect" in err) == (2, True)


# comparisons

BASE = ["compare", "xor", "--length", "12", *SMALL, "--seeds", "1", "--out", "cmp"]


@pytest.mark.slow
def test_a_run_that_fails_is_a_row_and_does_not_stop_the_others(coadjoint):
    code, out, _ = coadjoint(
        *BASE, "-m", "plain", "-m", "wild lr=1e38 optimiser=sgd activation=relu", "--jobs", "2"
    )
    assert code == 0
    rows = {
        row["name"]: row["runs"][0] for row in settings.read_json(Path("cmp/compare.json"))["rows"]
    }
    assert rows["plain"]["status"] in ("finished", "success")
    assert rows["wild"]["status"] == "failed"
    assert "1 failed" in out
    assert "wild-seed-0: failed: step" in out
    assert "failed" in Path("cmp/report.html").read_text()


def test_rows_are_checked_before_anything_runs(coadjoint):
    code, _, err = coadjoint(*BASE, "-m", "plain", "-m", "b cell=lstmm")
    assert (code, err.count("\n")) == (2, 1)
    assert "--method b: unknown cell 'lstmm'; did you mean 'lstm'?" in err
    assert not Path("cmp").exists()


def test_a_comparison_is_resumed_where_it_stopped(coadjoint):
    rows = compared_runs.parse_variants("a lr=1e-3|1e-2")
    assert [row.name for row in rows] == ["a lr=0.001", "a lr=0.01"]
    compared_runs.lay_out(
        {"task": {"name": "xor", "length": 12}, "network": {"hidden": 4}, "training": {"steps": 2}},
        rows,
        [0],
        Path("cmp"),
    )
    code, out, _ = coadjoint("resume", "cmp", "--jobs", "2")
    assert code == 0
    assert "2 of 2: a-lr-0.0" in out
    before = Path("cmp/runs/a-lr-0.01-seed-0/metrics.jsonl").stat().st_mtime_ns
    code, out, _ = coadjoint("resume", "cmp")
    assert "2 of 2:" not in out
    assert Path("cmp/runs/a-lr-0.01-seed-0/metrics.jsonl").stat().st_mtime_ns == before
    assert coadjoint("resume", "cmp", "--steps", "3")[0] == 2


def test_runs_are_compared_as_they_are(coadjoint):
    for name in ("r1", "r2"):
        assert coadjoint(*XOR, "--quiet", "--out", name)[0] == 0
    assert coadjoint("compare", "r1", "r1")[0] == 2
    assert coadjoint("compare", "r1", "r2", "--lr", "1")[0] == 2
    assert coadjoint("compare", "r1", "r2", "--out", "both")[0] == 0
    assert coadjoint("compare", "r1", "r2", "--out", "both")[0] == 4
    assert json.loads(Path("both/compare.json").read_text())["rows"]


def test_a_table_folds_on_a_narrow_terminal(coadjoint, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    program.print_table(["task", "options"], [["xor", "word " * 40], ["b", "c"]])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.count("word") for line in lines) == 40


@pytest.mark.slow
def test_a_pipe_that_closes_is_no_error():
    command = f"{sys.executable} -m coadjoint tasks | head -1"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert "Traceback" not in done.stderr


# names that are not UTF-8: what cannot be written is refused before anything is, and what can is

LATIN = os.fsdecode(b"d\xe9j\xe0")  # as a shell hands over a name of another encoding


def table(path):
    path.write_text("a,b,target\n" + "".join(f"{i},{i % 3},{i % 2}.5\n" for i in range(12)))


@pytest.mark.parametrize(
    "words",
    [
        ("online", f"{LATIN}.csv", "--out", "run"),
        (
            "train",
            "--train",
            f"{LATIN}.csv",
            "--kind",
            "regress",
            "--at",
            "every",
            "--out",
            "run",
            *SMALL,
        ),
        ("train", "--train", "d.csv", "--target", LATIN, "--out", "run", *SMALL),
    ],
)
def test_a_name_that_settings_cannot_hold_is_refused_before_anything_is_written(
    words, coadjoint, here
):
    for name in ("d.csv", f"{LATIN}.csv"):
        table(here / name)
    before = sorted(os.listdir(here))
    code, _, err = coadjoint(*words)
    assert code == 2
    assert r"'d\xe9j\xe0" in err
    assert "is not valid UTF-8" in err
    assert "room" not in err
    assert err.count("\n") == 1
    assert sorted(os.listdir(here)) == before


@pytest.mark.parametrize(
    "words",
    [(*XOR, "--out", LATIN), ("online", "d.csv", "--hidden", "4", "--steps", "4", "--out", LATIN)],
)
def test_a_run_folder_may_have_any_name(words, coadjoint, here):
    table(here / "d.csv")
    code, _, err = coadjoint(*words)
    assert (code, err) == (0, "")
    about = json.loads((here / LATIN / "environment.json").read_text())
    assert r"--out 'd\udce9j\udce0'" in about["command"]
    assert (here / LATIN / "report.html").exists()
    assert coadjoint("report", LATIN)[0] == 0
    assert coadjoint("resume", LATIN, "--steps", "6")[0] == 0


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("train", "xor", "--cell", "LSTM"), "did you mean 'lstm'?"),
        (("train", "XOR"), "did you mean 'xor'?"),
        (("train", "xor", "--penalty", "LogRatio"), "did you mean 'log-ratio'?"),
        (("train", "xor", "--optimiser", "ADAM"), "Did you mean 'adam'?"),
        (("train", "xor", "--init", "ORTHOGONAL"), "did you mean 'orthogonal'?"),
        (("train", "xor", "--activation", "ReLU"), "Did you mean 'relu'?"),
        (("online", "d.csv", "--learner", "RTRL"), "did you mean 'rtrl'?"),
        (("online", "d.csv", "--target", "TARGET"), "Did you mean 'target'?"),
        (("train", "--train", "E.CSV"), "did you mean 'd.csv'?"),
    ],
)
def test_names_in_another_case_get_a_suggestion(words, meant, coadjoint, here):
    table(here / "d.csv")
    code, _, err = coadjoint(*words, "--out", "run")
    assert code in (2, 3)
    assert meant.casefold() in err.casefold()
    assert "?." not in err
    assert not (here / "run").exists()


def test_a_damaged_description_names_its_file(coadjoint, here):
    from safetensors.torch import load_file, save_file

    assert coadjoint(*XOR, "--out", "run")[0] == 0
    model = here / "run" / "model.safetensors"
    save_file(load_file(model), model, {"coadjoint": '{"network": '})
    code, _, err = coadjoint("diagnose", "run")
    assert code == 4
    assert "run/model.safetensors" in err
    assert "JSON text" not in err
