"""Probabilities of sampling against an independent computation with plain numbers, and draws."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import coadjoint as co
from coadjoint.errors import InputError
from coadjoint.networks import decoding
from coadjoint.networks.decoding import draw_tokens
from coadjoint.networks.sampling import Sampling, TokenDraws


def expected(a, temperature=1.0, top_k=None, top_p=None):
    """The distribution by its definition, one token after the other, with math.fsum."""
    order = sorted(range(len(a)), key=lambda k: (-a[k], k))
    weights = [math.exp((x - max(a)) / temperature) for x in a]
    kept = order[:top_k]
    if top_p is not None and top_p < 1:
        total = math.fsum(weights[k] for k in kept)
        reached = 0.0
        fewest = []
        for k in kept:
            fewest.append(k)
            reached += weights[k] / total
            if reached >= top_p:
                break
        kept = fewest
    total = math.fsum(weights[k] for k in kept)
    return [weights[k] / total if k in kept else 0.0 for k in range(len(a))]


CASES = list(
    itertools.product((0.3, 1.0, 2.5), (None, 1, 3, 7, 50), (None, 1e-9, 0.4, 0.77, 0.999, 1.0))
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_probabilities_are_those_of_the_definition(dtype):
    rng = np.random.default_rng(3)
    a = torch.tensor(rng.normal(size=(5, 7)) * 3, dtype=dtype)
    for temperature, top_k, top_p in CASES:
        p = Sampling(temperature, top_k, top_p).probabilities(a)
        assert p.dtype == torch.float64
        for row, of_row in zip(a.double().tolist(), p, strict=True):
            wanted = torch.tensor(expected(row, temperature, top_k, top_p), dtype=torch.float64)
            assert torch.equal(of_row > 0, wanted > 0), (temperature, top_k, top_p)
            torch.testing.assert_close(of_row, wanted, rtol=1e-13, atol=0)


def test_of_equal_tokens_the_lower_ones_are_kept():
    a = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    assert Sampling(top_k=2).probabilities(a).tolist() == [0, 0.5, 0.5, 0, 0]
    assert Sampling(temperature=0).probabilities(a).tolist() == [0, 1, 0, 0, 0]
    even = torch.zeros(4, dtype=torch.float64)
    assert Sampling(top_p=0.5).probabilities(even).tolist() == [0.5, 0.5, 0, 0]
    assert Sampling(top_k=3).probabilities(even).tolist() == [1 / 3, 1 / 3, 1 / 3, 0]


def test_top_p_holds_the_token_that_crosses_it():
    a = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).log()
    kept = {p: int((Sampling(top_p=p).probabilities(a) > 0).sum()) for p in (0.4, 0.6, 0.8, 1.0)}
    assert kept == {0.4: 1, 0.6: 2, 0.8: 3, 1.0: 4}
    # Of the two that top_k keeps, 2/3 and 1/3: the first one reaches 0.6.
    assert Sampling(top_k=2, top_p=0.6).probabilities(a).tolist() == [1, 0, 0, 0]


def test_a_tiny_temperature_neither_overflows_nor_divides_by_zero():
    a = torch.tensor([300.0, 299.0, -400.0])
    assert Sampling(temperature=1e-300).probabilities(a).tolist() == [1, 0, 0]
    flat = Sampling(temperature=1e300).probabilities(a)
    torch.testing.assert_close(flat, torch.full((3,), 1 / 3, dtype=torch.float64))


def test_a_draw_is_where_the_sums_pass_a_uniform_number():
    """A seed gives the same numbers everywhere, so that the tokens are known in advance."""
    p = [0.1, 0.0, 0.4, 0.5, 0.0]
    a = torch.tensor([p, p], dtype=torch.float64).log().nan_to_num(neginf=-1e9)
    draws = TokenDraws(Sampling(), 7, 2)
    numbers = [np.random.Generator(np.random.PCG64(np.random.SeedSequence([7, i]))) for i in (0, 1)]
    for _ in range(200):
        tokens = draws.draw(a, torch.tensor([0, 1])).tolist()
        wanted = []
        for generator in numbers:
            r = generator.random()
            wanted.append(next(k for k in range(5) if math.fsum(p[: k + 1]) > r))
        assert tokens == wanted


class Fixed:
    """Uniform numbers that are given."""

    def __init__(self, values):
        self.values = iter(values)

    def random(self):
        return next(self.values)


def test_evenly_spread_numbers_draw_tokens_by_their_shares():
    """All numbers (i + 1/2) / n: each token is drawn p n times, but for one at either end."""
    n = 10_000
    sampling = Sampling(temperature=0.7, top_k=4, top_p=0.9)
    a = torch.tensor([0.3, -1.0, 2.0, 1.1, 0.2, -3.0], dtype=torch.float64)
    draws = TokenDraws(sampling, 0, 1)
    draws.generators = [Fixed((i + 0.5) / n for i in range(n))]
    drawn = draws.draw(a.expand(n, -1), torch.zeros(n, dtype=torch.long))
    counts = torch.bincount(drawn, minlength=6).double()
    p = sampling.probabilities(a)
    assert ((counts - p * n).abs() <= 1).all()
    assert (counts[p == 0] == 0).all()


def test_the_ends_of_the_unit_interval_draw_tokens_that_can_be_drawn():
    a = torch.tensor([[-math.inf, 0.0, -1.0, -math.inf]], dtype=torch.float64)
    draws = TokenDraws(Sampling(), 0, 1)
    draws.generators = [Fixed([0.0, 1 - 2**-53, 1.0])]
    one = torch.tensor([0])
    assert [int(draws.draw(a, one)) for _ in range(3)] == [1, 2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be a finite number"),
        ({"temperature": math.nan}, "temperature must be a finite number"),
        ({"temperature": "hot"}, "temperature must be a finite number"),
        ({"top_k": 0}, "top_k must be a whole number, at least 1; got 0."),
        ({"top_k": 2.5}, "top_k must be a whole number, at least 1; got 2.5."),
        ({"top_p": 0}, "top_p must be a finite number"),
        ({"top_p": 1.1}, "top_p must be a finite number"),
    ],
)
def test_wrong_values_are_refused_in_one_line(options, message):
    with pytest.raises(InputError, match=message) as raised:
        Sampling(**options)
    assert "\n" not in str(raised.value)


def decoder():
    """A run of an encoder-decoder of four tokens and the end, and two samples."""
    torch.manual_seed(1)
    net = co.EncoderDecoder("gru", inputs=3, hidden=5, outputs=5, dtype=torch.float64)
    with torch.no_grad():
        net.decoder.b_o[-1] -= 2  # so that it goes on
        net.decoder.V *= 4
    return net(torch.randn(4, 2, 3, dtype=torch.float64))


def test_decoding_by_temperature_zero_or_one_token_is_greedy():
    run = decoder()
    greedy = run.decode(limit=6)
    for options in ({"temperature": 0}, {"top_k": 1}, {"top_p": 1e-9}):
        drawn = run.decode(limit=6, **options)
        assert torch.equal(drawn.tokens, greedy.tokens)
        torch.testing.assert_close(drawn.log_probability, greedy.log_probability)
        assert torch.equal(drawn.a, greedy.a)
        assert torch.equal(drawn.alignment, greedy.alignment)


def test_decoding_draws_by_its_seed_and_knows_its_probability():
    run = decoder()
    one = run.decode(limit=6, temperature=1.5, seed=4)
    again = run.decode(limit=6, temperature=1.5, seed=4)
    assert torch.equal(one.tokens, again.tokens)
    others = [run.decode(limit=6, temperature=1.5, seed=seed).tokens for seed in range(5, 9)]
    assert not all(
        other.shape == one.tokens.shape and (other == one.tokens).all() for other in others
    )
    for j in range(2):
        tokens = one.tokens[:, j]
        tokens = tokens[tokens >= 0]
        log_p = torch.log_softmax(one.a[: len(tokens), j], -1)
        total = log_p.gather(1, tokens[:, None]).sum()
        torch.testing.assert_close(one.log_probability[j], total)
        assert (tokens[:-1] != 4).all()


def test_sequences_are_drawn_by_their_probabilities():
    """A decoder of two tokens and at most two steps: all sequences are enumerated.

    The numbers of one sample go through a grid of squares, of which each sequence gets its share.
    """
    first = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    second = torch.tensor([[0.6, 0.1, 0.3], [0.25, 0.25, 0.5]], dtype=torch.float64).log()

    def step(token, x, rows):
        a = torch.where(x[:, :1] == 0, first, second[token.clamp(max=1)])
        return x + 1, a, a[:, :0]

    n = 20
    counts: dict[tuple[int, ...], int] = {}

    class Grid(TokenDraws):
        """Draws by two given numbers."""

        def __init__(self, sampling, seed, samples):
            super().__init__(sampling, seed, samples)
            i, j = divmod(seed, n)
            self.generators = [Fixed([(i + 0.5) / n, (j + 0.5) / n])]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "TokenDraws", Grid)
        for seed in range(n * n):
            said = draw_tokens(
                step, torch.zeros(1, 1).double(), 2, torch.tensor([2]), Sampling(), seed
            )
            tokens = tuple(said.tokens[:, 0].tolist())
            counts[tokens] = counts.get(tokens, 0) + 1
    wanted = {(2,): 0.3}
    for i, p in enumerate((0.2, 0.5)):
        for k, q in enumerate(second[i].exp().tolist()):
            wanted[(i, k)] = p * q
    assert counts.keys() == wanted.keys()
    for tokens, p in wanted.items():
        assert counts[tokens] / n**2 == pytest.approx(p, abs=2.5 / n)


def test_searching_and_drawing_are_not_mixed():
    run = decoder()
    for options in ({"beam": 2, "temperature": 1.0}, {"normalise": 1.0, "top_k": 3}):
        with pytest.raises(InputError, match="decode either searches"):
            run.decode(**options)
    with pytest.raises(InputError, match="seed must be"):
        run.decode(temperature=1.0, seed=-1)
