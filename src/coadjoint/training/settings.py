"""Settings: TOML, YAML and JSON files read strictly, with the line of every key.

A file becomes nested dicts and lists of str, int, float, bool and None, or an error that lists what is wrong with it, line
by line. What two readers may understand differently is refused, not guessed: `no`, `012`, `1:30`, a key that appears twice.
A file is data: it names no types and repeats nothing by reference, and its size and depth are bounded.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CoadjointError, ConfigError, MissingError, nearest, said
from . import files
from .files import File

BYTES, DEPTH, SHOWN = 1_000_000, 8, 20  # of a file; of mappings and lists inside each other; problems in one error
KEY = 1000  # characters: YAML readers give up on a longer key
TOO_DEEP = f"nested more than {DEPTH} deep. Flatten it."
Address = tuple[str | int, ...]


@dataclass(frozen=True)
class Settings:
    """The values of a file, and where its keys stood: lines[("training", "lr")] = 12."""

    values: dict[str, Any]
    name: str
    lines: Mapping[Address, int]

    def where(self, address: Sequence[str | int] = ()) -> str:
        """("training", "lr") -> "run.yaml:12"; without a line of its own, that of the nearest key around it."""
        line = _line(self.lines, tuple(address))
        return self.name if line is None else f"{self.name}:{line}"


def load(path: File, content: bytes | None = None) -> Settings:
    """Read a .toml, .yaml, .yml or .json file, or its `content`. An empty file holds no settings."""
    notes, suffix = _Notes(_name(path)), Path(path).suffix.lower()
    if suffix not in READERS and os.path.isfile(path):
        raise notes.stop(None, f"settings are read from {', '.join(READERS)} files; got {_show(suffix)}.")
    content = _bytes(path, BYTES, notes) if content is None else content
    text = _decode(content, BYTES, notes)
    values = READERS[suffix](text, notes) if text.strip() else {}
    if not isinstance(values, dict):
        notes.add(1, f"the top level must be a mapping of keys to values; got {type(values).__name__}.")
    notes.check()
    return Settings(values, notes.name, notes.lines)


def read_json(
    source: File | bytes, max_bytes: int = BYTES, error: type[CoadjointError] = ConfigError, name: str = "JSON text"
) -> Any:
    """The value of a JSON file (a Path) or text (str or bytes), with the same rules. name: what errors call a text."""
    file = isinstance(source, os.PathLike)
    notes = _Notes(_name(source) if file else name, error)
    raw = source.encode(errors="surrogatepass") if isinstance(source, str) else source
    text = _decode(_bytes(source, max_bytes, notes) if file else raw, max_bytes, notes)
    try:
        return _quick_json(text)
    except (ValueError, RecursionError):
        pass  # the careful reader says where, and why
    if len(text) > BYTES:
        raise notes.stop(None, "not JSON, or with a key that appears twice, a number out of range or too many levels.")
    value = _json(text, notes)
    notes.check()
    return value


def dump(mapping: Mapping[str, Any], path: File) -> None:
    """Write YAML that `load` reads back to the same values. The file appears whole or not at all."""
    path, notes = Path(path), _Notes(_name(path))
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise notes.stop(None, "settings are written as YAML. Name the file .yaml.")
    _inspect(mapping, (), notes)
    notes.check()
    data = "\n".join([*_block(mapping), ""]).encode()
    if len(data) > BYTES:
        raise notes.stop(None, f"{len(data):,} bytes of settings; at most {BYTES:,} can be read back.")
    files.replace(path, data)


@dataclass
class _Notes:
    """What is found on the way through a file: the line of each key, and the problems."""

    name: str
    error: type[CoadjointError] = ConfigError
    lines: dict[Address, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, line: int | None, text: str) -> None:
        self.problems.append(f"{self.name}{'' if line is None else f':{line}'}: {text}")

    def stop(self, line: int | None, text: str) -> CoadjointError:
        """The error for a file that cannot be read further."""
        self.add(line, text)
        return self.all()

    def all(self) -> CoadjointError:
        more = len(self.problems) - SHOWN
        return self.error("\n".join(self.problems[:SHOWN] + [f"{self.name}: and {more} more problems."] * (more > 0)))

    def check(self) -> None:
        if self.problems:
            raise self.all()

    def key(self, address: Address, line: int, again: bool = False) -> Address:
        """The address of a key that stands here, perhaps again."""
        first = self.lines.setdefault(address, line)
        if again:
            self.add(line, f"key {_show(address[-1])} appears twice (first at line {first}). Remove one.")
        return address


def _line(lines: Mapping[Address, int], address: Address) -> int | None:
    around = (address[:n] for n in range(len(address), 0, -1))
    return next((lines[a] for a in around if a in lines), None)


def _show(value: object) -> str:
    """In quotes, on one line, not too long; an address with dots."""
    shown = repr(".".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _name(path: Any) -> str:
    name = os.fspath(path)
    return name if name.isprintable() else repr(name)


# From a path to text
def _bytes(path: Any, max_bytes: int, notes: _Notes) -> bytes:
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            with open(path, "rb") as file:
                return file.read(max_bytes + 1)
        kind = "a directory. Name a file in it" if stat.S_ISDIR(mode) else "a pipe or device. Name a regular file"
        reason = f"is {kind}."
    except (FileNotFoundError, NotADirectoryError):
        reason = f"does not exist. {_nearest(Path(path))}"
    except PermissionError:
        reason = "no permission to read it. Change its mode or owner."
    except (OSError, ValueError) as e:
        reason = f"cannot be read ({said(e)}). Check the name."
    raise notes.stop(None, reason)


def _nearest(path: Path) -> str:
    """A hint for the first part of a path that is not there."""
    while path.parent != path and not path.parent.is_dir():
        path = path.parent
    with contextlib.suppress(OSError):
        near = nearest(path.name, os.listdir(path.parent))
        if near:
            return f"Did you mean {_name(path.parent / near)}?"
    return "Check the name and the folder."


def _decode(raw: Any, max_bytes: int, notes: _Notes) -> str:
    if len(raw) > max_bytes:
        raise notes.stop(None, f"is larger than {max_bytes:,} bytes, the most that is read.")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise notes.stop(None, "is UTF-16 text. Save it as UTF-8.")
    if b"\0" in raw:
        raise notes.stop(
            raw.count(b"\n", 0, raw.index(0)) + 1, "holds NUL bytes: UTF-16, or no text. Save it as UTF-8."
        )
    try:
        return raw.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        raise notes.stop(line, f"byte 0x{raw[e.start]:02x} is not UTF-8 (latin-1?). Save it as UTF-8.") from None


# Scalars: a value, or a ValueError with the reason
SURROGATE = re.compile(r"[\ud800-\udfff]")
INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
FLOAT = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None} | {
    word: word.lower() == "true" for word in ("true", "True", "TRUE", "false", "False", "FALSE")
}
AMBIGUOUS = [
    (r"no|off|n", "write '{0}' in quotes if you mean the word, false if you mean false."),
    (r"yes|on|y", "write '{0}' in quotes if you mean the word, true if you mean true."),
    (r"none", "write '{0}' in quotes if you mean the word, null if you mean nothing."),
    (r"[-+]?\.?(inf|infinity|nan)", "not a finite number. Write '{0}' in quotes if you mean the word."),
    (r"[-+]?0[0-9_]+(\.[0-9_]*)?(e[-+]?[0-9]+)?", "octal to some readers. Drop the leading zero, or quote it."),
    (r"[-+]?0[box][0-9a-f_]+", "not a decimal number. Write it in decimal, or quote it."),
    (r"[-+]?[0-9][0-9_]*(:[0-9]+)+(\.[0-9_]*)?", "base 60 to some readers. Write a plain number, or quote it."),
    (r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([t\s].*)?", "a date to some readers. Quote it."),
    (r"[-+]?[0-9.]+_[0-9_.]*(e[-+]?[0-9_]+)?", "a number to some readers. Write it without _, or quote it."),
    (r"<<", "merge keys are not allowed. Write the keys out."),
]


def _in_range(value: Any) -> Any:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("beyond 64 bits. Write a smaller integer.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("not a finite number. Write one that is.")
    if isinstance(value, str) and SURROGATE.search(value):
        raise ValueError("not text: it holds half of a surrogate pair.")
    return value


def scalar(text: str) -> Any:
    """What an unquoted word means, in a file or as a flag's value; ValueError, with the reason, if that is not clear."""
    if text in WORDS:
        return WORDS[text]
    if INTEGER.fullmatch(text):
        return _in_range(int(text[:21]))  # 21 characters are beyond 64 bits already
    if FLOAT.fullmatch(text):
        value = _in_range(float(text))
        if value == 0 and re.search("[1-9]", re.split("[eE]", text)[0]):
            raise ValueError("closer to 0 than any float. Write 0.")
        return value
    for pattern, advice in AMBIGUOUS:
        if re.fullmatch(pattern, text, re.IGNORECASE):
            raise ValueError(advice.format(text))
    return _in_range(text)


