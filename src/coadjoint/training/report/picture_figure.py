"""The figure of held-out samples that are images, and of what an autoencoder makes of them."""

from __future__ import annotations

from ...errors import MissingError, StorageError
from .. import schemas
from .figures import PageFigure
from .read import RunRecord, as_mappings
from .text import Row, clean, short_number

MAX_CAPTION = 60  # characters
RESTORED = "held-out samples, and what the network makes of them"
SCALED = "Drawn with {} x {} pixels; the images have {} x {}."


def picture_figures(run: RunRecord) -> list[PageFigure]:
    """The pictures that a run has recorded, as a figure; none if it has not, or they are damaged.

    Damage adds a sentence to the faults of the run.
    """
    found = run.result.get("pictures")
    if found is None:
        return []
    try:
        pictures = schemas.check("the pictures in result.json", found, schemas.Pictures)
    except StorageError as error:
        fault = clean(error)
        run.faults.append(fault[:1].upper() + fault[1:])
        return []
    except MissingError:  # without the package that checks them they are not drawn
        return []
    rows = [{"label": clean(row["label"]), "images": row["images"]} for row in pictures["rows"]]
    is_restored = len(rows) > 1
    count = len(rows[0]["images"])
    data: Row = {
        "size": pictures["size"],
        "range": pictures["range"],
        "rows": rows,
        "captions": [] if is_restored else captions(run)[:count],
        "drawn": count * len(rows),
        "total": count * len(rows),
    }
    notes: tuple[str, ...] = ()
    if pictures.get("scaled_from"):
        notes = (SCALED.format(*pictures["size"][1:], *pictures["scaled_from"]),)
    title = "Reconstructions" if is_restored else "Held-out samples"
    about = RESTORED if is_restored else "below each: its target, then the prediction"
    black, white = map(short_number, pictures["range"])
    about += f". Black: {black} or less; white: {white} or more"
    return [PageFigure("pictures", "pictures", title, about, notes=notes, data=data)]


def captions(run: RunRecord) -> list[Row]:
    """Target and prediction of each example, and whether they agree, for the page's script."""
    texts = []
    for example in as_mappings(run.result.get("examples")):
        right = example.get("right")
        texts.append(
            {
                "target": _short(example.get("target")),
                "prediction": _short(example.get("prediction")),
                "right": right if isinstance(right, bool) else None,
            }
        )
    return texts


def _short(value: object) -> str:
    """Safe text of at most MAX_CAPTION characters."""
    text = clean(value)
    return text if len(text) <= MAX_CAPTION else f"{text[: MAX_CAPTION - 1]}…"
