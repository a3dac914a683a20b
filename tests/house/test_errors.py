"""Errors say what was expected, what was given and what to do.

This file checks their words for bad input, and for requests that the package declines.
"""

import functools
import re

import numpy as np
import pytest
import torch
from torch import nn

import build
import coadjoint as co
from coadjoint import errors

F64, F32 = torch.float64, torch.float32
T, B, I, D, O = 5, 3, 2, 4, 2
NAN, INF = float("nan"), float("inf")


make = functools.partial(build.network, inputs=I, hidden=D, outputs=O, dtype=F32)


def u_like(*shape, dtype=F32, **options):
    return torch.zeros(*(shape or (T, B, I)), dtype=dtype, **options)


def spoilt(value, t=2, b=1):
    u = u_like()
    u[t, b, 0] = value
    return u


def packed(inputs=I):
    return nn.utils.rnn.pack_sequence([torch.zeros(n, inputs) for n in (4, 2)])


def test_our_errors_are_also_those_of_python():
    kinds = {
        co.InputError: ValueError,
        co.KindError: TypeError,
        co.Unsupported: NotImplementedError,
        co.NumericalError: ArithmeticError,
    }
    for kind, builtin in kinds.items():
        assert issubclass(kind, co.CoadjointError)
        assert issubclass(kind, builtin)


def refuses(call, error, words):
    with pytest.raises(error, match=words) as caught:
        call()
    text = str(caught.value)
    assert isinstance(caught.value, co.CoadjointError)
    assert text.rstrip().endswith((".", ")", "]"))
    assert "\n" not in text


# inputs

INPUTS = [
    (
        lambda: (u_like(T, B, 3),),
        co.InputError,
        r"`u` has shape \(5, 3, 3\) but this network reads 2 inputs; expected \[T, B, 2\]",
    ),
    (lambda: (u_like(B, I),), co.InputError, r"`u` has shape \(3, 2\); expected \[T, B, 2\]"),
    (lambda: (u_like(T, I, B),), co.InputError, r"batch-first data pass `u.transpose\(0, 1\)`"),
    (lambda: (u_like(0, B, I),), co.InputError, "no time steps; expected at least one step"),
    (
        lambda: (u_like(T, 0, I),),
        co.InputError,
        "an empty batch; expected at least one step and one sample",
    ),
    (lambda: ([],), co.InputError, "`u` is an empty list"),
    (
        lambda: ([torch.zeros(3, I), torch.zeros(0, I)],),
        co.InputError,
        r"sequence 1 of `u` has shape \(0, 2\)",
    ),
    (
        lambda: ([torch.zeros(3, I), torch.zeros(3, 5)],),
        co.InputError,
        r"sequence 1 .*expected \[T_i, 2\]",
    ),
    (lambda: ([torch.zeros(3, I), [1, 2]],), co.InputError, "sequence 1 of `u` is a list"),
    (
        lambda: ([torch.zeros(3, I), torch.zeros(2, I, dtype=F64)],),
        co.KindError,
        "sequence 1 of `u` is float64",
    ),
    (lambda: (np.zeros((T, B, I)),), co.KindError, "`u` must be a tensor .*got ndarray"),
    (lambda: ("abc",), co.KindError, "`u` must be a tensor .*got str"),
    (
        lambda: (u_like(dtype=F64),),
        co.KindError,
        r"u is float64 but the network is float32; convert it with u.to\(torch.float32\)",
    ),
    (lambda: (u_like(dtype=torch.int64),), co.KindError, "u is int64 but the network is float32"),
    (
        lambda: (u_like(device="meta"),),
        co.InputError,
        "u is on meta but the network is on cpu; move one of them",
    ),
    (
        lambda: (packed(3),),
        co.InputError,
        "the PackedSequence holds 3 inputs but this network reads 2",
    ),
    (lambda: (packed(), [4, 2]), co.InputError, "a PackedSequence knows its lengths"),
    (lambda: ([torch.zeros(3, I)], [3]), co.InputError, "a list of sequences knows its lengths"),
    (lambda: (spoilt(NAN),), co.InputError, "first at step 3 of sample 1 .*lengths="),
    (lambda: (spoilt(INF, 0, 2),), co.InputError, "NaN or inf, first at step 1 of sample 2"),
    (lambda: (spoilt(-INF, 4, 0),), co.InputError, "first at step 5 of sample 0"),
    (lambda: (spoilt(NAN, 1, 2), [2, 3, 5]), co.InputError, "first at step 2 of sample 2"),
    (
        lambda: ([torch.zeros(2, I), torch.tensor([[0, 0.0], [0, 0], [0, NAN]])],),
        co.InputError,
        "step 3 of sample 1",
    ),
    (
        lambda: (u_like(), [1, 5]),
        co.InputError,
        r"lengths has shape \[2\]; expected one length for each of 3 samples",
    ),
    (lambda: (u_like(), 5), co.InputError, r"lengths has shape \[\]"),
    (lambda: (u_like(), [5, 6, 1]), co.InputError, r"lengths must lie in 1\.\.5 .*sample 1 has 6"),
    (lambda: (u_like(), [5, 5, 0]), co.InputError, "sample 2 has 0"),
    (lambda: (u_like(), [-1, 5, 5]), co.InputError, "sample 0 has -1"),
    (
        lambda: (u_like(), [5.0, 2.0, 1.0]),
        co.KindError,
        "lengths must be integers; got torch.float32",
    ),
    (
        lambda: (u_like(), [True, True, True]),
        co.KindError,
        "lengths must be integers; got torch.bool",
    ),
    (lambda: (u_like(), "abc"), co.CoadjointError, "lengths"),
    (
        lambda: (u_like(), [3, 2, 1]),
        co.InputError,
        r"the longest sample has 3 steps but `u` has 5; pass `u\[:3\]`",
    ),
    (
        lambda: (u_like(), None, torch.zeros(D + 1)),
        co.InputError,
        r"x0 has shape \[5\]; expected \[3, 4\] or \[4\]",
    ),
    (lambda: (u_like(), None, torch.zeros(B + 1, D)), co.InputError, r"x0 has shape \[4, 4\]"),
    (lambda: (u_like(), None, torch.full((D,), NAN)), co.InputError, "x0 holds NaN or inf"),
    (
        lambda: (u_like(), None, torch.zeros(D, dtype=F64)),
        co.KindError,
        "x0 is float64 but the network is float32",
    ),
    (lambda: (u_like(), None, [0.0] * D), co.KindError, "x0 must be a tensor; got list"),
    (lambda: (u_like(), None, torch.zeros(D, device="meta")), co.InputError, "x0 is on meta"),
]