def _plain_key(text: str) -> str:
    if not isinstance(scalar(text), str):
        raise ValueError("a key must be text. Write it in quotes.")
    return text


def _inspect(value: Any, address: Address, notes: _Notes) -> None:
    """Notes what is not plain data: objects, dates, numbers out of range, keys that are not text."""
    say = lambda text: notes.add(_line(notes.lines, address), f"{_show(address)}: {text}")
    if isinstance(value, Mapping | list | tuple) and len(address) == DEPTH:
        say(TOO_DEEP)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str) or len(_flow(key)) > KEY:
                say(f"key {_show(key)} must be text of at most {KEY} characters.")
            _inspect(key, address, notes)
            _inspect(entry, (*address, str(key)), notes)
    elif isinstance(value, list | tuple):
        for i, entry in enumerate(value):
            _inspect(entry, (*address, i), notes)
    elif not isinstance(value, str | int | float | None):
        say(f"must be text, a number, true, false or null; got {type(value).__name__}. Write it as text.")
    else:
        try:
            _in_range(value)
        except ValueError as e:
            say(str(e))


# JSON and YAML: events -> values
class _Event(NamedTuple):
    kind: str  # { } [ ] "plain" "quoted"
    text: str
    line: int


def _build(event: _Event, events: Iterator[_Event], address: Address, notes: _Notes) -> Any:
    """The value that begins with an event. Depth is bounded, so recursion is."""
    if event.kind in "{[" and len(address) == DEPTH:
        raise notes.stop(event.line, TOO_DEEP)
    if event.kind == "[":
        items: list[Any] = []
        while (entry := next(events)).kind != "]":
            items.append(_build(entry, events, notes.key((*address, len(items)), entry.line), notes))
        return items
    if event.kind == "{":
        mapping: dict[str, Any] = {}
        while (entry := next(events)).kind != "}":
            if entry.kind in "{[":
                raise notes.stop(entry.line, "a key must be text; got a list or mapping.")
            key = _leaf(entry, "a key", _plain_key, notes)
            at = notes.key((*address, key), entry.line, key in mapping)
            mapping[key] = _build(next(events), events, at, notes)
        return mapping
    return _leaf(event, _show(address), scalar, notes)


