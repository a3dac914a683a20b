"""A run folder loses nothing, and a resumed run ends in the same bytes.

Damage is found and named, only one process writes at a time, and full disks, signals and kills
leave a folder that can be resumed.
"""

import contextlib
import errno
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch

import coadjoint as co
from coadjoint.cli import program
from coadjoint.errors import StorageError
from coadjoint.training import display, files, json_rows, loop, run_folder, storage, validation
from crash import ended
from work import until

pytestmark = pytest.mark.slow

NAMES = ("model.safetensors", "state.safetensors", "state.json", storage.MANIFEST)
WORDS = shlex.split(
    "train temporal-order --length 10 --hidden 6 --steps 60 --every 20 --tests 20 --confirm 40 "
    "--probes 4 --batch 4 --checkpoint 10"
)


# runs in processes of their own


def command(*words):
    """The command line: exit code and what it printed."""
    return child(*words).wait()


class child:
    """The command line in a process of its own, forked so that nothing is imported twice; what it
    prints comes through a pipe.
    """

    def __init__(self, *words, before=lambda: None):
        self.out, out = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(out)
            return
        code = 99
        try:
            sys.stdout = sys.stderr = os.fdopen(out, "w", buffering=1)
            for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(
                    s, signal.default_int_handler if s == signal.SIGINT else signal.SIG_DFL
                )
            before()
            sys.argv = ["coadjoint", *map(str, words)]
            program.main()
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def wait(self):
        """Exit code and output."""
        with os.fdopen(self.out) as file:
            output = file.read()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), output

    def send(self, number):
        os.kill(self.pid, number)


class Gate:
    """A run in a child waits here after one of its steps, until it is let go: `before=gate`."""

    def __init__(self, step):
        self.step = step
        self.said, self.saying = os.pipe()
        self.waiting, self.opening = os.pipe()

    def __call__(self):
        """In the child. A signal that comes while it waits is handled, said, and waited on."""
        advance, install = loop.Training.advance, signal.signal

        def held(run):
            advance(run)
            if run.step == self.step:
                os.write(self.saying, b"waiting\n")
                os.read(self.waiting, 1)

        def telling(number, handler):
            def handle(n, frame):
                handler(n, frame)
                os.write(self.saying, b"handled\n")

            return install(number, handle if callable(handler) else handler)

        loop.Training.advance, signal.signal = held, telling

    def hear(self, what):
        """Wait until the child says it, or has ended."""
        if self.saying is not None:
            os.close(self.saying)  # the child's end alone is left, so that it closes with the child
            self.saying = None
        assert os.read(self.said, len(what) + 1).decode() == f"{what}\n"

    def open(self):
        os.write(self.opening, b"x")


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("truth") / "run"
    code, output = command(*WORDS, "--out", folder)
    assert code == 0, output
    return folder


@pytest.fixture
def copy(truth, tmp_path):
    """The same run, to be damaged."""
    return Path(shutil.copytree(truth, tmp_path / "run"))


def half(to):
    """A run that was stopped by SIGTERM at step 25, in `to`."""
    gate = Gate(25)
    process = child(*WORDS, "--out", to, before=gate)
    gate.hear("waiting")
    assert (to / "checkpoints" / storage.folder_name(20)).exists()
    process.send(signal.SIGTERM)
    gate.open()
    code, output = process.wait()
    assert code == 75, output
    return to


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    return half(tmp_path_factory.mktemp("stopped") / "run")


@pytest.fixture
def stopped_copy(stopped, tmp_path):
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def resumed_equal(folder, truth, *more):
    code, output = command("resume", folder, *more)
    assert code == 0, output
    same(folder, truth)
    return output


def same(folder, truth):
    """All but the list of checkpoints: a signal adds one of its own."""
    ours, theirs = ended(folder), ended(truth)
    for what, value in theirs.items():
        assert what == "checkpoints" or ours[what] == value, f"{what} differs"


# damage


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint of some thousand bytes, where writing is quick."""
    shm = Path("/dev") / "shm"
    parent = Path(tmp_path_factory.mktemp("small"))
    if os.access(shm, os.W_OK):
        parent = shm / f"coadjoint-{os.getpid()}"
        parent.mkdir()
    net = {"W": torch.arange(6.0).reshape(2, 3), "b_o": torch.tensor([1.5])}
    tensors = {"rng": torch.arange(16, dtype=torch.uint8), "optimiser.0.step": torch.tensor(3.0)}
    state = {"progress": {"best": 0.25}, "seed": 0, "description": {"network": {"cell": "elman"}}}
    (parent / "checkpoints").mkdir()
    for step in (10, 20):
        storage.save(
            parent / "checkpoints",
            storage.Checkpoint(step, net, tensors, state | {"seed": step}),
            {"a": "b"},
        )
    yield parent
    if parent.parent == shm:
        shutil.rmtree(parent)


def refused(path, name):
    with pytest.raises(StorageError) as caught:
        storage.read_contents(path)
    assert str(path) in str(caught.value)
    assert name in str(caught.value), f"{caught.value} does not name {name}"


@pytest.mark.parametrize("name", NAMES)
def test_every_flipped_byte_and_every_truncation_is_refused(small, name):
    path = small / "checkpoints" / storage.folder_name(20)
    content = (path / name).read_bytes()
    assert len(content) > 100
    try:
        with open(path / name, "r+b", buffering=0) as file:
            for i in range(len(content)):
                os.pwrite(file.fileno(), bytes([content[i] ^ (1 << i % 8)]), i)
                refused(path, name)
                os.pwrite(file.fileno(), content[i : i + 1], i)
            storage.read_contents(path)
            for length in range(len(content) - 1, -1, -1):
                os.ftruncate(file.fileno(), length)
                refused(path, name)
    finally:
        (path / name).write_bytes(content)
    assert storage.load(path).step == 20


def test_every_byte_of_a_real_checkpoint_matters(copy):
    """The same for the largest file of a run's own checkpoint, one flip for every 16 bytes."""
    path = storage.list_checkpoints(copy)[-1]
    content = (path / "state.safetensors").read_bytes()
    with open(path / "state.safetensors", "r+b", buffering=0) as file:
        for i in range(0, len(content), 16):
            os.pwrite(file.fileno(), bytes([content[i] ^ 0x10]), i)
            refused(path, "state.safetensors")
            os.pwrite(file.fileno(), content[i : i + 1], i)
    assert storage.load(path).step == 60