@pytest.mark.parametrize(("arguments", "error", "words"), INPUTS)
def test_bad_inputs_are_refused(arguments, error, words):
    refuses(lambda: make()(*arguments()), error, words)


@pytest.mark.parametrize(
    "method", [co.BPTT(), co.RTRL(), co.Truncated(1, 2), co.Penalised("variance")]
)
def test_inputs_are_checked_by_every_method(method):
    def batch(u, **more):
        return co.Batch(u, torch.zeros(B, O), **more)

    refuses(
        lambda: method(make(), batch(spoilt(NAN)), "squared"),
        co.InputError,
        "first at step 3 of sample 1",
    )
    refuses(
        lambda: method(make(), batch(u_like(T, B, 3)), "squared"), co.InputError, "reads 2 inputs"
    )
    refuses(
        lambda: method(make(), batch(u_like(), lengths=[9, 1, 1]), "squared"),
        co.InputError,
        "sample 0 has 9",
    )
    refuses(
        lambda: method(make(), batch(u_like(), x0=torch.zeros(9)), "squared"),
        co.InputError,
        "x0 has shape",
    )
    refuses(
        lambda: method(make(), co.Batch(u_like(), torch.zeros(B, 5)), "squared"),
        co.InputError,
        "they must agree",
    )
    refuses(
        lambda: method(make(), co.Batch(u_like(), torch.zeros(B + 1, O)), "squared"),
        co.InputError,
        "must begin with",
    )
    refuses(
        lambda: method(make(), batch(u_like()), "squred"), co.InputError, "did you mean 'squared'"
    )
    weight = torch.ones(B + 1)
    refuses(
        lambda: method(make(), batch(u_like(), weight=weight), "squared"),
        co.InputError,
        "one finite weight for each",
    )


