"""A Plan holds the settings of a run and checks each of them once, when it is made."""

import dataclasses
import inspect

import pytest
import torch

import coadjoint as co
from coadjoint.training import online
from coadjoint.training.plan import LearningPlan, TrainingPlan


@pytest.mark.parametrize(
    ("call", "plan", "apart"),
    [
        (co.train, TrainingPlan, {"net", "task", "resume", "fallback", "distributed"}),
        (online.learn, LearningPlan, {"net", "stream", "resume", "fallback"}),
    ],
)
def test_a_plan_has_the_arguments_of_its_call_and_their_defaults(call, plan, apart):
    arguments = {
        name: p.default
        for name, p in inspect.signature(call).parameters.items()
        if name not in apart
    }
    settings = {f.name: f.default for f in dataclasses.fields(plan) if f.init}
    assert settings == arguments


def test_a_plan_is_not_changed_afterwards():
    plan = TrainingPlan(steps=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.steps = 4


def test_a_plan_knows_what_it_means_by_default():
    plan = TrainingPlan()
    assert isinstance(plan.method, co.BPTT)
    assert (plan.recipe.name, plan.recipe.lr) == ("adam", 1e-3)
    assert isinstance(LearningPlan().method, co.RTRL)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": 1.5}, "steps must be a whole number, at least 1; got 1.5"),
        ({"patience": 0}, "patience must be a whole number, at least 1; got 0"),
        ({"clip_mean": True}, "clip_mean must be a finite number, above 0; got True"),
        ({"seconds": float("inf")}, "seconds must be a finite number, above 0; got inf"),
        ({"weight_noise": -0.1}, "weight_noise must be a finite number, at least 0; got -0.1"),
        ({"folder": 3}, "folder must be the name of a file or folder; got 3"),
        (
            {"display": "yes"},
            "display must be True, False or an object with step, validation, say and close; "
            "got 'yes'",
        ),
        ({"description": "mine"}, "description must be a dict; got 'mine'"),
        ({"loggers": print}, "loggers must be a list of functions of a row"),
        ({"optimiser": torch.optim.Adam([torch.zeros(1)])}, r"got Adam\.$"),
        ({"gradient": "bptt"}, r"gradient must be like co.BPTT\(\); got 'bptt'"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings, said):
    with pytest.raises(co.CoadjointError, match=said):
        TrainingPlan(**settings)


def test_each_setting_is_checked_once(monkeypatch):
    from coadjoint.training import plan

    checked, whole = [], plan.whole_number

    def counted(name, value):
        checked.append(name)
        return whole(name, value)

    monkeypatch.setattr(plan, "whole_number", counted)
    net = co.Network("elman", inputs=6, hidden=3, outputs=4, output="softmax")
    co.train(
        net, co.tasks.TemporalOrder(10), steps=2, every=2, batch=2, tests=2, confirm=2, probes=2
    )
    assert len(checked) == len(set(checked)) == len(TrainingPlan.counts)


def test_a_display_whose_validation_is_still_called_look_is_accepted_with_a_warning():
    class Old:
        def __init__(self):
            self.looks = []

        def step(self, step, row): ...
        def say(self, text): ...
        def close(self): ...
        def look(self, step, rows):
            self.looks.append(step)

    old = Old()
    with pytest.warns(DeprecationWarning, match="`look` is now called `validation`"):
        accepted = TrainingPlan(display=old).display
    accepted.validation(7, [])
    assert old.looks == [7]
