"""The kernels' source: what is particular to one cell, and templates (.cuh) that all cells share.

arguments.cuh        the arrays a kernel is given, powers of two, which rows belong to which block
product.cuh          the product with W, whose parts stay in registers, by multiply-adds
tensor_product.cuh   the same by tensor cores, in float32
exchange.cuh         what blocks read of each other
loops.cuh            forward, tangent, adjoint
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ....cells.cell import Cell
from ....cells.formula import Node, walk
from ....cells.program import write_code
from ..expressions import adjoint_step, tangent_step
from .geometry import Geometry, place_weights

PLAIN = ("arguments.cuh", "product.cuh", "exchange.cuh", "loops.cuh")
TENSOR = ("arguments.cuh", "tensor_product.cuh", "exchange.cuh", "loops.cuh")
# An entry of an array that blocks exchange has these bits until it is written: a NaN that no
# arithmetic makes.
MARK = {torch.float32: 0x7FA1B2C3, torch.float64: 0x7FF4A1B2C3D4E5F6}
OPERATIONS = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "neg": "(-{0})",
    "const": "real({value})",
    "power": "pow({0}, real({value}))",
    "tanh": "tanh({0})",
    "sigmoid": "sigmoid({0})",
    "softplus": "softplus({0})",
    "relu": "({0} < 0 ? real(0) : {0})",
    "exp": "exp({0})",
    "log": "log({0})",
    "sqrt": "sqrt({0})",
    "sin": "sin({0})",
    "cos": "cos({0})",
    "expm1": "expm1({0})",
    "log1p": "log1p({0})",
    "erf": "erf({0})",
    "atan": "atan({0})",
    "abs": "fabs({0})",
    "sign": "signum({0})",
    "step": "step({0})",
    "held": "({0})",
    "tanh_slope": "(real(1) - {0} * {0})",
    "sigmoid_slope": "({0} - {0} * {0})",
}
_FUNCTIONS = (
    "sigmoid(real a) { return real(1) / (real(1) + exp(-a)); }",
    "softplus(real a) { return (a < 0 ? real(0) : a) + log1p(exp(-fabs(a))); }",
    "step(real a) { return a > 0 ? real(1) : a <= 0 ? real(0) : a; }",
    "signum(real a) { return a > 0 ? real(1) : a < 0 ? real(-1) : a; }",
)
FUNCTIONS = "\n" + "".join(f"__device__ __forceinline__ real {f}\n" for f in _FUNCTIONS)
# The row of a step's first sample, in C++: "step" in a step array [N, .]; "before" and "after" in
# a state array [B + N, .], for x_{t-1} and x_t. A state array has B rows more, those of x_0.
FIRST_ROW = {"step": "m.after - a.B", "before": "m.before", "after": "m.after"}


@dataclass(frozen=True)
class StepInput:
    """A value that is read at every step for each unit: where it lies in the arguments."""

    array: str  # its name in the struct Args of arguments.cuh
    width: int  # entries of a row, in units of d; 0: one number for each sample
    entry: int  # which of them
    time: str  # "step", "before" or "after": the row, see FIRST_ROW

    def __str__(self) -> str:
        """The value as a C++ expression, for the arguments a, the item m and its entry y."""
        row = FIRST_ROW[self.time]
        if not self.width:
            return f"a.{self.array}[{row} + y.b]"
        return f"a.{self.array}[({row} + y.b) * ({self.width} * D) + {self.entry} * D + y.unit]"


def step_inputs(array: str, width: int, time: str) -> list[StepInput]:
    """All `width` entries of an array's rows, as inputs of a step; time: see StepInput."""
    return [StepInput(array, width, i, time) for i in range(width)]