def _leaf(event: _Event, what: str, plain: Callable[[str], Any], notes: _Notes) -> Any:
    try:
        return (plain if event.kind == "plain" else _in_range)(event.text)
    except ValueError as e:
        notes.add(event.line, f"{what} is {_show(event.text)[1:-1]}: {e}")
        return event.text


JSON = re.compile(r'(?P<quoted>"[^"\\]*+(?:\\.?[^"\\]*+)*+"?)|(?P<plain>[-+.\w]+)|[{}\[\]\n]', re.DOTALL)


def _json(text: str, notes: _Notes) -> Any:
    nest = 0
    for event in _json_events(text):  # before json follows them
        nest += (event.kind in "{[") - (event.kind in "}]")
        if nest > DEPTH:
            raise notes.stop(event.line, TOO_DEEP)
    try:
        json.loads(text, parse_int=len, parse_float=len, parse_constant=len)  # the grammar alone
    except json.JSONDecodeError as e:
        raise notes.stop(e.lineno, f"column {e.colno}: not JSON: {e.msg}.") from None
    events = (e._replace(text=json.loads(e.text)) if e.kind == "quoted" else e for e in _json_events(text))
    return _build(next(events), events, (), notes)


def _quick_json(text: str) -> Any:
    """The value that `_json` gives, many times quicker; ValueError or RecursionError for anything that it may refuse."""
    value = json.loads(
        text,
        object_pairs_hook=_once,
        parse_int=lambda digits: _in_range(int(digits[:21])),  # 21 characters are beyond 64 bits already
        parse_float=scalar,
        parse_constant=scalar,
    )
    if _levels(value, DEPTH + 1) > DEPTH:
        raise ValueError(TOO_DEEP)
    if "\\ud" in text.lower():
        for word in _words(value):
            _in_range(word)
    return value


