"""Ridge regression: a linear readout in closed form.

min over V, b_o of  sum_i w_i |y_i - V h_i - b_o|^2 + alpha |V|^2      b_o is not penalised

Examples may come in any number of batches. Only the triangle R of a QR decomposition of their rows
(1, h, y) is kept, whose size is the number of columns. Its singular values solve the problem
without squaring the condition number, which normal equations would do.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import InputError, Unsupported, check_kind, real
from ..objectives.batch import Batch
from .interface import check_net
from .judge import Judge, evaluation_mode
from .readout import Readout

ROWS_AT_ONCE = 4096  # rows added to a triangle in one QR decomposition


def update_triangle(triangle: Tensor | None, rows: Tensor) -> Tensor:
    """The triangle R of the QR decomposition of all rows so far, a square matrix.

    triangle  that of the earlier rows; None if there are none
    """
    for part in rows.split(ROWS_AT_ONCE):
        if triangle is None:  # zeros change nothing, but R is square even with only a few rows
            before = part.new_zeros(part.shape[1], part.shape[1])
        else:
            before = triangle.to(part)
        triangle = torch.linalg.qr(torch.cat([before, part]), mode="r")[1]
    assert triangle is not None
    return triangle


def solve_triangle(
    triangle: Tensor, outputs: int, alpha: float, constant: bool = True
) -> tuple[Tensor, Tensor]:
    """(A, c) of y = A' h + c, from the triangle of rows (1, h, y), or (h, y) without a constant.

    They minimise sum |y - A' h - c|^2 + alpha |A|^2: with the singular values s of the features,
    A = right' diag(s / (s^2 + alpha)) left' targets. Below its first row, the triangle of (1, h, y)
    is that of features and targets minus their means, so the constant drops out of the problem
    for A. The first row is (1, mean h, mean y) times a number, and c = mean y - A' mean h.
    """
    features_end = triangle.shape[1] - outputs
    first = 1 if constant else 0
    left, s, right = torch.linalg.svd(triangle[first:features_end, first:features_end])
    # Singular values that rounding made count as zero, with the pseudoinverse 0. The bound is
    # the usual one for the rank of a matrix: its size times eps times the largest.
    s = torch.where(s > features_end * torch.finfo(s.dtype).eps * s[0], s, 0)
    inverse = torch.where(s > 0, s / torch.where(s > 0, s * s + alpha, 1), 0)
    A = right.T @ (inverse[:, None] * (left.T @ triangle[first:features_end, features_end:]))
    if not constant:
        return A, A.new_zeros(outputs)
    scaled_c = triangle[0, features_end:] - triangle[0, 1:features_end] @ A
    return A, scaled_c / triangle[0, 0]


def one_hot(y: Tensor, outputs: int) -> Tensor:
    """Class numbers as vectors with a single one: [...] -> [..., outputs]."""
    if y.numel() and not (int(y.min()) >= 0 and int(y.max()) < outputs):
        raise InputError(
            f"classes must lie in 0..{outputs - 1}; got {int(y.min())}..{int(y.max())}."
        )
    return nn.functional.one_hot(y.long(), outputs)


class Ridge:
    """The readout V, b_o of a network, solved from batches; no other parameter changes.

    alpha  in sum_i w_i |y_i - a_i|^2 + alpha |V|^2. The sum is over all samples added, or all their
           steps with readout "every". w_i is the entry of the mask times the weight of the sample;
           with reduce="mean" it is divided by the sum of the sample's mask.

    For a squared error and output "identity" this is the minimum of the loss. Class numbers become
    one-hot vectors ("softmax", "identity"), and the targets 0 and 1 of "sigmoid" become -1 and 1:
    the largest a, or its sign, then decides, but y_hat is not a probability. `state` summarises the
    batches so far; give it to another Ridge to continue. Dropout is off while examples are added.
    """

    def __init__(self, net: Readout, alpha: float = 1e-6) -> None:
        check_net(net)
        self.net = net
        self.alpha = real("alpha", alpha, 0)
        self.state: dict[str, Tensor] = {}
        extras = list(net.readout_extras())
        if net.output not in ("identity", "softmax", "sigmoid"):
            extras.append(f"output={net.output!r}")
        for extra in extras:
            raise Unsupported(
                f"ridge regression solves only V h + b_o, but this network has {extra}. "
                "Use a gradient method."
            )

    @torch.no_grad()
    def add(self, batch: Batch) -> Ridge:
        """Add the examples of a batch: update `state` by its rows (1, h, y) times sqrt(w_i)."""
        net = self.net
        check_kind("the batch", batch, Batch, "a co.Batch(u, y)")
        if batch.y is None:
            raise InputError("ridge regression needs targets: pass y.")
        with evaluation_mode(net):
            run = net.run(batch)
            features = net.readout_features(
                run.layout.rows, run.readout_input, net.extra_weights()
            ).double()
        layout = run.layout
        judge = Judge.of(net, layout, "squared", batch.y, batch.mask, batch.reduce, features)
        assert judge.y is not None
        sample = judge.samples_of_rows(features.device)
        like_samples = features[None, : layout.rows.B]  # batch.weights takes samples on axis 1
        sample_weight = layout.sort(batch.weights(like_samples))
        # reduce="mean" divides a sample's weight by the sum of its mask, or its number of steps.
        weight = judge.apply_reduction(sample_weight)[sample]
        if judge.weight is not None:
            weight = weight * judge.select_counted(judge.weight)
        if (weight < 0).any():
            raise InputError(
                "ridge regression needs weights of at least 0, both of samples and in a mask; "
                "got a negative one."
            )
        h = judge.select_counted(features)
        columns = [h, self.targets(judge.select_counted(judge.y)).to(features)]
        if net.b_o is not None:
            columns.insert(0, torch.ones_like(h[:, :1]))
        table = torch.cat(columns, 1)
        if len(table):
            rows = weight.sqrt()[:, None] * table
            self.state["factor"] = update_triangle(self.state.get("factor"), rows)
        return self

    @torch.no_grad()
    def solve(self) -> Ridge:
        """Set V and b_o to the minimum over all examples that were added.

        The state's "factor" is the triangle of the QR decomposition of their weighted rows
        (1, h, y), or (h, y) without b_o: the minimum depends on nothing else.
        """
        net = self.net
        if "factor" not in self.state:
            raise InputError("there is no data yet; call add(batch) before solve().")
        triangle = self.state["factor"]
        if not float(triangle.abs().max()) > 0:
            raise InputError("every example has weight 0, so there is nothing to solve.")
        V_transposed, b_o = solve_triangle(
            triangle, net.outputs, self.alpha, constant=net.b_o is not None
        )
        net.V.copy_(V_transposed.T)
        if net.b_o is not None:
            net.b_o.copy_(b_o)
        return self

    def targets(self, y: Tensor) -> Tensor:
        """The targets of rows as numbers, [rows, outputs].

        Classes become one-hot vectors; with output "sigmoid", 0 and 1 become -1 and 1.
        """
        net = self.net
        n = net.outputs
        is_class = y.dim() == 1 and not y.is_floating_point()
        if is_class and net.output != "sigmoid" and n > 1:
            return one_hot(y, n)
        if y.dim() == 1 and n == 1:
            y = y[:, None]
        if y.shape[1:] != (n,):
            raise InputError(
                f"the targets y end in {list(y.shape[1:])}; expected {n} entries, one for each "
                "output."
            )
        return 2 * y.double() - 1 if net.output == "sigmoid" else y
