"""What a step reads of its results: few readings, the same values."""

import math

import torch

from coadjoint.gradients.evaluation import read_numbers
from coadjoint.training.step import nonfinite_names


def test_values():
    assert read_numbers([]) == []
    scalars = [torch.tensor(0.1), torch.tensor(math.inf), torch.tensor(0.1, dtype=torch.float64)]
    assert read_numbers(scalars) == [float(y) for y in scalars]


def test_names_of_what_is_not_finite():
    large = torch.full((3,), 3e38)  # finite, but not its sum
    parameters = {"W": torch.ones(2, 2), "large": large, "b": torch.tensor([0.0, math.nan])}
    assert nonfinite_names(parameters) == ["b"]
    del parameters["b"]
    assert nonfinite_names(parameters) == []
    parameters["W"][0, 1] = -math.inf
    assert nonfinite_names(parameters) == ["W"]
