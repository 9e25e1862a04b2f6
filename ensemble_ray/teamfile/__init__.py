"""Load a team from a YAML file or from `module:attribute`."""

from ensemble_ray.teamfile.targets import (
    Runnable,
    find_planned_form,
    is_team_file,
    load_ensemble,
    load_runnable,
    load_source,
)

__all__ = ["Runnable", "find_planned_form", "is_team_file", "load_ensemble", "load_runnable", "load_source"]
