"""Schema of the pictures in result.json, which `pictures.make_pictures` makes."""

from __future__ import annotations

import math
from typing import Annotated

from .optional_pydantic import Field, model_validator
from .schema_checks import Count, Finite, Schema

MOST_PIXELS = 32  # along a side: larger images are scaled down
GREYS = 255
MOST_PICTURE_ROWS = 4
MOST_PICTURES = 32  # in a row


class PictureRow(Schema):
    """Pictures of the same kind, such as the inputs of some samples."""

    label: Annotated[str, Field(max_length=100)]
    images: list[list[Annotated[int, Field(ge=0, le=GREYS)]]]


class Pictures(Schema):
    """Pictures of samples, as `pictures.make_pictures` says."""

    size: list[Count]
    range: list[Finite]
    rows: list[PictureRow]
    scaled_from: list[Count] | None = None

    @model_validator(mode="after")
    def images_have_their_size(self) -> Pictures:
        """Refuse images of another size, too many of them, and values without an order."""
        if len(self.size) != 3 or self.size[0] not in (1, 3):
            raise ValueError("size should be [channels, height, width] with 1 or 3 channels")
        if not 0 < min(self.size) <= max(self.size) <= MOST_PIXELS:
            raise ValueError(f"size should be at most {MOST_PIXELS} pixels along a side")
        if len(self.range) != 2 or self.range[0] >= self.range[1]:
            raise ValueError("range should be a number and a larger one")
        if self.scaled_from is not None and len(self.scaled_from) != 2:
            raise ValueError("scaled_from should be [height, width]")
        counts = {len(row.images) for row in self.rows}
        are_equal = len(counts) == 1
        if not are_equal or not 0 < max(counts) <= MOST_PICTURES:
            raise ValueError(f"rows should have 1 to {MOST_PICTURES} images, all as many")
        if len(self.rows) > MOST_PICTURE_ROWS:
            raise ValueError(f"rows should be at most {MOST_PICTURE_ROWS}")
        entries = math.prod(self.size)
        if any(len(image) != entries for row in self.rows for image in row.images):
            raise ValueError(f"images should have {entries} values each, as their size says")
        return self
