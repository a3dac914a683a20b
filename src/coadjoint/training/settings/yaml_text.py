"""YAML: read from the parser's events, and written so that all readers understand the same."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ...errors import MissingError
from .text import Notes, show
from .values import Event, Value, build, is_word

if TYPE_CHECKING:
    import yaml


def check_pyyaml() -> None:
    """Refuse YAML files if PyYAML, an optional package, is missing."""
    try:
        import yaml  # noqa: F401
    except ImportError:
        raise MissingError(
            "YAML needs PyYAML: `pip install pyyaml`, or write a .toml or .json file."
        ) from None


def read(text: str, notes: Notes) -> Value:
    """The values of a YAML text; lines and problems go to the notes."""
    check_pyyaml()
    events = parse_events(text, notes)
    first = next(events, Event("plain", "", 1))  # of a text of comments alone: null
    value = build(first, events, (), notes)
    for event in events:
        raise notes.failure(event.line, "a second document starts here. Keep one in a file.")
    return {} if value is None else value


def parse_events(text: str, notes: Notes) -> Iterator[Event]:
    """PyYAML's events as ours: brackets, and scalars that are plain or quoted.

    No object is constructed; anchors, aliases and tags are noted as problems.
    """
    import yaml

    brackets = {
        yaml.MappingStartEvent: "{",
        yaml.MappingEndEvent: "}",
        yaml.SequenceStartEvent: "[",
        yaml.SequenceEndEvent: "]",
    }
    line = 1
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            line = event.start_mark.line + 1
            anchor = getattr(event, "anchor", None)
            if anchor:
                notes.add(line, f"anchors and aliases are not allowed. Write out {show(anchor)}.")
            tag = getattr(event, "tag", None)
            if tag:
                notes.add(line, f"tags are not allowed. Remove {show(tag)}.")
            if isinstance(event, yaml.ScalarEvent):
                yield Event("quoted" if event.style else "plain", event.value, line)
            elif isinstance(event, yaml.AliasEvent):  # noted above; some scalar must stand here
                yield Event("quoted", event.anchor or "", line)
            elif type(event) in brackets:
                yield Event(brackets[type(event)], "", line)
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        code = f"U+{e.character:04X}"
        raise notes.failure(line, f"character {code} is not allowed. Remove it.") from None
    except yaml.MarkedYAMLError as e:
        raise _syntax_failure(e, text, notes) from None
    except (ValueError, OverflowError):
        raise notes.failure(line, "not YAML: an escape or a version is out of range.") from None


def _syntax_failure(error: yaml.MarkedYAMLError, text: str, notes: Notes) -> Exception:
    """The error for text that is not YAML, with a guess at the cause: no end, or a tab.

    PyYAML may give two marks: where the problem is, and where the construct around it begins.
    """
    mark = error.problem_mark or error.context_mark
    opened = error.context_mark or error.problem_mark
    assert mark is not None
    assert opened is not None
    reason = f"not YAML: {error.problem or error.context}."
    if opened.line < mark.line:
        place = f"line {opened.line + 1}, column {opened.column + 1}"
        reason += f" The construct that begins at {place} may not be closed."
    line_text = "".join(text.splitlines()[mark.line : mark.line + 1])
    if re.match(r" *\t", line_text):
        reason = "a tab cannot indent YAML. Use spaces."
    return notes.failure(mark.line + 1, reason)


def to_yaml(values: Mapping[str, object]) -> str:
    """Values as YAML, one line for each key; lists stay on one line."""
    check_pyyaml()
    import yaml

    # an infinite width, so that long texts are not broken into lines
    text: str = yaml.dump(
        values, Dumper=make_dumper(), sort_keys=False, allow_unicode=True, width=float("inf")
    )
    return text


@functools.cache
def make_dumper() -> type[yaml.SafeDumper]:
    """PyYAML's dumper, with quotes around words that some readers take for something else."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes plain data without anchors."""

        def ignore_aliases(self, data: object) -> bool:
            """Always: a list that appears twice is written twice."""
            return True

    def write_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        """In quotes, unless all readers take the text for a word."""
        style = None if is_word(value) else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", str(value), style=style)

    def write_list(
        dumper: yaml.SafeDumper, value: list[object] | tuple[object, ...]
    ) -> yaml.SequenceNode:
        """On one line: [1, 2]."""
        return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)

    def write_mapping(dumper: yaml.SafeDumper, value: Mapping[str, object]) -> yaml.MappingNode:
        """A line for each key, in their order; {} if it is empty."""
        pairs = list(value.items())
        return dumper.represent_mapping("tag:yaml.org,2002:map", pairs, flow_style=not value)

    Dumper.add_representer(str, write_text)
    Dumper.add_representer(list, write_list)
    Dumper.add_representer(tuple, write_list)
    Dumper.add_representer(dict, write_mapping)
    Dumper.add_multi_representer(Mapping, write_mapping)  # type: ignore[type-abstract]
    # Subclasses, as numpy's, are written as the plain type.
    Dumper.add_multi_representer(str, write_text)
    Dumper.add_multi_representer(int, lambda dumper, value: dumper.represent_int(int(value)))
    Dumper.add_multi_representer(float, lambda dumper, value: dumper.represent_float(float(value)))
    return Dumper