def delete(name):
    return lambda last, before: (last / name).unlink()


def from_before(name):
    return lambda last, before: (last / name).write_bytes((before / name).read_bytes())


def longer(name):
    return lambda last, before: (last / name).write_bytes((last / name).read_bytes() * 2)


def folder_instead(name):
    def put(last, before):
        (last / name).unlink()
        (last / name).mkdir()

    return put


def extra(last, before):
    (last / "notes.txt").write_text("hello")


def exchanged(last, before):
    model, state = (
        (last / "model.safetensors").read_bytes(),
        (last / "state.safetensors").read_bytes(),
    )
    (last / "model.safetensors").write_bytes(state)
    (last / "state.safetensors").write_bytes(model)


def listed(last, **content):
    """The checkpoint with other content and the right sums."""
    found = {name: (last / name).read_bytes() for name in NAMES[:3]} | {
        k.replace("_", "."): v for k, v in content.items()
    }
    for name, value in found.items():
        (last / name).write_bytes(value)
    (last / storage.MANIFEST).write_bytes(storage.make_manifest(found))


def unknown_format(last, before):
    state = json.loads((last / "state.json").read_text())
    listed(last, state_json=json.dumps(state | {"format": 99}).encode())


DAMAGE = {
    **{f"{name} deleted": (delete(name), name) for name in NAMES},
    **{f"{name} of the step before": (from_before(name), name) for name in NAMES},
    **{f"{name} doubled": (longer(name), name) for name in NAMES},
    **{f"{name} a folder": (folder_instead(name), name) for name in NAMES},
    "a file too many": (extra, "notes.txt"),
    "two files exchanged": (exchanged, "model.safetensors"),
    "all of the step before": (
        lambda last, before: [from_before(n)(last, before) for n in NAMES],
        "holds step 50",
    ),
    "an unknown format": (unknown_format, "format 99"),
    "a list for a state": (lambda last, before: listed(last, state_json=b"[1]"), "format None"),
    "no JSON": (lambda last, before: listed(last, state_json=b"{"), "JSON"),
    "a page for a model": (
        lambda last, before: listed(last, model_safetensors=b"<html>not found</html>"),
        "model.safetensors is not a file of tensors",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named_and_the_checkpoint_before_is_offered(copy, what):
    damage, named = DAMAGE[what]
    before, last = storage.list_checkpoints(copy)[-2:]
    if named.endswith(storage.MANIFEST) and "before" in what:
        named = "model.safetensors"  # a manifest that is whole, of other files
    damage(last, before)
    with pytest.raises(StorageError) as caught:
        storage.load_latest(copy)
    text = str(caught.value)
    assert named in text
    assert (
        f"{before.name}, is intact. Resume from it with: coadjoint resume {copy} --fallback" in text
    )
    said = []
    assert storage.load_latest(copy, fallback=True, say=said.append).step == int(before.name[5:])
    assert len(said) == 1
    assert f"Set aside as {last.name}.damaged; resuming from {before.name}." in said[0]
    assert not last.exists()
    assert last.with_suffix(".damaged").is_dir()


def test_a_renamed_checkpoint_is_refused(copy):
    last = storage.list_checkpoints(copy)[-1]
    last.rename(last.with_name(storage.folder_name(70)))
    with pytest.raises(StorageError, match="step-00000070 is damaged: it holds step 60"):
        storage.load_latest(copy)


def test_all_damaged_ones_are_set_aside_not_only_the_last(stopped_copy):
    paths = storage.list_checkpoints(stopped_copy)
    shutil.copytree(
        paths[-1], paths[-1].with_name(storage.folder_name(99))
    )  # damaged twice over: a copy under another name
    (paths[-1] / "state.json").unlink()
    said = []
    assert storage.load_latest(stopped_copy, fallback=True, say=said.append).step == int(
        paths[-2].name[5:]
    )
    assert len(said) == 2
    assert storage.list_checkpoints(stopped_copy) == paths[:-1]


def test_a_folder_whose_checkpoints_are_all_damaged_is_refused(copy):
    for path in storage.list_checkpoints(copy):
        (path / "state.json").unlink()
    for fallback in (False, True):
        with pytest.raises(StorageError, match="No older checkpoint is intact"):
            storage.load_latest(copy, fallback)
    assert [p for p in storage.list_checkpoints(copy) if (p / "model.safetensors").exists()], (
        "nothing was moved"
    )


def test_fallback_goes_on_and_ends_in_the_same_bytes(stopped_copy, truth):
    """Also where the best checkpoint is gone: each checkpoint holds the best weights itself."""
    last = storage.list_checkpoints(stopped_copy)[-1]
    (last / "model.safetensors").write_bytes(b"")
    code, output = command("resume", stopped_copy)
    assert code == 4
    assert "--fallback" in output
    output = resumed_equal(stopped_copy, truth, "--fallback")
    assert "Set aside" in output


def test_a_checkpoint_does_not_need_that_of_the_best_step(stopped_copy, truth):
    last = storage.list_checkpoints(stopped_copy)[-1]
    assert (
        json.loads((last / "state.json").read_text())["progress"]["best_step"]
        == 20
        != int(last.name[5:])
    )
    for path in storage.list_checkpoints(stopped_copy)[:-1]:
        shutil.rmtree(path)
    code, output = command("resume", stopped_copy)
    assert code == 0, output
    ours, theirs = ended(stopped_copy), ended(truth)
    assert ours["model"] == theirs["model"]
    assert ours["metrics"] == theirs["metrics"]


def test_half_written_checkpoints_are_not_seen_and_are_cleared_away(stopped_copy, truth):
    last = storage.list_checkpoints(stopped_copy)[-1]
    for suffix in (".tmp", ".old"):
        shutil.copytree(last, last.with_name(storage.folder_name(55) + suffix))
    resumed_equal(stopped_copy, truth)
    assert not list((stopped_copy / "checkpoints").glob("*.*"))


def test_a_checkpoint_is_never_overwritten(small):
    saved = storage.load(small / "checkpoints" / storage.folder_name(10))
    before = storage.read_contents(small / "checkpoints" / storage.folder_name(10))
    with pytest.raises(StorageError, match="step-00000010"):
        storage.save(small / "checkpoints", saved)
    assert storage.read_contents(small / "checkpoints" / storage.folder_name(10)) == before
    assert not list((small / "checkpoints").glob("*.tmp"))


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (99_999_999, 100_000_000, 5):
        (tmp_path / "checkpoints" / storage.folder_name(step)).mkdir(parents=True)
    assert [p.name for p in storage.list_checkpoints(tmp_path)] == [
        "step-00000005",
        "step-99999999",
        "step-100000000",
    ]


# locks


def test_the_second_writer_is_refused_and_told_who_is_first(tmp_path):
    gate = Gate(5)
    process = child(*WORDS, "--out", tmp_path / "run", before=gate)
    gate.hear("waiting")
    with pytest.raises(StorageError, match=rf"in use by pid {process.pid} on \S+ since \d{{4}}-"):
        run_folder.Lock(tmp_path / "run")
    code, output = command("resume", tmp_path / "run")
    assert code == 4
    assert f"pid {process.pid}" in output
    process.send(signal.SIGKILL)
    process.wait()
    lock = run_folder.Lock(tmp_path / "run")  # its owner is dead
    assert f"pid {os.getpid()} " in (tmp_path / "run" / "lock").read_text()
    lock.release()
    run_folder.Lock(tmp_path / "run").release()


def test_a_lock_is_freed_where_its_words_cannot_be_written(tmp_path):
    (tmp_path / "lock").mkdir()
    with pytest.raises(StorageError, match="lock is a folder; expected a regular file"):
        run_folder.Lock(tmp_path)
    (tmp_path / "lock").rmdir()
    run_folder.Lock(tmp_path).release()


def test_a_lock_that_says_nothing_still_holds(tmp_path):
    held = run_folder.Lock(tmp_path)
    (tmp_path / "lock").unlink()
    with pytest.raises(StorageError, match="is in use by another process"):
        run_folder.Lock(tmp_path)
    held.release()


def test_a_run_makes_and_locks_its_folder_once(tmp_path, monkeypatch):
    made, locked, lock, create = [], [], run_folder.Lock, run_folder.create_run_folder
    monkeypatch.setattr(
        run_folder, "create_run_folder", lambda path: made.append(path) or create(path)
    )
    monkeypatch.setattr(run_folder, "Lock", lambda path: locked.append(path) or lock(path))
    monkeypatch.setattr(
        sys, "argv", ["coadjoint", *WORDS, "--out", str(tmp_path / "run"), "--quiet"]
    )
    with pytest.raises(SystemExit) as end:
        program.main()
    assert end.value.code == 0
    assert (made, locked) == ([tmp_path / "run"], [tmp_path / "run"])


def test_of_many_that_begin_at_once_one_wins(tmp_path, thorough):
    for race in range(20 if thorough else 10):
        folder = tmp_path / str(race)
        folder.mkdir()
        go, gone, end = os.pipe(), os.pipe(), os.pipe()
        racers = []
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    os.read(go[0], 1)
                    with contextlib.suppress(StorageError):
                        held = run_folder.Lock(folder)
                        code = 0 if held else 1
                    os.write(gone[1], b"x")
                    os.read(end[0], 1)  # hold it until all have tried
                finally:
                    os._exit(code)
            racers.append(pid)
        os.write(go[1], b"xxx")
        met = b""
        while len(met) < 3:
            met += os.read(gone[0], 3)
        os.write(end[1], b"xxx")
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in racers]
        assert sorted(codes) == [0, 1, 1], f"race {race}"
        for handle in (*go, *gone, *end):
            os.close(handle)


def test_a_new_run_does_not_begin_where_one_is(copy):
    before = ended(copy)
    code, output = command(*WORDS, "--out", copy)
    assert code == 4
    assert f"already holds a run. Resume it with: coadjoint resume {copy}" in output
    assert ended(copy) == before


def test_a_run_of_python_is_continued_there(copy):
    (copy / "config.yaml").unlink(missing_ok=True)
    with pytest.raises(StorageError, match=r"a run, of co\.train\. Continue it there with resume"):
        tiny(copy)
    code, output = command("resume", copy)
    assert code == 4
    assert "is a run of co.train, whose settings are in your program" in output


def test_a_run_that_came_and_went_before_the_lock_is_not_overwritten(tmp_path, truth, monkeypatch):
    folder, lock = tmp_path / "run", run_folder.Lock

    def late(path):
        shutil.rmtree(path)
        shutil.copytree(truth, path)
        return lock(path)

    monkeypatch.setattr(run_folder, "Lock", late)
    with pytest.raises(StorageError, match="already holds a run"):
        tiny(folder)
    same(folder, truth)


@pytest.mark.parametrize(
    "left", ["", "checkpoints", "checkpoints .config.yaml.1.tmp", "checkpoints lock"]
)
def test_what_a_crash_before_the_run_leaves_does_not_stand_in_the_way(tmp_path, truth, left):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in left.split():
        (folder / name).mkdir() if name == "checkpoints" else (folder / name).write_text("")
    code, output = command(*WORDS, "--out", folder)
    assert code == 0, output
    same(folder, truth)


def test_a_resume_that_is_refused_leaves_the_settings_alone(copy):
    """`--steps` is written when the run has been found fit to go on."""
    before = (copy / "config.yaml").read_bytes()
    last = storage.list_checkpoints(copy)[-1]
    rows = (copy / "metrics.jsonl").read_bytes()
    (copy / "metrics.jsonl").write_bytes(rows.replace(b"loss", b"lass", 1))
    code, output = command("resume", copy, "--steps", 70)
    assert (code, "it was changed or cut" in output) == (4, True), output
    assert (copy / "config.yaml").read_bytes() == before
    (copy / "metrics.jsonl").write_bytes(rows)
    state = (last / "state.json").read_bytes()
    (last / "state.json").write_bytes(state + b" ")
    code, output = command("resume", copy, "--steps", 70)
    assert (code, "is damaged" in output) == (4, True), output
    assert (copy / "config.yaml").read_bytes() == before
    (last / "state.json").write_bytes(state)
    code, output = command("resume", copy, "--steps", 70)
    assert code == 0, output
    assert b"steps: 70\n" in (copy / "config.yaml").read_bytes()


def test_rows_are_appended_at_the_end_while_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(json_rows, "BLOCK", 8)
    rows = json_rows.JsonRows(tmp_path / "rows.jsonl")
    rows.append({"step": 1})
    parts = rows.read_blocks()
    assert next(parts) == b'{"step":'
    rows.append({"step": 2})
    assert b"".join(parts) == b'1}\n{"step":2}\n'
    rows.close()
    assert (tmp_path / "rows.jsonl").read_text() == '{"step":1}\n{"step":2}\n'


@pytest.mark.parametrize(
    "gone", [(), ("metrics.jsonl",), ("metrics.jsonl", "environment.json", "clock.jsonl")]
)
def test_a_run_killed_before_its_first_checkpoint_begins_again(copy, truth, gone):
    shutil.rmtree(copy / "checkpoints")
    (copy / "checkpoints").mkdir()
    for name in (*gone, "result.json", "model.safetensors"):
        (copy / name).unlink()
    assert "starting again at step 0" in resumed_equal(copy, truth)


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        code, output = command("resume", folder)
        assert code == 4
        assert "run folder" in output or "config.yaml" in output
        with pytest.raises(StorageError, match="holds no run"):
            tiny(folder, resume=True)


# disks


def limit(size):
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("size", [0, 40, 700, 3000, 6000, 9000])
def test_a_file_that_cannot_grow_stops_the_run_and_nothing_is_lost(tmp_path, truth, size):
    """`size` bytes at most in a file: config.yaml, environment.json, metrics.jsonl, a checkpoint,
    the model do not fit, in turn.
    """
    folder = tmp_path / "run"
    code, output = child(*WORDS, "--out", folder, before=limit(size)).wait()
    assert code == 4, output
    assert "File too large" in output
    assert all(storage.is_intact(p) for p in storage.list_checkpoints(folder))
    assert not list((folder / "checkpoints").glob("*.tmp"))
    if (folder / "config.yaml").exists():
        resumed_equal(folder, truth)
    else:
        code, output = command(*WORDS, "--out", folder)
        assert code == 0, output
        same(folder, truth)


@pytest.mark.parametrize("kilobytes", [48, 80, 112])
def test_a_full_disk_stops_the_run_and_room_lets_it_go_on(tmp_path, truth, kilobytes):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(disk)]
    if (
        os.geteuid()
        or shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True).returncode
    ):
        pytest.skip("no right to mount a small disk")
    try:

        def enough():
            return setattr(shutil, "disk_usage", lambda path: type("", (), {"free": 2**40}))

        code, output = child(*WORDS, "--out", disk / "run", before=enough).wait()
        assert code == 4
        assert "No space left on device" in output
        folder = Path(shutil.copytree(disk / "run", tmp_path / "run"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert all(storage.is_intact(p) for p in storage.list_checkpoints(folder))
    resumed_equal(folder, truth)


def test_too_little_room_is_said_before_anything_is_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("", (), {"free": 1000}))
    with pytest.raises(
        StorageError, match=r"has 1,000 bytes free and this run needs about 1,0\d\d,\d\d\d"
    ):
        tiny(tmp_path / "run")


def tiny(folder, steps=12, **more):
    """A run of a second's fraction, by the library."""
    torch.manual_seed(0)
    net = co.Network("elman", inputs=6, hidden=3, outputs=4, output="softmax")
    options = {"batch": 2, "every": 4, "tests": 5, "confirm": 5, "probes": 2, "checkpoint": 3}
    return co.train(net, co.tasks.TemporalOrder(10), steps=steps, folder=folder, **(options | more))


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("tiny") / "run").folder


