"""Links, pipes and crafted names in a stranger's run folder lead nowhere.

Nothing outside the folder changes.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

import coadjoint as co
from coadjoint.cli import compared_runs as comparison_module
from coadjoint.cli import program
from coadjoint.errors import NumericalError, StorageError
from coadjoint.training import files, json_rows, loggers, run_folder, storage
from coadjoint.training.step import StepEvaluator

pytestmark = pytest.mark.slow

OPTIONS = (
    "--length 10 --hidden 4 --every 4 --tests 5 --confirm 5 --probes 2 --batch 2 "
    "--checkpoint 3 --keep 2"
)
TRAIN = ["train", "temporal-order", *OPTIONS.split(), "--steps", "6", "--quiet"]


def command(*words):
    """The command line, in this process: its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["coadjoint", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            program.main()
    return end.value.code


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of six steps, which can go on to more."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert command(*TRAIN, "--out", folder) == 0
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def outside(finished, tmp_path):
    """What is not the run's: a file, and a folder that looks like one of a run's own."""
    place = tmp_path / "outside"
    (place / "folder" / "step-00000099.tmp").mkdir(parents=True)
    (place / "folder" / "step-00000099.tmp" / "kept").write_text("mine")
    (place / "folder" / "step-00000098.old").mkdir()
    for step in (1, 2, 3):
        shutil.copytree(
            finished / "checkpoints" / storage.folder_name(6),
            place / "folder" / storage.folder_name(step),
        )
    for name in ("diagnostics.json", "temporal.png", "decay.png", "file"):
        (place / "folder" / name).write_text("{}")
    (place / "file").write_text("mine\n" * 2000)
    return place


def contents(place):
    """Everything below a folder, with its bytes and the times at which it was changed."""
    found = {}
    for path in sorted(place.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else None
        found[path] = (status.st_mode, status.st_mtime_ns, status.st_size, content)
    return found


def refused(capsys, outside, *words):
    """The command is refused in one line, and nothing outside has changed; what it said."""
    before = contents(outside)
    capsys.readouterr()
    code = command(*words)
    assert contents(outside) == before
    said = capsys.readouterr().err
    assert code == StorageError.exit_code, said
    assert said.count("\n") == 1, said
    return said


def link(path, outside):
    path.symlink_to(outside / "file")


def dangling(path, outside):
    path.symlink_to(outside / "not-there-yet")


def hard_link(path, outside):
    path.hardlink_to(outside / "file")


def pipe(path, outside):
    os.mkfifo(path)


def folder(path, outside):
    path.mkdir()


def device(path, outside):
    path.symlink_to(os.path.join(os.sep, "dev", "zero"))


SAID = {
    link: "is a link, and coadjoint does not write through links",
    dangling: "is a link, and coadjoint does not write through links",
    hard_link: "has 2 names (hard links)",
    pipe: "is a pipe or device; expected a regular file",
    folder: "is a folder; expected a regular file",
    device: "is a link, and coadjoint does not write through links",
}


@pytest.mark.parametrize("kind", SAID)
@pytest.mark.parametrize("name", ["lock", ".lock", "metrics.jsonl", "clock.jsonl"])
def test_a_link_in_place_of_a_file_that_is_written_is_refused(capsys, run, outside, name, kind):
    (run / name).unlink(missing_ok=True)
    kind(run / name, outside)
    said = refused(capsys, outside, "resume", run, "--steps", "9")
    assert f"{run / name} {SAID[kind]}" in said
    assert os.path.lexists(run / name), "it was left there"


@pytest.mark.parametrize("kind", [link, dangling, hard_link, pipe])
@pytest.mark.parametrize("name", ["metrics.jsonl", "clock.jsonl"])
def test_a_run_that_begins_again_refuses_links(capsys, run, outside, name, kind):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    for gone in (name, "result.json"):
        (run / gone).unlink()
    kind(run / name, outside)
    assert f"{run / name} {SAID[kind]}" in refused(capsys, outside, "resume", run)


@pytest.mark.parametrize("kind", [link, dangling, hard_link, pipe])
@pytest.mark.parametrize("name", ["lock", ".lock"])
def test_a_new_run_refuses_links_in_its_folder(capsys, tmp_path, outside, name, kind):
    (tmp_path / "new").mkdir()
    kind(tmp_path / "new" / name, outside)
    assert SAID[kind] in refused(capsys, outside, *TRAIN, "--out", tmp_path / "new")


def test_a_link_within_the_folder_is_refused_too(run):
    (run / "clock.jsonl").unlink()
    (run / "clock.jsonl").symlink_to("config.yaml")
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(StorageError, match="is a link"):
        json_rows.JsonRows(run / "clock.jsonl")
    assert (run / "config.yaml").read_bytes() == before


def test_a_link_that_comes_between_check_and_opening_is_refused(monkeypatch, run, outside):
    """The look at the path alone would not be enough."""
    (run / "lock").unlink()
    before, look, looks = contents(outside), os.lstat, []

    def slow(path, **options):
        if Path(path).name == "lock" and not looks:
            looks.append(path)
            link(run / "lock", outside)
            raise FileNotFoundError
        return look(path, **options)

    monkeypatch.setattr(os, "lstat", slow)
    with pytest.raises(StorageError, match="is a link"):
        run_folder.Lock(run)
    assert looks
    monkeypatch.undo()
    assert contents(outside) == before


def test_systems_that_cannot_open_without_links_refuse_them_too(monkeypatch, run, outside):
    monkeypatch.setattr(files, "NO_LINKS", 0)
    for kind in (link, dangling, hard_link):
        (run / "lock").unlink()
        kind(run / "lock", outside)
        before = contents(outside)
        with pytest.raises(StorageError):
            run_folder.Lock(run)
        assert contents(outside) == before


# folders of a run folder


def test_checkpoints_behind_a_link_are_refused(capsys, run, outside):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to(outside / "folder")
    said = refused(capsys, outside, "resume", run, "--steps", "9")
    assert f"{run / 'checkpoints'} is a link" in said
    assert "is a link" in refused(capsys, outside, "resume", run, "--steps", "9", "--fallback")


def test_checkpoints_behind_a_link_are_refused_before_a_new_run(capsys, tmp_path, outside):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "checkpoints").symlink_to(outside / "folder")
    assert "checkpoints is a link" in refused(capsys, outside, *TRAIN, "--out", tmp_path / "new")


def test_checkpoints_that_are_a_file_are_refused(capsys, run, outside):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("")
    refused(capsys, outside, "resume", run, "--steps", "9")


@pytest.mark.parametrize("step", [1, 6, 99])
def test_a_checkpoint_behind_a_link_is_refused(capsys, run, outside, step):
    """Whether it would be loaded, or removed as an old one."""
    path = run / "checkpoints" / storage.folder_name(step)
    if path.exists():
        shutil.rmtree(path)
    path.symlink_to(outside / "folder" / storage.folder_name(1))
    assert f"{path} is a link" in refused(
        capsys, outside, "resume", run, "--steps", "9", "--fallback"
    )


@pytest.mark.parametrize(
    "name", ["step-00000009.tmp", "step-00000099.tmp", "step-00000003.old", "step-00000099.old"]
)
@pytest.mark.parametrize("target", ["folder", "file", "nothing"])
def test_half_written_checkpoints_that_are_links_are_not_followed(run, outside, name, target):
    """The link goes, and nothing else."""
    before = contents(outside)
    (run / "checkpoints" / name).symlink_to(outside / target)
    assert command("resume", run, "--steps", "9", "--quiet") == 0
    assert contents(outside) == before
    assert not os.path.lexists(run / "checkpoints" / name)


def test_a_damaged_checkpoint_is_not_set_aside_through_a_link(run, outside):
    before = contents(outside)
    last = storage.list_checkpoints(run)[-1]
    (last / "state.json").unlink()
    last.with_suffix(".damaged").symlink_to(outside / "folder")
    assert command("resume", run, "--steps", "9", "--fallback", "--quiet") == 0
    assert contents(outside) == before
    assert not last.with_suffix(".damaged").is_symlink()


def test_only_names_of_ours_are_cleared_away(run):
    strange = run / "checkpoints" / "step-of-mine.tmp"
    strange.mkdir()
    assert command("resume", run, "--steps", "9", "--quiet") == 0
    assert strange.is_dir()


def tiny(folder, steps, **more):
    torch.manual_seed(0)
    net = co.Network("elman", inputs=6, hidden=3, outputs=4, output="softmax")
    few = {"batch": 2, "every": 4, "tests": 5, "confirm": 5, "probes": 2, "checkpoint": 3}
    return co.train(net, co.tasks.TemporalOrder(10), steps=steps, folder=folder, **few, **more)


def test_replays_behind_a_link_are_refused(monkeypatch, tmp_path, outside):
    tiny(tmp_path / "run", 6)
    (tmp_path / "run" / "replay").symlink_to(outside / "folder")

    def not_finite(steps, step):
        steps.rng_state = torch.get_rng_state()
        raise NumericalError("a number is not finite")

    monkeypatch.setattr(StepEvaluator, "evaluate", not_finite)
    before = contents(outside)
    with pytest.raises(StorageError, match="replay is a link"):
        tiny(tmp_path / "run", 9, resume=True)
    assert contents(outside) == before


def test_diagnostics_behind_a_link_are_refused(capsys, run, outside):
    (run / "diagnostics").symlink_to(outside / "folder")
    words = ("diagnose", run, "--samples", "4", "--only", "decay", "--quiet")
    assert f"{run / 'diagnostics'} is a link" in refused(capsys, outside, *words)


def test_logs_behind_a_link_are_refused(run, outside):
    pytest.importorskip("tensorboard")
    (run / "tensorboard").symlink_to(outside / "folder")
    before = contents(outside)
    with pytest.raises(StorageError, match="tensorboard is a link"):
        loggers.TensorBoardLogger(run)({"kind": "train", "step": 1, "loss": 0.5})
    assert contents(outside) == before


@pytest.mark.parametrize("kind", [link, hard_link, dangling, pipe])
@pytest.mark.parametrize("name", ["report.html", "model.safetensors", "environment.json"])
@pytest.mark.sampled(2)
def test_files_that_are_replaced_are_made_anew(run, outside, name, kind):
    before = contents(outside)
    (run / name).unlink()
    kind(run / name, outside)
    shutil.rmtree(run / "checkpoints")  # so that all of them are written again
    (run / "checkpoints").mkdir()
    (run / "result.json").unlink()
    assert command("resume", run, "--quiet") == 0
    assert contents(outside) == before
    assert (run / name).is_file()
    assert not (run / name).is_symlink()


# what a killed process has left


def dead():
    """The number of a process that has ended."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def test_leftovers_of_killed_processes_are_removed(run, outside):
    before, pid = contents(outside), dead()
    gone = [run / f".result.json.{pid}.tmp", run / f".report.html.{pid}.tmp"]
    for path in gone:
        path.write_text("half")
    (run / f".model.safetensors.{os.getppid()}.tmp").write_text("half")
    (run / f".link.{pid}.tmp").symlink_to(outside / "file")
    (run / f".folder.{pid}.tmp").mkdir()
    for name in (
        f"notes.{pid}.tmp",
        f".notes.{pid}.tmp.txt",
        ".notes.tmp",
        ".notes.-1.tmp",
        ".notes.0.tmp",
    ):
        (run / name).write_text("mine")
    others = {p.name for p in run.iterdir()} - {p.name for p in gone}
    assert command("resume", run, "--steps", "9", "--quiet") == 0
    assert {p.name for p in run.iterdir()} == others
    assert contents(outside) == before


# comparisons

NAMES = [
    *(
        "",
        ".",
        "..",
        "a/b",
        "a\\b",
        os.sep + "a",
        "C:a",
        "C:",
        "a:b",
        "nul",
        "NUL.txt",
        "com1",
        "a.",
        "a ",
        " a",
        "a\n",
    ),
    *(
        "a\0b",
        "x" * 256,
        "é" * 128,
        "a*",
        "a?",
        '"a"',
        "<a>",
        "a|b",
        "..\\x",
        "\u202ea",
        "\ud800",
        None,
        3,
        ["a"],
    ),
]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_leave_the_folder_are_refused(name):
    assert not files.is_portable_name(name)


@pytest.mark.parametrize(
    "name", ["a", "a-seed-0", ".a", "..a", "a.b", "é", "con-seed-0", "nulls", "x" * 255]
)
def test_ordinary_names_are_taken(name):
    assert files.is_portable_name(name)


@pytest.fixture
def comparison(tmp_path):
    base = {
        "task": {"name": "temporal-order", "length": 10},
        "network": {"hidden": 4},
        "training": {"steps": 2, "every": 2, "tests": 4, "confirm": 4, "probes": 2, "batch": 2},
    }
    comparison_module.lay_out(base, comparison_module.parse_variants("a"), [0], tmp_path / "cmp")
    return tmp_path / "cmp"


def renamed(comparison, folder):
    path = comparison / "compare.json"
    found = json.loads(path.read_text())
    found["rows"][0]["runs"][0]["folder"] = folder
    path.write_text(json.dumps(found))


@pytest.mark.parametrize(
    "name",
    [
        *(
            "{outside}/new",
            "../outside/new",
            "runs/../../outside/new",
            "runs",
            "runs/",
            "runs/..",
            "..",
            "",
        ),
        *(
            "runs/a/../../../outside/new",
            "runs\\..\\..\\outside",
            "runs/a\\b",
            "runs/C:a",
            "runs/nul",
            "../outside/folder",
        ),
    ],
)
def test_runs_elsewhere_by_name_are_refused(capsys, comparison, outside, name):
    renamed(comparison, name.format(outside=outside))
    (comparison / "configs" / "new.yaml").write_bytes(
        (comparison / "configs" / "a-seed-0.yaml").read_bytes()
    )
    before = (comparison / "compare.json").read_bytes()
    said = refused(capsys, outside, "resume", comparison, "--jobs", "1")
    assert str(comparison / "compare.json") in said
    assert "names the run" in said or not name  # no name at all is refused by the schema
    assert (comparison / "compare.json").read_bytes() == before
    assert not list((comparison / "runs").iterdir())


def test_runs_elsewhere_by_a_link_are_refused(capsys, comparison, outside):
    (comparison / "runs").rmdir()
    (comparison / "runs").symlink_to(outside / "folder")
    assert f"{comparison / 'runs'} is a link" in refused(
        capsys, outside, "resume", comparison, "--jobs", "1"
    )


@pytest.mark.parametrize("target", ["folder", "nothing"])
def test_one_run_elsewhere_by_a_link_is_refused(capsys, comparison, outside, target):
    (comparison / "runs" / "a-seed-0").symlink_to(outside / target)
    assert "a-seed-0 is a link" in refused(capsys, outside, "resume", comparison, "--jobs", "1")


def test_runs_that_were_there_already_are_not_resumed(capsys, run, tmp_path, outside):
    """They are named in compare.json, and not by a path."""
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"status": "interrupted"}))
    assert command("compare", run, "--out", tmp_path / "both", "--quiet") == 0
    found = json.loads((tmp_path / "both" / "compare.json").read_text())
    assert found["rows"][0]["runs"][0]["folder"] == "run"
    before = contents(run)
    assert "names the run 'run'" in refused(capsys, outside, "resume", tmp_path / "both")
    assert contents(run) == before


def test_a_method_whose_name_no_folder_can_have_is_refused(tmp_path):
    for name in ("x" * 250, "nul.txt"):
        with pytest.raises(co.ConfigError, match="cannot be used for a folder"):
            comparison_module.lay_out(
                {"task": {"name": "xor"}},
                comparison_module.parse_variants(name),
                [0],
                tmp_path / "cmp",
            )
    assert not (tmp_path / "cmp").exists()
