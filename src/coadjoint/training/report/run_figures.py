"""The figures of a run: training curves, and what the probes saw inside the gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ..metric_names import metric_stem
from .curves import Curve
from .figures import NO_VALUES, HeatMap, LineChart, PageFigure, Probe, Scale, ValueAxis
from .parameter_names import words_for
from .read import RunRecord, as_mapping
from .text import SHARE_METRICS, Row, finite_or_nan, parse_goal, shown_metric
from .wording import TIME_WORDS, FigureWords

# Curves that only some optimisers have: the page leaves out those that a run did not record. All
# other curves that it did not record are shown empty, with the reason.
OPTIONAL_CURVES = ("rate", "distance", "share", "damping", "cg")
PENALTY_CURVES = ("penalty", "rho")
MAX_METRICS = 12
PARAMETERS = {
    "W": "state to state",
    "R": "input to state",
    "b": "bias of the state",
    "x0": "initial state",
    "V": "state to output",
    "D": "input to output",
    "b_o": "bias of the output",
}
MAP_PARAMETERS = {"W": "weights", "b": "biases"}  # of a chain; other names speak for themselves
COMPONENTS = 2  # the array of a probe that holds the components of the gradient
MAX_LETTERS = 6  # parameters of maps with a heatmap


@dataclass(frozen=True)
class CurveFigure:
    """A curve of metrics.jsonl and how it is drawn."""

    kind: str  # of the row: "train" or "probe"
    key: str  # of the values in such a row
    title: str
    about: str
    label: str
    scale: Scale = "linear"
    smooth: bool = False
    empty: str = NO_VALUES
    rule: tuple[float, str] | None = None  # a horizontal line and its label


TRAINING = [
    CurveFigure(
        "train", "gradient", "Gradient norm", "of all parameters together, before clipping",
        "norm of the gradient", "log", smooth=True,
    ),
    CurveFigure(
        "train", "penalty", "Penalty", TIME_WORDS.penalty, "penalty G", "auto",
        smooth=True, empty="No penalty: plain backpropagation has none.",
    ),
    CurveFigure(
        "train", "rho", "Penalty weight", "ρ in L + ρ G", "weight ρ", "auto",
        empty="No penalty, so there is no weight.",
    ),
    CurveFigure(
        "train", "rate", "Learning rate", "of the optimiser (--lr), after its schedule",
        "learning rate", "auto",
    ),
    CurveFigure(
        "train", "distance", "Distance of the direction from the gradient",
        "√(2 − 2 cos θ), where θ is the angle between them", "distance", smooth=True,
        rule=(1, "Galvan's condition for convergence: below 1"),
    ),
    CurveFigure(
        "train", "share", "Share of the step that was taken",
        "chosen by the step rule or the line search", "share", "auto",
    ),
    CurveFigure(
        "train", "damping", "Damping", "of the model that conjugate gradients minimise",
        "damping", "log",
    ),
    CurveFigure("train", "cg", "Conjugate gradient iterations", "per training step", "iterations"),
]  # fmt: skip
PROBED = [
    CurveFigure("probe", "decay", *TIME_WORDS.decay, rule=(0, "neither vanishes nor explodes")),
    CurveFigure(
        "probe", "radius", "Spectral radius", "the largest absolute eigenvalue of W",
        "spectral radius of W", rule=(1, "radius 1"),
    ),
]  # fmt: skip


@dataclass(frozen=True)
class RunFigures:
    """Draws the figures of one run."""

    run: RunRecord

    def training(self) -> list[PageFigure]:
        """Loss, held-out metrics and the curves of training."""
        goal_metric, _, _ = parse_goal(self.run.result.get("goal"))
        goal_stem = metric_stem(goal_metric)
        stems = [stem for stem in self.run.held_out_stems() if stem != "loss"]
        stems.sort(key=lambda stem: (stem != goal_stem, stem))  # the metric of the goal comes first
        figures = [self._loss()]
        figures += [self._held_out(k, stem) for k, stem in enumerate(stems[:MAX_METRICS])]
        figures += [self._curve(curve) for curve in TRAINING if not self._is_idle(curve)]
        return figures

    def inside(self) -> list[PageFigure]:
        """What probes saw: costates, components of the gradient, gradients by parameter."""
        words = self.run.words
        heatmaps = [self._heat(1, "costates", words.costates)]
        components = self._heat(COMPONENTS, "temporal", words.components)
        # Only networks of one layer and one direction have components.
        if heatmaps[0].empty or not components.empty:
            heatmaps.append(components)
        return [
            *heatmaps,
            *(self._curve(curve) for curve in PROBED if not self._is_idle(curve)),
            *self._norms(),
        ]

    def _common(self) -> Row:
        """What all figures over steps share: marks, and "clock".

        There are marks where pretraining ended, and at the success. With "clock" the page also
        tells the time at which a step was taken.
        """
        step = finite_or_nan(self.run.result.get("success_step"))
        pretrain = finite_or_nan(as_mapping(self.run.config.get("gradient")).get("pretrain"))
        marks = []
        if 0 < pretrain < self.run.last_step:
            marks.append({"x": pretrain, "label": "end of pretraining"})
        if self.run.result.get("success") is True and not math.isnan(step):
            marks.append({"x": step, "label": "success"})
        return {"marks": marks, "clock": True}

    def _loss(self) -> PageFigure:
        """The loss on training batches and on every held-out split."""
        training = self.run.store.curve("train", "loss", name="training")
        chart = LineChart(
            "loss",
            "Loss",
            f"on each training batch and on held-out {self.run.words.units}{self._loss_unit()}",
            ValueAxis(f"loss per {self.run.words.unit}", "auto"),
            [training, *self.run.held_out("loss")],
            smooth=True,
            extras=self._common(),
        )
        return chart.figure()

    def _loss_unit(self) -> str:
        """How the loss is made of time steps, and its unit if it is another than the errors'."""
        over_steps = self.run.loss_over_steps
        text = f", the {over_steps}" if over_steps else ""
        if not self.run.has_scaled_loss:
            return text
        return (
            f"{text}, in standardised units: the targets have mean 0 and standard deviation 1. "
            "mse and mae are in the units of the data"
        )

    def _curve(self, curve: CurveFigure) -> PageFigure:
        """A curve of metrics.jsonl by itself, with its rule if it has one."""
        words = self.run.words
        if curve.key == "decay":
            title, about, label = words.decay
            curve = replace(curve, title=title, about=about, label=label)
        elif curve.key == "penalty":
            curve = replace(curve, about=words.penalty)
        extras = self._common()
        if curve.rule is not None:
            y, label = curve.rule
            extras["rules"] = [{"y": y, "label": label}]
        chart = LineChart(
            curve.key,
            curve.title,
            curve.about,
            ValueAxis(curve.label, curve.scale),
            [self.run.store.curve(curve.kind, curve.key)],
            curve.smooth,
            empty=curve.empty,
            extras=extras,
        )
        return chart.figure()

    def _is_idle(self, curve: CurveFigure) -> bool:
        """Whether a curve is left out.

        That is one of a penalty that is always 0 or of another optimiser, a learning rate that is
        always the same, and the spectral radius of a network that has none.
        """
        is_recorded = (curve.kind, curve.key) in self.run.store
        if curve.key == "radius":
            return not np.isfinite(self.run.store.curve(curve.kind, curve.key).values).any()
        if curve.key == "rate" and is_recorded:
            rates = self.run.store.curve(curve.kind, curve.key).values
            return len(np.unique(rates)) == 1
        if curve.key in OPTIONAL_CURVES:
            return not is_recorded
        if curve.key in PENALTY_CURVES and is_recorded:
            return not self.run.store.curve(curve.kind, curve.key).values.any()
        return False

    def _held_out(self, k: int, stem: str) -> PageFigure:
        """The k-th held-out metric, with a rule at the goal if the goal is about it.

        stem: the metric without its tolerance; all tolerances share the figure.
        """
        metric, threshold, goal = parse_goal(self.run.result.get("goal"))
        extras = self._common()
        if metric_stem(metric) == stem and not math.isnan(threshold):
            extras["rules"] = [{"y": threshold, "label": f"goal: {goal}"}]
        label = shown_metric(stem)
        if stem in SHARE_METRICS:
            axis = ValueAxis(label, span=[0, 1])
        else:
            axis = ValueAxis(label, "auto")
        chart = LineChart(
            f"held-out-{k}",
            self.run.held_out_title(stem),
            f"on {self.run.words.units} that are not used for training",
            axis,
            self.run.held_out(stem),
            extras=extras,
        )
        return chart.figure()

    def _heat(self, k: int, id: str, words: FigureWords) -> PageFigure:
        """A heatmap of the k-th array of every probe: 1, the costates; 2, the components.

        Array 0 of a probe holds the times, or layers, of both.
        """
        probes = []
        for step in sorted(self.run.probes):
            arrays = self.run.probes[step]
            probes.append(Probe(step, arrays[0], arrays[k]))
        return HeatMap(id, *words, probes, self._axis(), self._blank(k)).figure()

    def _blank(self, k: int) -> str:
        """What a cell without a colour is, in the heatmap of the k-th array of probes."""
        if k == COMPONENTS and self.run.words.axis:
            return "zero or without parameters"
        return HeatMap.blank

    def _axis(self) -> Row:
        """The axis of heatmaps, for the script, if it is not time."""
        axis = self.run.words.axis
        return {"axis": axis, "names": self.run.layers} if axis else {}

    def _norms(self) -> list[PageFigure]:
        """The norm of the gradient by each parameter, over steps.

        The many parameters of a deep chain have a heatmap for each letter, over its layers; those
        of other networks share a figure with a curve for each.
        """
        store = self.run.store
        curves = [store.curve(*key) for key in store if key[0] == "norm"]
        deep = self.run.layer_norms
        letters = sorted(deep, key=lambda letter: -len(deep[letter]))
        figures = []
        for k, letter in enumerate(letters[:MAX_LETTERS]):
            figures.append(self._layer_norms(k, letter))
        if curves or not figures:
            figures.append(self._norm_curves(curves))
        return figures

    def _layer_norms(self, k: int, letter: str) -> PageFigure:
        """The norm of the gradient by one parameter of every map: over layers and steps."""
        words = FigureWords(
            f"Gradient of {letter} by layer",
            f"norm for the {letter} of map k, maps.k.{letter}, at the layer k + 1 that it leads to",
            "log₁₀ norm of the gradient",
        )
        by_step: dict[float, list[tuple[int, float]]] = {}
        for layer, columns in self.run.layer_norms[letter].items():
            for step, norm in zip(*columns, strict=True):
                by_step.setdefault(step, []).append((layer, norm))
        probes = []
        for step in sorted(by_step):
            layers, norms = np.array(sorted(dict(by_step[step]).items())).T
            with np.errstate(divide="ignore", invalid="ignore"):
                probes.append(Probe(step, layers, np.log10(norms)))
        last = max(max(columns) for columns in self.run.layer_norms.values() if columns)
        return HeatMap(
            f"norms-{k}",
            *words,
            probes,
            self._axis(),
            self._blank(COMPONENTS),
            range(1, last + 1),
        ).figure()

    def _norm_curves(self, curves: list[Curve]) -> PageFigure:
        """The norm of the gradient by each parameter, as curves.

        The caption explains the letters; of "layers.levels.0.0.W" the last part is one.
        """
        letters = {curve.name.rpartition(".")[2] for curve in curves}
        words = words_for(curve.name for curve in curves)
        curves = [curve._replace(name=words[curve.name]) for curve in curves]
        names = MAP_PARAMETERS if self.run.words.axis else PARAMETERS
        meanings = [f"{name}: {text}" for name, text in names.items() if name in letters]
        about = "norm for each parameter"
        if self.run.words.axis:
            about += ". Those of maps.k, which leads from layer k to layer k + 1"
        if meanings:
            about += f". {'; '.join(meanings)}"
        chart = LineChart(
            "norms",
            "Gradient by parameter",
            about,
            ValueAxis("norm of the gradient", "log"),
            curves,
            extras=self._common(),
        )
        return chart.figure()
