"""Echo state networks: a fixed random network, and a readout solved in closed form.

x_t = (1 - leak) x_{t-1} + leak tanh(W x_{t-1} + R u_t + b)      W, R, b drawn once and fixed
y   = V phi(x) + b_o                    V by ridge regression, phi an expansion of the state

Jaeger, GMD report 148 (2001); Lukosevicius & Jaeger, Computer Science Review 3 (2009).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..cells.activations import Activation
from ..errors import MAX_COUNT, InputError, KindError, NumericalError, choose, real, whole_number
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from ..sweeps.costates import Costates
from ..sweeps.layout import Sequences, tensor_of
from .expansions import EXPANSIONS, KERNELS
from .interface import Lengths, check_positive
from .network import Network
from .readout import TensorOptions
from .reservoir_weights import draw_reservoir
from .ridge import ROWS_AT_ONCE, one_hot, solve_triangle, update_triangle
from .trajectory import Trajectory

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


class Reservoir(nn.Module):
    """An echo state network.

    `reservoir.network` is a co.Network of the leaky cell whose W, R, b and leak are fixed.

    radius       the largest |eigenvalue| of W; below 1 the past fades, slowly if near 1
    leak         in (0, 1]; small values make the units slow
    density      the share of units that each unit receives: round(density hidden) incoming links,
                 at least one
    input_scale  R is uniform on +-input_scale
    bias_scale   b is uniform on +-bias_scale
    readout      "every": a target for every step; "last": one for each sequence
    washout      the number of first steps, which depend on the arbitrary x0, that are left out of
                 fits, scores and losses
    ridge        r in min |Y - Phi V'|^2 + r |V|^2; b_o is not penalised
    expansion    phi: "linear", x; "squares", x and x * x; "rbf" and "polynomial", kernel ridge
                 regression on the states with k(x, s) = exp(-gamma |x - s|^2) or
                 (1 + gamma x.s)^degree; degree 2 contains all products. A kernel keeps every state
                 it was fitted to, and solves a system of as many equations.
    gamma        of the kernels; default 1 / hidden

    A seed determines the reservoir, for every type and device.

    Example:
        A reservoir that has learned a linear map of its state reproduces it:

        >>> import torch, coadjoint as co
        >>> reservoir = co.Reservoir(1, 20, 1, dtype=torch.float64)
        >>> u = torch.linspace(-1, 1, 60, dtype=torch.float64)[:, None, None]
        >>> y = reservoir(u).x[1:, :, :1] + 2.0
        >>> round(reservoir.fit(u, y).score(u, y), 6)
        1.0
    """

    A: Tensor  # the readout of an expansion, [features, outputs]; "linear" has the network's V
    c: Tensor  # its constant, [outputs]
    support: Tensor  # the states that a kernel compares with
    fitted: Tensor

    def __init__(
        self,
        inputs: int,
        hidden: int,
        outputs: int,
        *,
        radius: float = 0.9,
        leak: float = 1.0,
        density: float = 0.1,
        input_scale: float = 1.0,
        bias_scale: float = 0.0,
        activation: Activation = "tanh",
        readout: str = "every",
        washout: int = 0,
        ridge: float = 1e-8,
        expansion: str = "linear",
        gamma: float | None = None,
        degree: int = 2,
        seed: int = 0,
        engine: str = "auto",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.network = Network(
            "leaky",
            inputs=inputs,
            hidden=hidden,
            outputs=outputs,
            activation=activation,
            engine=engine,
            readout=choose("readout", readout, ("every", "last")),
            dtype=dtype,
            device=device,
        )
        gamma = 1 / hidden if gamma is None else gamma
        for name, value in (("radius", radius), ("gamma", gamma)):
            real(name, value, 0, above=True)
        for name, value in (("leak", leak), ("density", density)):
            real(name, value, 0, 1, above=True)
        scales = {"input_scale": input_scale, "bias_scale": bias_scale, "ridge": ridge}
        for name, value in scales.items():
            real(name, value, 0)
        whole_number("washout", washout, 0, MAX_COUNT)
        whole_number("degree", degree, 1, MAX_COUNT)
        whole_number("seed", seed, 0, 2**63 - 1)
        self.washout = washout
        self.ridge = ridge
        self.gamma = gamma
        self.degree = degree
        self.expansion = choose("expansion", expansion, {*EXPANSIONS, *KERNELS})
        links = max(1, round(density * hidden))
        draw_reservoir(self.network, radius, leak, links, input_scale, bias_scale, seed)
        make: TensorOptions = {"dtype": torch.float64, "device": device}
        self.register_buffer("A", torch.zeros(0, outputs, **make))
        self.register_buffer("c", torch.zeros(outputs, **make))
        self.register_buffer("support", torch.zeros(0, hidden, **make))
        self.register_buffer("fitted", torch.tensor(False, device=device))
        self.forget()

    def extra_repr(self) -> str:
        """The text between the brackets of repr(reservoir)."""
        return (
            f"expansion={self.expansion!r}, washout={self.washout}, ridge={self.ridge:g}, "
            f"fitted={bool(self.fitted)}"
        )

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Tensor], prefix: str, *rest: object
    ) -> None:
        """Load as torch does, after A and support have been given the shapes that were saved."""
        for name in ("A", "support"):  # their length is that of the fit that was saved
            value = state_dict.get(prefix + name)
            if value is not None:
                setattr(self, name, getattr(self, name).new_empty(value.shape))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(
        self, u: Sequences, lengths: Lengths | None = None, x0: Tensor | None = None
    ) -> Trajectory:
        """The run of the network. Its y_hat is the prediction only if the expansion is "linear"."""
        run: Trajectory = self.network(u, lengths, x0)
        return run

    def features(self, x: Tensor, support: Tensor | None = None) -> Tensor:
        """phi(x), [..., hidden] -> [..., features]; of a kernel, k(x, s) for each row s of support.

        support  default: the states of the last fit
        """
        if self.expansion not in KERNELS:
            return EXPANSIONS[self.expansion](x)
        if support is None:
            support = self.support
        return KERNELS[self.expansion](x, support, self.gamma, self.degree)

    def read(self, x: Tensor) -> Tensor:
        """The prediction y = V phi(x) + b_o of states [..., hidden]."""
        if not self.fitted:
            raise InputError(
                "this reservoir has no readout yet; call fit(u, y) first, or load a fitted "
                "state_dict."
            )
        if self.expansion == "linear":
            y: Tensor = nn.functional.linear(x, self.network.V, self.network.b_o)
            return y
        # A and c are kept in double precision, in which they were solved.
        return (self.features(x.to(self.A.dtype)) @ self.A + self.c).to(x.dtype)

    def forget(self) -> Reservoir:
        """Drop everything that `accumulate` has collected; a readout already solved stays."""
        self._triangle: Tensor | None = None  # of the rows (1, phi(x), y): see networks/ridge.py
        self._kept: list[tuple[Tensor, Tensor]] = []  # states and targets, for a kernel
        return self

    @torch.no_grad()
    def accumulate(
        self,
        u: Sequences,
        y: ArrayLike,
        lengths: Lengths | None = None,
        x0: Tensor | None = None,
    ) -> Tensor:
        """Add a batch to the fit. Returns each sample's last state, the x0 of its continuation.

        u as a network takes it; y [T, B, outputs] or class numbers [T, B] (readout "every"),
        [B, ...] (readout "last"). With x0 the sequences continue, so no steps are washed out.
        """
        run = self.forward(u, lengths, x0)
        x, y = self._examples(run, y, x0 is not None)
        x = x.double()
        target = self._values(y).double()
        if self.expansion in KERNELS:
            self._kept.append((x, target))
            return run.state
        parts = zip(x.split(ROWS_AT_ONCE), target.split(ROWS_AT_ONCE), strict=True)
        for x_part, y_part in parts:
            phi = self.features(x_part)
            rows = torch.cat([torch.ones_like(phi[:, :1]), phi, y_part], 1)
            self._triangle = update_triangle(self._triangle, rows)
        return run.state

    @torch.no_grad()
    def solve(self, ridge: float | None = None) -> Reservoir:
        """Solve the readout from the accumulated batches.

        ridge  replaces the reservoir's own from now on; the batches need not be swept again
        """
        self.ridge = real("ridge", self.ridge if ridge is None else ridge, 0)
        if self._triangle is None and not self._kept:
            raise InputError(
                "there is no data yet; call fit(u, y), or accumulate(u, y) before solve()."
            )
        if self.expansion in KERNELS:
            A, c = self._kernel_ridge()
        else:
            assert self._triangle is not None
            A, c = solve_triangle(self._triangle, self.network.outputs, self.ridge)
        if self.expansion == "linear":
            self.network.V.copy_(A.T)
            self.network.get_parameter("b_o").copy_(c)
        else:
            self.A = A.contiguous()  # as a loaded one is: products then have the same bits
            self.c = c
        self.fitted.fill_(True)
        return self

    def _kernel_ridge(self) -> tuple[Tensor, Tensor]:
        """(A, c) of y = A' k(x) + c: A = (K + r I)^{-1} (Y - mean), c = mean of the targets Y.

        K holds k(x, s) of all accumulated states, which become the support; r is `ridge`.
        """
        X = torch.cat([states for states, _ in self._kept])
        Y = torch.cat([targets for _, targets in self._kept])
        K = self.features(X, X)
        K.diagonal().add_(self.ridge)
        L, failed = torch.linalg.cholesky_ex(K)
        if failed:
            raise NumericalError(
                f"the {len(K)} states of the kernel are too similar for ridge = {self.ridge:g}; "
                "raise ridge."
            )
        self.support = X
        return torch.cholesky_solve(Y - Y.mean(0), L), Y.mean(0)

    def fit(
        self,
        u: Sequences | Batch | Iterable[object],
        y: ArrayLike | None = None,
        lengths: Lengths | None = None,
        *,
        chained: bool = False,
    ) -> Reservoir:
        """Solve the readout from (u, y), or from batches given in place of u.

        batches  an iterable of (u, y), (u, y, lengths) or co.Batch, read once, one at a time
        chained  each batch continues the sequences of the one before. A series that is longer
                 than memory is then one series, washed out once.
        """
        if y is None and (isinstance(u, Tensor) or not isinstance(u, Iterable | Batch)):
            raise KindError("fit expects u and y, or an iterable of (u, y); got no y.")
        if y is not None:
            u = [Batch(u, y, lengths)]
        elif isinstance(u, Batch):
            u = [u]
        self.forget()
        state = None
        for batch in _batches(u):
            if batch.mask is not None or batch.weight is not None:
                raise InputError(
                    "fitting a reservoir does not support mask or weight; leave entries out "
                    "with lengths= or washout=."
                )
            x0 = state if chained and state is not None else batch.x0
            state = self.accumulate(batch.u, batch.y, batch.lengths, x0)
        return self.solve()

    @torch.no_grad()
    def predict(
        self, u: Sequences, lengths: Lengths | None = None, x0: Tensor | None = None
    ) -> Tensor:
        """The prediction at every step [T, B, outputs], zero in padding, or of each sequence."""
        run = self.forward(u, lengths, x0)
        if self.network.readout == "last":
            return self.read(run.state)
        is_padding = ~run.mask[1:, :, None].to(run.x.device)
        return self.read(run.x[1:]).masked_fill(is_padding, 0)

    def classify(
        self, u: Sequences, lengths: Lengths | None = None, x0: Tensor | None = None
    ) -> Tensor:
        """The class with the largest output: [T, B] at every step, or [B] (readout "last")."""
        return self.predict(u, lengths, x0).argmax(-1)

    @torch.no_grad()
    def score(
        self,
        u: Sequences,
        y: ArrayLike,
        lengths: Lengths | None = None,
        x0: Tensor | None = None,
    ) -> float:
        """The share of correct classes, or R^2 = 1 - |y_hat - y|^2 / |y - mean|^2 of numbers.

        Steps that are washed out do not count; with x0 the sequences continue, and all steps do.
        The normalised root mean square error is sqrt(1 - R^2).
        """
        x, y = self._examples(self.forward(u, lengths, x0), y, x0 is not None)
        y_hat = self.read(x)
        if not y.is_floating_point():
            return float((y_hat.argmax(-1) == y).double().mean())
        error = (y_hat - y).double().square().sum()
        spread = (y - y.mean(0)).double().square().sum()
        return float(1 - error / spread)

    @torch.no_grad()
    def generate(
        self,
        u: Sequences,
        steps: int,
        lengths: Lengths | None = None,
        x0: Tensor | None = None,
    ) -> Tensor:
        """Read u, then feed each output back as the next input: [steps, B, outputs]."""
        net = self.network
        if net.inputs != net.outputs:
            raise InputError(
                "outputs are fed back as inputs, so there must be as many outputs as inputs; "
                f"this reservoir has {net.outputs} outputs and {net.inputs} inputs."
            )
        check_positive(steps=steps)
        x = self.forward(u, lengths, x0).state
        out = [self.read(x)]
        for t in range(1, steps):
            x = net.advance(out[-1], x)
            out.append(self.read(x))
            if not torch.isfinite(out[-1]).all():
                dtype = str(x.dtype).removeprefix("torch.")
                raise NumericalError(
                    f"the series leaves the range of {dtype} after {t} steps; raise ridge."
                )
        return torch.stack(out)

    def costates(
        self,
        u: Sequences,
        y: ArrayLike,
        loss: LossLike = "squared",
        lengths: Lengths | None = None,
        x0: Tensor | None = None,
    ) -> Costates:
        """lam_t = dL/dx_t through the fitted readout, with any expansion.

        Steps that are washed out have no loss.
        """
        net = self.network
        run = self.forward(u, lengths, x0)
        rows = run.layout.rows
        y = tensor_of("the target y", y)
        if loss == "squared" and not y.is_floating_point():  # classes, fitted as one-hot vectors
            y = self._values(y).to(net.V)
        mask = None
        if net.readout == "every" and self.washout and x0 is None:
            counts = torch.arange(rows.T, device=net.V.device) >= self.washout
            mask = counts[:, None].expand(rows.T, rows.B).to(net.V)
        if self.expansion == "linear" and self.fitted:  # V and b_o are the network's own
            return run.costates(loss, y, mask=mask)
        if not run.run.x.requires_grad:
            # No weight is trained, so there is no graph yet. One that begins at x0 makes the
            # expansion differentiable by the states.
            start = run.x[0].detach().requires_grad_()
            with torch.enable_grad():
                run = self.forward(u, lengths, start)
        with torch.enable_grad():
            x = run.run.last if net.readout == "last" else run.run.x[rows.B :]
            values = run.loss_from_rows(loss, y, mask, "sum", self.read(x))
        return run.costates(values)

    def _values(self, y: Tensor) -> Tensor:
        """Targets as numbers, [..., outputs]; class numbers [...] become one-hot vectors."""
        return y if y.is_floating_point() else one_hot(y, self.network.outputs)

    def _examples(self, run: Trajectory, y: ArrayLike, continued: bool) -> tuple[Tensor, Tensor]:
        """The states and targets that count, one row for each step, or each sample if "last".

        continued  the run continues earlier sequences, so no steps are washed out
        """
        every = self.network.readout == "every"
        y = tensor_of("the target y", y, run.x)
        # The axes that y begins with, [T, B] or [B]; run.mask is [T + 1, B], with x_0.
        if every:
            lead = [*run.mask[1:].shape]
        else:
            lead = [run.mask.shape[1]]
        with_outputs = [*lead, self.network.outputs]
        expected = with_outputs if y.is_floating_point() else lead
        if list(y.shape) != expected:
            raise InputError(
                f"the target y has shape {list(y.shape)}; with readout="
                f"'{self.network.readout}' expected {with_outputs}, or {lead} of class numbers."
            )
        x = run.state
        if every:
            counts = run.mask[1:].clone()
            counts[: 0 if continued else self.washout] = False
            if not counts.any():
                raise InputError(
                    f"washout = {self.washout} leaves out all steps of sequences of {lead[0]}; "
                    "use longer sequences or a smaller washout."
                )
            counts = counts.to(run.x.device)
            x = run.x[1:][counts]
            y = y[counts]
        if y.is_floating_point() and not torch.isfinite(y).all():
            raise InputError(
                "the target y holds NaN or inf on steps that count; clean it, or shorten it with "
                "lengths=."
            )
        return x, y


def _batches(batches: Iterable[object]) -> Iterator[Batch]:
    """Each item of an iterable as a Batch."""
    for item in batches:
        if isinstance(item, Batch):
            yield item
        elif isinstance(item, tuple | list) and 2 <= len(item) <= 3:
            yield Batch(*item)
        else:
            raise KindError(
                "fit expects batches (u, y), (u, y, lengths) or co.Batch; got "
                f"{type(item).__name__}."
            )
