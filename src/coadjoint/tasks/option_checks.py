"""Options of your own data that are refused before a file is read."""

from __future__ import annotations

from ..errors import ConfigError, one_line, real

# Values of options that have no meaning for samples without time, and what to do instead.
VALUES_OF_TIME = {
    "kind": ("next",),
    "at": ("every",),
    "missing": ("ffill",),
    "irregular": ("allow",),
}
ADVICE_ON_TIME = {
    "kind": "Pass --kind classify, regress or reconstruct.",
    "missing": "Pass --missing drop or --missing mask.",
}


def check_choice(flag: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a value that is not one of `known`."""
    if value not in known:
        raise ConfigError(f"--{flag} must be {' or '.join(known)}; got {value!r}.")


def check_window(window: object, kind: str | None, least_next: int = 2) -> None:
    """Refuse a window that is not a whole number of rows, two or more to predict the next.

    least_next: the rows that kind "next" needs.
    """
    least = least_next if kind == "next" else 1
    if window is not None and (type(window) is not int or window < least):
        raise ConfigError(
            f"--window must be a whole number of rows, at least {least}; got {window!r}."
        )


def check_stride(stride: object, window: int | None) -> None:
    """Refuse a stride without windows, and one that is no whole number of their rows."""
    if stride is None:
        return
    if window is None:
        raise ConfigError("--stride is from one window to the next: pass --window, too.")
    if type(stride) is not int or not 0 < stride <= window:
        raise ConfigError(
            f"--stride must be a whole number of rows, from 1 to the window's {window}; got "
            f"{stride!r}."
        )


def check_noise(noise: float, kind: str | None, missing: str) -> None:
    """Refuse noise where inputs are not reconstructed, and masks where they are."""
    real("noise", noise, least=0)
    if noise and kind != "reconstruct":
        raise ConfigError(
            f"--noise {noise:g} is on inputs that are to be reconstructed: pass --kind reconstruct."
        )
    if kind == "reconstruct" and missing == "mask":
        raise ConfigError(
            "--missing mask adds inputs that cannot be reconstructed. Pass --missing drop."
        )


def refuse_options_of_time(**given: object) -> None:
    """Refuse options that have no meaning for samples without time; given: options by name."""
    for name, value in given.items():
        is_of_time = value in VALUES_OF_TIME.get(name, ())
        if is_of_time or (name in ("time", "window") and value not in (None, "")):
            raise ConfigError(
                f"--{name} {one_line(value)} needs sequences of time steps; the rows here are "
                f"samples without time. {ADVICE_ON_TIME.get(name, 'Leave it out.')}"
            )
