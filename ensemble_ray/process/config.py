"""Settings from environment variables, and pickling of user code."""

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
#: For users.
VARIABLES = (
    "ENSEMBLE_RAY_CAPTURE_MODE", "ENSEMBLE_RAY_ENSEMBLES", "ENSEMBLE_RAY_HOME", "ENSEMBLE_RAY_KEY", "ENSEMBLE_RAY_MAX_BODY_BYTES",
    "ENSEMBLE_RAY_MEMORY", "ENSEMBLE_RAY_NAMESPACE", "ENSEMBLE_RAY_OTEL", "ENSEMBLE_RAY_REDACTION_KEY", "ENSEMBLE_RAY_RETENTION",
    "ENSEMBLE_RAY_RUNTIME", "ENSEMBLE_RAY_STORE", "ENSEMBLE_RAY_TEAM", "ENSEMBLE_RAY_URL", "ENSEMBLE_RAY_WEBHOOK_SECRET",
    "ENSEMBLE_RAY_WORKER_TEMPLATE",
)  # fmt: skip
INTERNAL_VARIABLES = ("ENSEMBLE_RAY_RESULT_MARK",)  # for processes of this library
_ALL_VARIABLES = frozenset((*VARIABLES, *INTERNAL_VARIABLES))


def unknown_variables(names: Iterable[str]) -> list[str]:
    """Return a warning for each variable with this library's prefix and an unknown name."""
    warnings: list[str] = []
    for name in sorted(names):
        if name.startswith(_PREFIX) and name not in _ALL_VARIABLES:
            import difflib

            words = [known.removeprefix(_PREFIX) for known in VARIABLES]
            near = difflib.get_close_matches(name.removeprefix(_PREFIX), words, n=1)
            meant = f" Did you mean {_PREFIX}{near[0]}?" if near else ""
            warnings.append(
                f"The environment variable {name} is unknown and is ignored.{meant} Known: {', '.join(VARIABLES)}"
            )
    return warnings


_ON, _OFF = frozenset({"1", "true", "on", "yes"}), frozenset({"0", "false", "off", "no"})


def read_switch(name: str, *, default: bool) -> bool:
    """Return the default for a blank variable (S-ERR-63)."""
    value = os.environ.get(name, "").strip().lower()
    if value and value not in _ON | _OFF:
        raise ValidationError(f"{name} must be 1 or 0, got: '{value}'")
    return value in _ON if value else default


@functools.cache
def _warn_of_unknown_variables() -> None:
    for warning in unknown_variables(os.environ):
        _log.warning("%s", warning)


def home_directory() -> Path:
    """Return `ENSEMBLE_RAY_HOME`, or the platform's directory for the state of applications."""
    chosen = os.environ.get("ENSEMBLE_RAY_HOME", "").strip()
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_state_path("ensemble-ray"))


def package_version() -> str:
    try:
        return importlib.metadata.version("ensemble-ray")
    except importlib.metadata.PackageNotFoundError:
        return "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    runtime: str
    home: Path  # contains `runs/ID/`
    store: str = field(repr=False)  # URL of a database; empty: files in `home`
    ray_address: str  # empty: start a local cluster
    namespace: str = ""

    @classmethod
    def from_environment(cls) -> Settings:
        """The first call in a process warns of unknown variables."""
        _warn_of_unknown_variables()
        return cls(
            runtime=os.environ.get("ENSEMBLE_RAY_RUNTIME", "").strip().lower() or "ray",
            home=home_directory(),
            store=os.environ.get("ENSEMBLE_RAY_STORE", "").strip(),
            ray_address=os.environ.get("RAY_ADDRESS", "").strip(),
            namespace=os.environ.get("ENSEMBLE_RAY_NAMESPACE", "").strip(),
        )


_DISPATCH_TABLE: Any = cloudpickle.Pickler.dispatch_table
_NO_FILE = "<dynamic-code>"


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    make, arguments = _DISPATCH_TABLE[types.CodeType](code)
    return make, tuple(code.co_filename if isinstance(each, str) and each == _NO_FILE else each for each in arguments)


class UserPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle's pickler, except that code keeps the name of its file."""

    dispatch_table: ClassVar[Any] = ChainMap({types.CodeType: _reduce_code}, _DISPATCH_TABLE)


def dumps(value: object) -> bytes:
    with io.BytesIO() as file:
        UserPickler(file, protocol=5).dump(value)
        return file.getvalue()
