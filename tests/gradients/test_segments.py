"""A gradient in segments has the bits of the gradient without them, in the memory predicted for it.

It also agrees with an independent oracle.
"""

import itertools
import re
from dataclasses import replace

import pytest
import torch

import cases
import coadjoint as co
from coadjoint.gradients import memory, segments
from coadjoint.sweeps import chunks, engines, rows
from coadjoint.sweeps.affine import affine
from coadjoint.sweeps.memory import release

pytestmark = pytest.mark.slow

CELLS = ("elman", "lstm", "gru", "leaky", "rate", "odd", "diagonal", "pair")
SCALAR = (
    "squared-norm",
    "variance",
    "variance-l1",
    "log-ratio",
    "ratio",
    "log-variance",
    "end-points",
    "share-variance",
)
OPTIONS = {"x0": "learned", "reduce": "mean", "weighted": True}
COMPILED = engines.device_refusal("cpu", "cpu")
needs_compiler = pytest.mark.skipif(COMPILED is not None, reason=f"engine 'cpu' {COMPILED}")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of a few steps, so that short sequences have many; none of them outlives the test."""
    for module, name, value in (
        (rows, "ROWS_PER_CHUNK", 16),
        (rows, "VECTOR_ROWS", 4),
        (chunks, "ROWS_PER_CHUNK", 16),
        (chunks, "FEW_ROWS", 8),
    ):
        monkeypatch.setattr(module, name, value)
    rows.uniform_rows.cache_clear()
    yield
    rows.uniform_rows.cache_clear()


def method(name, cut, rho=0.3):
    return co.BPTT(cut) if name == "none" else co.Penalised(name, rho, cut)


def problem(case):
    data = cases.Data.of(case, case.dtype, oracle=False)
    return (
        cases.network(case, data),
        cases.batch(case, data),
        cases.LOSSES.get(case.loss, case.loss),
    )


def differing(e, cut):
    """The names of what two Evaluations do not have in common, bit for bit."""
    pairs = {**{name: (g, cut.gradient[name]) for name, g in e.gradient.items()}}
    pairs |= {"loss": (e.losses, cut.losses), "penalty": (e.penalties, cut.penalties)}
    return [name for name, (a, b) in pairs.items() if not torch.equal(a, b)]


def table(engine, T):
    every = itertools.product(
        CELLS, ("last", "every"), (False, True), ("none", "log-ratio", "variance-l1")
    )
    for i, (cell, readout, ragged, penalty) in enumerate(every):
        case = cases.Case(
            cell,
            "tanh",
            "squared",
            penalty,
            engine,
            B=3,
            T=T,
            D=2,
            H=5,
            readout=readout,
            ragged=ragged,
            u_grad=False,
            dtype=(torch.float64, torch.float32)[i % 2],
            seed=i,
        )
        counted = "weighted" if readout == "every" else "all"
        yield (
            replace(case, **OPTIONS, counted=counted, sparse=cell != "diagonal") if i % 3 else case
        )


def assert_same_bits(case, cuts=(1, 3, "auto", 10**6)):
    net, batch, loss = problem(case)
    whole = method(case.penalty, None)(net, batch, loss)
    assert whole.norm > 0
    for cut in cuts:
        assert differing(whole, method(case.penalty, cut)(net, batch, loss)) == [], (case, cut)


def sampled(cases, one_in):
    """Cases of which one in so many runs without --thorough."""
    for i, case in enumerate(cases):
        yield pytest.param(case, marks=[pytest.mark.thorough] * (i % one_in > 0))


@needs_compiler
@pytest.mark.parametrize("case", list(sampled(table("cpu", 29), 9)), ids=str)
def test_segments_have_the_bits_of_one_sweep(case):
    assert_same_bits(case)


@pytest.mark.parametrize("case", list(table("reference", 13))[1::4], ids=str)
def test_segments_have_the_bits_of_one_sweep_by_definition(case):
    assert_same_bits(case, (3, "auto"))


@pytest.mark.parametrize("case", list(table("eager", 29))[2::5], ids=str)
def test_eager_shares_exponents_and_agrees_to_rounding(case):
    net, batch, loss = problem(case)
    e, cut = (method(case.penalty, k)(net, batch, loss) for k in (None, 3))
    for name, g in e.gradient.items():
        assert (g - cut.gradient[name]).norm() <= 1e3 * torch.finfo(case.dtype).eps * g.norm(), (
            case,
            name,
        )


MORE = [
    *({"penalty": p} for p in SCALAR),
    *({"loss": l, "output": cases.FOLDED[l][0], "readout": "every"} for l in cases.FOLDED),
    {"loss": "user", "readout": "every", "counted": "some", "ragged": True, "penalty": "log-ratio"},
    {"loss": "no-target", "readout": "every", "penalty": "ratio"},
    {"loss": "absolute", "readout": "every", "penalty": "log-ratio", "weighted": True},
    {"B": 5, "counted": "weighted", "reduce": "mean", "penalty": "log-ratio"},
    {"x0": "given", "penalty": "variance"},
    {"x0": "buffer", "readout": "every", "penalty": "log-ratio"},
    {"T": 1, "penalty": "variance", "readout": "every"}, {"T": 1},
    {"B": 1, "T": 31, "penalty": "log-ratio"},
    {"H": 1, "D": 1, "O": 1, "readout": "every", "penalty": "log-ratio", "ragged": True},
    {"form": "list", "ragged": True, "penalty": "log-variance", "bias": False},
    {"form": "packed", "ragged": True, "readout": "every", "penalty": "log-ratio"},
    {"frozen": ("W", "b"), "penalty": "log-ratio", "readout": "every"},
    {"cell": "gru", "frozen": ("R", "b", "p.b_n", "V"), "penalty": "log-ratio"},
    {"activation": "softplus", "readout": "every", "ragged": True, "penalty": "log-ratio"},
    {"activation": "relu", "penalty": "log-ratio"},
    {"cell": "rate", "activation": "sigmoid", "penalty": "squared-norm"},
    {"B": 17, "T": 11, "H": 33, "dtype": torch.float32, "ragged": True, "readout": "every",
        "penalty": "log-ratio"},
]  # fmt: skip


@pytest.mark.parametrize("change", MORE, ids=str)
def test_options_have_the_bits_of_one_sweep(change):
    engine = "reference" if COMPILED else "cpu"
    case = replace(cases.Case(engine=engine, B=3, T=21, H=4, u_grad=False, seed=3), **change)
    assert_same_bits(case, (2, "auto"))


@needs_compiler
def test_real_chunks_have_the_bits_of_one_sweep(monkeypatch):
    monkeypatch.undo()
    rows.uniform_rows.cache_clear()
    for cell, readout, ragged, penalty in (
        ("elman", "every", False, "log-ratio"),
        ("lstm", "last", True, "none"),
    ):
        case = cases.Case(
            cell,
            penalty=penalty,
            engine="cpu",
            B=48,
            T=230,
            H=20,
            D=3,
            readout=readout,
            ragged=ragged,
            dtype=torch.float32,
            u_grad=False,
        )
        net, batch, loss = problem(case)
        assert len(segments.SegmentedGradient(net, batch, loss, 4).sizes) == 3
        assert_same_bits(case, (2, 4))


@pytest.mark.parametrize(
    "engine", ["reference", "eager", pytest.param("cpu", marks=needs_compiler)]
)
@pytest.mark.parametrize("readout", ["last", "every"])
def test_costates_far_outside_the_range_of_their_type_cross_boundaries(engine, readout):
    """log10 ||lam_0|| is about -190: at a boundary there is only a mantissa and an exponent, and a
    loss of order one.
    """
    T, B = 400, 2
    torch.manual_seed(0)
    net = co.Network("elman", inputs=2, hidden=4, outputs=1, readout=readout, engine=engine)
    co.initialisers.initialise(net, "spectral", radius=0.35, seed=0)
    mask = torch.zeros(T, B)
    mask[[200, T - 1]] = 1.0
    y = torch.randn(*((T, B) if readout == "every" else (B,)), 1)
    batch = co.Batch(torch.randn(T, B, 2), y, mask=mask if readout == "every" else None)
    whole, cut = (co.Penalised("log-ratio", 0.5, k)(net, batch, "squared") for k in (None, 40))
    assert float(whole.costates.log_norms()[0].max()) < -200
    if engine == "eager":
        assert torch.allclose(whole.gradient["W"], cut.gradient["W"], rtol=1e-4)
    else:
        assert differing(whole, cut) == []


def test_segments_agree_with_autograd():
    """A loop of torch operations, differentiated twice."""
    torch.manual_seed(1)
    T, B = 37, 3
    net = co.Network(
        "elman", inputs=2, hidden=4, outputs=2, readout="every", x0="learned", dtype=torch.float64
    )
    batch = co.Batch(
        torch.randn(T, B, 2, dtype=torch.float64), torch.randn(T, B, 2, dtype=torch.float64)
    )
    e = co.Penalised("log-ratio", 0.7, segments=4)(net, batch, "squared")
    states = [net.x0.expand(B, 4) + 0.0]
    for u in batch.u:
        states.append(torch.tanh(states[-1] @ net.W.T + u @ net.R.T + net.b))
    loss = sum(
        (x @ net.V.T + net.b_o - y).square().sum(1)
        for x, y in zip(states[1:], batch.y, strict=True)
    )
    lam = torch.autograd.grad(loss.sum(), states, create_graph=True)
    logs = torch.stack([l.square().sum(1).sqrt().log() for l in lam[1:]])
    G = (logs[:-1] - logs[1:]).square().mean(0)
    names = dict(net.named_parameters())
    expected = torch.autograd.grad((loss + 0.7 * G).mean(), list(names.values()))
    assert torch.allclose(e.losses, loss, rtol=1e-13)
    assert torch.allclose(e.penalties, G, rtol=1e-11)
    for name, g in zip(names, expected, strict=True):
        assert (e.gradient[name] - g).norm() < 1e-11 * g.norm(), name


@pytest.mark.parametrize("name", [p for p in (*co.penalties.PENALTIES, "user") if p not in SCALAR])
def test_penalties_that_need_all_costates_are_refused_with_the_reason(name):
    case = cases.Case(penalty=name, T=21, u_grad=False)
    data = cases.Data.of(case, case.dtype, oracle=False)
    G = cases.penalty(case, data)
    with pytest.raises(
        co.Unsupported, match=r"reads (the entries of the costates|trajectory\.)"
    ) as error:
        co.Penalised(G, 1.0, segments=2)(
            cases.network(case, data), cases.batch(case, data), "squared"
        )
    assert f"penalty '{co.penalties.penalty(G).name}'" in str(error.value)
    assert "leave out segments" in str(error.value)


def test_sums_of_scalar_penalties_are_penalties():
    net, batch, loss = problem(cases.Case(T=21, u_grad=False))
    G = 0.1 * co.penalties.log_ratio + co.penalties.variance_l1
    assert differing(*(co.Penalised(G, 0.5, k)(net, batch, loss) for k in (None, 3))) == []


def test_weight_zero_is_plain():
    net, batch, loss = problem(cases.Case(T=21, u_grad=False))
    e = co.Penalised("log-ratio", 0.0, 3)(net, batch, loss)
    plain = co.BPTT()(net, batch, loss)
    assert float(e.penalty) > 0
    assert all(torch.equal(g, plain.gradient[name]) for name, g in e.gradient.items())


def test_trajectory_and_costates_are_found_when_asked_for():
    net, batch, loss = problem(cases.Case(T=21, u_grad=False))
    whole, cut = (co.Penalised("log-ratio", 1.0, k)(net, batch, loss) for k in (None, 3))
    assert torch.equal(whole.trajectory.x, cut.trajectory.x)
    assert torch.equal(whole.costates.mantissa, cut.costates.mantissa)
    with torch.no_grad():
        net.W.mul_(0.5)
    with pytest.raises(co.InputError, match="has changed since"):
        co.BPTT(2)(net, batch, loss).trajectory, cut.run()


@pytest.mark.parametrize(
    ("asked", "found"), [(1, 1), (2, 2), (3, 3), (100, 11), ("auto", 6), (True, 6)]
)
def test_segments_are_whole_chunks(asked, found):
    net, batch, loss = problem(cases.Case(B=4, T=41, u_grad=False))  # chunks of 4 steps
    swept = segments.SegmentedGradient(net, batch, loss, segments.parse_segments(asked))
    assert len(swept.sizes) == found
    assert swept.steps % 4 == 0


@pytest.mark.parametrize("asked", [0, -1, 2.0, "many"])
def test_other_numbers_of_segments_are_refused(asked):
    with pytest.raises(
        co.InputError, match="segments must be a positive whole number, 'auto' or None; got"
    ):
        co.BPTT(segments=asked)
    with pytest.raises(co.InputError, match="segments must be"):
        co.Penalised("variance", segments=asked)


def test_step_functions_are_refused():
    u = torch.randn(5, 2, 2)
    for net in (
        co.Network(torch.nn.RNNCell(2, 3), inputs=2, hidden=3, outputs=1),
        co.Network("elman", inputs=2, hidden=3, outputs=1, engine="autograd"),
    ):
        with pytest.raises(co.Unsupported, match="segments need the cell's formula"):
            co.BPTT(2)(net, co.Batch(u, torch.randn(2, 1)), "squared")
    with pytest.raises(co.Unsupported, match="counted from a cell's formula"):
        memory.predict(
            co.Network(torch.nn.RNNCell(2, 3), inputs=2, hidden=3, outputs=1), 9, 2, co.BPTT()
        )


def test_a_constant_loss_is_refused():
    net = co.Network("elman", inputs=2, hidden=3, outputs=1, readout="every")
    with pytest.raises(co.InputError, match="does not depend on the states"):
        co.BPTT(2)(net, co.Batch(torch.randn(21, 2, 2), torch.zeros(21, 2)), lambda y_hat, y: y)


def test_errors_name_the_step_of_the_whole_sequence():
    net = co.Network(
        "elman", inputs=1, hidden=2, outputs=1, activation="identity", engine="reference"
    )
    with torch.no_grad():
        net.W.copy_(8 * torch.eye(2))
    batch = co.Batch(torch.ones(80, 1, 1), torch.zeros(1, 1))
    said = []
    for cut in (None, 4):
        with pytest.raises(co.NumericalError) as error:
            co.BPTT(cut)(net, batch, "squared")
        said.append(str(error.value))
    assert said[0] == said[1]
    assert re.search(r"at t = 4\d of 80", said[0])


def test_a_penalty_that_is_not_differentiable_is_blamed():
    net, batch, loss = problem(cases.Case(T=21, u_grad=False))

    def G(lam):
        return (lam.norms() - lam.norms().detach()).sqrt().sum(0)

    for cut in (None, 3):
        with pytest.raises(
            co.NumericalError,
            match="the penalty's derivative with respect to the costate is not finite at t = 0",
        ):
            co.Penalised(G, 1.0, cut)(net, batch, loss)


def test_affine_is_linear_algebra_and_differentiates_twice():
    net_rows = rows.Rows([5] * 9 + [2] * 8)
    y, M, b = (
        torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((61, 3), (4, 3), (4,))
    )

    def ours(y, M, b):
        return affine(net_rows, y, M, b)

    assert len(net_rows.chunks) > 2
    assert torch.allclose(ours(y, M, b), y @ M.T + b, rtol=1e-14)
    assert torch.autograd.gradcheck(ours, (y, M, b), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(ours, (y, M, b))


def test_float32_keeps_its_digits_over_many_rows(monkeypatch):
    monkeypatch.undo()
    many = rows.Rows([8] * 20_000)
    y, r = 1 + 0.1 * torch.rand(many.N, 3), 1 + 0.1 * torch.rand(many.N, 2)
    exact = y.double().T @ r.double()
    assert float((chunks.sum_products(many, y, r) - exact).norm() / exact.norm()) < 3e-7
    assert (
        float((chunks.sum_rows(many, y) - y.double().sum(0)).norm() / y.double().sum(0).norm())
        < 3e-7
    )


def test_small_products_add_up_few_rows_at_once():
    y = torch.arange(20.0)[:, None]
    found = [part.flatten().tolist() for (part,) in chunks.chunks_from_last(None, y, few=True)]
    assert found == [[16, 17, 18, 19], [*range(8, 16)], [*range(8)]]
    assert [len(part) for (part,) in chunks.chunks_from_last(None, y)] == [20]


def test_memory_that_is_alive_is_counted_once_and_until_it_goes():
    with memory.PeakBytes() as live:
        one = torch.ones(1000)
        assert (live.now, live.most) == (4000, 4000)
        view = one.view(10, 100)
        assert (live.now, live.most) == (4000, 4000)
        del one
        other = torch.ones(500)
        assert (live.now, live.most) == (6000, 6000)
        del view
        assert live.now == 2000
        del other
    assert (live.now, live.most) == (0, 6000)


def most_asked_for(run):
    """The most bytes of tensors that were alive at once, as torch asked its allocator for them: not
    what that took.
    """
    release()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    waiting, changes = list(profile.profiler.kineto_results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields))
    _, first = min(changes, key=lambda change: change[0])
    before = first.total_allocated - first.alloc_size
    return max(change.total_allocated for _, change in changes) - before


@needs_compiler
@pytest.mark.parametrize(
    ("cell", "T", "B", "units", "penalty", "segments_", "readout"),
    [
        ("elman", 6000, 48, 128, None, "auto", "last"),
        ("elman", 12000, 8, 128, "log-ratio", "auto", "last"),
        ("lstm", 1000, 8, 64, "log-ratio", 4, "every"),
        ("gru", 1000, 8, 64, "log-ratio", None, "last"),
        ("elman", 1500, 8, 128, "log-ratio", None, "last"),
    ],
)
def test_memory_is_what_was_predicted(cell, T, B, units, penalty, segments_, readout, monkeypatch):
    monkeypatch.undo()
    rows.uniform_rows.cache_clear()
    torch.manual_seed(0)
    net = co.Network(cell, inputs=2, hidden=units, outputs=2, readout=readout)
    y = torch.randn(*((T, B) if readout == "every" else (B,)), 2)
    batch = co.Batch(torch.randn(T, B, 2), y)
    how = co.BPTT(segments_) if penalty is None else co.Penalised(penalty, 0.1, segments_)
    predicted = memory.predict(net, T, B, how)
    asked = most_asked_for(lambda: how(net, batch, "squared"))
    # predicted are pages that are written to, and what others take; asked for are arrays, of which
    # one is never written to
    predicted -= memory.OVERHEAD_BYTES + 44 * T
    if not net.cell.needs_a:
        steps = T if segments_ is None else segments.segment_steps(rows.Rows([B] * T), segments_)
        predicted += (steps + T % steps) * B * len(net.cell.gates) * units * 4
    assert 0.9 < predicted / asked < 1.1, (predicted, asked)


def test_segments_take_less():
    net = co.Network("elman", inputs=2, hidden=256, outputs=2)
    for name in ("none", "log-ratio"):
        whole, cut = (memory.predict(net, 100_000, 8, method(name, k)) for k in (None, "auto"))
        assert cut < whole / 10


def test_the_command_line_says_what_a_gradient_will_take(monkeypatch):
    pytest.importorskip("pydantic")
    from coadjoint.cli import build
    from coadjoint.cli import flags as setting_flags
    from coadjoint.cli.memory import format_bytes

    assert [setting_flags.parse_flag("gradient", "segments", text) for text in ("4", "auto")] == [
        4,
        "auto",
    ]
    asked = {
        "task": {"name": "temporal-order", "length": 30},
        "network": {"hidden": 4},
        "training": {"threads": 1},
    }
    job = build.build(
        setting_flags.resolve(
            None, {**asked, "gradient": {"penalty": "log-ratio", "segments": "auto"}}
        )
    )
    method = job.arguments["gradient"]
    assert method.segments == "auto"
    predicted = memory.predict(job.network, 30, 32, method)
    assert job.notes[-1 if len(job.notes) == 1 else -2].startswith(
        f"a gradient at T = 30 takes about {format_bytes(predicted)}"
    )
    assert build.build(setting_flags.resolve(None, asked)).notes == ()
    monkeypatch.setattr(memory, "predict", lambda *_: 2 * 10**9)
    (note,) = build.build(setting_flags.resolve(None, asked)).notes
    assert (
        note
        == "a gradient at T = 30 takes about 2.00 GB of memory; --segments auto would take less"
    )
    for gradient, said in (
        ({"method": "rtrl", "segments": 2}, "--segments does nothing with --method rtrl"),
        ({"segments": 0}, "--segments: must be a positive whole number or auto; got 0"),
    ):
        with pytest.raises(co.ConfigError, match=re.escape(said)):
            build.build(setting_flags.resolve(None, {**asked, "gradient": gradient}))
