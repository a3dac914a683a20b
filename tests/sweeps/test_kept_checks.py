"""Checks that wait for a GPU, or stay with a recorded gradient, keep no history alive.

On a GPU the checks of a sweep are collected in its plan. Here they are collected on the CPU, too.
"""

import gc
import weakref

import pytest

import coadjoint as co
from coadjoint.sweeps import overflow
from coadjoint.sweeps.checks import Check, defer_checks
from coadjoint.sweeps.run import FormulaRun


@pytest.fixture
def states(monkeypatch):
    """Weak references to the states of every sweep that runs; garbage is not collected."""

    def collect(plan, y, make_error):
        plan.checks.append(Check(y.detach().sum().isfinite(), make_error))

    found = []
    usual = FormulaRun.run

    def run(plan, *args):
        swept = usual(plan, *args)
        found.append(weakref.ref(swept.x))
        return swept

    monkeypatch.setattr(overflow, "require_finite", collect)
    monkeypatch.setattr(FormulaRun, "run", staticmethod(run))
    gc.collect()
    gc.disable()
    yield found
    gc.enable()


def small_problem(engine):
    task = co.tasks.TemporalOrder(12)
    net = co.Network(
        "lstm",
        inputs=task.inputs,
        hidden=5,
        outputs=task.outputs,
        output=task.output,
        engine=engine,
    )
    return net, task.batch(0, 4, seed=0), task.loss


@pytest.mark.parametrize("engine", ["cpu", "eager"])
def test_a_run_without_backward_is_freed(states, engine):
    net, batch, _ = small_problem(engine)
    run = net.run(batch)
    assert run.x.requires_grad
    del run
    assert [state() for state in states] == [None]


@pytest.mark.parametrize("engine", ["cpu", "eager"])
@pytest.mark.parametrize(
    "method", [co.BPTT(), co.Penalised("log-ratio", 0.1)], ids=["plain", "penalised"]
)
def test_a_gradient_whose_checks_are_deferred_is_freed(states, engine, method):
    net, batch, loss = small_problem(engine)
    with defer_checks():
        result = method.evaluate(net, batch, loss)
    assert states[0]() is not None
    del result
    assert [state() for state in states] == [None] * len(states)