# losses and targets

Y = torch.zeros(B, O)
LOSSES = [
    (lambda r: r.loss("squred", Y), co.InputError, "unknown loss 'squred'; did you mean 'squared'"),
    (
        lambda r: r.loss("mse", Y),
        co.InputError,
        "unknown loss 'mse'.*Known: absolute, binary-cross-entropy",
    ),
    (lambda r: r.loss(3, Y), co.KindError, "a loss is a name .*got int"),
    (lambda r: r.loss("squared"), co.InputError, "loss 'squared' compares with a target: pass y"),
    (
        lambda r: r.loss(lambda y, t: ((y - t) ** 2).mean(), Y),
        co.InputError,
        "returned a scalar; .*reduction='none'",
    ),
    (lambda r: r.loss(nn.functional.mse_loss, Y), co.InputError, "returned a scalar"),
    (
        lambda r: r.loss(lambda y, t: y - t, Y),
        co.InputError,
        r"returned shape \[3, 2\]; expected one value for each of 3",
    ),
    (lambda r: r.loss(lambda y: y[:-1, 0]), co.InputError, r"returned shape \[2\]"),
    (
        lambda r: r.loss(lambda y: 0.5),
        co.KindError,
        "the loss function returned float; expected a tensor",
    ),
    (lambda r: r.loss(lambda y: None), co.KindError, "returned NoneType"),
    (
        lambda r: r.loss(torch.tensor(1.0)),
        co.InputError,
        "the loss is a scalar; expected one value for each sample",
    ),
    (
        lambda r: r.loss(torch.ones(B + 1)),
        co.InputError,
        r"the loss is shape \[4\]; expected .*\[3\]",
    ),
    (
        lambda r: r.loss("squared", torch.zeros(B, O + 1)),
        co.InputError,
        r"shape \[3, 2\] and the target y \[3, 3\]",
    ),
    (
        lambda r: r.loss("squared", torch.zeros(B + 1, O)),
        co.InputError,
        r"y has shape \[4, 2\]; with readout='last' .*\[3\]",
    ),
    (
        lambda r: r.loss("squared", torch.zeros(T, O)),
        co.InputError,
        r"T = 5 steps of B = 3 samples; .*u.transpose\(0, 1\): u is time-major, \[T, B, inputs\]",
    ),
    (
        lambda r: r.loss("cross-entropy", torch.zeros(B)),
        co.InputError,
        r"class numbers must be integers: y.long\(\). Probabilities have shape \[3, 2\]",
    ),
    (
        lambda r: r.loss("squared", torch.full((B, O), NAN)),
        co.InputError,
        "target y holds NaN or inf .*mask=",
    ),
    (
        lambda r: r.loss("squared", Y, mask=torch.ones(B + 1)),
        co.InputError,
        r"loss mask has shape \[4\]; expected \[3\]",
    ),
    (
        lambda r: r.loss("squared", Y, mask=torch.full((B,), NAN)),
        co.InputError,
        "the loss mask holds NaN or inf",
    ),
    (
        lambda r: r.loss("squared", Y, reduce="avg"),
        co.InputError,
        "unknown reduce 'avg'.*mean, sum",
    ),
    (
        lambda r: r.loss("cross-entropy", torch.tensor([0, 1, 2])),
        co.InputError,
        r"class numbers must lie in 0\.\.1; got 0\.\.2",
    ),
    (lambda r: r.loss("cross-entropy", torch.tensor([0, -1, 1])), co.InputError, r"got -1\.\.1"),
    (
        lambda r: r.loss("cross-entropy", torch.zeros(B, 3, dtype=torch.long)),
        co.InputError,
        r"class numbers \[3\] or probabilities",
    ),
    (
        lambda r: r.loss("cross-entropy", torch.tensor([True, False, True])),
        co.KindError,
        "class numbers .*got torch.bool",
    ),
    (
        lambda r: r.loss("binary-cross-entropy", torch.full((B, O), 2.0)),
        co.InputError,
        r"targets must lie in 0\.\.1; got 2\.\.2",
    ),
    (
        lambda r: r.costates(lambda y: torch.zeros(B)),
        co.InputError,
        "does not depend on the states",
    ),
    (
        lambda r: r.costates(lambda y: y.detach()[:, 0]),
        co.InputError,
        "does not depend on the states",
    ),
    (lambda r: r.costates(lambda y: y.sum()), co.InputError, "returned a scalar"),
]


