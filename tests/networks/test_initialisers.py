"""Initialisers give W the properties they promise, gate by gate, and depend on the seed alone."""

import functools

import pytest
import torch

import build
import coadjoint as co
from coadjoint.errors import InputError, Unsupported
from coadjoint.networks.initialisers import INITIALISERS, initialise

network = functools.partial(build.network, seed=None, hidden=31)


def gates(net):
    return dict(net.named_parameters())["W"].detach().split(net.hidden)


ORACLES = {
    "spectral": lambda W, r: torch.linalg.eigvals(W).abs().max() - r,
    "orthogonal": lambda W, r: (W.T @ W - r**2 * torch.eye(len(W), dtype=W.dtype)).abs().max(),
    "identity": lambda W, r: (W - r * torch.eye(len(W), dtype=W.dtype)).abs().max(),
}


@pytest.mark.parametrize("cell", ["elman", "lstm", "gru"])
@pytest.mark.parametrize("name", ORACLES)
def test_every_gate_is_scaled(name, cell):
    for W in gates(initialise(network(cell), name, radius=0.7)):
        assert abs(float(ORACLES[name](W, 0.7))) < 1e-12


@pytest.mark.parametrize("name", INITIALISERS)
def test_the_seed_decides(name):
    a, b, c = (
        initialise(network("lru" if name == "ring" else "elman"), name, seed=s).state_dict()
        for s in (0, 0, 1)
    )
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a["V"], c["V"])


def test_gaussian_weights_have_the_std_asked_for():
    net = initialise(network(hidden=300), "gaussian", std=0.02)
    for key in ("W", "R", "V"):
        assert float(net.state_dict()[key].std()) == pytest.approx(0.02, rel=0.15)
    assert not net.state_dict()["b"].any()


@pytest.mark.parametrize(
    "wrong", [{"radius": 0.0}, {"radius": float("nan")}, {"std": -1.0}, {"name": "spectrl"}]
)
def test_options_that_do_not_fit_are_refused(wrong):
    with pytest.raises(InputError):
        initialise(network(), **{"name": "spectral", **wrong})


def test_sparse_gives_each_unit_the_same_number_of_links():
    for W in gates(initialise(network("gru"), "sparse", radius=0.8)):
        assert ((W != 0).sum(1) == 15).all()
        assert float(torch.linalg.eigvals(W).abs().max()) == pytest.approx(0.8, rel=1e-12)
    few = initialise(network(hidden=9), "sparse", radius=0.8)
    assert (gates(few)[0] != 0).all()


def test_recipes_have_their_own_numbers():
    """Standard deviations of R and V, and what W is."""
    stds = {"sigmoid": 0.01, "basic-tanh": 0.1, "smart-tanh": 0.01}
    for name, std in stds.items():
        held = initialise(network(hidden=300), name).state_dict()
        for key in ("R", "V") if name == "smart-tanh" else ("W", "R", "V"):
            assert float(held[key].std()) == pytest.approx(std, rel=0.15), (name, key)
        assert not held["b"].any()
    W = gates(initialise(network(), "smart-tanh"))[0]
    assert ((W != 0).sum(1) == 15).all()
    assert float(torch.linalg.eigvals(W).abs().max()) == pytest.approx(0.95, rel=1e-12)
    with pytest.raises(InputError, match="initialiser 'smart-tanh' takes no options; got radius"):
        initialise(network(), "smart-tanh", radius=0.5)


@pytest.mark.parametrize(("name", "variance"), [("glorot", 2 / 600), ("he", 2 / 300)])
def test_variances_follow_the_fans(name, variance):
    W = gates(initialise(network(hidden=300), name))[0]
    assert float(W.var()) == pytest.approx(variance, rel=0.05)


PLACED = ("spectral", "sparse", "orthogonal", "identity", "smart-tanh")
REFUSED = {  # cells without W, and structures that cannot hold what is asked for
    **dict.fromkeys(("unicornn", "unicornn-layers", "mingru", "minlstm", "lru"), PLACED),
    **dict.fromkeys(("antisymmetric", "antisymmetric-gated"), PLACED),
    "exponential": ("spectral", "sparse", "smart-tanh"),
    "inverse": ("spectral", "sparse", "orthogonal", "smart-tanh"),
}
KINDS = [*co.cells.CELLS, *co.cells.steps.STEPS]