def _words(value: Any) -> Iterator[str]:
    """Every text in a value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _words(inner)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a key appears twice")
    return mapping


def _levels(value: Any, most: int) -> int:
    """How many mappings and lists stand inside each other, counted up to `most`."""
    if not isinstance(value, dict | list) or most == 0:
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max((_levels(entry, most - 1) for entry in inner), default=0)


def _json_events(text: str) -> Iterator[_Event]:
    line = 1
    for token in JSON.finditer(text):
        if token[0] == "\n":
            line += 1
        else:
            yield _Event(token.lastgroup or token[0], token[0], line)


def _yaml(text: str, notes: _Notes) -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingError("YAML needs PyYAML: `pip install pyyaml`, or write a .toml or .json file.") from None
    events = _yaml_events(yaml, text, notes)
    first = next(events, _Event("plain", "", 1))
    value = _build(first, events, (), notes)
    for event in events:
        raise notes.stop(event.line, "a second document starts here. Keep one in a file.")
    return {} if value is None else value


def _yaml_events(yaml: Any, text: str, notes: _Notes) -> Iterator[_Event]:
    """The parser's events: nothing is constructed, repeated or followed."""
    marks = {
        yaml.MappingStartEvent: "{", yaml.MappingEndEvent: "}", yaml.SequenceStartEvent: "[", yaml.SequenceEndEvent: "]",
    }  # fmt: skip
    line = 1
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            line = event.start_mark.line + 1
            if getattr(event, "anchor", None):
                notes.add(line, f"anchors and aliases are not allowed. Write out {_show(event.anchor)}.")
            if getattr(event, "tag", None):
                notes.add(line, f"tags are not allowed. Remove {_show(event.tag)}.")
            if isinstance(event, yaml.ScalarEvent):
                yield _Event("quoted" if event.style else "plain", event.value, line)
            elif isinstance(event, yaml.AliasEvent):
                yield _Event("quoted", event.anchor, line)
            elif type(event) in marks:
                yield _Event(marks[type(event)], "", line)
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        raise notes.stop(line, f"character U+{e.character:04X} is not allowed. Remove it.") from None
    except yaml.MarkedYAMLError as e:
        mark, opened = e.problem_mark or e.context_mark, e.context_mark or e.problem_mark
        reason = f"not YAML: {e.problem or e.context}."
        if opened.line < mark.line:
            reason += f" What begins at line {opened.line + 1}, column {opened.column + 1} may not be closed."
        if re.match(r" *\t", "".join(text.splitlines()[mark.line : mark.line + 1])):
            reason = "a tab cannot indent YAML. Use spaces."
        raise notes.stop(mark.line + 1, reason) from None
    except (ValueError, OverflowError):
        raise notes.stop(line, "not YAML: an escape or a version is out of range.") from None


