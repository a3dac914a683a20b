"""The capacity of the machine, and the work that a gradient must do at least."""

from __future__ import annotations

import torch

from ...cells import library
from ...cells.cell import Cell
from .clock import best_time, tf32
from .mlp import MLP
from .problems import DIRECTIONS, FORMULAS, LAYERS, PRODUCTS, Size


def gemm_rate(rows: int, inner: int, columns: int, device: str) -> float:
    """GFLOP/s of one float32 product [rows, inner] x [inner, columns].

    It has 2 rows inner columns operations; one per ms is 1e-6 GFLOP/s.
    """
    a = torch.randn(rows, inner, device=device)
    b = torch.randn(inner, columns, device=device)
    out = torch.empty(rows, columns, device=device)
    return 2e-6 * rows * inner * columns / best_time(lambda: torch.mm(a, b, out=out), device)


def memory_bandwidth(entries: int, device: str) -> float:
    """GB/s of a large float32 array that is read and written, so that its bytes count twice.

    A byte per ms is 1e-6 GB/s.
    """
    y = torch.zeros(entries, device=device)
    return 2e-6 * y.nbytes / best_time(lambda: y.add_(1.0), device)


def measure_limits(device: str) -> dict[str, float]:
    """What this machine can do: large products, memory, and on a GPU the launch of a kernel.

    A GPU needs larger arrays than a CPU to be fully busy.
    """
    if device == "cpu":
        return {
            "GEMM GFLOP/s": gemm_rate(1024, 1024, 1024, device),
            "memory GB/s": memory_bandwidth(2**25, device),
        }
    limits = {}
    for name, on in (("GEMM GFLOP/s", False), ("GEMM GFLOP/s with tf32", True)):
        with tf32(on):
            limits[name] = gemm_rate(8192, 8192, 8192, device)
    limits["memory GB/s"] = memory_bandwidth(2**28, device)
    tiny = torch.zeros(1, device=device)  # so small that only the launch takes time
    limits["kernel launch us"] = 1e3 * best_time(lambda: tiny.add_(1.0), device)
    return limits


def formula_of(cell: str) -> Cell:
    """The cell of a network, or that of a module: "lstm" gives the same as "nn.LSTM".

    A deep network is swept as an elman over its layers.
    """
    if cell == MLP:
        return library.named("elman")
    return library.named(FORMULAS.get(cell, cell))


def layer_inputs(cell: str, size: Size) -> list[int]:
    """For each layer and direction, the inputs of its layer; 0 for the first layer.

    A module has LAYERS layers in DIRECTIONS directions, a network one layer in one. The few inputs
    of the first layer are not worth counting; a later one reads the units of all directions.
    """
    if cell not in FORMULAS:
        return [0]
    d = size[2]
    first = [0] * DIRECTIONS
    later = [DIRECTIONS * d] * DIRECTIONS
    return first + later * (LAYERS - 1)


def flops(cell: str, size: Size, kind: str) -> float:
    """The multiplications and additions that a gradient must do.

    Every sweep and every weight product multiplies T B rows by W, [g d, d] for g gates: that is
    2 T B g d d operations. A layer that reads another one needs as many products with its input
    weights, [g d, inputs]. kind: of gradient, such as "plain".
    """
    T, B, d = size
    gates = len(formula_of(cell).gates)
    products = sum(PRODUCTS[kind])  # sweeps and weight products alike
    total = 0.0
    for inputs in layer_inputs(cell, size):
        total += products * 2.0 * T * B * gates * d * (d + inputs)
    return total


def traffic(cell: str, size: Size, kind: str) -> float:
    """The bytes that a gradient must move at least.

    A sweep reads one array of gates and writes one of states, or the reverse. A weight product
    reads the gates and h, one slot of the states. A product with input weights moves the gates and
    the inputs. kind: of gradient, such as "plain".
    """
    T, B, d = size
    formula = formula_of(cell)
    gates = len(formula.gates)
    sweeps, products = PRODUCTS[kind]
    recurrent = d * (sweeps * (gates + len(formula.slots)) + products * (gates + 1))
    entries = 0  # of one step of one sample
    for inputs in layer_inputs(cell, size):
        entries += recurrent
        if inputs:
            entries += (sweeps + products) * (inputs + gates * d)
    return 4.0 * T * B * entries  # float32 has 4 bytes
