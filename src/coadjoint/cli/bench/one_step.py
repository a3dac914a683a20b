"""Calls of one step, as decoders and agents make them: ours against torch.nn's."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from ...nn import cells, modules
from .goals import LIMITS, ONE_STEP, Contest, Contests, Pair
from .problems import Run, Size, gradient_by_name

STEPS = 100  # of a loop with one backward
State = Tensor | tuple[Tensor, Tensor]  # h, or (h, c) of an lstm


def one_step(cell: str, size: Size, device: str, peers: tuple[str, ...]) -> Contests:
    """A module and its cell, called without gradients, and in a loop with one backward.

    cell: "nn.LSTM" stands for nn.LSTM with T = 1 and nn.LSTMCell, with d inputs. size: (1, B, d).
    Nothing unless peer "torch" takes part.
    """
    if "torch" not in peers:
        return
    name = cell.removeprefix("nn.")
    for kind, ours in ((name, getattr(modules, name)), (f"{name}Cell", cell_class(name))):
        yield from compare(kind, ours, size, device)


def cell_class(name: str) -> type[nn.Module]:
    """Our cell of a module: LSTMCell of "LSTM"."""
    found: type[nn.Module] = getattr(cells, f"{name}Cell")
    return found


def compare(kind: str, our_class: type[nn.Module], size: Size, device: str) -> Contests:
    """A call without gradients, and the step of a loop; kind: the class, such as "LSTMCell"."""
    _, B, d = size
    theirs = getattr(nn, kind)(d, d, device=device)
    ours = our_class(d, d, device=device)
    ours.load_state_dict(theirs.state_dict())
    # a module reads a sequence of one step and keeps the states of its layers, here one
    before = () if kind.endswith("Cell") else (1,)
    u = torch.randn(*before, B, d, device=device)
    h = torch.zeros(*before, B, d, device=device)
    state: State = (h, h) if kind.startswith("LSTM") else h
    engine = str(getattr(ours, "engine", ""))
    for name, run, steps in (
        ("call without gradients", call, 1),
        (f"step of {STEPS}, one backward", loop, STEPS),
    ):
        runs: dict[str, Run] = {
            name: functools.partial(run, ours, u, state),
            "torch.nn": functools.partial(run, theirs, u, state),
        }
        pair = Pair(name, "torch.nn", LIMITS[ONE_STEP], same=True)
        yield Contest(f"nn.{kind}", size, engine, runs, (pair,), steps)


def call(module: nn.Module, u: Tensor, state: State) -> dict[str, Tensor]:
    """One call without gradients, and its output."""
    with torch.no_grad():
        return {"h": first(module(u, state))}


def loop(module: nn.Module, u: Tensor, state: State) -> dict[str, Tensor]:
    """STEPS calls, each from the state of the one before, and the gradient of the last output."""
    is_cell = u.dim() == 2
    for _ in range(STEPS):
        out = module(u, state)
        state = out if is_cell else out[1]
    return gradient_by_name(first(out).sum(), dict(module.named_parameters()))


def first(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The outputs of a module, or h of a cell."""
    return out[0] if isinstance(out, tuple) else out
