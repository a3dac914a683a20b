"""Imports that every run of a comparison needs and that take long.

The server that runs are forked from loads them once.
"""

from __future__ import annotations

import jinja2  # noqa: F401
import safetensors.torch  # noqa: F401

from ..training import loop as loop
from ..training.report import pages as pages
from . import main as main
