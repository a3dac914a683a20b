"""Dense, Psi(W x + b), and Tied, Psi(tau(W) x + b) with the W of another map."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...cells.parameters import Device
from ...errors import InputError, KindError, Unsupported, brief, check_kind, whole_number
from ...sweeps.layout import check_dense
from .bilinear import BilinearMap, draw_bias, draw_weight, make_parameter
from .checks import check_type_of

Linear = Callable[[Tensor], Tensor]  # a linear function of matrices


class MatrixMap(BilinearMap):
    """B(W, x) = K x, where K is W or linear in W; on states [B, inputs]."""

    inputs: int
    outputs: int

    def matrix(self) -> Tensor:
        """K, [outputs, inputs]."""
        raise NotImplementedError

    def effective(self) -> tuple[Tensor, Tensor | None, str]:
        """The matrix [outputs, inputs], the bias [outputs] or None, the name of the activation."""
        return self.matrix(), self.b, self.activation

    def extra_repr(self) -> str:
        """Sizes and activation."""
        bias = "" if self.b is not None else ", bias=False"
        return f"{self.inputs}, {self.outputs}, activation='{self.activation}'{bias}"

    def multiply(self, x: Tensor) -> Tensor:
        """K x for each sample: [B, inputs] -> [B, outputs]."""
        K = self.matrix()
        if check_dense("x", x).dim() != 2 or x.shape[1] != self.inputs:
            raise InputError(
                f"{type(self).__name__} reads x [B, {self.inputs}]; got {list(x.shape)}. "
                "co.maps.Flatten() turns [B, ...] into [B, n]."
            )
        check_type_of("x", x, "W", K)
        return functional.linear(x, K)

    def adjoint_by_state(self, x: Tensor, y: Tensor) -> Tensor:
        """K' y for each sample; K' is the transpose, (4.7)."""
        return y @ self.matrix()

    def adjoint_by_matrix(self, x: Tensor, y: Tensor) -> Tensor:
        """The sum over samples of y x', (4.5)."""
        return y.T @ x


class Dense(MatrixMap):
    """A dense layer x -> psi(W x + b), (4.1), on states [B, inputs].

    inputs, outputs  the widths
    activation       psi: tanh, sigmoid, relu, identity, softplus, gelu, silu or elu
    bias             whether there is a b

    The parameters are W [outputs, inputs] and b [outputs], drawn as torch draws those of nn.Linear.
    With z = W x + b, and products of vectors entry by entry:

        push             psi'(z) (W v)                                               (4.4)
        pull             W' (psi'(z) w)                                              (4.7)
        pull_parameters  W: (psi'(z) w) x'   b: psi'(z) w                     (4.5), (4.6)
        bend             W' c, c = psi''(z) (W v) w                        by (2.14), (4.4)
        bend_parameters  W: c x' + (psi'(z) w) v'   b: c                   by (2.14), (4.5)

    Example:
        >>> import torch
        >>> import coadjoint as co
        >>> f = co.maps.Dense(3, 2)
        >>> x, w = torch.randn(5, 3), torch.randn(5, 2)
        >>> f(x).shape, f.pull(x, w).shape
        (torch.Size([5, 2]), torch.Size([5, 3]))
        >>> {name: list(g.shape) for name, g in sorted(f.pull_parameters(x, w).items())}
        {'W': [2, 3], 'b': [2]}
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        activation: str = "tanh",
        bias: bool = True,
        *,
        dtype: torch.dtype | None = None,
        device: Device | None = None,
    ) -> None:
        super().__init__(activation)
        self.inputs = whole_number("inputs", inputs)
        self.outputs = whole_number("outputs", outputs)
        self.W = make_parameter(outputs, inputs, dtype=dtype, device=device)
        self.b = make_parameter(outputs, dtype=dtype, device=device) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W and b from +-1 / sqrt(inputs), as nn.Linear does."""
        draw_weight(self.W, self.inputs)
        draw_bias(self.b, self.inputs)

    def matrix(self) -> Tensor:
        """W."""
        return self.W

    def effective(self) -> tuple[Tensor, Tensor | None, str]:
        """W, b and the name of the activation."""
        return self.W, self.b, self.activation

    def adjoint_by_weight(self, x: Tensor, y: Tensor) -> Tensor:
        """The sum over samples of y x', (4.5)."""
        return self.adjoint_by_matrix(x, y)


