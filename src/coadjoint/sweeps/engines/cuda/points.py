"""The source of a Pointwise as one kernel, with a thread for each unit of each row."""

from __future__ import annotations

import torch

from ....cells.formula import Node, walk
from ....cells.program import write_code
from ...pointwise import Pointwise
from ..expressions import input_groups
from .source import FUNCTIONS, OPERATIONS

POINTWISE_HEAD = """
extern "C" __global__ void __launch_bounds__(256) points(const Args a) {
  for (long long i = blockIdx.x * 256LL + threadIdx.x; i < a.rows * D; i += gridDim.x * 256LL) {
    const long long row = i / D;
    const int unit = (int)(i % D);
"""


def pointwise_source(op: Pointwise, present: tuple[bool, ...], d: int, dtype: torch.dtype) -> str:
    """A Pointwise as the source of one kernel, with a thread for each unit of each row.

    present: for each array of op.known and op.inputs, whether it is given (input_groups).
    """
    names: dict[Node, str] = {}  # where each node lies in the arrays a.y
    given = 0  # arrays so far
    for (name, nodes), is_given in zip(input_groups(op), present, strict=True):
        if not is_given:
            continue
        row = "" if name in op.uniform else f"row * {len(nodes) * d} + "
        for j, node in enumerate(nodes):
            if name is not None or node.args:  # a saved copy of an input is read as that input
                names[node] = f"a.y[{given}][{row}{j * d} + unit]"
        given += 1
    outputs = [nodes for name, nodes in op.outputs if name in op.nonzero_outputs]
    output_nodes = [n for nodes in outputs for n in nodes]
    used = [n for n in walk(output_nodes, frozenset(names)) if n in names]
    loaded = {n: f"l{i}" for i, n in enumerate(used)}  # local variables that hold them
    lines, results = write_code(output_nodes, loaded, OPERATIONS, "const real {0} = {1};")
    body = [f"const real {loaded[n]} = {names[n]};" for n in used]
    body += lines
    values = iter(results)
    for i, nodes in enumerate(outputs):
        for j in range(len(nodes)):
            target = f"a.y[{given + i}][row * {len(nodes) * d} + {j * d} + unit]"
            body.append(f"{target} = {next(values)};")
    real = "double" if dtype == torch.float64 else "float"
    count = given + len(outputs)
    text = f"typedef {real} real;\n#define D {d}\n{FUNCTIONS}"
    text += f"struct Args {{ real* y[{count}]; long long rows; }};\n{POINTWISE_HEAD}"
    text += "".join(f"    {line}\n" for line in body)
    return text + "  }\n}\n"
