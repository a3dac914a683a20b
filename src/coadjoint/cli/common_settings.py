"""What the runs of a comparison have in common: settings that all share, defaults that were chosen.

The settings are those that runs have in the end, with all defaults: what config.yaml will hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..training.settings import yaml_text
from .flags import KeyValues, SectionValues, given_by_user, to_plain_dict
from .schema import Config

# Keys of [training] that say nothing about a method: they differ by run or by machine.
OF_ONE_RUN = ("seed", "threads", "device")


def resolved_settings(config: Config) -> SectionValues:
    """The settings of a row, by section, without what differs by run or by machine."""
    sections = to_plain_dict(config)
    for key in OF_ONE_RUN:
        sections.get("training", {}).pop(key, None)
    return sections


def split_common(rows: Sequence[SectionValues]) -> tuple[SectionValues, list[SectionValues]]:
    """The keys that have the same value in all rows, and the others of each row, by section."""
    common: SectionValues = {}
    others: list[SectionValues] = [{} for _ in rows]
    pairs = {(section, key): None for row in rows for section in row for key in row[section]}
    for section, key in pairs:
        values = [row.get(section, {}).get(key) for row in rows]
        if all(value == values[0] for value in values):
            common.setdefault(section, {})[key] = values[0]
            continue
        for other, value in zip(others, values, strict=True):
            if value is not None:
                other.setdefault(section, {})[key] = value
    return common, others


def put_settings(content: KeyValues, rows: Sequence[SectionValues]) -> None:
    """Put settings into compare.json: "shared" of all rows, "others" of each.

    content: what compare.json holds; rows: the settings of its rows, in their order.
    """
    content["shared"], others = split_common(rows)
    for entry, other in zip(content["rows"], others, strict=True):
        entry["others"] = other


def describe_defaults(notes: Mapping[str, Sequence[str]]) -> list[str]:
    """What the defaults chose, in lines; notes: those of each row, by its name.

    Each choice is told once, after the names of the rows that have it if others have another one.
    """
    names: dict[tuple[str, ...], list[str]] = {}
    for name, row_notes in notes.items():
        names.setdefault(tuple(row_notes), []).append(name)
    lines = []
    for row_notes, row_names in names.items():
        before = f"{', '.join(row_names)}: " if len(names) > 1 else ""
        lines += [f"{before}{note}" for note in row_notes]
    return lines


def is_stored_config(text: bytes, config: Config) -> bool:
    """Whether the file of a run's settings, as a comparison holds it, is that of a config.

    Comparisons of earlier versions also hold the defaults of all keys, and keep them.
    """
    ours = (given_by_user(config), to_plain_dict(config))
    return text in [yaml_text.to_yaml(values).encode() for values in ours]
