"""Settings as flags, files and error lines: a Config from what was typed and what a file says."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, Optional, get_args, get_origin, get_type_hints

import typer
from pydantic import ValidationError

from ..errors import ConfigError, OptionError, StorageError, escape_controls
from ..errors import nearest as nearest_name
from ..training.settings import SURROGATE, Settings
from .schema import NAMES_ELSEWHERE, SECTION_OF, SECTIONS, Config, Section


def flag(section: str, key: str) -> str:
    """The flag of a key: its own name, or its section's for "name"."""
    return "--" + (section if key == "name" else key).replace("_", "-")


def alternatives(kind: Any) -> list[Any]:
    """The alternatives of an annotation, None left out: Whole | tuple[Whole, Whole] | None -> [Whole, tuple[Whole, Whole]]."""
    union = (
        get_args(kind)
        if get_origin(kind) not in (None, Annotated, Literal, tuple, list)
        else [kind]
    )
    return [t for t in union if t is not NoneType]


KEY_TYPES: dict[tuple[str, str], list[Any]] = {
    (name, key): alternatives(kind)
    for name, section in SECTIONS.items()
    for key, kind in get_type_hints(section, include_extras=True).items()
    if key in section.model_fields
}


def choices(kinds: list[Any]) -> list[Any]:
    """The values that may be chosen, where a key has a list of them."""
    return [value for t in kinds if get_origin(t) is Literal for value in get_args(t)]


def describe_types(kinds: list[Any]) -> str:
    """A key's type in words: "a number greater than 0", "loose or strict"."""
    found: list[str] = []
    for t in kinds:
        parts = get_args(t)
        if get_origin(t) is Literal:
            found += [" or ".join(filter(None, (", ".join(map(str, parts[:-1])), str(parts[-1]))))]
        elif get_origin(t) is tuple and len(set(parts)) > 1:
            found += [
                f"{'two' if len(parts) == 2 else 'three'} values, {' and '.join(describe_types([p]) for p in parts)}"
            ]
        elif get_origin(t) is tuple:
            each = "of them" if parts[0] in kinds else f"values, each {describe_types([parts[0]])}"
            found += [f"{'two' if len(parts) == 2 else 'three'} {each}"]
        elif get_origin(t) is Annotated:
            found += [
                " ".join(
                    filter(
                        None,
                        (
                            "a whole number" if parts[0] is int else "a number",
                            describe_bounds(parts[1].metadata),
                        ),
                    )
                )
            ]
        elif get_origin(t) is list and parts[0] in kinds and parts[0] is not str:
            found += ["a list of them"]
        else:
            found += [{str: "text", bool: "true or false"}.get(t, "a list of texts")]
    return " or ".join(found)


def describe_bounds(bounds: list[Any]) -> str:
    """Ge(1), Lt(10) -> "from 1 to 9"; nothing without bounds."""
    at = {
        name: getattr(b, name)
        for b in bounds
        for name in ("ge", "gt", "le", "lt")
        if hasattr(b, name)
    }
    if not at:
        return ""
    if "gt" in at:
        return f"greater than {at['gt']}" + (
            f" and at most {at['le']}" if at.get("le", 1e38) < 1e38 else ""
        )
    most = at.get("le", at["lt"] - 1 if "lt" in at else None)
    return f"at least {at['ge']}" if most is None else f"from {at['ge']} to {most}"


def parse_flag(section: str, key: str, text: str) -> Any:
    """A flag's text as a value: a number, or a list of them, where the key takes numbers."""
    from ..training.settings import parse_scalar

    kinds = KEY_TYPES[section, key]
    if str in kinds:
        return (
            [part.strip() for part in text.split(",") if part.strip()]
            if len(kinds) > 1 and "," in text
            else text
        )
    words = [value for value in choices(kinds) if isinstance(value, str)]
    if text in words or (words and len(kinds) == 1):
        return text
    try:
        parts = [parse_scalar(part.strip()) if part.strip() else "" for part in text.split(",")]
    except ValueError:
        return text  # no number: the check says what is expected
    return parts if len(parts) > 1 else parts[0]