class KernelSource:
    """What the templates need of a cell for one of its kernels: macros and functions."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.inputs: list[StepInput] = []
        self.functions: list[str] = []
        self.defined: dict[str, int | str] = {
            "S": len(cell.slots),
            "G": len(cell.gates),
            "NR": len(cell.read),
            "NP": len(cell.p),
            "NQ": len(cell.saved_nodes),
            "NEEDS_A": int(cell.needs_a),
            "READS_ONE": -1 if cell.read_slot is None else cell.read_slot,
        }

    def add_input(self, step_input: StepInput) -> int:
        """Have a value read at every step, once; return its number among the inputs."""
        if step_input not in self.inputs:
            self.inputs.append(step_input)
        return self.inputs.index(step_input)

    def add_saved(
        self, expressions: Iterable[Node], moving: Iterable[Node], name: str
    ) -> dict[Node, str]:
        """Add to the inputs what the forward loop has saved and the expressions need.

        Returns the C++ name of each node that is read, name[number of the input], and of the
        cell's parameters.

        expressions: what a function of this kernel computes. moving: nodes such as lam or mu that
        the kernel's own loop carries from step to step, and that are not read. name: of the C++
        array that holds the inputs of a step.
        """
        cell = self.cell
        # Where the values lie that need not be computed again: x_t, a_t, v_t, x_{t-1}, and q_t,
        # the other saved ones.
        places: dict[Node, StepInput] = {}
        for node, place in zip(cell.next, step_inputs("X", len(cell.slots), "after"), strict=True):
            if node.args:  # a next state that is a copy of an input is read as that input
                places[node] = place
        groups = (
            (cell.saved_nodes, "Q", "step"),
            (cell.a, "A", "step"),
            (cell.v, "V", "step"),
            (cell.x, "X", "before"),
        )
        for nodes, array, time in groups:
            places.update(zip(nodes, step_inputs(array, len(nodes), time), strict=True))
        names = {}
        # The walk ends at values that are read or carried: what they are made of is not needed.
        for node in walk(list(expressions), frozenset([*places, *moving])):
            if node in places:
                names[node] = f"{name}[{self.add_input(places[node])}]"
        return names | self.parameters()

    def parameters(self) -> dict[Node, str]:
        """The C++ names of the cell's per-unit parameters: p[0], p[1], ..."""
        return indexed_names("p", self.cell.p)

    def add_function(
        self, name: str, arguments: str, names: dict[Node, str], into: dict[str, Sequence[Node]]
    ) -> None:
        """Write the C++ function `name` that computes nodes into arrays.

        arguments: its inputs, as C++. names: what the nodes that it is given are called there.
        into: the nodes that it computes, by the array that takes them.
        """
        outputs = [n for nodes in into.values() for n in nodes]
        lines, results = write_code(outputs, names, OPERATIONS, "const real {0} = {1};", "t")
        values = iter(results)
        for target, nodes in into.items():
            for i in range(len(nodes)):
                lines.append(f"{target}[{i}] = {next(values)};")
        body = "\n".join(f"  {line}" for line in lines)
        targets = "".join(f", real* {target}" for target in into)
        head = f"__device__ __forceinline__ void {name}({arguments}{targets})"
        self.functions.append(f"{head} {{\n{body}\n}}")

    def define_flags(self, name: str, used: Sequence[bool]) -> None:
        """Define the C++ macro name(s): 1 if used[s], else 0, for the slots s of a state.

        The flags are the bits of one number.
        """
        mask = sum(1 << i for i, on in enumerate(used) if on)
        self.defined[f"{name}(s)"] = f"(({mask} >> (s)) & 1)"

    def __str__(self) -> str:
        """The C++ text that goes before the templates.

        Its last part is a macro of two functions: `fetch` reads the inputs of a step into y_, and
        `parameters` those of a unit into p.
        """
        lines = [f"#define {name} {value}" for name, value in self.defined.items()]
        lines += [f"#define NSTREAM {len(self.inputs)}", FUNCTIONS, *self.functions]
        # The templates' structs must be complete where these two functions are defined, so they
        # are a macro that is used after arguments.cuh.
        lines += [
            "struct Args; struct Item; struct Entry;",
            "#define AFTER_ARGS \\",
            "__device__ __forceinline__ void "
            "fetch(const Args& a, const Item& m, const Entry& y, real* y_) { \\",
        ]
        for i, step_input in enumerate(self.inputs):
            lines.append(f"  y_[{i}] = y.act ? {step_input} : 0; \\")
        lines += [
            "} \\",
            "__device__ __forceinline__ void parameters(const Args& a, int unit, real* p) { \\",
        ]
        for i in range(len(self.cell.p)):
            lines.append(f"  p[{i}] = unit < D ? a.PAR[{i} * D + unit] : 0; \\")
        return "\n".join([*lines, "}", ""])


def indexed_names(name: str, nodes: Sequence[Node]) -> dict[Node, str]:
    """The nodes as entries of an array: name[0], name[1], ..."""
    return {n: f"{name}[{i}]" for i, n in enumerate(nodes)}


