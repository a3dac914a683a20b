"""float32 products on a GPU's matrix units, which round to 11 bits: each factor is a sum of two such numbers,
y = high + low, and y m = high high + low high + high low to float32's accuracy. Three products on these units are
still several times quicker than one without them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

WORTH = 2e10  # operations from which splitting a product over many rows pays

SPLIT = """
struct Args { const float* y; float* out; long long rows, width, stride; };
extern "C" __global__ void __launch_bounds__(256) split(const Args a) {
  for (long long i = blockIdx.x * 256LL + threadIdx.x; i < a.rows * a.width; i += gridDim.x * 256LL) {
    const long long row = i / a.width, column = i % a.width;
    const float y = a.y[row * a.stride + column], high = __int_as_float(__float_as_int(y) & 0xffffe000);
    float* out = a.out + row * 3 * a.width + column;
    out[0] = high;
    out[a.width] = y - high;
    out[2 * a.width] = high;
  }
}
"""


@contextlib.contextmanager
def rounding() -> Iterator[None]:
    """Inside, float32 products run on the matrix units."""
    before = torch._C._get_cublas_allow_tf32()
    torch._C._set_cublas_allow_tf32(True)
    try:
        yield
    finally:
        torch._C._set_cublas_allow_tf32(before)


def parts(y: Tensor) -> tuple[Tensor, Tensor]:
    """(high, low)"""
    high = y.contiguous().view(torch.int32).bitwise_and(-8192).view(torch.float32)
    return high, y - high


@functools.cache
def splitter(device: int) -> ctypes.c_void_p:
    from . import cuda

    return cuda.loaded(SPLIT, "split", device, 0)


def split(y: Tensor) -> Tensor:
    """[high, low, high] side by side, in one launch."""
    from . import cuda

    y = y if y.stride(1) == 1 else y.contiguous()
    n, width = y.shape
    out = y.new_empty(n, 3 * width)
    pack = (ctypes.c_longlong * 5)(y.data_ptr(), out.data_ptr(), n, width, y.stride(0))
    grid = min(-(-n * width // 256), 1024)
    cuda.start(splitter(y.get_device()), grid, 256, 0, pack, y.get_device())
    return out


class Factor:
    """The right factor of many products, y M."""

    def __init__(self, M: Tensor) -> None:
        self.M = M
        self.three: Tensor | None = None
        if M.is_cuda and M.dtype == torch.float32 and torch.version.cuda is not None:
            high, low = parts(M)
            self.three = torch.cat([high, high, low])

    def __call__(self, y: Tensor, onto: Tensor) -> Tensor:
        """onto + y M"""
        if self.three is None:
            return torch.addmm(onto, y, self.M)
        with rounding():
            return torch.addmm(onto, split(y), self.three)

    def add(self, y: Tensor, onto: Tensor) -> None:
        """onto += y M"""
        if self.three is None:
            onto.addmm_(y, self.M)
        else:
            with rounding():
                onto.addmm_(split(y), self.three)


def product(y: Tensor, r: Tensor) -> Tensor:
    """y' r, sums over many rows."""
    large = y.is_cuda and y.dtype == torch.float32 and 2.0 * len(y) * y.shape[1] * r.shape[1] > WORTH
    if not large or torch.is_grad_enabled():  # a product that will be differentiated is left to torch
        return torch.mm(y.t(), r)
    (high, low), (r_high, r_low) = parts(y), parts(r)
    with rounding():
        return (high.T @ r_low).addmm_(low.T, r_high).addmm_(high.T, r_high)
