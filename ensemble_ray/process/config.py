"""Settings: arguments before environment before defaults. Units stand in the names."""

from __future__ import annotations

import functools
import importlib.metadata
import io
import os
import types
from collections import ChainMap
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import platformdirs

from ensemble_ray.errors import ValidationError
from ensemble_ray.process.context import bounded_logger

_log = bounded_logger(__name__)
_PREFIX = "ENSEMBLE_RAY_"
#: Every environment variable of ours.
VARIABLES = (
    "ENSEMBLE_RAY_CAPTURE_MODE",
    "ENSEMBLE_RAY_ENSEMBLES",
    "ENSEMBLE_RAY_HOME",
    "ENSEMBLE_RAY_MAX_BODY_BYTES",
    "ENSEMBLE_RAY_MEMORY",
    "ENSEMBLE_RAY_NAMESPACE",
    "ENSEMBLE_RAY_OTEL",
    "ENSEMBLE_RAY_RETENTION",
    "ENSEMBLE_RAY_RUNTIME",
    "ENSEMBLE_RAY_STORE",
    "ENSEMBLE_RAY_TEAM",
    "ENSEMBLE_RAY_WORKER_TEMPLATE",
)
#: Those that programs of ours set for each other, and nobody else.
INTERNAL_VARIABLES = ("ENSEMBLE_RAY_RESULT_MARK",)
_ALL_VARIABLES = frozenset((*VARIABLES, *INTERNAL_VARIABLES))


def unknown_variables(names: Iterable[str]) -> list[str]:
    """Return a warning for each name of an environment that looks like a variable of ours and is none."""
    import difflib  # only mistakes pay for it

    warnings: list[str] = []
    for name in sorted(names):
        if name.startswith(_PREFIX) and name not in _ALL_VARIABLES:
            words = [known.removeprefix(_PREFIX) for known in VARIABLES]
            near = difflib.get_close_matches(name.removeprefix(_PREFIX), words, n=1)
            meant = f" Did you mean {_PREFIX}{near[0]}?" if near else ""
            warnings.append(
                f"The environment variable {name} is unknown and is ignored.{meant} Known: {', '.join(VARIABLES)}"
            )
    return warnings


_ON, _OFF = frozenset({"1", "true", "on", "yes"}), frozenset({"0", "false", "off", "no"})


def read_switch(name: str, *, default: bool) -> bool:
    """Return what an environment variable that is on or off says; blank is the default.

    Raises:
        ValidationError: it is neither (S-ERR-63).
    """
    said = os.environ.get(name, "").strip().lower()
    if said and said not in _ON | _OFF:
        raise ValidationError(f"{name} must be 1 or 0, got: '{said}'")
    return said in _ON if said else default


@functools.cache
def _warn_of_unknown_variables() -> None:
    """Log unknown variables, once in a process."""
    if any(name.startswith(_PREFIX) and name not in _ALL_VARIABLES for name in os.environ):
        for warning in unknown_variables(os.environ):
            _log.warning("%s", warning)


def home_directory() -> Path:
    """Where runs are recorded: `ENSEMBLE_RAY_HOME`, else the user's state directory of this platform."""
    chosen = os.environ.get("ENSEMBLE_RAY_HOME", "").strip()
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_state_path("ensemble-ray"))


def package_version() -> str:
    """Version of the installed package; `0` where it runs from a folder that was never installed."""
    try:
        return importlib.metadata.version("ensemble-ray")
    except importlib.metadata.PackageNotFoundError:
        return "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment decides for one process."""

    #: `ray` or `inline`
    runtime: str
    #: directory that holds `runs/ID/`
    home: Path
    #: URL of a database that keeps the records in place of files; empty: files in `home`
    store: str = field(repr=False)
    #: address of a Ray cluster to join; empty: start a local one
    ray_address: str
    #: namespace of the schedulers on a Ray cluster; empty: the one without a name
    namespace: str = ""

    @classmethod
    def from_environment(cls) -> Settings:
        """Read `ENSEMBLE_RAY_RUNTIME`, `_HOME`, `_STORE`, `_NAMESPACE` and `RAY_ADDRESS`.

        Variables that look like ours and are unknown are warned of, once in a process.
        """
        _warn_of_unknown_variables()
        return cls(
            runtime=os.environ.get("ENSEMBLE_RAY_RUNTIME", "").strip().lower() or "ray",
            home=home_directory(),
            store=os.environ.get("ENSEMBLE_RAY_STORE", "").strip(),
            ray_address=os.environ.get("RAY_ADDRESS", "").strip(),
            namespace=os.environ.get("ENSEMBLE_RAY_NAMESPACE", "").strip(),
        )


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
