"""Diagnostics: questions asked of an Evaluation. Each answer is arrays, with a chart.

This package imports `tasks`, `gradients` and what is above them; it knows nothing of training.

finding       what every answer has: arrays, a summary, a chart
costates      how costates and temporal components decay, what inputs and paths they follow
jacobians     singular values and Lyapunov exponents of products of Jacobians
weights       spectra and bounds
units         saturation
landscape     gradient noise, the loss along directions
examination   DIAGNOSTICS by name, examine
charts        the charts, drawn
"""

from __future__ import annotations

from ..errors import renamed_attributes
from .charts import Chart, Figure
from .costates import (
    Components,
    Decay,
    Paths,
    Sensitivity,
    decay,
    input_costates,
    log_norms_of,
    log_path_shares,
    log_sensitivities,
    nan_unless_finite,
    paths,
    sensitivity,
    temporal,
)
from .examination import DIAGNOSTICS, Compared, Examination, arrays, evaluate, examine, plot
from .finding import Finding
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
from .units import Saturation, saturation
from .weights import Bounds, Spectrum, bounds, slopes_at_rest, spectrum, unit_slopes

__all__ = [
    "DIAGNOSTICS",
    "Along",
    "Bounds",
    "Chart",
    "Compared",
    "Components",
    "Decay",
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
    "along",
    "arrays",
    "bounds",
    "decay",
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
