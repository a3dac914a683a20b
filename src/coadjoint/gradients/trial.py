"""Trial: parts of one's own are tried on a few samples before processes share a batch.

A batch can be shared if its gradient is the mean of the gradients of its samples. The package's own
losses, penalties, methods and networks are so. Others are tried on up to four samples, together and
each alone, in evaluation mode; every process tries the same samples and comes to the same end.
"""

from __future__ import annotations

import contextlib
import functools
import types
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..errors import CoadjointError, Unsupported, error_text
from ..networks.chain_calls import BATCH_NORMS
from ..networks.interface import Net
from ..objectives.batch import Batch
from ..objectives.draws import drawing
from ..objectives.losses import Loss, LossLike
from ..sweeps.layout import tensor_of
from ..sweeps.torch_internals import has_hooks
from .evaluation import Evaluation
from .method import Method
from .penalised import Penalised
from .processes import drawing_by

SAMPLES = 4  # that are tried
ENOUGH = 3  # of them; fewer are tried again as soon as a batch has more
CANDIDATES = 32  # samples among which different ones are looked for
SEEDS = (1, 2)  # of what is drawn during a trial
ROOTS = ("coadjoint", "torch", "builtins")  # packages whose functions need no trial
# Relative to the entries of a tensor, and of a gradient also to the largest entry of all.
TOLERANCES = {torch.float32: (1e-2, 1e-4), torch.float64: (1e-6, 1e-10)}
KNOWN_STATE = ("step", "rho")


class Trial:
    """What is known of a method, a network and a loss that belong together."""

    def __init__(self) -> None:
        self.net: Net | None = None
        self.loss: object = None
        self.terms: tuple[bool, bool] | None = None  # whether penalty and loss count
        self.own: tuple[str, ...] = ()  # the parts that are not the package's, in words
        self.tried = 0  # samples that were seen not to depend on each other

    def __reduce__(self) -> tuple[type[Trial], tuple[()]]:
        """A copy begins anew: it may be given another network."""
        return Trial, ()

    def check(
        self, method: Method, net: Net, batch: Batch, loss: LossLike, factors: tuple[float, float]
    ) -> None:
        """Refuse what gives a sample another value or gradient beside others, or keeps a state.

        factors: of the penalty and of the loss. Nothing is done where all parts are the package's,
        and nothing twice, unless one of the arguments is new or there were too few samples.
        """
        terms = (factors[0] != 0, factors[1] != 0)
        code = getattr(loss, "__code__", loss)  # of a lambda that is written anew in each step
        if net is not self.net or code is not self.loss or terms != self.terms:
            self.net, self.loss, self.terms = net, code, terms
            self.own = tuple(own_parts(method, net, loss))
            self.tried = 0
            refuse_batch_norms(net)
        if not self.own or self.tried >= min(SAMPLES, len(batch.sizes)):
            return
        index = different_samples(batch, net.readout)
        if len(index) > max(1, self.tried):
            state = dict(method.state)
            try:
                with each_in_evaluation_mode(net):
                    self._try(Sampler(method, net, batch, loss), index)
            finally:
                method.state.update(state)

    def _try(self, sampler: Sampler, index: list[int]) -> None:
        """Try these samples, together and alone."""
        try:
            together = sampler.evaluate(index)
        except CoadjointError:  # the gradient itself will say it
            return
        alone: list[Evaluation] = []
        for j in index:
            try:
                alone.append(sampler.evaluate([j]))
            except Exception as error:  # whatever a function of one's own raises
                raise Unsupported(
                    f"{len(index)} samples can be evaluated together, but one of them alone "
                    f"cannot: {error_text(error).rstrip('.')}. Processes cannot share a batch so: "
                    f"make {self._named()} a function of one sample and its own steps."
                ) from None
        self._refuse_state(sampler, index)
        found = difference(together, alone)
        if found:
            if difference(together, [sampler.evaluate(index, SEEDS[1])]):
                raise Unsupported(
                    f"{self._named()} draws random numbers in evaluation mode, too, so it cannot "
                    "be seen whether samples depend on each other, and processes cannot share a "
                    "batch: draw in training mode alone."
                )
            raise Unsupported(
                f"{found} depends on the other samples of its batch (or on the padding up to the "
                "longest of them), so processes cannot share a batch: make "
                f"{self._named()} a function of one sample and its own steps."
            )
        self.tried = len(index)

    def _refuse_state(self, sampler: Sampler, index: list[int]) -> None:
        """Refuse a method of one's own whose attributes change from one evaluation to the next.

        It has evaluated these samples before, so what is made once and kept is there already.
        """
        method = sampler.method
        if not is_own(type(method)):
            return
        sampler.evaluate(index)
        before = attributes(method)
        sampler.evaluate(index[:1])
        after = attributes(method)
        names = [name for name in after if after[name] != before.get(name)]
        if names:
            raise Unsupported(
                f"{type(method).__name__} keeps a state of its own ({', '.join(sorted(names))}), "
                "which processes cannot share: name sums over samples in summed_state, or train "
                "with one process."
            )

    def _named(self) -> str:
        """The parts that were tried, for a message."""
        return " and ".join(self.own)


@dataclass(frozen=True)
class Sampler:
    """Evaluates some samples of a batch."""

    method: Method
    net: Net
    batch: Batch
    loss: LossLike

    def evaluate(self, index: Sequence[int], seed: int = SEEDS[0]) -> Evaluation:
        """The evaluation of the samples with these numbers, from the same state every time."""
        part = self.batch.select(index, self.net.readout)
        with drawing_by(seed), drawing(samples=tuple(index)):
            return self.method.evaluate(self.net, part, self.loss)


