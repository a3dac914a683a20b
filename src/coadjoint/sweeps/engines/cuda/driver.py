"""Kernels compiled by NVRTC, which comes with torch, kept on disk, loaded and launched by the CUDA driver."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from ....cells.cell import Cell
from ..c.compiler import cached_file
from .geometry import Geometry
from .source import PREFACE, kernel_source

ARRAYS = (
    "X", "A", "Q", "LAM", "DEL", "MU", "NU", "BASE", "V", "W", "PAR", "SRC", "LAST", "SA", "LINK", "K", "TOPS", "KS", "KEND", "KLAST", "LEN", "STARTS",
)  # fmt: skip


@functools.cache
def nvrtc() -> ctypes.CDLL:
    major = str(torch.version.cuda).split(".")[0]
    for name in (f"libnvrtc.so.{major}", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError("libnvrtc.so")


def compile_kernel(text: str, arch: str, library: ctypes.CDLL) -> bytes:
    """Machine code for the source."""
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"loops.cu", 0, None, None)
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"--fmad=true"]
    status = library.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
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


def raise_if_failed(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA: {(text.value or b'unknown error').decode()}")


@functools.cache
def driver() -> ctypes.CDLL:
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
    """A loaded kernel and its shared memory."""
    text, shared = kernel_source(name, cell, g, d, dtype, uniform, *options)
    return load_function(PREFACE + text, name, device, shared), shared


def load_function(text: str, name: str, device: int, shared: int) -> ctypes.c_void_p:
    """The function of that name, compiled for the device or found in the cache."""
    major, minor = torch.cuda.get_device_capability(device)
    arch = f"sm_{major}{minor}"
    recipe = f"{arch} {torch.version.cuda} {text}"
    code = cached_file(
        recipe, ".cubin", lambda out: out.write_bytes(compile_kernel(text, arch, nvrtc()))
    ).read_bytes()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # a context, if there is none yet
        raise_if_failed(driver().cuModuleLoadData(ctypes.byref(module), code))
        raise_if_failed(driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        raise_if_failed(
            driver().cuFuncSetAttribute(function, 8, shared)
        )  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    return function


def launch_kernel(
    function: ctypes.c_void_p,
    grid: int,
    threads: int,
    shared: int,
    pack: Any,
    device: int,
    together: bool = False,
) -> None:
    """Launch; together: all blocks must be on the chip at once."""
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(pack))
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    call: Any = driver().cuLaunchCooperativeKernel if together else driver().cuLaunchKernel
    more = () if together else (None,)
    with torch.cuda.device(device):
        raise_if_failed(call(function, grid, 1, 1, threads, 1, 1, shared, stream, pointers, *more))


@functools.cache
def processor_count(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory_limit(device: int) -> int:
    """Bytes of shared memory that a block may have."""
    return getattr(
        torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 96 << 10
    )
