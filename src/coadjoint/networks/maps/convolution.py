"""Conv: convolution, torch's or that of the thesis, with an elementwise function on top."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn import grad as adjoints

from ...cells.parameters import Device
from ...errors import InputError, whole_number
from ...sweeps.layout import check_dense
from .bilinear import BilinearMap, draw_bias, draw_weight, make_parameter
from .checks import check_type_of

Pair = tuple[int, int]


def pair(name: str, value: object, least: int = 1) -> Pair:
    """A whole number for both directions, or one for rows and one for columns."""
    if not isinstance(value, tuple | list):
        number = whole_number(name, value, least)
        return number, number
    if len(value) != 2:
        raise InputError(
            f"{name} must be one whole number or two, for rows and columns; got {value}."
        )
    return whole_number(name, value[0], least), whole_number(name, value[1], least)


class Conv(BilinearMap):
    """A convolution x -> Psi(C(W, x) + b), (4.15), on images [B, channels_in, rows, columns].

    channels_in, channels_out  the numbers of channels (feature maps)
    size, stride, padding      of the filters; a number, or one for rows and one for columns
    activation                 psi: identity, tanh, sigmoid, relu, softplus, gelu, silu or elu
    bias                       whether there is a b, one number for each channel of the output
    summed                     the convolution of the thesis, (4.12): one filter for each channel of
                               the output, applied to the sum of the channels of the input

    The parameters are W [channels_out, channels_in, *size], or [channels_out, *size] with summed,
    and b [channels_out], drawn as torch draws those of nn.Conv2d. Rows and columns that the last
    step of the filter does not reach are not read. C and its two adjoints are torch's:

        C(W, x)      the products of the filters with crops of x              (4.15), (4.16)
        (W _| C)* y  the filters, embedded where they were applied             Theorem 4.2.3
        (C |_ x)* y  crops of x, weighted by y                                 Theorem 4.2.2

    and the products follow as for every bilinear map. With z = C(W, x) + b, d = Psi'(z) w and
    c = Psi''(z) C(W, v) w:

        push             Psi'(z) C(W, v)                                              (4.31)
        pull             (W _| C)* d                                                  (4.33)
        pull_parameters  W: (C |_ x)* d   b: d summed over places                     (4.32)
        bend             (W _| C)* c                                              by (2.14)
        bend_parameters  W: (C |_ x)* c + (C |_ v)* d   b: c summed over places   by (2.14)

    (4.30) to (4.33) are misprinted: the hooks are exchanged. Algorithm 4.2.1 has them right.

    Example:
        >>> import torch
        >>> import coadjoint as co
        >>> f = co.maps.Conv(1, 4, size=3, stride=2)
        >>> f(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 4, 3, 3])
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        size: int | Pair,
        stride: int | Pair = 1,
        padding: int | Pair = 0,
        activation: str = "identity",
        bias: bool = True,
        summed: bool = False,
        *,
        dtype: torch.dtype | None = None,
        device: Device | None = None,
    ) -> None:
        super().__init__(activation)
        self.channels_in = whole_number("channels_in", channels_in)
        self.channels_out = whole_number("channels_out", channels_out)
        self.size = pair("size", size)
        self.stride = pair("stride", stride)
        self.padding = pair("padding", padding, least=0)
        self.summed = bool(summed)
        filters = (channels_out,) if summed else (channels_out, channels_in)
        self.W = make_parameter(*filters, *self.size, dtype=dtype, device=device)
        self.b = make_parameter(channels_out, dtype=dtype, device=device) if bias else None
        self.reset_parameters()

    def extra_repr(self) -> str:
        """Sizes, activation and what differs from the defaults."""
        words = [f"{self.channels_in}, {self.channels_out}, size={self.size}"]
        if self.stride != (1, 1):
            words.append(f"stride={self.stride}")
        if self.padding != (0, 0):
            words.append(f"padding={self.padding}")
        words.append(f"activation='{self.activation}'")
        if self.b is None:
            words.append("bias=False")
        if self.summed:
            words.append("summed=True")
        return ", ".join(words)

    def reset_parameters(self) -> None:
        """Draw W and b from +-1 / sqrt(channels_in * the size of a filter), as nn.Conv2d does.

        Also with summed: the numbers that one output reads are as many.
        """
        numbers_read = self.channels_in * self.size[0] * self.size[1]
        draw_weight(self.W, numbers_read)
        draw_bias(self.b, numbers_read)

    def filters(self) -> Tensor:
        """The filters as torch's conv2d takes them; with summed, for images of one channel."""
        return self.W[:, None] if self.summed else self.W

    def image(self, x: Tensor) -> Tensor:
        """What the filters read: x, or the sum of its channels, (4.12)."""
        return x.sum(1, keepdim=True) if self.summed else x

    def multiply(self, x: Tensor) -> Tensor:
        """C(W, x), (4.15)."""
        self._check_image(x)
        return functional.conv2d(
            self.image(x), self.filters(), stride=self.stride, padding=self.padding
        )

    def adjoint_by_state(self, x: Tensor, y: Tensor) -> Tensor:
        """(W _| C)* y (Theorem 4.2.3)."""
        shape = self.image(x).shape
        by_image: Tensor = adjoints.conv2d_input(
            shape, self.filters(), y, stride=self.stride, padding=self.padding
        )
        # the adjoint of the sum over channels is the same for each of them (Lemma 4.2.1)
        return by_image.expand_as(x)

    def adjoint_by_weight(self, x: Tensor, y: Tensor) -> Tensor:
        """(C |_ x)* y (Theorem 4.2.2)."""
        by_filters: Tensor = adjoints.conv2d_weight(
            self.image(x), self.filters().shape, y, stride=self.stride, padding=self.padding
        )
        return by_filters.reshape(self.W.shape)

    def _check_image(self, x: Tensor) -> None:
        """Refuse an x that is no image of this many channels, or smaller than the filters."""
        expected = f"[B, {self.channels_in}, rows, columns]"
        if check_dense("x", x).dim() != 4 or x.shape[1] != self.channels_in:
            raise InputError(f"Conv reads x {expected}; got {list(x.shape)}.")
        for axis in (0, 1):
            padded = x.shape[2 + axis] + 2 * self.padding[axis]
            if padded < self.size[axis]:
                raise InputError(
                    f"Conv has filters of {self.size[0]} x {self.size[1]}, larger than the image: "
                    f"got x {list(x.shape)}, padding {self.padding}."
                )
        check_type_of("x", x, "W", self.W)
