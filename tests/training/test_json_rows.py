"""Rows that wait to be written count as written, and keep the values they were added with."""

import hashlib
import json

from coadjoint.training import json_rows
from coadjoint.training.json_rows import JsonRows, dumps


def expected_bytes(rows):
    return "".join(dumps(row, separators=(",", ":")) + "\n" for row in rows).encode()


def added(rows, count):
    made = []
    for step in range(count):
        row = {"kind": "train", "step": step, "loss": step / 7, "clipped": True, "rate": None}
        if step % 5 == 4:
            row = {"kind": "probe", "t": [step, [1.5, float("nan")]]}
        if step % 7 == 3:
            row["loss"] = float("inf")
        rows.append(row)
        made.append(json.loads(json.dumps(row)))
        row["loss"] = -1.0  # a logger may change its row
        if "t" in row:
            row["t"].append(-1)
    return made


def test_the_file_holds_all_rows_in_their_order(tmp_path):
    rows = JsonRows(tmp_path / "rows.jsonl")
    made = added(rows, 40)
    text = expected_bytes(made)
    position = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    assert rows.position == position
    assert rows.byte_count == len(text)
    assert b"".join(line + b"\n" for line in rows.lines()) == text
    assert (tmp_path / "rows.jsonl").read_bytes() == text  # `lines` has flushed
    rows.close()
    again = JsonRows(tmp_path / "rows.jsonl", position)
    made += added(again, 3)
    again.close()
    assert (tmp_path / "rows.jsonl").read_bytes() == expected_bytes(made)


def test_every_way_to_read_sees_the_rows_that_wait(tmp_path):
    path = tmp_path / "rows.jsonl"
    for look in (
        lambda rows: rows.byte_count,
        lambda rows: rows.position["bytes"],
        lambda rows: len(rows.read_at(0)),
        lambda rows: sum(map(len, rows.read_blocks())),
        lambda rows: rows.flush() or path.stat().st_size,
        lambda rows: rows.sync() or path.stat().st_size,
        lambda rows: rows.close() or path.stat().st_size,
    ):
        rows = JsonRows(path)
        text = expected_bytes(added(rows, 3))
        assert rows.waiting
        assert look(rows) == len(text)
        rows.file.close()


def test_few_rows_wait(tmp_path):
    rows = JsonRows(tmp_path / "rows.jsonl")
    for step in range(100):
        rows.append({"step": step})
        assert len(rows.waiting) < json_rows.MOST_WAITING
    rows.close()
