"""Chain: maps that follow one another, x_{i+1} = f_i(x_i), and their costates over depth.

    x_0 = the input,  x_{i+1} = f_i(x_i; theta_i),  i = 0..L-1,   a = x_L,   y_hat = phi(a)

It is the framework of Caterini (2017): every f_i is a map between inner product spaces, so a state
is a tensor of any shape. Depth takes the place of time, and layers that of steps.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ..errors import InputError, KindError, brief
from ..objectives.batch import Batch
from ..objectives.losses import Output, output_function
from ..sweeps.layout import tensor_of
from ..sweeps.torch_internals import has_hooks
from ..sweeps.wrappers import refuse_wrapper_around
from .chain_calls import (
    attention_with_derivatives,
    call_map,
    check_counts,
    largest_dropout,
    random_states,
    refuse_mixing,
    require_finite_input,
    restored_generators,
)
from .chain_run import ChainRun
from .dense_stretch import end_of_stretch, run_dense
from .interface import Net, check_positive
from .maps import Conv, Dense, Flatten, MaxPool, Tied
from .maps.starts import draw_weights
from .stretches import LinearStretch, MapStretch, Stretch
from .text import dtype_texts
from .written_layers import WrittenLayers

SHORTEST_STRETCH = 2  # dense layers; a single one gains nothing from a sweep


class Chain(Net):
    """Maps that follow one another: x_{i+1} = f_i(x_i), y_hat = phi(x_L).

    maps    nn.Modules, each from one tensor [B, ...] to one tensor [B, ...]; an nn.Sequential
            given as an argument stands for its children; one inside another counts as one map.
            Parameters are those of the modules themselves, not copies.
    output  phi: "identity", "sigmoid", "softmax", "tanh", or a function
    shape   of one sample of the input, without B; only descriptions need it

    `chain(x)` is a co.ChainRun. A map that changes its input in place (ReLU(inplace=True)) is given
    a copy. Batch normalisation in training mode is refused, because a sample's loss would depend
    on other samples. Attention runs on torch's math kernel, which has a second derivative on every
    device.

    Example:
        >>> import torch, coadjoint as co
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> chain = co.Chain(model, output="softmax")
        >>> run = chain(torch.zeros(5, 4))
        >>> lam = run.costates("cross-entropy", torch.zeros(5, dtype=torch.long))
        >>> [list(lam.at(i).shape) for i in range(4)]
        [[5, 4], [5, 8], [5, 8], [5, 3]]
        >>> (lam.loss + 0.1 * co.penalties.log_ratio(lam)).mean().backward()
        >>> model[0].weight.grad.shape
        torch.Size([8, 4])
    """

    readout = "last"
    sample_axis = 0
    why_indivisible = "a chain has no time steps"
    whole_methods = "BP or Penalised"
    text: str | None = None  # its layers in words, if it was made from them
    notes: tuple[str, ...] = ()  # what was added to these words

    def __init__(
        self, *maps: nn.Module, output: Output = "identity", shape: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        output_function(output)  # refuses an unknown name
        self.output = output
        self.shape = None if shape is None else tuple(check_counts("shape", shape))
        self.maps = nn.ModuleList(list_maps(maps))
        self.inputs = count_entries(self.maps, ("in_features", "inputs"))
        if self.shape is not None:
            self.inputs = torch.Size(self.shape).numel()
        self.outputs = count_entries(reversed(self.maps), ("out_features", "outputs"))

    @classmethod
    def mlp(
        cls,
        inputs: int,
        widths: Sequence[int],
        outputs: int,
        *,
        activation: str = "tanh",
        output: Output = "identity",
        start: str = "orthogonal",
        gain: float = 1.0,
        bias: bool = True,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Chain:
        """Dense layers x_{i+1} = psi(W_i x_i + b_i) of these widths, then a linear readout.

        activation  psi of the hidden layers, by name
        start       of the weights: "orthogonal" (default), "gaussian" of variance gain^2 / width,
                    or "torch"; biases are zero but for "torch". The readout has gain 1.
        seed        of the weights; None: torch's own generator

        Orthogonal weights keep the costates of thirty tanh layers alive without any penalty.

        Example:
            >>> import coadjoint as co
            >>> mlp = co.Chain.mlp(64, [64] * 30, 10, output="softmax")
            >>> len(mlp), mlp.inputs, mlp.outputs
            (31, 64, 10)
        """
        check_positive(inputs=inputs, outputs=outputs)
        dense = functools.partial(Dense, bias=bias, dtype=dtype, device=device)
        maps: list[nn.Module] = []
        before = inputs
        for width in check_counts("widths", widths):
            maps.append(dense(before, width, activation))
            before = width
        maps.append(dense(before, outputs, "identity"))
        draw_weights(maps, start, gain, seed)
        return cls(*maps, output=output, shape=(inputs,))

    @classmethod
    def cnn(
        cls,
        shape: Sequence[int],
        channels: Sequence[int],
        outputs: int,
        *,
        size: int = 3,
        pool: int = 2,
        widths: Sequence[int] = (),
        activation: str = "tanh",
        output: Output = "identity",
        start: str = "orthogonal",
        gain: float = 1.0,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Chain:
        """Convolutions with max pooling, dense layers of `widths`, and a linear readout.

        shape     of one image, [channels, height, width]
        channels  of the convolutions, which have filters of `size` x `size` and no padding; each
                  is followed by max pooling over `pool` x `pool`, 1 for none
        others    as in `mlp`

        Example:
            >>> import torch, coadjoint as co
            >>> cnn = co.Chain.cnn((1, 8, 8), [8], 10, output="softmax")
            >>> [list(x.shape[1:]) for x in cnn(torch.zeros(2, 1, 8, 8)).x]
            [[1, 8, 8], [8, 6, 6], [8, 3, 3], [72], [10]]
        """
        check_positive(outputs=outputs, size=size, pool=pool)
        if len(check_counts("shape", shape)) != 3:
            raise InputError(
                f"shape is that of an image, (channels, height, width); got {brief(shape)}."
            )
        dense = functools.partial(Dense, dtype=dtype, device=device)
        before, height, width = shape
        maps: list[nn.Module] = []
        for count in check_counts("channels", channels):
            convolution = Conv(
                before, count, size, activation=activation, dtype=dtype, device=device
            )
            maps.append(convolution)
            height = (height - size + 1) // pool
            width = (width - size + 1) // pool
            if min(height, width) < 1:
                raise InputError(
                    f"an image of {shape[1]} x {shape[2]} has nothing left after convolution "
                    f"{len(maps)}: use fewer of them, smaller filters, or pool=1."
                )
            if pool > 1:
                maps.append(MaxPool(pool))
            before = count
        maps.append(Flatten())
        entries = before * height * width
        for units in check_counts("widths", widths):
            maps.append(dense(entries, units, activation))
            entries = units
        maps.append(dense(entries, outputs, "identity"))
        draw_weights(maps, start, gain, seed)
        return cls(*maps, output=output, shape=shape)

    @classmethod
    def autoencoder(
        cls,
        inputs: int,
        widths: Sequence[int],
        *,
        activation: str = "tanh",
        tied: bool = True,
        output: Output = "identity",
        start: str = "orthogonal",
        gain: float = 1.0,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Chain:
        """An encoder of dense layers and a decoder that mirrors it; the last layer is linear.

        tied    the decoder's weights are the encoder's, transposed: W_{2L - i + 1} = W_i'
        others  as in `mlp`

        Example:
            >>> import torch, coadjoint as co
            >>> dae = co.Chain.autoencoder(64, [32, 8])
            >>> [x.shape[1] for x in dae(torch.zeros(1, 64)).x]
            [64, 32, 8, 32, 64]
        """
        check_positive(inputs=inputs)
        dense = functools.partial(Dense, dtype=dtype, device=device)
        encoder: list[Dense] = []
        before = inputs
        for width in check_counts("widths", widths):
            encoder.append(dense(before, width, activation))
            before = width
        if not encoder:
            raise InputError("an autoencoder needs the width of at least one layer: [32, 8].")
        decoder: list[nn.Module] = []
        for layer in reversed(encoder):
            psi = "identity" if layer is encoder[0] else activation
            if tied:
                decoder.append(Tied(layer, activation=psi))
            else:
                decoder.append(dense(layer.outputs, layer.inputs, psi))
        maps = [*encoder, *decoder]
        draw_weights(maps, start, gain, seed)
        return cls(*maps, output=output, shape=(inputs,))

    def __len__(self) -> int:
        return len(self.maps)

    def extra_repr(self) -> str:
        """The text between the brackets of repr(chain)."""
        words = []
        if self.text is not None:
            words = [self.text, f"inputs={self.inputs}, outputs={self.outputs}"]
        return ", ".join([*words, f"output={self.output!r}", *dtype_texts(self)])

    @property
    def as_chain(self) -> Chain:
        """This chain."""
        return self

    def parameter_names(self) -> list[dict[str, str]]:
        """For each map, the names in the chain of its parameters, by their names in the map."""
        names = {id(p): name for name, p in self.named_parameters()}
        by_map: list[dict[str, str]] = []
        for module in self.maps:
            by_map.append({name: names[id(p)] for name, p in module.named_parameters()})
        return by_map

    @property
    def dropout(self) -> float:  # type: ignore[override]
        """The largest share of entries that one of the maps drops in training."""
        return largest_dropout(self.modules())

    @property
    def like(self) -> Tensor:
        """A tensor of the chain's type, on its device; torch's default if it has no parameters."""
        return next(self.parameters(), torch.empty(0))

    def forward(self, x: Tensor) -> ChainRun:
        """Run over x [B, ...]; NaN and inf in x are refused."""
        return self.run(Batch(x, axis=0), called=True)

    def run(self, batch: Batch, called: bool = False) -> ChainRun:
        """The run over a batch. called: by `forward`, so that torch's hooks have fired already."""
        if not called and self.must_be_called():
            run: ChainRun = self(batch.u)
            return run
        refuse_mixing(self.maps)
        self._check_batch(batch)
        generators = None
        if self.training and not torch.is_grad_enabled():
            generators = random_states(self.like)
        return self._run_maps(batch, generators)

    def run_written(self, batch: Batch, layers: WrittenLayers) -> ChainRun:
        """The run over a batch, of maps that are all written down: none of them draws or mixes."""
        self._check_batch(batch)
        x = self._check_input(batch, layers.weights[0])
        return ChainRun(self, batch, x, run_stretches(layers.maps, x, layers))

    def _check_batch(self, batch: Batch) -> None:
        """Refuse a wrapper around the chain, and what only sequences have."""
        refuse_wrapper_around(self)
        if batch.lengths is not None or batch.x0 is not None:
            raise InputError(
                "a chain has no time steps and no initial state: leave out lengths and x0."
            )

    def repeat(self, run: ChainRun) -> ChainRun:
        """The same run again, with the random numbers that it drew."""
        if run.generators is None:
            return self._run_maps(run.batch, None)
        with restored_generators(run.generators, self.like):
            return self._run_maps(run.batch, run.generators)

    def must_be_called(self) -> bool:
        """Whether `run` must go through torch's __call__: hooks, or a replaced `forward`."""
        forward = getattr(self.forward, "__func__", None)  # the function behind the bound method
        return has_hooks(self) or forward is not Chain.forward

    def _check_input(self, batch: Batch, like: Tensor) -> Tensor:
        """The input x as a tensor on the device of `like`; what no map can take is refused."""
        x = tensor_of("the input x", batch.u, like)
        if x.dim() < 1 or not x.is_floating_point():
            raise InputError(
                "the input x of a chain is a tensor [B, ...] of real numbers; got "
                f"{list(x.shape)} of {x.dtype}."
            )
        require_finite_input(x)
        return x

    def _run_maps(self, batch: Batch, generators: list[Tensor] | None) -> ChainRun:
        """The states of all maps, one stretch after the other."""
        x = self._check_input(batch, self.like)
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # where lam_0 = dL/dinput is taken
        maps = list(self.maps)
        with attention_with_derivatives(*maps):
            return ChainRun(self, batch, x, run_stretches(maps, x), generators)


