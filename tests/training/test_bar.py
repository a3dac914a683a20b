"""The bar of a run, as a terminal of a given width shows it."""

import io
import re
import sys

import pytest
import rich

from coadjoint.training import display, pace

NAME = "a_rather_long_name_of_a_training_file_2024"


CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
    """Time that passes by one second a look."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        self.now += 1.0
        return self.now


def drawn(monkeypatch, width, name=NAME, metric="accuracy", split="valid"):
    """The last line that a bar of a terminal of this width has drawn."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(rich, "_console", None)  # one that was made before has its own width
    clock = Clock()
    monkeypatch.setattr(display, "time", clock)
    monkeypatch.setattr(pace, "time", clock)
    bar = display.make_display(True, name, 10_000, metric)
    assert isinstance(bar, display.Bar)
    assert bar.progress.console.width == width
    for step in (1, 2000):
        bar.step(step, {"loss": 0.123456, "gradient": 1.5})
        probe = {"kind": "probe", "decay": -3.25}
        bar.validation(step, [{"kind": "held-out", "split": split, metric: 0.93214}, probe])
    bar.close()
    text = CONTROL.sub("", terminal.getvalue())
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()][-1]


def test_eighty_columns_have_step_split_metric_and_time_left(monkeypatch):
    line = drawn(monkeypatch, 80)
    assert len(line) <= 80
    assert line.startswith("a_rather_long_name_of_a… ")
    assert " 2000/10000 valid accuracy 0.9321  " in line
    assert line.rstrip().endswith(" left")
    assert "loss" not in line
    assert "…" not in line[24:]


def test_the_rest_is_shown_where_there_is_room(monkeypatch):
    line = drawn(monkeypatch, 120)
    assert len(line) <= 120
    assert "loss 0.1235  valid accuracy 0.9321  decay -3.2" in line
    assert "steps/s" not in line
    wide = drawn(monkeypatch, 200)
    for words in ("loss 0.1235", "|grad| 1.5e+00", "valid accuracy 0.9321", "steps/s", " left"):
        assert words in wide


@pytest.mark.parametrize("width", [60, 70])
def test_on_a_narrow_terminal_bar_and_name_give_way(monkeypatch, width):
    line = drawn(monkeypatch, width, metric="right_0.2", split="test", name="addition")
    assert len(line) <= width
    assert "2000/10000 test accuracy (within 0.2) 0.9321" in line


def test_a_short_name_leaves_room_for_the_loss(monkeypatch):
    line = drawn(monkeypatch, 90, name="xor", split="test", metric="right")
    assert "loss 0.1235  test accuracy 0.9321" in line


def test_a_name_is_no_markup(monkeypatch):
    assert drawn(monkeypatch, 100, name="a[bold]b").startswith("a[bold]b ")


def test_lines_name_the_split(capsys):
    lines = display.Lines("toy", 10, "accuracy")
    lines.validation(0, [{"kind": "held-out", "split": "test", "accuracy": 0.5}])
    assert capsys.readouterr().out == "toy   0/10  test accuracy 0.5\n"
