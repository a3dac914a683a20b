"""BPTT, Truncated, RTRL and Penalised compute what plain loops compute.

So do temporal components, gradients of single samples, and weights of samples.
"""

import functools
import itertools
import sys

import pytest
import torch
from torch import nn

import build
import coadjoint as co
from build import Step
from coadjoint.sweeps import engines
from compare import close, difference

F64 = torch.float64
T, B, I, D, O = 7, 3, 2, 4, 2
LENGTHS = {"whole": None, "ragged": [3, 7, 5]}
CELLS = ["elman", "leaky", "rate", "lstm", "gru"]
METHODS = {
    "bptt": co.BPTT,
    "rtrl": co.RTRL,
    "truncated": lambda: co.Truncated(2, 3),
    "untruncated": lambda: co.Truncated(3, T),
    "penalised": lambda: co.Penalised("log-ratio", 0.2),
}


make = functools.partial(build.network, inputs=I, hidden=D, outputs=O)
batch_for = functools.partial(build.batch, T=T, B=B)


def lengths_of(batch):
    return batch.lengths or [T] * B


def entry_losses(net, batch, j, n, cut=lambda t, x: x):
    """{step: loss} of sample j by a loop over `advance`; `cut(t, x)` may detach x_t."""
    x = (
        net.x0[None]
        if batch.x0 is None
        else (batch.x0 if batch.x0.dim() == 2 else batch.x0[None])[j % len(batch.x0) :][:1]
    )
    out, x = {}, cut(0, x)
    for t in range(1, n + 1):
        x = cut(t, net.advance(batch.u[t - 1, j : j + 1], x))
        if net.readout == "every" or t == n:
            y_hat = net.visible_state(x) @ net.V.T + (0 if net.b_o is None else net.b_o)
            target = batch.y[t - 1, j] if net.readout == "every" else batch.y[j]
            weight = (
                1.0
                if batch.mask is None
                else (batch.mask[t - 1, j] if net.readout == "every" else batch.mask[j])
            )
            if weight != 0:
                out[t] = weight * ((y_hat[0] - target) ** 2).sum()
    if batch.reduce == "mean" and batch.mask is None:
        out = {t: l / len(out) for t, l in out.items()}
    return out


def zero_or(grads, net):
    return {
        name: torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(net.named_parameters(), grads, strict=True)
    }


def by_autograd(net, batch):
    """The gradient of the weighted mean of the samples' losses, by the loop."""
    weight = [1.0] * B if batch.weight is None else batch.weight.tolist()
    total = sum(
        w * sum(entry_losses(net, batch, j, n).values())
        for j, (w, n) in enumerate(zip(weight, lengths_of(batch), strict=True))
    )
    return zero_or(torch.autograd.grad(total / B, list(net.parameters()), allow_unused=True), net)


def by_definition(net, batch, k1, k2):
    """Truncated, each sample on its own: at end = k1, 2 k1, ...

    and at its last step, the losses of the steps since the end before, pulled back k2 steps and no
    further.
    """
    total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for j, n in enumerate(lengths_of(batch)):
        for before, end in itertools.pairwise([0, *range(k1, n, k1), n]):
            begin = max(0, end - k2)

            def cut(t, x, begin=begin):
                return x.detach() if t <= begin and begin > 0 else x

            chosen = [
                l for t, l in entry_losses(net, batch, j, n, cut).items() if before < t <= end
            ]
            if chosen:
                grads = torch.autograd.grad(
                    sum(chosen) / B, list(net.parameters()), allow_unused=True
                )
                for name, g in zero_or(grads, net).items():
                    total[name] = total[name] + g
    return total


# the methods


