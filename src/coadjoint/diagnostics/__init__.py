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

from .charts import Chart, Figure
from .costates import (
    Components,
    Decay,
    Paths,
    Sensitivity,
    by_input,
    decay,
    entered,
    finite,
    logs_of,
    logs_of_paths,
    paths,
    sensitivity,
    temporal,
)
from .examination import DIAGNOSTICS, Compared, Examination, arrays, evaluate, examine, plot
from .finding import Found
from .jacobians import Lyapunov, Products, jacobians, lyapunov, resolved, singular_values
from .landscape import (
    Along,
    Landscape,
    Noise,
    along,
    asked,
    landscape,
    loss_at,
    noise,
    normalised,
    per_sample,
)
from .units import Saturation, saturation
from .weights import Bounds, Spectrum, at_rest, bounds, slopes_of, spectrum

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
    "Found",
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
    "asked",
    "at_rest",
    "bounds",
    "by_input",
    "decay",
    "entered",
    "evaluate",
    "examine",
    "finite",
    "jacobians",
    "landscape",
    "logs_of",
    "logs_of_paths",
    "loss_at",
    "lyapunov",
    "noise",
    "normalised",
    "paths",
    "per_sample",
    "plot",
    "resolved",
    "saturation",
    "sensitivity",
    "singular_values",
    "slopes_of",
    "spectrum",
    "temporal",
]
