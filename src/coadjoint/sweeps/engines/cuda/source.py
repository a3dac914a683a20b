"""The kernels' source: templates (.cuh) that are the same for all cells, and before them what is about one cell.

arguments.cuh   the arrays a kernel is given, powers of two, which rows are whose
product.cuh     the product with W, whose parts stay in registers
loops.cuh       forward, tangent, adjoint
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ....cells.cell import Cell
from ....cells.formula import Node, walk
from ....cells.program import write_code
from ..expressions import adjoint_step, tangent_step
from .geometry import Geometry, place_weights

TEMPLATES = (
    "arguments.cuh",
    "product.cuh",
    "loops.cuh",
)  # what is the same for all cells, in this order
MARK = {torch.float32: 0x7FA1B2C3, torch.float64: 0x7FF4A1B2C3D4E5F6}
OPERATIONS = {
    "add": "({0} + {1})", "sub": "({0} - {1})", "mul": "({0} * {1})", "div": "({0} / {1})", "neg": "(-{0})",
    "const": "real({value})", "power": "pow({0}, real({value}))",
    "tanh": "tanh({0})", "sigmoid": "sigmoid({0})", "softplus": "softplus({0})", "relu": "({0} < 0 ? real(0) : {0})",
    "exp": "exp({0})", "log": "log({0})", "sqrt": "sqrt({0})", "sin": "sin({0})", "cos": "cos({0})",
    "expm1": "expm1({0})", "log1p": "log1p({0})",
    "erf": "erf({0})", "atan": "atan({0})", "abs": "fabs({0})", "sign": "signum({0})", "step": "step({0})",
    "held": "({0})",
    "tanh_slope": "(real(1) - {0} * {0})", "sigmoid_slope": "({0} - {0} * {0})",
}  # fmt: skip
FUNCTIONS = """
__device__ __forceinline__ real sigmoid(real a) { return real(1) / (real(1) + exp(-a)); }
__device__ __forceinline__ real softplus(real a) { return (a < 0 ? real(0) : a) + log1p(exp(-fabs(a))); }
__device__ __forceinline__ real step(real a) { return a > 0 ? real(1) : a <= 0 ? real(0) : a; }
__device__ __forceinline__ real signum(real a) { return a > 0 ? real(1) : a < 0 ? real(-1) : a; }
"""


# the cell, as source
@dataclass(frozen=True)
class StepInput:
    """An array that is read at every step for each unit: where it lies in the arguments and in a row."""

    array: str
    width: int  # entries of a row, in units of d; 0: one for each sample
    entry: int
    time: str  # "step", "before" or "after"

    def __str__(self) -> str:
        row = {"step": "m.after - a.B", "before": "m.before", "after": "m.after"}[self.time]
        if not self.width:
            return f"a.{self.array}[{row} + y.b]"
        return f"a.{self.array}[({row} + y.b) * ({self.width} * D) + {self.entry} * D + y.unit]"


class KernelSource:
    """What the templates ask of a cell for one of its kernels."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.streams = cell, list[StepInput]()
        self.defined: dict[str, Any] = {
            "S": len(cell.slots), "G": len(cell.gates), "NR": len(cell.read), "NP": len(cell.p), "NQ": len(cell.saved_nodes),
            "NEEDS_A": int(cell.needs_a),
        }  # fmt: skip
        self.functions: list[str] = []

    def stream(self, *where: Any) -> int:
        found = StepInput(*where)
        if found not in self.streams:
            self.streams.append(found)
        return self.streams.index(found)

    def tape(
        self, expressions: Iterable[Node], moving: Iterable[Node], name: str
    ) -> dict[Node, str]:
        """Streams of the values at which a step is differentiated -> what each node at hand is called."""
        cell, S = self.cell, len(self.cell.slots)
        at: dict[Node, tuple[str, int, int, str]] = {}
        at |= {n: ("X", S, s, "after") for s, n in enumerate(cell.next) if n.args}
        at |= {n: ("Q", len(cell.saved_nodes), i, "step") for i, n in enumerate(cell.saved_nodes)}
        at |= {n: ("A", len(cell.gates), i, "step") for i, n in enumerate(cell.a)}
        at |= {n: ("V", len(cell.v), i, "step") for i, n in enumerate(cell.v)}
        at |= {n: ("X", S, s, "before") for s, n in enumerate(cell.x)}
        needed = [n for n in walk(list(expressions), frozenset([*at, *moving])) if n in at]
        return {n: f"{name}[{self.stream(*at[n])}]" for n in needed} | self.parameters()

    def parameters(self) -> dict[Node, str]:
        return {n: f"p[{i}]" for i, n in enumerate(self.cell.p)}

    def function(
        self, name: str, arguments: str, names: dict[Node, str], into: dict[str, Sequence[Node]]
    ) -> None:
        outputs = [n for nodes in into.values() for n in nodes]
        lines, results = write_code(outputs, names, OPERATIONS, "const real {0} = {1};", "t")
        found = iter(results)
        stores = [
            f"{target}[{i}] = {next(found)};"
            for target, nodes in into.items()
            for i in range(len(nodes))
        ]
        body = "\n".join(f"  {line}" for line in (*lines, *stores))
        targets = "".join(f", real* {target}" for target in into)
        self.functions.append(
            f"__device__ __forceinline__ void {name}({arguments}{targets}) {{\n{body}\n}}"
        )

    def flags(self, name: str, used: Sequence[bool]) -> None:
        """NAME(s): is slot s used"""
        mask = sum(1 << i for i, on in enumerate(used) if on)
        self.defined[f"{name}(s)"] = f"(({mask} >> (s)) & 1)"

    def __str__(self) -> str:
        lines = [f"#define {name} {value}" for name, value in self.defined.items()]
        reads = [f"  y_[{i}] = y.act ? {s} : 0;" for i, s in enumerate(self.streams)]
        unit = [
            f"  p[{i}] = unit < D ? a.PAR[{i} * D + unit] : 0;" for i, _ in enumerate(self.cell.p)
        ]
        return "\n".join([
            *lines, f"#define NSTREAM {len(self.streams)}", FUNCTIONS, *self.functions,
            "struct Args; struct Item; struct Entry;",
            "#define AFTER_ARGS \\", "__device__ __forceinline__ void fetch(const Args& a, const Item& m, const Entry& y, real* y_) { \\",
            *(line + " \\" for line in reads), "} \\",
            "__device__ __forceinline__ void parameters(const Args& a, int unit, real* p) { \\", *(line + " \\" for line in unit), "}", "",
        ])  # fmt: skip


