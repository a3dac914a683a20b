"""Directions that penalties draw: functions of their place alone, as signs should be."""

import math

import pytest
import torch

import build
import coadjoint as co
import oracles
from coadjoint.gradients import penalised
from coadjoint.objectives.draws import drawing, random_signs
from coadjoint.sweeps.engines.cuda import repeatable
from compare import equal

F64 = torch.float64
LIKE = torch.zeros((), dtype=F64)
DRAWING = ["isometry", "tangent"]


def test_signs_are_those_of_the_hash_on_pythons_integers():
    signs = random_signs(7, 3, 2, 130, LIKE)
    with drawing(5, 11):
        later = random_signs(2**60, 3, 2, 130, LIKE)
    for i in range(3):
        for j in range(2):
            assert signs[i, j].tolist() == oracles.drawn_signs(130, i + 1, j, 0, 7)
            assert later[i, j].tolist() == oracles.drawn_signs(130, i + 1, 11 + j, 5, 2**60)


def test_signs_depend_on_their_place_alone():
    signs = random_signs(0, 4, 6, 100, LIKE)
    assert torch.equal(random_signs(0, 4, 6, 100, LIKE), signs)
    assert torch.equal(random_signs(0, 2, 3, 65, LIKE), signs[:2, :3, :65])
    for j in range(6):
        with drawing(sample=j):
            assert torch.equal(random_signs(0, 4, 1, 100, LIKE)[:, 0], signs[:, j])
    assert random_signs(0, 1, 1, 1, torch.zeros((), dtype=torch.float32)).dtype == torch.float32


def first_signs():
    return random_signs(0, 1, 1, 64, LIKE)[0, 0].tolist()


def test_a_block_ends_with_what_was_before_it_even_by_an_error():
    def fail():
        with drawing(3):
            with drawing(sample=2):  # inside, the step is still 3
                assert first_signs() == oracles.drawn_signs(64, 1, 2, 3)
            assert first_signs() == oracles.drawn_signs(64, 1, 0, 3)
            raise ZeroDivisionError

    before = first_signs()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert first_signs() == before


def of_steps(count, states, B, n, seed=0):
    signs = []
    for step in range(count):
        with drawing(step):
            signs.append(random_signs(seed, states, B, n, LIKE))
    return torch.stack(signs)


def test_signs_have_mean_zero_and_are_uncorrelated_along_every_axis():
    """The sums of N fair signs have standard deviation sqrt(N); five of them is the bar."""
    signs = of_steps(64, 5, 8, 100)  # [step, state, sample, entry]
    assert abs(signs.sum()) < 5 * math.sqrt(signs.numel())
    for axis in range(4):
        first = signs.movedim(axis, 0)
        for lag in (1, 2, 3):
            products = first[lag:] * first[:-lag]
            assert abs(products.sum()) < 5 * math.sqrt(products.numel()), (axis, lag)
    across = signs.permute(3, 0, 1, 2).flatten(1)  # each pair of entries
    correlation = across @ across.T / across.shape[1]
    correlation.fill_diagonal_(0)
    assert correlation.abs().max() < 6 / math.sqrt(across.shape[1])


def test_seeds_draw_other_signs():
    a, b = (random_signs(seed, 4, 8, 100, LIKE) for seed in (0, 1))
    assert abs((a * b).sum()) < 5 * math.sqrt(a.numel())


@pytest.mark.parametrize("name", DRAWING)
def test_a_gradient_draws_anew_at_each_step_and_the_same_again(name):
    net = build.network()
    batch = build.batch(net, lengths=[7, 3, 5, 1])
    method, again = (co.Penalised(name, 0.3) for _ in range(2))
    found = []
    for step in range(3):
        e = method(net, batch, "squared")
        assert equal(e.gradient, again.evaluate(net, batch, "squared").gradient)
        assert equal(e.gradient, again(net, batch, "squared").gradient)
        found.append(e.penalty.item())
        resumed = co.Penalised(name, 0.3)
        resumed.step = step
        assert equal(e.gradient, resumed(net, batch, "squared").gradient)
        resumed.step = step
        assert resumed.value(net, batch, "squared") == pytest.approx(float(e.objective), rel=1e-14)
    assert len(set(found)) == 3


@pytest.mark.parametrize("name", DRAWING)
@pytest.mark.parametrize("kind", ["network", "stack", "chain"])
def test_gradients_of_single_samples_average_to_that_of_the_batch(name, kind):
    torch.manual_seed(0)
    if kind == "chain":
        net = co.Chain.mlp(3, [5, 4], 2, seed=0, dtype=F64)
        batch = co.Batch(torch.randn(4, 3, dtype=F64), torch.randn(4, 2, dtype=F64), axis=0)
    elif kind == "stack":
        net = co.Stack(["elman", "gru"], bidirectional=True, **build.SIZES)
        batch = build.batch(net, lengths=[7, 3, 5, 1])
    else:
        net = build.network(readout="every")
        batch = build.batch(net, lengths=[7, 3, 5, 1])
    method = co.Penalised(name, 0.3)
    method.step = 2
    whole = method.evaluate(net, batch, "squared").gradient
    each = method.per_sample(net, batch, "squared")
    for key, g in whole.items():
        assert torch.allclose(each[key].mean(0), g, rtol=1e-11, atol=1e-14), key


@pytest.mark.parametrize("name", DRAWING)
def test_drawing_leaves_torchs_generator_alone(name):
    net = build.network()
    batch = build.batch(net)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = co.Penalised(name, 0.3)(net, batch, "squared").penalty
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert co.Penalised(name, 0.3)(net, batch, "squared").penalty == first


def test_what_is_made_of_a_penalty_that_draws_draws_too():
    G = co.penalties.isometry(3)
    assert not co.penalties.log_ratio.draws
    made = (G, 2 * G, G + "variance", co.penalties.log_ratio + G, G.on("top"), G.per("sqrt n"))
    assert all(each.draws for each in made)
    assert co.penalties.tangent().draws
    assert not co.penalties.tangent(co.penalties.shifts).draws


def test_a_penalty_that_draws_is_not_captured(monkeypatch):
    """A CUDA graph would repeat the signs of the step at which it was captured."""
    net = build.network()
    batch = build.batch(net)
    monkeypatch.setattr(penalised, "is_on_gpu", lambda batch: True)
    monkeypatch.setattr(repeatable, "answers_late", lambda y: True)  # the given tangent, too
    asked = []

    def note(method):
        method.captured = lambda *given: asked.append(method.penalty.name)
        method(net, batch, "squared")

    note(co.Penalised("log-ratio", 0.3))
    note(co.Penalised(co.penalties.tangent(torch.ones_like(batch.u)), 0.3))
    assert asked == ["log-ratio", "tangent"]
    for G in (*DRAWING, 0.5 * co.penalties.isometry(1) + "variance"):
        note(co.Penalised(G, 0.3))
    assert asked == ["log-ratio", "tangent"]


@pytest.mark.parametrize("seed", [-1, 1.5, "x", None])
def test_seeds_that_are_none_are_refused(seed):
    with pytest.raises(co.InputError, match="seed"):
        co.penalties.isometry(seed)
    with pytest.raises(co.InputError, match="seed"):
        co.penalties.tangent(seed=seed)
