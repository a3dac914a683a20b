"""Echo state networks: a fixed random network, and a readout solved in closed form.

x_t = (1 - leak) x_{t-1} + leak tanh(W x_{t-1} + R u_t + b)      W, R, b drawn once and fixed
y   = V phi(x) + b_o                                             V by ridge regression, phi an expansion of the state

Jaeger, GMD report 148 (2001); Lukosevicius & Jaeger, Computer Science Review 3 (2009).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..cells.activations import Activation
from ..errors import MAX_COUNT, InputError, KindError, NumericalError, choose, real, whole_number
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from ..sweeps.costates import Costates
from ..sweeps.layout import Sequences, tensor_of
from .interface import check_positive
from .network import Network, Trajectory
from .ridge import ROWS_AT_ONCE, one_hot, solve_triangle, update_triangle

DENSE = 500  # up to this size all eigenvalues are found; beyond, the largest alone


def sparse(hidden: int, links: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each unit hears `links` others (or itself): (sources [hidden, links], weights uniform on +-1), float64."""
    sources = torch.stack(
        [torch.randperm(hidden, generator=generator)[:links] for _ in range(hidden)]
    )
    return sources, 2 * torch.rand(hidden, links, generator=generator, dtype=torch.float64) - 1


def spectral_radius(sources: Tensor, weights: Tensor) -> float:
    """The largest |eigenvalue| of the matrix with weights[i, k] in row i, column sources[i, k]."""
    d, j, w = len(sources), sources.numpy(), weights.numpy()
    if d > DENSE and (found := krylov(lambda x: (w * x[j]).sum(1), d)) is not None:
        return found
    W = np.zeros((d, d))
    np.put_along_axis(W, j, w, 1)
    return float(np.abs(np.linalg.eigvals(W)).max())


def krylov(
    times: Callable[[np.ndarray], np.ndarray], d: int, size: int = 120, keep: int = 40
) -> float | None:
    """The largest |eigenvalue| of a real matrix known by its products alone; None if it did not settle.

    Arnoldi's recurrence A Q_m = Q_m H + q h', begun again from the invariant subspace of H that holds the `keep` largest
    eigenvalues: Stewart, A Krylov-Schur algorithm for large eigenproblems, SIAM J. Matrix Anal. 23 (2001).
    """
    Q, H, begin = (
        np.zeros((size + 1, d)),
        np.zeros((size + 1, size)),
        0,
    )  # the basis in rows; the last row of H is h
    Q[0] = np.random.default_rng(0).standard_normal(d)
    Q[0] /= np.linalg.norm(Q[0])
    for _ in range(200):
        for m in range(begin, size):
            q = times(Q[m])
            for _ in range(2):  # once is not orthogonal enough
                c = Q[: m + 1] @ q
                q -= c @ Q[: m + 1]
                H[: m + 1, m] += c
            H[m + 1, m] = np.linalg.norm(q)
            if H[m + 1, m] <= 1e-13 * np.abs(H).max():
                return None  # an invariant subspace, which need not hold the largest
            Q[m + 1] = q / H[m + 1, m]
        values, vectors = np.linalg.eig(H[:size])
        order = np.argsort(-np.abs(values))
        top = order[0]
        if abs(H[size] @ vectors[:, top]) <= 1e-12 * abs(values[top]):
            return float(abs(values[top]))
        kept: list[
            np.ndarray
        ] = []  # real vectors: of a conjugate pair the real and the imaginary part
        for i in order[values[order].imag >= 0]:
            kept += (
                [vectors[:, i].real]
                if values[i].imag == 0
                else [vectors[:, i].real, vectors[:, i].imag]
            )
            if len(kept) >= keep:
                break
        begin, P = len(kept), np.linalg.qr(np.stack(kept, 1))[0]
        Q[: begin + 1] = np.concatenate([P.T @ Q[:size], Q[size:]])
        head, h = P.T @ H[:size] @ P, H[size] @ P
        H[:] = 0
        H[:begin, :begin], H[begin, :begin] = head, h
    return None


def squares(x: Tensor) -> Tensor:
    return torch.cat([x, x * x], -1)


def rbf(x: Tensor, s: Tensor, gamma: float, degree: int) -> Tensor:
    return torch.exp(
        -gamma * (x.square().sum(-1, keepdim=True) + s.square().sum(-1) - 2 * (x @ s.T))
    )


def polynomial(x: Tensor, s: Tensor, gamma: float, degree: int) -> Tensor:
    return (1 + gamma * (x @ s.T)) ** degree


EXPANSIONS: dict[str, Callable[[Tensor], Tensor]] = {"linear": lambda x: x, "squares": squares}
KERNELS: dict[str, Callable[[Tensor, Tensor, float, int], Tensor]] = {
    "rbf": rbf,
    "polynomial": polynomial,
}


