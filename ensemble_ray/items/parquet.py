"""Items of `.parquet` files, and rows written into one. Room: items.

In: a path, and rows. Out: entries, read batch by batch; a file, written batch by batch. pyarrow is loaded by the first
use (S-MR-120, S-MR-130). Never: a whole file in memory.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from ensemble_ray.errors import ValidationError
from ensemble_ray.items.pulling import Entries

__all__ = ["arrow", "parquet_row_count", "parquet_rows"]

#: Rows that are in memory as Python objects at the same time.
_BATCH_ROWS = 256


def arrow(module: str, path: Path) -> Any:  # pyarrow comes without types
    """A module of pyarrow.

    Raises:
        ValidationError: it is not installed; the text says what installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        msg = f"'{path}' needs pyarrow, which is not installed: pip install 'ensemble-ray[parquet]'"
        raise ValidationError(msg) from error


def parquet_row_count(path: Path) -> int:
    """How many rows a file has, by its footer.

    Raises:
        ValidationError: it is no parquet file, or pyarrow is not installed.
    """
    parquet = arrow("pyarrow.parquet", path)
    try:
        return int(parquet.read_metadata(path).num_rows)
    except arrow("pyarrow", path).ArrowException as error:
        raise ValidationError(f"items file '{path}' is no parquet file: {error}") from error


def parquet_rows(path: Path) -> Entries:
    """The rows of a file as dicts."""
    index = 0
    with arrow("pyarrow.parquet", path).ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            for row in batch.to_pylist():
                yield index, row
                index += 1
