"""TorchWriter: operations as lines of Python that call torch, and steps as methods."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...networks.recurrence import Recurrence
from .torch_lines import Assignment, write_lines
from .writer import Argument, Body, Value, Writer

SPELLING = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "-{0}",
    "power": "{0} ** {value}",
    "less": "{0} < {1}",
    "equal": "{0} == {1}",
    "and": "{0} & {1}",
    "where": "torch.where({0}, {1}, {2})",
    "softplus": "functional.softplus({0}, threshold=40.0)",
    "step": "torch.heaviside({0}, torch.zeros_like({0}))",
    "held": "{0}.detach()",
    "gelu": "functional.gelu({0})",
    "silu": "functional.silu({0})",
    "elu": "functional.elu({0})",
    "is_nan": "torch.isnan({0})",
    "cast": "{0}.to(torch.{dtype})",
    "part": "{0}[..., {start}:{stop}]",
    "columns": "{0}[..., {chosen}]",
    "rows": "{0}[{1}]",
    "earlier": "torch.cat([{0}[:, :1].expand(-1, {lag}, -1), {0}], 1)[:, :-{lag}]",
    "clip": "{0}.clamp({low}, {high})",
    "at_most": "{0}.clamp(max={value})",
    "mod": "{0} % {value}",
    "sum": "{0}.sum({axis}, keepdim={keep})",
    "max": "{0}.amax({axis}, keepdim={keep})",
    "softmax": "torch.softmax({0}, {axis})",
    "transpose": "{0}.permute({order})",
    "reshape": "{0}.reshape({shape})",
    "flatten": "{0}.flatten(1)",
    "add_channel": "{0}.unsqueeze(1)",
    "steps": "torch.arange(len({0}), device={0}.device)",
    "over_samples": "{0}[:, None].expand(-1, {1}.shape[1], -1)",
    "max_pool": "functional.max_pool2d({0}, {size})",
    "mean_pool": "functional.avg_pool2d({0}, {size})",
    "layer_norm": "functional.layer_norm({0}, {0}.shape[-{axes}:], {1}, {2}, {eps})",
    "group_norm": "functional.group_norm({0}, {groups}, {1}, {2}, {eps})",
}
SAME_IN_TORCH = (
    "tanh", "sigmoid", "relu", "exp", "expm1", "log", "log1p", "sqrt", "sin", "cos", "erf", "atan",
    "abs", "sign",
)  # fmt: skip
SPELLING.update({op: f"torch.{op}({{0}})" for op in SAME_IN_TORCH})
INFIX = ("add", "sub", "mul", "div", "neg", "power", "less", "equal", "and", "mod")
METHODS = ("inputs", "outputs", "predict", "predict_proba")  # of the generated class
# What the code of a method calls, which no variable may hide.
GLOBALS = ("torch", "nn", "functional", "math", "len", "zip", "self", "scan", "reverse", "last")


class ModuleText:
    """The generated class: what its __init__ declares, its methods, and its tensors.

    declarations  lines of __init__
    methods       the lines of each method, the steps of layers first
    tensors       the state of the module, by name
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.declarations: list[str] = []
        self.methods: list[list[str]] = []
        self.tensors: dict[str, Tensor] = {}
        self.names = AttributeNames()

    @property
    def with_dtype(self) -> str:
        """The dtype as a last argument, if it is not torch's default."""
        return "" if self.dtype == "float32" else f", dtype=torch.{self.dtype}"

    def declare(self, name: str, expression: str) -> str:
        """Declare an attribute of the module under a new name, and return the name."""
        unique = self.names.unique(name)
        self.declarations.append(f"self.{unique} = {expression}")
        return unique


