"""Maps x_{i+1} = f(x_i; theta) between states of any shape, with the products of the derivatives.

Document: A. Caterini, "A Novel Mathematical Framework for the Analysis of Neural Networks" (2017),
chapters 2 to 4; numbers in docstrings are those of its equations. Samples lie along axis 0. Every
map, and by the functions of this package every nn.Module, has

    push(x, v)                Df(x).v
    pull(x, w)                D*f(x).w
    pull_parameters(x, w)     nabla*f(x).w                                     by name
    bend(x, v, w)             (v _| D^2 f(x))*.w, the gradient by x of <w, Df(x).v>
    bend_parameters(x, v, w)  (v _| D nabla f(x))*.w, that by the parameters,  by name

which are all that backpropagation, the tangent loss (Algorithm 3.3.1) and penalties on costates
need. u _| B and B |_ u are the bilinear map B with u as its first and its second argument.

products     push, pull, pull_parameters, bend, bend_parameters of any module
map          Map: a module that has them as methods; FixedMap: one without parameters
by_torch     how torch finds them
elementwise  Activation: elementwise functions
bilinear     Psi(B(W, x) + b): what the next two have in common
dense        Dense, Tied
convolution  Conv
pooling      MaxPool, AvgPool
softmax      Softmax, LogSoftmax
composed     Composed: maps one after the other
shapes       Flatten, Residual
starts       initial weights
checks       what is refused

Example:
    >>> import torch
    >>> import coadjoint as co
    >>> f = co.maps.Dense(2, 2, "identity", bias=False)
    >>> _ = torch.nn.init.constant_(f.W, 1.0)
    >>> x, w = torch.zeros(1, 2), torch.tensor([[1.0, 2.0]])
    >>> co.maps.pull(f, x, w).tolist(), co.maps.pull(torch.nn.Tanh(), x, w).tolist()
    ([[3.0, 3.0]], [[1.0, 2.0]])
"""

from __future__ import annotations

from .composed import Composed
from .convolution import Conv
from .dense import Dense, Tied
from .elementwise import Activation
from .map import Map
from .pooling import AvgPool, MaxPool
from .products import bend, bend_parameters, pull, pull_parameters, push
from .shapes import Flatten, Residual
from .softmax import LogSoftmax, Softmax
from .starts import draw_weights

__all__ = [
    "Activation",
    "AvgPool",
    "Composed",
    "Conv",
    "Dense",
    "Flatten",
    "LogSoftmax",
    "Map",
    "MaxPool",
    "Residual",
    "Softmax",
    "Tied",
    "bend",
    "bend_parameters",
    "draw_weights",
    "pull",
    "pull_parameters",
    "push",
]