@pytest.mark.parametrize(("call", "error", "words"), LOSSES)
def test_bad_losses_and_targets_are_refused(call, error, words):
    refuses(lambda: call(make()(u_like())), error, words)


EVERY = [
    (
        lambda r: r.loss("squared", torch.zeros(B, T, O)),
        r"y has shape \[3, 5, 2\]; with readout='every' .*\[5, 3\].*time-major",
    ),
    (lambda r: r.loss("squared", torch.zeros(B, O)), r"it must begin with \[5, 3\]"),
    (
        lambda r: r.loss("squared", torch.zeros(T, B, O), mask=torch.ones(B, T)),
        r"loss mask has shape \[3, 5\]; expected \[5, 3\]",
    ),
    (lambda r: r.loss(lambda y: y.sum(-1)[:B]), "expected one value for each of 15 entries"),
]


@pytest.mark.parametrize(("call", "words"), EVERY)
def test_targets_at_every_step_are_checked(call, words):
    refuses(lambda: call(make(readout="every")(u_like())), co.InputError, words)


def test_a_loss_that_contains_another_output_function_is_refused():
    for loss, output in (
        ("cross-entropy", "sigmoid"),
        ("binary-cross-entropy", "softmax"),
        ("cross-entropy", torch.exp),
    ):
        run = make(output=output)(u_like())
        refuses(
            lambda run=run, loss=loss: run.loss(loss, Y),
            co.Unsupported,
            "contains its output function: it takes output=",
        )
    refuses(lambda: co.losses.huber(0), co.InputError, "delta must be a finite number, above 0")


# penalties and methods

PENALTIES = [
    (
        lambda: co.Penalised("log-ration"),
        co.InputError,
        "unknown penalty 'log-ration'; did you mean 'log-ratio'",
    ),
    (
        lambda: co.Penalised(3),
        co.KindError,
        "a penalty is a name, a Penalty or a function of Costates; got int",
    ),
    (
        lambda: evaluate(lambda lam: torch.zeros(B)),
        co.InputError,
        "does not depend on the costates",
    ),
    (
        lambda: evaluate(lambda lam: lam.lam.detach().sum((0, 2))),
        co.InputError,
        r"without detach\(\)",
    ),
    (
        lambda: evaluate(lambda lam: lam.norms().sum()),
        co.InputError,
        r"returned a scalar; expected .*shape \[3\]",
    ),
    (lambda: evaluate(lambda lam: lam.norms()), co.InputError, r"returned shape \[6, 3\]"),
    (lambda: evaluate(lambda lam: 0.5), co.InputError, "returned float"),
    (lambda: co.Truncated(0, 3), co.InputError, "whole numbers 1 <= k1 <= k2; got k1=0, k2=3"),
    (lambda: co.Truncated(4, 3), co.InputError, "got k1=4, k2=3"),
    (lambda: co.Truncated(1.0, 3), co.InputError, "got k1=1.0"),
    (
        lambda: co.RTRL().stream(make(), batch=0),
        co.InputError,
        "a stream needs at least one sample",
    ),
    (
        lambda: co.RTRL().stream(make(), 2).step(torch.zeros(3, I), Y[:2], "squared"),
        co.InputError,
        r"u_t has shape \[3, 2\]; expected \[2, 2\]",
    ),
    (
        lambda: co.RTRL().stream(make()).step(torch.full((I,), NAN), Y[0], "squared"),
        co.InputError,
        "NaN or inf at step 1 of the stream",
    ),
]


def evaluate(G):
    return co.Penalised(G)(make(), co.Batch(torch.ones(T, B, I), Y), "squared")


@pytest.mark.parametrize(("call", "error", "words"), PENALTIES)
def test_bad_penalties_and_methods_are_refused(call, error, words):
    refuses(call, error, words)