class Tied(MatrixMap):
    """A layer with the weight of another one, x -> psi(tau(W) x + b), (4.35).

    f            the Dense or nn.Linear whose W this map reads: the same parameter, not a copy
    tau          "transpose", or a linear function of W, made of torch's functions, that returns a
                 matrix [outputs, inputs]
    activation   psi; None: that of f
    bias         whether there is a b, which is this map's own
    tau_adjoint  tau*, <tau(A), G> = <A, tau*(G)>; None: torch differentiates tau

    The parameters are W, that of f, and b [outputs]. A tau that is not linear and a tau_adjoint
    that is not its adjoint are refused, both by trying them on random matrices. With
    z = tau(W) x + b, and products of vectors entry by entry:

        push             psi'(z) (tau(W) v)                                         (4.41)
        pull             tau(W)' (psi'(z) w)          (4.44), which misprints tau*(W) here
        pull_parameters  W: tau*((psi'(z) w) x')   b: psi'(z) w             (4.42), (4.43)
        bend             tau(W)' c, c = psi''(z) (tau(W) v) w             by (2.14), (4.41)
        bend_parameters  W: tau*(c x' + (psi'(z) w) v')   b: c            by (2.14), (4.42)

    Example:
        >>> import torch
        >>> import coadjoint as co
        >>> encoder = co.maps.Dense(8, 3)
        >>> decoder = co.maps.Tied(encoder)
        >>> decoder(encoder(torch.zeros(5, 8))).shape, decoder.W is encoder.W
        (torch.Size([5, 8]), True)
    """

    def __init__(
        self,
        f: Dense | nn.Linear,
        tau: str | Linear = "transpose",
        activation: str | None = None,
        bias: bool = True,
        *,
        tau_adjoint: Linear | None = None,
    ) -> None:
        check_kind("f", f, (Dense, nn.Linear), "a co.maps.Dense or an nn.Linear")
        own_activation = f.activation if isinstance(f, Dense) else "identity"
        super().__init__(own_activation if activation is None else activation)
        self.W = shared_weight(f)
        self.tau, self.tau_adjoint = check_tau(tau, tau_adjoint, self.W)
        with torch.no_grad():
            self.outputs, self.inputs = self.matrix().shape
        W = self.W
        self.b = make_parameter(self.outputs, dtype=W.dtype, device=W.device) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw b from +-1 / sqrt(inputs), as nn.Linear does; W belongs to the other map."""
        draw_bias(self.b, self.inputs)

    def matrix(self) -> Tensor:
        """tau(W)."""
        return self.tau(self.W)

    def adjoint_by_weight(self, x: Tensor, y: Tensor) -> Tensor:
        """tau* of the sum over samples of y x', (4.42)."""
        return self.pull_matrix(self.adjoint_by_matrix(x, y))

    def pull_matrix(self, G: Tensor) -> Tensor:
        """tau*(G): the gradient by W from that by tau(W)."""
        if self.tau_adjoint is not None:
            return self.tau_adjoint(G)
        return torch_adjoint(self.tau, self.W, G)


def transpose(W: Tensor) -> Tensor:
    """The transpose, which is its own adjoint (Lemma 4.3.1)."""
    return W.T


def torch_adjoint(tau: Linear, like: Tensor, G: Tensor) -> Tensor:
    """tau*(G) by torch, of the shape of `like`, for a tau that is linear."""
    at_any_matrix = torch.func.vjp(tau, torch.zeros_like(like))
    adjoint: Tensor = at_any_matrix[1](G)[0]
    return adjoint