@pytest.mark.parametrize("cell", KINDS)
def test_every_cell_has_the_starts_that_it_can_hold(cell):
    for name in INITIALISERS:
        refused = name in REFUSED.get(cell, ()) or (name == "ring" and cell != "lru")
        net = network(cell, hidden=5)
        if refused:
            with pytest.raises(
                Unsupported, match=f"init '{name}' .*Use init 'torch', 'gaussian', 'glorot' or 'he'"
            ):
                initialise(net, name)
        else:
            initialise(net, name)
            assert all(torch.isfinite(p).all() for p in net.parameters())


SHAPES = {
    **{cell: lambda cell=cell: network(cell, hidden=5) for cell in KINDS},
    "attention": lambda: co.Network("gru", inputs=3, hidden=5, outputs=2, readout="attention",
        steps=3, skip=True, deep=4),
    "structured": lambda: co.Network("lstm", inputs=3, hidden=5, outputs=2, structure="low-rank"),
    "stack": lambda: co.Stack(["lstm", "gated-feedback", "lru"], inputs=3, hidden=5, outputs=2,
        bidirectional=True, deep=4),
    "torch's cell": lambda: co.Network(torch.nn.GRUCell(3, 5), inputs=3, hidden=5, outputs=2),
    "embedding": lambda: co.EncoderDecoder("gru", inputs=3, hidden=5, outputs=4),
}  # fmt: skip