def indexed_names(name: str, nodes: Sequence[Node]) -> dict[Node, str]:
    return {n: f"{name}[{i}]" for i, n in enumerate(nodes)}


def forward_source(cell: Cell) -> KernelSource:
    s = KernelSource(cell)
    for i in range(len(cell.gates)):
        s.stream("BASE", len(cell.gates), i, "step")
    for i in range(len(cell.v)):
        s.stream("V", len(cell.v), i, "step")
    x = indexed_names("x", cell.x)
    s.function("next", "const real* g, const real* v, const real* x, const real* p",
               indexed_names("g", cell.a) | indexed_names("v", cell.v) | x | s.parameters(), {"z": cell.next, "q": cell.saved_nodes})  # fmt: skip
    s.function("read", "const real* x", x, {"q": cell.read})
    s.flags("READS_SLOT", [n in walk(cell.read) for n in cell.x])
    s.defined |= {"FORWARD": 1, "BACKWARDS": 0}
    return s


def adjoint_source(
    cell: Cell, s_: bool, last: bool, sa: bool, link: bool, scaled: bool
) -> KernelSource:
    s, e = KernelSource(cell), adjoint_step(cell)
    moving = indexed_names("lam", e.lam)
    names = s.tape((*e.into_a, *e.into_x), moving, "y") | moving
    s.function(
        "pull",
        "const real* lam, const real* y, const real* p",
        names,
        {"del": e.into_a, "kept": e.into_x},
    )
    names = s.tape(e.through_read, e.rbar, "y") | indexed_names("rbar", e.rbar)
    s.function(
        "pull_read", "const real* rbar, const real* y, const real* p", names, {"back": e.through_read}
    )
    s.defined |= {
        "ADJOINT": 1,
        "BACKWARDS": 1,
        "HAS_S": int(s_),
        "HAS_LAST": int(last),
        "HAS_SA": int(sa),
    }
    s.defined |= {"HAS_LINK": int(link), "SCALED": int(scaled), "FIRST_S": 0, "FIRST_SA": 0}
    if s_:
        s.defined["FIRST_S"] = len(s.streams)
        s.streams += [
            StepInput("SRC", len(cell.slots), i, "before") for i in range(len(cell.slots))
        ]
    if sa:
        s.defined["FIRST_SA"] = len(s.streams)
        s.streams += [StepInput("SA", len(cell.gates), i, "step") for i in range(len(cell.gates))]
    s.defined["FIRST_LINK"] = len(s.streams)
    if link:
        s.streams.append(StepInput("LINK", 0, 0, "step"))
    return s


