"""A search by several processes with a real PostgreSQL server, which the test starts."""

import contextlib
import glob
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

optuna = pytest.importorskip("optuna")
pytest.importorskip("psycopg")

pytestmark = pytest.mark.scale
PASSWORD = "s3cret-Word"
SETTINGS = "--length 10 --cell elman --hidden 4 --batch 4 --steps 400 --every 100 --checkpoint 20"
TASK = ["temporal-order", *SETTINGS.split(), "--tests", "32", "--vary", "lr=1e-5..1e-3"]
SMALL = {**os.environ, "OMP_NUM_THREADS": "1"}


def binaries():
    """The folder of PostgreSQL's programs; on Debian they are not on the path."""
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"))
    if found:
        return Path(found[-1]).parent
    initdb = shutil.which("initdb")
    return Path(initdb).parent if initdb else None


class Server:
    """A PostgreSQL server on the loopback address, whose data are removed at the end."""

    def __init__(self, auth):
        self.bin = binaries()
        if self.bin is None:
            pytest.skip("no PostgreSQL server: apt-get install -y postgresql")
        self.home = Path(tempfile.mkdtemp(prefix="coadjoint-pg-"))
        # PostgreSQL does not run as root.
        self.user = {"user": "nobody"} if os.geteuid() == 0 else {}
        if self.user:
            shutil.chown(self.home, "nobody")
        secret = self.home / "password"
        secret.write_text(PASSWORD + "\n")
        secret.chmod(0o644)
        words = ["initdb", "-D", self.home / "data", "-U", "me", "-A", auth, "--pwfile", secret]
        self.call(*words, "--no-sync")
        self.auth = auth
        self.port = None
        self.start()

    def call(self, name, *words):
        command = [self.bin / name, *words]
        subprocess.run(command, check=True, capture_output=True, cwd=self.home, **self.user)

    def start(self):
        for _ in range(5):  # another process may take the port before the server does
            if self.port is None:
                with socket.socket() as free:
                    free.bind(("127.0.0.1", 0))
                    self.port = free.getsockname()[1]
            log = self.home / "log"
            settings = ["listen_addresses=127.0.0.1", f"port={self.port}", "fsync=off"]
            settings.append("unix_socket_directories=")
            words = [self.bin / "postgres", "-D", self.home / "data"]
            for setting in settings:
                words += ["-c", setting]
            with log.open("wb") as file:
                self.process = subprocess.Popen(words, stderr=file, cwd=self.home, **self.user)
            while self.process.poll() is None:
                if "ready to accept connections" in log.read_text():
                    return
                time.sleep(0.05)
            self.port = None
        pytest.fail((self.home / "log").read_text()[-2000:])

    def url(self, password=PASSWORD, database="postgres"):
        secret = f":{password}" if password else ""
        return f"postgresql+psycopg://me{secret}@127.0.0.1:{self.port}/{database}"

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        self.process.wait()

    def remove(self):
        self.stop()
        shutil.rmtree(self.home)


@pytest.fixture(params=["trust", "scram-sha-256"], scope="module")
def server(request):
    started = Server(request.param)
    yield started
    started.remove()


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Tune:
    """`coadjoint tune` in a process of its own; what it prints goes to a file."""

    def __init__(self, folder, name, *words):
        self.log = folder / f"{name}.txt"
        with self.log.open("wb") as file:
            command = [sys.executable, "-m", "coadjoint", "tune", *words]
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=SMALL)

    def end(self):
        self.process.wait()
        return self.process.returncode, self.log.read_text()


def stop_all(pids, number):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def descendants(pid):
    """The process and all that it started."""
    found = [pid]
    for stat in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = Path(stat).read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found += descendants(int(stat.split("/")[2]))
    return found


def checkpoints(run):
    """The steps of the checkpoints of a run; one that is being written has another name yet."""
    names = [path.name for path in run.glob("checkpoints/step-*")]
    return sorted(int(name[5:]) for name in names if name[5:].isdigit())


def wait_for_checkpoint(worker, run):
    """Wait until a run has a checkpoint of a step that it has taken."""
    while max(checkpoints(run), default=0) == 0:
        assert worker.process.poll() is None, worker.log.read_text()
        time.sleep(0.002)


