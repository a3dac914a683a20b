"""co.EncoderDecoder computes what a loop over single samples computes, by hand and in float64.

Greedy and beam decoding are compared with an enumeration of all sequences.
"""

from __future__ import annotations

import math
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import coadjoint as co
import oracles
import warm
from cases import MORE
from coadjoint import tasks
from coadjoint.errors import InputError, KindError, NumericalError, Unsupported
from coadjoint.networks import decoding
from coadjoint.networks.seq2seq import EncoderDecoder
from coadjoint.training.validation import collect_examples
from compare import close
from paths import EXAMPLES

pytestmark = pytest.mark.slow

F64 = torch.float64
ENGINES = ("reference", "eager", "cpu", "autograd")


class Path(oracles.Sample):
    """The states of one recurrence over one sample, t = 0..T, as oracles.PENALTIES read them."""

    def __init__(self, x, hidden):
        self.x, self.T = x, len(x) - 1
        self.case = SimpleNamespace(H=hidden, switch=1e-5)


class Said:
    """One sample: u [T, D] read, y (tokens and end) written.

    theta: the network's parameters by name; x0: one for each layer and direction of the encoder.
    """

    def __init__(self, net, names, theta, u, x0):
        self.net, self.names, self.theta = net, names, theta
        self.paths, D = {}, 1 + net.encoder.bidirectional
        below, self.end = list(u), None
        for layer, name in enumerate(names[:-1]):
            if layer and net.encoder.dense:
                below = [torch.cat(y) for y in zip(u, below, strict=True)]
            heads, ends = [], []
            for direction in range(D):
                x = [x0[layer * D + direction]]
                for t, v in enumerate(reversed(below) if direction else below):
                    x.append(
                        self.step(name, f"encoder.levels.{layer}.{direction}.", v, x[-1], t + 1)
                    )
                h = [self.shown(name, y) for y in x[1:]]
                heads.append(h[::-1] if direction else h)
                ends.append(h[-1])
                self.paths["encoder", layer, ("forward", "reverse")[direction]] = Path(
                    x, net.hidden
                )
            new, end = [torch.cat(y) for y in zip(*heads, strict=True)], torch.cat(ends)
            under = [b[-net.encoder.widths[layer - 1] :] for b in below]  # without u, if dense
            below = [self.above(layer, y, b) for y, b in zip(new, under, strict=True)]
            self.end = self.above(layer, end, self.end)
        self.h = below

    def above(self, layer, y, below):
        """The output of a layer from what it shows and the output below."""
        if layer and self.net.encoder.dense:
            return torch.cat([below, y])
        if not layer or not self.net.encoder.residual:
            return y
        if len(y) == len(below):
            return y + below
        D = 1 + self.net.encoder.bidirectional
        parts = zip(range(D), below.chunk(D), strict=True)
        own = [self.theta[f"encoder.P.{layer}.{k}.weight"] @ part for k, part in parts]
        return y + torch.cat(own)

    def step(self, name, prefix, u, x, t):
        own = {
            key.removeprefix(prefix): y for key, y in self.theta.items() if key.startswith(prefix)
        }
        f, read, _, _, reads, _ = oracles.CELLS[name]
        p = {key[2:]: y for key, y in own.items() if key.startswith("p.")}
        W = oracles.weight(name, own, None)
        v = oracles.ENTER.get(name, lambda v, *_: v)(own["R"] @ u + own.get("b", 0), W, p, t)
        z = (
            oracles.slowed(name, W, p) @ read(x, torch.tanh)
            if reads
            else u.new_zeros(self.net.hidden)
        )
        return f(z, v, x, p, torch.tanh)

    def shown(self, name, x):
        return x[: oracles.SHOWS.get(name, 1) * self.net.hidden]

    def begin(self):
        return torch.tanh(self.theta["S.weight"] @ self.end + self.theta.get("S.bias", 0))

    def word(self, before, s, t):
        """s_t, a_t and alpha_t after the token before, or None"""
        w, name, alpha, c = self.theta, self.names[-1], None, self.end
        if self.net.attention:
            q = w["W_a.weight"] @ self.shown(name, s) + w.get("W_a.bias", 0)
            e = [
                torch.exp(w["v_a.weight"][0] @ torch.tanh(q + w["U_a.weight"] @ h)) for h in self.h
            ]
            alpha = [y / sum(e) for y in e]
            c = sum(y * h for y, h in zip(alpha, self.h, strict=True))
        embedded = w["E.weight"][-1 if before is None else before]
        s = self.step(name, "decoder.", torch.cat([embedded, c]), s, t)
        top, i = self.shown(name, s), 0
        while f"decoder.deep.{i}.weight" in w:
            top, i = (
                torch.tanh(w[f"decoder.deep.{i}.weight"] @ top + w[f"decoder.deep.{i}.bias"]),
                i + 1,
            )
        return s, w["decoder.V"] @ top + w.get("decoder.b_o", 0) + w["C.weight"] @ c, alpha

    def forced(self, y, weights, reduce):
        """The loss beside tokens y; the costates of all paths."""
        s, total, count = [self.begin()], 0, 0
        for t, (token, weight) in enumerate(zip(y, weights, strict=True)):
            new, a, _ = self.word(y[t - 1] if t else None, s[-1], t + 1)
            s.append(new)
            total, count = total + weight * (oracles.log_sum_exp(a) - a[token]), count + weight
        self.paths["decoder", 0, "forward"] = Path(s, self.net.hidden)
        self.loss = total / count if reduce == "mean" else total
        for path in self.paths.values():
            path.loss, path.lam = self.loss, path.by_states(self.loss)
        return self.loss


