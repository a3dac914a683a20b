"""A parallel scan: y_t <- y_t + S_t y_{t-1} for all t, in about 2 log2 T operations.

Two steps of such a recurrence are again such a step. So neighbours are joined in pairs, the pairs
are solved in the same way, and those in between follow; in place, with twice the loop's work.

    y [T + 1, B, m, d]       m slots of each of d units
    S [T, B, m, m, d]        or [1, 1, m, m, d] where all steps have the same

The same scan runs over other kinds of numbers (an Algebra): over numbers with exponents, and over
logarithms where the largest term is taken for the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..rows import NO_EXPONENT, pow2, scale

Numbers = tuple[Tensor, ...]  # the tensors that numbers of an algebra are made of
Wide = tuple[Tensor, Tensor]  # y 2^e, with an exponent for each entry or row


class Algebra(NamedTuple):
    """What a scan computes with; S and R are matrices over the slots, y and z are vectors."""

    add_product: Callable[[Numbers, Numbers, Numbers], None]  # y <- y + S z
    multiply: Callable[[Numbers, Numbers], Numbers]  # S R


def scan(algebra: Algebra, S: Numbers, y: Numbers, back: bool) -> None:
    """y_t <- y_t + S_t y_{t-1} for t = 1, 2, ..., T, in place; y holds T + 1 states, S T links.

    back: y_t <- y_t + S_{t+1} y_{t+1} for t = T - 1, ..., 0, and below time counts from the end.
    """
    n = len(y[0])  # states
    if n == 1:
        return
    half = n // 2  # odd states
    rest = (n - 1) // 2  # even states after the first, which is solved already
    # Join each odd state to the even one before it: y_1, y_3, ... are then a recurrence by
    # themselves, with the links S_3 S_2, S_5 S_4, ... Solve it, then add to the even states.
    odd = every_second(y, 1, half, back)
    even = every_second(y, 0, half, back)
    algebra.add_product(odd, every_second(S, 0, half, back), even)
    if half > 1:
        later = every_second(S, 2, half - 1, back)
        earlier = every_second(S, 1, half - 1, back)
        scan(algebra, algebra.multiply(later, earlier), odd, back)
    if rest:
        even = every_second(y, 2, rest, back)
        odd = every_second(y, 1, rest, back)
        algebra.add_product(even, every_second(S, 1, rest, back), odd)


def every_second(numbers: Numbers, start: int, count: int, back: bool) -> Numbers:
    """Entries start, start + 2, ... along time (axis 0), `count` of them; back: from the end.

    Numbers with a single time step are the same at all steps, and returned as they are.
    """
    n = len(numbers[0])
    if n == 1:
        return numbers
    # Counted from the end, entry i is n - 1 - i; the last one taken, i = start + 2 (count - 1),
    # is the first in memory.
    first = n + 1 - start - 2 * count if back else start
    return tuple(y[first : first + 2 * count - 1 : 2] for y in numbers)


def _slots(S: Numbers) -> range:
    """The slots j that a product with the matrices S [.., m, m, d] sums over."""
    return range(S[0].shape[-2])


def _add_product(y: Numbers, S: Numbers, z: Numbers) -> None:
    """Ordinary numbers, y <- y + S z: column j of S times slot j of z, for each j."""
    for j in _slots(S):
        y[0].addcmul_(S[0][..., j, :], z[0][..., j, None, :])


def _multiply(S: Numbers, R: Numbers) -> Numbers:
    """Ordinary numbers, S R: column j of S times row j of R, summed over j."""
    product = S[0][..., 0, None, :] * R[0][..., None, 0, :, :]
    for j in _slots(S)[1:]:
        product.addcmul_(S[0][..., j, None, :], R[0][..., None, j, :, :])
    return (product,)


REAL = Algebra(_add_product, _multiply)


def _take_larger(y: Numbers, S: Numbers, z: Numbers) -> None:
    """Logarithms, y <- y + S z: the larger term takes the place of the sum."""
    torch.maximum(y[0], S[0] + z[0], out=y[0])


def _add_logarithms(S: Numbers, R: Numbers) -> Numbers:
    """Logarithms, S R: those of the moduli add up."""
    return (S[0] + R[0],)


# Over logarithms a product becomes a sum, and a maximum takes the place of a sum.
LARGEST = Algebra(_take_larger, _add_logarithms)


def to_wide(y: Tensor, e: Tensor | int = 0) -> Wide:
    """Split y 2^e into mantissas in [1/2, 1) and an exponent each; zeros have NO_EXPONENT."""
    mantissa, e_mantissa = torch.frexp(y)
    return mantissa, torch.where(mantissa == 0, NO_EXPONENT, e_mantissa + e)


def wide_sum(terms: Sequence[Wide]) -> Wide:
    """The sum of numbers y 2^e, added in units of 2^e of the largest term."""
    largest = functools.reduce(torch.maximum, (e for _, e in terms))
    aligned = (y * pow2(e - largest, y.dtype) for y, e in terms)
    return to_wide(functools.reduce(torch.add, aligned), largest)


def _add_wide_product(y: Numbers, S: Numbers, z: Numbers) -> None:
    """Numbers with exponents, y <- y + S z; each of y, S, z is (mantissas, exponents)."""
    terms = [(y[0], y[1])]
    for j in _slots(S):
        mantissa = S[0][..., j, :] * z[0][..., j, None, :]
        e = S[1][..., j, :] + z[1][..., j, None, :]
        terms.append((mantissa, e))
    for old, new in zip(y, wide_sum(terms), strict=True):
        old.copy_(new)


def _multiply_wide(S: Numbers, R: Numbers) -> Numbers:
    """Numbers with exponents, S R; each of the two is (mantissas, exponents)."""
    terms = []
    for j in _slots(S):
        mantissa = S[0][..., j, None, :] * R[0][..., None, j, :, :]
        e = S[1][..., j, None, :] + R[1][..., None, j, :, :]
        terms.append((mantissa, e))
    return wide_sum(terms)


WIDE = Algebra(_add_wide_product, _multiply_wide)


def scan_with_exponents(
    S: Tensor, sources: Sequence[tuple[Tensor, Tensor | int]], back: bool, has_modulus: bool
) -> Wide:
    """Solve the recurrence for the sum of the sources (y, k), each y 2^k: (y, e) for y 2^e.

    Nothing overflows, and what is lost is too small to be seen beside what it is added to.

    has_modulus: the matrices are numbers, real or complex, with |S y| = |S| |y|. Then the scan
    over log2 |y|, where the largest term is taken for the sum, bounds the solution by 2^E. In
    units of 2^E no product of links is larger than about one, and one that vanishes has nothing
    to add: an ordinary scan does the rest. Other matrices have no such bound, and every entry
    carries its exponent through the scan.
    """
    if not has_modulus:
        entries = wide_sum([to_wide(y, k) for y, k in sources])
        scan(WIDE, to_wide(S), entries, back)
        return entries
    log_bound = functools.reduce(torch.maximum, (log_modulus(y) + k for y, k in sources))
    # One column is enough: that of a complex number as a matrix holds both of its parts.
    scan(LARGEST, (log_modulus(S[:, :, :, 0]),), (log_bound,), back)
    E = log_bound.ceil().clamp_min(NO_EXPONENT).int()
    # A link takes numbers in units of 2^origin to units of 2^target: it is scaled by 2^change.
    if back:
        target = E[:-1]
        origin = E[1:]
    else:
        target = E[1:]
        origin = E[:-1]
    # Nothing comes from zeros, however large the links are.
    change = torch.where(origin == NO_EXPONENT, NO_EXPONENT, origin - target)
    y = functools.reduce(torch.add, (scale(y, k - E) for y, k in sources))
    scan(REAL, (scale(S, change[:, :, None]),), (y,), back)
    return y, E


def log_modulus(y: Tensor) -> Tensor:
    """log2 of the norm |y| over the slots, [., ., m, d] -> [., ., 1, d].

    hypot does not overflow where a sum of squares would; abs is for a single slot.
    """
    modulus: Tensor = functools.reduce(torch.hypot, y.split(1, 2)).abs()
    return modulus.log2()


def exponent_by_row(y: Tensor, e: Tensor, k_last: Tensor) -> Wide:
    """Entries y 2^e [T + 1, B, m, d] as mantissas, and one exponent k [T + 1, B] for each row.

    A row of zeros has the exponent of the step after it, and k_last [B] at the end.
    """
    # 2^(k-1) <= the largest entry < 2^k; log2 of a row of zeros is -inf and becomes NO_EXPONENT.
    k = (y.abs().log2() + e).amax((2, 3)).floor().add(1).clamp_min(NO_EXPONENT).int()
    # Fill the gaps: going from the end to the start, each row of zeros takes the last exponent met.
    from_end = torch.cat([k_last[None], k.flip(0)]).t().contiguous()  # [B, T + 2]
    place = torch.arange(from_end.shape[1], device=k.device)
    latest_known = torch.where(from_end == NO_EXPONENT, 0, place).cummax(1).values
    k = from_end.gather(1, latest_known)[:, 1:].t().flip(0)
    return scale(y, e - k[:, :, None, None]), k
