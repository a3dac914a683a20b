"""Ridge regression: a linear readout in closed form.

min over V, b_o of  sum_i w_i |y_i - V h_i - b_o|^2 + alpha |V|^2      h what the readout reads, b_o free of the penalty

Examples are taken in as they come: only the triangle R of a QR decomposition of their rows (1, h, y) is kept, which is as large
as the number of columns. Its singular values solve the problem without squaring the condition number, as normal equations do.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import InputError, Unsupported, check_kind, real
from ..objectives.batch import Batch
from .interface import check_net
from .judge import Judge, evaluation_mode
from .readout import Readout

ROWS_AT_ONCE = 4096  # rows of a decomposition


def update_triangle(factor: Tensor | None, rows: Tensor) -> Tensor:
    """The triangle of all rows, from that of the earlier ones."""
    for part in rows.split(ROWS_AT_ONCE):
        before = part.new_zeros(part.shape[1], part.shape[1]) if factor is None else factor.to(part)
        factor = torch.linalg.qr(torch.cat([before, part]), mode="r")[1]
    assert factor is not None
    return factor


def solve_triangle(
    F: Tensor, outputs: int, alpha: float, constant: bool = True
) -> tuple[Tensor, Tensor]:
    """(A, c) of y = A' h + c. The first column is the constant: rows below the first belong to features and targets less
    their means."""
    m, one = F.shape[1] - outputs, int(constant)
    left, s, right = torch.linalg.svd(F[one:m, one:m])
    s = torch.where(s > m * torch.finfo(s.dtype).eps * s[0], s, 0)
    inverse = torch.where(s > 0, s / torch.where(s > 0, s * s + alpha, 1), 0)
    A = right.T @ (inverse[:, None] * (left.T @ F[one:m, m:]))
    return A, (F[0, m:] - F[0, 1:m] @ A) / F[0, 0] if constant else A.new_zeros(outputs)


def one_hot(y: Tensor, outputs: int) -> Tensor:
    """Class numbers as ones among zeros, [..., outputs]."""
    if y.numel() and not (int(y.min()) >= 0 and int(y.max()) < outputs):
        raise InputError(
            f"classes must lie in 0..{outputs - 1}; got {int(y.min())}..{int(y.max())}."
        )
    return nn.functional.one_hot(y.long(), outputs)


class Ridge:
    """The readout V, b_o of a network, solved on the batches it is given; no other parameter is touched.

    alpha  in sum_i w_i |y_i - a_i|^2 + alpha |V|^2, the sum over all that was added: samples, or their steps with readout
           "every"; w_i is the entry of the mask times the weight of the sample (with reduce="mean" over the sum of its mask)

    For a squared error and output "identity" that is the minimum of the loss. Class numbers become ones among zeros ("softmax",
    "identity"), the answers 0 and 1 of "sigmoid" -1 and 1: the largest a, or the sign of a, then decides, but y_hat is no
    probability. `state` is all that is kept of the past: give it to another Ridge to go on. Nothing is dropped while
    examples are taken in.
    """

    def __init__(self, net: Readout, alpha: float = 1e-6) -> None:
        check_net(net)
        self.net, self.alpha = net, real("alpha", alpha, 0)
        self.state: dict[str, Tensor] = {}
        more = list(net.readout_extras())
        if net.output not in ("identity", "softmax", "sigmoid"):
            more.append(f"output={net.output!r}")
        for what in more:
            raise Unsupported(
                f"ridge regression solves V h + b_o alone, and this network has {what}. Use a gradient method for it."
            )

    @torch.no_grad()
    def add(self, batch: Batch) -> Ridge:
        """Take a batch in."""
        net = self.net
        check_kind("the batch", batch, Batch, "a co.Batch(u, y)")
        if batch.y is None:
            raise InputError("ridge regression needs targets: pass y.")
        with evaluation_mode(net):
            run = net.run(batch)
            h = net.readout_features(
                run.layout.rows, run.readout_input, net.extra_weights()
            ).double()
        rows, layout = run.layout.rows, run.layout
        judge = Judge.of(net, layout, "squared", batch.y, batch.mask, batch.reduce, h)
        assert judge.y is not None
        at = judge.samples_of_rows(h.device)
        w = judge.apply_reduction(layout.sort(batch.weights(h[None, : rows.B])))[at]
        if judge.weight is not None:
            w = w * judge.select_counted(judge.weight)
        if (w < 0).any():
            raise InputError(
                "ridge regression takes no negative weights: of samples, or in a mask."
            )
        known = [judge.select_counted(h), self.targets(judge.select_counted(judge.y)).to(h)]
        table = torch.cat(
            [*([] if net.b_o is None else [torch.ones_like(h[: len(at), :1])]), *known], 1
        )
        if len(table):
            self.state["factor"] = update_triangle(
                self.state.get("factor"), w.sqrt()[:, None] * table
            )
        return self

    @torch.no_grad()
    def solve(self) -> Ridge:
        """Write V and b_o."""
        net = self.net
        if "factor" not in self.state:
            raise InputError("nothing was added; call add(batch) before solve().")
        if not float(self.state["factor"].abs().max()) > 0:
            raise InputError("all that was added has weight 0: there is nothing to solve.")
        A, c = solve_triangle(self.state["factor"], net.outputs, self.alpha, net.b_o is not None)
        net.V.copy_(A.T)
        if net.b_o is not None:
            net.b_o.copy_(c)
        return self

    def targets(self, y: Tensor) -> Tensor:
        """[rows, outputs]"""
        net, n = self.net, self.net.outputs
        if y.dim() == 1 and not y.is_floating_point() and net.output != "sigmoid" and n > 1:
            return one_hot(y, n)
        y = y[:, None] if y.dim() == 1 and n == 1 else y
        if y.shape[1:] != (n,):
            raise InputError(
                f"the targets y end in {list(y.shape[1:])}; expected {n} entries, as there are outputs."
            )
        return 2 * y.double() - 1 if net.output == "sigmoid" else y
