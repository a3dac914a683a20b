"""A path in the place of a built-in task is named as what it is."""

import pytest

REFUSED = {
    "diagnose runs/nope": (4, "runs/nope does not exist. Name a folder or a file that does, or"),
    "compare runs/nope": (4, "runs/nope does not exist."),
    "compare runs/nope -m plain": (4, "runs/nope does not exist."),
    "compare runs runs/nope": (4, "runs/nope does not exist."),
    "compare waves.csv -m plain": (2, "is a file, not a built-in task: pass it with --train waves"),
    "compare nope.csv -m plain": (4, "nope.csv does not exist."),
    "diagnose waves.csv": (2, "waves.csv is a file, not a built-in task: pass it with --train"),
    "tune waves.csv": (2, "waves.csv is a file, not a built-in task: pass it with --train"),
    "train waves.csv": (2, "waves.csv is a file, not a built-in task: pass it with --train"),
    "train ./runs": (2, "./runs is not a built-in task: `coadjoint tasks` lists them."),
    "diagnose xorr": (2, "unknown task 'xorr'; did you mean 'xor'?"),
    "compare xorr -m plain": (2, "unknown task 'xorr'; did you mean 'xor'?"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_path_is_no_unknown_task(words, tmp_path, monkeypatch, coadjoint):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "waves.csv").write_text("a,b\n1,2\n")
    (tmp_path / "runs").mkdir()
    code, out, err = coadjoint(*words.split())
    expected, said = REFUSED[words]
    assert (code, out) == (expected, "")
    assert said in err
    assert err.count("\n") == 1
    assert not list((tmp_path / "runs").iterdir())
