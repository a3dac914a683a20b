"""Settings as flags, files and error lines: a Config from the command line and from a file."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, get_origin

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ..errors import ConfigError, OptionError, StorageError, escape_controls
from ..errors import nearest as nearest_name
from ..training.network_section import Section
from ..training.settings import SURROGATE, Settings
from .key_types import (
    KEY_TYPES,
    LARGEST_NUMBER,
    LEAST_LIMIT_OF_TYPE,
    choices,
    describe_types,
    join_or,
)
from .schema import NAMES_ELSEWHERE, SECTION_OF, SECTIONS, Config

KeyValues = dict[str, Any]  # the values of one section, by key; checked by its schema
SectionValues = dict[str, KeyValues]  # by section

MOST_LINES = 20  # invalid keys listed in one error


def flag(section: str, key: str) -> str:
    """The flag of a key: --weight-decay for weight_decay, --optimiser for [optimiser] name."""
    word = section if key == "name" else key
    return "--" + word.replace("_", "-")


def parse_flag(section: str, key: str, text: str) -> object:
    """The text of a flag as a value: a number, or a list of numbers, where the key takes numbers.

    Text that is neither is returned as it is: the check of the config says what was expected.
    """
    from ..training.settings import parse_scalar

    types = KEY_TYPES[section, key]
    if str in types:  # free text, or also a list of it: a,b,c
        if len(types) > 1 and "," in text:
            return [part.strip() for part in text.split(",") if part.strip()]
        return text
    words = [value for value in choices(types) if isinstance(value, str)]
    takes_words_only = bool(words) and len(types) == 1
    if text in words or takes_words_only:
        return text
    parts: list[object] = []
    try:
        for part in text.split(","):
            parts.append(parse_scalar(part.strip()) if part.strip() else "")
    except ValueError:
        return text
    return parts if len(parts) > 1 else parts[0]


def resolve(
    file: Settings | None = None, flags: Mapping[str, Mapping[str, Any]] | None = None
) -> Config:
    """The checked config of a file's settings and of flags, {section: {key: value}}.

    Flags take precedence. Invalid keys raise one error, with a line for each.
    """
    values: KeyValues = {}  # a file may hold a value where a section should be
    if file is not None:
        for name, section in file.values.items():
            values[name] = dict(section) if isinstance(section, dict) else section
    flagged: set[tuple[str, str]] = set()
    for name, keys in (flags or {}).items():
        if isinstance(values.setdefault(name, {}), dict):
            values[name].update(keys)
            for key, value in keys.items():
                refuse_if_not_utf8(flag(name, key), value)
        flagged.update((name, key) for key in keys)
    try:
        sections = {name: lists_to_tuples(name, section) for name, section in values.items()}
        return Config.model_validate(sections)
    except ValidationError as error:
        complaints = [explain_invalid(e["loc"], values, file, flagged) for e in error.errors()]
    # pydantic reports a key once for each type that it might have: one line is enough
    lines = list(dict.fromkeys(complaints))
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"... and {len(lines) - MOST_LINES} more."]
    raise ConfigError("\n".join(lines))


def refuse_if_not_utf8(where: str, value: object) -> None:
    """Refuse text that a run folder cannot hold: names of files need not be UTF-8.

    where: the flag that the text came from. Python keeps bytes it cannot decode as surrogates.
    """
    for part in value if isinstance(value, list | tuple) else (value,):
        if isinstance(part, str) and not part.isascii() and SURROGATE.search(part):
            name = repr(os.fsencode(part))[1:]  # b'...' without its b
            raise ConfigError(
                f"{where}: {name} is not valid UTF-8, so a run folder cannot store it. Rename it."
            )


def lists_to_tuples(name: str, section: object) -> object:
    """Section `name` with tuples where its keys take tuples: files and flags have only lists.

    A section that is no mapping is returned as it is, for the check of the config to refuse.
    """
    if not isinstance(section, dict):
        return section
    converted = {}
    for key, value in section.items():
        origins = map(get_origin, KEY_TYPES.get((name, key), ()))
        if tuple in origins and isinstance(value, list):
            value = tuple(value)
        converted[key] = value
    return converted


def explain_invalid(
    loc: tuple[str | int, ...],
    values: Mapping[str, Any],
    file: Settings | None,
    flagged: set[tuple[str, str]],
) -> str:
    """One line about an invalid key: where it is, what was expected, what was found.

    loc: its place in the config, (section,) or (section, key, ...), as pydantic says it. values:
    the config that was checked. flagged: the (section, key) that flags have set.
    """
    name, *rest = (str(part) for part in loc[:2])  # rest: [key], or [] for a section as a whole
    address = (name, *rest)
    value = values[name]
    if rest:
        value = value.get(rest[0])
    printable = tuple(escape_controls(part, lines=False) for part in address)
    where = ".".join(printable)
    if file is not None:
        where = f"{file.where(address)}: {where}"
    if rest and (name, rest[0]) in flagged:  # a flag wins over the file, so the fault is its own
        where = flag(name, rest[0])
    if name not in SECTIONS or (rest and (name, rest[0]) not in KEY_TYPES):
        return f"{where}: {explain_unknown(printable)}"
    if not rest:
        keys = ", ".join(SECTIONS[name].model_fields)
        return f"{where}: must be a section of keys; got {show_value(value)}. Keys: {keys}."
    types = KEY_TYPES[name, rest[0]]
    hint = suggest_value(types, value)
    return f"{where}: must be {describe_types(types)}; got {show_value(value)}.{hint}"


def suggest_value(types: Sequence[object], value: object) -> str:
    """A sentence that says what an invalid value may have been meant for; "" if unknown.

    types: those that its key may have.
    """
    if str in types and isinstance(value, bool | int | float):
        return " Write it in quotes."
    is_whole = isinstance(value, int) and value >= LEAST_LIMIT_OF_TYPE
    if is_whole or (isinstance(value, float) and value > LARGEST_NUMBER):
        return " It is too large."
    if not isinstance(value, str):
        return ""
    near = nearest_name(value, map(str, choices(types)))
    return f" Did you mean '{near}'?" if near else ""


def show_value(value: object) -> str:
    """A value as a settings file would spell it, in at most 60 characters."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # 57 and three dots


