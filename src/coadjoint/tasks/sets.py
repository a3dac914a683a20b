"""The sets of your own data: the pieces of each split as inputs and targets."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .cutting import Part, PreparedSheet
from .description import Description
from .files.sheet import Sheet
from .memory import Source, name_of
from .prepared import StoredSheet
from .scaling import inputs_of, samples_of, sequences_of
from .stored_sets import stored_sequences
from .task import Samples, Sequences


def make_sets(
    cuts: Mapping[str, PreparedSheet], parts: Mapping[str, Part], description: Description
) -> dict[str, Sequences | Samples]:
    """Return the sets of all splits that have pieces.

    The numbers of a sheet in memory are overwritten by the inputs that are made of them. Those of a
    prepared set stay on disk.

    Args:
        cuts: The files by split, cut into pieces.
        parts: The pieces of each split.
        description: How the data are scaled.
    """
    inputs: dict[str, np.ndarray] = {}
    for name, cut in cuts.items():
        if not isinstance(cut.sheet, StoredSheet):
            inputs[name] = inputs_of(cut.sheet, description, overwrite=True)
    arrange = sequences_of if description.sample_shape is None else samples_of
    sets: dict[str, Sequences | Samples] = {}
    for name, part in parts.items():
        if not part.chosen:
            continue
        if isinstance(part.cut.sheet, StoredSheet):
            sets[name] = stored_sequences(part, description)
        else:
            # The parts of a single file share its inputs.
            own = name if name in cuts else "train"
            sets[name] = arrange(part, inputs[own], description)
    return sets


def digests_of(
    paths: Mapping[str, Source | None], sheets: Mapping[str, Sheet]
) -> dict[str, dict[str, str]]:
    """Return the name and the SHA-256 sum of the file of each split."""
    files = {}
    for name, path in paths.items():
        if path is not None:
            files[name] = {"name": name_of(path), "sha256": sheets[name].sha256}
    return files
