"""Runs on a Dask cluster are those of the local pool, bit for bit; what cannot work is refused."""

from __future__ import annotations

import io
import socket
import sys
from concurrent.futures import Executor, Future
from pathlib import Path

import pytest
from rich.console import Console

from coadjoint.cli import cluster, compared_runs, pool, progress, run_table
from coadjoint.errors import ConfigError, MissingError, StorageError
from coadjoint.training.lock import Lock, is_in_use

distributed = pytest.importorskip("distributed")
from coadjoint.cli import cluster_worker  # noqa: E402  needs Dask

FEW = ["--steps", "4", "--every", "2", "--tests", "8", "--confirm", "8", "--probes", "2"]
WORDS = ["compare", "xor", "--length", "12", "--hidden", "4", *FEW, "--seeds", "2", "-m"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def workers():
    """A scheduler with two workers, which are processes of their own: its address."""
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with distributed.LocalCluster(processes=True, host="127.0.0.1", **options) as started:
        yield started.scheduler_address


@pytest.fixture
def alone():
    """The address of a scheduler that has no workers."""
    options = {"n_workers": 0, "processes": True, "dashboard_address": ":0"}
    with distributed.LocalCluster(host="127.0.0.1", **options) as started:
        yield started.scheduler_address


@pytest.mark.slow
def test_a_cluster_trains_what_the_local_pool_trains(coadjoint, here, workers):
    code, out, err = coadjoint(*WORDS, "plain", "--out", "far", "--on", workers)
    assert (code, err) == (0, "")
    assert out.count(": on ") >= 1
    assert "2 of 2: plain-seed-" in out
    assert coadjoint(*WORDS, "plain", "--out", "near", "--jobs", "2", "-q")[0] == 0
    for name in ("model.safetensors", "metrics.jsonl", "config.yaml"):
        for seed in (0, 1):
            run = Path("runs") / f"plain-seed-{seed}" / name
            assert (Path("far") / run).read_bytes() == (Path("near") / run).read_bytes()
    assert sorted(path.name for path in Path("far").iterdir()) == sorted(
        path.name for path in Path("near").iterdir()
    )
    # the same command again has nothing left to do
    code, out, _ = coadjoint(*WORDS, "plain", "--out", "far", "--on", workers, "--continue")
    assert (code, out.count("2 of 2")) == (0, 0)
    code, _, err = coadjoint(*WORDS, "plain lr=1", "--out", "far", "--on", workers, "--continue")
    assert (code, "has other settings" in err) == (4, True)


@pytest.mark.slow
def test_workers_with_other_versions_are_refused(coadjoint, here, workers, monkeypatch):
    real = cluster_worker.versions()
    monkeypatch.setattr(cluster_worker, "versions", lambda: {**real, "torch": "1.0"})
    code, _, err = coadjoint(*WORDS, "plain", "--out", "c", "--on", workers)
    assert (code, err.count("\n")) == (7, 1)
    assert f"torch is {real['torch']} there and 1.0 here" in err
    assert not Path("c").exists()


@pytest.mark.slow
def test_a_folder_that_workers_do_not_see_is_refused(coadjoint, here, workers, monkeypatch):
    monkeypatch.setattr(cluster.Path, "cwd", lambda: here / "elsewhere")
    code, _, err = coadjoint(*WORDS, "plain", "--out", "c", "--on", workers)
    assert (code, err.count("\n")) == (4, 1)
    assert "does not see the folder" in err
    assert list(here.iterdir()) == []


@pytest.mark.slow
def test_a_scheduler_without_workers_is_refused(coadjoint, here, alone, monkeypatch):
    monkeypatch.setattr(cluster, "CONNECT", 1.0)
    code, _, err = coadjoint(*WORDS, "plain", "--on", alone)
    assert (code, err.count("\n")) == (7, 1)
    assert f"dask worker {alone}" in err


@pytest.mark.slow
def test_an_address_where_nobody_answers_is_refused(coadjoint, here, monkeypatch):
    monkeypatch.setattr(cluster, "CONNECT", 1.0)
    with socket.socket() as bound:  # bound, but it does not listen
        bound.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{bound.getsockname()[1]}"
        code, _, err = coadjoint(*WORDS, "plain", "--on", address)
    assert (code, err.count("\n")) == (7, 1)
    assert f"no Dask scheduler answers at {address}" in err
    assert " object at 0x" not in err


# what is refused before anything is asked


@pytest.mark.parametrize("address", ["head:8786", "tcp://head", "http://head:8786", "tcp:/head:1"])
def test_an_address_has_a_scheme_and_a_port(address):
    with pytest.raises(ConfigError, match="tcp://HOST:PORT or tls://HOST:PORT"):
        cluster.connect(address, cluster.TlsFiles())


def test_dask_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingError, match=r"coadjoint\[cluster\]"):
        cluster.connect("tcp://head:8786", cluster.TlsFiles())