@pytest.mark.parametrize("engine", ["cpu", "reference", "autograd"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize("cell", CELLS)
def test_bptt_equals_autograd_on_plain_loops(cell, readout, lengths, engine):
    net = make(cell, readout=readout, engine=engine, x0="learned")
    batch = batch_for(net, LENGTHS[lengths])
    e = co.BPTT()(net, batch, "squared")
    close(e.gradient, by_autograd(net, batch), 1e-12)
    own = [sum(entry_losses(net, batch, j, n).values()) for j, n in enumerate(lengths_of(batch))]
    close(e.losses, torch.stack(own).detach(), 1e-12)
    assert float(e.loss) == pytest.approx(float(sum(own).detach()) / B, rel=1e-13)
    assert (e.penalties == 0).all()
    assert float(e.objective) == float(e.loss)


@pytest.mark.parametrize(
    ("k1", "k2"), [(1, 1), (1, 4), (2, 2), (2, 3), (3, 5), (3, 3), (7, 7), (4, 20)]
)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("readout", ["last", "every"])
def test_truncated_is_its_definition(readout, lengths, k1, k2):
    for cell in ("elman", "lstm"):
        net = make(cell, readout=readout, x0="learned")
        batch = batch_for(net, LENGTHS[lengths])
        e = co.Truncated(k1, k2)(net, batch, "squared")
        close(e.gradient, by_definition(net, batch, k1, k2), 1e-12)
        full = co.BPTT()(net, batch, "squared")
        close(e.losses, full.losses, 1e-12)
        if k2 >= T:
            close(e.gradient, full.gradient, 1e-12)
        else:
            assert difference(e.gradient["W"], full.gradient["W"]) > 1e-6


@pytest.mark.parametrize("engine", ["cpu", "autograd"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize("cell", CELLS)
def test_rtrl_is_bptt(cell, readout, lengths, engine):
    net = make(cell, readout=readout, x0="learned", engine=engine)
    batch = batch_for(net, LENGTHS[lengths])
    ours, full = co.RTRL()(net, batch, "squared"), co.BPTT()(net, batch, "squared")
    close(ours.gradient, full.gradient, 1e-12)
    close(ours.losses, full.losses, 1e-12)


def options_table(net):
    rng = torch.Generator().manual_seed(4)
    lead = (T, B) if net.readout == "every" else (B,)
    mask = torch.rand(lead, dtype=F64, generator=rng)
    mask[mask < 0.3] = 0
    return {
        "weights": {"weight": torch.tensor([0.5, 2.0, 0.0], dtype=F64)},
        "x0 of each": {"x0": torch.randn(B, D, dtype=F64, generator=rng)},
        "x0 of all": {"x0": torch.randn(D, dtype=F64, generator=rng)},
        "mean": {"reduce": "mean"},
        "mask": {"mask": mask},
        "mask and mean": {"mask": mask, "reduce": "mean"},
        "all": {"mask": mask, "reduce": "mean", "weight": torch.tensor([1.0, 0.1, 3.0], dtype=F64)},
    }


@pytest.mark.parametrize("option", options_table(make()))
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize("method", ["rtrl", "untruncated"])
def test_options_of_a_batch_mean_the_same_to_every_method(method, readout, lengths, option):
    net = make(readout=readout, x0="learned")
    batch = batch_for(net, LENGTHS[lengths], **options_table(net)[option])
    ours, full = METHODS[method]()(net, batch, "squared"), co.BPTT()(net, batch, "squared")
    close(ours.gradient, full.gradient, 1e-12)
    close(ours.losses, full.losses, 1e-12)
    assert float(ours.loss) == pytest.approx(float(full.loss), rel=1e-13)


@pytest.mark.parametrize("option", ["weights", "x0 of each", "x0 of all", "mean", "mask"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("readout", ["last", "every"])
def test_options_of_a_batch_agree_with_the_loop(readout, lengths, option):
    net = make(readout=readout)
    batch = batch_for(net, LENGTHS[lengths], **options_table(net)[option])
    if option == "x0 of all":
        batch = co.Batch(**{**vars(batch), "x0": batch.x0[None].expand(B, D)})
    close(co.BPTT()(net, batch, "squared").gradient, by_autograd(net, batch), 1e-12)


def test_penalised_with_weight_zero_is_bptt_to_the_bit():
    for cell in CELLS:
        net = make(cell, readout="every")
        batch = batch_for(net, LENGTHS["ragged"])
        ours, full = (
            co.Penalised("variance", 0.0)(net, batch, "squared"),
            co.BPTT()(net, batch, "squared"),
        )
        assert all(torch.equal(ours.gradient[n], g) for n, g in full.gradient.items())
        assert (ours.penalties > 0).any()


def test_weights_of_samples_weigh_the_penalised_objective():
    net, weight = make(), torch.tensor([0.5, 2.0, 0.0], dtype=F64)
    batch = batch_for(net, weight=weight)
    e = co.Penalised("log-ratio", 0.3)(net, batch, "squared")
    lam = net(batch.u).costates("squared", batch.y)
    objective = (weight * (lam.loss + 0.3 * co.penalties.log_ratio(lam))).mean()
    close(e.gradient, zero_or(torch.autograd.grad(objective, list(net.parameters())), net), 1e-12)
    assert float(e.objective) == pytest.approx(float(objective.detach()), rel=1e-13)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_function_goes_through_every_method(method):
    torch.manual_seed(0)
    cell = nn.GRUCell(I, D).to(F64)
    step, formula = make(cell, engine="auto"), make("gru")
    with torch.no_grad():
        formula.W.copy_(cell.weight_hh)
        formula.R.copy_(cell.weight_ih)
        formula.b.copy_(cell.bias_ih + cell.bias_hh)
        formula.b[-D:] = cell.bias_ih[-D:]
        formula.p["b_n"].copy_(cell.bias_hh[-D:])
        formula.V.copy_(step.V)
        formula.b_o.copy_(step.b_o)
    batch = batch_for(step, LENGTHS["ragged"])
    ours, truth = (METHODS[method]()(net, batch, "squared").gradient for net in (step, formula))
    for torchs, name in {
        "step.weight_hh": "W",
        "step.weight_ih": "R",
        "V": "V",
        "b_o": "b_o",
    }.items():
        close(ours[torchs], truth[name], 1e-11, name)


@pytest.mark.parametrize("form", ["list", "packed"])
@pytest.mark.parametrize("method", METHODS)
def test_lists_and_packed_sequences_have_the_same_gradient(method, form):
    net = make("lstm", readout="every")
    batch = batch_for(net, LENGTHS["ragged"])
    parts = [batch.u[:n, j] for j, n in enumerate(batch.lengths)]
    u = parts if form == "list" else nn.utils.rnn.pack_sequence(parts, enforce_sorted=False)
    ours = METHODS[method]()(net, co.Batch(u, batch.y), "squared")
    close(ours.gradient, METHODS[method]()(net, batch, "squared").gradient, 1e-12)


# samples


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_single_samples_have_the_gradient_as_their_mean(method, readout, lengths):
    net = make(readout=readout)
    batch = batch_for(net, LENGTHS[lengths], weight=torch.tensor([1.0, 0.5, 2.0], dtype=F64))
    each = METHODS[method]().per_sample(net, batch, "squared")
    whole = METHODS[method]()(net, batch, "squared").gradient
    close({name: g.mean(0) for name, g in each.items()}, whole, 1e-12)
    if method == "bptt":
        for j, n in enumerate(lengths_of(batch)):
            own = batch.weight[j] * sum(entry_losses(net, batch, j, n).values())
            truth = zero_or(
                torch.autograd.grad(own, list(net.parameters()), allow_unused=True), net
            )
            close({name: g[j] for name, g in each.items()}, truth, 1e-12)


# streams


def stream_network(**options):
    net = make("gru", x0="learned", **options)
    rng = torch.Generator().manual_seed(2)
    u = torch.randn(9, B, I, dtype=F64, generator=rng)
    return net, u, torch.randn(9, B, O, dtype=F64, generator=rng)


@pytest.mark.parametrize("readout", ["last", "every"])
def test_stream_gives_the_gradient_of_each_steps_loss(readout):
    net, u, y = stream_network(readout=readout)
    stream = co.RTRL().stream(net, batch=B)
    for t in range(len(u)):
        e = stream.step(u[t], y[t], "squared")
        last = make("gru", x0="learned", readout="last")
        last.load_state_dict(net.state_dict())
        truth = co.BPTT()(last, co.Batch(u[: t + 1], y[t]), "squared")
        close(e.gradient, truth.gradient, 1e-12)
        close(e.losses, truth.losses, 1e-12)
        close(stream.x, truth.trajectory.state, 1e-12)
        close(e.trajectory.state, stream.x, 1e-12)


def test_stream_of_one_takes_bare_vectors():
    net, u, y = stream_network()
    stream, again = (co.RTRL().stream(net) for _ in range(2))
    for t in range(4):
        bare, rows = (
            stream.step(u[t, 0], y[t, 0], "squared"),
            again.step(u[t, :1], y[t, :1], "squared"),
        )
        close(bare.gradient, rows.gradient, 1e-12)


def test_memory_of_a_stream_does_not_grow():
    net, u, y = stream_network()

    def held(stream):
        arrays = {"x": stream.x} | stream.influence
        return {name: (tuple(a.shape), a.untyped_storage().nbytes()) for name, a in arrays.items()}

    stream = co.RTRL().stream(net, batch=B)
    begin = held(stream)
    after = []
    for t in range(len(u)):
        stream.step(u[t], y[t], "squared")
        after.append(held(stream))
    assert all(sizes == begin for sizes in after)
    assert not any(a.requires_grad for a in (stream.x, *stream.influence.values()))
    others = [a for a in vars(stream).values() if isinstance(a, list | dict) and len(a) > 20]
    assert not others


def test_some_streams_can_be_reset():
    net, u, y = stream_network()
    stream, fresh = co.RTRL().stream(net, batch=B), co.RTRL().stream(net, batch=B)
    for t in range(4):
        stream.step(u[t], y[t], "squared")
    before = stream.x.clone()
    stream.reset([1])
    assert torch.equal(stream.x[1], fresh.x[1])
    assert torch.equal(stream.x[[0, 2]], before[[0, 2]])
    for name, S in stream.influence.items():
        assert torch.equal(S[1], fresh.influence[name][1]), name
        assert not torch.equal(S[0], fresh.influence[name][0]), name
    stream.step(u[4], y[4], "squared")
    alone = co.RTRL().stream(net, batch=1)
    alone.step(u[4, 1:2], y[4, 1:2], "squared")
    close(stream.influence["W"][1], alone.influence["W"][0], 1e-12)
    stream.reset()
    assert torch.equal(stream.x, fresh.x)
    with pytest.raises(co.InputError, match=r"rows must lie in 0\.\.2; got \[3\]"):
        stream.reset([3])


def test_weights_changed_between_steps_are_used():
    net, u, y = stream_network()
    stream = co.RTRL().stream(net, batch=B)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for t in itertools.chain(range(9), range(9), range(9)):
        e = stream.step(u[t], 0 * y[t], "squared")
        e.write_grad(net)
        optimiser.step()
        losses.append(float(e.loss))
    assert losses[-1] < 0.5 * losses[0]


# temporal components


def components_by_loop(net, batch):
    """grad_t: the parameters used at step t are made a copy of their own, for each t."""
    names = [n for n in ("W", "R", "b") if getattr(net, n) is not None]
    copies = [
        {n: getattr(net, n).detach().clone().requires_grad_() for n in names} for _ in range(T)
    ]
    total = 0.0
    for j, n in enumerate(lengths_of(batch)):
        x = net.x0[None]
        for t in range(1, n + 1):
            c = copies[t - 1]
            full = {f"net.{k}": v for k, v in c.items()}
            x = torch.func.functional_call(Step(net), full, (batch.u[t - 1, j : j + 1], x))
            if net.readout == "every" or t == n:
                target = batch.y[t - 1, j] if net.readout == "every" else batch.y[j]
                weight = 1.0 if batch.weight is None else batch.weight[j]
                total = (
                    total
                    + weight * ((net.visible_state(x) @ net.V.T + net.b_o - target) ** 2).sum() / B
                )
    leaves = [c[n] for c in copies for n in names]
    grads = iter(torch.autograd.grad(total, leaves, allow_unused=True))
    return [{n: zero_if_none(next(grads), c[n]) for n in names} for c in copies]


def zero_if_none(g, like):
    return torch.zeros_like(like) if g is None else g


@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize(
    ("cell", "masked"),
    [("elman", False), ("elman", True), ("lstm", False), ("gru", False), ("rate", True)],
)
def test_temporal_components_equal_the_loop(cell, masked, readout, lengths, engine):
    mask = (torch.arange(D * D).reshape(D, D) % 3 != 0).to(F64) if masked else None
    net = make(cell, readout=readout, engine=engine, mask=mask)
    batch = batch_for(net, LENGTHS[lengths], weight=torch.tensor([1.0, 0.5, 2.0], dtype=F64))
    e = co.BPTT()(net, batch, "squared")
    parts, truth = e.temporal_components(), components_by_loop(net, batch)
    norms = parts.norms()
    for t in range(1, T + 1):
        close(parts.at(t), truth[t - 1], 1e-12)
        squares = 0.0
        for name, g in truth[t - 1].items():
            assert float(norms[name][t - 1]) == pytest.approx(float(g.norm()), rel=1e-10), (name, t)
            squares += float(g.square().sum())
        assert float(norms["joint"][t - 1]) == pytest.approx(squares**0.5, rel=1e-10)
    close(
        {n: sum(parts.at(t)[n] for t in range(1, T + 1)) for n in truth[0]},
        {n: e.gradient[n] for n in truth[0]},
        1e-12,
    )
    with pytest.raises(co.InputError, match=r"t must lie in 1\.\.7; got 8"):
        parts.at(8)


def test_temporal_components_exist_in_float32_and_without_bias():
    net = make("gru", bias=False, dtype=torch.float32)
    batch = batch_for(net)
    batch = co.Batch(batch.u.float(), batch.y.float())
    norms = co.BPTT()(net, batch, "squared").temporal_components().norms()
    assert sorted(norms) == ["R", "W", "joint"]
    assert all(n.dtype == F64 and tuple(n.shape) == (T,) for n in norms.values())


def test_temporal_components_need_a_formula():
    net = make(engine="autograd")
    with pytest.raises(co.Unsupported, match=r"temporal components need the cell's formula"):
        co.BPTT()(net, batch_for(net), "squared").temporal_components()


# evaluations


@pytest.mark.parametrize("method", METHODS)
def test_evaluation_holds_what_it_says(method):
    net = make("lstm", readout="every")
    batch = batch_for(net, LENGTHS["ragged"])
    e = METHODS[method]()(net, batch, "squared")
    lam = net(batch.u, batch.lengths).costates("squared", batch.y)
    close(e.costates.lam, lam.lam.detach(), 1e-12)
    close(e.costates.loss, lam.loss.detach(), 1e-12)
    assert not e.costates.rows.requires_grad
    close(e.trajectory.x, lam.trajectory.x, 1e-12)
    assert e.norm == pytest.approx(
        float(torch.cat([g.flatten() for g in e.gradient.values()]).norm()), rel=1e-13
    )
    assert sorted(e.gradient) == sorted(n for n, _ in net.named_parameters())
    assert not any(g.requires_grad for g in e.gradient.values())
    assert not e.losses.requires_grad


def test_write_grad_is_what_an_optimiser_steps_along():
    net = make()
    net.R.requires_grad_(False)
    e = co.BPTT()(net, batch_for(net), "squared")
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    e.write_grad(net)
    assert net.R.grad is None
    torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1).step()
    for name, p in net.named_parameters():
        expected = before[name] - 0.1 * e.gradient[name] if name != "R" else before[name]
        close(p, expected, 1e-12, name)
    net.W.grad.zero_()
    assert float(e.gradient["W"].norm()) > 0  # a copy was written
    with pytest.raises(
        co.InputError, match=r"this network has no parameter .*belongs to another network"
    ):
        co.BPTT()(make("leaky"), batch_for(net), "squared").write_grad(net)


def test_gradients_are_the_same_under_no_grad():
    net = make()
    batch = batch_for(net)
    truth = {name: METHODS[name]()(net, batch, "squared").gradient for name in METHODS}
    with torch.no_grad():
        for name in METHODS:
            close(METHODS[name]()(net, batch, "squared").gradient, truth[name], 1e-12)


def test_gradient_does_not_depend_on_how_a_batch_is_cut_up():
    net = make("gru", readout="every")
    batch = batch_for(net, LENGTHS["ragged"])
    whole = co.Penalised("log-variance", 0.2)(net, batch, "squared").gradient
    pieces = []
    for rows in ([1], [0, 2]):
        n = [batch.lengths[j] for j in rows]
        part = co.Batch(batch.u[: max(n), rows], batch.y[: max(n), rows], lengths=n)
        g = co.Penalised("log-variance", 0.2)(net, part, "squared").gradient
        pieces.append({name: v * len(rows) / B for name, v in g.items()})
    close({name: pieces[0][name] + pieces[1][name] for name in whole}, whole, 1e-12)


def test_a_state_that_all_samples_begin_in_is_not_selected_from():
    u, x0 = torch.randn(4, 3, 2), torch.randn(3, 5)

    def begin(start):
        return co.Batch(u, x0=start).select([2, 0]).x0

    assert torch.equal(begin(x0), x0[[2, 0]])
    assert torch.equal(begin(x0[0]), x0[0])
    assert begin(None) is None


@pytest.mark.parametrize(
    "method", [co.BPTT, lambda: co.Penalised("log-ratio", 0.1)], ids=["plain", "penalised"]
)
def test_few_calls_stand_between_a_gradient_and_its_sweeps(method, monkeypatch):
    """Frames of gradients and networks above each loop of the engine."""
    net = make(engine="reference")
    engine, found = engines.load(net.engine), {}

    def watched(name, plain):
        def loop(*given, **options):
            frame, walk = sys._getframe(1), []
            while frame is not None:
                if frame.f_globals["__name__"].startswith(
                    ("coadjoint.gradients.", "coadjoint.networks.")
                ):
                    walk.append(frame.f_code.co_name)
                frame = frame.f_back
            found.setdefault(name, walk)
            return plain(*given, **options)

        return loop

    for name in ("forward", "adjoint", "tangent"):
        monkeypatch.setattr(engine, name, watched(name, getattr(engine, name)))
    method()(net, batch_for(net), "squared")
    most = 5 if "tangent" in found else 6
    assert max(map(len, found.values())) <= most, found
