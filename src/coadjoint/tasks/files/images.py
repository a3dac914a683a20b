"""Folders of images, PNG or JPEG, with one sub-folder for each class.

Nothing outside the folder is read: a link in it is refused, wherever it leads.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import DataError, MissingError, error_text, one_line
from .samples import rows_of_samples
from .sheet import Options, Sheet, quote_names
from .source import load_file

if TYPE_CHECKING:
    Picture = Any  # an image of Pillow, which is optional

SUFFIXES = (".png", ".jpg", ".jpeg")
FORMATS = ("PNG", "JPEG")
GREY = ("grey",)
COLOURS = ("red", "green", "blue")
GREY_MODES = ("1", "L", "LA")
ORIENTATION = 0x0112  # the entry of a photograph's Exif data that says which side is up
SIDEWAYS = (5, 6, 7, 8)  # the orientations that exchange height and width
BYTES_PER_VALUE = 8  # of a double, in which the values are held
ONE_FOLDER_EACH = "expected a sub-folder for each class, with its images"


@dataclass(frozen=True)
class ImageFile:
    """An image in a folder: its path, its name within the folder, and its class or ""."""

    path: str
    name: str
    label: str


def read_images(path: str | os.PathLike[str], options: Options) -> Sheet:
    """Read a folder of images of one size, as samples [channels, height, width] in 0..1.

    Grey images have one channel, those in colour three: red, green and blue. Where both are in the
    folder, or options.features names the three, grey ones are read as colour. The sub-folder of an
    image is its class; to predict, images need none.
    """
    folder = one_line(os.fspath(path), 4096)
    notes: list[str] = []
    files = list(list_images(folder, Path(path), options.kind == "next", notes))
    if not files:
        raise DataError(
            f"{folder} holds no images ({', '.join(SUFFIXES)}); {ONE_FOLDER_EACH}. "
            "`coadjoint prepare` makes one set of the tables in a folder."
        )
    labels = [file.label for file in files]
    if options.kind != "next" and len(set(labels)) < 2:
        raise DataError(
            f"{folder} has one class only, '{one_line(labels[0])}'; expected at least two "
            "sub-folders."
        )
    if options.kind == "regress":
        raise DataError(
            f"{folder} is a folder of images, whose sub-folders are classes; --kind regress needs "
            "numbers. Write x and y to an .npz."
        )
    reader = ImageReader(options)
    arrays = [reader.read(file) for file in files]
    features: tuple[str, ...] = GREY
    if options.features == COLOURS or any(len(array) > 1 for array in arrays):
        features = COLOURS
    refuse_unknown_features(folder, features, options)
    count = len(features)
    few = sum(len(array) < count for array in arrays)
    if few:
        notes.append(f"{few} grey images of {folder} are read as colour")
    x = np.stack([np.broadcast_to(array, (count, *array.shape[1:])) for array in arrays])
    height, width = x.shape[2:]
    places = height * width

    def where(row: int, column: str) -> str:
        return f"{folder} image '{one_line(files[row // places].name, 200)}' column '{column}'"

    is_labelled = options.kind != "next"
    return Sheet(
        folder,
        reader.digest.hexdigest(),
        features,
        rows_of_samples(x),
        np.full(len(files), places),
        [file.name for file in files],
        where,
        np.arange(len(files) * places),
        targets=("class",) if is_labelled else (),
        y=np.array(labels, dtype=object) if is_labelled else None,
        y_per="sequence",
        columns={"id": "", "time": ""},
        notes=tuple(notes),
        shape=x.shape[1:],
        has_ids=True,  # the names of the files
    )


def refuse_unknown_features(folder: str, features: tuple[str, ...], options: Options) -> None:
    """Refuse channels other than those that were asked for. features: those of the images."""
    if options.features not in (None, features):
        raise DataError(
            f"{folder} has images of the channels {quote_names(features)}; expected "
            f"{quote_names(options.features or ())}."
        )


def list_images(
    folder: str, path: Path, is_flat_allowed: bool, notes: list[str]
) -> Iterator[ImageFile]:
    """The images of a folder and of its sub-folders, in the order of their names.

    Links, images beside the sub-folders (unless is_flat_allowed) and folders within those are
    refused. Files that are no images are left out, with a note.
    """
    left_out: list[str] = []
    for entry in list_folder(folder, path):
        if entry.is_dir(follow_symlinks=False):
            label = entry.name
            refuse_if_not_unicode(folder, label)
            for inner in list_folder(f"{folder}/{one_line(label, 200)}", Path(entry.path)):
                name = f"{label}/{inner.name}"
                if inner.is_dir(follow_symlinks=False):
                    raise DataError(
                        f"{folder}: '{one_line(name, 200)}' is a folder within a class; "
                        f"{ONE_FOLDER_EACH}."
                    )
                if is_image(inner):
                    yield ImageFile(inner.path, name, label)
                else:
                    left_out.append(name)
        elif not is_image(entry):
            left_out.append(entry.name)
        elif is_flat_allowed:
            yield ImageFile(entry.path, entry.name, "")
        else:
            raise DataError(
                f"{folder}: image '{one_line(entry.name, 200)}' is in no sub-folder; "
                f"{ONE_FOLDER_EACH}."
            )
    if left_out:
        notes.append(f"files left out of {folder}: {quote_names(left_out, 5)}")


def list_folder(name: str, path: Path) -> list[os.DirEntry[str]]:
    """What a folder holds, sorted by name; a link is refused. name: of the folder in messages."""
    try:
        with os.scandir(path) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{name} cannot be listed: {error_text(error)}.") from None
    for entry in entries:
        if entry.is_symlink():
            raise DataError(
                f"{name}: '{one_line(entry.name, 200)}' is a link; nothing outside the folder is "
                "read. Put the file itself there."
            )
    return entries


def refuse_if_not_unicode(folder: str, label: str) -> None:
    """Refuse the name of a class that cannot be written to a model file."""
    try:
        label.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{folder}: the name of sub-folder '{one_line(label, 200)}' is not Unicode. Rename it."
        ) from None


def is_image(entry: os.DirEntry[str]) -> bool:
    """Whether an entry of a folder is named like an image."""
    return Path(entry.name).suffix.lower() in SUFFIXES


class ImageReader:
    """Reads images of one size, and refuses more of them than options.max_bytes can hold.

    digest  of the names and bytes of all images so far
    """

    def __init__(self, options: Options) -> None:
        self.image_module, self.operations = import_pillow()
        self.max_bytes = options.max_bytes
        self.is_grey_wanted = options.features == GREY
        self.digest = hashlib.sha256()
        self.first: tuple[str, tuple[int, int]] | None = None  # (name, (height, width))
        self.bytes = 0

    def read(self, file: ImageFile) -> np.ndarray:
        """The image [1 or 3, height, width] in 0..1."""
        source = load_file(file.path, self.max_bytes, follow_links=False)
        self.digest.update(f"{len(file.name)} {file.name!a} {source.sha256}\n".encode())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # of huge images, and of damaged parts
                image = self.image_module.open(io.BytesIO(source.data), formats=FORMATS)
                self.refuse_if_unusable(source.path, image)
                pixels = self.to_array(source.path, image)
        except DataError:
            raise
        except self.image_module.UnidentifiedImageError:
            raise DataError(
                f"{source.path} is not a PNG or JPEG image. Remove it, or save it again."
            ) from None
        except Exception as error:  # Pillow raises all kinds of errors for a damaged file
            raise DataError(
                f"{source.path} is damaged: {error_text(error, 80)}. Remove it, or save it again."
            ) from None
        return pixels

    def refuse_if_unusable(self, path: str, image: Picture) -> None:
        """Refuse, before anything is unpacked, another size, several frames, or too much data."""
        size = (image.height, image.width)
        if orientation_of(image) in SIDEWAYS:
            size = (image.width, image.height)
        if self.first is None:
            self.first = (path, size)
        first_path, first_size = self.first
        if size != first_size:
            raise DataError(
                f"{path} has {size[1]} x {size[0]} pixels and {first_path} has {first_size[1]} x "
                f"{first_size[0]}; expected one size. Resize or crop the images first."
            )
        if getattr(image, "n_frames", 1) > 1:
            raise DataError(f"{path} has {image.n_frames} frames; expected a single image.")
        self.bytes += size[0] * size[1] * len(image.getbands()) * BYTES_PER_VALUE
        if self.bytes > self.max_bytes:
            raise DataError(
                f"{path}: the images up to this one take {self.bytes:,} bytes unpacked, more than "
                f"the limit of {self.max_bytes:,}. Raise --max-bytes, or make them smaller."
            )

    def to_array(self, path: str, image: Picture) -> np.ndarray:
        """The pixels [1 or 3, height, width] in 0..1, the right way up."""
        if orientation_of(image) != 1:
            image = self.operations.exif_transpose(image)
        if image.mode.startswith("I"):  # grey values of 16 bits
            return np.asarray(image, dtype=np.float64)[None] / 65535
        if image.has_transparency_data and image.convert("RGBA").getextrema()[3][0] < 255:
            raise DataError(f"{path} is transparent in places. Save it without transparency.")
        is_grey = image.mode in GREY_MODES
        if self.is_grey_wanted and not is_grey:
            raise DataError(f"{path} is in colour; expected a grey image, as in training.")
        plain = image.convert("L" if is_grey else "RGB")
        pixels = np.asarray(plain, dtype=np.float64) / 255
        return pixels[None] if is_grey else pixels.transpose(2, 0, 1)


def orientation_of(image: Picture) -> int:
    """Which side of an image is up, in the numbers of Exif: 1 if it is upright.

    Only photographs say so.
    """
    return image.getexif().get(ORIENTATION, 1) if image.format == "JPEG" else 1


def import_pillow() -> tuple[Any, Any]:
    """The modules PIL.Image and PIL.ImageOps, which are optional."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise MissingError(
            "reading images needs Pillow: pip install 'coadjoint[images]'."
        ) from None
    return Image, ImageOps
