"""The engine on an NVIDIA GPU: the three loops as persistent kernels, made from the cell's formula.

loops.cuh holds the loops; this file writes what is about the cell, chooses how the network lies on the chip, has it
compiled by NVRTC, which comes with torch, and launches it. float32 is float32 throughout: plain multiply-adds with W
in registers.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cells import Cell
from ..formula import Node, walk, written
from . import stepwise
from .compiler import kept
from .derivatives import Plan, Tape
from .eager import backwards, forwards
from .pointers import pointers
from .pointwise import Pointwise
from .rows import NONE, Link, Rows, exponent

WEIGHTS = 512  # bytes of W that a thread keeps in registers
SHARED = 180 << 10  # bytes of W that shared memory may hold, where that keeps a network on one multiprocessor
WARPS = 8
ROWS = 4  # samples of an item, twice as many for cells of several gates
TRAFFIC = 14 << 20  # bytes that the blocks of all groups read at a step, above which a product for each step is quicker
MARK = {torch.float32: 0x7FA1B2C3, torch.float64: 0x7FF4A1B2C3D4E5F6}
SPELLING = {
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


def refusal(device: str) -> str | None:
    if device != "cuda":
        return f"runs on an NVIDIA GPU, and the data is on {device}. Use engine='auto' or move the network with .to('cuda')."
    if torch.version.cuda is None:
        return "needs an NVIDIA GPU and torch built for CUDA. Use engine='auto'."
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return "needs a GPU of compute capability 8.0 or higher. Use engine='auto'."
    try:
        nvrtc()
    except OSError:
        return "needs NVRTC, CUDA's run-time compiler, and it was not found. Use engine='auto'."
    return None


def describe() -> str:
    """What compiles the kernels."""
    return f"NVRTC of CUDA {torch.version.cuda}" if refusal("cuda") is None else "NVRTC not found"


def explain(cell: Cell, hidden: int, batch: int, dtype: torch.dtype = torch.float32) -> str:
    """How a network lies on the GPU."""
    count = processors(0)
    g = geometry(cell, hidden, batch, dtype.itemsize, count, room(0))
    if g is None:
        return f"W does not fit the registers of {count} multiprocessors: a product for each step"
    by_steps = [name for name in SOURCES if too_much(name, cell, hidden, batch, dtype.itemsize, g)]
    where = "W in registers" + (
        " and shared memory of one multiprocessor" if g.parts == 1 else f" of {g.parts} multiprocessors"
    )
    text = f"{where}, {g.groups} groups of {g.rows * g.blocks} samples"
    text += f" in {g.blocks} items a step" if g.blocks > 1 else ""
    return text + (f"; a product for each step of {', '.join(by_steps)}" if by_steps else "")


# the cell, as source


@dataclass(frozen=True)
class Stream:
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


class Source:
    """What loops.cuh asks of a cell for one of its kernels."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.streams = cell, list[Stream]()
        self.defined: dict[str, Any] = {
            "S": len(cell.slots), "G": len(cell.gates), "NR": len(cell.read), "NP": len(cell.p), "NQ": len(cell.kept),
            "NEEDS_A": int(cell.needs_a),
        }  # fmt: skip
        self.functions: list[str] = []

    def stream(self, *where: Any) -> int:
        found = Stream(*where)
        if found not in self.streams:
            self.streams.append(found)
        return self.streams.index(found)

    def tape(self, expressions: Iterable[Node], moving: Iterable[Node], name: str) -> dict[Node, str]:
        """Streams of the values at which a step is differentiated -> what each node at hand is called."""
        cell, S = self.cell, len(self.cell.slots)
        at: dict[Node, tuple[str, int, int, str]] = {}
        at |= {n: ("X", S, s, "after") for s, n in enumerate(cell.next) if n.args}
        at |= {n: ("Q", len(cell.kept), i, "step") for i, n in enumerate(cell.kept)}
        at |= {n: ("A", len(cell.gates), i, "step") for i, n in enumerate(cell.a)}
        at |= {n: ("V", len(cell.v), i, "step") for i, n in enumerate(cell.v)}
        at |= {n: ("X", S, s, "before") for s, n in enumerate(cell.x)}
        needed = [n for n in walk(list(expressions), frozenset([*at, *moving])) if n in at]
        return {n: f"{name}[{self.stream(*at[n])}]" for n in needed} | self.parameters()

    def parameters(self) -> dict[Node, str]:
        return {n: f"p[{i}]" for i, n in enumerate(self.cell.p)}

    def function(self, name: str, arguments: str, names: dict[Node, str], into: dict[str, Sequence[Node]]) -> None:
        outputs = [n for nodes in into.values() for n in nodes]
        lines, results = written(outputs, names, SPELLING, "const real {0} = {1};", "t")
        found = iter(results)
        stores = [f"{target}[{i}] = {next(found)};" for target, nodes in into.items() for i in range(len(nodes))]
        body = "\n".join(f"  {line}" for line in (*lines, *stores))
        targets = "".join(f", real* {target}" for target in into)
        self.functions.append(f"__device__ __forceinline__ void {name}({arguments}{targets}) {{\n{body}\n}}")

    def flags(self, name: str, used: Sequence[bool]) -> None:
        """NAME(s): is slot s used"""
        mask = sum(1 << i for i, on in enumerate(used) if on)
        self.defined[f"{name}(s)"] = f"(({mask} >> (s)) & 1)"

    def __str__(self) -> str:
        lines = [f"#define {name} {value}" for name, value in self.defined.items()]
        reads = [f"  y_[{i}] = y.act ? {s} : 0;" for i, s in enumerate(self.streams)]
        unit = [f"  p[{i}] = unit < D ? a.PAR[{i} * D + unit] : 0;" for i, _ in enumerate(self.cell.p)]
        return "\n".join([
            *lines, f"#define NSTREAM {len(self.streams)}", FUNCTIONS, *self.functions,
            "struct Args; struct Item; struct Entry;",
            "#define AFTER_ARGS \\", "__device__ __forceinline__ void fetch(const Args& a, const Item& m, const Entry& y, real* y_) { \\",
            *(line + " \\" for line in reads), "} \\",
            "__device__ __forceinline__ void parameters(const Args& a, int unit, real* p) { \\", *(line + " \\" for line in unit), "}", "",
        ])  # fmt: skip


