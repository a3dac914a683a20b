"""Triton source for the three loops of a cell, written from its formula.

A kernel runs the whole time loop with its part of W on chip. The units of the network are split over the programs of
a group, the samples over groups; the programs of a group exchange what W multiplies at each step.

The exchange needs no barrier. An array that is exchanged begins as MARK, a NaN that no arithmetic makes, and whoever
needs an entry reads it until it is something else: every value is its own flag and travels once through L2.

An item is a step of a few samples (`rows`, unrolled). A group with more samples than that takes several items for each
step (`blocks`), and its states wait in memory; what an item needs is asked for while the item before it is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..cells import Cell
from ..formula import Node, walk, written
from .eager import backwards, forwards

SPELLING = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "neg": "(-{0})",
    "const": "{value}",
    "power": "power({0}, {value})",
    "tanh": "tanh({0})",
    "sigmoid": "sigmoid({0})",
    "softplus": "softplus({0})",
    "relu": "relu({0})",
    "exp": "tl.exp({0})",
    "expm1": "expm1({0})",
    "log": "tl.log({0})",
    "log1p": "log1p({0})",
    "sqrt": "root({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "erf": "tl.erf({0})",
    "atan": "atan({0})",
    "abs": "tl.abs({0})",
    "sign": "sign({0})",
    "step": "step({0})",
    "held": "({0})",
    "tanh_slope": "(1.0 - {0} * {0})",
    "sigmoid_slope": "({0} - {0} * {0})",
}

PRELUDE = '''
import triton
import triton.language as tl
from triton.language.extra import libdevice

NONE = tl.constexpr(-(1 << 28))


@triton.jit
def tanh(a):
    """(1 - e) / (1 + e) with e = exp(-2 |a|); a polynomial where that would cancel."""
    s = tl.abs(a)
    e = tl.exp(-2.0 * s)
    far = (1.0 - e) / (1.0 + e)
    y = a * a
    if a.dtype == tl.float64:  # a continued fraction
        near = 17.0 + y / 19.0
        for i in tl.static_range(8):
            near = (15.0 - 2 * i) + y / near
        return tl.where(s < 0.5, a / near, tl.where(a < 0, -far, far))
    near = a + a * y * (-3.33332062e-1 + y * (1.33290231e-1 + y * (-5.37397150e-2 + y * (2.06390878e-2 + y * -5.70498872e-3))))
    return tl.where(s < 0.5, near, tl.where(a < 0, -far, far))


@triton.jit
def sigmoid(a):
    e = tl.exp(-tl.abs(a))
    return tl.where(a < 0, e, 1.0) / (1.0 + e)


@triton.jit
def softplus(a):
    e = tl.exp(-tl.abs(a))
    v = 1.0 + e
    return tl.where(a < 0, 0.0, a) + tl.where(v == 1.0, e, tl.log(v) * (e / (v - 1.0)))


@triton.jit
def expm1(a):
    """e^a - 1; by t = tanh(a / 2), as 2 t / (1 - t), where the difference would cancel."""
    t = tanh(0.5 * a)
    return tl.where(tl.abs(a) < 1.0, 2.0 * t / (1.0 - t), tl.exp(a) - 1.0)


@triton.jit
def log1p(a):
    """log(1 + a); what 1 + a was rounded by is made good where it was rounded."""
    v = 1.0 + a
    near = tl.where(v == 1.0, a, tl.log(v) * (a / (v - 1.0)))
    return tl.where(v - 1.0 == a, tl.log(v), near)


@triton.jit
def root(a):
    if a.dtype == tl.float64:
        y = tl.sqrt(a)
    else:
        y = tl.sqrt_rn(a)
    return y


@triton.jit
def relu(a):
    return tl.where(a < 0, 0.0, a)


@triton.jit
def atan(a):
    return libdevice.atan(a)


@triton.jit
def power(a, n):
    return libdevice.pow(a, n)


@triton.jit
def step(a):
    return tl.where(a > 0, 1.0, tl.where(a <= 0, 0.0, a)).to(a.dtype)


@triton.jit
def sign(a):
    return tl.where(a > 0, 1.0, tl.where(a < 0, -1.0, a)).to(a.dtype)


@triton.jit
def power_of_two(k, like):
    """2^k, exactly; 0 below the normal range."""
    if like.dtype == tl.float64:
        y = ((tl.minimum(tl.maximum(k, -1023), 1023).to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    else:
        y = ((tl.minimum(tl.maximum(k, -127), 127) + 127) << 23).to(tl.float32, bitcast=True)
    return y


@triton.jit
def scaled(y, k):
    """y 2^k, in two factors, so that 2^k may be out of range."""
    h = k >> 1
    return y * power_of_two(h, y) * power_of_two(k - h, y)


@triton.jit
def exponent(top):
    """e with 2^(e-1) <= top < 2^e; NONE for zero."""
    if top.dtype == tl.float64:
        e = ((top.to(tl.int64, bitcast=True) >> 52) & 2047).to(tl.int32) - 1022
    else:
        e = ((top.to(tl.int32, bitcast=True) >> 23) & 255) - 126
    return tl.where(top > 0, e, NONE)


@triton.jit
def absent(y, MARK: tl.constexpr):
    """Entries that nobody has written yet."""
    if y.dtype == tl.float64:
        return (y.to(tl.int64, bitcast=True) == MARK).to(tl.int32)
    return (y.to(tl.int32, bitcast=True) == MARK).to(tl.int32)
'''

MARK32, MARK64 = 0x7FA1B2C3, 0x7FF4A1B2C3D4E5F6
SPINS = 1 << 24  # readings after which a program no longer waits: its group is lost, and the NaN says so


@dataclass(frozen=True)
class Shape:
    """What a kernel's source depends on besides the cell."""

    rows: int  # samples of an item
    blocks: int  # items of a step
    split: bool  # is a group more than one program
    resident: bool  # does W stay on chip
    uniform: bool
    copies: int  # threads for each entry of a vector of all units
    ahead: int  # steps by which data is read ahead, where the state stays on chip
    double: bool

    @property
    def on_chip(self) -> bool:
        """Does the state stay on chip, too?"""
        return self.blocks == 1 and self.resident


