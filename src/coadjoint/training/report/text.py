"""Text and numbers for the page.

A folder may come from a stranger: its text is made visible here, and escaped by the template.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from ..metric_names import metric_label

Row = dict[str, Any]  # a JSON object

HEAT_ROWS = 120  # cells of a heatmap
HEAT_COLUMNS = 200
MAX_TEXT = 2000  # characters of one field
INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
# metrics between 0 and 1
SHARE_METRICS = ("right", "accuracy", "whole", "symbols", "balanced-accuracy", "f1", "auc")
NO_VALUE = "–"


def clean(value: object) -> str:
    """Text that is safe to show.

    Characters that hide or reorder others are spelt out, long text is cut, and None is a dash.
    """
    if value is None:
        return NO_VALUE
    text = str(value)
    shown = INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text[:MAX_TEXT])
    if len(text) > MAX_TEXT:
        shown += f"… ({len(text):,} characters)"
    return shown


def moment(text: object) -> str:
    """A time of environment.json for people: "2026-11-19 20:38 UTC"; other text as it is."""
    shown = clean(text)
    try:
        time = datetime.strptime(shown, "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        return shown
    return f"{time:%Y-%m-%d %H:%M} {time.tzname()}"


def finite_or_nan(value: object) -> float:
    """A finite float, or NaN for null, infinities, booleans, text and other values."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        x = float(value)
    except OverflowError:  # an int beyond the range of float
        return math.nan
    return x if math.isfinite(x) else math.nan


def plural(n: int, noun: str) -> str:
    """A count and its noun: "1 step", "12,000 steps"."""
    ending = "" if n == 1 else "s"
    return f"{n:,} {noun}{ending}"


def short_number(value: object, digits: int = 4) -> str:
    """A number for people: 12,000 or 0.9876 or −3.1e-07; – if there is none."""
    x = finite_or_nan(value)
    if math.isnan(x):
        return NO_VALUE
    if abs(x) >= 1e9:
        text = f"{x:.3g}"
    elif x == round(x) or abs(x) >= 1000:
        text = f"{x:,.0f}"
    else:
        text = f"{x:.{digits}g}"
    if x < 0:
        text = text.replace("-", "−", 1)
    return text


def duration(value: object) -> str:
    """Seconds as "39.6 s", "2.5 min" or "3 h"; – if there are none."""
    seconds = finite_or_nan(value)
    if math.isnan(seconds):
        return NO_VALUE
    if seconds < 100:
        return f"{seconds:.3g} s"
    if seconds < 6000:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h"


def parse_goal(text: object) -> tuple[str, float, str]:
    """Metric, threshold and text of a goal.

    "right >= 1" gives ("right", 1.0, "accuracy ≥ 1").
    None gives ("", nan, ""); text that is no goal, ("", nan, text).
    """
    shown = clean(text or "").replace(">=", "≥").replace("<=", "≤")
    match = re.fullmatch(r"\s*(\S+)\s*([<>]=)\s*([-+.\deE]+)\s*", str(text or ""))
    if match is None:
        return "", math.nan, shown
    try:
        threshold = finite_or_nan(float(match[3]))
    except ValueError:
        threshold = math.nan
    sign = "≥" if match[2] == ">=" else "≤"
    return match[1], threshold, f"{shown_metric(match[1])} {sign} {match[3]}"


def shown_metric(metric: str) -> str:
    """The name of a metric as people read it, safe to show."""
    return clean(metric_label(metric))


def finite_values(runs: Iterable[Row], key: str) -> list[float]:
    """The values under `key`, of the runs that have a finite one."""
    values = []
    for run in runs:
        value = finite_or_nan(run.get(key))
        if not math.isnan(value):
            values.append(value)
    return values
