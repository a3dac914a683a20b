"""OnnxWriter: operations as the nodes of an ONNX graph, and steps as the body of a Scan."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from ...errors import MissingError
from ...networks.recurrence import Recurrence
from .writer import Argument, Body, Value, Writer

# Operations that are one node, and its name.
NODES = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "less": "Less", "equal": "Equal",
    "and": "And", "where": "Where", "neg": "Neg", "tanh": "Tanh", "sigmoid": "Sigmoid",
    "relu": "Relu", "softplus": "Softplus", "exp": "Exp", "log": "Log", "sqrt": "Sqrt",
    "sin": "Sin", "cos": "Cos", "erf": "Erf", "atan": "Atan", "abs": "Abs", "sign": "Sign",
    "held": "Identity", "elu": "Elu", "is_nan": "IsNaN", "flatten": "Flatten", "rows": "Gather",
}  # fmt: skip
ELEMENT_TYPES = {
    "float32": "FLOAT", "float64": "DOUBLE", "int64": "INT64", "bool": "BOOL", "string": "STRING",
}  # fmt: skip
SERIES_OF_LOG = 0.5  # below this |a|, log1p(a) is 2 atanh(a / (2 + a)), which keeps small a


def import_onnx() -> ModuleType:
    """The package onnx; MissingError if it is not installed."""
    try:
        return importlib.import_module("onnx")
    except ImportError:
        raise MissingError(
            "an ONNX file needs the package onnx: pip install onnx onnxruntime, or "
            "pip install '.[export]' in a clone."
        ) from None


class OnnxWriter(Writer):
    """Writes nodes into `nodes` and constants into `constants`, by name.

    A body of a Scan is a writer of its own that shares the constants and names of the graph.
    """

    folds_constants = True
    dtype = "float32"  # what the operators RNN, LSTM and GRU of onnxruntime compute in

    def __init__(self, outer: OnnxWriter | None = None) -> None:
        super().__init__()
        self.onnx = import_onnx()
        self.nodes: list[object] = []
        self.byte_count = 0  # of the constants
        self.constants: dict[str, object] = {}
        if outer is not None:
            self.constants = outer.constants
            self.taken = outer.taken

    def constant(self, value: Tensor, name: str, as_it_is: bool = False) -> Value:
        """An initialiser of the graph."""
        if as_it_is:
            return self.store(value.detach().cpu().numpy(), name)
        return self.store(value.detach().cpu().contiguous().float().numpy(), name)

    def store(self, array: np.ndarray, name: str) -> Value:
        """An array as an initialiser of the graph."""
        unique = self.unique(name)
        self.constants[unique] = self.onnx.numpy_helper.from_array(array, unique)
        self.byte_count += array.nbytes
        return Value(unique, str(array.dtype))

    def strings(self, words: Sequence[str], name: str) -> Value:
        """A vector of texts."""
        unique = self.unique(name)
        array = np.array(words, dtype=object)
        self.constants[unique] = self.onnx.numpy_helper.from_array(array, unique)
        return Value(unique, "string")

    def scalar(self, number: float, dtype: str) -> Value:
        """A number of this type."""
        return self.store(np.array(number, dtype=dtype), "number")

    def integers(self, *values: int) -> Value:
        """A vector of whole numbers: axes, shapes, places."""
        return self.store(np.array(values, dtype=np.int64), "integers")

    def node(
        self, kind: str, inputs: Sequence[Value | str], name: str, dtype: str, **attributes: object
    ) -> Value:
        """The first output of one node."""
        unique = self.unique(name or kind.lower())
        names = [value.name if isinstance(value, Value) else value for value in inputs]
        self.nodes.append(self.onnx.helper.make_node(kind, names, [unique], **attributes))
        return Value(unique, dtype)

    def output(self, value: Value, name: str) -> None:
        """Give a value the name of an output of the graph, which is reserved for it."""
        self.nodes.append(self.onnx.helper.make_node("Identity", [value.name], [name]))

    def apply(
        self, op: str, *arguments: Argument, name: str = "", dtype: str = "", **attributes: object
    ) -> Value:
        """The nodes of an operation; numbers among the arguments have the type of the others."""
        real = [value.dtype for value in arguments if isinstance(value, Value)]
        numbers = next((kind for kind in real if kind != "bool"), self.dtype)
        values: list[Value] = []
        for value in arguments:
            values.append(value if isinstance(value, Value) else self.scalar(value, numbers))
        result = dtype or values[0].dtype
        if op in NODES:
            return self.node(NODES[op], values, name, result)
        method = getattr(self, f"write_{op}")
        value = method(values, name or op, result, **attributes)
        assert isinstance(value, Value)
        return value

    # Operations that are several nodes, or have attributes.
    def write_expm1(self, values: Sequence[Value], name: str, dtype: str) -> Value:
        """e^a - 1 = (e^a + 1) tanh(a / 2), which keeps its digits for small a."""
        (a,) = values
        more = self.apply("add", self.apply("exp", a), 1.0)
        return self.apply("mul", more, self.apply("tanh", self.apply("mul", a, 0.5)), name=name)

    def write_log1p(self, values: Sequence[Value], name: str, dtype: str) -> Value:
        """log(1 + a); for small a in float32 by the inverse of tanh, to keep its digits."""
        (a,) = values
        plain = self.apply("log", self.apply("add", a, 1.0), name=name)
        if dtype == "float64":
            return plain
        ratio = self.apply("div", a, self.apply("add", a, 2.0))
        is_small = self.apply("less", self.apply("abs", a), SERIES_OF_LOG, dtype="bool")
        ratio = self.apply("where", is_small, ratio, 0.0, dtype=dtype)
        small = self.apply("mul", self.node("Atanh", [ratio], "atanh", dtype), 2.0)
        return self.apply("where", is_small, small, plain, name=name, dtype=dtype)

    def write_step(self, values: Sequence[Value], name: str, dtype: str) -> Value:
        """1 where a > 0, else 0."""
        is_positive = self.node("Greater", [values[0], self.scalar(0.0, dtype)], "above", "bool")
        return self.apply("cast", is_positive, name=name, dtype=dtype)

    def write_power(self, values: Sequence[Value], name: str, dtype: str, value: float) -> Value:
        """A power with a fixed exponent."""
        return self.node("Pow", [values[0], self.scalar(value, dtype)], name, dtype)

    def write_gelu(self, values: Sequence[Value], name: str, dtype: str) -> Value:
        """The product z (1 + erf(z / sqrt 2)) / 2."""
        (z,) = values
        phi = self.apply("add", self.apply("erf", self.apply("div", z, math.sqrt(2))), 1.0)
        return self.apply("mul", self.apply("mul", z, 0.5), phi, name=name)

    def write_silu(self, values: Sequence[Value], name: str, dtype: str) -> Value:
        """The product z sigmoid(z)."""
        return self.apply("mul", values[0], self.apply("sigmoid", values[0]), name=name)

    def write_cast(self, values: Sequence[Value], name: str, dtype: str) -> Value:
        """The same numbers in another type."""
        to = getattr(self.onnx.TensorProto, ELEMENT_TYPES[dtype])
        return self.node("Cast", values, name, dtype, to=to)

    def write_concat(self, values: Sequence[Value], name: str, dtype: str) -> Value:
        """Side by side along the last axis."""
        return self.node("Concat", values, name, dtype, axis=-1)

    def write_part(
        self, values: Sequence[Value], name: str, dtype: str, start: int, stop: int
    ) -> Value:
        """Entries start..stop - 1 of the last axis."""
        ends = [self.integers(start), self.integers(stop), self.integers(-1)]
        return self.node("Slice", [values[0], *ends], name, dtype)

    def write_columns(
        self, values: Sequence[Value], name: str, dtype: str, chosen: Sequence[int]
    ) -> Value:
        """Entries of the last axis, by their places."""
        return self.node("Gather", [values[0], self.integers(*chosen)], name, dtype, axis=-1)

    def write_clip(
        self, values: Sequence[Value], name: str, dtype: str, low: float, high: float
    ) -> Value:
        """a, at least low and at most high."""
        ends = [self.scalar(low, dtype), self.scalar(high, dtype)]
        return self.node("Clip", [values[0], *ends], name, dtype)

    def write_at_most(self, values: Sequence[Value], name: str, dtype: str, value: int) -> Value:
        """The lesser of whole numbers and `value`."""
        return self.node("Min", [values[0], self.integers(value)], name, dtype)

    def write_mod(self, values: Sequence[Value], name: str, dtype: str, value: int) -> Value:
        """The remainders of whole numbers."""
        return self.node("Mod", [values[0], self.integers(value)], name, dtype)

    def reduce(self, kind: str, values: Sequence[Value], name: str, axis: int, keep: bool) -> Value:
        """A sum, mean or maximum along an axis, which stays with length 1 if `keep`."""
        inputs = [values[0], self.integers(axis)]
        return self.node(kind, inputs, name, values[0].dtype, keepdims=int(keep))

    def write_sum(
        self, values: Sequence[Value], name: str, dtype: str, axis: int, keep: bool
    ) -> Value:
        """The sum along an axis."""
        return self.reduce("ReduceSum", values, name, axis, keep)

    def write_max(
        self, values: Sequence[Value], name: str, dtype: str, axis: int, keep: bool
    ) -> Value:
        """The maximum along an axis."""
        return self.reduce("ReduceMax", values, name, axis, keep)

    def write_softmax(self, values: Sequence[Value], name: str, dtype: str, axis: int) -> Value:
        """The softmax along an axis."""
        return self.node("Softmax", values, name, dtype, axis=axis)

    def write_transpose(
        self, values: Sequence[Value], name: str, dtype: str, order: Sequence[int]
    ) -> Value:
        """The axes in another order."""
        return self.node("Transpose", values, name, dtype, perm=list(order))

    def write_reshape(
        self, values: Sequence[Value], name: str, dtype: str, shape: Sequence[int]
    ) -> Value:
        """Another shape; -1 stands for what is left."""
        return self.node("Reshape", [values[0], self.integers(*shape)], name, dtype)

    def write_add_channel(self, values: Sequence[Value], name: str, dtype: str) -> Value:
        """[B, H, W] as [B, 1, H, W]."""
        return self.node("Unsqueeze", [values[0], self.integers(1)], name, dtype)

    def size(self, y: Value, axis: int) -> Value:
        """The length of an axis, [1]."""
        return self.node("Shape", [y], "size", "int64", start=axis, end=axis + 1)

    def places(self, y: Value, axis: int, name: str) -> Value:
        """The numbers 0, 1, ... of the places along an axis."""
        count = self.node("Squeeze", [self.size(y, axis)], "count", "int64")
        zero = self.store(np.array(0, dtype=np.int64), "zero")
        one = self.store(np.array(1, dtype=np.int64), "one")
        return self.node("Range", [zero, count, one], name, "int64")

    def write_steps(self, values: Sequence[Value], name: str, dtype: str) -> Value:
        """The numbers 0, 1, ..., T - 1 of the steps of u [T, B, .]."""
        return self.places(values[0], 0, name)

    def write_earlier(self, values: Sequence[Value], name: str, dtype: str, lag: int) -> Value:
        """At each step of u [B, T, .] the one `lag` steps before, or the first."""
        t = self.places(values[0], 1, "t")
        before = self.node("Sub", [t, self.integers(lag)], "before", "int64")
        chosen = self.node("Max", [before, self.integers(0)], "chosen", "int64")
        return self.node("Gather", [values[0], chosen], name, dtype, axis=1)

    def write_over_samples(self, values: Sequence[Value], name: str, dtype: str) -> Value:
        """Rows [T, n] for each sample of u [T, B, .]: [T, B, n]."""
        rows, u = values
        rows = self.node("Unsqueeze", [rows, self.integers(1)], "rows", dtype)
        ones = self.integers(1)
        shape = self.node("Concat", [ones, self.size(u, 1), ones], "shape", "int64", axis=0)
        return self.node("Expand", [rows, shape], name, dtype)

    def write_convolution(
        self,
        values: Sequence[Value],
        name: str,
        dtype: str,
        stride: tuple[int, int],
        padding: tuple[int, int],
    ) -> Value:
        """C(W, x) + b."""
        pads = [*padding, *padding]
        return self.node("Conv", values, name, dtype, strides=list(stride), pads=pads)

    def write_max_pool(
        self, values: Sequence[Value], name: str, dtype: str, size: tuple[int, int]
    ) -> Value:
        """The largest entry of disjoint regions."""
        sides = list(size)
        return self.node("MaxPool", values, name, dtype, kernel_shape=sides, strides=sides)

    def write_mean_pool(
        self, values: Sequence[Value], name: str, dtype: str, size: tuple[int, int]
    ) -> Value:
        """The mean of disjoint regions."""
        sides = list(size)
        return self.node("AveragePool", values, name, dtype, kernel_shape=sides, strides=sides)

    def write_layer_norm(
        self, values: Sequence[Value], name: str, dtype: str, axes: int, eps: float
    ) -> Value:
        """Normalisation over the last axes."""
        return self.node("LayerNormalization", values, name, dtype, axis=-axes, epsilon=eps)

    def write_group_norm(
        self, values: Sequence[Value], name: str, dtype: str, groups: int, eps: float
    ) -> Value:
        """Normalisation over groups of channels, then a factor and a shift for each channel."""
        x, W, b = values
        shape = self.node("Shape", [x], "shape", "int64")
        by_group = self.apply("reshape", x, shape=(0, groups, -1))
        ones = self.store(np.ones(groups, np.float32), "ones")
        zeros = self.store(np.zeros(groups, np.float32), "zeros")
        parts = [by_group, ones, zeros]
        normal = self.node("InstanceNormalization", parts, "normal", dtype, epsilon=eps)
        channels = self.node("Reshape", [W, self.integers(-1, 1)], "W", dtype)
        shift = self.node("Reshape", [b, self.integers(-1, 1)], "b", dtype)
        whole = self.node("Reshape", [normal, shape], "normal", dtype)
        count = self.node("Concat", [self.integers(0), self.size(W, 0), self.integers(-1)],
                          "count", "int64", axis=0)  # fmt: skip
        by_channel = self.node("Reshape", [whole, count], "by_channel", dtype)
        scaled = self.apply("add", self.apply("mul", by_channel, channels), shift)
        return self.node("Reshape", [scaled, shape], name, dtype)

    # What a writer does beside single operations.
    def affine(self, x: Value, W: Tensor, b: Tensor | None, name: str) -> Value:
        """W x + b along the last axis of x."""
        product = self.node("MatMul", [x, self.constant(W.T, name)], name, x.dtype)
        if b is None:
            return product
        return self.apply("add", product, self.constant(b, f"{name}_b"), name=name)

    def first_state(self, x0: Tensor, u: Value, name: str) -> Value:
        """The vector x0 for each sample of u [T, B, .]."""
        start = self.constant(x0[None], name)
        ones = self.integers(1)
        shape = self.node("Concat", [self.size(u, 1), ones], "shape", "int64", axis=0)
        return self.node("Expand", [start, shape], name, "float32")

    def reverse(self, y: Value, lengths: Value) -> Value:
        """Each sample's own steps in reverse order."""
        return self.node(
            "ReverseSequence", [y, lengths], "reversed", y.dtype, time_axis=0, batch_axis=1
        )

    def last(self, y: Value, lengths: Value) -> Value:
        """Each sample's last step, as the only term that a sum over time leaves."""
        t = self.apply("reshape", self.apply("steps", y, dtype="int64"), shape=(-1, 1, 1))
        ends = self.node("Sub", [lengths, self.integers(1)], "ends", "int64")
        is_last = self.apply(
            "equal", t, self.apply("reshape", ends, shape=(1, -1, 1)), dtype="bool"
        )
        kept = self.apply("where", is_last, y, 0.0, dtype=y.dtype)
        return self.apply("sum", kept, axis=0, keep=False, name="last")

    def scan(
        self,
        name: str,
        sequences: Sequence[Value],
        starts: Sequence[Value],
        slots: Sequence[str],
        alive: Value,
        body: Body,
    ) -> tuple[list[Value], list[Value]]:
        """A Scan over time whose body is the step."""
        inner = OnnxWriter(self)
        before = [Value(inner.unique(f"{name}_{slot}_before"), self.dtype) for slot in slots]
        has_step = Value(inner.unique(f"{name}_has_step"), "bool")
        slices = [Value(inner.unique(f"{name}_input"), value.dtype) for value in sequences]
        new = body(inner, slices, before)
        after: list[Value] = []
        shown: list[Value] = []
        for slot, y, x in zip(slots, new, before, strict=True):
            kept = inner.apply("where", has_step, y, x, name=f"{name}_{slot}", dtype=y.dtype)
            after.append(kept)
            shown.append(inner.apply("held", kept, name=f"{name}_{slot}_shown"))
        graph = self.onnx.helper.make_graph(
            inner.nodes,
            self.unique(f"{name}_step"),
            [self.describe(value) for value in (*before, has_step, *slices)],
            [self.describe(value) for value in (*after, *shown)],
        )
        self.byte_count += inner.byte_count
        lasts = [Value(self.unique(f"{name}_{slot}_last"), self.dtype) for slot in slots]
        states = [Value(self.unique(f"{name}_{slot}"), self.dtype) for slot in slots]
        node = self.onnx.helper.make_node(
            "Scan",
            [value.name for value in (*starts, alive, *sequences)],
            [value.name for value in (*lasts, *states)],
            body=graph,
            num_scan_inputs=1 + len(sequences),
        )
        self.nodes.append(node)
        return states, lasts

    def describe(self, value: Value, shape: Sequence[int | str] | None = None) -> object:
        """What ONNX wants to know about an input or an output."""
        kind = getattr(self.onnx.TensorProto, ELEMENT_TYPES[value.dtype])
        return self.onnx.helper.make_tensor_value_info(value.name, kind, shape)

    def built_in(
        self, kind: str, name: str, layer: Recurrence, u: Value, lengths: Value, reverse: bool
    ) -> tuple[Value, Value]:
        """A layer as one RNN, LSTM or GRU, whose gates have an order of their own."""
        operator, order, extra = OPERATORS[kind]
        d = layer.hidden
        weights = layer.effective_weights()
        assert weights.W is not None
        blocks = [slice(i * d, (i + 1) * d) for i in order]
        R = torch.cat([weights.R[block] for block in blocks])
        W = torch.cat([weights.W[block] for block in blocks])
        of_inputs = torch.zeros(len(order) * d)
        if weights.b is not None:
            of_inputs = torch.cat([weights.b[block] for block in blocks])
        of_states = torch.zeros(len(order) * d)
        if kind == "gru":  # b_n is added before the reset gate acts
            of_states[2 * d :] = layer.p["b_n"].detach()
        biases = torch.cat([of_inputs.detach().float(), of_states])
        count = self.node("Cast", [lengths], "steps", "int32", to=self.onnx.TensorProto.INT32)
        starts = []
        for slot, x0 in enumerate(layer.x0.detach().split(d)):
            start = self.first_state(x0, u, f"{name}_x0_{slot}")
            axis = self.integers(0)
            starts.append(self.node("Unsqueeze", [start, axis], f"{name}_x0", "float32"))
        inputs = [u, self.constant(R[None], f"{name}_R"), self.constant(W[None], f"{name}_W")]
        inputs += [self.constant(biases[None], f"{name}_b"), count, *starts]
        outputs = [self.unique(f"{name}_y"), self.unique(f"{name}_end")]
        direction = "reverse" if reverse else "forward"
        node = self.onnx.helper.make_node(
            operator,
            [value.name for value in inputs],
            outputs,
            hidden_size=d,
            direction=direction,
            **extra,
        )
        self.nodes.append(node)
        y = self.node("Squeeze", [outputs[0], self.integers(1)], f"{name}_h", "float32")
        last = self.node("Squeeze", [outputs[1], self.integers(0)], f"{name}_last", "float32")
        return y, last


# For each kind: the operator, our gates in its order, and its attributes.
OPERATORS: dict[str, tuple[str, tuple[int, ...], dict[str, object]]] = {
    "tanh": ("RNN", (0,), {"activations": ["Tanh"]}),
    "relu": ("RNN", (0,), {"activations": ["Relu"]}),
    "lstm": ("LSTM", (0, 3, 1, 2), {}),  # i f g o -> i o f g
    "gru": ("GRU", (1, 0, 2), {"linear_before_reset": 1}),  # r u n -> u r n
}