def shared_weight(f: Dense | nn.Linear) -> nn.Parameter:
    """The weight of f; one that is not a parameter itself cannot be shared."""
    W: object = f.W if isinstance(f, Dense) else f.weight
    if not isinstance(W, nn.Parameter):
        raise Unsupported(
            "Tied shares a parameter, but the weight of f is computed by a parametrisation. Write "
            "a module that calls f instead."
        )
    return W


def check_tau(tau: object, tau_adjoint: object, W: Tensor) -> tuple[Linear, Linear | None]:
    """The functions tau and tau*, tried on random matrices like W.

    Refused: an unknown name, a tau that is not linear or returns no matrix, and a tau_adjoint that
    is not its adjoint.
    """
    if tau == "transpose" and tau_adjoint is None:
        return transpose, transpose  # nothing to try, which a W without memory would not allow
    if tau == "transpose":
        tau = transpose
    if not callable(tau):
        raise InputError(f"tau must be 'transpose' or a linear function of W; got {brief(tau)}.")
    if tau_adjoint is not None and not callable(tau_adjoint):
        raise KindError(f"tau_adjoint must be a function of a matrix; got {brief(tau_adjoint)}.")
    # its own generator, so that the numbers drawn elsewhere stay the same
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(W.shape, generator=generator, dtype=W.dtype).to(W.device)
    check_linear(tau, A, torch.randn(W.shape, generator=generator, dtype=W.dtype).to(W.device))
    G = torch.randn(tau(A).shape, generator=generator, dtype=W.dtype).to(W.device)
    check_adjoint(tau, tau_adjoint, A, G)
    return tau, tau_adjoint


def check_linear(tau: Callable[..., object], A: Tensor, B: Tensor) -> None:
    """Refuse a tau that returns no matrix, or that is not linear on 2 A - 3 B."""
    image = tau(A)
    if not isinstance(image, Tensor) or image.dim() != 2:
        what = f"shape {list(image.shape)}" if isinstance(image, Tensor) else brief(image)
        raise KindError(f"tau must return a matrix [outputs, inputs]; got {what}.")
    # 2 - 3 is not 1: a constant added to a linear function is found, too
    if not nearly_equal(tau(2 * A - 3 * B), 2 * image - 3 * tau(B)):  # type: ignore[operator]
        raise InputError(
            "tau is not linear: tau(2 A - 3 B) is not 2 tau(A) - 3 tau(B) for random A and B. "
            "Put what is not linear into the activation."
        )


def check_adjoint(tau: Linear, tau_adjoint: Linear | None, A: Tensor, G: Tensor) -> None:
    """Refuse a tau_adjoint that is not the adjoint, and a tau that torch cannot differentiate."""
    not_by_torch = (
        "torch cannot differentiate tau: write it with torch's functions, without detach() or "
        "numpy."
    )
    try:
        by_torch = torch_adjoint(tau, A, G)
    except (RuntimeError, TypeError) as error:
        raise InputError(not_by_torch) from error
    if not nearly_equal((A * by_torch).sum(), (tau(A) * G).sum()):
        raise InputError(not_by_torch)
    if tau_adjoint is not None and not nearly_equal(tau_adjoint(G), by_torch):
        raise InputError(
            "tau_adjoint is not the adjoint of tau: <tau(A), G> is not <A, tau_adjoint(G)> for "
            "random A and G. Leave it out, and torch differentiates tau."
        )


def nearly_equal(found: object, expected: Tensor) -> bool:
    """Whether two tensors agree up to rounding."""
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    apart = torch.linalg.vector_norm(found - expected)
    size = torch.linalg.vector_norm(expected)
    return bool(apart <= 1e4 * torch.finfo(expected.dtype).eps * (1 + size))