class Reservoir(nn.Module):
    """An echo state network: `reservoir.network` is a co.Network of the leaky cell whose W, R, b and leak are fixed.

    radius       the largest |eigenvalue| of W; below 1 the past fades, close to 1 slowly
    leak         in (0, 1]: small is slow
    density      the share of units that each unit hears: round(density hidden) incoming links, at least one
    input_scale  R uniform on +- so much; bias_scale  b likewise
    readout      "every": a target for every step; "last": one for each sequence
    washout      the first steps of a sequence, which still remember the arbitrary x0: left out of fits, scores and losses
    ridge        r in min |Y - Phi V'|^2 + r |V|^2; b_o is free
    expansion    phi: "linear", x; "squares", x and x * x; "rbf" and "polynomial", kernel ridge regression on the states with
                 k(x, s) = exp(-gamma |x - s|^2) or (1 + gamma x.s)^degree (degree 2 has all products); gamma is 1/hidden if
                 not given. A kernel keeps every state it was fitted to and solves a system of their number.

    The same seed gives the same reservoir, in every type and on every device.
    """

    A: Tensor  # readout of an expansion [features, outputs]; "linear" has the network's V
    c: Tensor
    support: Tensor  # the states a kernel compares with
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
            "leaky", inputs=inputs, hidden=hidden, outputs=outputs, activation=activation, engine=engine,
            readout=choose("readout", readout, ("every", "last")), dtype=dtype, device=device,
        )  # fmt: skip
        gamma = 1 / hidden if gamma is None else gamma
        for name, value in (("radius", radius), ("gamma", gamma)):
            real(name, value, 0, above=True)
        for name, value in (("leak", leak), ("density", density)):
            real(name, value, 0, 1, above=True)
        for name, value in (
            ("input_scale", input_scale),
            ("bias_scale", bias_scale),
            ("ridge", ridge),
        ):
            real(name, value, 0)
        for name, count, least in (
            ("washout", washout, 0),
            ("degree", degree, 1),
            ("seed", seed, 0),
        ):
            whole_number(name, count, least, 2**63 - 1 if name == "seed" else MAX_COUNT)
        self.washout, self.ridge, self.gamma, self.degree = washout, ridge, gamma, degree
        self.expansion = choose("expansion", expansion, {*EXPANSIONS, *KERNELS})
        self._draw(radius, leak, max(1, round(density * hidden)), input_scale, bias_scale, seed)
        make: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self.register_buffer("A", torch.zeros(0, outputs, **make))
        self.register_buffer("c", torch.zeros(outputs, **make))
        self.register_buffer("support", torch.zeros(0, hidden, **make))
        self.register_buffer("fitted", torch.tensor(False, device=device))
        self.forget()

    def _draw(
        self,
        radius: float,
        leak: float,
        links: int,
        input_scale: float,
        bias_scale: float,
        seed: int,
    ) -> None:
        net, generator = self.network, torch.Generator().manual_seed(seed)
        sources, weights = sparse(net.hidden, links, generator)
        weights *= radius / spectral_radius(sources, weights)
        W = torch.zeros(net.hidden, net.hidden, dtype=torch.float64).scatter_(1, sources, weights)
        uniform = lambda p, scale: (
            scale * (2 * torch.rand(p.shape, generator=generator, dtype=torch.float64) - 1)
        )
        values = {"W": W, "R": uniform(net.R, input_scale), "b": uniform(net.b, bias_scale)}
        values["p.leak"] = torch.full((net.hidden,), leak, dtype=torch.float64)
        with torch.no_grad():
            for name, value in values.items():
                net.get_parameter(name).copy_(value).requires_grad_(False)
            net.V.zero_()
            net.get_parameter("b_o").zero_()

    def extra_repr(self) -> str:
        return f"expansion={self.expansion!r}, washout={self.washout}, ridge={self.ridge:g}, fitted={bool(self.fitted)}"

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name in ("A", "support"):  # their length is that of the fit
            if (value := state_dict.get(prefix + name)) is not None:
                setattr(self, name, getattr(self, name).new_empty(value.shape))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, u: Sequences, lengths: Any = None, x0: Tensor | None = None) -> Trajectory:
        """The run of the network; its y_hat is the prediction if the expansion is "linear" (see `predict`)."""
        return self.network(u, lengths, x0)

    def features(self, x: Tensor, support: Tensor | None = None) -> Tensor:
        """phi(x); for a kernel, k(x, s) for each s of the support."""
        if self.expansion in KERNELS:
            return KERNELS[self.expansion](
                x, self.support if support is None else support, self.gamma, self.degree
            )
        return EXPANSIONS[self.expansion](x)

    def read(self, x: Tensor) -> Tensor:
        """y = V phi(x) + b_o of states [..., hidden]."""
        if not self.fitted:
            raise InputError(
                "this reservoir has no readout yet; call fit(u, y) first, or load a fitted state_dict."
            )
        if self.expansion == "linear":
            return nn.functional.linear(x, self.network.V, self.network.b_o)
        return (self.features(x.to(self.A.dtype)) @ self.A + self.c).to(x.dtype)

    def forget(self) -> Reservoir:
        """Drop what `accumulate` has gathered; a readout already solved stays."""
        self._factor: Tensor | None = (
            None  # the R of a QR of (1, phi(x), y), one row for each example
        )
        self._kept: list[tuple[Tensor, Tensor]] = []  # states and targets, for a kernel
        return self

    @torch.no_grad()
    def accumulate(
        self, u: Sequences, y: Tensor, lengths: Any = None, x0: Tensor | None = None
    ) -> Tensor:
        """Take a batch into the fit; returns each sample's last state, from which its next part may go on as x0.

        u as a network takes it; y [T, B, outputs] or class numbers [T, B] (readout "every"), [B, ...] (readout "last").
        With x0 the sequences continue: nothing is washed out."""
        run = self.network(u, lengths, x0)
        x, target = self._examples(run, y, x0 is not None)
        x, target = x.double(), self._values(target).double()
        if self.expansion in KERNELS:
            self._kept.append((x, target))
            return run.state
        for part, wanted in zip(x.split(ROWS_AT_ONCE), target.split(ROWS_AT_ONCE), strict=True):
            phi = self.features(part)
            self._factor = update_triangle(
                self._factor, torch.cat([torch.ones_like(phi[:, :1]), phi, wanted], 1)
            )
        return run.state

    @torch.no_grad()
    def solve(self, ridge: float | None = None) -> Reservoir:
        """The readout of what was accumulated; another ridge needs no other sweep."""
        self.ridge = real("ridge", self.ridge if ridge is None else ridge, 0)
        if self._factor is None and not self._kept:
            raise InputError(
                "nothing was accumulated; call fit(u, y), or accumulate(u, y) before solve()."
            )
        if self.expansion in KERNELS:
            A, c = self._kernel_ridge()
        else:
            assert self._factor is not None
            A, c = solve_triangle(self._factor, self.network.outputs, self.ridge)
        if self.expansion == "linear":
            self.network.V.copy_(A.T)
            self.network.get_parameter("b_o").copy_(c)
        else:
            self.A, self.c = A.contiguous(), c  # as it will be loaded: the same bits
        self.fitted.fill_(True)
        return self

    def _kernel_ridge(self) -> tuple[Tensor, Tensor]:
        """A = (K + r I)^{-1} (Y - mean), c = mean"""
        X, Y = (torch.cat(parts) for parts in zip(*self._kept, strict=True))
        K = self.features(X, X)
        K.diagonal().add_(self.ridge)
        L, failed = torch.linalg.cholesky_ex(K)
        if failed:
            raise NumericalError(
                f"the kernel's {len(K)} states are too alike for ridge = {self.ridge:g}; raise ridge."
            )
        self.support = X
        return torch.cholesky_solve(Y - Y.mean(0), L), Y.mean(0)

    def fit(
        self, u: Any, y: Tensor | None = None, lengths: Any = None, *, chained: bool = False
    ) -> Reservoir:
        """Solve the readout: fit(u, y), or fit(batches) of an iterable of (u, y), (u, y, lengths) or co.Batch.

        Batches are read once, one at a time. chained: each goes on where the sequences of the one before ended, so that
        a series longer than the memory is one series, washed out once."""
        if y is None and (isinstance(u, Tensor) or not isinstance(u, Iterable | Batch)):
            raise KindError("fit expects u and y, or an iterable of (u, y); got no y.")
        batches = [Batch(u, y, lengths)] if y is not None else [u] if isinstance(u, Batch) else u
        self.forget()
        state = None
        for part in batches:
            if not isinstance(part, Batch) and not (
                isinstance(part, tuple | list) and 2 <= len(part) <= 3
            ):
                raise KindError(
                    f"fit expects batches (u, y), (u, y, lengths) or co.Batch; got {type(part).__name__}."
                )
            b = part if isinstance(part, Batch) else Batch(*part)
            if b.mask is not None or b.weight is not None:
                raise InputError(
                    "a reservoir's fit knows no mask or weight; leave entries out with lengths= or washout=."
                )
            state = self.accumulate(
                b.u, b.y, b.lengths, state if chained and state is not None else b.x0
            )
        return self.solve()

    @torch.no_grad()
    def predict(self, u: Sequences, lengths: Any = None, x0: Tensor | None = None) -> Tensor:
        """y at every step [T, B, outputs] (padding is zero), or for each sequence [B, outputs]."""
        run = self.network(u, lengths, x0)
        if self.network.readout == "last":
            return self.read(run.state)
        return self.read(run.x[1:]).masked_fill(~run.mask[1:, :, None].to(run.x.device), 0)

    def classify(self, u: Sequences, lengths: Any = None, x0: Tensor | None = None) -> Tensor:
        """The class of the largest output."""
        return self.predict(u, lengths, x0).argmax(-1)

    @torch.no_grad()
    def score(
        self, u: Sequences, y: Tensor, lengths: Any = None, x0: Tensor | None = None
    ) -> float:
        """The share of classes that are right, or R^2 = 1 - |y_hat - y|^2 / |y - mean|^2 (the normalised root mean square
        error is sqrt(1 - R^2))."""
        x, y = self._examples(self.network(u, lengths, x0), y, x0 is not None)
        found = self.read(x)
        if not y.is_floating_point():
            return float((found.argmax(-1) == y).double().mean())
        return float(
            1 - (found - y).double().square().sum() / (y - y.mean(0)).double().square().sum()
        )

    @torch.no_grad()
    def generate(
        self, u: Sequences, steps: int, lengths: Any = None, x0: Tensor | None = None
    ) -> Tensor:
        """Read u, then feed each output back as the next input: the `steps` values that follow, [steps, B, outputs]."""
        net = self.network
        if net.inputs != net.outputs:
            raise InputError(
                f"outputs are fed back as inputs, and this reservoir has {net.outputs} and {net.inputs}; expected as many."
            )
        check_positive(steps=steps)
        x = net(u, lengths, x0).state
        out = [self.read(x)]
        for t in range(1, steps):
            x = net.advance(out[-1], x)
            out.append(self.read(x))
            if not torch.isfinite(out[-1]).all():
                raise NumericalError(
                    f"the series leaves the range of {str(x.dtype)[6:]} after {t} steps; raise ridge."
                )
        return torch.stack(out)

    def costates(
        self,
        u: Sequences,
        y: Tensor,
        loss: LossLike = "squared",
        lengths: Any = None,
        x0: Tensor | None = None,
    ) -> Costates:
        """lam_t = dL/dx_t through the fitted readout, whatever its expansion; washed out steps have no loss."""
        net = self.network
        run = net(u, lengths, x0)
        T, B = run.layout.rows.T, run.layout.rows.B
        y = tensor_of("the target y", y)
        if loss == "squared" and not y.is_floating_point():
            y = self._values(y).to(net.V)
        mask = None
        if net.readout == "every" and self.washout and x0 is None:
            mask = (
                (torch.arange(T, device=net.V.device) >= self.washout)[:, None]
                .expand(T, B)
                .to(net.V)
            )
        if self.expansion == "linear" and self.fitted:
            return run.costates(loss, y, mask=mask)
        if not run.run.x.requires_grad:  # a graph from x0 on, for the readout's own derivative
            start = run.x[0].detach().requires_grad_()
            with torch.enable_grad():
                run = net(u, lengths, start)
        with torch.enable_grad():
            x = run.run.last if net.readout == "last" else run.run.x[B:]
            values = run._loss(loss, y, mask, "sum", self.read(x))
        return run.costates(values)

    def _values(self, y: Tensor) -> Tensor:
        """Targets [N, outputs]; classes as ones among zeros."""
        return y if y.is_floating_point() else one_hot(y, self.network.outputs)

    def _examples(self, run: Trajectory, y: Any, continued: bool) -> tuple[Tensor, Tensor]:
        """The states and targets that count, in rows."""
        every, outputs = self.network.readout == "every", self.network.outputs
        y = tensor_of("the target y", y, run.x)
        lead = [*run.mask[1:].shape] if every else [run.mask.shape[1]]
        expected = [*lead, outputs] if y.is_floating_point() else lead
        if list(y.shape) != expected:
            raise InputError(
                f"the target y has shape {list(y.shape)}; with readout='{self.network.readout}' expected "
                f"{[*lead, outputs]}, or {lead} of class numbers."
            )
        x = run.state
        if every:
            counts = run.mask[1:].clone()
            counts[: 0 if continued else self.washout] = False
            if not counts.any():
                raise InputError(
                    f"washout = {self.washout} leaves out all steps of sequences of {lead[0]}; expected longer ones, or less."
                )
            counts = counts.to(run.x.device)
            x, y = run.x[1:][counts], y[counts]
        if y.is_floating_point() and not torch.isfinite(y).all():
            raise InputError(
                "the target y holds NaN or inf on steps that count; clean it, or shorten with lengths=."
            )
        return x, y
