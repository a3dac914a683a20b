"""Networks as a Python file and a file of tensors that need torch alone."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor

from ...errors import Unsupported
from ...networks.chain import Chain
from ...networks.interface import Net
from ...networks.network import Network
from ...networks.stack import Stack
from ...tasks.description import Description
from . import torch_template as template
from .chains import write_chain
from .kinds import refuse
from .recurrent import write_recurrent
from .torch_writer import ModuleText, TorchWriter
from .units import column_names, target_names, write_inputs, write_outputs
from .writer import Value

OF_COLUMNS = """\
x holds the columns under COLUMNS along its last axis, in the units of the training file. Samples
in more than one dimension have them along the first axis of a sample. NaN marks a missing value of
a column under MISSING. A column under WORDS holds the place of the word in its list, from 0; any
other number is a word that training did not know."""
OF_NUMBERS = "x holds numbers as the network reads them."


def torch_code(net: Net, data: Description | None, version: str) -> tuple[str, dict[str, Tensor]]:
    """The text of a Python file for a network in evaluation mode, and its tensors by name.

    data: what the network knows about its data; None: it reads and returns numbers as they are.
    Only text written here, numbers, and quoted strings of `data` get into the file.
    """
    text = ModuleText(str(net.like.dtype).removeprefix("torch."))
    inputs = TorchWriter(text, "inputs", ["x"], "What the network reads, from the columns x.")
    x = Value("x", "float64")
    if data is None:
        inputs.finish([inputs.apply("cast", x, dtype=text.dtype)])
    else:
        inputs.finish([write_inputs(inputs, data, x)])
    if isinstance(net, Chain):
        forward = TorchWriter(text, "forward", ["x"], "The pre-outputs of samples.")
        forward.finish([write_chain(forward, net, Value("x", text.dtype))])
    elif isinstance(net, Network | Stack):
        write_forward(text, net)
    else:
        refuse(net)
    outputs = TorchWriter(text, "outputs", ["a"], "Answers from pre-outputs, in float64.")
    a = Value("a", text.dtype)
    outputs.finish([write_answers(outputs, net, data, a)])
    return assemble(net, data, text, version), text.tensors


def write_forward(text: ModuleText, net: Network | Stack) -> None:
    """The method `forward` of a network that reads sequences."""
    every = net.readout == "every"
    where = "[B, T, outputs], NaN after the end of a sequence" if every else "[B, outputs]"
    sentence = f"The pre-outputs {where}, of u [B, T, inputs]."
    writer = TorchWriter(text, "forward", ["u", "lengths"], sentence)
    dtype = text.dtype
    lengths = Value("lengths", "int64")
    u = writer.line("u.permute(1, 0, 2)", "over_time", dtype)
    t = writer.apply("steps", u, name="t", dtype="int64")
    alive = writer.line(f"({t.name}[:, None] < lengths)[..., None]", "alive", "bool")
    u = writer.apply("where", alive, u, 0.0, name="over_time", dtype=dtype)
    a = write_recurrent(writer, net, u, lengths, alive)
    if every:
        a = writer.apply("where", alive, a, float("nan"), name="a", dtype=dtype)
        a = writer.apply("transpose", a, order=(1, 0, 2), name="a")
    writer.finish([a])


def write_answers(writer: TorchWriter, net: Net, data: Description | None, a: Value) -> Value:
    """Probabilities or numbers in the user's units; without `data` phi(a)."""
    if data is not None:
        return write_outputs(writer, data, a)
    a = writer.apply("cast", a, name="a", dtype="float64")
    if net.output == "identity":
        return a
    if net.output == "softmax":
        return writer.apply("softmax", a, name="y_hat", axis=-1)
    if net.output in ("sigmoid", "tanh"):
        return writer.apply(str(net.output), a, name="y_hat")
    raise Unsupported("an output function that is code of your own cannot be exported.")


def assemble(net: Net, data: Description | None, text: ModuleText, version: str) -> str:
    """The whole file."""
    parts = [
        template.HEAD.format(version=version, about=OF_NUMBERS if data is None else OF_COLUMNS)
    ]
    is_chain = isinstance(net, Chain)
    if data is not None:
        parts += write_names(data)
    if not is_chain:
        count = net.inputs if data is None else len(column_names(data))
        parts.append(f"COLUMN_COUNT = {count}\n")
    code = "\n".join(line for method in text.methods for line in method)
    helpers = {"scan": template.SCAN, "reverse": template.REVERSE, "last": template.LAST}
    for call, helper in helpers.items():
        if re.search(rf"(?<![\w.]){call}\(", code):
            parts.append(helper)
    if not is_chain:
        parts.append(template.PADDED)
    parts.append("\n\nclass Network(nn.Module):\n")
    parts.append('    """The network; `load` reads its weights."""\n\n')
    parts.append("    def __init__(self):\n        super().__init__()\n")
    parts += [f"        {line}\n" for line in text.declarations]
    for method in text.methods:
        parts.append("\n" + "".join(f"    {line}\n" for line in method))
    parts += write_predict(net, data)
    parts.append(template.READER)
    return "".join(parts)


def write_names(data: Description) -> list[str]:
    """Columns, labels and words as constants, quoted in ASCII so that nothing in them is code."""
    parts = [write_list("COLUMNS", column_names(data)), write_list("MISSING", data.masked)]
    if data.labels:
        parts.append(write_list("LABELS", data.labels))
    else:
        parts.append(write_list("TARGETS", target_names(data)))
    if data.categories:
        lines = [f"    {name!a}: {words!a},\n" for name, words in data.categories.items()]
        parts.append(f"WORDS = {{\n{''.join(lines)}}}\n")
    return parts


def write_list(name: str, words: Sequence[str]) -> str:
    """A list of strings as a constant; a short one on one line."""
    plain = f"{name} = {list(words)!a}\n"
    if len(plain) <= 100:
        return plain
    lines = [f"    {word!a},\n" for word in words]
    return f"{name} = [\n{''.join(lines)}]\n"


def write_predict(net: Net, data: Description | None) -> list[str]:
    """The methods `predict` and, for classes, `predict_proba`."""
    is_chain = isinstance(net, Chain)
    run = template.OF_SAMPLES if is_chain else template.OF_SEQUENCES
    if data is None or data.kind != "classify":
        what = "Answers of the network" if data is None else "Numbers in the units of the targets"
        return [run.format(name="predict", sentence=f"{what}, in float64.")]
    shares = run.format(name="predict_proba", sentence="The probability of each of LABELS.")
    if is_chain:
        return [shares, template.LABELS_OF_SAMPLES]
    if net.readout == "every":
        return [shares, template.LABELS_OF_STEPS]
    return [shares, template.LABELS_OF_SEQUENCES]