@pytest.mark.parametrize("name", ["torch", "gaussian", "glorot"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_seed_reaches_every_parameter(shape, name):
    """Whatever was drawn before: equal seeds give equal networks, and other seeds move all that is
    drawn.
    """
    torch.manual_seed(0)
    a, b, c = (initialise(SHAPES[shape](), name, seed=s).state_dict() for s in (3, 3, 4))
    assert all(torch.equal(a[key], b[key]) for key in a)
    fixed = [key for key in a if torch.equal(a[key], c[key])]
    drawn = (
        "W",
        "R",
        "V",
        "D",
        "U",
        "weight",
        "w_a",
        "original",
        "original0",
        "nu",
        "theta",
        "g_below",
        "g_states",
    )
    assert not [key for key in fixed if key.rpartition(".")[2] in drawn]
    if name == "torch":  # biases too; what stays is the cell's own
        assert all(".p." in f".{key}" for key in fixed)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.slow
def test_torch_draws_as_the_constructor_does(shape):
    """The largest entry of each parameter is that of the same distribution, over many seeds."""

    def largest(nets):
        return {
            key: max(float(p.detach().abs().max()) for p in every)
            for key, every in zip(
                dict(nets[0].named_parameters()),
                zip(*(n.parameters() for n in nets), strict=True),
                strict=True,
            )
        }

    ours = largest([initialise(SHAPES[shape](), "torch", seed=s) for s in range(60)])
    torch.manual_seed(1)
    theirs = largest([SHAPES[shape]() for _ in range(60)])
    for key, bound in theirs.items():
        if ".p." not in f".{key}":  # the logarithm of a ring has no largest entry
            assert ours[key] == pytest.approx(bound, rel=0.2, abs=1e-12), key


def test_blocks_of_a_w_that_reads_two_slots_are_scaled_each():
    for cell in ("scrn", "cornn"):
        W = initialise(network(cell), "spectral", radius=0.7).W.detach()
        assert W.shape == (31, 62)
        for block in W.split(31, 1):
            assert float(torch.linalg.eigvals(block).abs().max()) == pytest.approx(0.7, rel=1e-12)


STEPS = {
    "gru-before": (3, {}),
    "lstm-mixed": (5, {}),
    "gated-feedback": (2 * 2, {}),
    "deep-transition": (2, {}),
    "gated-feedback lstm": (2 * (2 + 3), {"unit": "lstm"}),
    "deep-transition shortcut": (4, {"depth": 3, "shortcut": True}),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_square_matrices_of_a_step_are_scaled(name):
    count, options = STEPS[name]
    net = co.Network(name.split()[0], inputs=3, hidden=7, outputs=2, dtype=torch.float64, **options)
    found = initialise(net, "orthogonal", radius=0.6).step.blocks()
    assert len(found) == count
    for W in (block.detach() for block in found):
        assert float((W.T @ W - 0.36 * torch.eye(7, dtype=W.dtype)).abs().max()) < 1e-12
    assert len({W.data_ptr() for W in found}) == count


def test_matrices_of_a_step_that_are_not_square_are_left_alone():
    net = co.Network("deep-transition", inputs=3, hidden=7, outputs=2, width=4)
    with pytest.raises(Unsupported, match="needs square matrices, which this step does not have"):
        initialise(net, "spectral")
    with pytest.raises(Unsupported, match="needs square matrices"):
        initialise(co.Network(torch.nn.RNNCell(3, 7), inputs=3, hidden=7, outputs=2), "spectral")


def structured(structure, cell="gru", hidden=16, dtype=torch.float64):
    return co.Network(cell, inputs=3, hidden=hidden, outputs=2, structure=structure, dtype=dtype)


@pytest.mark.parametrize("structure", ["orthogonal", "cayley"])
def test_structures_of_rotations_start_at_one(structure):
    for seed in range(8):
        for W in initialise(structured(structure), "orthogonal", seed=seed).W.detach().split(16):
            assert float((W.T @ W - torch.eye(16, dtype=W.dtype)).abs().max()) < 1e-9
            assert float(torch.linalg.det(W)) == pytest.approx(1)
            assert float((W - torch.eye(16, dtype=W.dtype)).abs().max()) > 0.5
    with pytest.raises(Unsupported, match="draws a W that its structure cannot represent"):
        initialise(structured(structure), "orthogonal", radius=0.5)


@pytest.mark.parametrize("name", ["spectral", "sparse"])
def test_dales_law_holds_at_any_spectral_radius(name):
    for W in initialise(structured("dale", hidden=31), name, radius=0.8).W.detach().split(31):
        assert float(torch.linalg.eigvals(W).abs().max()) == pytest.approx(0.8, rel=1e-9)
        assert (W[:, :25] >= 0).all()
        assert (W[:, 25:] <= 0).all()
        assert ((W != 0).sum(1) == (15 if name == "sparse" else 31)).all()


def test_the_identity_of_low_rank_still_learns():
    net = initialise(structured("low-rank"), "identity")
    assert torch.equal(net.W.detach().split(16)[0], torch.eye(16, dtype=torch.float64))
    e = co.BPTT()(
        net, co.Batch(torch.randn(9, 4, 3).double(), torch.zeros(4, 2).double()), "squared"
    )
    assert (
        sum(float(g.abs().sum()) for key, g in e.gradient.items() if "parametrizations" in key) > 0
    )


@pytest.mark.parametrize(("inner", "radius"), [(0.0, 1.0), (0.9, 0.99), (0.4, 0.5)])
def test_a_ring_is_filled_evenly(inner, radius):
    """|L|^2 is uniform: its quantiles are those of the interval."""
    net = initialise(network("lru", hidden=4000), "ring", inner=inner, radius=radius)
    area = torch.exp(-torch.exp(net.p["nu"].detach())) ** 2
    low, high = inner**2, radius**2
    assert low - 1e-12 <= float(area.min()) < float(area.max()) <= high + 1e-12
    for q in (0.1, 0.25, 0.5, 0.75, 0.9):
        assert (float(area.quantile(q)) - low) / (high - low) == pytest.approx(q, abs=0.03)
    assert not net.b.any()
    for wrong in ({"inner": 0.9, "radius": 0.5}, {"radius": 1.5}, {"inner": -0.1}):
        with pytest.raises(InputError):
            initialise(net, "ring", **wrong)