Terms = dict[str, list[tuple[str, int, int]]]  # target -> (vector, gate, read) of W's blocks
ROWS = "B, S, LEN"
SIZES = (
    "D: tl.constexpr, DP: tl.constexpr, U: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, "
    "KC: tl.constexpr, WIDE: tl.constexpr"
)


@dataclass(frozen=True)
class Stream:
    """An array that is read at every item."""

    name: str
    array: str
    width: int  # entries of a row, in units of d
    entry: int
    time: str  # "step", "before" or "after"
    whole: bool = False  # all units, rather than the program's own
    fresh: bool = False  # written by this kernel


class Kernel:
    """What the three kernels share: items, reading ahead, the exchange and the product with W."""

    def __init__(self, cell: Cell, shape: Shape, transposed: bool, backwards: bool, through: bool = True) -> None:
        """through: does anything go through W here"""
        self.cell, self.shape, self.transposed, self.backwards = cell, shape, transposed, backwards
        self.slots, self.gates, self.reads = len(cell.slots), len(cell.gates), len(cell.read) if through else 0
        self.rows = range(shape.rows)
        self.mark = str(MARK64 if shape.double else MARK32)
        self.exchanged = shape.split or not shape.on_chip
        self.streams: list[Stream] = []
        self.lines: list[str] = []
        self.depth = 1

    def __call__(self, *lines: str) -> None:
        self.lines += ["    " * self.depth + line for line in lines]

    def source(self, name: str, arguments: str, sums: int) -> str:
        body = "\n".join(self.lines)
        return f"{plus(sums)}\n\n@triton.jit\ndef {name}({arguments}, {ROWS}, {SIZES}):\n{body}\n"

    # who owns what

    def begin(self) -> None:
        per_group = self.shape.rows * self.shape.blocks
        self(
            "part = tl.program_id(0) % P",
            "group = tl.program_id(0) // P",
            "u = part * U + tl.arange(0, U)",
            "on = u < D",
            f"b_first = group * {per_group}",
            f"b_end = tl.minimum(b_first + {per_group}, B)",
            "steps = tl.load(LEN + b_first)",
        )
        if self.shape.copies > 1:
            self("c = tl.arange(0, DP)[None, :] + 0 * tl.arange(0, WIDE // DP)[:, None]")
        else:
            self("c = tl.arange(0, DP)")
        self("con = c < D")
        for i, _ in enumerate(self.cell.p):
            self(f"p{i} = tl.load(PAR + {i} * D + u, mask=on, other=0.0)")
        if self.reads and self.shape.resident:
            self("wu = part * U + tl.arange(0, U)[None, :]", "wk = tl.arange(0, DP)[:, None]")
            for i in range(self.gates):
                for j in range(self.reads):
                    self(f"w{i}_{j} = tl.load({self.weight(i, j)}, mask=(wk < D) & (wu < D), other=0.0)")

    def weight(self, i: int, j: int) -> str:
        """Where W's block of gate i and read j lies: its rows wk are summed over, its columns wu are the own units."""
        if self.transposed:  # W' [reads d, gates d]
            return f"W + ({j} * D + wk).to(tl.int64) * ({self.gates} * D) + {i} * D + wu"
        return f"W + ({i} * D + wk).to(tl.int64) * ({self.reads} * D) + {j} * D + wu"

    def state(self, t: str) -> str:
        """The row of the first sample's state at time t."""
        return f"tl.cast({t}, tl.int64) * B" if self.shape.uniform else f"tl.load(S + {t})"

    def item(self, index: str, tag: str) -> None:
        """Which step of which samples: t, the rows before and after it, and for each sample b, n and whether it acts."""
        blocks = self.shape.blocks
        step = f"({index}) // {blocks}" if blocks > 1 else f"({index})"
        t = f"t{tag}"
        self(f"{t} = steps - 1 - {step}" if self.backwards else f"{t} = {step}")
        self(f"live{tag} = ({t} >= 0) & ({t} < steps)", f"{t} = tl.minimum(tl.maximum({t}, 0), steps - 1)")
        self(f"after{tag} = {self.state(f'({t} + 1)')}", f"before{tag} = {self.state(t)}")
        for r in self.rows:
            first = f"b_first + (({index}) % {blocks}) * {self.shape.rows}" if blocks > 1 else "b_first"
            b, n = f"b{r}{tag}", f"n{r}{tag}"
            self(f"{b} = {first} + {r}")
            if self.shape.uniform:
                self(f"{n} = tl.where({b} < b_end, steps, 0)")
            else:
                self(f"{n} = tl.load(LEN + {b}, mask={b} < b_end, other=0)")
            self(f"act{r}{tag} = ({t} < {n}) & live{tag}")

    def row(self, time: str, r: int, tag: str = "") -> str:
        start = {"step": f"after{tag} - B", "after": f"after{tag}", "before": f"before{tag}"}[time]
        return f"({start} + b{r}{tag})"

    def at(self, s: Stream, r: int, tag: str, column: str) -> str:
        return f"{s.array} + {self.row(s.time, r, tag)} * ({s.width} * D) + {s.entry} * D + {column}"

    # reading ahead

    def stream(self, name: str, array: str, width: int, entry: int, time: str, **more: bool) -> None:
        found = Stream(name, array, width, entry, time, **more)
        if found not in self.streams:
            self.streams.append(found)

    def fetch(self, tag: str, fresh: tuple[bool, ...] = (False, True)) -> None:
        """Ask for what the item `tag` needs; fresh: what this kernel writes itself, what it does not, or both."""
        for r in self.rows:
            for s in (s for s in self.streams if s.fresh in fresh):
                column, mask = ("c", "con") if s.whole else ("u", "on")
                how = ", volatile=True" if s.fresh else ""
                address = self.at(s, r, tag, column)
                self(f"{s.name}_{r}{tag} = tl.load({address}, mask={mask} & act{r}{tag}, other=0.0{how})")

    def moved(self, source: str, target: str, fresh: tuple[bool, ...] = (False, True)) -> None:
        """The item `source` takes the place of `target`."""
        for name in ("t", "live", "after", "before"):
            self(f"{name}{target} = {name}{source}")
        for r in self.rows:
            self(*(f"{name}{r}{target} = {name}{r}{source}" for name in ("b", "n", "act")))
            self(*(f"{s.name}_{r}{target} = {s.name}_{r}{source}" for s in self.streams if s.fresh in fresh))

    def loop(self, body: Callable[[], None]) -> None:
        """All items in turn, each with its data asked for `ahead` items before."""
        ahead = self.shape.ahead
        for j in range(ahead):
            self.item(str(j), f"_{j}")
            self.fetch(f"_{j}")
        self(f"for i in range(0, steps * {self.shape.blocks}):")
        self.depth += 1
        for j in range(ahead):
            self.moved(f"_{j}", "" if j == 0 else f"_{j - 1}")
        self.item(f"i + {ahead}", f"_{ahead - 1}")
        self.fetch(f"_{ahead - 1}")
        body()
        self.depth -= 1

    # expressions

    def compute(self, outputs: Sequence[Node], names: dict[Node, str], mark: str) -> list[str]:
        lines, results = written(outputs, names, SPELLING, "{0} = {1}", mark)
        self(*lines)
        return results

    def leaves(self, outputs: Iterable[Node], given: Iterable[Node] = ()) -> set[Node]:
        return {n for n in walk(list(outputs), frozenset(given)) if not n.args or n in given}

    # exchange and product

    def poll(self, wanted: Sequence[tuple[str, str, str]], asked: bool = False) -> None:
        """Read entries (name, address, mask) until every one has been written. asked: they have been read once already.

        All threads look at all entries they hold and agree on whether to go on: a program must not part ways here."""
        read = [f"{name} = tl.load({address}, mask={mask}, other=0.0, volatile=True)" for name, address, mask in wanted]
        kinds: dict[bool, list[str]] = {}
        for name, _, _ in wanted:
            kinds.setdefault(name.startswith("top"), []).append(f"absent({name}, {self.mark})")
        flat = lambda text, narrow: (
            f"tl.max(tl.max({text}, 1), 0)" if narrow or self.shape.copies > 1 else f"tl.max({text}, 0)"
        )
        check = "waiting = " + " | ".join(flat(" | ".join(names), narrow) for narrow, names in kinds.items())
        if not asked:
            self(*read)
        self(check, "spins = 0", f"while (waiting != 0) & (spins < {SPINS}):")
        self.depth += 1
        self(*read, check, "spins += 1")
        self.depth -= 1
        if self.shape.copies > 1:
            self(*(f"{name} = tl.max({name}, 0)" for name, _, _ in wanted if not name.startswith("top")))

    def product(self, terms: Terms, sums: str) -> None:
        """target = sum over (vector, gate, read) of vector times W's block, for all targets in one reduction."""
        for target, parts in terms.items():
            self(f"{target}_ = " + " + ".join(f"{vector}[:, None] * w{i}_{j}" for vector, i, j in parts))
        names = list(terms)
        if len(names) == 1:
            self(f"{names[0]}{sums} tl.sum({names[0]}_, 0)")
        elif sums == "=":
            self(f"{', '.join(names)} = tl.reduce(({', '.join(n + '_' for n in names)}), 0, plus{len(names)})")
        else:
            self(*(f"{n} {sums} tl.sum({n}_, 0)" for n in names))

    def multiply(
        self, targets: Sequence[str], vectors: dict[str, tuple[Stream, int]], prepare: Callable[[str], Terms],
        also: Sequence[tuple[str, str, str]] = (), asked: bool = False,
    ) -> None:  # fmt: skip
        """The targets, each a sum of vectors times blocks of W.

        vectors   what is exchanged: name -> (array, sample)
        prepare   writes what is made of them, for the columns it is given -> the terms of each target
        also      entries to wait for besides
        """
        waited = lambda col: [(v, self.at(s, r, "", col), f"con & act{r}") for v, (s, r) in vectors.items()]
        if self.shape.resident:
            if vectors or also:
                self.poll([*waited("c"), *also], asked)
            self.product(prepare("c"), "=")
            return
        for target in targets:  # W is read from memory, KC of its rows at a time
            self(f"{target} = tl.zeros((U,), W.dtype.element_ty)")
        self("for block in range(0, DP, KC):")
        self.depth += 1
        wide = "[None, :] + 0 * tl.arange(0, WIDE // KC)[:, None]" if self.shape.copies > 1 else ""
        self(f"cc = block + tl.arange(0, KC){wide}", "con = cc < D", "wk = (block + tl.arange(0, KC))[:, None]")
        self("wu = part * U + tl.arange(0, U)[None, :]")
        self.poll(waited("cc"))
        self("cc = block + tl.arange(0, KC)", "con = cc < D")
        terms = prepare("cc")
        for i, j in dict.fromkeys((i, j) for parts in terms.values() for _, i, j in parts):
            self(f"w{i}_{j} = tl.load({self.weight(i, j)}, mask=(wk < D) & (wu < D), other=0.0)")
        self.product(terms, "+=")
        self.depth -= 1
        if also:
            self.poll(also)