def difference(together: Evaluation, alone: Sequence[Evaluation]) -> str:
    """What differs, in words, between samples together and alone; "" if nothing does."""
    relative, floor = TOLERANCES.get(together.losses.dtype, TOLERANCES[torch.float32])
    for name in ("losses", "penalties"):
        values = getattr(together, name)
        others = torch.cat([getattr(e, name) for e in alone])
        if not torch.allclose(values, others, relative, relative, equal_nan=True):
            return {"losses": "the loss of a sample", "penalties": "the penalty of a sample"}[name]
    sizes = [largest(g) for e in alone for g in e.gradient.values()]
    least = floor * max(sizes, default=0.0)
    for name, g in together.gradient.items():
        gradients = torch.stack([e.gradient[name] for e in alone])
        allowed = relative * largest(gradients) + least
        if not torch.allclose(g, gradients.mean(0), 0.0, allowed, equal_nan=True):
            return "the gradient is not the mean over samples: that of a sample"
    return ""


def largest(values: Tensor) -> float:
    """The largest size of a finite entry; 0 of none."""
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def own_parts(method: Method, net: Net, loss: LossLike) -> list[str]:
    """The parts of an objective that are not the package's, in words."""
    parts: list[str] = []
    if is_own(loss.value if isinstance(loss, Loss) else loss):
        parts.append("the loss")
    if isinstance(method, Penalised) and not method.penalty.reads_run_only:
        parts.append("the penalty")
    if is_own(type(method)):
        parts.append(f"the method {type(method).__name__}")
    for module in net.modules():
        parts += own_functions(module)
    return list(dict.fromkeys(parts))


def own_functions(module: nn.Module) -> list[str]:
    """What is one's own of a module, apart from the modules inside: its class, a function, a hook.

    Cells made with @co.cell need no trial: their formulas are evaluated entry by entry.
    """
    # torch's attention reads axis 0 as time unless it is told otherwise: there it has the samples.
    if is_own(type(module)) or getattr(module, "batch_first", True) is False:
        return [type(module).__name__]
    names: list[str] = []
    if has_hooks(module):
        names.append(f"the hook of {type(module).__name__}")
    for name, value in vars(module).items():
        if callable(value) and is_own(value):
            names.append(getattr(value, "__name__", name))
    if is_own(getattr(vars(module).get("cell"), "data", None)):
        names.append("the data of the cell")
    return names


def refuse_batch_norms(net: Net) -> None:
    """Refuse normalisation by the batch in training mode, which a trial in eval() cannot see."""
    for module in net.modules():
        uses_batch = isinstance(module, BATCH_NORMS) and (
            module.training or not module.track_running_stats
        )
        if uses_batch:
            raise Unsupported(
                f"{type(module).__name__} normalises by the batch, so that a sample depends on the "
                "others, and processes cannot share a batch: call .eval() on it, or use LayerNorm."
            )


def is_own(value: object) -> bool:
    """Whether a function, a class or an object is neither the package's nor torch's."""
    if isinstance(value, functools.partial):
        return any(is_own(part) for part in (value.func, *value.args, *value.keywords.values()))
    if isinstance(value, str) or not callable(value):
        return False
    place = getattr(value, "__module__", None)  # of an object, that of its class
    return isinstance(place, str) and place.partition(".")[0] not in ROOTS


def different_samples(batch: Batch, readout: str) -> list[int]:
    """The numbers of up to SAMPLES samples that differ in inputs or targets.

    They are taken from the longest and the shortest ones in turn.
    """
    order = batch.sizes.argsort(stable=True).tolist()
    chosen: list[int] = []
    seen: set[object] = set()
    for k in range(min(CANDIDATES, len(order))):
        j = order[-1 - k // 2] if k % 2 == 0 else order[k // 2]
        sample = batch.select([j], readout)
        key = (picture(plain_inputs(sample.u)), picture(sample.y))
        if key not in seen:
            seen.add(key)
            chosen.append(j)
        if len(chosen) == SAMPLES:
            break
    return sorted(chosen)


def plain_inputs(u: object) -> object:
    """The inputs of one sample as a tensor."""
    if isinstance(u, PackedSequence):
        return u.data
    if isinstance(u, list | tuple):
        return tensor_of("u", u[0])
    return u


@contextlib.contextmanager
def each_in_evaluation_mode(net: Net) -> Iterator[None]:
    """Switch every module to eval() inside a `with` block, and each one back to its own mode."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def attributes(method: Method) -> dict[str, object]:
    """Pictures of what a method remembers, by name; steps and sums over samples are left out."""
    known = {*KNOWN_STATE, *method.summed_state}
    values = {name: value for name, value in method.state.items() if name not in known}
    own = {name: v for name, v in vars(method).items() if name not in ("state", "step")}
    return {name: picture(value) for name, value in {**values, **own}.items()}


def picture(value: object, seen: frozenset[int] = frozenset()) -> object:
    """A hashable picture of an object's content, by which two states of it are compared.

    seen: the objects that hold this one, by their ids.
    """
    if isinstance(value, Tensor):
        entries = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), zlib.crc32(entries.numpy().tobytes())
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, types.FunctionType | types.MethodType | type) or id(value) in seen:
        return id(value)
    inner = seen | {id(value)}
    if isinstance(value, dict):
        return tuple((picture(k, inner), picture(v, inner)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return tuple(picture(v, inner) for v in value)
    if isinstance(value, set | frozenset):
        return frozenset(picture(v, inner) for v in value)
    try:
        parts = value.__reduce_ex__(2)  # what a copy is made of
    except Exception:  # whatever an object raises that cannot be copied
        return picture(vars(value), inner) if hasattr(value, "__dict__") else id(value)
    listed = [list(part) if isinstance(part, Iterator) else part for part in parts]
    return picture(listed, inner)