@pytest.mark.parametrize(
    "method", [co.BPTT(), co.RTRL(), co.Truncated(1, 2), co.Penalised("variance")]
)
def test_a_frozen_network_is_refused(method):
    net = make()
    for p in net.parameters():
        p.requires_grad_(False)
    refuses(
        lambda: method(net, co.Batch(torch.ones(T, B, I), Y), "squared"),
        co.InputError,
        "every parameter .* is frozen",
    )


# construction

BUILD = [
    ({"cell": "elmann"}, co.InputError, "unknown cell 'elmann'; did you mean 'elman'"),
    ({"activation": "rellu"}, co.InputError, "unknown activation 'rellu'; did you mean 'relu'"),
    ({"readout": "lst"}, co.InputError, "unknown readout 'lst'; did you mean 'last'"),
    (
        {"readout": None},
        co.KindError,
        "readout must be a name, one of attention, every, last, mean, tilted, tilted-tanh; got "
        "NoneType",
    ),
    (
        {"output": "sofmax"},
        co.InputError,
        "unknown output function 'sofmax'; did you mean 'softmax'",
    ),
    ({"engine": "refrence"}, co.InputError, "unknown engine 'refrence'; did you mean 'reference'"),
    ({"x0": "zeros"}, co.InputError, "unknown x0 'zeros'; did you mean 'zero'"),
    ({"x0": torch.zeros(D + 1)}, co.InputError, r"x0 has shape \[5\]; expected \[4\]"),
    (
        {"cell": "lstm", "x0": torch.zeros(D)},
        co.InputError,
        r"x0 has shape \[4\]; expected \[8\] \(hidden x slots\)",
    ),
    (
        {"mask": torch.ones(D, D + 1)},
        co.InputError,
        r"mask has shape \[4, 5\]; expected that of W, \[4, 4\]",
    ),
    ({"cell": lambda u, x: x, "mask": torch.ones(D, D)}, co.InputError, "mask= acts on W"),
    ({"slots": 2}, co.InputError, "slots= belongs to a step function"),
    ({"hidden": 0}, co.InputError, "hidden must be a positive integer; got 0"),
    ({"inputs": 2.0}, co.InputError, "inputs must be a positive integer; got 2.0"),
    ({"outputs": True}, co.InputError, "outputs must be a positive integer; got True"),
    ({"cell": None}, co.KindError, "cell must be a name, .*got NoneType"),
]


@pytest.mark.parametrize(("options", "error", "words"), BUILD)
def test_bad_options_of_a_network_are_refused(options, error, words):
    refuses(lambda: make(**options), error, words)


# requests that are understood and declined: each raises, none returns a number


def lam_of(net, u=None):
    return net(torch.ones(T, B, I) if u is None else u).costates(lambda y: (y**2).sum(-1))


NET = make()


def mapped(u):
    return NET(u).y_hat


def overflow():
    net = make(activation="identity", bias=False)
    nn.init.constant_(net.W, 10.0)
    return net(torch.ones(200, B, I))


def random_step():
    return make(lambda u, x: torch.dropout(x + 1, 0.5, True))(torch.ones(T, B, I)).costates(
        lambda y: y.sum(-1)
    )


def remembering_step():
    calls = []

    def step(u, x):
        return calls.append(0) or x + len(calls)

    return make(step)(torch.ones(T, B, I)).costates(lambda y: y.sum(-1))


def edited_input():
    """An in-place edit of what the sweeps saved."""
    net = make()
    lam = lam_of(net)
    with torch.no_grad():
        net.W.mul_(2)
    lam.loss.sum().backward()