def fails(monkeypatch, name, number, after=0, when=lambda args: True):
    """Let os.name fail with an errno, from its call number `after` + 1 on."""
    call, met = getattr(os, name), [0]

    def failing(*args, **options):
        if when(args):
            met[0] += 1
            if met[0] > after:
                raise OSError(number, os.strerror(number))
        return call(*args, **options)

    monkeypatch.setattr(os, name, failing)


def checkpointed(args):
    return "step-" in str(args[0]) and "checkpoints" in str(args[0])


@pytest.mark.parametrize(
    "number", [errno.EXDEV, errno.ESTALE, errno.EIO, errno.ENOSPC, errno.EROFS]
)
@pytest.mark.parametrize("name", ["rename", "fsync", "mkdir"])
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.sampled(3)
def test_a_call_that_fails_stops_the_run_and_what_was_there_stays(
    tmp_path, monkeypatch, tiny_run, name, number, after
):
    with monkeypatch.context() as patch:
        fails(
            patch,
            name,
            number,
            after if name != "fsync" else 8 * after,
            checkpointed if name != "fsync" else lambda _: True,
        )
        with pytest.raises(StorageError, match=re.escape(os.strerror(number))):
            tiny(tmp_path / "run")
    paths = storage.list_checkpoints(tmp_path / "run")
    assert bool(paths) == bool(after)
    assert all(storage.is_intact(p) for p in paths)
    tiny(tmp_path / "run", resume=True)
    assert ended(tmp_path / "run") == ended(tiny_run)


