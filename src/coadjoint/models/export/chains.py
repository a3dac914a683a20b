"""Chains as operations: dense and tied layers, convolutions, pooling, norms, residual blocks."""

from __future__ import annotations

from torch import Tensor, nn

from ...errors import Unsupported
from ...networks.chain import Chain
from ...networks.maps.composed import Composed
from ...networks.maps.convolution import Conv
from ...networks.maps.dense import MatrixMap
from ...networks.maps.elementwise import Activation
from ...networks.maps.pooling import AvgPool, MaxPool
from ...networks.maps.shapes import Flatten, Residual
from ...networks.maps.softmax import LogSoftmax, Softmax
from .writer import Value, Writer


def write_chain(writer: Writer, chain: Chain, x: Value) -> Value:
    """The pre-outputs a = x_L of samples x [B, ...]."""
    for index, module in enumerate(chain.maps):
        x = write_map(writer, module, x, f"map{index}")
    return x


def write_map(writer: Writer, module: nn.Module, x: Value, name: str) -> Value:
    """One map; name: how the names of its weights begin."""
    if isinstance(module, MatrixMap):
        K, b, activation = module.effective()
        return activate(writer, activation, writer.affine(x, K, b, name))
    if isinstance(module, nn.Linear):
        return writer.affine(x, module.weight, module.bias, name)
    if isinstance(module, Conv):
        return write_convolution(writer, module, x, name)
    if isinstance(module, Activation):
        return activate(writer, module.name, x)
    if isinstance(module, MaxPool | AvgPool):
        op = "max_pool" if isinstance(module, MaxPool) else "mean_pool"
        return writer.apply(op, x, name="x", size=module.size)
    if isinstance(module, Flatten):
        return writer.apply("flatten", x, name="x")
    if isinstance(module, nn.Unflatten):  # images without channels: [B, H, W] -> [B, 1, H, W]
        return writer.apply("add_channel", x, name="x")
    if isinstance(module, nn.Dropout | nn.Identity):
        return x
    if isinstance(module, nn.LayerNorm | nn.GroupNorm):
        return write_norm(writer, module, x, name)
    if isinstance(module, Composed):
        for index, inner in enumerate(module.maps):
            x = write_map(writer, inner, x, f"{name}_{index}")
        return x
    if isinstance(module, Residual):
        value = write_map(writer, module.f, x, f"{name}_f")
        kept = x
        if module.projection is not None:
            kept = write_map(writer, module.projection, x, f"{name}_projection")
        return writer.apply("add", kept, value, name="x")
    if isinstance(module, Softmax | LogSoftmax):
        p = writer.apply("softmax", x, name="p", axis=1)
        return p if isinstance(module, Softmax) else writer.apply("log", p, name="log_p")
    raise Unsupported(
        f"a map of type {type(module).__name__} cannot be exported: only those that --chain and "
        "--autoencoder make can be."
    )


def activate(writer: Writer, activation: str, z: Value) -> Value:
    """psi(z) by its name; the identity adds nothing."""
    return z if activation == "identity" else writer.apply(activation, z, name="x")


def write_convolution(writer: Writer, module: Conv, x: Value, name: str) -> Value:
    """Psi(C(W, x) + b)."""
    if module.summed:
        x = writer.apply("sum", x, axis=1, keep=True, name="x")
    arguments = [x, writer.constant(module.filters(), f"{name}_W")]
    if module.b is not None:
        arguments.append(writer.constant(module.b, f"{name}_b"))
    z = writer.apply(
        "convolution", *arguments, name="z", stride=module.stride, padding=module.padding
    )
    return activate(writer, module.activation, z)


def write_norm(writer: Writer, module: nn.LayerNorm | nn.GroupNorm, x: Value, name: str) -> Value:
    """Normalisation over a sample, or over groups of its channels."""
    weight: Tensor = module.weight
    bias: Tensor = module.bias
    W = writer.constant(weight, f"{name}_weight")
    b = writer.constant(bias, f"{name}_bias")
    if isinstance(module, nn.LayerNorm):
        axes = len(module.normalized_shape)
        return writer.apply("layer_norm", x, W, b, name="x", axes=axes, eps=module.eps)
    groups = module.num_groups
    return writer.apply("group_norm", x, W, b, name="x", groups=groups, eps=module.eps)
