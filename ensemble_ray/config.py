"""Settings: arguments before environment before defaults. Units stand in the names. Floor: above errors and ids."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

__all__ = ["Settings", "home_directory", "package_version"]


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

    @classmethod
    def from_environment(cls) -> Settings:
        """Read `ENSEMBLE_RAY_RUNTIME`, `ENSEMBLE_RAY_HOME`, `ENSEMBLE_RAY_STORE` and `RAY_ADDRESS`."""
        return cls(
            runtime=os.environ.get("ENSEMBLE_RAY_RUNTIME", "").strip().lower() or "ray",
            home=home_directory(),
            store=os.environ.get("ENSEMBLE_RAY_STORE", "").strip(),
            ray_address=os.environ.get("RAY_ADDRESS", "").strip(),
        )