def resolve(
    file: Settings | None = None, flags: Mapping[str, Mapping[str, Any]] | None = None
) -> Config:
    """The file's settings with the flags on top, checked."""
    values: dict[str, Any] = {}
    for name, section in (file.values if file else {}).items():
        values[name] = dict(section) if isinstance(section, dict) else section
    given = {(name, key) for name, section in (flags or {}).items() for key in section}
    for name, section in (flags or {}).items():
        if isinstance(values.setdefault(name, {}), dict):
            values[name].update(section)
    for name, key in given:
        refuse_if_not_utf8(
            flag(name, key), values[name].get(key) if isinstance(values[name], dict) else None
        )
    try:
        return Config.model_validate(
            {name: lists_to_tuples(name, section) for name, section in values.items()}
        )
    except ValidationError as error:
        lines = list(
            dict.fromkeys(explain_invalid(e["loc"], values, file, given) for e in error.errors())
        )
        more = [f"... and {len(lines) - 20} more."] if len(lines) > 20 else []
        raise ConfigError("\n".join(lines[:20] + more)) from None


def refuse_if_not_utf8(where: str, value: Any) -> None:
    """A run folder holds text: a name from the command line that is not UTF-8 could not be written there."""
    for part in value if isinstance(value, list | tuple) else (value,):
        if isinstance(part, str) and not part.isascii() and SURROGATE.search(part):
            what = repr(os.fsencode(part))[1:]
            raise ConfigError(
                f"{where}: {what} is not text in UTF-8, and a run's settings are. Rename it."
            )


def lists_to_tuples(name: str, section: Any) -> Any:
    """Lists as tuples where pairs are expected: files know only lists."""
    if not isinstance(section, dict):
        return section
    pair = lambda key: any(get_origin(t) is tuple for t in KEY_TYPES.get((name, key), ()))
    return {k: tuple(v) if isinstance(v, list) and pair(k) else v for k, v in section.items()}


def explain_invalid(
    loc: tuple[str | int, ...],
    values: Mapping[str, Any],
    file: Settings | None,
    given: set[tuple[str, str]],
) -> str:
    """One line for a key: where, what was expected, what came."""
    name, *rest = (str(part) for part in loc[:2])
    address = (name, *rest)
    came = values[name] if not rest else values[name].get(rest[0])
    spelled = tuple(escape_controls(part, lines=False) for part in address)
    where = f"{file.where(address)}: {'.'.join(spelled)}" if file else ".".join(spelled)
    if rest and (name, rest[0]) in given:
        where = flag(name, rest[0])
    if name not in SECTIONS or (rest and (name, rest[0]) not in KEY_TYPES):
        return f"{where}: {explain_unknown(spelled)}"
    if not rest:
        return f"{where}: a section of keys is expected; got {show_value(came)}. Keys: {', '.join(SECTIONS[name].model_fields)}."
    kinds = KEY_TYPES[name, rest[0]]
    words = [str(value) for value in choices(kinds)]
    near = nearest_name(came, words) if isinstance(came, str) else None
    hint = f" Did you mean '{near}'?" if near else ""
    if str in kinds and isinstance(came, bool | int | float):
        hint = " Write it in quotes."
    return f"{where}: must be {describe_types(kinds)}; got {show_value(came)}.{hint}"


def show_value(value: Any) -> str:
    """A value as a file would have it, not too long."""
    text = (
        {True: "true", False: "false", None: "nothing"}[value]
        if value is None or value is True or value is False
        else repr(value)
    )
    return text if len(text) <= 60 else f"{text[:57]}..."


def explain_unknown(address: tuple[str, ...]) -> str:
    """What an unknown key may have been meant for."""
    key = address[-1]
    within = f", not [{address[0]}]" if len(address) > 1 else ""
    if key in SECTION_OF:
        return f"'{key}' belongs in section [{SECTION_OF[key]}]{within}."
    known = list(SECTIONS[address[0]].model_fields) if within else list(SECTIONS)
    other = nearest_name(key, NAMES_ELSEWHERE, 0.8)
    near = (
        NAMES_ELSEWHERE[other]
        if other
        else nearest_name(key, known) or nearest_name(key, SECTION_OF, 0.6)
    )
    home = f" of section [{SECTION_OF[near]}]" if near and near not in known else ""
    hint = f" did you mean '{near}'{home}?" if near else ""
    return f"unknown {'key' if within else 'section'} '{key}';{hint} Known: {', '.join(known)}."


