"""Pickles of what users made."""

from __future__ import annotations

import pickle
import traceback
import types

from ensemble_ray.process.config import dumps


def test_code_that_travels_by_value_keeps_its_file_and_line() -> None:
    """S-ERR-48: of a function, of one inside it, and of a method."""
    names: dict[str, object] = {"__name__": "__main__"}
    source = "def outer():\n    def inner():\n        raise ValueError('x')\n    return inner()\n"
    exec(compile(source, "/program/team.py", "exec"), names)  # noqa: S102  as a script is run
    outer = names["outer"]
    assert isinstance(outer, types.FunctionType)
    loaded = pickle.loads(dumps(outer))  # noqa: S301  ours
    assert loaded is not outer
    try:
        loaded()
    except ValueError as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        assert [(each.filename, each.lineno) for each in frames] == [("/program/team.py", 4), ("/program/team.py", 3)]
    else:
        raise AssertionError