REFUSALS = [
    (lambda: torch.vmap(mapped)(torch.zeros(2, T, B, I)), "vmap"),
    (lambda: torch.func.jacrev(mapped)(torch.zeros(T, 1, I)), "vmap"),
    (lambda: torch.func.hessian(lambda u: mapped(u).sum())(torch.zeros(T, 1, I)), "vmap"),
    (lambda: make(dtype=torch.float16), "parameters are float32 or float64; got torch.float16"),
    (lambda: make(dtype=torch.bfloat16), "got torch.bfloat16"),
    (lambda: make(dtype=torch.complex64), "got torch.complex64"),
    (
        lambda: make(lambda u, x: x, engine="cpu"),
        "engine 'cpu' generates its code from a cell's formula",
    ),
    (lambda: make(lambda u, x: x, engine="reference"), "write the cell with @co.cell"),
    (lambda: make(engine="cpu", device="meta"), "engine 'cpu' runs on the CPU"),
    (random_step, "random or has hidden state"),
    (remembering_step, "random or has hidden state"),
    (
        lambda: co.penalties.omega_published(lam_of(make(engine="autograd"))),
        "differentiates with respect to W alone",
    ),
    (lambda: co.penalties.omega_published(lam_of(make(nn.GRUCell(I, D)))), "Use 'omega'"),
    (
        lambda: co.BPTT()(
            make(engine="autograd"), co.Batch(u_like(), Y), "squared"
        ).temporal_components(),
        "need the cell's formula",
    ),
    (
        lambda: make(output="sigmoid")(u_like()).loss(
            "cross-entropy", torch.zeros(B, dtype=torch.long)
        ),
        "contains its output",
    ),
    (overflow, r"the state is outside the range of float32 at t = \d+ of 200"),
    (lambda: make()(u_like(device="meta")), "u is on meta but the network is on cpu"),
    (lambda: make("lstm", activation="relu"), "fix its activations"),
    (lambda: make().half()(u_like(dtype=torch.float16)), "float16"),
]


@pytest.mark.parametrize(("call", "words"), REFUSALS)
def test_requests_that_are_not_supported_are_refused(call, words):
    with pytest.raises(co.CoadjointError, match=words):
        call()


def test_the_way_out_that_the_refusal_of_vmap_names():
    """The mapped axis goes into the batch."""
    net, u = make(), torch.randn(2, T, B, I)
    together = net(u.transpose(0, 1).flatten(1, 2)).y_hat.unflatten(0, (2, B))
    assert torch.allclose(together, torch.stack([net(y).y_hat for y in u]))


def test_in_place_edit_of_what_was_saved_is_noticed():
    with pytest.raises(
        (co.CoadjointError, RuntimeError),
        match=re.compile("modified by an inplace operation|in.place"),
    ):
        edited_input()


def test_third_derivative_is_right_or_refused():
    """A derivative order is supported or raises; here a third one against central differences of
    the second.
    """
    torch.manual_seed(0)
    net = make(dtype=F64)
    W, D_ = net.W.detach().clone(), torch.randn(D, D, dtype=F64)

    def second(W, create=False):
        with torch.no_grad():
            net.W.copy_(W)
        lam = net(torch.ones(T, 1, I, dtype=F64)).costates(lambda y: (y**2).sum(-1))
        (g,) = torch.autograd.grad(co.penalties.log_ratio(lam).sum(), net.W, create_graph=create)
        return g

    g = second(W, True)
    try:
        (third,) = torch.autograd.grad((g * D_).sum(), net.W)
    except co.CoadjointError:
        return
    h = 1e-5
    truth = sum(
        c * (second(W + k * h * D_) - second(W - k * h * D_)) / (2 * k * h)
        for k, c in ((1, 4 / 3), (2, -1 / 3))
    )
    assert float((third - truth).norm() / truth.norm()) < 1e-8


def test_a_penalty_whose_derivative_is_not_finite_is_blamed_at_its_step():
    """The c half of an LSTM's last costate is exactly zero: V reads h."""
    net = co.Network("lstm", inputs=I, hidden=3, outputs=2)
    batch = co.Batch(torch.randn(T, B, I), torch.randn(B, 2))
    with pytest.raises(
        co.NumericalError,
        match=rf"penalty's derivative with respect to the costate is not finite at t = {T}",
    ):
        co.Penalised(lambda lam: lam.lam[-1, :, 3:].abs().sqrt().sum(1))(net, batch, "squared")


def test_a_stream_says_at_which_of_its_steps_the_data_was_bad():
    net = co.Network("elman", inputs=1, hidden=2, outputs=1)
    stream = co.RTRL().stream(net)
    for _ in range(3):
        stream.step(torch.ones(1), torch.zeros(1), "squared")
    with pytest.raises(co.InputError, match="NaN or inf at step 4 of the stream"):
        stream.step(torch.tensor([float("nan")]), torch.zeros(1), "squared")


