"""The CUDA kernels compile for every architecture that the engine runs on, and fit its chips.

nvcc compiles what NVRTC would on such a GPU, and its assembler says what a kernel takes. Nothing is
run here. The limits are those of NVIDIA's tables by compute capability.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from typing import NamedTuple

import pytest
import torch

from coadjoint.cells.formula import PRIMITIVES, Node, symbol
from coadjoint.sweeps import pointwise
from coadjoint.sweeps.engines.cuda import driver, geometry, points, source
from coadjoint.sweeps.engines.cuda import engine as cuda_engine
from problems import CELLS, NEWER
from sampling import one_in

F32, F64 = torch.float32, torch.float64
NVCC = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no CUDA compiler (nvcc) was found")
REGISTERS = 65536  # of a multiprocessor, and of a block at most
REGISTERS_OF_A_THREAD = 255
IN_MEMORY = 64  # bytes of a thread at most: sin and cos of large arguments take 40
RESERVED = 1 << 10  # bytes of shared memory that CUDA takes for itself, for each block


class Chip(NamedTuple):
    """A GPU: its architecture, its multiprocessors and the KiB of shared memory of each.

    clusters: (size, how many it has room for), for each size of clusters.
    """

    arch: str
    processors: int
    shared: int
    clusters: tuple[tuple[int, int], ...] = ()

    @property
    def limit(self):
        """Bytes of shared memory that a block may have: shared_memory_per_block_optin."""
        return (self.shared << 10) - RESERVED


CHIPS = {
    "A100": Chip("sm_80", 108, 164),
    "A30": Chip("sm_80", 56, 164),
    "RTX 3090": Chip("sm_86", 82, 100),
    "RTX 3060": Chip("sm_86", 28, 100),
    "Orin": Chip("sm_87", 16, 164),
    "RTX 4090": Chip("sm_89", 128, 100),
    "L4": Chip("sm_89", 58, 100),
    "H100": Chip("sm_90", 132, 228, ((2, 66), (4, 30), (8, 15))),  # as an H200 says
    "B200": Chip("sm_100", 148, 228, ((2, 74), (4, 36), (8, 16))),  # assumed
    "RTX 5090": Chip("sm_120", 170, 100),
}
COMPILED = ("A100", "RTX 3090", "RTX 4090", "H100", "B200", "RTX 5090")  # one of each architecture
FAMILIES = ("elman", "leaky", "lstm", "gru", "lru", "mixed")  # lru: no W; mixed: a user's formula
KERNELS = {"forward": (), "adjoint": (True,) * 5, "tangent": (True,) * 3}  # and all their options
SAMPLES = 64
TYPES = {"float32": F32, "float64": F64}
CASES = list(itertools.product(COMPILED, FAMILIES, (50, 128, 256), TYPES, KERNELS))
TENSOR = list(itertools.product(COMPILED, ("elman", "lstm", "gru", "mixed"), (510, 512), KERNELS))


def cell_named(name):
    return (CELLS | NEWER)[name]


def lay_out(cell, d, B, dtype, chip, kernel="forward"):
    given = (dtype.itemsize, chip.processors, chip.limit, kernel == "adjoint", chip.clusters)
    return geometry.choose_geometry(cell, d, B, *given)


class Resources(NamedTuple):
    """What a kernel takes of its multiprocessor, as the assembler says."""

    registers: int  # of a thread
    stack: int  # bytes of a thread in memory
    spilled: int  # bytes that registers did not hold
    static: int  # bytes of shared memory beside those that a launch asks for


def compile_for(arch, text, folder):
    """What the assembler says of a kernel, without a warning of any stage."""
    known = subprocess.run([NVCC, "--list-gpu-code"], capture_output=True, text=True, check=True)
    if arch not in known.stdout.split():
        pytest.skip(f"this nvcc does not compile for {arch}")
    code = folder / "kernel.cu"
    code.write_text(text)
    flags = ("-cubin", f"-arch={arch}", "-std=c++17", "--fmad=true", "-Xptxas", "-v")
    command = [NVCC, *flags, "-Werror", "all-warnings", str(code), "-o", str(folder / "cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    assert "warning" not in done.stderr.lower(), done.stderr[:3000]

    def figure(pattern):
        found = re.search(pattern, done.stderr)
        return int(found[1]) if found else 0

    return Resources(
        figure(r"Used (\d+) registers"),
        figure(r"(\d+) bytes stack frame"),
        figure(r"(\d+) bytes spill stores"),
        figure(r"(\d+) bytes smem"),
    )


def resident_blocks(used, threads, shared, chip):
    """How many blocks a multiprocessor holds at once; 0: the launch would be refused."""
    for_warp = -(-used.registers * 32 // 256) * 256  # registers are given out by 256
    by_registers = REGISTERS // (for_warp * threads // 32)
    by_shared = (chip.shared << 10) // (used.static + shared + RESERVED)
    if shared > chip.limit or used.registers > REGISTERS_OF_A_THREAD:
        return 0
    return min(by_registers, by_shared)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_layout_fits_the_chip_it_is_made_for(name, chip):
    """Shared memory that a block may have, and no more blocks than are on the chip at once."""
    cell, chip = cell_named(name), CHIPS[chip]
    laid = 0
    for d, B, dtype in itertools.product((1, 50, 128, 256, 512, 1024), (1, 20, 256), (F32, F64)):
        for kernel, options in KERNELS.items():
            g = lay_out(cell, d, B, dtype, chip, kernel)
            if g is None:  # one product per step
                continue
            laid += 1
            assert g.parts == 1 or g.parts * g.groups <= chip.processors, (d, B, g)
            _, shared = source.kernel_source(kernel, cell, g, d, dtype, True, *options)
            assert shared <= chip.limit, (kernel, d, B, g)
    assert laid >= 54  # all of them up to 128 units


@pytest.mark.parametrize("name", ["lru", "unicornn", "minlstm"])
def test_cells_without_W_fit_at_any_width(name):
    """They multiply nothing, so that no room is taken for sums."""
    cell, chip = cell_named(name), CHIPS["RTX 3090"]
    g = lay_out(cell, 1 << 17, SAMPLES, F64, chip)
    for kernel in KERNELS:
        assert geometry.place_weights(cell, 1 << 17, g, 8, kernel == "adjoint").shared < 1024


@pytest.mark.parametrize(("chip", "name", "d", "dtype", "kernel"), one_in(31, CASES))
@pytest.mark.slow
@needs_nvcc
def test_a_kernel_compiles_and_its_launch_would_be_accepted(chip, name, d, dtype, kernel, tmp_path):
    cell, chip, dtype = cell_named(name), CHIPS[chip], TYPES[dtype]
    g = lay_out(cell, d, SAMPLES, dtype, chip, kernel)
    if g is None:
        pytest.skip("a product for each step is faster")
    text, shared = source.kernel_source(kernel, cell, g, d, dtype, False, *KERNELS[kernel])
    used = compile_for(chip.arch, source.PREFACE + text, tmp_path)
    assert resident_blocks(used, 32 * g.warps, shared, chip) >= 1, (used, g, shared)
    if dtype == F32:  # W stays in registers, 512 bytes of a thread; float64 spills, everywhere
        assert used.spilled + used.stack <= IN_MEMORY, (used, g)


@pytest.mark.parametrize(("chip", "name", "d", "kernel"), one_in(8, TENSOR))
@pytest.mark.slow
@needs_nvcc
def test_a_kernel_for_tensor_cores_compiles(chip, name, d, kernel, tmp_path):
    """The fastest layout for tensor cores, whether or not it would be chosen."""
    cell, chip, backwards = cell_named(name), CHIPS[chip], kernel == "adjoint"
    candidates = geometry.tensor_geometries(
        cell, d, SAMPLES, chip.processors, chip.limit, backwards, chip.clusters
    )
    g = min(
        candidates,
        key=lambda g: geometry.tensor_time(cell, d, SAMPLES, backwards, g),
        default=None,
    )
    if g is None:
        pytest.skip("W does not fit")
    text, shared = source.kernel_source(kernel, cell, g, d, F32, False, *KERNELS[kernel])
    used = compile_for(chip.arch, source.PREFACE + text, tmp_path)
    assert resident_blocks(used, 32 * g.warps, shared, chip) >= 1, (used, g, shared)
    if d % 4 == 0:  # else numbers are read one by one, and registers do not hold them all
        assert used.spilled <= 4 * IN_MEMORY, (used, g)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("chip", COMPILED)
@pytest.mark.sampled(4)
@pytest.mark.slow
@needs_nvcc
def test_the_operations_of_all_formulas_compile(chip, dtype, tmp_path):
    x = symbol("x.0")
    nodes = tuple(Node(name, (x,)) for name in sorted(PRIMITIVES))
    op = pointwise.Pointwise((("x", (x,)),), (("y", nodes),), (), frozenset())
    text = points.pointwise_source(op, (True,), 50, TYPES[dtype])
    used = compile_for(CHIPS[chip].arch, text, tmp_path)
    assert resident_blocks(used, 256, 0, CHIPS[chip]) >= 1, used
    assert used.spilled == 0


@pytest.mark.slow
@needs_nvcc
def test_an_instruction_that_an_architecture_lacks_is_noticed(tmp_path):
    """Clusters came with sm_90."""
    text = 'extern "C" __global__ void k() { asm volatile("barrier.cluster.arrive;"); }'
    assert compile_for("sm_90", text, tmp_path).registers
    with pytest.raises(AssertionError, match=r"sm_90|cluster"):
        compile_for("sm_80", text, tmp_path)


@pytest.mark.parametrize(
    ("used", "shared", "expected"),
    [
        (Resources(255, 0, 0, 0), 0, 1),
        (Resources(128, 0, 0, 0), 0, 2),
        (Resources(32, 0, 0, 0), 99 << 10, 1),
        (Resources(32, 0, 0, 0), (99 << 10) + 1, 0),
        (Resources(32, 0, 0, 16), 99 << 10, 0),
        (Resources(256, 0, 0, 0), 0, 0),
    ],
)
def test_blocks_of_256_threads_that_a_multiprocessor_holds(used, shared, expected):
    """The arithmetic of these tests, by hand."""
    assert resident_blocks(used, 256, shared, CHIPS["RTX 3090"]) == expected


# which architecture NVRTC is asked for


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),  # newer than the compiler, but of a major number that it knows
        ((12, 1), "sm_120"),
        ((11, 0), None),
        ((13, 0), None),
    ],
)
def test_the_architecture_is_one_that_NVRTC_knows(capability, expected):
    known = (75, 80, 86, 87, 89, 90, 100, 101, 120)  # CUDA 12.8
    assert driver.choose_architecture(capability, known) == expected


def test_a_GPU_that_is_too_old_or_too_new_is_refused(monkeypatch):
    """A Turing GPU lacks an instruction of the adjoint (__reduce_max_sync)."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_engine, "nvrtc", lambda: None)
    monkeypatch.setattr(cuda_engine, "known_architectures", lambda library: (75, 80, 86, 90))

    def refusal(major, minor):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, minor))
        return cuda_engine.refusal("cuda")

    assert refusal(7, 5) == "needs a GPU of compute capability 8.0 or higher. Use engine='auto'."
    assert refusal(8, 9) is None
    assert refusal(12, 0) == (
        "needs a newer CUDA: NVRTC of 12.8 cannot compile for compute capability 12.0. Use "
        "engine='auto'."
    )
