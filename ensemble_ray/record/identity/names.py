"""The names of classes in records. Package: record. Pure.

A record names classes by module and qualified name, and a run goes on only with the definition it was begun with. So a
class of the library that moves to another module keeps its name in records: one line here.
"""

from __future__ import annotations

from ensemble_ray.values.task_output import full_name

__all__ = ["recorded_name"]

#: Where a class of ours is now -> what records call it.
_MOVED = {
    "ensemble_ray.definition.model_placeholder.TeamModel": "ensemble_ray.definition.team_model.TeamModel",
}


def recorded_name(cls: type[object]) -> str:
    """Return the name by which records know a class."""
    name = full_name(cls)
    return _MOVED.get(name, name)
