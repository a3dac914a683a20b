"""Calling the maps of a chain: what would make costates wrong is refused or repaired by name."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import CoadjointError, InputError, KindError, Unsupported, brief, whole_number
from ..sweeps.checks import require
from ..sweeps.torch_internals import change_count, is_fake, transforms_are_on
from .maps import Dense, Tied

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
ALONG_AN_AXIS = (nn.Softmax, nn.LogSoftmax, nn.Softmin)  # their `dim` says which
# What torch's modules raise for a state that they cannot take: most often the first.
MISFITS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)
DENSE = (Dense, Tied)  # a parametrisation, which may hold modules, gives a layer another class


def check_counts(name: str, values: object) -> list[int]:
    """A list of positive integers, such as widths of layers; anything else is refused."""
    if not isinstance(values, list | tuple | range):
        raise KindError(f"{name} must be a list of positive integers; got {brief(values)}.")
    return [whole_number(name, value) for value in values]


def largest_dropout(modules: Iterable[nn.Module]) -> float:
    """The largest share of entries that one of these modules drops in training."""
    return max((module.p for module in modules if isinstance(module, DROPOUTS)), default=0.0)


def describe_map(index: int, module: nn.Module) -> str:
    """A map in words, for messages: "map 3 (Linear)"."""
    return f"map {index} ({type(module).__name__})"


def require_finite_input(x: Tensor) -> None:
    """Refuse an input x [B, ...] that holds NaN or inf; the message names the first such sample.

    Nothing is checked where no value can be looked at: on meta, of a fake tensor, and inside the
    transforms of torch.func.
    """
    if x.is_meta or is_fake(x) or transforms_are_on():
        return
    # A sum is quicker than a test of every number, which follows only if the sum is not finite.
    total = x.detach().sum()
    if x.device.type == "cpu" and math.isfinite(total.item()):
        return
    require(total.isfinite(), lambda: nonfinite_input_error(x))


def nonfinite_input_error(x: Tensor) -> InputError | None:
    """The error for an input x [B, ...] with NaN or inf; None if it holds none."""
    bad = (~torch.isfinite(x)).flatten().nonzero()
    if not len(bad):
        return None
    sample = int(bad[0, 0]) // x[0].numel()
    return InputError(
        f"the input x holds NaN or inf, first in sample {sample}; clean the data, or leave that "
        "sample out."
    )


def call_map(index: int, module: nn.Module, x: Tensor) -> Tensor:
    """The state after a map; what would make its costate wrong or meaningless is refused."""
    refuse_along_samples(index, module, x)
    argument = x.clone() if is_in_place(module) else x
    changes = change_count(argument)
    try:
        y = module(argument)
    except CoadjointError:
        raise  # it says what to do
    except MISFITS as error:
        first_line = str(error).strip().partition("\n")[0]
        raise InputError(
            f"{describe_map(index, module)} cannot take a state of shape {list(x.shape)}: "
            f"{first_line}"
        ) from error
    if change_count(argument) != changes and argument is x:
        raise Unsupported(
            f"{describe_map(index, module)} changes its input in place, so that the state before "
            "it is lost. Use the version that does not (F.relu(x) instead of F.relu_(x))."
        )
    if not isinstance(y, Tensor):
        raise KindError(
            f"{describe_map(index, module)} returned {brief(y)}; a map of a chain returns one "
            "tensor. Wrap it in a module that picks the part the next map reads."
        )
    if y.dim() < 1 or len(y) != len(x):
        raise InputError(
            f"{describe_map(index, module)} returned shape {list(y.shape)} for {len(x)} samples; "
            "the first axis is that of the samples."
        )
    return y


def refuse_along_samples(index: int, module: nn.Module, x: Tensor) -> None:
    """Refuse a softmax along the axis of the samples, which it would mix."""
    parts = list(module) if isinstance(module, nn.Sequential) else [module]
    for part in parts:
        if isinstance(part, ALONG_AN_AXIS) and is_along_samples(part, x):
            inner = "" if part is module else f" holds a {type(part).__name__}, which"
            raise Unsupported(
                f"{describe_map(index, module)}{inner} with dim={part.dim} runs over the samples, "
                "so that a sample's loss depends on other samples. Give the axis of the classes: "
                "dim=1."
            )


def is_along_samples(softmax: nn.Softmax | nn.LogSoftmax | nn.Softmin, x: Tensor) -> bool:
    """Whether a softmax of states with the axes of x runs over the samples, which are axis 0."""
    if softmax.dim is None:  # torch then takes axis 0 of three axes, and axis 1 of two or four
        return x.dim() in (1, 3)
    return softmax.dim in (0, -x.dim())


def inner_modules(maps: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """All modules inside of maps, and the maps; dense layers, which hold none, are left out."""
    for module in maps:
        if type(module) not in DENSE:
            yield from module.modules()


def is_in_place(module: nn.Module) -> bool:
    """Whether a map overwrites its input, as ReLU(inplace=True) does."""
    return any(getattr(inner, "inplace", False) is True for inner in inner_modules([module]))


def refuse_mixing(maps: Iterable[nn.Module]) -> None:
    """Refuse batch normalisation in training mode, which mixes the samples of a batch."""
    for index, module in enumerate(maps):
        for inner in inner_modules([module]):
            uses_batch = isinstance(inner, BATCH_NORMS) and (
                inner.training or not inner.track_running_stats
            )
            if uses_batch:
                raise Unsupported(
                    f"{describe_map(index, module)} normalises by the batch, so that a sample's "
                    f"loss depends on other samples and has no costates of its own. Call .eval() "
                    f"on the {type(inner).__name__}, or use LayerNorm or GroupNorm."
                )


def is_free_of_attention(kind: type[nn.Module]) -> bool:
    """Whether a class of modules is torch's or ours, and computes no attention itself."""
    is_attention = issubclass(kind, nn.MultiheadAttention)
    return kind.__module__.startswith(("torch.nn.", "coadjoint.")) and not is_attention


def attention_with_derivatives(*maps: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A context in which attention has a second derivative: torch's fused kernels have none."""
    if all(is_free_of_attention(type(inner)) for inner in inner_modules(maps)):
        return contextlib.nullcontext()
    context: Callable[..., contextlib.AbstractContextManager[None]] = sdpa_kernel
    return context(SDPBackend.MATH)


def random_states(like: Tensor) -> list[Tensor]:
    """The states of the random generators that maps may draw from."""
    states = [torch.get_rng_state()]
    if like.is_cuda:
        states.append(torch.cuda.get_rng_state(like.device))
    return states


@contextlib.contextmanager
def restored_generators(states: Sequence[Tensor], like: Tensor) -> Iterator[None]:
    """Set the random generators to `states` inside a `with` block, and back afterwards."""
    now = random_states(like)
    try:
        set_generators(states, like)
        yield
    finally:
        set_generators(now, like)


def set_generators(states: Sequence[Tensor], like: Tensor) -> None:
    """Set the random generators, that of the CPU first."""
    torch.set_rng_state(states[0])
    if like.is_cuda:
        torch.cuda.set_rng_state(states[1], like.device)
