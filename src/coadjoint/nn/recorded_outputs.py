"""Record the outputs of any submodules of any model, and compute their costates.

    with co.record(model, at="blocks.*") as tape:
        loss = per_sample_loss(model(x), y)                    # [B]
    loss = loss + 0.1 * tape.penalty("log-ratio", loss)        # penalised backpropagation
    loss.mean().backward()

A hook on every chosen module puts a mark behind its output. The user's graph stays whole: marks
stop gradients only while costates are computed, piece by piece, each in units of its own, so that
nothing vanishes on the way.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, KindError, Unsupported, brief, whole_number
from ..networks.chain_calls import BATCH_NORMS, attention_with_derivatives
from ..networks.layers import refuse_transforms
from ..objectives.penalties import Penalty, penalty
from ..sweeps.layout import check_dense
from ..sweeps.torch_internals import backward_is_running, change_count
from ..sweeps.wrappers import refuse_wrappers_between
from .marks import Mark, Switch
from .output_costates import OutputCall, OutputCostates, OutputRun, output_costates
from .submodules import Places, choose_submodules, refuse_compiled


class OutputTape:
    """The recorded outputs of submodules of a model; `co.record(model, at=...)` makes one.

    model   any nn.Module
    at      which of its submodules: a pattern over names, a submodule, or a list of them
    output  which tensor of modules that return several: a number or a key
    axis    of the samples in all recorded outputs

    Only calls inside the `with` block count, and only those of the thread that entered it. There,
    attention runs on torch's math kernel, which has a second derivative on every device; if
    it runs in a checkpoint, call backward() inside the block too, since the checkpoint runs it
    again.

    Example:
        >>> import torch
        >>> import coadjoint as co
        >>> layer = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 3)
        >>> with co.record(model, at="layers.*") as tape:
        ...     y = model(torch.randn(5, 7, 4))  # [B, T, n]
        >>> loss = y[:, -1].square().sum(-1)  # [B]
        >>> lam = tape.costates(loss)
        >>> lam.names, lam.log_norms().shape
        (['layers.0', 'layers.1', 'layers.2'], torch.Size([3, 5]))
        >>> (loss + 0.1 * tape.penalty("log-ratio", loss)).mean().backward()
    """

    def __init__(
        self, model: nn.Module, at: Places, output: int | str | None = None, axis: int = 0
    ) -> None:
        if not isinstance(output, int | str | None) or isinstance(output, bool):
            raise KindError(
                "`output` is the number or key of the recorded tensor among those that a module "
                f"returns; got {brief(output)}."
            )
        refuse_compiled(model)
        self.model = model
        self.names = choose_submodules(model, at)
        self.output = output
        self.axis = whole_number("axis", axis, 0)
        self.calls: list[OutputCall] = []
        self.without_graph: list[str] = []  # modules called without gradients
        self.switch = Switch()
        self._exits = contextlib.ExitStack()
        self._thread = 0

    def __enter__(self) -> OutputTape:
        refuse_batch_norm(self.model)
        self.calls.clear()
        self.without_graph.clear()
        self.switch = Switch()  # marks of an earlier recording are no marks of this one
        self._thread = threading.get_ident()
        self._exits.enter_context(attention_with_derivatives(self.model))
        for module in self.names:
            self._exits.callback(module.register_forward_hook(self._note_call).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def __repr__(self) -> str:
        return f"<tape of {len(self.calls)} outputs of {len(self.names)} modules>"

    def costates(self, loss: Tensor) -> OutputCostates:
        """The costates lam_i = dL/dx_i of each sample's own loss, in the order of the calls.

        loss: [B], computed from the model's outputs; the value of sample j must depend on sample j
        alone. Differentiable, for penalties, unless gradients are switched off. Outputs that the
        loss does not depend on are left out, and so are calls without gradients (torch.no_grad).
        """
        self._check_loss(loss)
        for call in self.calls:
            refuse_changed(call)
        states = [call.state for call in self.calls]
        refuse_wrappers_between(loss, states, self.names)
        again = torch.is_grad_enabled()
        run = OutputRun(tuple(self.calls), self.axis, self.switch)
        with torch.enable_grad():  # the loss keeps its graph, whether or not the costates have one
            values = loss.reshape(-1)
        with torch.autocast(loss.device.type, enabled=False):
            return output_costates(run, values, again)

    def penalty(self, G: str | Penalty | Callable[..., Tensor], loss: Tensor) -> Tensor:
        """G of the costates, [B].

        G: the name of a penalty, or any function of costates. loss: as in `costates`.
        """
        return penalty(G)(self.costates(loss))

    def _note_call(self, module: nn.Module, _: object, returned: object) -> object:
        """What a recorded module returns, with a mark behind the recorded tensor; a forward hook.

        None leaves the output as it is.
        """
        # A checkpoint calls modules again during the backward pass: the first call was recorded.
        if threading.get_ident() != self._thread or backward_is_running():
            return None
        name = self.names[module]
        if torch.compiler.is_compiling():
            raise Unsupported(
                f"{describe_module(name)} was called by torch.compile: call the model without it "
                "to record its outputs."
            )
        refuse_transforms()
        y = self._recorded_tensor(name, returned)
        if not torch.is_grad_enabled():
            self.without_graph.append(name)
            return None
        # Costates need a graph, also where no weight before this output is trained.
        before = y if y.requires_grad else y.detach().requires_grad_()
        mark = len(self.calls)
        state: Tensor = Mark.apply(before, self.switch, mark)
        number = sum(call.module == name for call in self.calls)
        self.calls.append(OutputCall(name, number, mark, before, state, change_count(state)))
        # The model goes on with a copy, which it may change in place: relu_, x += y.
        return replace_output(returned, self.output, state.clone())

    def _recorded_tensor(self, name: str, returned: object) -> Tensor:
        """The tensor to record among what the module has returned."""
        where = describe_module(name)
        y = returned
        if not isinstance(returned, Tensor):
            y = pick_output(where, returned, self.output)
        check_dense(f"the output of {where}", y)
        assert isinstance(y, Tensor)
        if not y.is_floating_point():
            raise KindError(f"the output of {where} is {y.dtype}, which has no costates.")
        if y.dim() <= self.axis:
            raise InputError(
                f"the output of {where} has shape {list(y.shape)}, but axis={self.axis} is that of "
                "the samples."
            )
        return y

    def _check_loss(self, loss: Tensor) -> None:
        """Refuse a loss that is not [B] with a graph, or one without recorded outputs."""
        if not self.calls and self.without_graph:
            raise InputError(
                f"{describe_module(self.without_graph[0])} was called without gradients "
                "(torch.no_grad, or reentrant checkpointing: use_reentrant=False has them): there "
                "are no costates."
            )
        if not self.calls:
            raise InputError(
                "nothing was recorded: call the model inside `with co.record(model, at=...) as "
                "tape:`, and its submodules as block(x), not block.forward(x)."
            )
        if not isinstance(loss, Tensor):
            raise KindError(
                f"the loss must be a tensor of one value for each sample; got {brief(loss)}."
            )
        sizes = dict.fromkeys(call.state.shape[self.axis] for call in self.calls)
        if loss.numel() not in sizes or loss.dim() > 1:
            got = "a scalar" if loss.dim() == 0 else f"of shape {list(loss.shape)}"
            expected = " or ".join(f"[{B}]" for B in sizes)
            raise InputError(
                f"the loss is {got}; expected one value for each sample, shape {expected}: use "
                "reduction='none' and average after the penalty has been added. (The outputs have "
                f"their samples along axis {self.axis}; `axis` of co.record says which.)"
            )
        refuse_transforms()
        if not loss.requires_grad:
            raise InputError(
                "the loss does not depend on the recorded outputs, or gradients were off "
                "(torch.no_grad)."
            )


def describe_module(name: str) -> str:
    """A submodule in words, for messages."""
    return repr(name) if name else "the model"


def pick_output(where: str, returned: Any, output: int | str | None) -> object:
    """The part `output` of what a module has returned."""
    if output is None:
        raise KindError(
            f"{where} returned {brief_kind(returned)}; say which part to record: "
            f"co.record(model, at=..., output=0)."
        )
    try:
        return returned[output]
    except (LookupError, TypeError) as error:
        raise InputError(
            f"{where} returned {brief_kind(returned)}, which has no part output={output!r}."
        ) from error


def brief_kind(returned: Any) -> str:
    """What a module has returned, in words: "a tuple of 2"."""
    kind = type(returned).__name__
    return f"a {kind} of {len(returned)}" if hasattr(returned, "__len__") else f"a {kind}"


def replace_output(returned: Any, output: int | str | None, y: Tensor) -> object:
    """What a module has returned, with y in the place of the recorded tensor."""
    if isinstance(returned, Tensor):
        return y
    if isinstance(returned, tuple):
        parts = list(returned)
        parts[output] = y  # type: ignore[index]
        make = getattr(type(returned), "_make", type(returned))  # a named tuple has _make
        return make(parts)
    changed = copy.copy(returned)
    changed[output] = y
    return changed


def refuse_changed(call: OutputCall) -> None:
    """Refuse an output that was changed in place after it was recorded."""
    if change_count(call.state) != call.change_count:
        raise Unsupported(
            f"the output of {call.describe()} was changed in place after it was returned, so that "
            "its costate is lost: let the module return a copy (y.clone())."
        )


def refuse_batch_norm(model: nn.Module) -> None:
    """Refuse batch normalisation in training mode, which mixes the samples of a batch."""
    for name, inner in model.named_modules():
        uses_batch = isinstance(inner, BATCH_NORMS) and (
            inner.training or not inner.track_running_stats
        )
        if uses_batch:
            raise Unsupported(
                f"{describe_module(name)} normalises by the batch, so that a sample's loss depends "
                f"on other samples and has no costates of its own. Call .eval() on the "
                f"{type(inner).__name__}, or use LayerNorm or GroupNorm."
            )
