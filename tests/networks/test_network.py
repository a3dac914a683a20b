"""co.Network takes and returns the shapes, types and engines that it documents.

It leaves its inputs and the caller's settings as they were.
"""

import copy
import functools
import json
import subprocess
import sys

import pytest
import torch
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

import build
import coadjoint as co
from compare import close

F64 = torch.float64
T, B, I, D, O = 7, 4, 3, 5, 2
LENGTHS = [3, 7, 1, 5]
CELLS = ["elman", "leaky", "rate", "lstm", "gru"]


make = functools.partial(build.network, inputs=I, hidden=D, outputs=O)


def inputs(T=T, B=B, seed=1):
    return torch.randn(T, B, I, dtype=F64, generator=torch.Generator().manual_seed(seed))


def loss(y_hat):
    return (y_hat**2).sum(-1)


def flat_gradient(net, lam, weight=0.3):
    objective = (lam.loss + weight * co.penalties.log_ratio(lam)).mean()
    return torch.cat([g.flatten() for g in torch.autograd.grad(objective, list(net.parameters()))])


# shapes


@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize("cell", CELLS)
def test_outputs_have_the_documented_shapes(cell, readout):
    net = make(cell, readout=readout)
    run = net(inputs())
    slots = 2 if cell == "lstm" else 1
    n, out = slots * D, (B, O) if readout == "last" else (T, B, O)
    assert tuple(run.u.shape) == (T, B, I)
    assert tuple(run.x.shape) == (T + 1, B, n)
    assert tuple(run.a.shape) == tuple(run.y_hat.shape) == out
    assert tuple(run.state.shape) == (B, n)
    assert run.lengths.tolist() == [T] * B
    assert tuple(run.mask.shape) == (T + 1, B)
    lam = run.costates(loss)
    assert tuple(lam.lam.shape) == tuple(lam.mantissa.shape) == (T + 1, B, n)
    assert tuple(lam.exponent.shape) == tuple(lam.mask.shape) == (T + 1, B)
    assert not lam.exponent.is_floating_point()
    assert tuple(lam.log_norms().shape) == tuple(lam.norms().shape) == (T + 1, B)
    assert tuple(lam.log_ratios().shape) == (T, B)
    assert tuple(lam.loss.shape) == tuple(lam.zeros().shape) == (B,)
    assert torch.equal(run.u, inputs())
    assert torch.equal(run.x[-1], run.state)
    close(
        run.a, (run.state if readout == "last" else run.x[1:])[..., :D] @ net.V.T + net.b_o, 1e-12
    )


@pytest.mark.parametrize(("T", "B", "D"), [(1, 1, 1), (1, 3, 2), (2, 1, 1), (65, 1, 3)])
def test_the_smallest_sizes_work(T, B, D):
    for cell in CELLS:
        net = make(cell, hidden=D)
        lam = net(inputs(T, B)).costates(loss)
        assert torch.isfinite(flat_gradient(net, lam)).all()


# ways to give sequences of different lengths


def ways(u, lengths):
    parts = [u[:n, j] for j, n in enumerate(lengths)]
    order = sorted(range(len(lengths)), key=lambda j: -lengths[j])
    yield "lengths as a list", (u, lengths), None
    yield "lengths as a tensor", (u, torch.tensor(lengths, dtype=torch.int32)), None
    yield "list", (parts,), None
    yield "tuple", (tuple(parts),), None
    yield "packed, unsorted", (pack_sequence(parts, enforce_sorted=False),), None
    yield "packed, sorted", (pack_sequence([parts[j] for j in order]),), order
    yield (
        "packed from padding",
        (pack_padded_sequence(u, torch.tensor(lengths), enforce_sorted=False),),
        None,
    )


