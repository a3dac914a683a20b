"""What a network of symbols writes by itself, on the page of a run."""

from __future__ import annotations

import os
from pathlib import Path

from .page_parts import PageSection
from .read import as_mappings, read_mapping
from .text import clean, short_number

MOST_SAMPLES = 6


def sample_sections(folder: Path, faults: list[str]) -> list[PageSection]:
    """The section with samples of a run; none if the run has no sample.json.

    faults: gets a sentence if the file is damaged.
    """
    path = folder / "sample.json"
    if not os.path.lexists(path):
        return []
    samples = as_mappings(read_mapping(path, faults).get("samples"))[:MOST_SAMPLES]
    texts = {}
    for sample in samples:
        what = f"Temperature {short_number(sample.get('temperature'))}"
        texts[what] = "\n".join(map(clean, str(sample.get("text") or "").split("\n")))
    if not texts:
        return []
    lead = (
        "What the network writes when it reads its own output: each symbol is drawn from its "
        "answer to those before. A lower temperature prefers the probable ones. coadjoint sample "
        "RUN writes more."
    )
    return [PageSection("sample", "A sample", lead, commands=texts)]