def test_places_that_cannot_be_written_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        code, output = command(*WORDS, "--out", place)
        assert code == 4, output
        assert str(place) in output
        assert output.count("\n") <= 1, output


def test_a_folder_removed_while_the_run_goes_on_stops_it(tmp_path):
    gate = Gate(15)
    process = child(*WORDS, "--out", tmp_path / "run", before=gate)
    gate.hear("waiting")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    gate.open()
    code, output = process.wait()
    assert code == 4
    # between two saves, or in the middle of one
    assert "was deleted or moved during the run" in output or "does not exist" in output
    assert not (tmp_path / "run").exists()
    assert all(storage.is_intact(p) for p in storage.list_checkpoints(tmp_path / "elsewhere"))


def test_a_run_folder_may_be_behind_a_link(tmp_path, truth):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    half(tmp_path / "link")
    resumed_equal(tmp_path / "link", truth)
    same(tmp_path / "real", truth)
    assert (tmp_path / "link").is_symlink()


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    files.replace(path, "old")
    for error in (RuntimeError, KeyboardInterrupt):
        with contextlib.suppress(error), files.replacing(path) as file:
            file.write(b"new")
            raise error
        assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
        assert path.read_text() == "old"
    files.replace(path, b"new")
    assert path.read_text() == "new"