@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize("engine", ["cpu", "reference", "autograd"])
def test_ragged_batch_is_its_samples_alone(engine, readout):
    net, u = make("gru", engine=engine, readout=readout), inputs()
    alone = [net(u[:n, j : j + 1]).costates(loss) for j, n in enumerate(LENGTHS)]
    gradient = sum(flat_gradient(net, lam) for lam in alone) / B
    for name, arguments, order in ways(u, LENGTHS):
        run = net(*arguments)
        lam = run.costates(loss)
        where = order or list(range(B))
        assert run.lengths.tolist() == [LENGTHS[j] for j in where], name
        for k, j in enumerate(where):
            n, single = LENGTHS[j], alone[j]
            one = single.trajectory
            close(run.x[: n + 1, k], one.x[:, 0], 1e-12, name)
            assert (run.x[n + 1 :, k] == 0).all(), name
            close(run.state[k], one.state[0], 1e-12, name)
            out = (
                (run.y_hat[:n, k], one.y_hat[:, 0])
                if readout == "every"
                else (run.y_hat[k], one.y_hat[0])
            )
            close(*out, 1e-12, name)
            close(lam.lam[: n + 1, k], single.lam[:, 0], 1e-12, name)
            close(lam.loss[k], single.loss[0], 1e-12, name)
            assert lam.log_norms()[n + 1 :, k].isnan().all(), name
            assert (lam.norms()[n + 1 :, k] == 0).all(), name
            assert run.mask[:, k].tolist() == [True] * (n + 1) + [False] * (T - n), name
        close(flat_gradient(net, lam), gradient, 1e-12, name)


@pytest.mark.parametrize("poison", [0.0, 1e30, float("nan"), float("inf")])
def test_padding_content_changes_nothing_to_the_bit(poison):
    net = make(readout="every")
    y, mask = torch.randn(T, B, O, dtype=F64), torch.ones(T, B, dtype=F64)
    found = []
    for fill in (0.0, poison):
        u, target, weight = inputs(), y.clone(), mask.clone()
        for j, n in enumerate(LENGTHS):
            u[n:, j], target[n:, j], weight[n:, j] = fill, fill, fill
        lam = net(u, lengths=LENGTHS).costates("squared", target, mask=weight)
        found.append((lam.lam.detach(), lam.loss.detach(), flat_gradient(net, lam)))
    for plain, poisoned in zip(*found, strict=True):
        assert torch.equal(plain, poisoned)


@pytest.mark.parametrize("cell", CELLS)
def test_state_is_carried_into_the_next_call(cell):
    net, u = make(cell), inputs()
    first = net(u[:3])
    second = net(u[3:], x0=first.state)
    close(second.state, net(u).state, 1e-12)
    ragged = net(u, lengths=LENGTHS)
    close(ragged.state[0], net(u[:3, :1]).state[0], 1e-12)
    assert second.state.requires_grad


# where the states begin


def test_x0_is_zero_fixed_or_learned():
    u, start = inputs(), torch.randn(D, dtype=F64)
    zero, fixed, learned = make(), make(x0=start), make(x0="learned")
    assert (zero(u).x[0] == 0).all()
    assert torch.equal(fixed(u).x[0], start.expand(B, D))
    assert "x0" in fixed.state_dict()
    assert "x0" not in dict(fixed.named_parameters())
    assert isinstance(learned.x0, torch.nn.Parameter)
    assert (learned.x0 == 0).all()
    lam = learned(u).costates(loss)
    (of_x0,) = torch.autograd.grad(lam.loss.sum(), learned.x0, retain_graph=True)
    close(lam.lam[0].sum(0), of_x0, 1e-12)
    assert torch.equal(zero(u, x0=start).x, fixed(u).x)
    each = torch.randn(B, D, dtype=F64, requires_grad=True)
    lam = zero(u, lengths=LENGTHS, x0=each).costates(loss)
    (of_each,) = torch.autograd.grad(lam.loss.sum(), each, retain_graph=True)
    close(lam.lam[0], of_each, 1e-12)
    (second,) = torch.autograd.grad(co.penalties.log_ratio(lam).sum(), each)
    assert float(second.norm()) > 0


# outputs


@pytest.mark.parametrize(
    ("output", "phi"),
    [
        ("identity", lambda a: a),
        ("sigmoid", torch.sigmoid),
        ("softmax", lambda a: torch.softmax(a, -1)),
        ("tanh", torch.tanh),
        (torch.exp, torch.exp),
    ],
)
@pytest.mark.parametrize("readout", ["last", "every"])
def test_output_functions_are_applied_before_the_loss(output, phi, readout):
    run = make(output=output, readout=readout)(inputs())
    assert torch.equal(run.y_hat, phi(run.a))
    received = []
    run.loss(lambda y_hat: received.append(y_hat) or y_hat.sum(-1))
    assert torch.equal(received[0].detach(), run.y_hat.flatten(0, -2).detach())


