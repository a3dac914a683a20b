"""Config -> objects, where a stream is learned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigError
from ..training.network_section import CELL_OPTIONS, NetworkSection, Shape
from .build import (
    gradient_of,
    network_of,
    optimiser_of,
    replace_values,
    resolve_dependent_keys,
    set_threads,
)
from .flags import flag, given_values, help_panel, to_plain_dict
from .past import MAY_CHANGE, refuse_if_changed, refuse_if_other_network
from .schema import SECTIONS, Config, GradientSection

ONLINE_KEYS: dict[str, tuple[str, ...]] = {  # the keys that mean something where a stream is learned, by section
    "data": ("target", "features", "kind", "id", "time", "standardise", "missing", "sep", "decimal", "thousands", "header"),
    "network": (
        "cell", "hidden", "activation", "structure", "x0", "bias", "deep", "skip", "freeze", "engine", "init", "radius", "inner", "std",
        *(key for key, field in NetworkSection.model_fields.items() if help_panel(field) == CELL_OPTIONS),
    ),
    "gradient": ("method", "k1", "k2"),
    "optimiser": ("name", "lr", "momentum", "betas", "weight_decay", "schedule", "decay", "end", "warmup"),
    "training": ("steps", "clip", "seed", "every", "checkpoint", "keep", "precision", "threads"),
}  # fmt: skip

ONLINE_HELP = {  # keys that say something else where a stream is learned
    ("data", "standardise"): "each column by the mean and variance of the rows before (default)",
    ("data", "missing"): "what to do with empty cells: refuse (default), ffill",
    ("network", "cell"): "elman (default), lstm, ...: `coadjoint cells` lists them",
    ("optimiser", "name"): "sgd, momentum, nesterov, adagrad, rmsprop, adam (default), adamw, ...",
    (
        "optimiser",
        "schedule",
    ): "how the step size changes: constant (default), exponential, inverse-time, linear, cosine",
    ("training", "steps"): "at most so many steps (to the end of the stream)",
    ("training", "every"): "steps between rows of metrics.jsonl (1,000)",
    ("training", "checkpoint"): "steps between checkpoints (10,000)",
    ("training", "keep"): "checkpoints that stay (2)",
}


@dataclass(frozen=True)
class OnlineJob:
    """What a Config means for a stream: a network, the stream, and the arguments of co.online.learn."""

    config: Config
    network: Any
    stream: Any
    arguments: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """The config as a file holds it: the keys that mean something here."""
        keys = ONLINE_KEYS | {"data": ("train", *ONLINE_KEYS["data"])}
        kept = {
            name: {k: v for k, v in section.items() if k in keys.get(name, ())}
            for name, section in to_plain_dict(self.config).items()
        }
        return {name: section for name, section in kept.items() if section}


def build_stream_job(
    config: Config, classes: list[str] | None, window: int, past: Any = None
) -> OnlineJob:
    """Make the stream, the network, the learner and the optimiser; what one of them declines is declined here. past: as in
    `build`."""
    import torch

    from ..training import learning, online

    for name in SECTIONS:
        allowed = (*ONLINE_KEYS.get(name, ()), *(("train",) if name == "data" else ()))
        for key in sorted(getattr(config, name).model_fields_set):
            if key not in allowed:
                raise ConfigError(f"{flag(name, key)} does nothing where a stream is learned.")
    t, g, data = config.training, config.gradient, given_values(config.data)
    learner = choose_learner(g)
    every = (
        {} if "checkpoint" in t.model_fields_set else {"checkpoint": 10_000}
    )  # single steps are quick
    cell = config.network.cell or "elman"
    config = resolve_dependent_keys(
        replace_values(config, network={"cell": cell}, gradient={"method": learner}, training=every)
    )
    refuse_if_changed(config, past)
    set_threads(t.threads, config.network.hidden)
    dtype = torch.float64 if t.precision == 64 else torch.float32
    stream = online.read(data.pop("train"), classes=classes, dtype=dtype, **data)
    refuse_if_other_network(config, stream, past)
    net = network_of(config, stream, "cpu")
    config = replace_values(config, training={"threads": torch.get_num_threads()})
    t = config.training
    method, optimiser = gradient_of(config), optimiser_of(config)
    method.stream(net)
    learning.choose_optimiser(optimiser, net, t.steps)
    told = OnlineJob(config, net, stream, {})
    settings = {
        **told.settings,
        "training": {k: v for k, v in told.settings["training"].items() if k not in MAY_CHANGE},
    }
    about = {
        "network": settings.pop("network"),
        "shape": Shape.of(net).model_dump(),
        "precision": t.precision,
        "task": stream.name,
    }
    return replace(
        told,
        arguments={
            **{k: getattr(t, k) for k in ("clip", "steps", "seed", "checkpoint", "keep")},
            "learner": method,
            "optimiser": optimiser,
            "every": t.every or 1000,
            "window": window,
            "description": {**about, "settings": settings, "classes": classes, "window": window},
        },
    )


def choose_learner(g: GradientSection) -> str:
    """rtrl, or truncated where k1 and k2 are given."""
    if g.method not in (None, "rtrl", "truncated"):
        raise ConfigError(f"--learner must be rtrl or truncated; got {g.method!r}.")
    learner = g.method or ("rtrl" if g.k1 is None and g.k2 is None else "truncated")
    if learner == "truncated" and g.k1 is None:
        raise ConfigError(
            "--learner truncated needs --k1, and --k2 if losses are pulled back further."
        )
    if learner == "rtrl" and (g.k1 is not None or g.k2 is not None):
        raise ConfigError("--k1 and --k2 belong to --learner truncated: rtrl learns at every step.")
    return learner
