"""Classics: the perceptron and the Hopfield network, as first described.

This package imports `errors`; like every package, it could import those before it. Both follow
scikit-learn's conventions (fit, predict, get_params, attributes that end in "_") without it.
docs/classics.md shows them, with other classics as examples that need no names of their own.

perceptron  Perceptron: a linear threshold unit that learns from its mistakes
hopfield    Hopfield: a memory whose energy never rises
estimator   what they share: parameters by name, and rows of numbers

Example:
    >>> import coadjoint as co
    >>> gate = co.classics.Perceptron().fit([[0, 0], [0, 1], [1, 0], [1, 1]], [0, 0, 0, 1])
    >>> gate.predict([[1, 1], [1, 0]]).tolist()
    [1, 0]
"""

from __future__ import annotations

from .hopfield import Hopfield
from .perceptron import Perceptron

__all__ = ["Hopfield", "Perceptron"]