def plus(count: int) -> str:
    """The sum of `count` things at once, for tl.reduce."""
    if count < 2:
        return ""
    a, b = ([f"{x}{i}" for i in range(count)] for x in "ab")
    total = ", ".join(f"{x} + {y}" for x, y in zip(a, b, strict=True))
    return f"\n\n@triton.jit\ndef plus{count}({', '.join(a + b)}):\n    return {total}\n"


def forward(cell: Cell, shape: Shape) -> str:
    """x_t = f(base_t + W r(x_{t-1}), v_t, x_{t-1}, p)"""
    k = Kernel(cell, shape, transposed=True, backwards=False)
    S, G = k.slots, k.gates
    k.begin()
    for i in range(G):
        k.stream(f"base{i}", "BASE", G, i, "step")
    for i, _ in enumerate(cell.v):
        k.stream(f"v{i}", "V", len(cell.v), i, "step")
    used = [s for s, n in enumerate(cell.x) if n in k.leaves((*cell.next, *cell.kept))]
    read = [s for s, n in enumerate(cell.x) if n in k.leaves(cell.read)]
    whole = {s: Stream(f"h{s}", "X", S, s, "before", whole=True, fresh=True) for s in read} if k.exchanged else {}
    if shape.on_chip:
        for r in k.rows:
            k(f"b{r} = b_first + {r}")
            k(
                *(
                    f"x{s}_{r} = tl.load(X + b{r}.to(tl.int64) * ({S} * D) + {s} * D + u, mask=on & (b{r} < b_end), other=0.0)"
                    for s in range(S)
                )
            )
    else:
        for s in used:
            k.stream(f"x{s}", "X", S, s, "before", fresh=True)
        if shape.resident:
            k.streams += list(whole.values())
    targets = [f"z{i}_{r}" for r in k.rows for i in range(G)] if k.reads else []

    def prepare(_: str) -> Terms:
        terms: Terms = {}
        for r in k.rows:
            names = {n: f"{'h' if k.exchanged else 'x'}{s}_{r}" for s, n in enumerate(cell.x)}
            reads = k.compute(cell.read, names, f"r{r}_")
            terms |= {f"z{i}_{r}": [(reads[j], i, j) for j in range(k.reads)] for i in range(G)}
        return terms

    def body() -> None:
        if k.reads:
            vectors = {f"h{s}_{r}": (whole[s], r) for r in k.rows for s in whole}
            k.multiply(targets, vectors, prepare, asked=not shape.on_chip)
        for r in k.rows:
            k(*(f"a{i}_{r} = base{i}_{r}" + (f" + z{i}_{r}" if k.reads else "") for i in range(G)))
            names = {n: f"x{s}_{r}" for s, n in enumerate(cell.x)} | {n: f"a{i}_{r}" for i, n in enumerate(cell.a)}
            names |= {n: f"v{i}_{r}" for i, n in enumerate(cell.v)} | {n: f"p{i}" for i, n in enumerate(cell.p)}
            results = k.compute((*cell.next, *cell.kept), names, f"e{r}_")
            k(f"go{r} = on & act{r}")
            for s in range(S):
                k(f"y{s}_{r} = {results[s]} + tl.zeros_like(base0_{r})")
                k(f"tl.store(X + {k.row('after', r)} * ({S} * D) + {s} * D + u, y{s}_{r}, mask=go{r})")
            for i, _ in enumerate(cell.kept):
                at = f"Q + {k.row('step', r)} * ({len(cell.kept)} * D) + {i} * D + u"
                k(f"tl.store({at}, {results[S + i]}, mask=go{r})")
            for i in range(G) if cell.needs_a else ():
                k(f"tl.store(A + {k.row('step', r)} * ({G} * D) + {i} * D + u, a{i}_{r}, mask=go{r})")
            if shape.on_chip:
                k(*(f"x{s}_{r} = y{s}_{r}" for s in range(S)))

    k.loop(body)
    return k.source("forward", "X, A, Q, BASE, V, W, PAR", len(targets))