def test_without_a_bias_there_is_none():
    net = make(bias=False)
    assert net.b is None
    assert net.b_o is None
    assert sorted(n for n, _ in net.named_parameters()) == ["R", "V", "W"]
    assert (net(torch.zeros(T, B, I, dtype=F64)).x == 0).all()


# W with a mask, W with a parametrisation


@pytest.mark.parametrize("engine", ["cpu", "reference", "autograd"])
@pytest.mark.parametrize("cell", ["elman", "lstm"])
def test_masked_connections_are_absent(cell, engine):
    torch.manual_seed(3)
    shape = tuple(make(cell).W.shape)
    mask = (torch.rand(shape) > 0.5).to(F64)
    net = make(cell, mask=mask, engine=engine)
    assert (net.W[mask == 0] == 0).all()
    lam = net(inputs()).costates(loss)
    (g,) = torch.autograd.grad((lam.loss + co.penalties.log_ratio(lam)).mean(), net.W)
    assert (g[mask == 0] == 0).all()
    assert (g[mask == 1] != 0).all()
    with torch.no_grad():
        net.W.add_(1 - mask)  # what stands in absent entries is never read
    again = net(inputs()).costates(loss)
    assert torch.equal(again.lam.detach(), lam.lam.detach())
    assert "mask" in net.state_dict()


@pytest.mark.parametrize("engine", ["cpu", "reference", "autograd"])
def test_a_signed_parametrisation_keeps_its_signs(engine):
    signs = torch.tensor([1, 1, -1, 1, -1])
    net = make(engine=engine)
    size = net.W.detach().abs()
    parametrize.register_parametrization(net, "W", co.cells.structures.Signed(signs))
    assert torch.equal(net.W, size * signs)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(3):
        optimiser.zero_grad()
        lam = net(inputs()).costates(loss)
        (lam.loss + co.penalties.log_ratio(lam)).mean().backward()
        optimiser.step()
    assert (net.W.sign() == signs).all()
    assert not torch.equal(net.W.detach().abs(), size)
    M = net.parametrizations.W.original
    (of_M,) = torch.autograd.grad(net(inputs()).costates(loss).loss.sum(), M)
    assert torch.isfinite(of_M).all()
    with pytest.raises(co.InputError, match=r"signs must be a vector of \+1 and -1"):
        co.cells.structures.Signed(torch.tensor([1, 0]))


def test_initialisers_act_on_the_weights():
    net = make()
    co.initialisers.spectral_(net.W, 0.8, torch.Generator().manual_seed(0))
    assert float(torch.linalg.eigvals(net.W.detach()).abs().max()) == pytest.approx(0.8, rel=1e-12)
    co.initialisers.gaussian_(net.R, 0.01, torch.Generator().manual_seed(0))
    assert 0.003 < float(net.R.detach().std()) < 0.03
    with pytest.raises(co.InputError, match=r"square matrix"):
        co.initialisers.spectral_(net.R, 1.0)
    with pytest.raises(co.InputError, match=r"radius must be a finite number, above 0"):
        co.initialisers.spectral_(net.W, 0.0)


# modes of running


@pytest.mark.parametrize("engine", ["cpu", "reference", "autograd"])
@pytest.mark.parametrize("cell", CELLS)
def test_costates_without_a_graph_are_those_with_one(cell, engine):
    net, u = make(cell, engine=engine, readout="every"), inputs()
    y = torch.randn(T, B, O, dtype=F64)
    truth = net(u, lengths=LENGTHS).costates("squared", y)
    with torch.no_grad():
        lam = net(u, lengths=LENGTHS).costates("squared", y)
    assert not lam.rows.requires_grad
    assert not lam.loss.requires_grad
    assert torch.equal(lam.mantissa, truth.mantissa.detach())
    assert torch.equal(lam.exponent, truth.exponent)
    assert torch.equal(lam.loss, truth.loss.detach())