def named(name: str, nodes: Sequence[Node]) -> dict[Node, str]:
    return {n: f"{name}[{i}]" for i, n in enumerate(nodes)}


def forward_source(cell: Cell) -> Source:
    s = Source(cell)
    for i in range(len(cell.gates)):
        s.stream("BASE", len(cell.gates), i, "step")
    for i in range(len(cell.v)):
        s.stream("V", len(cell.v), i, "step")
    x = named("x", cell.x)
    s.function("next", "const real* g, const real* v, const real* x, const real* p",
               named("g", cell.a) | named("v", cell.v) | x | s.parameters(), {"z": cell.next, "q": cell.kept})  # fmt: skip
    s.function("read", "const real* x", x, {"q": cell.read})
    s.flags("READS_SLOT", [n in walk(cell.read) for n in cell.x])
    s.defined |= {"FORWARD": 1, "BACKWARDS": 0}
    return s


def adjoint_source(cell: Cell, s_: bool, last: bool, sa: bool, link: bool, scaled: bool) -> Source:
    s, e = Source(cell), backwards(cell)
    moving = named("lam", e.lam)
    names = s.tape((*e.into_a, *e.into_x), moving, "y") | moving
    s.function("pull", "const real* lam, const real* y, const real* p", names, {"del": e.into_a, "kept": e.into_x})
    names = s.tape(e.back, e.rbar, "y") | named("rbar", e.rbar)
    s.function("pull_read", "const real* rbar, const real* y, const real* p", names, {"back": e.back})
    s.defined |= {"ADJOINT": 1, "BACKWARDS": 1, "HAS_S": int(s_), "HAS_LAST": int(last), "HAS_SA": int(sa)}
    s.defined |= {"HAS_LINK": int(link), "SCALED": int(scaled), "FIRST_S": 0, "FIRST_SA": 0}
    if s_:
        s.defined["FIRST_S"] = len(s.streams)
        s.streams += [Stream("SRC", len(cell.slots), i, "before") for i in range(len(cell.slots))]
    if sa:
        s.defined["FIRST_SA"] = len(s.streams)
        s.streams += [Stream("SA", len(cell.gates), i, "step") for i in range(len(cell.gates))]
    s.defined["FIRST_LINK"] = len(s.streams)
    if link:
        s.streams.append(Stream("LINK", 0, 0, "step"))
    return s


