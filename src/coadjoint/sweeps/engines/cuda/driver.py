"""Kernels compiled by NVRTC, which comes with torch; loaded and launched by the CUDA driver."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from ....cells.cell import Cell
from ..c.compiler import cached_file
from .geometry import Geometry
from .source import PREFACE, kernel_source

# The arrays of struct Args in arguments.cuh.
ARRAYS = (
    "X", "A", "Q", "LAM", "DEL", "MU", "NU", "ALONG", "BASE", "V", "W", "PAR", "SRC", "LAST", "SA",
    "LINK", "K", "TOPS", "KS", "KEND", "KLAST", "LEN", "STARTS",
)  # fmt: skip
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_...
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_...
CLUSTER_SIZES = (2, 4, 8)  # larger ones need not be supported
FIRST_WITH_CLUSTERS = (9, 0)  # compute capability
EMPTY_KERNEL = 'extern "C" __global__ void nothing() {}\n'
Arguments = ctypes.Array[ctypes.c_longlong]  # struct Args: addresses, then the batch size


@functools.cache
def nvrtc() -> ctypes.CDLL:
    """NVRTC, CUDA's run-time compiler; OSError if it is not found."""
    major = str(torch.version.cuda).split(".")[0]
    for name in (f"libnvrtc.so.{major}", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError("libnvrtc.so")


@functools.cache
def known_architectures(library: ctypes.CDLL) -> tuple[int, ...]:
    """The architectures that NVRTC (`library`) can compile for, such as 80, 86 and 90."""
    count = ctypes.c_int()
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    numbers = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(numbers)
    return tuple(numbers)


def choose_architecture(capability: tuple[int, int], known: Sequence[int]) -> str | None:
    """The architecture of `known` to compile for, such as 'sm_90'; None if a GPU runs none of them.

    That of the GPU's compute capability, or else the first of its major number, whose code all
    later ones run: a compiler older than the GPU may know that one alone.
    """
    major, minor = capability
    for number in (10 * major + minor, 10 * major):
        if number in known:
            return f"sm_{number}"
    return None


def compile_kernel(text: str, arch: str, library: ctypes.CDLL) -> bytes:
    """Machine code (CUBIN) for a source, by `library`, which is NVRTC. arch: such as 'sm_90'."""
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"loops.cu", 0, None, None)
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"--fmad=true"]
    option_array = (ctypes.c_char_p * len(options))(*options)
    failed = library.nvrtcCompileProgram(program, len(options), option_array)
    size = ctypes.c_size_t()
    if failed:
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC could not compile a kernel: {log.value.decode()}")
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, code)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def raise_if_failed(status: int) -> None:
    """Raise RuntimeError with the driver's text if a call of it has failed."""
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA: {(text.value or b'unknown error').decode()}")


@functools.cache
def driver() -> ctypes.CDLL:
    """The CUDA driver."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def load_kernel(
    name: str,
    cell: Cell,
    g: Geometry,
    d: int,
    dtype: torch.dtype,
    uniform: bool,
    device: int,
    *options: bool,
) -> tuple[ctypes.c_void_p, int]:
    """A loaded kernel, and the bytes of shared memory it takes.

    name      'forward', 'adjoint' or 'tangent'
    g, d      how the network lies on the chip, and its units
    uniform   all samples have the same length
    device    the number of the GPU
    options   what the loop is given, as kernel_source takes it
    """
    text, shared = kernel_source(name, cell, g, d, dtype, uniform, *options)
    return load_function(PREFACE + text, name, device, shared), shared


def load_function(text: str, name: str, device: int, shared: int) -> ctypes.c_void_p:
    """The function `name` of a source, compiled for the device or found in the cache, and loaded.

    shared: bytes of shared memory that its blocks may have.
    """
    capability = torch.cuda.get_device_capability(device)
    arch = choose_architecture(capability, known_architectures(nvrtc()))
    assert arch is not None  # else the engine was refused

    def make(out: Path) -> None:
        """Compile the source to the file `out`."""
        out.write_bytes(compile_kernel(text, arch, nvrtc()))

    code = cached_file(f"{arch} {torch.version.cuda} {text}", ".cubin", make).read_bytes()
    module = ctypes.c_void_p()
    function = ctypes.c_void_p()
    with torch.cuda.device(device):
        # The driver needs a CUDA context: this makes one, if the thread has none yet.
        torch.cuda.current_stream().synchronize()
        raise_if_failed(driver().cuModuleLoadData(ctypes.byref(module), code))
        raise_if_failed(driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        status = driver().cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
        raise_if_failed(status)
    return function


def launch_kernel(
    function: ctypes.c_void_p,
    grid: int,
    threads: int,
    shared: int,
    arguments: Arguments,
    device: int,
    together: bool = False,
) -> None:
    """Launch a kernel of `grid` blocks of `threads` threads on torch's current stream.

    shared: bytes of shared memory of a block. together: its blocks wait for each other, so all
    must be on the chip at once, which a cooperative launch guarantees.
    """
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    sizes = (grid, 1, 1, threads, 1, 1, shared)
    with torch.cuda.device(device):
        if together:
            status = driver().cuLaunchCooperativeKernel(function, *sizes, stream, pointers)
        else:
            status = driver().cuLaunchKernel(function, *sizes, stream, pointers, None)
        raise_if_failed(status)


@functools.cache
def processor_count(device: int) -> int:
    """How many multiprocessors a device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory_limit(device: int) -> int:
    """Bytes of shared memory that a block may have; 96 KiB where torch does not tell.

    Every GPU that the engine runs on (compute capability 8.0 or higher) has more than that.
    """
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 96 << 10)


class LaunchAttribute(ctypes.Structure):
    """The driver's CUlaunchAttribute, for the size of a cluster."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_uint * 16),
    )


class LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


@functools.cache
def cluster_counts(device: int) -> tuple[tuple[int, int], ...]:
    """(blocks of a cluster, how many such clusters a device has room for at once), ....

    For blocks that take a multiprocessor each. The multiprocessors of a cluster lie in one part of
    the chip, so that some of them may be left over. () where there are no clusters.
    """
    if torch.cuda.get_device_capability(device) < FIRST_WITH_CLUSTERS:
        return ()
    shared = shared_memory_limit(device)
    function = load_function(EMPTY_KERNEL, "nothing", device, shared)
    found = []
    for size in CLUSTER_SIZES:
        attribute = LaunchAttribute(CLUSTER_DIMENSION, b"", (ctypes.c_uint * 16)(size, 1, 1))
        grid = (ctypes.c_uint * 3)(size, 1, 1)
        block = (ctypes.c_uint * 3)(32, 1, 1)
        config = LaunchConfig(grid, block, shared, None, ctypes.pointer(attribute), 1)
        count = ctypes.c_int()
        with torch.cuda.device(device):
            status = driver().cuOccupancyMaxActiveClusters(
                ctypes.byref(count), function, ctypes.byref(config)
            )
        if status == 0 and count.value:
            found.append((size, count.value))
    return tuple(found)
