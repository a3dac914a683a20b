"""Convolution three ways: a Toeplitz matrix, the Fourier transform, and torch's conv1d in a chain.

    python examples/classics/convolution.py [--out demo]

(f * h)[u] = sum_t h[t] f[u - t]. conv1d computes cross-correlation, so its kernel is h reversed.
The costate of the input of a convolution is the transposed matrix times that of its output, which
is a cross-correlation with h.
"""

import numpy as np
import torch
from drawing import BLUE, RED, folder_from, panels, save
from torch import nn

import coadjoint as co


def toeplitz(h, n):
    """The matrix H [n + m - 1, n] with h_i on its i-th diagonal: H f = f * h."""
    m = len(h)
    H = np.zeros((n + m - 1, n))
    for column in range(n):
        H[column : column + m, column] = h
    return H


def by_fft(f, h):
    """f * h as a product of Fourier transforms, padded so that nothing wraps around."""
    size = len(f) + len(h) - 1
    return np.fft.irfft(np.fft.rfft(f, size) * np.fft.rfft(h, size), size)


def conv_chain(h):
    """A chain with one map, the convolution with h of signals [B, 1, n]."""
    m = len(h)
    layer = nn.Conv1d(1, 1, m, padding=m - 1, bias=False, dtype=torch.float64)
    kernel = torch.as_tensor(np.asarray(h)[::-1].copy())[None, None]
    layer.load_state_dict({"weight": kernel})
    return co.Chain(layer)


def input_costate(f, h, y):
    """The costates of f * h and of f, for the loss ||f * h - y||^2."""
    run = conv_chain(h)(torch.as_tensor(f)[None, None])
    costates = run.costates("squared", torch.as_tensor(y)[None, None], reduce="sum")
    return costates.at(1).detach().numpy().ravel(), costates.at(0).detach().numpy().ravel()


def main():
    folder = folder_from(__doc__)
    draw = np.random.default_rng(0)
    n, h = 40, np.array([1.0, 2.0, 3.0, 2.0, 1.0]) / 9
    f = (np.arange(n) % 20 > 9) + 0.2 * draw.standard_normal(n)
    with torch.no_grad():
        by_conv = conv_chain(h)(torch.as_tensor(f)[None, None]).a.numpy().ravel()
    by_matrix = toeplitz(h, n) @ f
    print(f"matrix and conv1d: largest difference {np.abs(by_matrix - by_conv).max():.0e}")
    print(f"FFT and conv1d: largest difference {np.abs(by_fft(f, h) - by_conv).max():.0e}")
    above, below = input_costate(f, h, np.zeros(n + len(h) - 1))
    error = np.abs(toeplitz(h, n).T @ above - below).max()
    print(f"transposed matrix and costate of the input: largest difference {error:.0e}")
    plot(f, h, by_conv, folder)


def plot(f, h, by_conv, folder):
    figure, (matrix, signals) = panels(2)
    picture = matrix.imshow(toeplitz(h, 12), cmap="Blues", interpolation="nearest")
    figure.colorbar(picture, ax=matrix)
    matrix.set(title=f"the matrix of h, m = {len(h)}, for n = 12", xticks=[], yticks=[])
    signals.plot(np.arange(len(f)), f, ".-", color=BLUE, label="f")
    signals.plot(np.arange(len(by_conv)) - len(h) // 2, by_conv, color=RED, label="f * h, centred")
    signals.set(title="a signal and its convolution", xlabel="u")
    signals.legend(frameon=False)
    save(figure, folder, "classics-convolution")


if __name__ == "__main__":
    main()