def test_new_files_are_not_written_through_links(tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="exists"):
        files.write_new(tmp_path / "link", b"theirs")
    files.replace(tmp_path / "link", b"theirs")
    assert (tmp_path / "target").read_text() == "mine"


# signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_run_and_it_goes_on_in_the_same_bits(tmp_path, truth, number):
    folder, gate = tmp_path / "a run", Gate(15)
    process = child(*WORDS, "--out", folder, before=gate)
    gate.hear("waiting")
    process.send(number)
    gate.open()
    code, output = process.wait()
    assert code == 75
    found = re.search(
        r"(Interrupted.*); saved at step (\d+)\. Resume with: coadjoint (resume '.*')\n$", output
    )
    assert found, output
    name = signal.Signals(number).name
    assert found[1] == ("Interrupted" if name == "SIGINT" else f"Interrupted by {name}")
    step = int(found[2])
    assert step == 15
    assert storage.list_checkpoints(folder)[-1].name == storage.folder_name(step)
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["step"]) == ("interrupted", step)
    assert found[3] == f"resume '{folder}'"
    resumed_equal(folder, truth)


def test_two_interrupts_stop_at_once(tmp_path, truth):
    folder, gate = tmp_path / "run", Gate(5)
    process = child(*WORDS, "--out", folder, before=gate)
    gate.hear("waiting")
    process.send(signal.SIGINT)
    gate.hear("handled")
    process.send(signal.SIGINT)  # the gate stays shut: the run ends inside its step
    code, output = process.wait()
    assert code == 75
    assert "Interrupted twice" in output
    assert f"Resume with: coadjoint resume {folder}" in output
    assert not storage.list_checkpoints(folder)
    resumed_equal(folder, truth)


