"""A command survives any change to the files of a stranger's run folder.

After seeded mutations it ends with one of its exit codes, without a traceback, and touches nothing
outside the folder.
"""

import contextlib
import copy
import functools
import hashlib
import json
import os
import random
import shutil
import struct
from pathlib import Path

import jinja2
import pytest
import run_folders
import typer.main
from run_folders import CHECKPOINT, LAST, call, vouched

from coadjoint.cli import pool, program
from coadjoint.diagnostics import examination
from coadjoint.errors import MissingError
from coadjoint.training import learning, loop, signals, storage

pytestmark = pytest.mark.slow

CASES, THOROUGH, PARTS = 150, 2000, 5
CODES = {0, 2, 3, 4, 5, 7, 75}  # all but 1, "a fault of coadjoint"
STEPS = 2  # that a run which goes on may take: some mutations ask for very many

# folder, the files to harm, and the commands that read them; F stands for the folder
TARGETS = [
    ("stopped", [f"{LAST}/{name}" for name in CHECKPOINT],
        ["resume F -q", "resume F -q --fallback", "diagnose F --only decay -q"]),
    ("stopped", ["config.yaml", "result.json", "metrics.jsonl", "clock.jsonl", "environment.json"],
        ["resume F -q", "report F"]),
    ("done", ["model.safetensors"],
        ["predict F data.csv --out F/p.csv", "diagnose F --only decay -q", "report F"]),
    ("done", ["result.json", "config.yaml"],
        ["resume F -q", "compare F --out F-compared -q", "report F"]),
    ("stream", [f"{LAST}/{name}" for name in CHECKPOINT], ["resume F -q"]),
    ("stream", ["online.json", "config.yaml", "result.json"], ["resume F -q", "report F"]),
    ("stream", ["model.safetensors"], ["predict F stream.csv --out F/p.csv"]),
    ("compared", ["compare.json"], ["resume F -q", "report F", "report F --markdown F/table.md"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return run_folders.make(tmp_path_factory.mktemp("real"))


class NoWorker:
    """In place of the processes of a comparison: a run that never starts."""

    has_ended = True
    complaint = "not run"

    def __init__(self, words): ...
    def close(self): ...


@pytest.fixture
def quick(monkeypatch):
    """The command line, built once, whose runs take a few steps, whose comparisons start no
    processes, and whose pages have a template that is compiled once.
    """
    command = typer.main.get_command(program.app)
    monkeypatch.setattr(program, "app", command)
    monkeypatch.setattr(pool, "Worker", NoWorker)
    monkeypatch.setattr(
        jinja2.Environment, "from_string", functools.cache(jinja2.Environment.from_string)
    )
    monkeypatch.setattr(
        jinja2.Environment, "__eq__", lambda one, other: True
    )  # all of them have the same options
    monkeypatch.setattr(jinja2.Environment, "__hash__", lambda one: 0)
    monkeypatch.setattr(examination, "plot", no_picture)
    for owner, name in ((loop.Training, "advance"), (learning.Learning, "take_step")):
        stop_soon(monkeypatch, owner, name)


def no_picture(chart):
    raise MissingError("pictures take long")


def stop_soon(monkeypatch, owner, name):
    step, taken = getattr(owner, name), {}

    def limited(run, *arguments):
        taken[id(run)] = taken.get(id(run), 0) + 1
        if taken[id(run)] > STEPS:
            taken.clear()
            raise signals.Interrupted("enough")
        return step(run, *arguments)

    monkeypatch.setattr(owner, name, limited)


# mutations

VALUES = [
    None, True, False, -1, 0, 1, 2, 3, 7, 10**18, 2**63 - 1, -0.5, 1.5, 1e308, 5e-324, "", "x",
    "NaN", "Infinity", "finished",
    "success", "failed", "elman", "lstm", "../../outside", "\u202e", "é" * 10, "a" * 5000, [], {},
    [[]], [1, 2], ["x", "x"],
    {"x": 1}, {"bytes": 0, "sha256": "0" * 64}, {"t": 1, "mean": [0.0], "M": [-1.0]},
]  # fmt: skip


def any_value(draw):
    return copy.deepcopy(draw.choice(VALUES))


def some_bytes(draw, content):
    """A few bytes changed, cut out, put in, repeated or moved; or the file cut off."""
    content = bytearray(content)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        at, many = draw.randrange(len(content) + 1), draw.choice([1, 1, 2, 8, 100])
        way = draw.randrange(6)
        if way == 0 and at < len(content):
            content[at] ^= 1 << draw.randrange(8)
        elif way == 1:
            del content[at : at + many]
        elif way == 2:
            content[at:at] = draw.randbytes(many)
        elif way == 3:
            content[at:at] = content[at : at + many]
        elif way == 4:
            content[at : at + many] = draw.choice(
                [b"9" * many, b"\0" * many, b"-1", b"null", b"[[", b'"']
            )
        else:
            del content[at:]
    return bytes(content)


def places(value, at=()):
    """Every place in a JSON value."""
    yield at
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from places(inner, (*at, key))


def some_json(draw, value):
    """A value of the same shape in which a few entries are others, missing, or those of another
    place.
    """
    value = copy.deepcopy(value)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        every = [at for at in places(value) if at]
        if not every:
            return any_value(draw)
        *way, key = draw.choice(every)
        inner = value
        for part in way:
            inner = inner[part]
        change = draw.randrange(4)
        if change == 0:
            del inner[key]
        elif change == 1:
            *other, last = draw.choice(every)
            found = value
            with contextlib.suppress(KeyError, IndexError, TypeError):
                for part in (*other, last):
                    found = found[part]
                inner[key] = copy.deepcopy(found)
        else:
            inner[key] = any_value(draw)
        if isinstance(inner, dict) and draw.random() < 0.1:
            inner[draw.choice(["x", "step", "status", ""])] = any_value(draw)
    return value


def some_tensors(draw, content):
    """The header of a file of tensors changed, or the numbers in it; its metadata too, where it has
    them.
    """
    length = struct.unpack("<Q", content[:8])[0]
    header, rest = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    about = header.get("__metadata__", {}).get("coadjoint")
    way = draw.randrange(5)
    names = [name for name in header if name != "__metadata__"]
    if way == 0 and about is not None:
        told = json.loads(about)
        told.pop("sha256", None)
        header["__metadata__"]["coadjoint"] = json.dumps(some_json(draw, told))
    elif way == 1:
        header = some_json(draw, header)
    elif way == 2:  # a tensor less, or under another name
        gone = header.pop(draw.choice(names))
        if draw.random() < 0.5:
            header[draw.choice(["x", "rng", "optimiser.0.step", "best.W", "learner.x"])] = gone
        else:
            begin, end = gone["data_offsets"]
            del rest[begin:end]
            for entry in header.values():
                if "data_offsets" in entry and entry["data_offsets"][0] >= end:
                    entry["data_offsets"] = [o - (end - begin) for o in entry["data_offsets"]]
    elif way == 3:  # other numbers
        begin, end = header[draw.choice(names)]["data_offsets"]
        fill = draw.choice([b"\xff", b"\x00", b"\x7f", draw.randbytes(1), draw.randbytes(8)])
        rest[begin:end] = (fill * (end - begin))[: end - begin]
    else:  # another type or shape of as many bytes
        entry = header[draw.choice(names)]
        count = max(1, (entry["data_offsets"][1] - entry["data_offsets"][0]) // 4)
        entry["dtype"], entry["shape"] = draw.choice(
            [("F32", [count]), ("I32", [1, count]), ("U8", [4 * count])]
        )
    if way != 0 and isinstance(header, dict) and draw.random() < 0.7:
        header.pop("__metadata__", None) if about is None else unsealed(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(rest)


def unsealed(header):
    """A model without its sum, as earlier versions wrote them: what else is wrong with it is not
    hidden by the sum.
    """
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict) and isinstance(metadata.get("coadjoint"), str):
        with contextlib.suppress(ValueError, AttributeError):
            told = json.loads(metadata["coadjoint"])
            told.pop("sha256", None)
            metadata["coadjoint"] = json.dumps(told)


def mutated(draw, path):
    content = path.read_bytes()
    structured = draw.random() < 0.7
    if structured and path.suffix == ".json":
        return json.dumps(some_json(draw, json.loads(content)), allow_nan=True).encode()
    if structured and path.suffix == ".safetensors":
        return some_tensors(draw, content)
    if structured and path.suffix == ".jsonl":
        lines = [json.loads(line) for line in content.splitlines()]
        changed = some_json(draw, lines)
        rows = changed if isinstance(changed, list) else [changed]
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    return some_bytes(draw, content)


def instead(draw, path, outside):
    """Something that is no regular file."""
    path.unlink()
    way = draw.randrange(4)
    if way == 0:
        path.mkdir()
    elif way == 1:
        os.mkfifo(path)
    elif way == 2:
        path.symlink_to(outside / "precious")
    else:
        path.symlink_to(outside / "missing")


def harmed(draw, path, outside):
    """Harm a file; where others vouch for it by sums, they mostly vouch for the new one."""
    if path.parent.parent.name != "checkpoints" and draw.random() < 0.05:
        return instead(draw, path, outside)
    path.write_bytes(mutated(draw, path))
    vouch = draw.random() < 0.85
    last = (
        path.parent
        if path.name in CHECKPOINT and path.name != storage.MANIFEST
        else path.parent / LAST
    )
    if path.name in ("metrics.jsonl", "clock.jsonl") and vouch:
        state = json.loads((last / "state.json").read_text())
        content = path.read_bytes()
        state[path.stem] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (last / "state.json").write_text(json.dumps(state))
    if vouch and (last / storage.MANIFEST).exists() and path.name != storage.MANIFEST:
        vouched(last)
    return None


# the cases


def outline(folder):
    """What is in a folder: names, kinds and bytes."""
    found = {}
    for path in sorted(folder.rglob("*")):
        found[str(path.relative_to(folder))] = path.read_bytes() if path.is_file() else None
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_commands_survive_whatever_the_files_of_a_folder_hold(
    part, thorough, real, quick, tmp_path, monkeypatch
):
    count = THOROUGH if thorough else CASES
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "precious").write_text('{"status": "finished"}\n' * 3)
    for name in ("data.csv", "stream.csv"):
        shutil.copy(real / name, inside / name)
    monkeypatch.chdir(inside)
    beside = {**outline(outside), **outline(inside)}
    codes = {}
    for case in range(part, count, PARTS):
        draw = random.Random(f"folder {case}")
        source, files, commands = TARGETS[draw.randrange(len(TARGETS))]
        folder, name, words = Path("F"), draw.choice(files), draw.choice(commands).split()
        shutil.copytree(real / source, folder, symlinks=True)
        if source == "compared":
            for run in ("done", "stopped"):
                shutil.copytree(real / run, inside / run)
        harmed(draw, folder / name, outside)
        code, err = call(*words)
        said = f"case {case}: {source}/{name}, {' '.join(words)}: exit {code}\n{err}"
        assert code in CODES, said
        assert "Traceback" not in err, said
        assert "a fault of coadjoint" not in err, said
        codes[code] = codes.get(code, 0) + 1
        for made in ("F", "F-compared", "done", "stopped"):
            shutil.rmtree(made, ignore_errors=True)
        assert {**outline(outside), **outline(inside)} == beside, said
    assert codes.get(4, 0) > count / PARTS / 4, f"few cases were refused: {codes}"
    assert codes.get(0, 0) + codes.get(75, 0) > count / PARTS / 20, (
        f"few cases were let through: {codes}"
    )
