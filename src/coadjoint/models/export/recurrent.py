"""Recurrent networks as operations: layers, directions, summaries and readouts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from ...cells.cell import Cell
from ...errors import Unsupported
from ...networks.network import Network
from ...networks.readout import Readout
from ...networks.recurrence import Recurrence
from ...networks.shortcuts import Joined, Projected
from ...networks.stack import Stack
from .formulas import STEP_WRITERS, write_formula
from .writer import Value, Writer

LONGEST_PERIOD = 20_000  # steps, of data that a cell is given


def write_recurrent(
    writer: Writer, net: Network | Stack, u: Value, lengths: Value, alive: Value
) -> Value:
    """The pre-outputs a, [B, outputs], or [T, B, outputs] with readout "every".

    u        [T, B, inputs], zero where a sample has no step
    lengths  [B], the steps of each sample; alive: where there is one, [T, B, 1]
    """
    if isinstance(net, Network):
        y, last = write_layer(writer, "layer0", net, u, lengths, alive, reverse=False)
    else:
        y, last = write_layers(writer, net, u, lengths, alive)
    h = y if net.reads_all_steps else last
    if net.summary is not None:
        h = summarise(writer, net, h, lengths, alive)
    for index, hidden in enumerate(net.deep):
        assert isinstance(hidden, nn.Linear)
        z = writer.affine(h, hidden.weight, hidden.bias, f"deep{index}")
        h = writer.apply("tanh", z, name="h")
    a = writer.affine(h, net.V, net.b_o, "V")
    if hasattr(net, "D"):
        at_outputs = u if net.readout == "every" else writer.last(u, lengths)
        a = writer.apply("add", a, writer.affine(at_outputs, net.D, None, "D"), name="a")
    return a


def write_layers(
    writer: Writer, net: Stack, u: Value, lengths: Value, alive: Value
) -> tuple[Value, Value]:
    """y^L at all steps, and after the last step of each direction."""
    y = u
    lasts: list[Value] = []
    for index, directions in enumerate(net.layers.by_layer):
        outputs: list[Value] = []
        ends: list[Value] = []
        read = writer.concat([u, y], "read") if net.layers.dense and index > 0 else y
        for direction, layer in enumerate(directions):
            name = f"layer{index}" + ("_reverse" if direction else "")
            h, last = write_layer(writer, name, layer, read, lengths, alive, reverse=direction == 1)
            outputs.append(h)
            ends.append(last)
        h = writer.concat(outputs, "h")
        y = write_shortcut(writer, net, index, h, y, "y")
        lasts.append(writer.concat(ends, "last"))
    end = lasts[0]
    for index, last in enumerate(lasts[1:], start=1):
        end = write_shortcut(writer, net, index, last, end, "end")
    return y, end


def write_shortcut(
    writer: Writer, net: Stack, index: int, h: Value, below: Value, name: str
) -> Value:
    """The output of layer `index` from what it shows and the output below; `name` of the result."""
    shortcut = net.layers.shortcut(index)
    if shortcut is None:
        return h
    if isinstance(shortcut, Joined):
        return writer.concat([below, h], name)
    if isinstance(shortcut, Projected):
        below = writer.affine(below, shortcut.P, None, f"P{index}")
    return writer.apply("add", h, below, name=name)


def write_layer(
    writer: Writer,
    name: str,
    layer: Recurrence,
    u: Value,
    lengths: Value,
    alive: Value,
    reverse: bool,
) -> tuple[Value, Value]:
    """The visible state of a layer at all steps [T, B, .], and after its last step [B, .]."""
    kind = built_in_kind(layer)
    if kind is not None:
        return writer.built_in(kind, name, layer, u, lengths, reverse)
    read = writer.reverse(u, lengths) if reverse else u
    slots = list(layer.cell.slots) if layer.cell else [f"x{i}" for i in range(layer.slots)]
    starts = []
    for slot, x0 in zip(slots, layer.x0.detach().split(layer.hidden), strict=True):
        starts.append(writer.first_state(x0, u, f"{name}_{slot}0"))
    if layer.cell is None:
        states, ends = scan_step(writer, name, layer, read, starts, slots, alive)
    else:
        states, ends = scan_formula(writer, name, layer, layer.cell, read, starts, alive)
    y = writer.concat([states[i] for i in layer.visible_slots], f"{name}_h")
    last = writer.concat([ends[i] for i in layer.visible_slots], f"{name}_last")
    return (writer.reverse(y, lengths) if reverse else y), last


def built_in_kind(layer: Recurrence) -> str | None:
    """The name of this layer as `Writer.built_in` knows it; None if formats have no such layer."""
    cell = layer.cell
    if cell is None:
        return None
    if cell.name in ("lstm", "gru"):
        return cell.name
    if cell.name == "elman" and cell.next[0].op in ("tanh", "relu"):
        return cell.next[0].op
    return None


def scan_step(
    writer: Writer,
    name: str,
    layer: Recurrence,
    u: Value,
    starts: Sequence[Value],
    slots: Sequence[str],
    alive: Value,
) -> tuple[list[Value], list[Value]]:
    """The slots of a layer with a step function, at all steps and at the end."""
    step = layer.step
    write = STEP_WRITERS.get(type(step))  # type: ignore[arg-type]
    if write is None:
        raise Unsupported(
            f"the step function {layer.name} is code of your own, which cannot be exported. Cells "
            "with a name can be: see `coadjoint cells`."
        )

    def body(inner: Writer, inputs: Sequence[Value], state: Sequence[Value]) -> Sequence[Value]:
        return write(inner, step, inputs[0], state, name)

    return writer.scan(name, [u], starts, slots, alive, body)


def scan_formula(
    writer: Writer,
    name: str,
    layer: Recurrence,
    cell: Cell,
    u: Value,
    starts: Sequence[Value],
    alive: Value,
) -> tuple[list[Value], list[Value]]:
    """The slots of a layer with a formula, at all steps and at the end."""
    weights = layer.effective_weights()
    (R, b), of_side = weights.input_weights
    sequences = [writer.affine(u, R, b, f"{name}_R")]
    sides = []
    if of_side is not None:
        sides.append(writer.affine(u, *of_side, f"{name}_R_side"))
    if cell.given:
        sides.append(given_data(writer, name, layer, cell, u))
    if sides:
        sequences.append(writer.concat(sides, f"{name}_side"))

    def body(inner: Writer, inputs: Sequence[Value], state: Sequence[Value]) -> Sequence[Value]:
        return write_formula(inner, weights, inputs, state, name)

    return writer.scan(name, sequences, starts, cell.slots, alive, body)


def given_data(writer: Writer, name: str, layer: Recurrence, cell: Cell, u: Value) -> Value:
    """The data that a cell is given at each step, [T, B, given d]; they must be periodic in t."""
    assert cell.data is not None
    times = torch.arange(1, 2 * LONGEST_PERIOD + 1)
    first_unit = cell.data(times, 1, False)
    period = find_period(first_unit)
    if period is None:
        raise Unsupported(
            f"cell '{cell.name}' is given data that do not repeat within {LONGEST_PERIOD:,} "
            "steps, and cannot be exported."
        )
    table = cell.data(times[:period], layer.hidden, False)
    rows = writer.constant(table.to(layer.x0.dtype), f"{name}_given")
    t = writer.apply("mod", writer.apply("steps", u, name="t", dtype="int64"), value=period)
    chosen = writer.apply("rows", rows, t, name=f"{name}_given")
    return writer.apply("over_samples", chosen, u, name=f"{name}_given")


def find_period(values: torch.Tensor) -> int | None:
    """The least number of rows after which the first half of `values` repeats."""
    half = len(values) // 2
    starts = (values[1 : half + 1] == values[0]).all(1).nonzero()[:, 0] + 1
    for period in starts.tolist():
        if torch.equal(values[:-period], values[period:]):
            return int(period)
    return None


def summarise(writer: Writer, net: Readout, h: Value, lengths: Value, alive: Value) -> Value:
    """One vector for each sample from its own steps of h [T, B, n]: [B, n]."""
    if net.summary == "attention":
        return attend(writer, net, h, alive)
    count = writer.apply("cast", lengths, name="count", dtype=h.dtype)
    count = writer.apply("reshape", count, shape=(-1, 1), name="count")
    if net.summary == "mean":
        # Where a sample has no step, h is nothing to add.
        h = writer.apply("where", alive, h, 0.0, name="h", dtype=h.dtype)
        total = writer.apply("sum", h, axis=0, keep=False, name="total")
        return writer.apply("div", total, count, name="summary")
    if net.summary not in ("tilted", "tilted-tanh"):
        raise Unsupported(f"readout '{net.summary}' cannot be exported.")
    y = writer.apply("mul", h, net.beta, name="y")
    y = writer.apply("where", alive, y, -math.inf, name="y", dtype=h.dtype)
    largest = writer.apply("max", y, axis=0, keep=False, name="largest")
    powers = writer.apply("exp", writer.apply("sub", y, largest), name="powers")
    total = writer.apply("sum", powers, axis=0, keep=False, name="total")
    mean = writer.apply("log", writer.apply("div", total, count), name="log_mean")
    log_m = writer.apply("add", largest, mean, name="log_m")
    if net.summary == "tilted-tanh":
        log_m = log_tanh(writer, log_m)
    return writer.apply("div", log_m, net.beta, name="summary")


def log_tanh(writer: Writer, log_m: Value) -> Value:
    """The logarithm of tanh(m) from log m, by the formulas of `networks.readout.tilted_tanh`."""
    low = writer.apply("clip", log_m, low=-20.0, high=0.0)
    of_small = writer.apply("log", writer.apply("tanh", writer.apply("exp", low)))
    large = writer.apply("exp", writer.apply("clip", log_m, low=0.0, high=5.8), name="large")
    q = writer.apply("sigmoid", writer.apply("mul", large, -2.0))
    of_large = writer.apply("log1p", writer.apply("mul", q, -2.0), name="of_large")
    is_small = writer.apply("less", log_m, 0.0, dtype="bool")
    is_tiny = writer.apply("less", log_m, -20.0, dtype="bool")
    chosen = writer.apply("where", is_small, of_small, of_large, dtype=log_m.dtype)
    return writer.apply("where", is_tiny, log_m, chosen, dtype=log_m.dtype)


def attend(writer: Writer, net: Readout, h: Value, alive: Value) -> Value:
    """sum_t alpha_t h_t, alpha the softmax over a sample's steps of tanh(w_a . h_t + b_t)."""
    assert isinstance(net.w_a, torch.Tensor)
    assert isinstance(net.b_a, torch.Tensor)
    t = writer.apply("steps", h, name="t", dtype="int64")
    t = writer.apply("at_most", t, value=len(net.b_a) - 1)
    b_t = writer.apply("rows", writer.constant(net.b_a[:, None, None], "b_a"), t, name="b_t")
    score = writer.affine(h, net.w_a[None], None, "w_a")
    score = writer.apply("tanh", writer.apply("add", score, b_t), name="score")
    weight = writer.apply("where", alive, writer.apply("exp", score), 0.0, dtype=h.dtype)
    total = writer.apply("sum", weight, axis=0, keep=True, name="total")
    alpha = writer.apply("div", weight, total, name="alpha")
    # Where a sample has no step, h is nothing to multiply.
    h = writer.apply("where", alive, h, 0.0, name="h", dtype=h.dtype)
    return writer.apply("sum", writer.apply("mul", alpha, h), axis=0, keep=False, name="summary")
