"""Which team is served, and where it is found. Package: serve.

In: a name from Serve's arguments or the environment. Out: a loaded ensemble. A team travels to the replicas by name,
never by value: what it holds, such as keys, is read where it is used and does not reach the cluster's store.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from ensemble_ray import Ensemble, PromptTemplateError, ValidationError
from ensemble_ray.loader import load_ensemble

__all__ = ["TEAM_VARIABLE", "TeamName", "team_name"]

#: Environment variable that names the team where Serve's arguments do not.
TEAM_VARIABLE = "ENSEMBLE_RAY_TEAM"


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamName:
    """A YAML path or `module:attribute`."""

    #: as it was given
    name: str
    #: the file in full, where the name is one of a file; else empty
    path: str

    def load(self, *, needs_keys: bool = True) -> Ensemble:
        """Return the team, checked as far as it can be without inputs.

        Args:
            needs_keys: False where it is deployed from: keys of models are needed by the replicas alone.

        Raises:
            ValidationError: it cannot be found, read or run.
        """
        # A node that has the deployer's files finds them under their full path, also from another directory; one that
        # got a copy of the working directory finds them under the name as it was given.
        target = self.path if self.path and Path(self.path).is_file() else self.name
        ensemble = load_ensemble(target, needs_keys=needs_keys)
        with contextlib.suppress(PromptTemplateError):  # inputs come with the requests
            ensemble.plan()
        return ensemble


def team_name(configured: str | None) -> TeamName:
    """Return the team to serve: the one given, else the environment's.

    Raises:
        ValidationError: neither names one.
    """
    name = (configured or "").strip() or os.environ.get(TEAM_VARIABLE, "").strip()
    if not name:
        raise ValidationError(
            f"No team to serve: set {TEAM_VARIABLE}, or pass team=... after ensemble_ray.serve.app:app, "
            "to a YAML path or module:attribute"
        )
    file = Path(name).expanduser()
    return TeamName(name=name, path=str(file.resolve()) if file.is_file() else "")