def _block(mapping: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Lines of YAML: one for each key, and below it those of a mapping."""
    for key, value in mapping.items():
        inner = isinstance(value, Mapping) and value
        yield f"{indent}{_flow(key)}:" + ("" if inner else f" {_flow(value)}")
        if inner:
            yield from _block(value, indent + "  ")


def _flow(value: Any) -> str:
    """YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_flow(k)}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str) and not _is_word(value):
        return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(value, ensure_ascii=False))
    if isinstance(value, float):  # 1e-05 is text to some readers, 1.0e-05 a number to all
        return re.sub(r"^(-?[0-9]+)e", r"\1.0e", float.__repr__(value))
    return value if isinstance(value, str) else json.dumps(value)


def _is_word(text: str) -> bool:
    """Whether text means itself without quotes."""
    try:
        return bool(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./+-]*", text)) and scalar(text) == text
    except ValueError:
        return False


# TOML: tomllib gives the values, a scan the lines
TOML = re.compile(
    r"""\#[^\n]*
    | (?P<word>"{3}[^"\\]*+(?:(?:\\.?|"{1,2}(?!"))[^"\\]*+)*+(?:"{3,5})?  # strings, closed or not
             | '{3}[^']*+(?:'{1,2}(?!')[^']*+)*+(?:'{3,5})?
             | "[^"\\\n]*+(?:\\[^\n]?[^"\\\n]*+)*+"?
             | '[^'\n]*+'?
             | [^\s"'\#=\[\]{},.]+)
    | [\n=\[\]{}]""",
    re.VERBOSE | re.DOTALL,
)


def _toml(text: str, notes: _Notes) -> Any:
    twice = _toml_lines(text, notes)
    try:
        values = tomllib.loads(text)
    except ValueError as e:
        if twice and str(e).startswith("Cannot"):
            notes.problems += twice
            raise notes.all() from None
        if not isinstance(e, tomllib.TOMLDecodeError):  # int() refuses thousands of digits
            raise notes.stop(None, "an integer is beyond 64 bits. Write a smaller one.") from None
        reason, _, at = " ".join(str(e).split()).partition(" (at ")
        line = int(at.split()[1].rstrip(",")) if at.startswith("line") else text.rstrip().count("\n") + 1
        raise notes.stop(line, f"not TOML: {reason}.") from None
    _inspect(values, (), notes)
    return values


def _toml_lines(text: str, notes: _Notes) -> list[str]:
    """Notes the line of every key outside inline tables; returns what appears twice.

    What tomllib would follow too deep is refused here. What is not TOML is left for tomllib to say.
    """
    twice = _Notes(notes.name, lines=notes.lines)
    last: dict[Address, int] = {}  # array of tables -> the index of its last one so far
    table: Address = ()
    parts: list[str] = []
    line, nest, place = 1, 0, ""
    for token in TOML.finditer(text):
        s = token[0]
        if s == "\n" and not nest:
            place, parts = "", []
        elif place == "=":
            nest += (s in "[{") - (s in "]}")
        elif token["word"]:
            parts.append(_toml_key(s))
        elif s == "=" and parts:
            place, address = "=", (*table, *parts)
            twice.key(address, line, address in notes.lines)
        elif s == "[":
            place += "["
        elif s == "]" and parts and place in ("[", "[["):
            table = ()
            for part in parts:  # through the last table of each array
                array = (*table, part)
                table = (*array, last[array]) if array in last else array
            if place == "[[":
                last[array] = last.get(array, -1) + 1
                table = (*array, last[array])
                notes.key(array, line)
            twice.key(table, line, table in notes.lines)
            place = "]"
        if max(nest, len(parts)) > DEPTH:
            raise notes.stop(line, TOO_DEEP)
        line += s.count("\n")
    return twice.problems


def _toml_key(text: str) -> str:
    try:
        return tomllib.loads(f"key = {text}")["key"] if text[0] in "\"'" else text
    except ValueError:
        return text


READERS: dict[str, Callable[[str, _Notes], Any]] = {".toml": _toml, ".yaml": _yaml, ".yml": _yaml, ".json": _json}
