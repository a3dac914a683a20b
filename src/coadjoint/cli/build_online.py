"""Config -> objects, for learning from a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..training.network_section import CELL_OPTIONS, NetworkSection, Shape
from . import chains
from .build import (
    gradient_of,
    network_of,
    optimiser_of,
    replace_values,
    resolve_dependent_keys,
    set_threads,
)
from .flags import KeyValues, SectionValues, flag, given_values, help_panel, to_plain_dict
from .past import MAY_CHANGE, refuse_if_changed, refuse_if_other_network
from .schema import SECTIONS, Config, GradientSection

if TYPE_CHECKING:
    from ..tasks.files.stream import File
    from ..training.storage import CheckpointOutline
    from .build import AnyNetwork

# Options of single cells.
CELL_KEYS = [k for k, f in NetworkSection.model_fields.items() if help_panel(f) == CELL_OPTIONS]
# The keys that apply to a stream, by section.
ONLINE_KEYS: dict[str, tuple[str, ...]] = {
    "data": (
        "target", "features", "kind", "id", "time", "standardise", "missing", "sep", "decimal",
        "thousands", "header",
    ),
    "network": (
        "cell", "hidden", "activation", "structure", "x0", "bias", "deep", "skip", "freeze",
        "engine", "init", "radius", "inner", "std",
        *CELL_KEYS,
    ),
    "gradient": ("method", "k1", "k2"),
    "optimiser": (
        "name", "lr", "momentum", "betas", "weight_decay", "schedule", "decay", "end", "warmup",
    ),
    "training": ("steps", "clip", "seed", "every", "checkpoint", "keep", "precision", "threads"),
}  # fmt: skip

# The help of keys whose meaning or default differs for a stream.
ONLINE_HELP = {
    ("data", "standardise"): "scale each column by the mean and variance of the rows so far "
    "(default)",
    ("data", "missing"): "how to handle missing values (refuse or ffill; default refuse)",
    ("network", "cell"): "elman (default), lstm, ...: `coadjoint cells` lists them",
    ("optimiser", "name"): "sgd, momentum, nesterov, adagrad, rmsprop, adam (default), adamw, ...",
    ("optimiser", "schedule"): (
        "how the step size changes during training (constant, exponential, inverse-time, linear "
        "or cosine; default constant)"
    ),
    ("training", "steps"): "stop after this many steps (default: at the end of the stream)",
    ("training", "every"): "steps between rows of metrics.jsonl (default 1,000)",
    ("training", "checkpoint"): "steps between checkpoints (default 10,000)",
    ("training", "keep"): "checkpoints to keep (default 2)",
}

# Keys that co.online.learn calls by the same name.
SAME_NAMES = ("clip", "steps", "seed", "checkpoint", "keep")


@dataclass(frozen=True)
class OnlineJob:
    """A network, a stream, and the arguments of co.online.learn, as a Config describes them."""

    config: Config
    network: AnyNetwork
    stream: File
    arguments: KeyValues

    @property
    def settings(self) -> SectionValues:
        """The config as a file holds it, without the keys that do not apply to a stream."""
        return online_settings(self.config)


def online_settings(config: Config) -> SectionValues:
    """The settings of a config that apply to a stream: {section: {key: value}}."""
    settings: SectionValues = {}
    for name, section in to_plain_dict(config).items():
        for key, value in section.items():
            if applies_online(name, key):
                settings.setdefault(name, {})[key] = value
    return settings


def applies_online(section: str, key: str) -> bool:
    """Whether a key has a meaning for a stream. `train` is the stream itself."""
    return (section, key) == ("data", "train") or key in ONLINE_KEYS.get(section, ())


def build_stream_job(
    config: Config,
    classes: list[str] | None,
    window: int,
    past: CheckpointOutline | None = None,
) -> OnlineJob:
    """Make the stream, the network, the learner and the optimiser of a config.

    classes: the labels, or None to find them in the file; window: the steps of the moving averages;
    past: the outline of the checkpoint to resume from, None for a new run. What one of the parts
    refuses is refused here.
    """
    import torch

    from ..gradients.rtrl import RTRL
    from ..gradients.truncated import Truncated
    from ..training import learning, online

    refuse_if_not_online(config)
    config = resolve_dependent_keys(resolve_online_defaults(config))
    refuse_if_changed(config, past)
    set_threads(config.training.threads, chains.widest_layer(config))
    dtype = torch.float64 if config.training.precision == 64 else torch.float32
    data = given_values(config.data)
    stream = online.read(data.pop("train"), classes=classes, dtype=dtype, **data)
    refuse_if_other_network(config, stream, past)
    net = network_of(config, stream, "cpu")
    # The config records the threads that are used, where none were asked for.
    config = replace_values(config, training={"threads": torch.get_num_threads()})
    learner = gradient_of(config)
    optimiser = optimiser_of(config)
    # Made here only because either may refuse the network, while nothing is written yet.
    assert isinstance(learner, RTRL | Truncated)
    learner.stream(net)
    learning.choose_optimiser(optimiser, net, config.training.steps)
    arguments: KeyValues = {key: getattr(config.training, key) for key in SAME_NAMES}
    arguments |= {
        "learner": learner,
        "optimiser": optimiser,
        "every": config.training.every or 1000,
        "window": window,
        "description": describe_online(config, net, stream, classes, window),
    }
    return OnlineJob(config, net, stream, arguments)


def refuse_if_not_online(config: Config) -> None:
    """Refuse a setting that has no effect on learning from a stream."""
    for name in SECTIONS:
        for key in sorted(getattr(config, name).model_fields_set):
            if not applies_online(name, key):
                raise ConfigError(f"{flag(name, key)} has no effect when learning from a stream.")


def resolve_online_defaults(config: Config) -> Config:
    """Fill in the cell, the learner and the steps between checkpoints."""
    training: KeyValues = {}
    if "checkpoint" not in config.training.model_fields_set:
        training["checkpoint"] = 10_000  # a step of a stream is one row, so it is quick
    return replace_values(
        config,
        network={"cell": config.network.cell or "elman"},
        gradient={"method": choose_learner(config.gradient)},
        training=training,
    )


def describe_online(
    config: Config, net: AnyNetwork, stream: File, classes: list[str] | None, window: int
) -> KeyValues:
    """The description in a checkpoint and a model file: what builds and recognises the run again.

    Settings that may change when a run is resumed are left out.
    """
    settings = online_settings(config)
    training = settings["training"]
    settings["training"] = {k: v for k, v in training.items() if k not in MAY_CHANGE}
    return {
        "network": settings.pop("network"),
        "shape": Shape.of(net).model_dump(),
        "precision": config.training.precision,
        "task": stream.name,
        "settings": settings,
        "classes": classes,
        "window": window,
    }


def choose_learner(section: GradientSection) -> str:
    """The learner of a section, "truncated" or "rtrl".

    By default it is truncated if k1 (steps between gradients) or k2 (steps to backpropagate) is
    given, and rtrl otherwise.
    """
    has_windows = section.k1 is not None or section.k2 is not None
    learner = section.method
    if learner is None:
        learner = "truncated" if has_windows else "rtrl"
    if learner not in ("rtrl", "truncated"):
        raise ConfigError(f"--learner must be rtrl or truncated; got {learner!r}.")
    if learner == "truncated" and section.k1 is None:
        raise ConfigError(
            "--learner truncated needs --k1; also --k2, to backpropagate further than --k1 steps."
        )
    if learner == "rtrl" and has_windows:
        raise ConfigError("--k1 and --k2 apply to --learner truncated; rtrl updates at every step.")
    return learner