def explain_unknown(address: tuple[str, ...]) -> str:
    """What may have been meant by an unknown section, or by an unknown (section, key)."""
    key = address[-1]
    is_section = len(address) == 1
    if key in SECTION_OF:
        instead = "" if is_section else f", not [{address[0]}]"
        return f"'{key}' belongs in section [{SECTION_OF[key]}]{instead}."
    known = list(SECTIONS) if is_section else list(SECTIONS[address[0]].model_fields)
    # The numbers are similarities, 1 for equal names: the further a name is from this section,
    # the more alike it must be. First what other libraries call a key, then the keys of this
    # section, then those of all sections.
    elsewhere = nearest_name(key, NAMES_ELSEWHERE, 0.8)
    if elsewhere:
        near: str | None = NAMES_ELSEWHERE[elsewhere]
    else:
        near = nearest_name(key, known) or nearest_name(key, SECTION_OF, 0.6)
    home = f" of section [{SECTION_OF[near]}]" if near and near not in known else ""
    hint = f"; did you mean '{near}'{home}?" if near else "."
    return f"unknown {'section' if is_section else 'key'} '{key}'{hint} Known: {', '.join(known)}."


def explain_unknown_setting(key: str) -> str:
    """What may have been meant by an unknown key=value, where keys have no sections."""
    near = nearest_name(key, NAMES_ELSEWHERE, 0.8)
    meant = NAMES_ELSEWHERE[near] if near else nearest_name(key, SECTION_OF, 0.6)
    hint = f"; did you mean '{meant}'?" if meant else "."
    return f"unknown setting '{key}'{hint} Settings are the flags of `coadjoint train`."


def given_values(section: Section) -> KeyValues:
    """The keys of a section whose value is not None, with their values."""
    return {key: value for key, value in section if value is not None}


def to_plain_dict(config: Config) -> SectionValues:
    """The config as a file holds it: by section, the keys that have a value, tuples as lists."""
    sections: SectionValues = {}
    for name in SECTIONS:
        for key, value in given_values(getattr(config, name)).items():
            if isinstance(value, tuple):
                value = list(value)
            sections.setdefault(name, {})[key] = value
    return sections


def given_by_user(config: Config) -> SectionValues:
    """The keys that a file or a flag has set, by section, as a file holds them."""
    everything = to_plain_dict(config)
    sections: SectionValues = {}
    for name, keys in everything.items():
        given = getattr(config, name).model_fields_set
        chosen = {key: value for key, value in keys.items() if key in given}
        if chosen:
            sections[name] = chosen
    return sections


def help_panel(key: FieldInfo) -> str | None:
    """The title of the group of flags that lists a key in the help; None for its section's."""
    extra = key.json_schema_extra
    if not isinstance(extra, dict) or "panel" not in extra:
        return None
    return str(extra["panel"])