def test_tls_needs_its_files(tmp_path):
    with pytest.raises(ConfigError, match="--tls-ca-file, --tls-cert and --tls-key"):
        cluster.connect("tls://head:8786", cluster.TlsFiles())
    with pytest.raises(StorageError, match=r"nowhere\.pem is not a file"):
        cluster.connect("tls://head:8786", cluster.TlsFiles(tmp_path / "nowhere.pem"))
    (tmp_path / "empty.pem").touch()
    with pytest.raises(StorageError, match="PEM format"):
        cluster.connect("tls://head:8786", cluster.TlsFiles(*[tmp_path / "empty.pem"] * 3))
    with pytest.raises(ConfigError, match="--tls-cert belongs to"):
        cluster.connect("tcp://head:8786", cluster.TlsFiles(cert=tmp_path / "c.pem"))


def test_flags_that_do_not_belong_together_are_refused(coadjoint, here):
    code, _, err = coadjoint(*WORDS, "plain", "--tls-key", "key.pem")
    assert (code, "--tls-key belongs to --on tls://" in err) == (2, True)
    code, _, err = coadjoint(*WORDS, "plain", "--continue")
    assert (code, "--continue needs --out" in err) == (2, True)
    code, _, err = coadjoint("resume", "run", "--on", "tcp://head:8786")
    assert (code, "--on applies to a comparison" in err) == (2, True)
    Path("run").mkdir()
    code, _, err = coadjoint("compare", "run", "--on", "tcp://head:8786")
    assert (code, "compared as they are" in err) == (2, True)


# what a worker finds out


def test_a_worker_knows_a_folder_that_it_shares(tmp_path):
    def examine(cwd=tmp_path, token="t"):
        return cluster_worker.examine_folder(str(cwd), "probe", token)

    assert "does not see the folder" in examine(tmp_path / "none")
    assert "does not see" in examine()
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "token").write_text("t")
    assert "sees another" in examine(token="u")
    assert "does not see locks" in examine()
    lock = Lock(tmp_path / "probe")
    assert examine() is None
    lock.release()


def test_versions_that_differ_are_named():
    expected = cluster_worker.versions()
    assert cluster_worker.compare_versions(expected) is None
    expected["numpy"] = "0.1"
    assert "and 0.1 here" in cluster_worker.compare_versions(expected)


def test_a_folder_in_use_is_known(tmp_path):
    assert not is_in_use(tmp_path / "none")
    assert not is_in_use(tmp_path)
    lock = Lock(tmp_path)
    assert is_in_use(tmp_path)
    lock.release()
    assert not is_in_use(tmp_path)


def test_a_link_is_no_lock(tmp_path):
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError):
        is_in_use(tmp_path)


class Idle:
    """In place of a Dask worker."""

    address = "tcp://w:1"
    status = distributed.Status.running


class Ended:
    """In place of the process of a run: it has ended with this code and complaint."""

    has_ended = True

    def __init__(self, code, complaint):
        self.code = code
        self.complaint = complaint

    def close(self): ...


@pytest.fixture
def assigned(monkeypatch, tmp_path):
    """assigned((code, complaint), ...): what a worker makes of processes that end so."""

    def run(*ends, token="told"):
        left = [Ended(*end) for end in ends]
        started = []

        def start(words, cwd):
            started.append(words[0])
            return left.pop(0)

        monkeypatch.setattr(cluster_worker, "get_worker", Idle)
        monkeypatch.setattr(cluster_worker, "LeashedProcess", start)
        versions = cluster_worker.versions()
        task = cluster_worker.AssignedRun(str(tmp_path), "c", "runs/a", token, versions)
        return cluster_worker.run_assigned(task), started

    return run


def test_a_run_whose_folder_is_taken_is_tried_again(assigned):
    taken = (4, "coadjoint: error: run folder c/runs/a is in use by pid 1. Wait for it to end.")
    outcome, started = assigned(taken, taken, (2, "no such cell"))
    assert outcome == pool.Outcome("no such cell", None)
    assert started == ["train"] * 3


@pytest.mark.parametrize("code", [75, -9, -15])
def test_a_run_that_was_ended_from_outside_is_lost(assigned, code):
    with pytest.raises(cluster_worker.RunLostError, match="tcp://w:1"):
        assigned((code, "gone"))


def test_a_run_that_was_told_to_stop_is_not_lost(assigned, monkeypatch):
    monkeypatch.setattr(cluster_worker, "_stopped", set())
    cluster_worker.stop_runs("told")
    assert assigned() == (pool.Outcome(None, None), [])  # it does not start


