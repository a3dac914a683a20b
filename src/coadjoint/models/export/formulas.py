"""One step of a cell: its formula node by node, or its step function operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...cells.activations import ACTIVATIONS, ActivationFunction
from ...cells.cell import Cell
from ...cells.formula import PRIMITIVES, Node, dependent_nodes, is_const, walk
from ...cells.steps import (
    DeepTransition,
    FeedbackLayer,
    GatedFeedback,
    MixedLSTM,
    ResetBefore,
    UnICORNNLayers,
)
from ...cells.unicornn_layers import OscillatorLayer
from ...errors import Unsupported
from ...networks.effective_weights import EffectiveWeights
from ...networks.recurrence import Recurrence
from .writer import Argument, Value, Writer

BINARY: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
}


def write_formula(
    writer: Writer,
    weights: EffectiveWeights,
    inputs: Sequence[Value],
    state: Sequence[Value],
    prefix: str,
) -> list[Value]:
    """x_t of each slot, from (base_t,) or (base_t, side_t) and the slots of x_{t-1}.

    prefix: how the names of constants begin.
    """
    cell = weights.cell
    layer = weights.recurrence
    base, *sides = inputs
    a = base
    known: dict[Node, Argument] = dict(zip(cell.x, state, strict=True))
    if weights.W is not None:
        read = translate(writer, cell.read, known, ["read"] * len(cell.read))
        z = writer.affine(writer.concat(read, "read"), weights.W, None, f"{prefix}_W")
        a = writer.apply("add", z, base, name="a")
    gates = writer.split(a, layer.hidden, [f"a_{gate}" for gate in cell.gates])
    known.update(zip(cell.a, gates, strict=True))
    if sides:
        names = [f"v_{entry}" for entry in cell.side_entries]
        known.update(zip(cell.v, writer.split(sides[0], layer.hidden, names), strict=True))
    if writer.folds_constants:
        known.update(fold_constants(writer, cell, layer, prefix))
    else:
        for symbol, (name, value) in zip(cell.p, layer.p.items(), strict=True):
            known[symbol] = writer.constant(value, f"{prefix}_{name}")
    return translate(writer, cell.next, known, cell.slots)


def translate(
    writer: Writer, outputs: Sequence[Node], known: dict[Node, Argument], names: Sequence[str]
) -> list[Value]:
    """The values of expressions, from those of the nodes that are known; names: of the results."""
    known = dict(known)
    name_of = dict(zip(outputs, names, strict=True))
    for node in walk(outputs, frozenset(known)):
        if node in known:
            continue
        if is_const(node):
            known[node] = float(node.value)
            continue
        arguments = [known[argument] for argument in node.args]
        attributes = {"value": node.value} if node.op == "power" else {}
        hint = name_of.get(node, "")
        known[node] = writer.apply(node.op, *arguments, name=hint, **attributes)
    results = []
    for output in outputs:
        value = known[output]
        if not isinstance(value, Value):
            raise Unsupported(f"a formula whose result is the number {value} cannot be exported.")
        results.append(value)
    return results


def fold_constants(writer: Writer, cell: Cell, layer: Recurrence, prefix: str) -> dict[Node, Value]:
    """The values of what depends on the per-unit parameters alone, computed by torch.

    So expm1 and log1p of parameters keep their digits in a format that has neither.
    """
    moving = dependent_nodes(cell.next, (*cell.a, *cell.v, *cell.x))
    values: dict[Node, Tensor] = {}
    for symbol, value in zip(cell.p, layer.p.values(), strict=True):
        values[symbol] = value.detach()
    folded: dict[Node, Value] = {}
    for node in walk(cell.next):
        if node in moving or is_const(node):
            continue
        if node not in values:
            values[node] = evaluate(node, values)
    # Only what a moving node reads is stored.
    for node in walk(cell.next):
        for argument in node.args if node in moving else ():
            if argument in values and argument not in folded:
                name = str(argument.value).removeprefix("p.") if argument in cell.p else argument.op
                folded[argument] = writer.constant(values[argument], f"{prefix}_{name}")
    return folded


def evaluate(node: Node, values: dict[Node, Tensor]) -> Tensor:
    """The value of one node from those of its arguments, some of which may be numbers."""
    arguments = []
    for argument in node.args:
        number = torch.tensor(argument.value, dtype=torch.float64) if is_const(argument) else None
        arguments.append(values[argument] if number is None else number)
    if node.op in BINARY:
        return BINARY[node.op](*arguments)
    if node.op == "neg":
        return -arguments[0]
    if node.op == "power":
        return arguments[0] ** float(node.value)
    return PRIMITIVES[node.op].run(*arguments)


def activation_name(function: ActivationFunction) -> str:
    """The name of an activation; a function of the user has none, and is refused."""
    for name, known in ACTIVATIONS.items():
        if known is function:
            return name
    raise Unsupported(
        "a step with an activation that is a function of your own cannot be exported. Use one of "
        f"{', '.join(ACTIVATIONS)}."
    )


def activate(writer: Writer, function: ActivationFunction, a: Value, name: str) -> Value:
    """The activation of a; the identity adds nothing."""
    op = activation_name(function)
    return a if op == "identity" else writer.apply(op, a, name=name)


def write_reset_before(
    writer: Writer, step: ResetBefore, u: Value, state: Sequence[Value], prefix: str
) -> list[Value]:
    """The step of `gru-before`."""
    d = step.hidden
    (h,) = state
    v = writer.affine(u, step.R, step.b, f"{prefix}_R")
    v_gates = writer.apply("part", v, name="v_gates", start=0, stop=2 * d)
    v_n = writer.apply("part", v, name="v_n", start=2 * d, stop=3 * d)
    z = writer.affine(h, step.W[: 2 * d], None, f"{prefix}_W_gates")
    gates = writer.apply("sigmoid", writer.apply("add", z, v_gates, name="a"), name="gates")
    r, k = writer.split(gates, d, ["r", "k"])
    reset = writer.apply("mul", r, h, name="reset")
    z_n = writer.affine(reset, step.W[2 * d :], None, f"{prefix}_W_n")
    n = writer.apply("tanh", writer.apply("add", z_n, v_n, name="a_n"), name="n")
    return [blend(writer, k, n, h)]


def write_mixed_lstm(
    writer: Writer, step: MixedLSTM, u: Value, state: Sequence[Value], prefix: str
) -> list[Value]:
    """The step of `lstm-mixed`."""
    d = step.hidden
    h, c = state
    v = writer.affine(u, step.R, step.b, f"{prefix}_R")
    a = writer.apply("add", writer.affine(h, step.W, None, f"{prefix}_W"), v, name="a")
    *of_gates, a_n = writer.split(a, d, ["a_i", "a_f", "a_o", "a_n"])
    i, f, o = (writer.apply("sigmoid", of_gate, name="gate") for of_gate in of_gates)
    stays = writer.apply("mul", f, c, name="stays")
    new = writer.apply("mul", i, writer.apply("tanh", a_n, name="n"), name="new")
    c = writer.apply("add", stays, new, name="c")
    mixed = writer.apply("tanh", writer.affine(c, step.U, None, f"{prefix}_U"), name="mixed")
    return [writer.apply("mul", o, mixed, name="h"), c]


def blend(writer: Writer, k: Value, n: Value, h: Value) -> Value:
    """(1 - k) n + k h."""
    new = writer.apply("mul", writer.apply("sub", 1.0, k, dtype=k.dtype), n)
    return writer.apply("add", new, writer.apply("mul", k, h), name="h")


def write_deep_transition(
    writer: Writer, step: DeepTransition, u: Value, state: Sequence[Value], prefix: str
) -> list[Value]:
    """The step of `deep-transition`."""
    (h,) = state
    z = writer.affine(h, step.W, None, f"{prefix}_W")
    a = writer.apply("add", z, writer.affine(u, step.R, step.b, f"{prefix}_R"), name="a")
    for index, layer in enumerate(step.rest):
        assert isinstance(layer, nn.Linear)
        y = activate(writer, step.phi, a, "y")
        a = writer.affine(y, layer.weight, layer.bias, f"{prefix}_W{index + 2}")
    if step.S is not None:
        a = writer.apply("add", a, writer.affine(h, step.S, None, f"{prefix}_S"), name="a")
    return [activate(writer, step.phi, a, "h")]


def write_gated_feedback(
    writer: Writer, step: GatedFeedback, u: Value, state: Sequence[Value], prefix: str
) -> list[Value]:
    """The step of `gated-feedback`; the slots have the top layer first."""
    h = state[: step.layers]
    c = state[step.layers :]
    y = u
    new: list[list[Value]] = []
    for index, place in enumerate(reversed(range(step.layers))):
        level = step.levels[index]
        assert isinstance(level, FeedbackLayer)
        own = [h[place], c[place]] if c else [h[place]]
        new.insert(0, write_feedback_layer(writer, level, y, h, own, f"{prefix}_level{index}"))
        y = new[0][0]
    return [part for slot in zip(*new, strict=True) for part in slot]


def write_feedback_layer(
    writer: Writer,
    level: FeedbackLayer,
    y: Value,
    states: Sequence[Value],
    own: Sequence[Value],
    prefix: str,
) -> list[Value]:
    """The new (h,) or (h, c) of one layer.

    y: the layer below, or u; states: h of all layers; own: the layer's own (h,) or (h, c).
    """
    d = len(level.U)
    joined = writer.concat(states, "states")
    of_states = writer.affine(joined, level.g_states, None, f"{prefix}_g_states")
    of_below = writer.affine(y, level.g_below, None, f"{prefix}_g_below")
    g = writer.apply("sigmoid", writer.apply("add", of_below, of_states), name="g")
    let_in = []
    for gate, h in zip(writer.split(g, 1, ["g"] * len(states)), states, strict=True):
        let_in.append(writer.apply("mul", gate, h, name="let_in"))
    s = writer.affine(writer.concat(let_in, "let_in"), level.U, None, f"{prefix}_U")
    v_all = writer.affine(y, level.R, level.b, f"{prefix}_R")
    *v_gates, v = writer.split(v_all, d, ["v"] * (level.gates + 1))
    h = own[0]
    if level.W is None:
        return [writer.apply("tanh", writer.apply("add", v, s), name="h")]
    products = writer.affine(h, level.W, None, f"{prefix}_W")
    gates = []
    for v_gate, z in zip(v_gates, writer.split(products, d, ["z"] * level.gates), strict=True):
        gates.append(writer.apply("sigmoid", writer.apply("add", v_gate, z), name="gate"))
    if len(own) == 1:
        r, k = gates
        a = writer.apply("add", v, writer.apply("mul", r, s), name="a")
        return [blend(writer, k, writer.apply("tanh", a, name="n"), h)]
    i, f, o = gates
    content = writer.apply("tanh", writer.apply("add", v, s), name="content")
    stays = writer.apply("mul", f, own[1], name="stays")
    c = writer.apply("add", stays, writer.apply("mul", i, content), name="c")
    return [writer.apply("mul", o, writer.apply("tanh", c), name="h"), c]


def write_unicornn_layers(
    writer: Writer, step: UnICORNNLayers, u: Value, state: Sequence[Value], prefix: str
) -> list[Value]:
    """The step of `unicornn-layers`."""
    below = u
    new: list[Value] = []
    for index, level in enumerate(step.levels):
        assert isinstance(level, OscillatorLayer)
        y, z = state[2 * index : 2 * index + 2]
        names = f"{prefix}_level{index}"
        e = writer.constant(step.eps * torch.sigmoid(level.c.detach()), f"{names}_e")
        own = writer.apply("mul", writer.constant(level.w, f"{names}_w"), y, name="own")
        a = writer.apply("add", writer.affine(below, level.R, level.b, f"{names}_R"), own, name="a")
        pulled = writer.apply("mul", step.alpha, y, dtype=y.dtype, name="pulled")
        force = writer.apply("add", writer.apply("tanh", a, name="n"), pulled, name="force")
        z = writer.apply("sub", z, writer.apply("mul", e, force, name="slowed"), name="z")
        below = writer.apply("add", y, writer.apply("mul", e, z, name="moved"), name="y")
        new += [below, z]
    return new


StepWriter = Callable[..., list[Value]]
STEP_WRITERS: dict[type[nn.Module], StepWriter] = {
    ResetBefore: write_reset_before,
    MixedLSTM: write_mixed_lstm,
    DeepTransition: write_deep_transition,
    GatedFeedback: write_gated_feedback,
    UnICORNNLayers: write_unicornn_layers,
}
