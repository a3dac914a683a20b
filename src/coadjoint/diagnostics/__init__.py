"""Diagnostics: questions about an Evaluation, answered by arrays and a chart.

This package imports `tasks`, `gradients` and the packages above them; it knows nothing of training.

finding       what every diagnostic returns: arrays, figures, a chart
costates      how costates and components of the gradient decay, along which paths
outputs       how much outputs depend on inputs and states, and by how many directions
jacobians     singular values and Lyapunov exponents of products of Jacobians
weights       spectra of W, and bounds that follow from them
units         slopes of units, and how saturated they are
depth         the maps of a chain, evaluated again for diagnostics
convergence   how far a direction is from the gradient, and bounds that follow
landscape     gradient noise, and the loss along directions
examination   DIAGNOSTICS by name, examine
charts        charts, and how matplotlib draws them

Example:
    >>> import torch
    >>> import coadjoint as co
    >>> net = co.Network("elman", inputs=1, hidden=2, outputs=1)
    >>> e = co.BPTT()(net, co.Batch(torch.ones(5, 3, 1), torch.ones(3, 1)), "squared")
    >>> co.diagnostics.decay(e).log_norms.shape
    (6,)
"""

from __future__ import annotations

from ..errors import renamed_attributes
from .charts import Chart, Figure
from .convergence import (
    ConvergenceBounds,
    DirectionDistance,
    convergence_bounds,
    direction_distance,
)
from .costates import (
    Components,
    Decay,
    Paths,
    decay,
    log_norms_of,
    log_path_shares,
    paths,
    temporal,
)
from .examination import DIAGNOSTICS, Compared, Examination, arrays, evaluate, examine, plot
from .finding import Finding, nan_unless_finite
from .jacobians import Lyapunov, Products, jacobians, log_singular_values, lyapunov, singular_values
from .landscape import (
    Along,
    Landscape,
    Noise,
    along,
    known_criterion,
    landscape,
    loss_at,
    noise,
    normalised_direction,
    per_sample,
)
from .outputs import (
    Sensitivity,
    StableRank,
    input_costates,
    log_sensitivities,
    sensitivity,
    stable_rank,
)
from .units import Saturation, saturation, slopes_at_rest, unit_slopes
from .weights import Bounds, Spectrum, bounds, spectrum

__all__ = [
    "DIAGNOSTICS",
    "Along",
    "Bounds",
    "Chart",
    "Compared",
    "Components",
    "ConvergenceBounds",
    "Decay",
    "DirectionDistance",
    "Examination",
    "Figure",
    "Finding",
    "Landscape",
    "Lyapunov",
    "Noise",
    "Paths",
    "Products",
    "Saturation",
    "Sensitivity",
    "Spectrum",
    "StableRank",
    "along",
    "arrays",
    "bounds",
    "convergence_bounds",
    "decay",
    "direction_distance",
    "evaluate",
    "examine",
    "input_costates",
    "jacobians",
    "known_criterion",
    "landscape",
    "log_norms_of",
    "log_path_shares",
    "log_sensitivities",
    "log_singular_values",
    "loss_at",
    "lyapunov",
    "nan_unless_finite",
    "noise",
    "normalised_direction",
    "paths",
    "per_sample",
    "plot",
    "saturation",
    "sensitivity",
    "singular_values",
    "slopes_at_rest",
    "spectrum",
    "stable_rank",
    "temporal",
    "unit_slopes",
]

__getattr__ = renamed_attributes(
    __name__,
    {
        "Found": "Finding",
        "asked": "known_criterion",
        "at_rest": "slopes_at_rest",
        "by_input": "log_sensitivities",
        "entered": "input_costates",
        "finite": "nan_unless_finite",
        "logs_of": "log_norms_of",
        "logs_of_paths": "log_path_shares",
        "normalised": "normalised_direction",
        "resolved": "log_singular_values",
        "slopes_of": "unit_slopes",
    },
)