@pytest.mark.parametrize("engine", ["cpu", "reference", "autograd"])
def test_costates_of_a_run_without_a_graph_have_none(engine):
    """With grad mode on again, W alone would be seen, with the states held constant: half a graph,
    half a gradient.
    """
    net = make(engine=engine)
    with torch.no_grad():
        run = net(inputs())
    lam = run.costates(loss)
    assert not lam.rows.requires_grad
    assert not co.penalties.log_ratio(lam).requires_grad


def test_two_calls_before_a_backward_keep_their_gradients():
    net = make("lstm")
    one, two = inputs(5, 2, seed=1), inputs(9, 3, seed=2)
    alone = [flat_gradient(net, net(u).costates(loss)) for u in (one, two)]
    lams = [net(one).costates(loss), net(two).costates(loss)]
    together = sum((lam.loss + 0.3 * co.penalties.log_ratio(lam)).mean() for lam in lams)
    grads = torch.autograd.grad(together, list(net.parameters()), retain_graph=True)
    again = torch.autograd.grad(together, list(net.parameters()))
    flat = torch.cat([g.flatten() for g in grads])
    close(flat, alone[0] + alone[1], 1e-12)
    assert torch.equal(flat, torch.cat([g.flatten() for g in again]))


@pytest.mark.parametrize("engine", ["cpu", "reference", "autograd"])
@pytest.mark.parametrize(
    "kept", [("V",), ("V", "b_o"), ("W",), ("R", "b_o"), ("b",), ("x0",), ("p.b_n", "V")]
)
def test_frozen_parameters_do_not_change_the_gradient_of_the_others(kept, engine):
    net, u = make("gru", engine=engine, x0="learned"), inputs()
    names = [n for n, _ in net.named_parameters()]
    batch, method = co.Batch(u, torch.ones(B, O, dtype=F64)), co.Penalised("log-ratio", 0.3)
    truth = method(net, batch, "squared").gradient
    for name in names:
        net.get_parameter(name).requires_grad_(name in kept)
    found = method(net, batch, "squared").gradient
    assert sorted(found) == sorted(kept)
    for name in kept:
        assert torch.equal(found[name], truth[name]), name


def test_two_losses_of_one_trajectory_have_their_own_costates():
    net = make(readout="every")
    run = net(inputs())
    a, b = run.costates(loss), run.costates(lambda y: y.sum(-1))
    both = run.costates(lambda y: (y**2).sum(-1) + y.sum(-1))
    close(a.lam + b.lam, both.lam, 1e-12)
    close(
        flat_gradient(net, both),
        flat_gradient(net, net(inputs()).costates(lambda y: (y**2 + y).sum(-1))),
        1e-12,
    )


def test_costates_of_a_loss_given_as_values_are_those_of_a_function():
    net = make("lstm", readout="every")
    run = net(inputs(), lengths=LENGTHS)
    mask = run.mask[1:, :, None]
    by_values = run.costates((torch.where(mask, run.y_hat, 0) ** 2).sum((0, 2)))
    by_function = net(inputs(), lengths=LENGTHS).costates(loss)
    close(by_values.lam, by_function.lam, 1e-12)
    close(flat_gradient(net, by_values), flat_gradient(net, by_function), 1e-12)
    states = net(inputs())  # a loss of the states themselves, read nowhere by the readout
    lam = states.costates((states.x[2] ** 2).sum(-1))
    close(lam.lam[2], 2 * states.x[2], 1e-12)
    assert (lam.lam[3:] == 0).all()
    with pytest.raises(co.InputError, match=r"does not depend on the states"):
        states.costates(torch.ones(B, dtype=F64))


def test_push_is_the_change_of_the_output():
    for readout in ("last", "every"):
        for engine in ("cpu", "reference", "autograd"):
            net, u = make("gru", readout=readout, engine=engine, output="sigmoid"), inputs()
            v = torch.randn_like(u)
            run = net(u, lengths=LENGTHS)
            h = 1e-6
            difference = (
                net(u + h * v, lengths=LENGTHS).y_hat - net(u - h * v, lengths=LENGTHS).y_hat
            ) / (2 * h)
            keep = run.mask[1:, :, None] if readout == "every" else torch.tensor(True)
            close(torch.where(keep, run.push(v), 0), torch.where(keep, difference, 0), 1e-7)
    with pytest.raises(co.InputError, match=r"the direction du has shape"):
        run.push(v[1:])