@pytest.mark.parametrize(
    "names", [{"slots": "h h"}, {"gates": "i 2"}, {"parameters": {"time constant": 1.0}}]
)
def test_names_of_a_cell_are_identifiers_and_differ(names):
    with pytest.raises(co.InputError, match="must be different identifiers"):
        co.cell(**names)


def test_later_results_are_refused_once_the_weights_have_changed():
    net, batch = (
        co.Network("elman", inputs=I, hidden=3, outputs=2),
        co.Batch(torch.randn(T, B, I), torch.randn(B, 2)),
    )
    for method in (co.BPTT(), co.Truncated(2, 3), co.RTRL(), co.Penalised("log-ratio")):
        e = method(net, batch, "squared")
        expected = net(batch.u).costates("squared", batch.y).lam.detach()
        with torch.no_grad():
            net.W.add_(1e-3)
        if isinstance(method, co.Penalised):
            assert torch.allclose(e.costates.lam, expected)
        else:
            with pytest.raises(
                co.InputError, match="parameter W has changed since this evaluation"
            ):
                e.costates  # noqa: B018


def test_costates_of_another_trajectory_are_refused():
    net, u = co.Network("elman", inputs=I, hidden=3, outputs=2), torch.randn(T, B, I)
    one, other = net(u), net(u)
    with pytest.raises(co.InputError, match="does not depend on the states of this trajectory"):
        one.costates(other.y_hat[:, 0])


def test_costates_that_are_zero_have_no_logarithm():
    """A dead relu network: minus infinity, counted, and left out of logarithmic penalties."""
    net = co.Network("elman", activation="relu", inputs=I, hidden=3, outputs=2)
    with torch.no_grad():
        net.b.fill_(-1e3)
    lam = net(torch.randn(T, B, I)).costates("squared", torch.ones(B, 2))
    assert (lam.log_norms()[:-1] == -float("inf")).all()
    assert (lam.zeros() == T).all()
    assert (co.penalties.log_ratio(lam) == 0).all()


# weights of penalties, seeds, names


@pytest.mark.parametrize("weight", [-1.0, -1, -1e-300, -0.5])
def test_a_negative_weight_is_refused(weight):
    refuses(
        lambda: co.Penalised("log-ratio", weight),
        co.InputError,
        "at least 0, or a function of the step; got -",
    )
    method = co.Penalised("log-ratio", lambda step: 1.0 if step == 0 else float(weight))
    batch = co.Batch(torch.ones(T, B, I), torch.ones(B, O))
    method(make(), batch, "squared")
    refuses(
        lambda: method(make(), batch, "squared"),
        co.InputError,
        r"the schedule returned rho = -.* at step 1; .*at least 0",
    )


def test_a_weight_of_zero_and_a_negative_factor_are_taken():
    batch = co.Batch(torch.ones(T, B, I), torch.ones(B, O))
    assert co.Penalised("log-ratio", 0)(make(), batch, "squared").rho == 0
    difference = co.penalties.ratio + -0.5 * co.penalties.variance
    assert torch.isfinite(co.Penalised(difference, 0.1)(make(), batch, "squared").objective)


@pytest.mark.parametrize("segments", [None, 2])
@pytest.mark.parametrize("rho", [1e60, 1e39])
def test_a_weight_outside_the_range_is_blamed_itself(rho, segments):
    batch = co.Batch(torch.ones(T, B, I), torch.ones(B, O))

    def call():
        return co.Penalised("log-ratio", rho, segments=segments)(make(), batch, "squared")

    refuses(
        call,
        co.NumericalError,
        r"weight rho = 1e\+\d\d is outside the range of float32, at most 3\.4e\+38: lower",
    )
    wide = co.Batch(torch.ones(T, B, I, dtype=F64), torch.ones(B, O, dtype=F64))
    assert (
        co.Penalised("log-ratio", rho, segments=segments)(make(dtype=F64), wide, "squared").rho
        == rho
    )


