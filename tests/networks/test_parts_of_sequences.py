"""A sequence in parts, the state carried from one to the next, has the outputs of one run."""

import pytest
import torch

import coadjoint as co
from coadjoint.training.predict import run_in_parts

T = 300
NETWORKS = {
    "elman": lambda **o: co.Network("elman", **o),
    "lstm": lambda **o: co.Network("lstm", x0="learned", skip=True, **o),
    "lru": lambda **o: co.Network("lru", **o),
    "stack": lambda **o: co.Stack(["gru", "lstm"], **o),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize("name", NETWORKS)
def test_parts_are_the_whole(name, readout, dtype):
    torch.manual_seed(0)
    net = NETWORKS[name](inputs=2, hidden=6, outputs=3, readout=readout, dtype=dtype)
    assert net.carries_state
    batch = co.Batch(torch.randn(T, 1, 2, dtype=dtype))
    with torch.no_grad():
        whole = net.run(batch).a
        for steps in (64, 128, T, T + 1):
            parts = run_in_parts(net, batch, steps)
            tolerance = 1e-6 if dtype == torch.float32 else 1e-14
            torch.testing.assert_close(parts, whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "net",
    [
        co.Stack(["gru"], inputs=2, hidden=3, outputs=1, bidirectional=True, readout="every"),
        co.Network("gru", inputs=2, hidden=3, outputs=1, readout="attention"),
        co.Stack(["gru", "elman"], inputs=2, hidden=3, outputs=1, readout="tilted"),
    ],
    ids=["bidirectional", "attention", "tilted"],
)
def test_networks_without_a_state_to_carry_read_at_once(net):
    assert not net.carries_state
    batch = co.Batch(torch.randn(20, 1, 2))
    with torch.no_grad():
        assert torch.equal(run_in_parts(net, batch, 7), net.run(batch).a)