def test_deepcopy_and_state_dict_keep_the_gradient():
    for cell in CELLS:
        net = make(cell, x0="learned", mask=torch.ones_like(make(cell).W))
        u = inputs()
        truth = flat_gradient(net, net(u).costates(loss))
        twin = copy.deepcopy(net)
        other = make(cell, seed=9, x0="learned", mask=torch.zeros_like(net.W))
        assert not torch.equal(other(u).x, net(u).x)
        other.load_state_dict(net.state_dict())
        for same in (twin, other):
            assert torch.equal(flat_gradient(same, same(u).costates(loss)), truth)
        with torch.no_grad():
            twin.W.zero_()
        assert torch.equal(flat_gradient(net, net(u).costates(loss)), truth)


def test_dtype_follows_to():
    net = make()
    net.float()
    run = net(inputs().float())
    assert run.x.dtype == torch.float32
    assert run.costates(loss).lam.dtype == torch.float32
    assert co.Network("gru", inputs=1, hidden=1, outputs=1).V.dtype == torch.get_default_dtype()


def test_non_contiguous_and_expanded_inputs_are_read_correctly():
    net, u = make(), inputs()
    truth = net(u).x
    assert torch.equal(net(u.transpose(0, 1).contiguous().transpose(0, 1)).x, truth)
    one = u[:, :1].expand(T, B, I)
    assert torch.equal(net(one).x, net(one.contiguous()).x)
    wide = torch.zeros(T, B, 2 * I, dtype=F64)
    wide[..., ::2] = u
    assert torch.equal(net(wide[..., ::2]).x, truth)


def denormals_are_flushed():
    return (torch.tensor(1e-310, dtype=F64) * 1.0).item() == 0.0


@pytest.mark.parametrize("setting", [False, True])
def test_the_callers_denormal_setting_is_left_as_it_was(setting):
    if not torch.set_flush_denormal(setting):
        pytest.skip("this processor cannot flush denormals")
    try:
        net = make()
        run = net(inputs())
        assert denormals_are_flushed() is setting
        lam = run.costates(loss)
        assert denormals_are_flushed() is setting
        (lam.loss + co.penalties.log_ratio(lam)).mean().backward()
        assert denormals_are_flushed() is setting
        with pytest.raises(co.NumericalError):
            make(activation="identity", dtype=torch.float32)(
                torch.full((400, 1, I), 1e38), x0=torch.full((D,), 3e38)
            )
        assert denormals_are_flushed() is setting
    finally:
        torch.set_flush_denormal(False)


# engines


@pytest.mark.parametrize(
    ("engine", "cell", "device", "resolved"),
    [
        ("auto", co.cells.lstm, "cpu", "cpu"),
        ("auto", co.cells.lstm, "cuda", "eager"),
        ("eager", co.cells.lstm, "cpu", "eager"),
        ("auto", None, "cpu", "autograd"),
        ("reference", co.cells.lstm, "cpu", "reference"),
        ("autograd", co.cells.lstm, "cpu", "autograd"),
        ("autograd", None, "cuda", "autograd"),
    ],
)
def test_engine_is_resolved(engine, cell, device, resolved):
    from coadjoint.sweeps.engines import resolve

    choice = resolve(engine, cell, device)
    assert choice == resolved
    assert choice.why


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"engine": "cpuu"}, co.InputError, "unknown engine 'cpuu'; did you mean 'cpu'"),
        (
            {"engine": "gpu"},
            co.InputError,
            "unknown engine 'gpu'.*Known: auto, autograd, cpu, cuda, eager, reference, scan",
        ),
        (
            {"cell": lambda u, x: x, "engine": "cpu"},
            co.Unsupported,
            "engine 'cpu' generates its code from a cell's formula",
        ),
        ({"cell": lambda u, x: x, "engine": "reference"}, co.Unsupported, "Use engine='autograd'"),
        (
            {"engine": "cpu", "device": "meta"},
            co.Unsupported,
            "engine 'cpu' runs on the CPU, but the data is on meta",
        ),
    ],
)
def test_engine_is_refused_with_a_reason(options, error, words):
    with pytest.raises(error, match=words):
        make(**options)


def test_repr_says_what_it_is():
    text = repr(make("lstm"))
    assert "lstm, inputs=3, hidden=5, outputs=2" in text


# the import

