"""ArrayWriter: a .npy file that grows row by row."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike

from ..errors import DataError, error_text
from .description import JsonDict

HEADER = 128  # bytes, which the final header fills


class ArrayWriter:
    """Writes an array [N], or [N, columns], whose N is not known before.

    count  of the rows so far;  dtype  of the values
    """

    def __init__(self, path: Path, dtype: DTypeLike, columns: int | None = None) -> None:
        self.path = path
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.columns = columns
        self.count = 0
        self.digest = hashlib.sha256()
        self.file = open(path, "wb")  # noqa: SIM115 (closed by `close`)
        self.file.write(b"\0" * HEADER)

    def append(self, rows: np.ndarray) -> None:
        """Add rows."""
        data = np.ascontiguousarray(rows, dtype=self.dtype).tobytes()
        try:
            self.file.write(data)
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error_text(error)}.") from None
        self.digest.update(data)
        self.count += len(rows)

    def close(self) -> JsonDict:
        """Write the header, and return the shape and the SHA-256 sum of the values."""
        shape = [self.count] if self.columns is None else [self.count, self.columns]
        fields = {
            "descr": npy.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": tuple(shape),
        }
        text = repr(fields).encode("latin1")
        length = HEADER - len(npy.magic(1, 0)) - 2
        header = npy.magic(1, 0) + length.to_bytes(2, "little") + text.ljust(length - 1) + b"\n"
        try:
            self.file.seek(0)
            self.file.write(header)
            self.file.close()
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error_text(error)}.") from None
        return {"shape": shape, "sha256": self.digest.hexdigest()}