def tangent_source(cell: Cell, g: bool, ga: bool, link: bool) -> Source:
    s, e = Source(cell), forwards(cell)
    moving = named("mu", e.mu) | named("nu", e.nu)
    s.function(
        "change",
        "const real* mu, const real* nu, const real* y, const real* p",
        s.tape(e.out, moving, "y") | moving,
        {"z": e.out},
    )
    s.function("along", "const real* mu, const real* y", s.tape(e.ahead, e.mu, "y") | named("mu", e.mu), {"q": e.ahead})
    s.function("along_at", "const real* mu, const real* x", named("mu", e.mu) | named("x", cell.x), {"q": e.ahead})
    used = set(walk(e.ahead, frozenset([*e.mu, *cell.x])))
    s.flags("ALONG_SLOT", [n in used for n in e.mu])
    s.flags("ALONG_STATE", [n in used for n in cell.x])
    s.defined |= {"TANGENT": 1, "BACKWARDS": 0, "HAS_S": int(g), "HAS_SA": int(ga), "HAS_LINK": int(link)}
    s.defined |= {"FIRST_S": len(s.streams), "FIRST_SA": len(s.streams) + g * len(cell.slots)}
    if g:
        s.streams += [Stream("SRC", len(cell.slots), i, "after") for i in range(len(cell.slots))]
    if ga:
        s.streams += [Stream("SA", len(cell.gates), i, "step") for i in range(len(cell.gates))]
    s.defined["FIRST_LINK"] = len(s.streams)
    if link:
        s.streams.append(Stream("LINK", 0, 0, "step"))
    return s


SOURCES: dict[str, Callable[..., Source]] = {
    "forward": forward_source,
    "adjoint": adjoint_source,
    "tangent": tangent_source,
}


# how it lies on the chip


@dataclass(frozen=True)
class Tile:
    """Which part of W a thread has: KC inner entries times CC outer ones, over LC x LK lanes and WC x WK warps."""

    KC: int
    CC: int
    LC: int
    LK: int
    WC: int
    WK: int


