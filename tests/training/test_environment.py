"""environment.json names the revision of the source, and says if the source was changed."""

import subprocess

import pytest

from coadjoint.training import environment


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a package as ours lies in one, committed."""
    training = tmp_path / "src" / "coadjoint" / "training"
    training.mkdir(parents=True)
    (training / "environment.py").write_text("1\n")
    (training.parent / "errors.py").write_text("1\n")
    (tmp_path / "pyproject.toml").write_text("1\n")
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-q", "-m", "first")):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    monkeypatch.setattr(environment, "HERE", training)
    return tmp_path


def test_the_revision_of_an_unchanged_source_has_no_mark(repository):
    revision = environment.git_revision()
    assert len(revision) == 40
    assert not revision.endswith("+")


@pytest.mark.parametrize(
    "changed",
    [
        "src/coadjoint/training/environment.py",
        "src/coadjoint/errors.py",
        "src/coadjoint/new.py",
        "pyproject.toml",
    ],
)
def test_a_change_anywhere_in_the_source_is_marked(repository, changed):
    (repository / changed).write_text("2\n")
    assert environment.git_revision().endswith("+")


def test_a_run_folder_in_the_repository_is_no_change_of_the_source(repository):
    (repository / "run").mkdir()
    (repository / "run" / "metrics.jsonl").write_text("{}\n")
    assert not environment.git_revision().endswith("+")


def test_a_package_that_no_repository_tracks_has_no_revision(repository):
    subprocess.run(["git", "-C", str(repository), "rm", "-rq", "--cached", "src"], check=True)
    assert environment.git_revision() is None