PROBE = """
import json, sys
import torch
import numpy
before = set(sys.modules)
import coadjoint
print(json.dumps(sorted({m.split(".")[0] for m in set(sys.modules) - before})))
"""


@pytest.mark.slow
def test_import_needs_torch_and_numpy_alone():
    out = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True
    ).stdout
    new = set(json.loads(out)) - set(sys.stdlib_module_names)
    assert not new & {
        "matplotlib",
        "rich",
        "sympy",
        "typer",
        "yaml",
        "safetensors",
        "jinja2",
        "pandas",
        "scipy",
    }
    assert {m for m in new if not m.startswith("_")} <= {"coadjoint", "torch", "numpy"}, new


def test_a_network_in_text_is_its_sizes_without_empty_modules():
    sizes = {"inputs": 2, "hidden": 4, "outputs": 3}
    end = "readout='last', output='softmax', engine='auto')"
    net = co.Network("gru", **sizes, output="softmax")
    assert repr(net) == f"Network(gru, inputs=2, hidden=4, outputs=3, {end}"
    net = co.networks.make("lstm", **sizes, output="softmax", layers=2, bidirectional=True)
    text = f"Stack([lstm, lstm], bidirectional, inputs=2, hidden=4, outputs=3, {end}"
    assert repr(net) == text
    net = co.Stack(["gru", "lstm"], inputs=2, hidden=[4, 5], outputs=3)
    assert "[gru, lstm], inputs=2, hidden=[4, 5], outputs=3, readout='last'" in repr(net)
    net = co.EncoderDecoder("gru", **sizes)
    lines = repr(net).splitlines()
    assert lines[:2] == ["EncoderDecoder(", f"  {net.extra_repr()}"]
    assert lines[2].startswith("  (decoder): Network(gru, inputs=8, hidden=4, outputs=3")
    assert "  (E): Embedding(3, 4)" in lines
    assert not [line for line in lines if "Dict(" in line or "List(" in line]


def test_a_network_in_text_names_activation_options_and_type():
    sizes = {"inputs": 2, "hidden": 4, "outputs": 3}

    def words(net):
        return repr(net).removesuffix(")")

    assert "(elman, activation='tanh', inputs=2" in words(co.Network("elman", **sizes))
    net = co.Network("unicornn", **sizes, eps=0.5, activation=torch.relu, dtype=torch.float64)
    assert "(unicornn, eps=0.5, activation='relu', inputs=2" in words(net)
    assert words(net).endswith("output='identity', dtype=float64, engine='auto'")
    assert words(copy.deepcopy(net)) == words(net)
    assert words(net.float()).endswith("output='identity', engine='auto'")
    assert "(scrn-learned, activation='sigmoid', inputs" in words(
        co.Network("scrn-learned", **sizes)
    )
    stack = co.Stack(["elman", "elman"], **sizes, activation="relu", dtype=torch.float64)
    assert words(stack).startswith("Stack([elman, elman], activation='relu', inputs=2, hidden=4")
    assert "dtype=float64" in words(stack)
    assert "[elman(activation='tanh'), gru], inputs" in words(co.Stack(["elman", "gru"], **sizes))
    assert "dtype=float64" in words(co.EncoderDecoder("gru", **sizes).double())
    assert "dtype=float64" in words(co.networks.make(chain="4x3", inputs=2, outputs=3).double())
    deep = co.Network("deep-transition", **sizes, depth=3, activation="relu")
    assert "depth=3, activation='relu', shortcut=False" in words(deep)
    assert "layers=2, eps=0.03, alpha=0.9" in words(co.Network("unicornn-layers", **sizes))


def test_a_network_in_text_shows_the_modules_of_its_user():
    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.read = torch.nn.Linear(6, 4)

        def forward(self, x, u):
            return torch.tanh(self.read(torch.cat([x, u], -1)))

    net = co.Network(Step(), inputs=2, hidden=4, outputs=1, output=torch.sigmoid)
    assert repr(net).splitlines() == [
        "Network(",
        "  Step, inputs=2, hidden=4, outputs=1, readout='last', output='sigmoid', engine='auto'",
        "  (step): Step(",
        "    (read): Linear(in_features=6, out_features=4, bias=True)",
        "  )",
        ")",
    ]