def lettered(seed, n, K):
    """Tokens of n samples, ragged, [U, n], and how many each has."""
    g = torch.Generator().manual_seed(seed)
    counts = [(2, 0, 3, 1)[(j + seed) % 4] for j in range(n)]
    y = torch.full((max(counts) + 1, n), -1)
    for j, m in enumerate(counts):
        y[: m + 1, j] = torch.cat([torch.randint(0, K, (m,), generator=g), torch.tensor([K])])
    return y


# cells of the encoder and the decoder, options of the network, lengths of the inputs (None: equal
# ones)
TABLE = {
    "elman": ("elman elman", {}, (3, 5, 1)),
    "lstm": ("lstm lstm", {"embedding": 2}, (2, 4)),
    "gru": ("gru gru", {"bias": False}, None),
    "gru, end": ("gru gru", {"attention": False}, (4, 2, 3)),
    "lstm, end": ("lstm gru", {"attention": False, "bidirectional": True}, (1, 3, 2)),
    "mixed": ("lstm elman", {"deep": (3,)}, (1, 4, 4, 2)),
    "both ways": ("elman lstm", {"bidirectional": True}, (3, 1, 4)),
    "two layers": ("gru lstm gru", {"bidirectional": True}, (2, 4, 1)),
    "residual": ("lstm gru elman elman", {"residual": True, "attention": False}, (3, 4)),
    "residual, both ways": (
        "gru elman lstm",
        {"residual": True, "bidirectional": True, "x0": "learned"},
        (2, 3, 5),
    ),
    "residual, unequal": ("scrn gru elman", {"residual": True, "attention": False}, (3, 5, 2)),
    "unequal, both ways": ("scrn gru elman", {"residual": True, "bidirectional": True}, (3, 5, 2)),
    "dense": ("gru elman lstm elman", {"dense": True, "bidirectional": True}, (2, 5, 3)),
    "one of each": ("elman gru", {"x0": "learned", "attention": False}, (1,)),
    "two slots shown": ("scrn lru", {}, (3, 2)),
    "structured": ("antisymmetric exponential", {}, (2, 3)),
    "no W": ("mingru minlstm", {"attention": False}, (4, 3, 3)),
}
USED = (
    "none",
    "log-ratio",
    "omega",
    "variance",
    "share-variance",
    "norm-stabiliser",
    "user",
    "squared-norm",
    "end-points",
)