def test_a_worker_that_dies_loses_nothing(server, here):
    words = [*TASK, "--trials", "5", "--jobs", "1", "--study", "order", "--heartbeat", "1"]
    words += ["--storage", server.url()]
    run = here / "runs" / "order" / "runs" / "trial-0"
    first = Tune(here, "first", *words)
    wait_for_checkpoint(first, run)
    # The machine goes down: the worker, the server of its processes and the run.
    pids = descendants(first.process.pid)
    stop_all(pids, signal.SIGSTOP)
    stop_all(pids, signal.SIGKILL)
    first.process.wait()
    assert not (run / "result.json").exists()
    checkpoint = max(checkpoints(run))
    clock = (run / "clock.jsonl").read_bytes()
    known = json.loads((run / "environment.json").read_text())
    others = [Tune(here, name, *words) for name in ("second", "third", "fourth")]
    ends = [other.end() for other in others]
    assert [code for code, _ in ends] == [0, 0, 0], ends
    told = "".join(text for _, text in ends)
    assert "joining folder runs/order" in told
    assert told.count("training with the best settings") == 1
    # The count is exact, and the trial of the dead worker was completed in its own folder.
    study = optuna.load_study(study_name="order", storage=server.url())
    states = [trial.state.name for trial in study.trials]
    assert states.count("FAIL") == 1
    assert states.count("COMPLETE") + states.count("PRUNED") == 5
    assert len(states) == 6
    assert len(list((here / "runs" / "order" / "runs").iterdir())) == 5
    again = [trial for trial in study.trials if trial.user_attrs.get("folder") == "trial-0"]
    assert [trial.state.name for trial in again] == ["FAIL", "COMPLETE"]
    assert again[0].params == again[1].params
    # It went on from the checkpoint: times before it and the start of the run are the first ones.
    assert json.loads((run / "environment.json").read_text())["started"] == known["started"]
    rows = [json.loads(line) for line in clock.splitlines()]
    kept = [row for row in rows if row["step"] <= checkpoint]
    found = [json.loads(line) for line in (run / "clock.jsonl").read_text().splitlines()]
    assert found[: len(kept)] == kept
    assert checkpoint > 0
    assert json.loads((run / "result.json").read_text())["step"] == 400
    # Nobody wrote the password down.
    if server.auth != "trust":
        for path in here.rglob("*"):
            assert not path.is_file() or PASSWORD.encode() not in path.read_bytes(), path


def test_a_server_that_goes_away_ends_the_worker_and_loses_nothing(server, here):
    words = [*TASK, "--trials", "2", "--jobs", "1", "--study", "away", "--storage", server.url()]
    run = here / "runs" / "away" / "runs" / "trial-0"
    first = Tune(here, "first", *words, "--heartbeat", "1")
    wait_for_checkpoint(first, run)
    server.stop()
    code, text = first.end()
    server.start()
    assert code == 4, text
    last = text.splitlines()[-1]
    assert last.startswith("coadjoint: error: postgresql+psycopg://me:***@127.0.0.1")
    assert "Traceback" not in text
    assert PASSWORD not in text
    code, text = Tune(here, "second", *words, "--heartbeat", "1").end()
    assert code == 0, text
    study = optuna.load_study(study_name="away", storage=server.url())
    states = [trial.state.name for trial in study.trials]
    assert states.count("COMPLETE") + states.count("PRUNED") == 2
    assert len(list((here / "runs" / "away" / "runs").iterdir())) == 2


def test_show_works_from_the_storage_alone(server, here, coadjoint):
    base = ["--study", "shown", "--storage", server.url()]
    code, _, err = coadjoint("tune", *TASK, "--trials", "1", "--jobs", "1", "--quiet", *base)
    assert (code, err) == (0, "")
    shutil.rmtree(here / "runs")
    code, out, err = coadjoint("tune", "--show", *base)
    assert (code, err) == (0, "")
    assert "1 of 1 trials: 1 complete" in out
    assert "best settings:\n  coadjoint train temporal-order" in out
    assert "importance: from 10 complete trials on" in out
    record = optuna.load_study(study_name="shown", storage=server.url())
    (ended,) = record.get_trials()
    for _ in range(9):
        record.add_trial(ended)
    assert "\nimportance: lr 1.00\n" in coadjoint("tune", "--show", *base)[1]
    # A worker that does not see the folder is refused, and so are other settings.
    code, _, err = coadjoint("tune", *TASK, "--trials", "1", "--quiet", *base)
    assert (code, err.count("\n")) == (4, 1)
    assert "belongs to another folder" in err
    assert "another --study" in err
    code, _, err = coadjoint("tune", *TASK, "--clip", "1", *base)
    assert "is a study of other settings or data" in err
    assert not (here / "runs").exists()
    assert PASSWORD not in err


def test_faults_of_the_server_are_one_line(server, here, coadjoint):
    urls = {
        server.url(database="nowhere"): 'database "nowhere" does not exist',
        server.url().replace(str(server.port), "1"): "refused",
    }
    if server.auth != "trust":
        urls[server.url("wrong-Word")] = 'authentication failed for user "me". Check the user'
    for url, message in urls.items():
        words = ["--study", "x", "--storage", url]
        for extra in ([*TASK, "--trials", "1"], ["--show"]):
            code, out, err = coadjoint("tune", *extra, *words)
            assert (code, out, err.count("\n")) == (4, "", 1)
            assert message in err
            assert "?." not in err
            assert PASSWORD not in err
            assert "wrong-Word" not in err
    assert not (here / "runs").exists()
