"""The product of engine cpu is made of vector instructions of full width, by every compiler here.

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
from coadjoint.sweeps.engines.c.source import cell_source

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


def elman_source(dtype):
    net = co.Network("elman", inputs=2, hidden=4, outputs=1)
    return cell_source(net.cell, dtype)


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
@pytest.mark.sampled(2)
def test_products_are_vectors_of_full_width(tmp_path, compiler, target, dtype):
    library = build(compiler, elman_source(dtype), tmp_path / "cell.so", *FLAGS, f"-march={target}")
    dump = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(library)],
        check=True,
        capture_output=True,
        text=True,
    )
    found = [match.groups() for match in map(FUSED.search, dump.stdout.splitlines()) if match]
    kind = "d" if dtype == torch.float64 else "s"
    assert len(found) >= 50
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


def check_program(command, dtype):
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = np.array([line.split() for line in done.stdout.splitlines()], float)
    bar = 2e-6 if dtype == torch.float32 else 1e-14
    assert np.abs(found - expected(dtype)).max() < bar * np.abs(expected(dtype)).max()


@on_intel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_loops_of_every_compiler(tmp_path, compiler, dtype):
    flags = [flag for flag in FLAGS if flag != "-shared"]
    source = elman_source(dtype) + MAIN
    for tuning in ("-march=x86-64", "-march=native"):
        program = build(compiler, source, tmp_path / "program", *flags, tuning)
        check_program([str(program)], dtype)


@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-gcc") and shutil.which("qemu-aarch64")),
    reason="needs aarch64-linux-gnu-gcc and qemu-aarch64",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_the_loops_on_an_emulated_aarch64(tmp_path, dtype):
    flags = [flag for flag in FLAGS if flag != "-shared"]
    source = elman_source(dtype) + MAIN
    program = build("aarch64-linux-gnu-gcc", source, tmp_path / "program", *flags, "-static")
    check_program(["qemu-aarch64", str(program)], dtype)