def tape(k: Kernel, expressions: Iterable[Node], moving: Iterable[Node]) -> dict[Node, str]:
    """Streams of the values at which a step is differentiated -> what each node at hand is called, without the sample."""
    cell, S = k.cell, k.slots
    at_hand = {n: ("xn", s) for s, n in enumerate(cell.next) if n.args} | {n: ("q", i) for i, n in enumerate(cell.kept)}
    at_hand |= {n: ("a", i) for i, n in enumerate(cell.a)} | {n: ("v", i) for i, n in enumerate(cell.v)}
    at_hand |= {n: ("xp", s) for s, n in enumerate(cell.x)}
    arrays = {"xn": ("X", S, "after"), "xp": ("X", S, "before"), "q": ("Q", len(cell.kept), "step")}
    arrays |= {"a": ("A", k.gates, "step"), "v": ("V", len(cell.v), "step")}
    names: dict[Node, str] = {}
    for n in walk(list(expressions), frozenset([*at_hand, *moving])):
        if n in at_hand:
            kind, i = at_hand[n]
            array, width, time = arrays[kind]
            k.stream(f"{kind}{i}", array, width, i, time)
            names[n] = f"{kind}{i}"
    return names


def of_sample(names: dict[Node, str], r: int, tag: str, cell: Cell) -> dict[Node, str]:
    return {n: f"{name}_{r}{tag}" for n, name in names.items()} | {n: f"p{i}" for i, n in enumerate(cell.p)}