def given_values(section: Section) -> dict[str, Any]:
    """The keys that have a value."""
    return {key: value for key, value in section if value is not None}


def to_plain_dict(config: Config) -> dict[str, Any]:
    """The config as a file holds it: the keys that have a value, by section."""
    out = {
        name: {
            k: list(v) if isinstance(v, tuple) else v
            for k, v in given_values(getattr(config, name)).items()
        }
        for name in SECTIONS
    }
    return {name: section for name, section in out.items() if section}


def help_panel(key: Any) -> str | None:
    """The panel of the help that a key stands in, if not that of its section."""
    return (key.json_schema_extra or {}).get("panel")


def with_setting_flags(
    function: Callable[..., None],
    only: Mapping[str, Sequence[str]] | None = None,
    texts: Mapping[tuple[str, str], str] | None = None,
) -> Callable[..., None]:
    """Give a command one flag for each key of the config, or for those in `only`, explained by `texts` where it has a text. It
    receives them as `flags`, {section: {key: value}}."""
    own = [p for p in inspect.signature(function).parameters.values() if p.name != "flags"]
    taken = {word for p in own for word in getattr(p.default, "param_decls", None) or ()}
    extra: list[inspect.Parameter] = []
    keys: dict[str, tuple[str, str]] = {}
    for section, model in SECTIONS.items():
        for key, field in model.model_fields.items():
            if (section, key) == ("task", "name") or (
                only is not None and key not in only.get(section, ())
            ):
                continue
            word = flag(section, key)
            if word in taken:
                continue
            name, kinds = f"{section}__{key}", KEY_TYPES[section, key]
            boolean = bool in kinds
            values = choices(kinds)
            words = f": {', '.join(map(str, values))}" if values else ""
            default = "" if boolean or field.default is None else f" ({field.default})"
            text = str in kinds or any(isinstance(value, str) for value in values)
            option = typer.Option(
                None, f"{word}/--no-{word[2:]}" if boolean else word,
                help=(texts or {}).get((section, key), f"{field.description}{words}{default}"),
                metavar="" if boolean else "TEXT" if text else "NUMBER", show_default=False,
                rich_help_panel=help_panel(field) or str(model.__doc__).rstrip("."),
            )  # fmt: skip
            kind = Optional[bool] if boolean else Optional[str]
            extra.append(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind
                )
            )
            keys[name] = section, key

    def command(**given: Any) -> None:
        flags: dict[str, dict[str, Any]] = {}
        for name, (section, key) in keys.items():
            value = given.pop(name)
            if value is not None:
                value = value if isinstance(value, bool) else parse_flag(section, key, value)
                flags.setdefault(section, {})[key] = value
        function(flags=flags, **given)

    hints = {p.name: p.annotation for p in [*own, *extra]}
    command.__signature__ = inspect.Signature(
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in [*own, *extra]]
    )  # type: ignore[attr-defined]
    command.__annotations__ = inspect.get_annotations(function, eval_str=True) | {
        k: v for k, v in hints.items() if not isinstance(v, str)
    }
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command


def config_from_command(
    task: str | None, file: Path | None, flags: Mapping[str, Mapping[str, Any]]
) -> Config:
    from ..training import settings

    merged = {name: dict(section) for name, section in flags.items()}
    if task is not None:
        merged.setdefault("task", {})["name"] = task
    return resolve(settings.load(file) if file else None, merged)


def read_run_config(folder: Path) -> Config:
    """The config a run was started with."""
    from ..training import files, settings

    path = folder / "config.yaml"
    if not folder.is_dir():
        raise StorageError(
            f"{folder} is not a run folder{' (no such folder)' if not folder.exists() else ''}."
        )
    if not os.path.lexists(path):
        raise StorageError(
            f"{folder} holds no config.yaml: it is not a run made by `coadjoint train`."
        )
    return resolve(settings.load(path, files.read_regular(path, settings.MAX_BYTES)))


@contextlib.contextmanager
def errors_name_flags() -> Iterator[None]:
    """The library's keywords are the keys: where it refuses some, the error names their flags."""
    try:
        yield
    except OptionError as error:
        raise ConfigError(error.text_with(lambda key: flag("", key))) from None