class TorchWriter(Writer):
    """Writes the lines of one method of the generated class.

    text       the class
    name       of the method; parameters: those after self
    sentence   its docstring
    """

    def __init__(self, text: ModuleText, name: str, parameters: Sequence[str], sentence: str):
        super().__init__()
        self.text = text
        self.dtype = text.dtype
        self.taken.update(GLOBALS, parameters)
        head = ", ".join(("self", *parameters))
        self.head = [f"def {name}({head}):", f'    """{sentence}"""']
        self.lines: list[Assignment] = []

    def finish(self, results: Sequence[Value], as_tuple: bool = False) -> None:
        """Return these from the method, and add it to the class."""
        names = [value.name for value in results]
        written = write_lines(self.lines, names, self.unique)
        *before, end = [written[: -len(names)], ", ".join(written[-len(names) :])]
        comma = "," if as_tuple and len(names) == 1 else ""
        body = [f"    {line}" for line in before[0]]
        self.text.methods.append([*self.head, *body, f"    return {end}{comma}"])

    def line(self, expression: str, name: str, dtype: str, op: str = "y") -> Value:
        """A variable that holds the value of an expression.

        One without a name is written where it is read, if that is once; op: how it is called else.
        """
        target = self.unique(name) if name else f"<{len(self.lines)}>"
        self.lines.append(Assignment((target,), expression, op, op in INFIX))
        return Value(target, dtype)

    def constant(self, value: Tensor, name: str, as_it_is: bool = False) -> Value:
        """A parameter of the module; what has a type of its own is a buffer."""
        shape = list(value.shape)
        stored = value.detach()
        kind = str(value.dtype).removeprefix("torch.")
        if as_it_is:
            unique = self.text.names.unique(name)
            empty = f"torch.empty({shape}, dtype=torch.{kind})"
            self.text.declarations.append(f'self.register_buffer("{unique}", {empty})')
        else:
            empty = f"torch.empty({shape}{self.text.with_dtype})"
            unique = self.text.declare(name, f"nn.Parameter({empty})")
            kind = self.dtype
            stored = stored.to(getattr(torch, kind))
        self.text.tensors[unique] = stored
        return Value(f"self.{unique}", kind)

    def apply(
        self, op: str, *arguments: Argument, name: str = "", dtype: str = "", **attributes: object
    ) -> Value:
        """One line; numbers among the arguments are written out."""
        first = next(value for value in arguments if isinstance(value, Value))
        result = dtype or first.dtype
        texts = [argument_text(value) for value in arguments]
        if op == "concat":
            expression = f"torch.cat([{', '.join(texts)}], -1)"
        elif op == "convolution":
            options = f"stride={attributes['stride']}, padding={attributes['padding']}"
            expression = f"functional.conv2d({', '.join(texts)}, {options})"
        else:
            expression = SPELLING[op].format(*texts, dtype=result, **attributes)
        return self.line(expression, name, result, op)

    def affine(self, x: Value, W: Tensor, b: Tensor | None, name: str) -> Value:
        """An nn.Linear."""
        bias = "" if b is not None else ", bias=False"
        rows, columns = W.shape
        expression = f"nn.Linear({columns}, {rows}{bias}{self.text.with_dtype})"
        unique = self.text.declare(name, expression)
        self.text.tensors[f"{unique}.weight"] = W.detach()
        if b is not None:
            self.text.tensors[f"{unique}.bias"] = b.detach()
        return self.line(f"self.{unique}({x.name})", "", x.dtype, name)

    def first_state(self, x0: Tensor, u: Value, name: str) -> Value:
        """The vector x0 for each sample of u [T, B, .]."""
        if not x0.any():
            return self.line(f"{u.name}.new_zeros({u.name}.shape[1], {len(x0)})", name, self.dtype)
        start = self.constant(x0, name)
        return self.line(f"{start.name}.expand({u.name}.shape[1], -1)", name, start.dtype)

    def reverse(self, y: Value, lengths: Value) -> Value:
        """Each sample's own steps in reverse order."""
        return self.line(f"reverse({y.name}, {lengths.name})", "backwards", y.dtype)

    def last(self, y: Value, lengths: Value) -> Value:
        """Each sample's last step."""
        return self.line(f"last({y.name}, {lengths.name})", "at_end", y.dtype)

    def scan(
        self,
        name: str,
        sequences: Sequence[Value],
        starts: Sequence[Value],
        slots: Sequence[str],
        alive: Value,
        body: Body,
    ) -> tuple[list[Value], list[Value]]:
        """A method for the step, and a call of `scan`, which loops over time."""
        method = self.text.names.unique(f"{name}_step")
        inputs = ["base", "side"][: len(sequences)]
        sentence = f"One step: the new {', '.join(slots)}."
        inner = TorchWriter(self.text, method, [*inputs, *slots], sentence)
        slices = [Value(text, value.dtype) for text, value in zip(inputs, sequences, strict=True)]
        new = body(inner, slices, [Value(slot, self.dtype) for slot in slots])
        inner.finish(new, as_tuple=True)
        read = ", ".join(value.name for value in sequences)
        first = ", ".join(value.name for value in starts)
        states = self.unique(f"{name}_states")
        ends = self.unique(f"{name}_ends")
        call = f"scan(self.{method}, [{read}], [{first}], {alive.name})"
        self.lines.append(Assignment((states, ends), call))
        count = range(len(slots))
        all_steps = [Value(f"{states}[{i}]", self.dtype) for i in count]
        return all_steps, [Value(f"{ends}[{i}]", self.dtype) for i in count]

    def built_in(
        self, kind: str, name: str, layer: Recurrence, u: Value, lengths: Value, reverse: bool
    ) -> tuple[Value, Value]:
        """An nn.RNN, nn.LSTM or nn.GRU over the padded sequences."""
        weights = layer.effective_weights()
        assert weights.W is not None
        classes = {"lstm": "LSTM", "gru": "GRU"}
        extra = "" if kind in classes else f', nonlinearity="{kind}"'
        has_bias = weights.b is not None or kind == "gru"
        if not has_bias:
            extra += ", bias=False"
        sizes = f"{layer.inputs}, {layer.hidden}"
        expression = f"nn.{classes.get(kind, 'RNN')}({sizes}{extra}{self.text.with_dtype})"
        unique = self.text.declare(name, expression)
        tensors = {"weight_ih_l0": weights.R, "weight_hh_l0": weights.W}
        if has_bias:
            zeros = weights.R.new_zeros(len(weights.R))
            of_states = zeros.clone()
            if kind == "gru":
                of_states[2 * layer.hidden :] = layer.p["b_n"].detach()
            tensors["bias_ih_l0"] = zeros if weights.b is None else weights.b
            tensors["bias_hh_l0"] = of_states
        for key, value in tensors.items():
            self.text.tensors[f"{unique}.{key}"] = value.detach()
        read = self.reverse(u, lengths) if reverse else u
        arguments = [read.name]
        if layer.x0.detach().any():
            arguments.append(self.starts_of_built_in(layer, u, name))
        h = self.unique(f"{name}_h")
        self.lines.append(Assignment((h, "_"), f"self.{unique}({', '.join(arguments)})"))
        y = Value(h, self.dtype)
        end = self.last(y, lengths)
        return (self.reverse(y, lengths) if reverse else y), end

    def starts_of_built_in(self, layer: Recurrence, u: Value, name: str) -> str:
        """The first state as nn.RNN and nn.GRU take it, or a pair for nn.LSTM."""
        starts: list[str] = []
        for slot, x0 in zip("hc", layer.x0.split(layer.hidden), strict=False):
            start = self.first_state(x0, u, f"{name}_{slot}0")
            starts.append(f"{start.name}[None].contiguous()")
        return starts[0] if len(starts) == 1 else f"({', '.join(starts)})"


class AttributeNames(TorchWriter):
    """New names for attributes of the generated class, none of which a module has already."""

    def __init__(self) -> None:
        Writer.__init__(self)
        self.taken.update(dir(nn.Module()), METHODS, ("self",))


def argument_text(value: Argument) -> str:
    """An argument as Python: a variable's name, or a number."""
    if isinstance(value, Value):
        return value.name
    if math.isfinite(value):
        return repr(float(value))
    if math.isnan(value):
        return "math.nan"
    return "math.inf" if value > 0 else "-math.inf"
