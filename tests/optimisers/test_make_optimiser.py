"""optimisers.make builds in one call whatever the command line can build.

Settings that do not fit together are refused by the name of the keyword.
"""

import inspect

import pytest

import coadjoint as co
from coadjoint.cli import build, flags
from coadjoint.cli.schema import OptimiserSection
from coadjoint.errors import OptionError
from coadjoint.optimisers import factory

OPTIMISERS = {
    "adam": {},
    "momentum": {
        "name": "momentum",
        "momentum": 0.5,
        "schedule": "cosine",
        "end": 0.1,
        "warmup": 5,
    },
    "adamw": {"name": "adamw", "lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1},
    "plateau": {"name": "rmsprop", "schedule": "plateau", "decay": 0.3, "plateau": 2},
    "inverse-time": {"name": "sgd", "schedule": "inverse-time", "decay": 0.3},
    "galvan": {"name": "sgd", "direction": "temporal", "step_rule": "galvan", "threshold": 2.0},
    "lbfgs": {"name": "lbfgs", "history": 4, "iterations": 3},
    "hessian-free": {
        "name": "hessian-free",
        "cg": 5,
        "structural": 0.1,
        "damping": 2.0,
        "curvature": 8,
    },
    "ridge": {"name": "ridge", "ridge": 0.1},
}


@pytest.mark.parametrize("options", OPTIMISERS.values(), ids=OPTIMISERS)
def test_one_call_builds_the_optimiser_of_the_settings(options):
    config = flags.resolve(None, {"optimiser": options})
    ours, theirs = (
        co.optimisers.make(**options),
        build.optimiser_of(build.resolve_dependent_keys(config)),
    )
    assert (ours.name, ours.lr, ours.settings) == (theirs.name, theirs.lr, theirs.settings)
    assert (ours.direction, ours.rule) == (theirs.direction, theirs.rule)
    assert [ours.schedule(step, 50) for step in range(50)] == [
        theirs.schedule(step, 50) for step in range(50)
    ]
    assert (ours.schedule.decay, ours.schedule.patience) == (
        theirs.schedule.decay,
        theirs.schedule.patience,
    )


def test_the_objects_by_hand_are_the_same():
    ours = co.optimisers.make(
        "sgd", lr=0.1, schedule="linear", end=0.5, step_rule="galvan", threshold=2.0
    )
    by_hand = co.optimisers.sgd(0.1, co.optimisers.linear(0.5), rule=co.optimisers.Galvan(2.0))
    assert (ours.lr, ours.settings, ours.rule) == (by_hand.lr, by_hand.settings, by_hand.rule)
    assert [ours.schedule(step, 9) for step in range(9)] == [
        by_hand.schedule(step, 9) for step in range(9)
    ]


def test_every_key_of_the_settings_is_a_keyword():
    of_gradients = {"pretrain", "pretrain_lr"}  # keys of [gradient]
    taken = {*inspect.signature(factory.make).parameters} - {"options"} - of_gradients
    assert taken | set(factory.OPTIONS) == set(OptimiserSection.model_fields)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"momentum": 0.9},
            "momentum does nothing with optimiser adam: it belongs to momentum, nesterov, rmsprop.",
        ),
        (
            {"name": "ridge", "lr": 0.1},
            "lr does nothing with optimiser ridge: it belongs to sgd, momentum, ",
        ),
        ({"end": 0.1}, "end does nothing with schedule constant: it belongs to linear, cosine."),
        (
            {"threshold": 0.1},
            "threshold does nothing with step_rule constant: it belongs to galvan.",
        ),
        (
            {"name": "ridge", "warmup": 3},
            "schedule and warmup do nothing with optimiser ridge: it has no step size.",
        ),
    ],
)
def test_a_keyword_without_effect_is_refused_by_name(options, words):
    with pytest.raises(OptionError) as error:
        co.optimisers.make(**options)
    assert str(error.value).startswith(words)


def test_wrong_names_are_answered_with_the_nearest():
    for options in (
        {"name": "adma"},
        {"schedule": "cosin"},
        {"step_rule": "galvn"},
        {"momentumm": 0.9},
    ):
        with pytest.raises(co.InputError, match="did you mean"):
            co.optimisers.make(**options)


def test_every_clash_is_refused_in_one_line():
    for row in factory.CLASHES:
        method = "penalised" if row.option == "method" else "bptt"
        (line,) = factory.clash_complaints(row.optimisers[0], None, method, {row.option: 0.5})
        assert row.optimisers[0] in line
        assert f"${row.option}" in line
        assert factory.clash_complaints("sgd", None, method, {row.option: 0.5}) == []
