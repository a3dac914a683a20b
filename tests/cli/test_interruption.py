"""Ctrl-C before a run catches signals itself, and runs of a comparison that was interrupted."""

import json
import signal

import pytest

from coadjoint.cli import build, compared_runs, interruption, outcomes

EARLY = "coadjoint: Interrupted before the first step; nothing was written.\n"


@pytest.fixture(autouse=True)
def usual_handler():
    """Whoever runs the tests may have another one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def interrupt(*_, **__):
    signal.raise_signal(signal.SIGINT)


def interrupt_an_import(*_, **__):
    """As numpy does if Ctrl-C comes while it is imported."""
    try:
        interrupt()
    except KeyboardInterrupt:
        raise AttributeError("module 'numpy' has no attribute 'matrix'") from None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train xor --out run", EARLY),
        ("train xor", EARLY),
        ("compare xor -m a --out run", EARLY),
        ("diagnose xor --out run", "coadjoint: Interrupted.\n"),
    ],
)
def test_before_the_first_step(words, said, tmp_path, monkeypatch, coadjoint):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build, "build", interrupt)
    code, out, err = coadjoint(*words.split())
    assert (code, out, err) == (130, "", said)
    assert list(tmp_path.iterdir()) == []


def test_what_an_interrupted_import_raises_is_no_bug(tmp_path, monkeypatch, coadjoint):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build, "build", interrupt_an_import)
    code, out, err = coadjoint("train", "xor", "--out", "run")
    assert (code, out, err) == (130, "", "coadjoint: Interrupted.\n")


def test_a_folder_that_has_begun_can_be_resumed(tmp_path):
    assert interruption.describe_folder(None).endswith("nothing was written.")
    assert interruption.describe_folder(tmp_path / "none").endswith("nothing was written.")
    folder = tmp_path / "a run"
    folder.mkdir()
    assert interruption.describe_folder(folder) == "Interrupted before the first step."
    (folder / "config.yaml").write_text("")
    said = interruption.describe_folder(folder)
    assert said == f"Interrupted. Resume with: coadjoint resume '{folder}'"


def test_a_run_of_an_interrupted_comparison_names_no_signal(tmp_path):
    result = {
        "status": "interrupted",
        "step": 7,
        "seconds": 2.0,
        "reason": "SIGTERM at step 7",
        "success": False,
        "success_step": None,
        "success_seconds": None,
        "goal": None,
        "metric": "right",
        "metrics": {},
        "parameters": 9,
    }
    entry = {"seed": 0, "folder": "runs/a-seed-0", "error": "Interrupted by SIGTERM; saved"}
    outcomes.record_outcome(tmp_path, entry, "right")
    entry["error"] = None
    assert outcomes.describe_end(entry) == "a-seed-0: interrupted before its first step"
    (tmp_path / "result.json").write_text(json.dumps(result))
    outcomes.record_outcome(tmp_path, entry, "right")
    assert entry["error"] is None
    assert outcomes.describe_end(entry) == "a-seed-0: interrupted at step 7 (2 s)"


class Ending:
    """A pool whose only run is interrupted with the comparison, before its first step."""

    most = 1
    failure = None
    flags = ""

    def size(self):
        return 1

    def start(self, folder, run):
        from concurrent.futures import Future

        interrupt()
        future = Future()
        future.set_result(None)
        return future

    def complaint(self, future):
        return "ended without an error message (exit code -15)"

    def places(self):
        return {}

    def stop(self, at_once):
        pass

    def close(self):
        pass


def test_a_run_that_has_not_begun_did_not_fail(tmp_path):
    base = {"task": {"name": "xor"}, "network": {"hidden": 4}}
    folder = tmp_path / "c"
    compared_runs.lay_out(base, compared_runs.parse_variants("a"), [0], folder)
    lines = []
    with pytest.raises(compared_runs.Interrupted, match="Interrupted; every run was saved"):
        compared_runs.run_all(folder, Ending(), lambda done, total, text: lines.append(text))
    assert lines[-1] == "a-seed-0: interrupted before its first step"
    (row,) = compared_runs.read_comparison(folder)["rows"]
    assert row["runs"][0]["error"] is None
