"""gradients.make builds in one call whatever the command line can build.

Settings that do not fit together are refused by the name of the keyword.
"""

import inspect

import pytest
import torch

import coadjoint as co
from coadjoint.cli import build, flags
from coadjoint.cli.schema import GradientSection
from coadjoint.errors import OptionError
from coadjoint.gradients import factory

METHODS = {
    "bptt": {},
    "segments": {"method": "bptt", "segments": 2},
    "truncated": {"method": "truncated", "k1": 2, "k2": 4},
    "rtrl": {"method": "rtrl"},
    "penalised": {"penalty": "log-ratio"},
    "none of it": {"penalty": "log-ratio", "weight": 0.0},
    "inverse-time": {
        "penalty": "variance",
        "weight": 2.0,
        "weight_schedule": "inverse-time",
        "weight_rate": 0.5,
    },
    "exponential": {
        "penalty": "variance",
        "weight": 2.0,
        "weight_schedule": "exponential",
        "weight_rate": 0.5,
    },
    "linear": {
        "penalty": "variance",
        "weight": 2.0,
        "weight_schedule": "linear",
        "weight_end": 1.0,
        "segments": "auto",
    },
    "steered": {"penalty": "log-ratio", "weight_target": 0.1, "weight_gain": 0.5},
    "pretrain": {"penalty": "variance", "pretrain": 2},
    "hold": {"penalty": "variance", "hold": "source", "segments": 2},
    "isometry": {"penalty": "isometry", "penalty_per": "sqrt-n"},
    "tangent": {"penalty": "tangent", "tangent": "random", "tangent_directions": 3},
}


@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_one_call_builds_the_method_of_the_settings(options):
    """Three steps of both: the same method, the same objective and gradient."""
    sections = {
        "task": {"name": "xor", "length": 12},
        "network": {"hidden": 4},
        "gradient": options,
        "training": {"precision": 64, "steps": 5},
    }
    job = build.build(flags.resolve(None, sections))
    ours, theirs = co.gradients.make(**options, steps=5), build.gradient_of(job.config)
    assert type(ours) is type(theirs)
    batch = job.task.batch(0, 3, 0)
    for _ in range(3):
        a, b = (
            method(job.network, batch.to(torch.float64, "cpu"), job.task.loss)
            for method in (ours, theirs)
        )
        assert torch.equal(a.objective, b.objective)
        assert a.gradient.keys() == b.gradient.keys()
        assert all(torch.equal(g, b.gradient[key]) for key, g in a.gradient.items())


@pytest.mark.parametrize("on", ["top", "whole"])
def test_a_penalty_can_be_on_some_of_the_layers(on):
    sections = {
        "task": {"name": "xor", "length": 12},
        "network": {"hidden": 4, "layers": 2},
        "gradient": {"penalty": "log-ratio", "penalty_on": on},
    }
    job = build.build(flags.resolve(None, sections))
    batch = job.task.batch(0, 3, 0)
    ours = co.gradients.make("penalised", penalty="log-ratio", penalty_on=on)
    a, b = (
        method(job.network, batch, job.task.loss).gradient
        for method in (ours, job.arguments["gradient"])
    )
    assert all(torch.equal(g, b[key]) for key, g in a.items())
    each = co.gradients.make(penalty="log-ratio")(job.network, batch, job.task.loss).gradient
    assert any(not torch.equal(g, a[key]) for key, g in each.items())


def test_every_key_of_the_settings_is_a_keyword():
    keys = set(GradientSection.model_fields) - {"pretrain_lr"}  # which is the optimiser's
    assert set(inspect.signature(factory.make).parameters) == keys | {"steps"}
    assert set(factory.APPLIES) <= set(GradientSection.model_fields)


def test_unknown_units_and_directions_are_refused():
    with pytest.raises(co.InputError, match="unknown unit of norms 'n'"):
        co.gradients.make(penalty="variance", penalty_per="n")
    with pytest.raises(co.InputError, match="unknown direction of the tangent loss 'turns'"):
        co.gradients.make(penalty="tangent", tangent="turns")


def test_the_tangent_loss_of_moved_images_is_made_by_name():
    method = co.gradients.make(penalty="tangent", tangent="shifts")
    assert not method.penalty.draws
    chain = co.Chain.mlp(9, [4], 2, seed=0)
    batch = co.Batch(torch.randn(3, 9), torch.randn(3, 2), axis=0)
    ours = method(chain, batch, "squared").penalties
    lam = chain(batch.u).costates("squared", batch.y)
    assert torch.equal(ours, co.penalties.tangent(co.penalties.shifts)(lam).detach())


def test_a_penalty_of_the_user_is_taken():
    method = co.gradients.make(penalty=lambda lam: lam.norms().sum(0), weight=0.5)
    assert isinstance(method, co.Penalised)
    assert method.rho(0) == 0.5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "penalised"}, "method penalised needs a penalty: "),
        ({"method": "truncated"},
            "method truncated needs k1; also k2, to backpropagate further than k1 steps."),
        ({"weight": 2.0}, "weight does nothing with method bptt: it belongs to penalised."),
        ({"method": "rtrl", "segments": 3},
            "segments does nothing with method rtrl: it belongs to bptt, penalised."),
        ({"penalty": "omega", "weight_schedule": "linear"}, "weight_schedule linear needs steps."),
        ({"penalty": "omega", "weight_schedule": "steered"},
            "weight_schedule steered needs weight_target."),
        ({"penalty": "omega", "weight_end": 1.0},
            "weight_end does nothing with weight_schedule constant: it belongs to linear."),
        ({"penalty": "omega", "weight": 0.0, "pretrain": 3},
            "pretrain minimises the penalty alone, but weight 0 turns the penalty off."),
        ({"penalty": "omega", "tangent": "random"},
            "tangent does nothing with penalty omega: it belongs to tangent."),
        ({"tangent_directions": 2},
            "tangent_directions does nothing with penalty none: it belongs to tangent."),
        ({"penalty": "tangent", "tangent": "shifts", "tangent_directions": 2},
            "tangent_directions does nothing with tangent shifts: it belongs to random."),
        ({"penalty_per": "sqrt-n"},
            "penalty_per does nothing with method bptt: it belongs to penalised."),
        ({"method": "rtrl", "hold": "source"},
            "hold does nothing with method rtrl: it belongs to penalised."),
        ({"weight": 2.0, "k1": 3},
            "weight does nothing with method bptt: it belongs to penalised.\nk1 does nothing with "
            "method bptt: it belongs to truncated."),
    ],
)  # fmt: skip
def test_a_keyword_without_effect_is_refused_by_name(options, words):
    with pytest.raises(OptionError) as error:
        co.gradients.make(**options)
    assert str(error.value).startswith(words)


def test_a_wrong_name_is_answered_with_the_nearest():
    with pytest.raises(co.InputError, match="did you mean 'penalised'"):
        co.gradients.make("penalized", penalty="omega")
