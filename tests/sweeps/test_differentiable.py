"""Outputs, losses, costates, penalties and every gradient equal the oracle's.

The cases are the tables of tests/support/cases.py.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad

import cases
import coadjoint as co
import oracles
from cases import Data

pytestmark = pytest.mark.slow

VALUES = ("y_hat", "loss", "loss of the costates", "lam", "penalty")  # the rest are derivatives


def loss_of(case, run):
    """The loss as a user would name it; or as values that were made from the outputs."""
    if case.loss != "values":
        return cases.LOSSES.get(case.loss, case.loss)
    value = cases.no_target(run.y_hat)
    if case.readout == "every":
        value = torch.where(run.mask[1:], value, 0).sum(0)
        value = value / run.lengths if case.reduce == "mean" else value
    return value


def ours(case, data):
    """Everything coadjoint says about a case, by name."""
    net, batch = cases.network(case, data), cases.batch(case, data)
    leaves = data.leaves | {n: y for n, y in net.named_parameters() if y.requires_grad}
    run = net(batch.u, batch.lengths, batch.x0)
    loss = loss_of(case, run)
    how = {"mask": batch.mask, "reduce": batch.reduce}
    plain = run.loss(loss, batch.y, **how)
    lam = run.costates(loss, batch.y, **how)
    G = cases.penalty(case, data)(lam)
    objective = batch.mean(lam.loss + case.rho * G)
    found = {
        "y_hat": run.y_hat,
        "loss": plain,
        "loss of the costates": lam.loss,
        "lam": lam.lam,
        "penalty": G,
    }
    found |= gradients("dL", batch.mean(plain), leaves) | gradients("dF", objective, leaves)
    if case.higher:
        found |= further(batch.mean(plain), objective, leaves)
        if case.cell not in cases.NO_GRADIENT:
            found["asymmetry"] = torch.tensor(oracles.asymmetry(objective, leaves))
        found |= {f"jvp {n}": y for n, y in pushed(case, net, data).items()}
    return {name: y.detach().double() for name, y in found.items()}


def gradients(kind, value, leaves):
    return {f"{kind}/{name}": y for name, y in oracles.gradient(value, leaves).items()}


def further(L, F, leaves):
    """Second derivatives of the loss and of the penalised objective, third derivatives
    of the loss.
    """
    second = {f"F {n}": y for n, y in oracles.higher(F, leaves, third=False).items()}
    return second | {f"L {n}": y for n, y in oracles.higher(L, leaves, third=True).items()}


def pushed(case, net, data):
    """Forward mode: y_hat and the loss by torch.func.jvp; costates and penalty by dual numbers,
    forward over reverse.
    """
    leaves, v = data.leaves, oracles.directions(data.leaves, 5)
    if case.form in ("list", "packed"):  # torch has no forward mode for pack_sequence
        case = replace(case, form="tensor")

    def run(leaves):
        u = leaves["u"].expand_as(data.u) if "u" in leaves else data.u
        given = replace(data, u=u, x0=leaves.get("given x0", data.x0))
        batch = cases.batch(case, given)
        theta = {n: y for n, y in leaves.items() if n in data.theta}
        run = torch.func.functional_call(net, theta, (batch.u, batch.lengths, batch.x0))
        return run, (loss_of(case, run), batch.y), {"mask": batch.mask, "reduce": batch.reduce}

    def plain(leaves):
        y, loss, how = run(leaves)
        return {"y_hat": y.y_hat, "loss": y.loss(*loss, **how)}

    out = torch.func.jvp(plain, (leaves,), (v,))[1]
    with forward_ad.dual_level():
        y, loss, how = run({n: forward_ad.make_dual(y, v[n]) for n, y in leaves.items()})
        lam = y.costates(*loss, **how)
        values = {"lam": lam.lam}
        if case.penalty != "tangent":  # that one is itself forward mode, and torch does not nest it
            values["penalty"] = cases.penalty(case, data)(lam)
        for name, value in values.items():
            change = forward_ad.unpack_dual(value).tangent
            out[name] = torch.zeros_like(value) if change is None else change
    return out


class Group:
    """Cases that share their data: the oracle runs once, each penalty once."""

    def __init__(self, case, perm=None, dtype=torch.float64, nudge=0):
        self.data = Data.of(case, dtype, nudge=nudge)
        self.truth = oracles.Truth(case, self.data, perm)
        t = self.truth
        self.plain = {
            "y_hat": t.y_hat(),
            "loss": t.loss,
            "loss of the costates": t.loss,
            "lam": t.lam(),
        }
        self.plain |= gradients("dL", t.mean(t.loss), self.data.leaves)

    def of(self, case):
        t, leaves = self.truth, self.data.leaves
        for s in t.samples:
            s.case = case
        G = t.penalty(case.penalty)
        objective = t.mean(t.loss + case.rho * G)
        found = self.plain | {"penalty": G} | gradients("dF", objective, leaves)
        if case.higher:
            found |= further(t.mean(t.loss), objective, leaves)
            values = {
                "y_hat": self.plain["y_hat"],
                "loss": t.loss,
                "lam": self.plain["lam"],
                "penalty": G,
            }
            change = oracles.along(values, leaves, oracles.directions(leaves, 5))
            found |= {f"jvp {n}": y for n, y in change.items()}
        return {name: y.detach().double() for name, y in found.items()}


def errors(truth, found):
    """The relative error of each tensor, {name: largest}; costates and losses are judged each at
    its own scale.
    """
    out = {}
    for name, y in found.items():
        if name == "asymmetry":
            out[name] = float(y)
            continue
        x = truth[name]
        assert x.shape == y.shape, f"{name}: {list(y.shape)}, expected {list(x.shape)}"
        size, error = x, x - y
        if "loss" not in name:
            size, error = (
                torch.linalg.vector_norm(e, dim=-1 if "lam" in name else None)
                for e in (size, error)
            )
        ratio = error.abs() / size.abs()
        out[name] = float(torch.where(error == 0, 0, ratio).max())
    return out


def asked_again(case):
    """What the oracle says in the case's own type, three times, with hidden units in another order
    and numbers changed in their last digit.
    """

    def order(k):
        return torch.randperm(case.H, generator=torch.Generator().manual_seed(k))

    return [Group(case, order(k), case.dtype, nudge=k).of(case) for k in (1, 2, 3)]


def own_error(name, truth, again):
    """How far the oracle is from itself."""
    return max(errors(truth, {name: y[name]})[name] for y in again) if name in truth else 0.0


def is_zero(name, case, truth, found, again):
    """Is a derivative zero in exact arithmetic, so that there is nothing to be relative to?

    The oracle says 0, or has not one digit in common with itself; and both what it says and what is
    found are less than one rounding of the value that is differentiated.
    """
    if name not in found or name in VALUES or name == "asymmetry":
        return False
    value = truth[name.removeprefix("jvp ") if name.startswith("jvp ") else "loss"]
    rounding = torch.finfo(case.dtype).eps * float(value.norm())
    small = max(float(truth[name].norm()), float(found[name].norm())) < rounding
    has_no_digit = not truth[name].any() or own_error(name, truth, again) > 0.1
    return small and has_no_digit


def chaotic(case, wrong, truth, again):
    """Does the oracle disagree with itself about every wrong tensor, by more than a tenth of the
    bar and to the same extent?
    """
    for name, error in wrong.items():
        own = own_error(name, truth, again)
        if not (own > case.bar / 10 and error < 100 * own):
            return False
    return True


def compare(table, shared=None):
    """-> (failures, skipped)"""
    failures, skipped = [], 0
    for case in table:
        truth, found = (shared or Group(case)).of(case), {}
        try:
            found = ours(case, Data.of(case, case.dtype, oracle=False))
            wrong = {name: e for name, e in errors(truth, found).items() if not e <= case.bar}
        except Exception as error:  # named with its case, like a disagreement
            wrong = {f"{type(error).__name__}: {error}": float("nan")}
        if not wrong:
            continue
        again = asked_again(case)
        left = {n: e for n, e in wrong.items() if not is_zero(n, case, truth, found, again)}
        if left and chaotic(case, left, truth, again):
            skipped += 1
        elif left:
            failures.append(f"{case}: " + ", ".join(f"{n} {e:.1e}" for n, e in left.items()))
    return failures, skipped


def report(record_property, failures, skipped, executed, expected):
    record_property("cases", executed)
    record_property("skipped", skipped)
    assert not failures, f"{len(failures)} of {executed} cases disagree:\n" + "\n".join(failures)
    assert executed == expected
    assert skipped <= max(1, 0.02 * executed)


@pytest.mark.parametrize(
    ("variant", "loss"), cases.CROSS, ids=lambda x: x if isinstance(x, str) else "-".join(x)
)
def test_every_penalty_in_every_setting_equals_the_oracle(variant, loss, thorough, record_property):
    """Every penalty in all five settings. Where the run is not thorough, in some of them in turn:
    one for each loss of a cell that has all six, so that it meets every setting, with every sixth
    penalty, so that it meets each with one loss; and two otherwise, one with every other penalty
    and one with the rest.
    """
    groups, turn = list(cases.cross(*variant, loss)), cases.CROSS.index((variant, loss))
    if not thorough:
        groups = part_of(groups, turn, variant in cases.FULL)
    failures, skipped, executed = [], 0, 0
    for group in groups:
        wrong, left_out = compare(group, Group(group[0]))
        failures, skipped, executed = failures + wrong, skipped + left_out, executed + len(group)
    report(record_property, failures, skipped, executed, sum(map(len, groups)))


def part_of(groups, turn, has_all_losses):
    """The cases of them that run where the run is not thorough."""
    count = 1 if has_all_losses else 2
    taken = [group for i, group in enumerate(groups) if (i + turn) % len(groups) < count]
    if has_all_losses:
        cell_and_loss = sum(divmod(turn, len(cases.CROSS_LOSSES)))
        return [group[cell_and_loss % 6 :: 6] for group in taken]
    return [group[i::2] for i, group in enumerate(taken)]


def test_each_cell_meets_every_penalty():
    met = set()
    for turn, (variant, loss) in enumerate(cases.CROSS):
        groups = list(cases.cross(*variant, loss))
        for group in part_of(groups, turn, variant in cases.FULL):
            met |= {(variant, case.penalty) for case in group}
    assert met == set(itertools.product(cases.VARIANTS, cases.PENALTIES))


@pytest.mark.parametrize("first", range(0, cases.RANDOM, cases.CHUNK))
def test_random_cases_equal_the_oracle(first, thorough, record_property):
    """One in 29 where the run is not thorough: prime to the turns of engines and derivatives."""
    numbers = range(first, first + cases.CHUNK)
    table = [cases.drawn(i) for i in numbers if thorough or i % 29 == 0]
    failures, skipped = compare(table)
    report(record_property, failures, skipped, len(table), len(table))


def test_a_derivative_of_rounding_alone_is_zero_and_no_other_is():
    """Case 3012 takes one step from x0 = 0, so nothing depends on the angles of its matrix."""
    case = cases.drawn(3012)
    truth, again = Group(case).of(case), asked_again(case)
    zero, other = "dL/p.theta", "dL/V"
    assert truth[zero].any()
    for name, found, answer in (
        (zero, truth[zero], True),
        (zero, torch.zeros_like(truth[zero]), True),
        (zero, torch.full_like(truth[zero], 1e-14), False),
        (other, truth[other] * 1e-20, False),
        ("loss", truth["loss"], False),
    ):
        assert is_zero(name, case, truth, {name: found}, again) is answer, name
    nothing = {name: torch.zeros_like(y) for name, y in truth.items()}
    assert not any(is_zero(name, case, truth, nothing, again) for name in (other, "dF/R"))


def swept_values(net, u, along):
    """Values and derivatives that go through every operation of the sweeps: three derivatives of
    states and two of costates by the input, one by the weights, and one in forward mode.
    """
    u = u.clone().requires_grad_()
    run = net(u).run
    wave = torch.sin(torch.arange(run.x.numel(), dtype=u.dtype)).reshape(run.x.shape)
    lam = run.costate(wave, None, None).mantissa
    found = [run.x, lam]
    for value, orders in (((run.x * wave).sum(), 3), (co.norm(lam).sum(), 2)):
        found += torch.autograd.grad(value, (net.W, net.R, net.b), retain_graph=True)
        for _ in range(orders):
            (g,) = torch.autograd.grad(value, u, create_graph=True)
            found.append(g)
            value = g.square().sum()
    with forward_ad.dual_level():
        dual = net(forward_ad.make_dual(u.detach(), along)).run.x
        found.append(forward_ad.unpack_dual(dual).tangent)
    return found


@pytest.mark.parametrize("engine", ["reference", "eager", "cpu"])
@pytest.mark.parametrize("cell", ["elman", "lstm"])
def test_autocast_changes_nothing(cell, engine):
    """Where it would round our products to bfloat16, every number keeps its bits."""
    torch.manual_seed(0)
    net = co.Network(cell, inputs=3, hidden=4, outputs=2, engine=engine, dtype=torch.float32)
    u, along = torch.randn(5, 3, 3), torch.randn(5, 3, 3)
    plain = swept_values(net, u, along)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        found = swept_values(net, u, along)
    for y, z in zip(found, plain, strict=True):
        assert torch.equal(y, z)