class Case:
    def __init__(self, name, reduce="sum", masked=False, given=True, engine="auto", hidden=3, K=3):
        names, options, lengths = TABLE[name]
        self.seed, self.reduce = list(TABLE).index(name), reduce
        torch.manual_seed(self.seed)
        self.names = names.split()
        cells = [MORE.get(n, n) for n in self.names]
        self.net = EncoderDecoder(
            cells[:-1],
            decoder=cells[-1],
            inputs=2,
            hidden=hidden,
            outputs=K + 1,
            engine=engine,
            dtype=F64,
            **options,
        )
        with torch.no_grad():  # large enough that nothing is nearly linear, and no bias is zero
            for p in self.net.parameters():
                p.add_(0.3 * torch.randn_like(p))
        self.lengths = [4, 4, 4] if lengths is None else list(lengths)
        T, B = max(self.lengths), len(self.lengths)
        self.u = torch.randn(T, B, 2, dtype=F64, requires_grad=True)
        self.y = lettered(self.seed, B, K)
        self.mask = None
        if masked:
            self.mask = torch.rand(self.y.shape, dtype=F64) * (torch.rand(self.y.shape) > 0.3)
            self.mask[0] = 0.7
        self.x0 = 0.5 * torch.randn(B, self.net.encoder.n, dtype=F64) if given else None
        self.sizes = [layer.n for layer in self.net.encoder]

    @property
    def given(self):
        return (self.u, None if len(set(self.lengths)) == 1 else self.lengths, self.x0)

    def run(self):
        return self.net(*self.given)

    def samples(self):
        theta = dict(self.net.named_parameters())
        for j, n in enumerate(self.lengths):
            if self.x0 is None:
                x0 = [
                    layer.x0 + torch.zeros_like(layer.x0).requires_grad_()
                    for layer in self.net.encoder
                ]
            else:
                x0 = [y.clone().requires_grad_() for y in self.x0[j].split(self.sizes)]
            said = Said(self.net, self.names, theta, self.u[:n, j], x0)
            for path in said.paths.values():
                path.number = j
            yield said

    def truth(self):
        """All samples beside their targets."""
        found = list(self.samples())
        for j, said in enumerate(found):
            y = [int(v) for v in self.y[:, j] if v != -1]
            weights = [1.0] * len(y) if self.mask is None else self.mask[: len(y), j].tolist()
            said.forced(y, weights, self.reduce)
        return found


def gradients(value, case):
    leaves = {"u": case.u, **dict(case.net.named_parameters())}
    return oracles.gradient(value, leaves)


def penalty_of(name):
    if name == "user":
        return lambda lam: (lam.lam**2 + lam.lam**3 + lam.trajectory.x * lam.lam).sum((0, 2))
    return lambda lam: co.penalties.PENALTIES[name](lam)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("turn", range(2))