def run_stretches(
    maps: Sequence[nn.Module], x: Tensor, layers: WrittenLayers | None = None
) -> list[Stretch]:
    """Run maps one stretch after the other, from x on; layers: what they hold, if it is known."""
    stretches: list[Stretch] = []
    before = x
    begin = 0
    while begin < len(maps):
        end = end_of_stretch(maps, begin, before, layers is not None)
        stretch: Stretch
        if end - begin >= SHORTEST_STRETCH:
            weights = None if layers is None else layers.matrices_and_biases(begin, end)
            stretch = run_dense(maps[begin:end], before, weights)
        else:
            end = begin + 1
            stretch = run_map(begin, maps[begin], before)
        stretches.append(stretch)
        before = stretch.last
        begin = end
    return stretches


def run_map(index: int, module: nn.Module, x: Tensor) -> MapStretch:
    """Run one map, the one with this number in the chain."""
    return LinearStretch.run(module, x) or MapStretch(x, call_map(index, module, x))


def list_maps(given: Sequence[nn.Module]) -> list[nn.Module]:
    """The maps of a chain: an nn.Sequential among those given stands for its children."""
    maps: list[nn.Module] = []
    for module in given:
        if isinstance(module, list | tuple | nn.ModuleList):
            raise KindError(
                "the maps of a chain are nn.Modules, one argument each; got a "
                f"{type(module).__name__}. Unpack it: co.Chain(*maps)."
            )
        if not isinstance(module, nn.Module):
            raise KindError(f"the maps of a chain are nn.Modules; got {brief(module)}.")
        is_plain_sequence = (
            isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
        )
        maps += list(module) if is_plain_sequence else [module]  # type: ignore[call-overload]
    if not maps:
        raise InputError("a chain needs at least one map: co.Chain(nn.Linear(4, 3)).")
    return maps


def count_entries(maps: Iterable[nn.Module], names: Sequence[str]) -> int:
    """The first number that a map has under one of these names; 0 if none has."""
    for module in maps:
        for name in names:
            value = getattr(module, name, None)
            if isinstance(value, int):
                return value
        if any(True for _ in module.parameters()):  # a map of another kind decides the shape
            return 0
    return 0