def test_signals_that_were_ignored_stay_ignored(tmp_path, truth):
    folder, gate = tmp_path / "run", Gate(15)

    def nohup():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        gate()

    process = child(*WORDS, "--out", folder, before=nohup)
    gate.hear("waiting")
    process.send(signal.SIGHUP)
    gate.open()
    code, output = process.wait()
    assert code == 0, output
    same(folder, truth)


def test_handlers_are_put_back(tmp_path):
    def handlers():
        return [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    before = handlers()
    tiny(None)
    assert handlers() == before


def test_a_signal_stops_a_real_process(tmp_path, truth):
    """The installed command itself, not a fork of this one."""
    folder = tmp_path / "run"
    words = [w if w != "60" else "100000" for w in WORDS]
    process = subprocess.Popen(
        [sys.executable, "-m", "coadjoint", *words, "--out", folder],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    until(lambda: storage.list_checkpoints(folder))
    process.terminate()
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 75
    assert f"coadjoint resume {folder}" in errors


# going on


def test_a_finished_run_is_left_as_it_is(copy):
    def stamps():
        return {p: p.stat().st_mtime_ns for p in copy.rglob("*") if p.is_file()}

    before = stamps()
    code, output = command("resume", copy)
    assert code == 0
    assert "has already ended (finished)" in output
    assert re.search(r"--steps N, with N above \d+$", output.strip())
    assert stamps() == before


@pytest.mark.parametrize("gone", ["result.json", "model.safetensors"])
def test_a_run_killed_at_its_very_end_writes_what_is_missing(copy, truth, gone):
    (copy / gone).unlink()
    before = {p: p.stat().st_mtime_ns for p in copy.glob("checkpoints/*/*")}
    resumed_equal(copy, truth)
    assert {p: p.stat().st_mtime_ns for p in copy.glob("checkpoints/*/*")} == before, (
        "nothing is saved twice"
    )


def test_a_longer_run_is_the_run_that_was_longer_from_the_start(copy, tmp_path):
    words = [w if w != "60" else "80" for w in WORDS]
    code, output = command(*words, "--out", tmp_path / "longer")
    assert code == 0, output
    code, output = command("resume", copy, "--steps", "80")
    assert code == 0, output
    ours, theirs = ended(copy), ended(tmp_path / "longer")
    assert ours == theirs


def test_a_shorter_one_ends_where_it_is(stopped_copy):
    rows = storage.load(storage.list_checkpoints(stopped_copy)[-1])
    code, output = command("resume", stopped_copy, "--steps", "15")
    assert code == 0, output
    result = json.loads((stopped_copy / "result.json").read_text())
    assert (result["status"], result["step"]) == ("finished", rows.step)
    assert len((stopped_copy / "metrics.jsonl").read_bytes()) == rows.state["metrics"]["bytes"]


def edited(content):
    return content.replace(b'"step":1,', b'"step":2,', 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (edited, "it was changed or cut"),
        (lambda content: content[:500], "it was changed or cut"),
        (lambda content: b"", "it was changed or cut"),
        (lambda content: b" " + content, "it was changed or cut"),
        (None, "is missing: the run cannot be resumed"),
    ],
)
def test_rows_that_are_not_those_of_the_run_are_refused(stopped_copy, change, said):
    path = stopped_copy / "metrics.jsonl"
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    left = path.read_bytes() if path.exists() else None
    code, output = command("resume", stopped_copy)
    assert code == 4
    assert said in output
    assert str(path) in output
    assert (path.read_bytes() if path.exists() else None) == left


def test_rows_beyond_the_checkpoint_are_computed_again(stopped_copy, truth):
    with open(stopped_copy / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind":"train","step":99,"loss":0.0}\n{"kind":"tra')
    resumed_equal(stopped_copy, truth)


def test_changed_data_is_refused_by_name(tmp_path):
    data = tmp_path / "series.csv"
    lines = [f"{s},{t},{(s * t) % 5},{s % 2}" for s in range(20) for t in range(5)]
    data.write_text("\n".join(["id,time,x,y", *lines]) + "\n")
    words = (
        f"train --train {data} --id id --time time --target y --kind classify --hidden 4 "
        "--batch 4 --checkpoint 2 --steps 8"
    ).split()
    code, output = command(*words, "--out", tmp_path / "run")
    assert code == 0, output
    code, output = command("resume", tmp_path / "run", "--steps", "12")
    assert code == 0, output
    data.write_text(data.read_text().replace("19,4,1,1", "19,4,2,1"))
    code, output = command("resume", tmp_path / "run", "--steps", "16")
    assert code == 4
    assert "the file 'series.csv' (SHA-256 " in output
    assert "has changed since the run began" in output


def test_another_network_is_refused_by_its_first_difference(tmp_path):
    tiny(tmp_path / "run")
    net = co.Network("elman", inputs=6, hidden=5, outputs=4, output="softmax")
    with pytest.raises(
        StorageError,
        match=(
            r"belongs to another network: its 'R' is float32 \[3, 6\], but this network's is "
            r"float32 \[5, 6\]"
        ),
    ):
        co.train(net, co.tasks.TemporalOrder(10), steps=20, folder=tmp_path / "run", resume=True)
    wide = co.Network("elman", inputs=6, hidden=3, outputs=4, output="softmax", dtype=torch.float64)
    with pytest.raises(StorageError, match=r"float32 .* float64"):
        co.train(wide, co.tasks.TemporalOrder(10), steps=20, folder=tmp_path / "run", resume=True)


def test_a_changed_config_is_refused(stopped_copy):
    path = stopped_copy / "config.yaml"
    path.write_text(path.read_text().replace("hidden: 6", "hidden: 7"))
    code, output = command("resume", stopped_copy)
    assert code == 4
    assert "network.hidden has changed since the run began (6 then, 7 now)" in output


def test_another_number_of_threads_is_said(tmp_path):
    class Said(display.Silent):
        def __init__(self):
            self.lines = []

        def say(self, text):
            self.lines.append(text)

    tiny(tmp_path / "run")
    said, before = Said(), torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        tiny(tmp_path / "run", steps=14, resume=True, display=said)
    finally:
        torch.set_num_threads(before)
    assert said.lines[:-1] == [
        f"threads was {before} and is now {before + 1}: the run continues, but the last bits of "
        "its results may differ."
    ]
    assert said.lines[-1].endswith("at step 12 of 14.")


def test_what_json_lacks_survives_a_resume(tmp_path, monkeypatch):
    """A held-out metric of -inf or NaN is not the best one, before and after a resume."""
    look = validation.evaluate
    values = {4: float("nan"), 8: float("-inf"), 12: 0.25, 16: float("nan"), 18: float("nan")}

    def strange(net, task, split, seed=0, draw=0, n=1000, *more):
        found = look(net, task, split, seed, draw, n, *more)
        return found | ({"right": values[draw], "loss": float("inf")} if draw in values else {})

    monkeypatch.setattr(validation, "evaluate", strange)
    plateau = co.optimisers.adam(1e-2, schedule=co.optimisers.plateau(patience=2))
    options = {"optimiser": plateau, "steps": 18}
    whole = tiny(tmp_path / "whole", **options)
    assert whole.best_step == 12
    for end in (3, 6, 9, 13, 17):
        folder = tmp_path / str(end)
        stop_at(folder, end, options)
        tiny(folder, resume=True, **options)
        same(folder, tmp_path / "whole")


def stop_at(folder, end, options):
    """A run that gets SIGTERM in step `end`."""

    class Stop(display.Silent):
        def step(self, step, row):
            if step == end:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(co.Interrupted, match=f"saved at step {end}"):
        tiny(folder, display=Stop(), **options)


RECIPES = {
    "adam": {},
    "nesterov, penalised": {
        "optimiser": co.optimisers.nesterov(1e-2, schedule=co.optimisers.cosine(warmup=3)),
        "gradient": co.Penalised("log-ratio", co.penalties.exponential(2.0, 0.9)),
        "clip": 0.5,
    },
    "rmsprop, accumulated": {"optimiser": co.optimisers.rmsprop(1e-3), "accumulate": 3},
    "nadam": {"optimiser": co.optimisers.optimiser("nadam", 1e-3)},
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("end", range(1, 12))
@pytest.mark.sampled(4)
def test_every_step_is_a_place_to_stop_at(tmp_path_factory, recipe, end):
    options = RECIPES[recipe]
    whole = tmp_path_factory.getbasetemp() / f"whole-{recipe}"
    if not whole.exists():
        tiny(whole, **options)
    folder = tmp_path_factory.mktemp("run")
    shutil.rmtree(folder)
    stop_at(folder, end, options)
    tiny(folder, resume=True, **options)
    same(folder, whole)


def test_pruning_keeps_the_last_ones_and_the_best(tmp_path):
    folder = tmp_path / "run"
    for keep, expected in ((2, [3, 9, 12]), (1, [3, 12])):
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "checkpoints").mkdir(parents=True)
        for step in (3, 6, 9, 12):
            storage.save(folder / "checkpoints", storage.Checkpoint(step, {}, {}, {}))
        storage.prune(folder, keep, best=3)
        assert [int(p.name[5:]) for p in storage.list_checkpoints(folder)] == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("nan"), '"NaN"'),
        (float("inf"), '"Infinity"'),
        (-float("inf"), '"-Infinity"'),
        ({1: (True, None, 2)}, '{"1": [true, null, 2]}'),
        (torch.tensor([1.0, float("nan")]), '[1.0, "NaN"]'),
        (Path("a"), '"a"'),
    ],
)
def test_json_can_hold_everything(value, text):
    assert json_rows.dumps(value) == text
    json.loads(text, parse_constant=lambda name: pytest.fail(name))