@pytest.mark.sampled(2)
def test_loss_costates_and_both_orders_of_gradients_equal_the_loop(name, turn):
    # by halves of the place: a run that is not thorough takes turn 0 and 1 of names in turn
    engine = ENGINES[(list(TABLE).index(name) // 2 + turn) % 4]
    case = Case(name, ("sum", "mean")[turn], masked=turn == 1, given=turn == 0, engine=engine)
    run, truth = case.run(), case.truth()
    value = torch.stack([said.loss for said in truth])
    options = {"mask": case.mask, "reduce": case.reduce}
    close(run.loss("cross-entropy", case.y, **options), value, 1e-10, "loss")
    for key, g in gradients(run.loss("cross-entropy", case.y, **options).mean(), case).items():
        close(g, gradients(value.mean(), case)[key], 1e-10, f"gradient by {key}")
    lam = run.costates("cross-entropy", case.y, **options)
    close(lam.loss, value, 1e-10, "loss of the costates")
    assert len(lam) == len(truth[0].paths)
    for one in lam:
        at = one.trajectory
        paths = [said.paths[at.module, at.layer, at.direction] for said in truth]
        for j, path in enumerate(paths):
            assert int(at.lengths[j]) == path.T
            for t in range(path.T + 1):
                close(at.x[t, j], path.x[t], 1e-10, f"{at.module} x_{t} of sample {j}")
                close(one.lam[t, j], path.lam[t], 1e-10, f"{at.module} lam_{t} of sample {j}")
            assert not one.lam[path.T + 1 :, j].any()
    weights = torch.linspace(0.5, 1.5, len(value), dtype=F64)
    for G in USED[turn::2]:
        ours = co.penalties.penalty(penalty_of(G) if G != "none" else lambda lam: 0 * lam.loss)(lam)
        per_path = [[oracles.PENALTIES[G](path) for path in said.paths.values()] for said in truth]
        theirs = torch.stack([sum(y) / len(y) for y in per_path]).double()
        if G != "none":
            close(ours, theirs, 1e-10, G)
        found = gradients((weights * (lam.loss + 0.3 * ours)).sum(), case)
        for key, g in gradients((weights * (value + 0.3 * theirs)).sum(), case).items():
            close(found[key], g, 1e-10, f"gradient of {G} by {key}")


@pytest.mark.parametrize("name", ["elman", "two layers", "lstm, end"])
def test_gradient_methods_take_it_as_it_is(name):
    case, rho = Case(name), 0.2
    weight = torch.linspace(0.4, 2, len(case.lengths), dtype=F64)
    u, lengths, x0 = case.given
    batch = co.Batch(u.detach(), case.y, lengths, weight=weight, x0=x0)
    truth = case.truth()
    value = torch.stack([said.loss for said in truth])
    G = torch.stack(
        [sum(map(oracles.PENALTIES["log-ratio"], s.paths.values())) / len(s.paths) for s in truth]
    )
    for method, objective in (
        (co.BPTT(), value),
        (co.Penalised("log-ratio", rho), value + rho * G),
    ):
        e = method(case.net, batch, "cross-entropy")
        close(e.losses, value.detach(), 1e-10, "losses")
        expected = gradients((weight * objective).mean(), case)
        assert e.gradient.keys() == dict(case.net.named_parameters()).keys()
        for key, g in e.gradient.items():
            close(g, expected[key], 1e-10, key)
    lam = co.BPTT()(case.net, batch, "cross-entropy").costates
    for one, path in zip(lam, truth[0].paths.values(), strict=True):
        close(
            one.lam[: path.T + 1, 0],
            torch.stack(path.lam).detach(),
            1e-10,
            "costates after the gradient",
        )
        assert not one.lam.requires_grad


def test_step_functions_read_and_write():
    """torch's own cell in both places, against the formula with the same weights."""

    def make(inputs, hidden):
        return torch.nn.GRUCell(inputs, hidden, dtype=F64)

    torch.manual_seed(0)
    theirs = EncoderDecoder(make, inputs=2, hidden=3, outputs=4, dtype=F64)
    ours = EncoderDecoder("gru", inputs=2, hidden=3, outputs=4, dtype=F64)
    ours.load_state_dict(
        {k: v for k, v in theirs.state_dict().items() if ".step." not in k}, strict=False
    )
    with torch.no_grad():
        for layer, other in (
            (ours.encoder.levels[0][0], theirs.encoder.levels[0][0]),
            (ours.decoder, theirs.decoder),
        ):
            inside = other.step.bias_hh.clone()
            layer.p["b_n"].copy_(inside[6:])
            inside[6:] = 0
            layer.W.copy_(other.step.weight_hh)
            layer.R.copy_(other.step.weight_ih)
            layer.b.copy_(other.step.bias_ih + inside)
    u, y = torch.randn(4, 3, 2, dtype=F64), lettered(0, 3, 3)
    runs = [net(u, [4, 2, 3]) for net in (ours, theirs)]
    close(*(run.loss("cross-entropy", y) for run in runs), 1e-10, "loss")
    lams = [run.costates("cross-entropy", y) for run in runs]
    for a, b in zip(*lams, strict=True):
        close(a.lam, b.lam, 1e-10, "costates")
    by_S = [
        torch.autograd.grad(co.penalties.log_ratio(lam).sum(), net.S.weight)[0]
        for lam, net in zip(lams, (ours, theirs), strict=True)
    ]
    close(*by_S, 1e-10, "gradient of the penalty")
    assert torch.equal(runs[0].decode(3).tokens, runs[1].decode(3).tokens)
    EncoderDecoder("deep-transition", inputs=2, hidden=3, outputs=4)(u.float()).costates(
        "cross-entropy", y
    )


def test_costates_where_nothing_is_trained_or_recorded():
    case = Case("two layers")
    expected = case.run().costates("cross-entropy", case.y)
    with torch.no_grad():
        for lam in (
            case.run().costates("cross-entropy", case.y),
            (run := case.run()).costates("cross-entropy", case.y),
        ):
            for a, b in zip(lam, expected, strict=True):
                assert torch.equal(a.lam, b.lam)
    again = run.costates("cross-entropy", case.y)  # of a run without gradients, with them
    assert again[0].lam.requires_grad
    case.net.requires_grad_(False)
    for a, b in zip(case.run().costates("cross-entropy", case.y), expected, strict=True):
        assert torch.equal(a.lam, b.lam)


def test_padding_and_the_form_of_the_inputs_change_nothing():
    case = Case("both ways", given=False)
    u, lengths, _ = case.given
    expected = case.net(u, lengths).loss("cross-entropy", case.y)
    dirty = u.detach().clone()
    for j, n in enumerate(lengths):
        dirty[n:, j] = 1e30
    longer = torch.cat([case.y, torch.full((2, 3), -1)])
    parts = [u.detach()[:n, j] for j, n in enumerate(lengths)]
    for form in ((dirty, lengths), (parts,), (pack_sequence(parts, enforce_sorted=False),)):
        run = case.net(*form)
        assert torch.equal(run.loss("cross-entropy", longer), expected)
        mask = torch.cat([torch.ones(case.y.shape), torch.full((2, 3), 7.0)])
        assert torch.equal(run.loss("cross-entropy", longer, mask=mask), expected)


def test_each_sample_has_its_own_loss_costates_and_words():
    """A sample beside others is the sample alone: lam, G and what is said."""
    case = Case("residual, both ways", given=False)
    run = case.run()
    lam, said = run.costates("cross-entropy", case.y), run.decode(beam=3, normalise=0.5)
    for j, n in enumerate(case.lengths):
        alone = case.net(case.u[:n, j : j + 1])
        other = alone.costates("cross-entropy", case.y[:, j : j + 1])
        for a, b in zip(lam, other, strict=True):
            close(a.lam[: len(b.lam), j], b.lam[:, 0], 1e-10, "costates")
        words = alone.decode(beam=3, normalise=0.5)
        assert torch.equal(said.tokens[: len(words.tokens), j], words.tokens[:, 0])
        assert (said.tokens[len(words.tokens) :, j] == -1).all()
        close(said.log_probability[j], words.log_probability[0], 1e-10, "log-probability")
        close(said.alignment[: len(words.tokens), j, :n], words.alignment[:, 0], 1e-10, "alignment")


def log_p(a):
    return a - oracles.log_sum_exp(a)


def grown(said, tokens, s):
    """log p of what may come after tokens, and the state."""
    s, a, alpha = said.word(tokens[-1] if tokens else None, s, len(tokens) + 1)
    return s, log_p(a).tolist(), a, alpha


def everything(said, K, limit):
    """All sequences that end, or are cut at the limit, with their log-probability."""
    found, growing = [], [((), said.begin(), 0.0)]
    while growing:
        tokens, s, total = growing.pop()
        new, p, _, _ = grown(said, tokens, s)
        for token in range(K + 1):
            longer = (*tokens, token)
            if token == K or len(longer) == limit:
                found.append((longer, total + p[token]))
            else:
                growing.append((longer, new, total + p[token]))
    return found


def searched(said, K, limit, beam, power):
    """Beam search over lists; sorted() keeps the order of equals."""
    kept = [((), said.begin(), 0.0)]

    def done(tokens):
        return len(tokens) == limit or (tokens and tokens[-1] == K)

    def rank(hypothesis):
        return -hypothesis[2] / max(len(hypothesis[0]), 1) ** power

    while not all(done(tokens) for tokens, _, _ in kept):
        candidates = []
        for tokens, s, total in kept:
            if done(tokens):
                candidates.append((tokens, s, total))
                continue
            new, p, _, _ = grown(said, tokens, s)
            candidates += [((*tokens, token), new, total + p[token]) for token in range(K + 1)]
        kept = sorted(candidates, key=rank)[:beam]
    return kept[0]


def words(decoded, j):
    return tuple(int(token) for token in decoded.tokens[:, j] if token != -1)


def eager_to_go_on(case):
    """Weights under which sequences differ in length, and the likeliest first token is not always
    the best.
    """
    with torch.no_grad():
        for p in case.net.parameters():
            p.mul_(2.5)
        case.net.C.weight[-1] -= 0.5


@pytest.mark.parametrize("name", ["elman", "lstm", "lstm, end", "two layers"])
def test_decoding_finds_the_best_of_an_enumeration(name):
    case, K, limit = Case(name, K=2), 2, 4
    eager_to_go_on(case)
    run = case.run()
    for power in (0.0, 1.0):
        wide, narrow = run.decode(3**4, limit, power), run.decode(2, limit, power)
        for j, said in enumerate(case.samples()):
            best, total = max(
                everything(said, K, limit), key=lambda found: found[1] / len(found[0]) ** power
            )
            assert words(wide, j) == best
            assert float(wide.log_probability[j]) == pytest.approx(total, rel=1e-10)
            best, _, total = searched(said, K, limit, 2, power)
            assert words(narrow, j) == best
            assert float(narrow.log_probability[j]) == pytest.approx(total, rel=1e-10)


def test_a_beam_finds_what_is_greedily_missed():
    """Somewhere among these networks; else nothing above would tell a beam from none."""
    better = 0
    for name in TABLE:
        case = Case(name, K=2)
        eager_to_go_on(case)
        one, two = case.run().decode(1, 5), case.run().decode(4, 5)
        better += int((two.log_probability > one.log_probability + 1e-9).sum())
    assert better > 3


@pytest.mark.parametrize("name", TABLE)
def test_greedy_decoding_takes_the_likeliest_token(name):
    case = Case(name)
    K = case.net.outputs - 1
    run = case.run()
    greedy = run.decode()
    assert torch.equal(run.a, greedy.a)
    assert torch.equal(run.alignment, greedy.alignment)
    longest = 0
    for j, said in enumerate(case.samples()):
        tokens, s, total = [], said.begin(), 0.0
        while len(tokens) < 2 * case.lengths[j] + 1 and K not in tokens:
            s, p, a, alpha = grown(said, tokens, s)
            tokens.append(p.index(max(p)))
            total += max(p)
            t = len(tokens) - 1
            close(greedy.a[t, j], a, 1e-10, f"a_{t + 1}")
            if alpha is not None:
                close(greedy.alignment[t, j, : len(alpha)], torch.stack(alpha), 1e-10, "alignment")
                assert not greedy.alignment[t, j, len(alpha) :].any()
        assert words(greedy, j) == tuple(tokens)
        assert float(greedy.log_probability[j]) == pytest.approx(total, rel=1e-10)
        assert not greedy.a[len(tokens) :, j].any()
        longest = max(longest, len(tokens))
    assert len(greedy.tokens) == longest
    assert greedy.alignment.shape[2] == (max(case.lengths) if case.net.attention else 0)


def test_log_probability_is_the_loss_of_what_was_said():
    case = Case("mixed")
    run = case.run()
    said = run.decode(beam=5, limit=7)
    ended = (said.tokens == case.net.outputs - 1).any(0)
    assert ended.any()
    y = torch.where(ended, said.tokens, case.net.outputs - 1)  # others at anything that is a target
    y[1:, ~ended] = -1
    close(
        -run.loss("cross-entropy", y)[ended].detach(),
        said.log_probability[ended],
        1e-10,
        "log-probability",
    )


def test_equals_are_taken_in_order():
    net = EncoderDecoder("elman", inputs=1, hidden=2, outputs=3, dtype=F64)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    run = net(torch.zeros(2, 2, 1, dtype=F64))
    assert (
        run.decode(limit=3).tokens.tolist() == [[0, 0]] * 3
    )  # of equal tokens the lowest, so never the end
    assert run.decode(3, limit=3).tokens.tolist() == [
        [2, 2]
    ]  # ended at once: the fewest factors of 1/3
    assert run.decode(2, limit=3).tokens.tolist() == [[0, 0]] * 3  # the end is third
    assert run.decode(3, limit=3, normalise=1.0).tokens.tolist() == [[0, 0]] * 3


def test_impossible_sequences_are_not_followed():
    """The end is certain after one token: the other hypothesis of a beam of two has probability
    zero, and stops there.
    """
    asked = []

    def say(token, x, sample):
        asked.append(token.tolist())
        a = torch.tensor([[0.0, -math.inf, -math.inf], [-math.inf, -math.inf, 0.0]], dtype=F64)
        return x, a[[min(len(asked), 2) - 1]].expand(len(token), -1), x.new_zeros(len(token), 0)

    said = decoding.decode(
        say, torch.zeros(1, 1, dtype=F64), end=2, limits=torch.tensor([5]), beam=2
    )
    assert said.tokens.tolist() == [[0], [2]]
    assert said.log_probability.tolist() == [0.0]
    assert asked == [[2], [0]]


def test_a_network_that_has_left_its_range_is_refused():
    case = Case("gru")
    with torch.no_grad():
        case.net.C.weight.fill_(float("nan"))
    assert case.run().a.isnan().all(-1)[0].all()
    with torch.no_grad():
        case.net.S.weight.fill_(float("nan"))
    with pytest.raises(NumericalError, match="t = 0"):
        case.run().loss("cross-entropy", case.y)


REFUSED = [
    (lambda net, u: net(u).loss("cross-entropy"), InputError, "pass y, tokens [U, B]"),
    (lambda net, u: net(u).loss("cross-entropy", torch.zeros(3, 2)), KindError,
        "whole numbers; got torch.float32"),
    (lambda net, u: net(u).loss("cross-entropy", torch.zeros(3, dtype=torch.long)), InputError,
        "expected tokens [U, 2]"),
    (lambda net, u: net(u).loss("cross-entropy", torch.tensor([[0, 3], [3, 3]])), InputError,
        "sample 1 of y is [3, 3]"),
    (lambda net, u: net(u).loss("cross-entropy", torch.tensor([[3, 0], [-1, 1]])), InputError,
        "then the end, 3, then -1"),
    (lambda net, u: net(u).loss("cross-entropy", torch.tensor([[4, 3], [3, -1]])), InputError,
        "each in 0..2"),
    (lambda net, u: net(u).loss("cross-entropy", torch.tensor([[-1, 3], [3, -1]])), InputError,
        "sample 0 of y"),
    (lambda net, u: net(u).loss(torch.zeros(2), torch.tensor([[3, 3]])), KindError, "got a tensor"),
    (lambda net, u: net(u).loss("squared", torch.tensor([[3, 3]])), InputError, "loss 'squared'"),
    (lambda net, u: net(u).costates(lambda y_hat, y: 0.0 * y, torch.tensor([[3, 3]])), InputError,
        "has no costates"),
    (lambda net, u: net(u).decode(beam=0), InputError, "beam must be a positive integer; got 0"),
    (lambda net, u: net(u).decode(limit=0), InputError, "limit must be a positive integer; got 0"),
    (lambda net, u: net(u).decode(normalise=-1), InputError, "at least 0; got -1"),
    (lambda net, u: net(u[..., :1]), InputError, "expected [T, B, 2]"),
    (lambda net, u: co.Truncated(2, 2)(net, co.Batch(u, torch.tensor([[3, 3]])), "cross-entropy"),
        Unsupported, "BPTT"),
    (lambda net, u: co.RTRL()(net, co.Batch(u, torch.tensor([[3, 3]])), "cross-entropy"),
        Unsupported, "one step at a time"),
    (lambda net, u: co.BPTT(2)(net, co.Batch(u, torch.tensor([[3, 3]])), "cross-entropy"),
        Unsupported, "segments"),
    (lambda net, u: EncoderDecoder("gru", inputs=2, hidden=3, outputs=1), InputError,
        "including the end token"),
    (lambda net, u: EncoderDecoder("gru", inputs=2, hidden=3, outputs=4, embedding=0), InputError,
        "embedding"),
    (lambda net, u: EncoderDecoder("gru", inputs=2, hidden=3, outputs=4, eps=0.1), KindError,
        "has an option eps"),
    (lambda net, u: EncoderDecoder(["gru", "gru"], inputs=2, hidden=3, outputs=4, layers=3),
        InputError, "leave out"),
    (lambda net, u: EncoderDecoder("gru", decoder="inverse", inputs=2, hidden=3, outputs=4),
        Unsupported, "another cell"),
    (lambda net, u: EncoderDecoder(torch.nn.GRUCell(2, 3), inputs=2, hidden=3, outputs=4),
        InputError, "Give decoder="),
    (lambda net, u: EncoderDecoder("gruu", inputs=2, hidden=3, outputs=4), InputError,
        "did you mean 'gru'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), REFUSED, ids=range(len(REFUSED)))
def test_refusals_name_the_way_out(call, error, text):
    torch.manual_seed(0)
    net = EncoderDecoder("gru", inputs=2, hidden=3, outputs=4)
    with pytest.raises(error) as found:
        call(net, torch.randn(3, 2, 2))
    assert text in str(found.value)
    assert "\n" not in str(found.value)


def test_the_activation_is_that_of_encoder_and_decoder():
    sizes = {"inputs": 2, "hidden": 8, "outputs": 4, "dtype": F64}
    net = EncoderDecoder("elman", layers=2, activation="relu", **sizes)
    run = net(torch.randn(6, 5, 2, dtype=F64))
    assert run.states.min() == 0
    h, u = torch.randn(5, 8, dtype=F64), torch.randn(5, 16, dtype=F64)
    assert net.decoder.advance(u, h).min() == 0


def test_it_says_what_it_is():
    def tell(*cells, **options):
        return EncoderDecoder(*cells, inputs=2, hidden=3, outputs=4, **options).extra_repr()

    end = "output='softmax', engine='autograd'"
    assert tell() == f"[gru] to gru, inputs=2, hidden=3, outputs=4, {end}"
    assert tell("elman", layers=2, decoder="lstm", attention=False, bidirectional=True) == (
        "[elman, elman] to lstm, activation='tanh', bidirectional, no attention, "
        f"inputs=2, hidden=3, outputs=4, {end}"
    )
    net = EncoderDecoder(["lstm", "gru"], inputs=2, hidden=3, outputs=4)
    assert net.engine == "autograd"
    assert "one step at a time" in net.engine.why
    before = {name: p.clone() for name, p in net.named_parameters()}
    net.reset_parameters()
    assert not any(
        torch.equal(p, before[name]) for name, p in net.named_parameters() if p.dim() == 2
    )
    assert "3 samples, T = 5" in repr(net(torch.zeros(5, 3, 2)))


@pytest.mark.parametrize(
    ("name", "gradient", "options"),
    [
        ("reversal", co.BPTT(), {}),
        ("sorting", co.Penalised("log-ratio", 0.01), {"bidirectional": True}),
    ],
)
def test_it_learns(name, gradient, options):
    task = tasks.make(name, length=(1, 3), values=3)
    torch.manual_seed(0)
    net = EncoderDecoder("gru", inputs=3, hidden=24, outputs=4, **options)
    assert co.evaluate(net, task, "test", n=200)["right"] < 0.5
    given = {"steps": 200, "batch": 16, "every": 40, "tests": 100, "confirm": 500}
    result = co.train(net, task, gradient=gradient, optimiser=co.optimisers.adam(0.01), **given)
    assert result.success
    assert result.metrics["test"]["right"] > 0.98
    probes = [row for row in result.rows if row["kind"] == "probe"]
    assert all(row["log10_costates"] for row in probes)
    for row in collect_examples(net, task, seed=0):
        letters = row["target"].split()
        assert 1 <= len(letters) <= 3
        assert row["right"] == (row["prediction"].split() == letters)


def test_the_example_draws_its_attention(tmp_path):
    pytest.importorskip("matplotlib")
    example = EXAMPLES / "attention.py"
    done = warm.run(example, "--steps", "3", "--length", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "of tokens correct" in done.stdout
    assert (tmp_path / "demo" / "alignment.png").stat().st_size > 5000


def test_the_example_refuses_in_one_line(tmp_path, monkeypatch, capsys):
    example = str(EXAMPLES / "attention.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [example, "--steps", "3", "--length", "1"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(example, run_name="__main__")
    assert end.value.code == 2
    assert "low <= high" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_gradients_of_single_samples_average_to_the_gradient():
    torch.manual_seed(0)
    net = EncoderDecoder("gru", inputs=3, hidden=4, outputs=4, dtype=torch.float64)
    y = torch.tensor([[0, 2], [3, 1], [-1, 3]])
    batch = co.Batch(torch.randn(5, 2, 3, dtype=torch.float64), y, torch.tensor([5, 3]))
    each = co.Penalised("log-ratio", 0.3).per_sample(net, batch, "cross-entropy")
    whole = co.Penalised("log-ratio", 0.3)(net, batch, "cross-entropy").gradient
    for name, g in whole.items():
        assert torch.allclose(each[name].mean(0), g, rtol=1e-10, atol=1e-12), name


def test_costates_are_those_of_the_run_that_was_evaluated():
    torch.manual_seed(0)
    net = EncoderDecoder(
        "gru", inputs=3, hidden=4, outputs=4, layers=2, dropout=0.5, dtype=torch.float64
    )
    y = torch.tensor([[0, 2], [3, 1], [-1, 3]])
    batch = co.Batch(torch.randn(5, 2, 3, dtype=torch.float64), y, torch.tensor([5, 3]))
    for method in (co.BPTT(), co.Penalised("log-ratio", 0.2)):
        e = method(net, batch, "cross-entropy")
        assert torch.allclose(e.costates.loss, e.losses, rtol=1e-12)
    with torch.no_grad():
        run = net(batch.u, batch.lengths)
    with pytest.raises(InputError, match="dropout masks are lost"):
        run.costates("cross-entropy", y)
    net.eval()
    assert len(run.costates("cross-entropy", y)) == 3


def test_the_top_is_the_decoder():
    net = EncoderDecoder("gru", inputs=3, hidden=4, outputs=4, layers=2, dtype=torch.float64)
    lam = net(torch.randn(5, 2, 3, dtype=torch.float64)).costates(
        "cross-entropy", torch.tensor([[0, 2], [3, 1], [-1, 3]])
    )
    G = co.penalties.variance
    assert torch.equal(G.on("top")(lam), G(lam.select(module="decoder")[0]))