def forward_source(cell: Cell) -> KernelSource:
    """What the forward kernel needs: two functions, the inputs of each step, and macros.

    next(g, v, x, p, z, q)  z = f(a, v, x, p), a being called g, and q = the values to be saved
    read(x, q)              q = r(x), what W reads
    READS_SLOT(s)           whether r depends on slot s of x, which is loaded only then
    """
    source = KernelSource(cell)
    source.inputs += step_inputs("BASE", len(cell.gates), "step")
    source.inputs += step_inputs("V", len(cell.v), "step")
    x = indexed_names("x", cell.x)
    names = indexed_names("g", cell.a) | indexed_names("v", cell.v) | x | source.parameters()
    source.add_function(
        "next",
        "const real* g, const real* v, const real* x, const real* p",
        names,
        {"z": cell.next, "q": cell.saved_nodes},
    )
    source.add_function("read", "const real* x", x, {"q": cell.read})
    source.define_flags("READS_SLOT", [n in walk(cell.read) for n in cell.x])
    source.defined |= {"FORWARD": 1, "BACKWARDS": 0}
    return source


def adjoint_source(
    cell: Cell, has_s: bool, has_last: bool, has_sa: bool, has_link: bool, scaled: bool
) -> KernelSource:
    """What the adjoint kernel needs: two functions, the inputs of each step, and macros.

    pull(lam, y, p, del, kept)    del = f_a' lam, kept = f_x' lam; y: the inputs of the step
    pull_read(rbar, y, p, back)   back = r'(x)' rbar, for rbar = W' del
    FIRST_S, _SA, _LINK           where among the inputs of a step those of s, sa and link begin

    has_s .. has_link: which of s, s_last, sa and link are given. scaled: lam has exponents.
    """
    source = KernelSource(cell)
    e = adjoint_step(cell)
    lam = indexed_names("lam", e.lam)
    source.add_function(
        "pull",
        "const real* lam, const real* y, const real* p",
        source.add_saved((*e.into_a, *e.into_x), lam, "y") | lam,
        {"del": e.into_a, "kept": e.into_x},
    )
    source.add_function(
        "pull_read",
        "const real* rbar, const real* y, const real* p",
        source.add_saved(e.through_read, e.rbar, "y") | indexed_names("rbar", e.rbar),
        {"back": e.through_read},
    )
    source.defined |= {
        "ADJOINT": 1,
        "BACKWARDS": 1,
        "HAS_S": int(has_s),
        "HAS_LAST": int(has_last),
        "HAS_SA": int(has_sa),
        "HAS_LINK": int(has_link),
        "SCALED": int(scaled),
        "FIRST_S": 0,
        "FIRST_SA": 0,
    }
    if has_s:
        source.defined["FIRST_S"] = len(source.inputs)
        source.inputs += step_inputs("SRC", len(cell.slots), "before")
    if has_sa:
        source.defined["FIRST_SA"] = len(source.inputs)
        source.inputs += step_inputs("SA", len(cell.gates), "step")
    source.defined["FIRST_LINK"] = len(source.inputs)
    if has_link:
        source.inputs.append(StepInput("LINK", 0, 0, "step"))
    return source


def tangent_source(cell: Cell, has_g: bool, has_ga: bool, has_link: bool) -> KernelSource:
    """What the tangent kernel needs: three functions, the inputs of each step, and macros.

    change(mu, nu, y, p, z)   z = f_x mu + f_a nu; y: the inputs of the step
    along(mu, y, q)           q = r'(x) mu, of the state x among the inputs
    along_at(mu, x, q)        the same for a state x that is at hand
    ALONG_SLOT(s), _STATE(s)  whether r'(x) mu depends on slot s of mu, of x
    FIRST_S, _SA, _LINK       where among the inputs of a step those of g, ga and link begin

    has_g, has_ga, has_link: which of these are given.
    """
    source = KernelSource(cell)
    e = tangent_step(cell)
    mu = indexed_names("mu", e.mu)
    moving = mu | indexed_names("nu", e.nu)
    source.add_function(
        "change",
        "const real* mu, const real* nu, const real* y, const real* p",
        source.add_saved(e.out, moving, "y") | moving,
        {"z": e.out},
    )
    source.add_function(
        "along",
        "const real* mu, const real* y",
        source.add_saved(e.through_read, e.mu, "y") | mu,
        {"q": e.through_read},
    )
    source.add_function(
        "along_at",
        "const real* mu, const real* x",
        mu | indexed_names("x", cell.x),
        {"q": e.through_read},
    )
    used = set(walk(e.through_read, frozenset([*e.mu, *cell.x])))
    source.define_flags("ALONG_SLOT", [n in used for n in e.mu])
    source.define_flags("ALONG_STATE", [n in used for n in cell.x])
    source.defined |= {
        "TANGENT": 1,
        "BACKWARDS": 0,
        "HAS_S": int(has_g),
        "HAS_SA": int(has_ga),
        "HAS_LINK": int(has_link),
        "FIRST_S": len(source.inputs),
    }
    if has_g:
        source.inputs += step_inputs("SRC", len(cell.slots), "after")
    source.defined["FIRST_SA"] = len(source.inputs)
    if has_ga:
        source.inputs += step_inputs("SA", len(cell.gates), "step")
    source.defined["FIRST_LINK"] = len(source.inputs)
    if has_link:
        source.inputs.append(StepInput("LINK", 0, 0, "step"))
    return source


