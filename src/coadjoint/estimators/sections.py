"""Settings by section: keys as on the command line, with the defaults for your own data."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from pydantic import ValidationError

from ..errors import ConfigError, InputError, brief, choose, refuse_options
from ..gradients import factory as gradients
from ..networks.chain_factory import is_chain
from ..optimisers import factory as optimisers
from ..optimisers.recipes import OPTIMISERS
from ..tasks.data import Data
from ..training import own_defaults
from ..training.network_section import RECURRENT_DEFAULTS, NetworkSection
from ..training.own_defaults import SectionValues
from ..training.pace import ENDLESS

SECTION_NAMES = ("network", "gradient", "optimiser", "training", "data")
TRAINING_KEYS = (
    "steps",
    "epochs",
    "batch",
    "accumulate",
    "clip",
    "clip_value",
    "clip_mean",
    "weight_noise",
    "gradients",
    "seconds",
    "every",
    "probes",
    "patience",
    "select",
    "nonfinite",
)
DATA_KEYS = ("missing", "standardise", "window", "metrics")


def list_keys() -> dict[str, str]:
    """Return {key: its section}, as in config.yaml; the name of an optimiser is left out."""
    of_gradient = [key for key in inspect.signature(gradients.make).parameters if key != "steps"]
    of_optimiser = list(inspect.signature(optimisers.make).parameters)
    not_keys = ("name", "options", "pretrain")
    keys = dict.fromkeys(NetworkSection.model_fields, "network")
    keys |= dict.fromkeys(of_gradient, "gradient")
    keys |= {key: "optimiser" for key in of_optimiser if key not in not_keys}
    keys |= dict.fromkeys(optimisers.OPTIONS, "optimiser")
    keys |= dict.fromkeys(TRAINING_KEYS, "training")
    keys |= dict.fromkeys(DATA_KEYS, "data")
    return keys


SECTION_OF = list_keys()


def group(values: Mapping[str, Any]) -> SectionValues:
    """Return the settings that are given, by section; None counts as not given.

    Args:
        values: By key. "optimiser" is the name of the optimiser, "options" holds further keys.
    """
    sections: SectionValues = {name: {} for name in SECTION_NAMES}
    more = values.get("options")
    if more is not None and not isinstance(more, Mapping):
        raise InputError(f"options must be a dictionary of settings; got {brief(more)}.")
    given = {key: v for key, v in values.items() if key in SECTION_OF or key == "optimiser"}
    for key, value in (more or {}).items():
        choose("setting in options", key, SECTION_OF)
        if given.get(key) is not None:
            raise InputError(f"{key} is given twice: as a parameter and in options.")
        given[key] = value
    for key, value in given.items():
        if value is None:
            continue
        if key == "optimiser":
            sections["optimiser"]["name"] = value
        else:
            sections[SECTION_OF[key]][key] = plain(value)
    return sections


def plain(value: Any) -> Any:
    """Return a number of numpy as one of Python, which a search over an array of values gives."""
    return value.item() if isinstance(value, np.generic) else value


def complete(given: SectionValues, task: Data) -> tuple[SectionValues, list[str]]:
    """Return the sections with the defaults for this task, and notes on them.

    As the command line does: first the defaults for your own data, then those of the library. The
    training sequences of `task` are cut into chunks if that is the default.
    """
    config = SimpleNamespace(
        network=SimpleNamespace(
            chain=given["network"].get("chain"),
            cell=given["network"].get("cell"),
            hidden=given["network"].get("hidden", RECURRENT_DEFAULTS["hidden"]),
        ),
        gradient=SimpleNamespace(
            method=given["gradient"].get("method"), segments=given["gradient"].get("segments")
        ),
        training=SimpleNamespace(
            batch=given["training"].get("batch"),
            accumulate=given["training"].get("accumulate", 1),
            epochs=given["training"].get("epochs"),
            steps=given["training"].get("steps"),
        ),
    )
    check(given, task)
    filled = own_defaults.fill(config, given, task)
    sections = {name: keys | filled.values.get(name, {}) for name, keys in given.items()}
    if not is_chain(sections["network"]):
        sections["network"] = RECURRENT_DEFAULTS | {"cell": "elman"} | sections["network"]
    sections["training"] = count_steps(sections["training"], task)
    return sections, filled.notes


def check(given: SectionValues, task: Data) -> None:
    """Refuse settings that cannot be used, before defaults are chosen by them."""
    network_section(given["network"])
    training = given["training"]
    for key in ("steps", "epochs", "batch", "accumulate", "every"):
        value = training.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{key} must be a whole number, at least 1; got {brief(value)}.")
    if "steps" in training and "epochs" in training:
        raise ConfigError("steps and epochs both limit the run: give one of them.")
    for key in ("patience", "select"):
        if key in training and "valid" not in task.splits:
            raise ConfigError(
                f"{key} needs a validation set: give a valid_share above 0, and enough data."
            )
    optimiser = given["optimiser"]
    method = gradients.method_name(
        given["gradient"].get("method"), given["gradient"].get("penalty")
    )
    beside = {"dropout": given["network"].get("dropout"), **training}
    name = choose("optimiser", optimiser.get("name", "adam"), OPTIMISERS)
    refuse_options(optimisers.clash_complaints(name, optimiser.get("direction"), method, beside))


def network_section(values: Mapping[str, Any]) -> NetworkSection:
    """Return the section of the network; a value that cannot be used is refused."""
    try:
        return NetworkSection.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        reason = first["msg"][:1].lower() + first["msg"][1:]
        raise InputError(f"{key}: {reason}; got {brief(values.get(key))}.") from None


def count_steps(training: dict[str, Any], task: Data) -> dict[str, Any]:
    """Return the section with steps in place of epochs, and with batch and every."""
    training = dict(training)
    batch = training.setdefault("batch", 32)
    per_epoch = task.steps_per_epoch(batch * training.get("accumulate", 1))
    epochs = training.pop("epochs", None)
    if epochs is not None:
        training["steps"] = epochs * per_epoch
    if "steps" not in training:
        has_budget = "gradients" in training or "seconds" in training
        training["steps"] = ENDLESS if has_budget else 10_000
    every = training.get("every") or per_epoch
    training["every"] = min(every, training["steps"])
    return training