def tangent_source(cell: Cell, g: bool, ga: bool, link: bool) -> KernelSource:
    s, e = KernelSource(cell), tangent_step(cell)
    moving = indexed_names("mu", e.mu) | indexed_names("nu", e.nu)
    s.function(
        "change",
        "const real* mu, const real* nu, const real* y, const real* p",
        s.tape(e.out, moving, "y") | moving,
        {"z": e.out},
    )
    s.function(
        "along",
        "const real* mu, const real* y",
        s.tape(e.through_read, e.mu, "y") | indexed_names("mu", e.mu),
        {"q": e.through_read},
    )
    s.function(
        "along_at",
        "const real* mu, const real* x",
        indexed_names("mu", e.mu) | indexed_names("x", cell.x),
        {"q": e.through_read},
    )
    used = set(walk(e.through_read, frozenset([*e.mu, *cell.x])))
    s.flags("ALONG_SLOT", [n in used for n in e.mu])
    s.flags("ALONG_STATE", [n in used for n in cell.x])
    s.defined |= {
        "TANGENT": 1,
        "BACKWARDS": 0,
        "HAS_S": int(g),
        "HAS_SA": int(ga),
        "HAS_LINK": int(link),
    }
    s.defined |= {"FIRST_S": len(s.streams), "FIRST_SA": len(s.streams) + g * len(cell.slots)}
    if g:
        s.streams += [StepInput("SRC", len(cell.slots), i, "after") for i in range(len(cell.slots))]
    if ga:
        s.streams += [StepInput("SA", len(cell.gates), i, "step") for i in range(len(cell.gates))]
    s.defined["FIRST_LINK"] = len(s.streams)
    if link:
        s.streams.append(StepInput("LINK", 0, 0, "step"))
    return s


SOURCES: dict[str, Callable[..., KernelSource]] = {
    "forward": forward_source,
    "adjoint": adjoint_source,
    "tangent": tangent_source,
}


@functools.cache
def kernel_source(
    name: str, cell: Cell, g: Geometry, d: int, dtype: torch.dtype, uniform: bool, *options: bool
) -> tuple[str, int]:
    """The kernel's source, and the bytes of shared memory it takes."""
    size, made = dtype.itemsize, SOURCES[name](cell, *options)
    found = place_weights(cell, d, g, size, name == "adjoint")
    assert found is not None
    shape = found.shape
    entries = -(-g.rows * g.units // (32 * g.warps))
    quick = g.blocks == 1 and g.parts == 1 and entries * len(made.streams) <= 8
    made.defined |= {
        "KC": shape.KC,
        "CC": shape.CC,
        "LC": shape.LC,
        "LK": shape.LK,
        "WC": shape.WC,
        "WK": shape.WK,
    }
    made.defined |= {
        "D": d, "U": g.units, "P": g.parts, "R": g.rows, "BLOCKS": g.blocks, "INNER": found.inner, "OUTER": found.outer,
        "UNIFORM": int(uniform), "AHEAD": 3 if quick else 1, "KEEP": found.keep,
        "VEC": 4 if size == 4 and d % 4 == 0 else 1,
        "DOUBLE": int(dtype == torch.float64), "MARK": f"{MARK[dtype]}{'LL' if size == 8 else ''}", "SPINS": 1 << 24,
    }  # fmt: skip
    head = f"typedef {'double' if size == 8 else 'float'} real;\n"
    arguments, product, loops = ((Path(__file__).parent / name).read_text() for name in TEMPLATES)
    return head + str(made) + arguments + "AFTER_ARGS\n\n" + product + loops, found.shared


# compiling and launching
PREFACE = """
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(NT, 1) name(const Args a)
#define SHARED_MEMORY extern __shared__ __align__(16) unsigned char shared[]
#define PAUSE()
"""

POINTWISE_HEAD = """
extern "C" __global__ void __launch_bounds__(256) points(const Args a) {
  for (long long i = blockIdx.x * 256LL + threadIdx.x; i < a.rows * D; i += gridDim.x * 256LL) {
    const long long row = i / D;
    const int unit = (int)(i % D);
"""
