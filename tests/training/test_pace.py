"""The pace of a run: steps in a second, and the time that is left, by a clock of the test."""

import itertools

import pytest
import torch

import coadjoint as co
from coadjoint.training import display, pace
from coadjoint.training.report.page_parts import configuration_rows


class Clock:
    """A clock that stands until it is told how many seconds pass."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pace, "time", clock)
    return clock


def steps(shown, clock, first, last, seconds):
    """Let steps pass that take some seconds each."""
    for step in range(first, last + 1):
        clock.now += seconds
        shown.step(step, {"loss": 1.0, "gradient": 1.0})


def validation(shown, clock, step, seconds):
    clock.now += seconds
    shown.validation(step, [])


def test_just_after_a_resume_the_rate_is_that_of_the_steps(clock, capsys):
    lines = display.Lines("w", 1000, "accuracy", every=100)
    clock.now += 50  # what comes before the first step
    steps(lines, clock, 291, 291, 4.0)
    steps(lines, clock, 292, 300, 0.01)
    validation(lines, clock, 300, 2.0)
    # 700 steps of 0.01 s and 7 validations of 2 s
    assert capsys.readouterr().out == (
        "w   300/1000  loss 1  |grad| 1.0e+00  100 steps/s  21 s left\n"
    )


def test_after_the_first_step_nothing_is_known(clock, capsys):
    lines = display.Lines("w", 1000, "accuracy", every=100)
    steps(lines, clock, 300, 300, 4.0)
    validation(lines, clock, 300, 2.0)
    assert capsys.readouterr().out == "w   300/1000  loss 1  |grad| 1.0e+00\n"


def test_a_budget_of_seconds_says_what_is_left(clock, capsys):
    budget = pace.Budget(20.0, lambda: clock.now, is_time=True)
    lines = display.Lines("w", pace.ENDLESS, "accuracy", every=1, budgets=[budget])
    for step in range(200):
        if step > 0:
            steps(lines, clock, step, step, 0.1)
        validation(lines, clock, step, 0.0)
    lines.close()
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "w  step 0  20 s left"
    assert told[-1] == "w  step 199  loss 1  |grad| 1.0e+00  10 steps/s  0 s left"
    assert len(told) <= display.MOST_LINES + 1
    shown = [int(line.split()[2]) for line in told]
    assert shown[:3] == [0, 1, 12]
    assert max(b - a for a, b in itertools.pairwise(shown)) == 12


def test_a_budget_of_gradients_is_told_in_time(clock):
    used = [0.0]
    budget = pace.Budget(1000.0, lambda: used[0])
    speed = pace.Pace(pace.ENDLESS, None, [budget])
    assert speed.seconds_left(0) is None
    for step in (1, 2, 3):
        clock.now += 0.5
        used[0] += 10.0
        speed.step(step)
    assert speed.seconds_left(3) == pytest.approx(97 * 0.5)
    # a run ends after its last step, or once all its budgets are spent
    long = pace.Budget(900.0, lambda: clock.now, is_time=True)
    both = pace.Pace(pace.ENDLESS, None, [budget, long])
    assert both.seconds_left(3) is None
    assert pace.Pace(pace.ENDLESS, None, [long]).seconds_left(3) == 900 - 1.5
    speed.steps = 5
    assert speed.seconds_left(3) == pytest.approx(1.0)


def test_a_run_hands_its_budget_to_its_display(capsys):
    task = co.tasks.TemporalOrder(10)
    net = co.Network("elman", inputs=6, hidden=3, outputs=4, output="softmax")
    few = {"batch": 2, "tests": 8, "confirm": 8, "probes": 2, "every": 1}
    torch.manual_seed(0)
    result = co.train(net, task, steps=pace.ENDLESS, gradients=20, display=True, **few)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("temporal-order  step 0  ")
    assert lines[-1].startswith(f"temporal-order  step {result.step}  ")
    assert result.step < 20


def test_the_page_says_that_there_is_no_limit():
    config = {"training": {"steps": pace.ENDLESS, "seconds": 20, "batch": pace.ENDLESS}}
    assert list(configuration_rows(config)) == [
        ("training.steps", "no limit"),
        ("training.seconds", "20"),
        ("training.batch", str(pace.ENDLESS)),
    ]