def adjoint(cell: Cell, shape: Shape, s: bool, last: bool, sa: bool, link: bool, scaled: bool) -> str:
    """del_t = sa_t + f_a' lam_t,  lam_{t-1} = s_{t-1} + link_t (f_x' lam_t + r' W' del_t)"""
    e = backwards(cell)
    k = Kernel(cell, shape, transposed=False, backwards=True, through=e.through)
    S, G = k.slots, k.gates
    moving = {n: f"lam{i}" for i, n in enumerate(e.lam)} | {n: f"rbar{j}" for j, n in enumerate(e.rbar)}
    names = tape(k, (*e.into_a, *e.into_x, *(e.back if k.reads else ())), moving) | moving
    k.begin()
    for i in range(S):
        if s:
            k.stream(f"s{i}", "SRC", S, i, "before")
        if not shape.on_chip:
            k.stream(f"lam{i}", "LAM", S, i, "after", fresh=True)
    for i in range(G) if sa else ():
        k.stream(f"sa{i}", "SA", G, i, "step")
    pipelined = shape.blocks > 1
    targets = [f"rbar{j}_{r}" for r in k.rows for j in range(k.reads)]

    def begun(r: int, tag: str, condition: str) -> None:
        """Samples whose last state is that after the step begin with their source."""
        row = k.row("after", r, tag)
        own = f"k{r}{tag}"
        k(f"new{r} = act{r}{tag} & ({condition})")
        if scaled:
            k(f"kl_ = tl.load(KLAST + b{r}{tag}, mask=new{r}, other=0)", "e_ = kl_ * 0 + NONE")
            k(*([f"e_ = tl.maximum(e_, tl.load(KS + {row}, mask=new{r}, other=NONE))"] * s))
            k(*([f"e_ = tl.maximum(e_, tl.load(KEND + b{r}{tag}, mask=new{r}, other=NONE))"] * last))
            k(f"{own} = tl.where(new{r}, tl.where(e_ == NONE, kl_, e_), {own})")
        sources = [(f"SRC + {row}", f"-{own}")] * s + [(f"LAST + b{r}{tag}.to(tl.int64)", f"kl_ - {own}")] * last
        for i in range(S):
            value = "0.0"
            for j, (start, shift) in enumerate(sources):
                k(f"y{j}_ = tl.load({start} * ({S} * D) + {i} * D + u, mask=on & new{r}, other=0.0)")
                value += f" + scaled(y{j}_, {shift})" if scaled else f" + y{j}_"
            k(f"lam{i}_{r}{tag} = tl.where(new{r}, {value}, lam{i}_{r}{tag})")
            k(f"tl.store(LAM + {row} * ({S} * D) + {i} * D + u, lam{i}_{r}{tag}, mask=on & new{r})")
        if scaled:
            k(f"tl.store(K + {row}, k{r}{tag}, mask=new{r} & (part == 0))")

    def first(tag: str) -> None:
        """del_t, what f_x' lam_t keeps, and how large lam_t is."""
        for r in k.rows:
            if not shape.on_chip and scaled:
                k(f"k{r}{tag} = tl.load(KNOW + part * B + b{r}{tag}, mask=act{r}{tag}, other=0, volatile=True)")
            begun(r, tag, f"n{r}{tag} == t{tag} + 1")
            k(f"go{r}{tag} = on & act{r}{tag}")
            results = k.compute((*e.into_a, *e.into_x), of_sample(names, r, tag, cell), f"d{r}{tag}_")
            for i in range(G):
                more = f" + sa{i}_{r}{tag}" if sa else ""
                k(f"del{i}_{r}{tag} = tl.where(go{r}{tag}, {results[i]}{more}, 0.0)")
                at = f"DEL + {k.row('step', r, tag)} * ({G} * D) + {i} * D + u"
                k(f"tl.store({at}, del{i}_{r}{tag}, mask=go{r}{tag})")
            k(*(f"kept{i}_{r}{tag} = {results[G + i]} + tl.zeros_like(lam{i}_{r}{tag})" for i in range(S)))
            if scaled:
                size = functools.reduce(
                    lambda a, b: f"tl.maximum({a}, {b})", (f"tl.abs(lam{i}_{r}{tag})" for i in range(S))
                )
                k(f"top{r}{tag} = tl.max(tl.where(go{r}{tag}, {size}, 0.0), 0)")
                if shape.split:
                    k(f"tl.store(TOPS + {k.row('step', r, tag)} * P + part, top{r}{tag}, mask=act{r}{tag})")

    def second() -> None:
        """lam_{t-1}"""
        tops: list[tuple[str, str, str]] = []
        if scaled and shape.split:
            k("pp = tl.arange(0, PP)[None, :] + 0 * tl.arange(0, WIDE // PP)[:, None]")
            tops = [(f"tops{r}", f"TOPS + {k.row('step', r)} * P + pp", f"act{r} & (pp < P)") for r in k.rows]
        if k.reads:
            arrays = [Stream(f"g{i}", "DEL", G, i, "step", whole=True, fresh=True) for i in range(G)]
            vectors = {f"g{i}_{r}": (arrays[i], r) for r in k.rows for i in range(G)} if k.exchanged else {}
            own = "g" if k.exchanged else "del"
            terms = {
                f"rbar{j}_{r}": [(f"{own}{i}_{r}", i, j) for i in range(G)] for r in k.rows for j in range(k.reads)
            }
            k.multiply(targets, vectors, lambda _: terms, tops)
        elif tops:
            k.poll(tops)
        for r in k.rows:
            back = k.compute(e.back, of_sample(names, r, "", cell), f"f{r}_") if k.reads else ["0.0"] * S
            if link:
                k(f"l_ = tl.load(LINK + {k.row('step', r)}, mask=act{r}, other=0.0)")
            if scaled:
                if shape.split:
                    k(f"top{r} = tl.max(tl.max(tops{r}, 1), 0)")
                k(f"e_ = exponent(top{r})", f"mine = tl.where(e_ == NONE, NONE, k{r} + e_)")
                if s:
                    k(f"mine = tl.maximum(mine, tl.load(KS + {k.row('before', r)}, mask=act{r}, other=NONE))")
                k(f"mine = tl.where(mine == NONE, k{r}, mine)", f"up = power_of_two(k{r} - mine, lam0_{r})")
                k(f"k{r} = tl.where(act{r}, mine, k{r})")
                k(f"tl.store(K + {k.row('before', r)}, k{r}, mask=act{r} & (part == 0))")
                if not shape.on_chip:
                    k(f"tl.store(KNOW + part * B + b{r}, k{r}, mask=act{r})")
            for i in range(S):
                value = f"(kept{i}_{r} + {back[i]})" + " * l_" * link + " * up" * scaled
                if s:
                    value += f" + scaled(s{i}_{r}, -k{r})" if scaled else f" + s{i}_{r}"
                k(f"m{i}_{r} = tl.where(go{r}, {value}, 0.0)")
                k(f"tl.store(LAM + {k.row('before', r)} * ({S} * D) + {i} * D + u, m{i}_{r}, mask=go{r})")
            if shape.on_chip:
                k(*(f"lam{i}_{r} = m{i}_{r}" for i in range(S)))

    if shape.on_chip:
        for r in k.rows:
            k(*(f"lam{i}_{r} = tl.zeros((U,), X.dtype.element_ty)" for i in range(S)))
            k(*([f"k{r} = 0 * b_first"] * scaled))

        def body() -> None:
            first("")
            second()

        k.loop(body)
    elif not pipelined:

        def body() -> None:
            first("")
            second()

        k.loop(body)
    else:  # the first half of an item runs while the second half of the one before waits for its exchange
        carried = ["del", "kept"]
        far = (False, True) if shape.blocks > 2 else (False,)  # of two items, the one two ahead is this one, a step on
        k.item("0", "")
        k.fetch("")
        first("")
        k.item("1", "_0")
        k.fetch("_0", far)
        k(f"for i in range(0, steps * {shape.blocks}):")
        k.depth += 1
        k.moved("_0", "_n", far)
        if far == (False,):
            k.fetch("_n", (True,))
        k.item("i + 2", "_0")
        k.fetch("_0", far)
        first("_n")
        second()
        k.moved("_n", "")
        for r in k.rows:
            k(*(f"{name}{i}_{r} = {name}{i}_{r}_n" for name in carried for i in range(G if name == "del" else S)))
            k(f"go{r} = go{r}_n", *([f"k{r} = k{r}_n", f"top{r} = top{r}_n"] * scaled))
        k.depth -= 1
    arguments = "LAM, DEL, K, TOPS, KNOW, X, A, Q, V, W, PAR, SRC, LAST, SA, LINK, KS, KEND, KLAST"
    return k.source("adjoint", arguments, len(targets))


