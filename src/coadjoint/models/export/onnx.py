"""Networks as ONNX files that read the columns of the user's data.

    x        [batch, length, columns] float64, or [batch, ...] for samples without time
    lengths  [batch] int64, the steps of each sequence; not for samples without time
    label, probabilities    of a classification
    prediction              numbers in the units of the targets

With a target at every step the outputs are [batch, length, ...], and NaN (labels "") after the end
of a sequence.
"""

from __future__ import annotations

import json

from ...errors import Unsupported
from ...networks.chain import Chain
from ...networks.interface import Net
from ...networks.network import Network
from ...networks.stack import Stack
from ...tasks.description import Description
from .chains import write_chain
from .kinds import refuse
from .onnx_writer import OnnxWriter
from .recurrent import write_recurrent
from .units import column_names, target_names, write_inputs, write_outputs
from .writer import Value

OPSET = 18
IR_VERSION = 8
LARGEST = 2**31 - 2**20  # bytes of weights: one message of protobuf, less room for the graph
OUTPUT_NAMES = ("label", "probabilities", "prediction", "output")


def onnx_bytes(net: Net, data: Description | None, about: dict[str, str]) -> bytes:
    """The content of an ONNX file for a network in evaluation mode.

    data   what it knows about its data; None: it reads and returns numbers as they are
    about  texts to store beside the graph
    """
    writer = OnnxWriter()
    writer.taken.update(OUTPUT_NAMES)
    helper = writer.onnx.helper
    kind = "float32" if data is None else "float64"
    x = Value(writer.unique("x"), kind)
    u = x if data is None else write_inputs(writer, data, x)
    if isinstance(net, Chain):
        inputs = [writer.describe(x, ["batch", *sample_shape(net, data)])]
        a = write_chain(writer, net, u)
        alive = None
    elif isinstance(net, Network | Stack):
        lengths = Value(writer.unique("lengths"), "int64")
        columns = net.inputs if data is None else len(column_names(data))
        inputs = [writer.describe(x, ["batch", "length", columns])]
        inputs.append(writer.describe(lengths, ["batch"]))
        u = writer.apply("transpose", u, order=(1, 0, 2), name="u")
        alive = write_alive(writer, u, lengths)
        # Where a sequence has ended, nothing is read: it may hold anything.
        u = writer.apply("where", alive, u, 0.0, name="u", dtype=u.dtype)
        a = write_recurrent(writer, net, u, lengths, alive)
    else:
        refuse(net)
    if writer.byte_count > LARGEST:
        raise Unsupported(
            f"a network of {writer.byte_count:,} bytes does not fit into one ONNX file, which "
            f"holds at most {LARGEST:,}. Use --to torch."
        )
    every = net.readout == "every"
    outputs = finish(writer, net, data, a, alive if every else None)
    graph = helper.make_graph(writer.nodes, "coadjoint", inputs, outputs)
    graph.initializer.extend(writer.constants.values())
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    model.producer_name = "coadjoint"
    helper.set_model_props(model, about)
    writer.onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def sample_shape(net: Chain, data: Description | None) -> tuple[int, ...]:
    """The shape of a sample as the exported network reads it."""
    if data is not None and data.sample_shape is not None:
        return data.sample_shape
    return net.shape or (net.inputs,)


def write_alive(writer: OnnxWriter, u: Value, lengths: Value) -> Value:
    """Where a sample of u [T, B, .] has a step, [T, B, 1]."""
    t = writer.apply("steps", u, name="t", dtype="int64")
    t = writer.apply("reshape", t, shape=(-1, 1, 1), name="t")
    ends = writer.apply("reshape", lengths, shape=(1, -1, 1), name="ends")
    return writer.apply("less", t, ends, name="alive", dtype="bool")


def finish(
    writer: OnnxWriter, net: Net, data: Description | None, a: Value, alive: Value | None
) -> list[object]:
    """Write the outputs of the graph from pre-outputs, and return what ONNX must know of them.

    alive: where there is a step, for outputs at every step; else None.
    """
    lead: list[int | str] = ["batch"] if alive is None else ["batch", "length"]
    width = net.outputs
    if alive is not None:
        a = writer.apply("transpose", a, order=(1, 0, 2), name="a")
        alive = writer.apply("transpose", alive, order=(1, 0, 2), name="alive")
    if data is None:
        y = a if net.output == "identity" else activate_output(writer, net, a)
        name = "output"
    else:
        y = write_outputs(writer, data, a)
        name = "probabilities" if data.kind == "classify" else "prediction"
    if alive is not None:
        y = writer.apply("where", alive, y, float("nan"), dtype=y.dtype)
    writer.output(y, name)
    outputs = [writer.describe(Value(name, y.dtype), [*lead, width])]
    if data is not None and data.kind == "classify":
        writer.output(write_labels(writer, data.labels, a, alive), "label")
        outputs.insert(0, writer.describe(Value("label", "string"), lead))
    return outputs


def activate_output(writer: OnnxWriter, net: Net, a: Value) -> Value:
    """y_hat = phi(a) of a network whose output function has a name."""
    if net.output == "softmax":
        return writer.apply("softmax", a, axis=-1, name="y_hat")
    if net.output in ("sigmoid", "tanh"):
        return writer.apply(str(net.output), a, name="y_hat")
    raise Unsupported("an output function that is code of your own cannot be exported.")


def write_labels(writer: OnnxWriter, labels: list[str], a: Value, alive: Value | None) -> Value:
    """The label of the largest output; "" where there is no step."""
    words = writer.strings(labels, "labels")
    number = writer.node("ArgMax", [a], "number", "int64", axis=-1, keepdims=0)
    chosen = writer.node("Gather", [words, number], "chosen", "string")
    if alive is None:
        return chosen
    has_step = writer.node("Squeeze", [alive, writer.integers(-1)], "has_step", "bool")
    empty = writer.strings([""], "empty")
    return writer.node("Where", [has_step, chosen, empty], "chosen", "string")


def describe_columns(net: Net, data: Description | None) -> dict[str, str]:
    """What a user of the file must know, as texts that are stored in it."""
    about = {"coadjoint": "1"}
    if data is None:
        about["inputs"] = f"{net.inputs} numbers, as the network reads them"
        return about
    about["kind"] = data.kind
    about["columns"] = json.dumps(column_names(data))
    about["missing"] = json.dumps(data.masked)
    if data.labels:
        about["labels"] = json.dumps(data.labels)
    else:
        about["targets"] = json.dumps(target_names(data))
    if data.categories:
        about["words"] = json.dumps(data.categories)
    if data.gap:
        unit = "microseconds" if data.gap["dates"] else "the units of the time column"
        about["gap"] = f"time since the row before in {unit}; NaN in the first row"
    if data.window is not None:
        about["window"] = str(data.window)
    about["columns_are"] = COLUMNS_ARE
    return about


COLUMNS_ARE = (
    "x holds these columns along its last axis (of samples in more than one dimension, along the "
    "first axis of a sample), in the units of the training file. NaN marks a missing value of a "
    "column under 'missing'. A column under 'words' holds the place of the word in its list, from "
    "0; any other number is a word that training did not know."
)
