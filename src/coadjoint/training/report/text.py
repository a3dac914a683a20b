"""Text and numbers for the page. What a folder holds is a stranger's: it is made visible here, and escaped by the template."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]
HEAT_ROWS, HEAT_COLUMNS = 120, 200  # cells of a heatmap
MAX_TEXT = 2000  # characters of one field
INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
SHARE_METRICS = ("right", "accuracy")  # metrics between 0 and 1
OPTIONAL_CURVES = (
    "rate",
    "distance",
    "share",
    "damping",
    "cg",
)  # curves that only some optimisers have


def clean(value: object) -> str:
    """Text that can be shown: characters that hide or reorder others are spelt out, and long text is cut."""
    text = "–" if value is None else str(value)
    cut = f"… ({len(text):,} characters)" if len(text) > MAX_TEXT else ""
    return INVISIBLE.sub(lambda m: f"\\u{ord(m[0]):04x}", text[:MAX_TEXT]) + cut


def finite_or_nan(value: object) -> float:
    """A finite float, or NaN: for null, for "NaN", "Infinity" and "-Infinity", and for what is no number."""
    try:
        x = (
            math.nan
            if isinstance(value, bool) or not isinstance(value, int | float)
            else float(value)
        )
    except OverflowError:
        return math.nan
    return x if math.isfinite(x) else math.nan


def plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def short_number(value: object, digits: int = 4) -> str:
    """A number for people: 12,000 or 0.9876 or −3.1e-07; – where there is none."""
    x = finite_or_nan(value)
    plain = (
        f"{x:,.0f}" if (x == round(x) if x == x else False) or abs(x) >= 1000 else f"{x:.{digits}g}"
    )
    return (
        "–"
        if x != x
        else (plain if abs(x) < 1e9 else f"{x:.3g}").replace("-", "−", 1 if x < 0 else 0)
    )


def duration(value: object) -> str:
    s = finite_or_nan(value)
    return (
        "–"
        if s != s
        else f"{s:.3g} s"
        if s < 100
        else f"{s / 60:.3g} min"
        if s < 6000
        else f"{s / 3600:.3g} h"
    )


def parse_goal(text: object) -> tuple[str, float, str]:
    """ "right >= 1" -> ("right", 1.0, "right ≥ 1"); ("", nan, "") if there is none."""
    found = re.fullmatch(r"\s*(\S+)\s*[<>]=\s*([-+.\deE]+)\s*", str(text or ""))
    try:
        threshold = finite_or_nan(float(found[2])) if found else math.nan
    except ValueError:
        threshold = math.nan
    return (
        found[1] if found else "",
        threshold,
        clean(text or "").replace(">=", "≥").replace("<=", "≤"),
    )


def metric_stem(metric: str) -> str:
    """right_0.2 and right_0.04 share a figure with right."""
    return re.sub(r"_[\d.]+$", "", metric)


def finite_values(runs: Iterable[Row], key: str) -> list[float]:
    return [x for run in runs if (x := finite_or_nan(run.get(key))) == x]
