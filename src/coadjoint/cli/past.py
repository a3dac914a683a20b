"""Settings of a run that goes on: what may have changed since it began, and what may not."""

from __future__ import annotations

from typing import Any

from ..errors import StorageError
from ..training.network_section import Shape
from .flags import errors_name_flags, to_plain_dict
from .schema import Config

# keys of [training] that may change when a run goes on
MAY_CHANGE = ("steps", "patience", "checkpoint", "keep", "threads", "tensorboard", "device")


def refuse_if_changed(config: Config, past: Any) -> None:
    """Refuse a config in which a key has another value than in the description of the run's checkpoint: it is compared again,
    whole, when the run goes on, but by then it has been obeyed."""
    about = past.description if past is not None and isinstance(past.description, dict) else {}
    settings = about.get("settings")
    sections = {"network": about.get("network"), **(settings if isinstance(settings, dict) else {})}
    for name, section in to_plain_dict(config).items():
        told = sections.get(name)
        then: dict[str, Any] = told if isinstance(told, dict) else {}
        for key, now in section.items():
            if key in then and then[key] != now and not (name == "training" and key in MAY_CHANGE):
                where = f"{'' if name == 'network' else 'settings.'}{name}.{key}"
                raise StorageError(
                    f"{past.source} cannot be gone on from: {where} ({then[key]!r} then, {now!r} now) has changed since "
                    "the run began. Restore it in config.yaml, or start a new run."
                )


def refuse_if_other_network(config: Config, task: Any, past: Any) -> None:
    """Refuse a config whose network is not that of the run's checkpoint, before there is memory for it."""
    from ..training.model_schema import outline_network
    from ..training.restore import compare_tensors

    if past is not None:
        with errors_name_flags():
            tensors = outline_network(config.network, Shape.of(task), config.training.precision)
        compare_tensors(tensors, past.outline, past.source)