def test_the_environment_says_where_a_run_was_made(truth):
    found = json.loads((truth / "environment.json").read_text())
    assert found["torch"] == torch.__version__
    assert found["threads"] == 1
    assert found["seed"] == 0
    assert found["command"].startswith("coadjoint train temporal-order")


# files that go while a run goes on


class After(display.Silent):
    """Do something after a step."""

    def __init__(self, step, what):
        self.at, self.what = step, what

    def step(self, step, row):
        if step == self.at:
            self.what()


def swapped(path):
    """Another file of the same content, as an editor leaves it."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


ROWS = ("metrics.jsonl", "clock.jsonl")


@pytest.mark.parametrize("step", [1, 5, 12])
@pytest.mark.parametrize("names", [ROWS[:1], ROWS[1:], ROWS])
def test_rows_deleted_while_the_run_goes_on_are_noticed(tmp_path, tiny_run, names, step):
    """The run ends at its next save; its rows are put back, and so it can go on."""
    folder = tmp_path / "run"

    def delete():
        return [(folder / name).unlink() for name in names]

    with pytest.raises(StorageError) as caught:
        tiny(folder, display=After(step, delete))
    text = str(caught.value)
    assert "\n" not in text
    for name in names:
        assert f"{name} was deleted during the run; its rows were put back" in text
    assert f"Resume from the last checkpoint: coadjoint resume {folder}" in text
    kept = [int(p.name[5:]) for p in storage.list_checkpoints(folder) if storage.is_intact(p)]
    assert max(kept, default=0) == {1: 0, 5: 4, 12: 9}[step], (
        "the last one before, of every third step and of the best"
    )
    assert not (folder / "result.json").exists()
    tiny(folder, resume=True)
    assert ended(folder) == ended(tiny_run)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("put", [swapped, lambda path: (path.unlink(), path.mkdir())])
def test_rows_replaced_while_the_run_goes_on_are_noticed(tmp_path, tiny_run, name, put):
    """What stands there now is left alone; the rows are beside it."""
    folder, path = tmp_path / "run", tmp_path / "run" / name
    with pytest.raises(StorageError) as caught:
        tiny(folder, display=After(5, lambda: put(path)))
    kept = folder / f"{name}.kept-1"
    assert f"{name} was replaced during the run; its rows are in {kept.name}" in str(caught.value)
    assert f"mv {kept} {path}" in str(caught.value)
    assert path.exists()
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    kept.rename(path)
    tiny(folder, resume=True)
    assert ended(folder) == ended(tiny_run)


@pytest.mark.parametrize("name", ["lock", ".lock"])
@pytest.mark.parametrize("put", [Path.unlink, swapped])
def test_a_lock_that_goes_while_the_run_goes_on_is_noticed(tmp_path, tiny_run, put, name):
    folder = tmp_path / "run"
    with pytest.raises(
        StorageError,
        match=r"lock was deleted or replaced during the run: another process may",
    ):
        tiny(folder, display=After(5, lambda: put(folder / name)))
    assert storage.list_checkpoints(folder)[-1].name == storage.folder_name(4)
    tiny(folder, resume=True)
    assert ended(folder) == ended(tiny_run)


@pytest.mark.parametrize("what", ["run", "run/checkpoints"])
def test_a_folder_that_goes_while_the_run_goes_on_is_noticed(tmp_path, tiny_run, what):
    folder, elsewhere = tmp_path / what, tmp_path / "elsewhere"
    with pytest.raises(
        StorageError, match=r"was deleted or moved during the run.* Put it back and resume"
    ):
        tiny(tmp_path / "run", display=After(5, lambda: folder.rename(elsewhere)))
    assert not folder.exists()
    elsewhere.rename(folder)
    tiny(tmp_path / "run", resume=True)
    assert ended(tmp_path / "run") == ended(tiny_run)


def test_a_folder_that_is_moved_and_linked_is_the_same(tmp_path, tiny_run):
    def move():
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        (tmp_path / "run").symlink_to(tmp_path / "elsewhere")

    tiny(tmp_path / "run", display=After(5, move))
    assert ended(tmp_path / "run") == ended(tiny_run)


def test_the_command_line_says_so_in_one_line(tmp_path):
    folder = tmp_path / "run"
    gate = Gate(5)
    process = child(*WORDS, "--out", folder, "--quiet", before=gate)
    gate.hear("waiting")
    (folder / "metrics.jsonl").unlink()
    gate.open()
    code, output = process.wait()
    assert code == 4, output
    assert output.count("\n") == 1
    assert output.startswith(
        f"coadjoint: error: {folder}: metrics.jsonl was deleted during the run"
    )
    code, output = command("resume", folder)
    assert code == 0, output


def test_long_rows_are_not_held_in_memory_to_check_them(tmp_path, monkeypatch):
    """A file of many parts; lines that lie across them."""
    monkeypatch.setattr(json_rows, "BLOCK", 64)
    rows = json_rows.JsonRows(tmp_path / "rows")
    told = [{"step": k, "text": "x" * (7 * k % 150)} for k in range(40)]
    for row in told[:30]:
        rows.append(row)
    at = rows.position
    rows.append({"step": "lost"})
    rows.close()
    rows = json_rows.JsonRows(tmp_path / "rows", at)
    for row in told[30:]:
        rows.append(row)
    assert [json.loads(line) for line in rows.lines()] == told
    assert b"".join(rows.read_blocks()) == (tmp_path / "rows").read_bytes()
    where = json_rows.StoredRows(tmp_path / "rows", rows.byte_count)
    rows.append({"step": "later"})
    rows.close()
    assert list(where) == told
    with pytest.raises(StorageError, match="changed or cut"):
        json_rows.JsonRows(tmp_path / "rows", {**at, "bytes": at["bytes"] + 1})
