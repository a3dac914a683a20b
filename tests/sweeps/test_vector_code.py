"""The products of engine cpu are made of vector instructions of full width, by every compiler here.

A compiler that takes a loop over lanes apart is ten times as slow and just as correct: only the
machine code shows it. The same source is also run on an emulated aarch64, where qemu is installed.
"""

import platform
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch

import coadjoint as co
from coadjoint.sweeps.engines.c.compiler import FLAGS
from coadjoint.sweeps.engines.c.source import cell_source, row_products_source

OTHERS = (*(f"gcc-{n}" for n in range(11, 17)), *(f"clang-{n}" for n in range(14, 24)))
TARGETS = {"haswell": "ymm", "skylake-avx512": "zmm"}  # and the registers that its vectors fill
COMPILERS = [
    "cc",
    *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHERS if shutil.which(name)),
]
FUSED = re.compile(r"\sv(fn?m(?:add|sub)\d+)(p|s)([sd])\s.*%([xyz]mm)\d+$")
on_intel = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 instructions")
MAIN = """
#include <stdio.h>
enum { T_ = 3, B_ = 5, d_ = 37, STEPS = T_ * B_ * d_, STATES = STEPS + B_ * d_ };
static real value(long i, long step) { return (real)(i * step % 101) / 101 - (real)0.5; }
static void fill(real *y, long n, long step) { for (long i = 0; i < n; i++) y[i] = value(i, step); }
static real W[d_ * d_], base[STEPS], last[B_ * d_], g[STATES];
static real x[STATES], lam[STATES], mu[STATES], step[STEPS];
int main(void) {
    fill(W, d_ * d_, 37), fill(base, STEPS, 53), fill(last, B_ * d_, 71), fill(g, STATES, 29);
    fill(x, B_ * d_, 13);
    struct sweep s = {.T = T_, .B = B_, .d = d_, .threads = 2, .keep = 1, .W = W, .x = x};
    s.step_source = base;
    if (forward(&s)) return 1;
    s.step_source = 0, s.last = last, s.state = lam, s.step = step;
    if (adjoint(&s)) return 1;
    s.last = 0, s.source = g, s.state = mu;
    if (tangent(&s)) return 1;
    for (long i = 0; i < STATES; i++)
        printf("%.17g %.17g %.17g\\n", (double)x[i], (double)lam[i], (double)mu[i]);
    return 0;
}
"""

PRODUCTS_MAIN = """
#include <stdio.h>
enum { N_ = 531, n_ = 37, m_ = 29, k_ = 11, wide_ = n_ + 2 };
static real value(long i, long step) { return (real)(i * step % 101) / 101 - (real)0.5; }
static void fill(real *y, long n, long step) { for (long i = 0; i < n; i++) y[i] = value(i, step); }
static real y[N_ * wide_], M[m_ * n_], b[m_], out[N_ * m_], r[N_ * k_];
static real by_r[m_ * k_], by_y[m_ * n_], by_ones[m_], total[m_];
int main(void) {
    fill(y, N_ * wide_, 37), fill(M, m_ * n_, 53), fill(b, m_, 71), fill(r, N_ * k_, 29);
    struct affine a = {N_, n_, m_, 2, 1, wide_, y + 1, M, b, out};
    if (affine_rows(&a)) return 1;
    int64_t bounds[] = {300, N_, 0, 300};
    struct products p = {m_, k_ + n_ + 1, 3, 2, bounds, out, m_, 0};
    p.sources[0] = (struct source){r, k_, k_}, p.outs[0] = by_r;
    p.sources[1] = (struct source){y + 1, wide_, n_}, p.outs[1] = by_y;
    p.sources[2] = (struct source){0, 0, 1}, p.outs[2] = by_ones;
    if (join_products(&p)) return 1;
    struct products ones = {m_, 1, 2, 2, bounds, out, m_, 0};
    ones.sources[0] = p.sources[2], ones.outs[0] = total;
    if (join_products(&ones)) return 1;
    for (long i = 0; i < N_ * m_; i++) printf("%.17g\\n", (double)out[i]);
    for (long i = 0; i < m_ * k_; i++) printf("%.17g\\n", (double)by_r[i]);
    for (long i = 0; i < m_ * n_; i++) printf("%.17g\\n", (double)by_y[i]);
    for (long i = 0; i < m_; i++) printf("%.17g\\n", (double)by_ones[i]);
    for (long i = 0; i < m_; i++) printf("%.17g\\n", (double)total[i]);
    return 0;
}
"""


def elman_source(dtype):
    net = co.Network("elman", inputs=2, hidden=4, outputs=1)
    return cell_source(net.cell, dtype)


SOURCES = {"cell": elman_source, "products": row_products_source}
TILE_ROWS = {"haswell": 4, "skylake-avx512": 8}


