"""A torch optimiser's step on all parameters as one array has the bits of its own step."""

import copy

import pytest
import torch

from coadjoint.optimisers import joined
from coadjoint.optimisers.recipes import OPTIMISERS, WITHOUT_STEP_SIZE
from coadjoint.optimisers.states import put_state, state_of
from coadjoint.optimisers.step_rules import Constant
from coadjoint.optimisers.steppers import TorchStepper

SHAPES = [(5, 7), (13,), (1,), (), (3, 2, 4), (50,)]
NAMES = [name for name in OPTIMISERS if name not in (*WITHOUT_STEP_SIZE, "lbfgs")]
CASES = [(name, {}) for name in NAMES]
CASES += [(n, {"weight_decay": 0.1}) for n in NAMES if "weight_decay" in OPTIMISERS[n].options]
CASES += [("adam", {"amsgrad": True}), ("rmsprop", {"momentum": 0.5, "centered": True})]


def made(name, options, dtype=torch.float32, seed=0):
    """Parameters by name, and the torch optimiser that has them."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {}
    for i, shape in enumerate(SHAPES):
        values = torch.randn(shape, generator=generator, dtype=dtype)
        parameters[str(i)] = torch.nn.Parameter(values)
    recipe = OPTIMISERS[name]
    optimiser = recipe.make(parameters.values(), lr=1.0, **{**recipe.defaults, **options})
    return parameters, optimiser


def drawn(parameters, step):
    generator = torch.Generator().manual_seed(step)
    values = {}
    for name, p in parameters.items():
        scale = 10.0 ** (step % 3 - 1)
        values[name] = scale * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return values


def torchs_own(parameters, optimiser, step, rate, frozen=()):
    for name, g in drawn(parameters, step).items():
        parameters[name].grad = None if name in frozen else g
    for group in optimiser.param_groups:
        group["lr"] = rate
    optimiser.step()


def same(ours, theirs):
    return all(torch.equal(p, q) for p, q in zip(ours.values(), theirs.values(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_bits_and_state_are_those_of_torch(name, options, dtype):
    """Also where the state is read, saved and restored on the way, and the step size changes."""
    theirs, optimiser = made(name, options, dtype)
    ours, own = made(name, options, dtype)
    stepper = TorchStepper(own, Constant())
    for step in range(12):
        rate = 0.01 * (1 + step % 2)
        torchs_own(theirs, optimiser, step, rate)
        stepper.move(ours, drawn(ours, step), rate)
        keeps_nothing = name == "sgd"
        assert (stepper._joined is None) == keeps_nothing
        assert same(ours, theirs)
        if step == 5:
            for each in (stepper, TorchStepper(optimiser, Constant())):
                each.restore(copy.deepcopy(each.state))
    expected = TorchStepper(optimiser, Constant()).state
    state = stepper.state
    assert list(state) == list(expected)
    for key, value in expected.items():
        assert torch.equal(state[key], value)
        assert state[key].dtype == value.dtype
        assert state[key].untyped_storage().nbytes() == value.untyped_storage().nbytes()


def test_a_frozen_parameter_is_left_alone():
    theirs, optimiser = made("adam", {})
    ours, own = made("adam", {})
    stepper = TorchStepper(own, Constant())
    for step in range(9):
        frozen = ("1",) if step in (3, 4) else ()
        torchs_own(theirs, optimiser, step, 0.1, frozen)
        direction = {n: g for n, g in drawn(ours, step).items() if n not in frozen}
        stepper.move(ours, direction, 0.1)
        assert (stepper._joined is None) == (step >= 3)  # afterwards the counts differ
        assert same(ours, theirs)


def test_a_hook_sees_the_steps_of_the_optimiser_itself():
    parameters, optimiser = made("adam", {})
    stepper = TorchStepper(optimiser, Constant())
    stepper.move(parameters, drawn(parameters, 0), 0.1)
    seen = []
    optimiser.register_step_post_hook(lambda found, *_: seen.append(found))
    stepper.move(parameters, drawn(parameters, 1), 0.1)
    assert seen == [optimiser]
    assert stepper._joined is None
    assert float(stepper.state["0.step"]) == 2


def test_parameters_that_change_their_type_are_refused():
    parameters, optimiser = made("adam", {})
    stepper = TorchStepper(optimiser, Constant())
    stepper.move(parameters, drawn(parameters, 0), 0.1)
    for p in parameters.values():
        p.grad = None
        p.data = p.data.double()
    with pytest.raises(RuntimeError, match="expected dtype float"):  # as torch says
        stepper.move(parameters, drawn(parameters, 1), 0.1)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("adam", lambda parameters: parameters[0].data.new_zeros(joined.MOST_NUMBERS + 1)),
        ("adam", lambda parameters: parameters[0].data.double()),
    ],
)
def test_large_or_mixed_parameters_are_not_joined(name, change):
    parameters, optimiser = made(name, {})
    listed = list(parameters.values())
    listed[0].data = change(listed)
    for p in listed:
        p.grad = torch.zeros_like(p)
    assert not joined.can_join(optimiser, listed)


def test_only_parameters_with_the_same_past_are_joined():
    parameters, optimiser = made("adam", {})
    listed = list(parameters.values())
    for p in listed:
        p.grad = torch.ones_like(p)
    assert joined.can_join(optimiser, listed)
    assert not joined.can_join(optimiser, listed[:-1])
    optimiser.step()
    assert joined.can_join(optimiser, listed)
    optimiser.state[listed[1]]["step"] += 1
    assert not joined.can_join(optimiser, listed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_state_that_is_put_back_goes_on_with_the_same_bits(case, dtype):
    name, options = case

    def moved(parameters, optimiser, steps):
        for step in steps:
            for p, g in zip(parameters.values(), drawn(parameters, step).values(), strict=True):
                p.grad = g
            optimiser.step()

    parameters, optimiser = made(name, options, dtype)
    moved(parameters, optimiser, range(9))
    state = copy.deepcopy(state_of(optimiser))
    again, fresh = made(name, options, dtype)
    with torch.no_grad():
        for p, q in zip(again.values(), parameters.values(), strict=True):
            p.copy_(q)
    put_state(fresh, state)
    moved(parameters, optimiser, range(9, 30))
    moved(again, fresh, range(9, 30))
    assert all(map(torch.equal, again.values(), parameters.values()))