def test_a_large_weight_is_named_where_a_derivative_leaves_its_range():
    """Loss and penalty are finite, and so is the weight: their product's derivative is not."""
    u = torch.linspace(-1, 1, T * B * I).reshape(T, B, I)
    steep = co.Penalty("steep", lambda lam: 1e30 * lam.norms().sum(0))

    def call():
        return co.Penalised(steep, 1e30)(make(), co.Batch(u, torch.ones(B, O)), "squared")

    refuses(call, co.NumericalError, r"The penalty's weight is rho = 1e\+30: lower it")


@pytest.mark.parametrize("seed", [-1, -(2**70), 2**63, 1.0, "0", None])
def test_seeds_are_refused_alike_everywhere(seed):
    batch = co.Batch(torch.ones(T, B, I), torch.ones(B, O))
    e = co.BPTT()(make(), batch, "squared")
    calls = [
        lambda: co.initialisers.initialise(make(), "orthogonal", seed=seed),
        lambda: co.tasks.XOR(10).batch(0, 2, seed),
        lambda: co.diagnostics.landscape(e, seed=seed, points=3),
        lambda: co.curvature.Curvature(make(), batch, "squared").diagonal(seed=seed),
        lambda: co.online.learn(
            make(readout="every"), [(torch.ones(I), torch.ones(O))], "squared", seed=seed
        ),
    ]
    for call in calls:
        refuses(call, co.InputError, r"seed must be a whole number in 0\.\.2\^63 - 1; got")


def test_numpy_integers_are_seeds_and_counts():
    first, second = (
        co.initialisers.initialise(make(), "orthogonal", seed=seed).W for seed in (3, np.int64(3))
    )
    assert torch.equal(first, second)
    assert co.tasks.XOR(np.int64(12)).length == 12


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LSTM", "lstm"),
        ("Gru", "gru"),
        ("LRU", "lru"),
        ("MinGRU", "mingru"),
        ("DEEP_TRANSITION", "deep-transition"),
    ],
)
def test_names_match_in_any_case(name, meant):
    refuses(
        lambda: make(name),
        co.InputError,
        f"unknown cell '{name}'; did you mean '{meant}'\\? Known: ",
    )


def test_a_network_that_no_memory_holds_is_refused():
    """Beyond any address space: it is refused before a number is drawn."""
    for hidden in (10**9, 2**31 - 1):
        refuses(
            lambda hidden=hidden: make(hidden=hidden),
            co.MissingError,
            f"not enough memory for a parameter of {hidden}x{hidden}",
        )
    refuses(
        lambda: make(hidden=10**12),
        co.InputError,
        "hidden must be at most 2,147,483,647; got 1000000000000",
    )


def test_numbers_of_numpy_are_numbers():
    net = co.Network("elman", inputs=np.int64(2), hidden=np.int32(3), outputs=np.int64(1))
    assert net(torch.zeros(4, 2, 2)).a.shape == (2, 1)
    assert co.Penalised("variance", np.float32(0.5)).rho(0) == 0.5
    with pytest.raises(
        co.InputError, match=r"at least 0, or a function of the step; got np.float32\(-0.5\)"
    ):
        co.Penalised("variance", np.float32(-0.5))


def test_text_from_outside_is_safe_to_print():
    assert errors.escape_controls("a\nb\x1b[2J\u202e\ud800") == "a\nb\\x1b[2J\\u202e\\ud800"
    assert errors.escape_controls("a\nb", lines=False) == "a\\nb"
    assert errors.one_line("x\ny" * 30, 4) == "x\\nyx..."
    assert errors.escape_undecodable("caf\u00e9 \udcff").encode() == b"caf\xc3\xa9 \\udcff"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"value": 1, "least": 0, "most": 1, "below": True}, "at least 0 and below 1; got 1"),
        ({"value": 0, "least": 0, "above": True}, "a finite number, above 0; got 0"),
        ({"value": True}, "a finite number; got True"),
        ({"value": NAN, "least": 0, "most": 1}, "at least 0 and at most 1; got nan"),
    ],
)
def test_numbers_out_of_their_range_are_refused(given, words):
    refuses(lambda: errors.real("x", **given), co.InputError, words)
    assert errors.real("x", 0.5, 0, 1, above=True, below=True) == 0.5