def least_count(name, target):
    """How many fused instructions the tiles alone take: one for each of their vectors."""
    rows = TILE_ROWS[target]
    vectors = 1 + 2 + 3  # of the tiles of one number of rows
    tiles = vectors * sum(2**i for i in range(rows.bit_length()))
    outer = 2 * vectors * sum(range(rows + 1))  # of packed panels, and of others
    return tiles + (outer if name == "products" else 0)


def build(compiler, source, out, *flags):
    text = out.with_suffix(".c")
    text.write_text(source)
    subprocess.run([compiler, *flags, str(text), "-o", str(out), "-lm"], check=True)
    return out


@on_intel
@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.sampled(2)
def test_products_are_vectors_of_full_width(tmp_path, name, compiler, target, dtype):
    source = SOURCES[name](dtype)
    library = build(compiler, source, tmp_path / "cell.so", *FLAGS, f"-march={target}")
    dump = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(library)],
        check=True,
        capture_output=True,
        text=True,
    )
    found = [match.groups() for match in map(FUSED.search, dump.stdout.splitlines()) if match]
    kind = "d" if dtype == torch.float64 else "s"
    assert len(found) >= least_count(name, target)
    assert {(packed, width, register) for _, packed, width, register in found} == {
        ("p", kind, TARGETS[target])
    }


def expected(dtype):
    """States, costates and tangents of the program above, in float64 by numpy."""
    kind = np.float32 if dtype == torch.float32 else np.float64

    def filled(step, *shape):
        i = np.arange(int(np.prod(shape)))
        return ((i * step % 101).astype(kind) / kind(101) - kind(0.5)).astype(float).reshape(shape)

    T, B, d = 3, 5, 37
    W, base, last = filled(37, d, d), filled(53, T, B, d), filled(71, B, d)
    g = filled(29, T + 1, B, d)
    x, lam, mu = [filled(13, B, d)], [last], [g[0]]
    for t in range(T):
        x.append(np.tanh(base[t] + x[t] @ W.T))
        mu.append(g[t + 1] + (1 - x[t + 1] ** 2) * (mu[t] @ W.T))
    for t in reversed(range(T)):
        lam.insert(0, (lam[0] * (1 - x[t + 1] ** 2)) @ W)
    return np.stack([np.stack(y) for y in (x, lam, mu)], -1).reshape(-1, 3)


def expected_products(dtype):
    """What the second program prints, in float64 by numpy."""
    kind = np.float32 if dtype == torch.float32 else np.float64

    def filled(step, *shape):
        i = np.arange(int(np.prod(shape)))
        return ((i * step % 101).astype(kind) / kind(101) - kind(0.5)).astype(float).reshape(shape)

    N, n, m, k = 531, 37, 29, 11
    y = filled(37, N, n + 2)
    columns = y[:, 1 : 1 + n]
    out = columns @ filled(53, m, n).T + filled(71, m)
    sums = out.sum(0)
    parts = (out, out.T @ filled(29, N, k), out.T @ columns, sums, sums)
    return np.concatenate([part.ravel() for part in parts])[:, None]


def check_program(command, dtype, expected):
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = np.array([line.split() for line in done.stdout.splitlines()], float)
    bar = 2e-6 if dtype == torch.float32 else 1e-14
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < bar * np.abs(expected).max()


PROGRAMS = {  # their sources, and what they print
    "cell": (lambda dtype: elman_source(dtype) + MAIN, expected),
    "products": (lambda dtype: row_products_source(dtype) + PRODUCTS_MAIN, expected_products),
}
OF_PROGRAMS = pytest.mark.parametrize("name", PROGRAMS)


@on_intel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("compiler", COMPILERS)
@OF_PROGRAMS
def test_the_loops_of_every_compiler(tmp_path, name, compiler, dtype):
    source, expected = PROGRAMS[name]
    flags = [flag for flag in FLAGS if flag != "-shared"]
    for tuning in ("-march=x86-64", "-march=haswell", "-march=native"):
        program = build(compiler, source(dtype), tmp_path / "program", *flags, tuning)
        check_program([str(program)], dtype, expected(dtype))


@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-gcc") and shutil.which("qemu-aarch64")),
    reason="needs aarch64-linux-gnu-gcc and qemu-aarch64",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@OF_PROGRAMS
def test_the_loops_on_an_emulated_aarch64(tmp_path, name, dtype):
    source, expected = PROGRAMS[name]
    flags = [flag for flag in FLAGS if flag != "-shared"]
    compiler = "aarch64-linux-gnu-gcc"
    program = build(compiler, source(dtype), tmp_path / "program", *flags, "-static")
    check_program(["qemu-aarch64", str(program)], dtype, expected(dtype))