def tangent(cell: Cell, shape: Shape, g: bool, ga: bool, link: bool) -> str:
    """nu_t = ga_t + W r' m_t,  mu_t = g_t + f_x m_t + f_a nu_t,  m_t = link_t mu_{t-1}"""
    e = forwards(cell)
    k = Kernel(cell, shape, transposed=True, backwards=False, through=e.through)
    S, G = k.slots, k.gates
    moving = {n: f"m{i}" for i, n in enumerate(e.mu)} | {n: f"nu{i}" for i, n in enumerate(e.nu)}
    names = tape(k, e.out, moving) | moving
    own_read = {} if k.exchanged else tape(k, e.ahead, moving)  # x_{t-1}, where r' is taken
    used = k.leaves(e.ahead, [*e.mu, *cell.x])
    along = [i for i, n in enumerate(e.mu) if n in used]
    where = [i for i, n in enumerate(cell.x) if n in used]
    whole = {i: Stream(f"h{i}", "MU", S, i, "before", whole=True, fresh=True) for i in along} if k.exchanged else {}
    k.begin()
    for i in range(S) if g else ():
        k.stream(f"g{i}", "SRC", S, i, "after")
    for i in range(G) if ga else ():
        k.stream(f"ga{i}", "SA", G, i, "step")
    if shape.on_chip:
        for r in k.rows:
            k(f"b{r} = b_first + {r}")
            k(
                *(
                    f"mu{i}_{r} = tl.load(MU + b{r}.to(tl.int64) * ({S} * D) + {i} * D + u, mask=on & (b{r} < b_end), other=0.0)"
                    for i in range(S)
                )
            )
    else:
        for i in range(S):
            k.stream(f"mu{i}", "MU", S, i, "before", fresh=True)
        if shape.resident:
            k.streams += list(whole.values())
    targets = [f"z{i}_{r}" for r in k.rows for i in range(G)] if k.reads else []

    def prepare(col: str) -> Terms:
        terms: Terms = {}
        for r in k.rows:
            inner = of_sample(own_read | moving, r, "", cell)
            if k.exchanged:
                k(*([f"h{i}_{r} = h{i}_{r} * l{r}" for i in along] * link))
                for i in where:
                    at = k.at(Stream("", "X", S, i, "before"), r, "", "cx")
                    k("cx = tl.arange(0, DP)" if col == "c" else "cx = cc")
                    k(f"y{i}_{r} = tl.load({at}, mask=(cx < D) & act{r}, other=0.0)")
                inner = {e.mu[i]: f"h{i}_{r}" for i in along} | {cell.x[i]: f"y{i}_{r}" for i in where}
            reads = k.compute(e.ahead, inner, f"r{r}_")
            terms |= {f"z{i}_{r}": [(reads[j], i, j) for j in range(k.reads)] for i in range(G)}
        return terms

    def body() -> None:
        for r in k.rows:
            k(f"go{r} = on & act{r}")
            k(*([f"l{r} = tl.load(LINK + {k.row('step', r)}, mask=act{r}, other=0.0)"] * link))
            k(*(f"m{i}_{r} = mu{i}_{r}" + f" * l{r}" * link for i in range(S)))
        if k.reads:
            vectors = {f"h{i}_{r}": (whole[i], r) for r in k.rows for i in whole}
            k.multiply(targets, vectors, prepare, asked=not shape.on_chip)
        for r in k.rows:
            for i in range(G):
                total = [f"z{i}_{r}"] * bool(k.reads) + [f"ga{i}_{r}"] * ga
                k(f"nu{i}_{r} = " + (" + ".join(total) or f"tl.zeros_like(m0_{r})"))
                k(f"tl.store(NU + {k.row('step', r)} * ({G} * D) + {i} * D + u, nu{i}_{r}, mask=go{r})")
            results = k.compute(e.out, of_sample(names, r, "", cell), f"e{r}_")
            for i in range(S):
                k(f"o{i}_{r} = tl.where(go{r}, {results[i]}" + f" + g{i}_{r}" * g + ", 0.0)")
                k(f"tl.store(MU + {k.row('after', r)} * ({S} * D) + {i} * D + u, o{i}_{r}, mask=go{r})")
            if shape.on_chip:
                k(*(f"mu{i}_{r} = o{i}_{r}" for i in range(S)))

    k.loop(body)
    return k.source("tangent", "MU, NU, X, A, Q, V, W, PAR, SRC, SA, LINK", len(targets))
