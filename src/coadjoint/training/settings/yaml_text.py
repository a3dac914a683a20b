"""YAML: read from the parser's events, and written so that every reader understands the same."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import MissingError
from .text import Notes, show
from .values import Event, build, is_word


def load_pyyaml() -> Any:
    """PyYAML, loaded when it is needed."""
    try:
        import yaml
    except ImportError:
        raise MissingError(
            "YAML needs PyYAML: `pip install pyyaml`, or write a .toml or .json file."
        ) from None
    return yaml


def read(text: str, notes: Notes) -> Any:
    found = events(load_pyyaml(), text, notes)
    first = next(found, Event("plain", "", 1))
    value = build(first, found, (), notes)
    for event in found:
        raise notes.failure(event.line, "a second document starts here. Keep one in a file.")
    return {} if value is None else value


def events(yaml: Any, text: str, notes: Notes) -> Iterator[Event]:
    """The parser's events: nothing is constructed, repeated or followed."""
    marks = {
        yaml.MappingStartEvent: "{", yaml.MappingEndEvent: "}", yaml.SequenceStartEvent: "[", yaml.SequenceEndEvent: "]",
    }  # fmt: skip
    line = 1
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            line = event.start_mark.line + 1
            if getattr(event, "anchor", None):
                notes.add(
                    line, f"anchors and aliases are not allowed. Write out {show(event.anchor)}."
                )
            if getattr(event, "tag", None):
                notes.add(line, f"tags are not allowed. Remove {show(event.tag)}.")
            if isinstance(event, yaml.ScalarEvent):
                yield Event("quoted" if event.style else "plain", event.value, line)
            elif isinstance(event, yaml.AliasEvent):
                yield Event("quoted", event.anchor, line)
            elif type(event) in marks:
                yield Event(marks[type(event)], "", line)
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        raise notes.failure(
            line, f"character U+{e.character:04X} is not allowed. Remove it."
        ) from None
    except yaml.MarkedYAMLError as e:
        mark, opened = e.problem_mark or e.context_mark, e.context_mark or e.problem_mark
        reason = f"not YAML: {e.problem or e.context}."
        if opened.line < mark.line:
            reason += f" What begins at line {opened.line + 1}, column {opened.column + 1} may not be closed."
        if re.match(r" *\t", "".join(text.splitlines()[mark.line : mark.line + 1])):
            reason = "a tab cannot indent YAML. Use spaces."
        raise notes.failure(mark.line + 1, reason) from None
    except (ValueError, OverflowError):
        raise notes.failure(line, "not YAML: an escape or a version is out of range.") from None


def to_yaml(values: Mapping[str, Any]) -> str:
    """A line for each key, and below it those of a mapping; lists on one line."""
    return load_pyyaml().dump(
        values, Dumper=dumper(), sort_keys=False, allow_unicode=True, width=float("inf")
    )


@functools.cache
def dumper() -> Any:
    """PyYAML's own, but for words without quotes that other readers take for something else."""
    yaml = load_pyyaml()

    class Dumper(yaml.SafeDumper):  # type: ignore[name-defined]
        def ignore_aliases(self, data: Any) -> bool:
            return True  # a list that stands twice is written twice

    def text(dumper: Any, value: str) -> Any:
        style = None if is_word(value) else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    def sequence(dumper: Any, value: Any) -> Any:
        return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)

    def mapping(dumper: Any, value: Any) -> Any:
        return dumper.represent_mapping(
            "tag:yaml.org,2002:map", list(value.items()), flow_style=not value
        )

    Dumper.add_representer(str, text)
    Dumper.add_representer(list, sequence)
    Dumper.add_representer(tuple, sequence)
    Dumper.add_representer(dict, mapping)
    Dumper.add_multi_representer(Mapping, mapping)
    Dumper.add_multi_representer(str, lambda dumper, value: text(dumper, str(value)))
    Dumper.add_multi_representer(int, lambda dumper, value: dumper.represent_int(int(value)))
    Dumper.add_multi_representer(float, lambda dumper, value: dumper.represent_float(float(value)))
    return Dumper
