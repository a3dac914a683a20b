"""A Hopfield network: digits recalled from corrupted ones, and how much it can hold.

    python examples/classics/hopfield.py [--out demo]

n units hold s random patterns. A sign of a stored pattern is unstable with probability
P = 1/2 (1 - erf(sqrt(n / 2s))); a whole pattern is stable with probability (1 - P)^n, nearly 1 up
to s = n / (2 log2 n). Recall itself breaks down at s = 0.138 n: unstable signs turn others.
"""

import math

import numpy as np
from drawing import BLUE, GREEN, RED, folder_from, panels, save

import coadjoint as co

IMAGES = {0: 83, 1: 25, 2: 102, 7: 276}  # validation images that overlap little, by digit


def random_patterns(seed, s, n):
    return np.random.default_rng(seed).choice([-1.0, 1.0], (s, n))


def probability(s, n):
    """P that a sign of a stored pattern is unstable."""
    return (1 - math.erf(math.sqrt(n / (2 * s)))) / 2


def exact_probability(s, n):
    """The same without the normal law: n x_ti C_ti is a sum of (s - 1)(n - 1) independent signs.

    The sign turns where the sum is below -(n - 1), and at -(n - 1) if it is -1: a tie gives +1.
    """
    count = (s - 1) * (n - 1)
    most = (count - (n - 1)) / 2  # of the signs are +1
    logs = [log_binomial(count, k) for k in range(math.floor(most) + 1)]
    tie = math.exp(logs[-1]) / 2 if most == math.floor(most) else 0.0
    return sum(map(math.exp, logs)) - tie


def log_binomial(count, k):
    """The logarithm of binom(count, k) / 2^count."""
    ways = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
    return ways - count * math.log(2)


def measured(s, n, draws=10):
    """The share of unstable signs, and that of patterns without any."""
    signs, patterns = [], []
    for seed in range(draws):
        X = random_patterns(seed, s, n)
        turned = np.where(co.classics.Hopfield().fit(X).field(X) >= 0, 1, -1)
        unstable = turned != X
        signs.append(unstable.mean())
        patterns.append(1 - unstable.any(1).mean())
    return np.mean(signs), np.mean(patterns)


def overlap(s, n, recalled=20):
    """The mean of x'recalled / n over a few stored patterns x, recalled from themselves."""
    X = random_patterns(s, s, n)
    some = X[:recalled]
    return float((co.classics.Hopfield().fit(X).predict(some) * some).mean())


def validation_images():
    """The pixels [s, 64] of 300 images, and their digits [s]."""
    images = next(co.tasks.make("digits-flat").held_out("valid", seed=0))
    return images.u.numpy(), images.y.numpy()


def as_signs(pixels):
    """Images as rows of 64 signs, each cut at its median."""
    return np.where(pixels > np.median(pixels, axis=1, keepdims=True), 1.0, -1.0)


def digit_patterns():
    """The images of IMAGES as signs."""
    pixels, digits = validation_images()
    rows = list(IMAGES.values())
    assert digits[rows].tolist() == list(IMAGES)
    return as_signs(pixels[rows])


def mean_digits():
    """The mean image of each of the ten digits as signs."""
    pixels, digits = validation_images()
    return as_signs(np.stack([pixels[digits == k].mean(0) for k in range(10)]))


def count_stable(X):
    """How many of the patterns X no update changes, if a network stores all of them."""
    field = co.classics.Hopfield().fit(X).field(X)
    return int((np.where(field >= 0, 1, -1) == X).all(1).sum())


def recall_rate(memory, X, share, draws=40):
    """How often a pattern of X is recalled without an error, this share of its signs turned."""
    found = [(memory.predict(corrupted(X, share, seed)) == X).all(1) for seed in range(draws)]
    return float(np.mean(found))


def corrupted(X, share, seed=0):
    """X with this share of each row's signs turned."""
    draw = np.random.default_rng(seed)
    rows = X.copy()
    for row in rows:
        row[draw.permutation(len(row))[: round(share * len(row))]] *= -1
    return rows