SOURCES: dict[str, Callable[..., KernelSource]] = {
    "forward": forward_source,
    "adjoint": adjoint_source,
    "tangent": tangent_source,
}


def numbers_at_once(g: Geometry, d: int, size: int) -> int:
    """How many numbers, of `size` bytes, a thread reads at once: four if rows allow it."""
    return 4 if size == 4 and d % (4 * g.cluster) == 0 else 1


def passes_on(cell: Cell, g: Geometry, d: int, size: int) -> bool:
    """Whether the blocks of a tangent with links exchange what W reads, not mu (loops.cuh)."""
    is_exchanged = g.parts > 1 or g.blocks > 1
    is_copied = g.tensor > 0 and numbers_at_once(g, d, size) == 4
    return is_exchanged and is_copied and cell.read_slot is not None


@functools.cache
def kernel_source(
    name: str, cell: Cell, g: Geometry, d: int, dtype: torch.dtype, uniform: bool, *options: bool
) -> tuple[str, int]:
    """A kernel's source, and the bytes of shared memory it takes.

    name: "forward", "adjoint" or "tangent". g, d: how the network lies on the chip, and its units.
    uniform: all samples have one length. options: those of the function in SOURCES, after the
    cell.
    """
    size = dtype.itemsize
    is_double = dtype == torch.float64
    source = SOURCES[name](cell, *options)
    placement = place_weights(cell, d, g, size, name == "adjoint")
    assert placement is not None
    entries = -(-g.rows * g.units // (32 * g.warps))  # of an item, for each thread
    # Few inputs, and steps that wait for nobody: they are fetched three steps ahead. They wait in
    # registers, so this is done for at most eight values a step.
    is_light = g.blocks == 1 and g.parts == 1 and entries * len(source.inputs) <= 8
    # In the templates: KC .. WK and KEEP, what a thread or a warp has of W (Tile, TensorTile and
    # WeightPlacement); U units, P parts in clusters of CLUSTER, R samples and BLOCKS items
    # (Geometry); AHEAD, steps whose inputs are fetched.
    source.defined |= {
        **placement.shape.macros,
        "D": d,
        "U": g.units,
        "P": g.parts,
        "CLUSTER": g.cluster,
        "R": g.rows,
        "BLOCKS": g.blocks,
        "INNER": placement.inner,
        "OUTER": placement.outer,
        "UNIFORM": int(uniform),
        "AHEAD": 3 if is_light else 1,
        "KEEP": placement.keep,
        "VEC": numbers_at_once(g, d, size),
        "DOUBLE": int(is_double),
        "TENSOR": int(g.tensor > 0),
        "MARK": f"{MARK[dtype]}LL" if is_double else str(MARK[dtype]),
        "SPINS": 1 << 24,  # tries, after which a block stops waiting: a fault must not hang the GPU
    }
    arguments, product, exchange, loops = map(read_template, TENSOR if g.tensor else PLAIN)
    head = f"typedef {'double' if is_double else 'float'} real;\n"
    text = head + str(source) + arguments + "AFTER_ARGS\n\n" + product + exchange + loops
    return text, placement.shared


@functools.cache
def read_template(name: str) -> str:
    """The text of a file in this folder."""
    return (Path(__file__).parent / name).read_text()


PREFACE = """
#define BOUNDS IN_CLUSTERS __launch_bounds__(NT, 1)
#define KERNEL(name) extern "C" __global__ void BOUNDS name(const Args a)
#define SHARED_MEMORY extern __shared__ __align__(16) unsigned char shared[]
#define PAUSE()
#define SYNC_WARP() __syncwarp()
"""