def with_setting_flags(
    function: Callable[..., None],
    only: Mapping[str, Sequence[str]] | None = None,
    texts: Mapping[tuple[str, str], str] | None = None,
) -> Callable[..., None]:
    """Give a command one flag per key of the config, or per key in `only`.

    The command receives the values as `flags`, {section: {key: value}}. The help of a flag is the
    description of its key, or its text in `texts`, {(section, key): text}.
    """
    signature = inspect.signature(function)
    own_parameters = [p for p in signature.parameters.values() if p.name != "flags"]
    # The flags that the command declares itself, such as --seeds: no key of the config gets them.
    own_flags: set[str] = set()
    for parameter in own_parameters:
        own_flags.update(getattr(parameter.default, "param_decls", None) or ())
    setting_parameters: list[inspect.Parameter] = []
    keys: dict[str, tuple[str, str]] = {}
    for section, model in SECTIONS.items():
        for key, field in model.model_fields.items():
            left_out = only is not None and key not in only.get(section, ())
            # The task is an argument of the commands, not a flag.
            if left_out or (section, key) == ("task", "name") or flag(section, key) in own_flags:
                continue
            name = f"{section}__{key}"
            text = (texts or {}).get((section, key))
            setting_parameters.append(flag_parameter(name, section, key, field, text))
            keys[name] = (section, key)

    def command(**arguments: Any) -> None:
        flags: SectionValues = {}
        for name, (section, key) in keys.items():
            value = arguments.pop(name)
            if value is None:  # the flag was not given
                continue
            if not isinstance(value, bool):
                value = parse_flag(section, key, value)
            flags.setdefault(section, {})[key] = value
        function(flags=flags, **arguments)  # what is left are the function's own parameters

    # typer reads the signature and the annotations to learn which arguments the command takes.
    parameters = []
    for parameter in [*own_parameters, *setting_parameters]:
        parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    annotations = inspect.get_annotations(function, eval_str=True)
    annotations |= {p.name: p.annotation for p in setting_parameters}
    command.__annotations__ = annotations
    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    return command


def flag_parameter(
    name: str, section: str, key: str, field: FieldInfo, text: str | None
) -> inspect.Parameter:
    """A parameter of a command, declared as typer wants it, for one key of the config.

    name: the parameter's name. text: its help; None takes the description of the key.
    """
    types = KEY_TYPES[section, key]
    values = choices(types)
    is_bool = bool in types
    is_text = str in types or any(isinstance(value, str) for value in values)
    words = flag(section, key)
    metavar = ""
    if is_bool:  # typer's way to write a pair of flags: --ragged/--no-ragged
        words = f"{words}/--no-{words.removeprefix('--')}"
    else:
        metavar = "TEXT" if is_text else "NUMBER"
    option = typer.Option(
        None,
        words,
        help=text or describe_key(field, values, is_bool),
        metavar=metavar,
        show_default=False,
        rich_help_panel=help_panel(field) or str(SECTIONS[section].__doc__).rstrip("."),
    )
    parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option)
    return parameter.replace(annotation=Optional[bool] if is_bool else Optional[str])


def describe_key(field: FieldInfo, values: Sequence[object], is_bool: bool) -> str:
    """The help of a key: its description, its choices (`values`) and its default.

    The default of a bool is not shown.
    """
    notes = []
    if len(values) > 1:  # a single word beside numbers, such as auto, is in the description
        notes.append(join_or(values))
    if field.default is not None and not is_bool:
        notes.append(f"default {field.default}")
    text = str(field.description)
    if notes:
        text += f" ({'; '.join(notes)})"
    return text


def config_from_command(
    task: str | None, file: Path | None, flags: Mapping[str, Mapping[str, Any]]
) -> Config:
    """The config of a command line: a task, a settings file and flags, each optional."""
    from ..training import settings

    merged = {name: dict(section) for name, section in flags.items()}
    if task is not None:
        refuse_path(task)
        merged.setdefault("task", {})["name"] = task
    if file is None:
        return resolve(None, merged)
    return resolve(settings.load(file), merged)


def refuse_path(text: str) -> None:
    """Refuse a file or a folder in the place of a built-in task; names of tasks are no paths."""
    name = escape_controls(text, lines=False)
    if Path(text).is_file():
        raise ConfigError(f"{name} is a file, not a built-in task: pass it with --train {name}")
    if not any(sign in text for sign in (".", "/", os.sep)):
        return
    if not Path(text).exists():
        raise StorageError(
            f"{name} does not exist. Name a folder or a file that does, or a built-in task "
            "(`coadjoint tasks` lists them)."
        )
    raise ConfigError(f"{name} is not a built-in task: `coadjoint tasks` lists them.")


def read_run_config(folder: Path) -> Config:
    """The config that a run was started with, from its config.yaml."""
    from ..training import files, predict, settings

    path = folder / "config.yaml"
    if not folder.exists():
        raise StorageError(f"{folder} is not a run folder (no such folder).")
    if not folder.is_dir():
        raise StorageError(f"{folder} is not a run folder.")
    if not os.path.lexists(path):
        predict.refuse_if_comparison(folder)
        if os.path.lexists(folder / "metrics.jsonl"):
            raise StorageError(
                f"{folder} is a run of co.train, whose settings are in your program (there is no "
                "config.yaml). Continue it there, with resume=True."
            )
        raise StorageError(f"{folder} has no config.yaml, so it is not a run folder.")
    return resolve(settings.load(path, files.read_regular(path, settings.MAX_BYTES)))


@contextlib.contextmanager
def errors_name_flags() -> Iterator[None]:
    """Inside, errors of the library about its options name the flags of the command line."""

    def flag_of_option(option: str) -> str:
        return flag(section="", key=option)  # only the key "name" would need its section

    try:
        yield
    except OptionError as error:
        raise ConfigError(error.text_with(flag_of_option)) from None