def test_a_worker_with_other_versions_trains_nothing(assigned, monkeypatch):
    monkeypatch.setattr(cluster_worker, "compare_versions", lambda _: "torch is old")
    with pytest.raises(cluster_worker.UnfitWorkerError, match="torch is old"):
        assigned()


# what the comparison makes of it


class Broken:
    """In place of a client whose scheduler is gone."""

    def get_executor(self, **_):
        return Executor()

    def close(self, timeout): ...


@pytest.fixture
def lost(tmp_path):
    """A pool, and a function that ends a run of it with an error, or cancels it."""
    made = cluster.ClusterPool(Broken(), "tcp://head:1", cluster.TlsFiles(), None)

    def end(error=None):
        future = Future()
        made.keys[future] = "key"
        made.targets[future] = tmp_path
        if error is None:
            future.cancel()
            future.set_running_or_notify_cancel()
        else:
            future.set_exception(error)
        return made.complaint(future)

    return made, end


def test_a_worker_that_leaves_while_it_is_asked_is_let_go(lost, monkeypatch):
    made, _ = lost
    closed = distributed.comm.CommClosedError("in <TCP (closed) Scheduler>: Stream is closed.")
    left = {}
    monkeypatch.setattr(made.client, "run", lambda *_, **__: {"tcp://a:1": closed}, raising=False)
    monkeypatch.setattr(made, "look", lambda: setattr(made, "workers", left))
    with pytest.raises(MissingError, match=r"^worker a:1 does not answer: Stream is closed\.$"):
        made.ask(cluster_worker.compare_versions)
    left["tcp://b:1"] = {"name": "b"}
    made.ask(cluster_worker.compare_versions)


def test_a_scheduler_that_is_gone_ends_the_comparison(lost):
    made, end = lost
    assert end() is None
    assert made.failure == "The Dask scheduler at tcp://head:1 is gone"
    assert compared_runs.is_over(made, [])


def test_what_was_stopped_is_no_failure(lost):
    made, end = lost
    made.stop(at_once=False)
    assert end() is None
    assert made.failure is None


def test_an_unfit_worker_ends_the_comparison(lost):
    made, end = lost
    assert end(cluster_worker.UnfitWorkerError("torch is old")) == "torch is old"
    assert made.failure.startswith("torch is old. Install")


def test_other_failures_are_those_of_one_run(lost):
    from distributed.scheduler import KilledWorker

    made, end = lost
    assert end(cluster_worker.RunLostError("exit code -9")) == "exit code -9"
    assert "lost, one after another" in end(KilledWorker("key", None, 3))
    assert made.failure is None


def test_the_words_to_go_on_name_the_cluster():
    tls = cluster.TlsFiles(Path("ca.pem"), Path("c.pem"), Path("k k.pem"))
    made = cluster.ClusterPool(Broken(), "tls://head:1", tls, 3)
    assert made.flags == (
        " --on tls://head:1 --tls-ca-file ca.pem --tls-cert c.pem --tls-key 'k k.pem'"
    )
    made.workers = {"tcp://a:1": {"nthreads": 8, "name": "left"}, "tcp://b:1": {"nthreads": 1}}
    assert made.size() == 3
    assert made.label("tcp://a:1") == "left (a:1)"
    assert made.label("tcp://b:1") == "b:1"


# the console


def test_runs_and_their_places_fit_80_columns():
    run = pool.RunElsewhere("penalised-weight-1" * 6, "\x1bnode[red]" * 9, 0.375)
    text = io.StringIO()
    console = Console(file=text, width=80, force_terminal=True, color_system=None)
    console.print(run_table.table_of([run] * 22))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split()[-1] == "38%"
    assert "node[red]" in lines[1]
    assert "\x1b" not in lines[1]
    assert "".join(lines[1:4]).count("penalised-") == 6
    assert lines[-1].split() == ["and", "2", "more"]


def test_without_a_terminal_a_line_says_where_a_run_is():
    text = io.StringIO()
    reporter = progress.ProgressReporter(quiet=False, to=text)
    with reporter:
        for place in ("w1", "w1", "w2"):
            reporter.show([pool.RunElsewhere("a", place, 0.5)])
    assert text.getvalue() == "a: on w1\na: on w2\n"


def test_a_terminal_shows_a_table_below_the_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    text = Terminal()
    reporter = progress.ProgressReporter(quiet=False, to=text)
    with reporter as report:
        report(0, 2, None)
        reporter.show([pool.RunElsewhere("plain-seed-0", "w1", 0.5)])
        assert "plain-seed-0" in "".join(map(str, [run.name for run in reporter.runs]))
    assert reporter.runs == ()