def main():
    folder = folder_from(__doc__)
    digits = digit_patterns()
    memory = co.classics.Hopfield().fit(digits)
    overlaps = np.abs(digits @ digits.T)[~np.eye(len(digits), dtype=bool)] / 64
    talk = np.abs(memory.crosstalk()).max()
    print(f"digits {list(IMAGES)}: largest overlap {overlaps.max():.2f}, cross-talk {talk:.2f}")
    means = mean_digits()
    print(f"stable: {count_stable(digits)} of {len(digits)}; means of all digits: ", end="")
    print(f"{count_stable(means)} of {len(means)}")
    for share in (0.1, 0.2, 0.3):
        rate = recall_rate(memory, digits, share)
        print(f"{share:.0%} of the signs turned: recalled without error {rate:.0%}")
    noisy = corrupted(digits, 0.2)
    n = 400
    held = n / (2 * math.log2(n))
    errors = {s: measured(s, n) for s in (16, 23, 32, 40, 55, 80, 120, 200)}
    for s, (signs, patterns) in errors.items():
        p = probability(s, n)
        print(
            f"s / n = {s / n:.3f}: unstable signs {signs:.5f}, P = {p:.5f}, exactly "
            f"{exact_probability(s, n):.5f}; "
            f"stable patterns {patterns:.2f}, (1 - P)^n = {(1 - p) ** n:.2f}"
        )
    print(f"n / (2 log2 n) = {held:.1f}: (1 - P)^n = {(1 - probability(held, n)) ** n:.2f}")
    overlaps = {}
    for size in (100, 300, 1000):
        ratios = np.arange(0.06, 0.241, 0.02)
        overlaps[size] = (ratios, [overlap(round(r * size), size) for r in ratios])
        text = ", ".join(f"{value:.2f}" for value in overlaps[size][1])
        print(f"n = {size}: overlap after recall at s / n = 0.06, 0.08 ... 0.24: {text}")
    plot(memory, digits, noisy, errors, overlaps, n, folder)


def plot(memory, digits, noisy, errors, overlaps, n, folder):
    figure, axes = panels(4, width=3.6)
    images, energies, stable, broken = axes
    rows = [digits, noisy, memory.predict(noisy)]
    tiles = [np.concatenate([np.pad(x.reshape(8, 8), 1) for x in row], 1) for row in rows]
    images.imshow(-np.concatenate(tiles), cmap="gray", interpolation="nearest")
    images.set(xticks=[], yticks=[4.5, 14.5, 24.5], yticklabels=["stored", "given", "recalled"])
    images.set_title("recall with a fifth of the signs turned")
    for digit, row, colour in zip(IMAGES, noisy, (BLUE, RED, GREEN, "black"), strict=True):
        path = memory.path(row)
        energies.step(range(len(path)), memory.energy(path), color=colour, label=str(digit))
    energies.legend(frameon=False)
    energies.set(title="the energy of each recall", xlabel="changed units")
    s = np.array(list(errors))
    found = np.array(list(errors.values()))
    fine = np.linspace(s[0], s[-1], 200)
    p = np.array([probability(k, n) for k in fine])
    stable.semilogy(fine / n, p, color=RED, label="P")
    stable.semilogy(s / n, found[:, 0], "o", color=RED, label="unstable signs")
    stable.semilogy(fine / n, (1 - p) ** n, color=BLUE, label="$(1 - P)^n$")
    stable.semilogy(s / n, found[:, 1], "s", color=BLUE, label="stable patterns")
    stable.axvline(1 / (2 * math.log2(n)), color="black", linewidth=0.6, linestyle=":")
    stable.set(title=f"n = {n}; dots: $s = n/(2\\log_2 n)$", xlabel="s / n", ylim=(1e-6, 2))
    stable.legend(frameon=False)
    for (size, (ratios, values)), colour in zip(overlaps.items(), (GREEN, BLUE, RED), strict=True):
        broken.plot(ratios, values, ".-", color=colour, label=f"n = {size}")
    broken.axvline(0.138, color="black", linewidth=0.6, linestyle=":")
    broken.set(title="overlap after recall; dots: 0.138", xlabel="s / n", ylim=(0, 1.03))
    broken.set_xticks([0.05, 0.1, 0.15, 0.2, 0.25])
    broken.legend(frameon=False)
    save(figure, folder, "classics-hopfield")


if __name__ == "__main__":
    main()
