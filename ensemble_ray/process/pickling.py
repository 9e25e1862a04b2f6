"""Pickles of what users made, by value where it is defined in a script. Package: process.

cloudpickle 3.1.3 replaces the file name of code by `<dynamic-code>`, so that no traceback names a file; here it is kept.
"""

from __future__ import annotations

import io
import types
from collections import ChainMap
from typing import Any, ClassVar

import cloudpickle

__all__ = ["UserPickler", "dumps"]

_TABLE: Any = cloudpickle.Pickler.dispatch_table
_NO_FILE = "<dynamic-code>"


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    make, arguments = _TABLE[types.CodeType](code)
    kept = [code.co_filename if isinstance(each, str) and each == _NO_FILE else each for each in arguments]
    return make, tuple(kept)


class UserPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle carries no types
    """Pickles as cloudpickle does; code keeps the name of its file."""

    dispatch_table: ClassVar[Any] = ChainMap({types.CodeType: _reduce_code}, _TABLE)


def dumps(value: object) -> bytes:
    """Return the value as bytes.

    Raises:
        Exception: it holds something that does not pickle.
    """
    with io.BytesIO() as file:
        UserPickler(file, protocol=5).dump(value)
        return file.getvalue()