@functools.cache
def tile(inner: int, outer: int, rows: int, warps: int, weights: int) -> Tile | None:
    """The cheapest tile that covers W's part; None if no tile of at most `weights` entries a thread does."""
    best: tuple[float, Tile] | None = None
    for LC, WC, CC in itertools.product((1, 2, 4, 8, 16, 32), _divisors(warps), (1, 2, 3, 4, 6, 8, 12, 16)):
        LK, WK = 32 // LC, warps // WC
        if outer > LC * WC * CC or (CC > 1 and outer <= LC * WC * (CC - 1)):
            continue
        KC = 4 * -(-inner // (4 * LK * WK))
        if weights < KC * CC:
            continue
        fma, moved = KC * CC * warps / 4, KC * warps + (LK.bit_length() - 1) * CC * warps
        cost = rows * (max(fma, moved) + min(fma, moved) / 4) + rows * WK * outer / 32
        if best is None or cost < best[0]:
            best = cost, Tile(KC, CC, LC, LK, WC, WK)
    return None if best is None else best[1]


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


@dataclass(frozen=True)
class Geometry:
    """How a network lies on the chip: `parts` blocks of a group hold `units` units each."""

    units: int
    parts: int
    groups: int
    rows: int  # samples of an item
    blocks: int  # items of a step
    warps: int


LIMIT = 227 << 10  # bytes of shared memory that a block may have on a Hopper GPU


@functools.cache
def geometry(
    cell: Cell, d: int, B: int, size: int, processors: int, limit: int = LIMIT, warps: int = WARPS
) -> Geometry | None:
    """The fewest parts that fit, on so many multiprocessors with so much shared memory; None if none do."""
    G, NR = len(cell.gates), len(cell.read)
    if not NR:
        return Geometry(d, 1, B, 1, 1, min(warps, -(-d // 32)))
    for parts in range(1, min(d, processors) + 1):
        units = -(-d // parts)
        needed = -(-d // units)
        total = -(-B // min(B, max(1, processors // needed)))
        blocks = -(-total // (ROWS if G < 3 else 2 * ROWS))
        rows = -(-total // blocks)
        g = Geometry(units, needed, -(-B // (rows * blocks)), rows, blocks, warps)
        both = [held(cell, d, g, size, backwards) for backwards in (False, True)]
        if all(h is not None and h.shared <= limit for h in both):
            return g
    return None


class Held(NamedTuple):
    """Where a block keeps W: a tile for each thread, its first `keep` inner entries in registers."""

    shape: Tile
    keep: int
    inner: int
    outer: int
    shared: int  # bytes of shared memory, with what W multiplies and the sums


@functools.cache
def held(cell: Cell, d: int, g: Geometry, size: int, backwards: bool) -> Held | None:
    """None if the registers do not hold it."""
    G, NR = len(cell.gates), len(cell.read)
    inner, outer = (G * d, NR * g.units) if backwards else (NR * d, G * g.units)
    most = WEIGHTS // size + (SHARED // (32 * g.warps * size) if g.parts == 1 else 0)
    shape = tile(inner, outer, ROWS, g.warps, most) if NR else Tile(4, 1, 32, 1, g.warps, 1)
    if shape is None:
        return None
    keep = min(shape.KC, WEIGHTS // size // shape.CC // 4 * 4)
    vectors = g.rows * shape.WK * (shape.LK * shape.KC + max(1, outer)) + (shape.KC - keep) * shape.CC * 32 * g.warps
    shared = size * vectors + 4 * (5 * g.rows + g.rows * g.blocks) + 16
    return Held(shape, keep, inner, max(1, outer), shared)


@functools.cache
def source(
    name: str, cell: Cell, g: Geometry, d: int, dtype: torch.dtype, uniform: bool, *options: bool
) -> tuple[str, int]:
    """The kernel's source, and the bytes of shared memory it takes."""
    size, made = dtype.itemsize, SOURCES[name](cell, *options)
    found = held(cell, d, g, size, name == "adjoint")
    assert found is not None
    shape = found.shape
    entries = -(-g.rows * g.units // (32 * g.warps))
    quick = g.blocks == 1 and g.parts == 1 and entries * len(made.streams) <= 8
    made.defined |= {"KC": shape.KC, "CC": shape.CC, "LC": shape.LC, "LK": shape.LK, "WC": shape.WC, "WK": shape.WK}
    made.defined |= {
        "D": d, "U": g.units, "P": g.parts, "R": g.rows, "BLOCKS": g.blocks, "INNER": found.inner, "OUTER": found.outer,
        "UNIFORM": int(uniform), "AHEAD": 3 if quick else 1, "KEEP": found.keep,
        "VEC": 4 if size == 4 and d % 4 == 0 else 1,
        "DOUBLE": int(dtype == torch.float64), "MARK": f"{MARK[dtype]}{'LL' if size == 8 else ''}", "SPINS": 1 << 24,
    }  # fmt: skip
    head = f"typedef {'double' if size == 8 else 'float'} real;\n"
    text = (Path(__file__).parent / "loops.cuh").read_text()
    cut = text.index("// ---- the product with W")
    return head + str(made) + text[:cut] + "AFTER_ARGS\n\n" + text[cut:], found.shared


# compiling and launching

PREFACE = """
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(NT, 1) name(const Args a)
#define SHARED_MEMORY extern __shared__ __align__(16) unsigned char shared[]
#define PAUSE()
"""
ARRAYS = (
    "X", "A", "Q", "LAM", "DEL", "MU", "NU", "BASE", "V", "W", "PAR", "SRC", "LAST", "SA", "LINK", "K", "TOPS", "KS", "KEND", "KLAST", "LEN", "STARTS",
)  # fmt: skip


INTEGERS = dict.fromkeys(("K", "TOPS", "KS", "KEND", "KLAST", "NOW", "LEN"), torch.int32) | {"STARTS": torch.int64}


def sizes(cell: Cell, rows: Rows, d: int, parts: int) -> dict[str, int]:
    """How many values the arrays of a sweep have."""
    B, N = rows.B, rows.N
    gates, slots = len(cell.gates) * d, len(cell.slots) * d
    step = dict.fromkeys(("A", "DEL", "NU", "BASE", "SA"), N * gates)
    state = dict.fromkeys(("X", "LAM", "MU", "SRC"), (B + N) * slots)
    return (
        step
        | state
        | {
            "Q": N * len(cell.kept) * d,
            "V": N * len(cell.v) * d,
            "W": gates * len(cell.read) * d,
            "PAR": len(cell.p) * d,
            "LAST": B * slots,
            "LINK": N,
            "K": B + N,
            "KS": B + N,
            "KEND": B,
            "KLAST": B,
            "TOPS": N * parts,
            "NOW": B * parts,
            "LEN": B,
            "STARTS": 1 if rows.uniform else rows.T + 1,
        }
    )


@functools.cache
def nvrtc() -> ctypes.CDLL:
    major = str(torch.version.cuda).split(".")[0]
    for name in (f"libnvrtc.so.{major}", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError("libnvrtc.so")


def compiled(text: str, arch: str, library: ctypes.CDLL) -> bytes:
    """Machine code for the source."""
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"loops.cu", 0, None, None)
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"--fmad=true"]
    status = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    if status:
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC could not compile a kernel: {log.value.decode()}")
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, code)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def checked(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA: {(text.value or b'unknown error').decode()}")


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def kernel(
    name: str, cell: Cell, g: Geometry, d: int, dtype: torch.dtype, uniform: bool, device: int, *options: bool
) -> tuple[ctypes.c_void_p, int]:
    """A loaded kernel and its shared memory."""
    text, shared = source(name, cell, g, d, dtype, uniform, *options)
    return loaded(PREFACE + text, name, device, shared), shared


def loaded(text: str, name: str, device: int, shared: int) -> ctypes.c_void_p:
    """The function of that name, compiled for the device or found in the cache."""
    major, minor = torch.cuda.get_device_capability(device)
    arch = f"sm_{major}{minor}"
    recipe = f"{arch} {torch.version.cuda} {text}"
    code = kept(recipe, ".cubin", lambda out: out.write_bytes(compiled(text, arch, nvrtc()))).read_bytes()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # a context, if there is none yet
        checked(driver().cuModuleLoadData(ctypes.byref(module), code))
        checked(driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        checked(driver().cuFuncSetAttribute(function, 8, shared))  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    return function


def start(
    function: ctypes.c_void_p, grid: int, threads: int, shared: int, pack: Any, device: int, together: bool = False
) -> None:
    """Launch; together: all blocks must be on the chip at once."""
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(pack))
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    call: Any = driver().cuLaunchCooperativeKernel if together else driver().cuLaunchKernel
    more = () if together else (None,)
    with torch.cuda.device(device):
        checked(call(function, grid, 1, 1, threads, 1, 1, shared, stream, pointers, *more))


@functools.cache
def processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def room(device: int) -> int:
    """Bytes of shared memory that a block may have."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 96 << 10)


@functools.lru_cache(64)
def _even(T: int, B: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(1, dtype=torch.int64, device=device), torch.full((B,), T, dtype=torch.int32, device=device)


def where(rows: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    """(the first row of each state, the samples' lengths)"""
    if rows.uniform:
        return _even(rows.T, rows.B, device)
    starts = torch.tensor([0, *(rows.B + n for n in rows.starts[:-1])], dtype=torch.int64)
    return starts.to(device), rows.lengths.to(torch.int32).to(device)


class Launch:
    """One sweep: its geometry, its arrays, its launch."""

    def __init__(self, plan: Plan, like: Tensor, d: int, g: Geometry) -> None:
        self.plan, self.like, self.d, self.geometry = plan, like, d, g
        self.exchanged = bool(plan.cell.read) and (g.parts > 1 or g.blocks > 1)

    def array(self, rows: int, columns: int, exchanged: bool = False) -> Tensor:
        y = self.like.new_empty(rows, columns)
        if exchanged:
            y.view(torch.int64 if y.dtype == torch.float64 else torch.int32).fill_(MARK[y.dtype])
        return y

    def run(self, name: str, options: tuple[bool, ...], **arrays: Tensor | None) -> None:
        rows = self.plan.rows
        starts, lengths = where(rows, self.like.device)
        arrays |= {"STARTS": starts, "LEN": lengths}
        expected = sizes(self.plan.cell, rows, self.d, self.geometry.parts)
        dtypes = [INTEGERS.get(n, self.like.dtype) for n in ARRAYS]
        given = [arrays.get(n) for n in ARRAYS]
        found = pointers(ARRAYS, given, [expected[n] for n in ARRAYS], dtypes, self.like.device)
        pack = (ctypes.c_longlong * (len(ARRAYS) + 1))(*found.addresses, rows.B)
        self.launch(name, options, pack)

    def launch(self, name: str, options: tuple[bool, ...], pack: Any) -> None:
        g, device = self.geometry, self.like.get_device()
        function, shared = kernel(
            name, self.plan.cell, g, self.d, self.like.dtype, self.plan.rows.uniform, device, *options
        )
        start(function, g.groups * g.parts, 32 * g.warps, shared, pack, device, g.parts > 1)


@torch.no_grad()
def forward(
    plan: Plan, base: Tensor, v: Tensor | None, W: Tensor | None, x0: Tensor, p: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    cell, rows = plan.cell, plan.rows
    run = launch("forward", plan, base, x0.shape[1])
    if run is None:
        return stepwise.forward(plan, base, v, W, x0, p)
    x = run.array(rows.B + rows.N, x0.shape[1], run.exchanged)
    x[: rows.B] = x0
    a = run.array(rows.N, base.shape[1])
    q = run.array(rows.N, run.d * len(cell.kept)) if cell.kept else None
    run.run("forward", (), X=x, A=a, Q=q, BASE=base, V=v, W=W, PAR=p)
    return x, a, q


@torch.no_grad()
def adjoint(
    plan: Plan, tape: Tape, W: Tensor | None, s: Tensor | None, s_last: Tensor | None, sa: Tensor | None,
    link: Link | None, scaled: bool, keep: bool, k_last: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    rows, x = plan.rows, tape.x
    run = launch("adjoint", plan, x, x.shape[1])
    if run is None:
        return stepwise.adjoint(plan, tape, W, s, s_last, sa, link, scaled, keep, k_last)
    lam = run.array(rows.B + rows.N, x.shape[1])
    delta = run.array(rows.N, tape.a.shape[1], run.exchanged)
    k = tops = end = None
    if scaled:
        k = torch.empty(rows.B + rows.N, dtype=torch.int32, device=x.device)
        if run.geometry.parts > 1:
            tops = torch.full((rows.N * run.geometry.parts,), -1, dtype=torch.int32, device=x.device)
        k_last = torch.zeros(rows.B, dtype=torch.int32, device=x.device) if k_last is None else k_last
        if s_last is not None:
            e = exponent(s_last)
            end = torch.where(e == NONE, NONE, e + k_last).int()
    options = (s is not None, s_last is not None, sa is not None, link is not None, scaled)
    run.run(
        "adjoint", options, LAM=lam, DEL=delta, K=k, TOPS=tops, X=x, A=tape.a, Q=tape.q, V=tape.v, W=W,
        PAR=tape.p, SRC=s, LAST=s_last, SA=sa, KLAST=k_last, KEND=end,
        KS=exponent(s).int() if scaled and s is not None else None,
        LINK=None if link is None else link.factor,
    )  # fmt: skip
    return lam, delta, k


@torch.no_grad()
def tangent(
    plan: Plan, tape: Tape, W: Tensor | None, g: Tensor | None, ga: Tensor | None, link: Link | None
) -> tuple[Tensor, Tensor]:
    rows, x = plan.rows, tape.x
    run = launch("tangent", plan, x, x.shape[1])
    if run is None:
        return stepwise.tangent(plan, tape, W, g, ga, link)
    mu, nu = run.array(rows.B + rows.N, x.shape[1], run.exchanged), run.array(rows.N, tape.a.shape[1])
    mu[: rows.B] = 0 if g is None else g[: rows.B]
    run.run(
        "tangent", (g is not None, ga is not None, link is not None), MU=mu, NU=nu, X=x, A=tape.a, Q=tape.q,
        V=tape.v, W=W, PAR=tape.p, SRC=g, SA=ga, LINK=None if link is None else link.factor,
    )  # fmt: skip
    return mu, nu


POINTS = """
extern "C" __global__ void __launch_bounds__(256) points(const Args a) {
  for (long long i = blockIdx.x * 256LL + threadIdx.x; i < a.rows * D; i += gridDim.x * 256LL) {
    const long long row = i / D;
    const int unit = (int)(i % D);
"""


@functools.cache
def points(op: Pointwise, present: tuple[bool, ...], d: int, dtype: torch.dtype, device: int) -> ctypes.c_void_p:
    """A Pointwise as one kernel. present: which of op.known and op.inputs are given."""
    groups = [*((None, y) for y in op.known), *op.inputs]
    given = [(name, nodes) for (name, nodes), there in zip(groups, present, strict=True) if there]
    outputs = [nodes for name, nodes in op.outputs if name in op.live]
    names: dict[Node, str] = {}
    for i, (name, nodes) in enumerate(given):
        start = "" if name in op.uniform else f"row * {len(nodes) * d} + "
        names |= {n: f"a.y[{i}][{start}{j * d} + unit]" for j, n in enumerate(nodes) if name is not None or n.args}
    flat = [n for nodes in outputs for n in nodes]
    used = [n for n in walk(flat, frozenset(names)) if n in names]
    loads = [f"const real l{i} = {names[n]};" for i, n in enumerate(used)]
    lines, results = written(flat, {n: f"l{i}" for i, n in enumerate(used)}, SPELLING, "const real {0} = {1};")
    found, stores = iter(results), list[str]()
    for i, nodes in enumerate(outputs):
        stores += [
            f"a.y[{len(given) + i}][row * {len(nodes) * d} + {j * d} + unit] = {next(found)};"
            for j in range(len(nodes))
        ]
    body = "".join(f"    {line}\n" for line in (*loads, *lines, *stores))
    text = f"typedef {'double' if dtype == torch.float64 else 'float'} real;\n#define D {d}\n{FUNCTIONS}"
    text += f"struct Args {{ real* y[{len(given) + len(outputs)}]; long long rows; }};\n{POINTS}{body}  }}\n}}\n"
    return loaded(text, "points", device, 0)


def pointwise(
    op: Pointwise, rows: Rows | None, at_hand: Sequence[Tensor | None], tensors: Sequence[Tensor | None]
) -> list[Tensor]:
    """The outputs of `op` that are not identically zero, row by row."""
    groups = [*((None, y) for y in op.known), *op.inputs]
    given = [(*group, y) for group, y in zip(groups, (*at_hand, *tensors), strict=True) if y is not None]
    like, width = next((y, len(nodes)) for name, nodes, y in given if name is not None and name not in op.uniform)
    d, count, device = like.shape[1] // width, like.shape[0], like.get_device()
    function = points(op, tuple(y is not None for y in (*at_hand, *tensors)), d, like.dtype, device)
    outputs = [like.new_empty(count, d * len(nodes)) for name, nodes in op.outputs if name in op.live]
    arrays = [*(y for *_, y in given), *outputs]
    names, expected = op.expected([(name, nodes) for name, nodes, _ in given], count, d)
    found = pointers(names, arrays, expected, [like.dtype] * len(arrays), like.device)
    pack = (ctypes.c_longlong * (len(found.addresses) + 1))(*found.addresses, count)
    grid = min(-(-count * d // 256), processors(device) * 16)
    start(function, grid, 256, 0, pack, device)
    return outputs


def too_much(name: str, cell: Cell, d: int, B: int, size: int, g: Geometry) -> bool:
    """Would the parts of the groups read more of each other's work at a step than a product of its own takes?"""
    inner = d * len(cell.gates if name == "adjoint" else cell.read)
    return g.parts > 1 and B * g.parts * inner * size > TRAFFIC


def shares(cell: Cell, d: int, B: int, like: Tensor) -> bool:
    """May two such sweeps run at once? Not where the blocks of one wait for each other: they might wait for room that the
    other holds."""
    size, device = like.element_size(), like.get_device()
    g = geometry(cell, d, B, size, processors(device), room(device))
    return g is None or g.parts == 1 or all(too_much(name, cell, d, B, size, g) for name in ("forward", "adjoint"))


def launch(name: str, plan: Plan, like: Tensor, n: int) -> Launch | None:
    """The sweep as one kernel; None where W does not fit the chip, or its parts would read each other's work for longer
    than a product takes."""
    cell, rows, d = plan.cell, plan.rows, n // len(plan.cell.slots)
    g = geometry(cell, d, rows.B, like.element_size(), processors(like.get_device()), room(like.get_device()))
    if g is None or too_much(name, cell, d, rows.B, like.element_size(), g):
        return None
    return Launch(plan, like, d, g)
