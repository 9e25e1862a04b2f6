"""The names of classes and functions in records. Pure."""

from __future__ import annotations

from ensemble_ray.values.task_output import full_name

#: The library's own code is known by its name: another version of the library is no other definition.
_OWN = ("ensemble_ray.", "actors.")


def recorded_name(cls: type[object]) -> str:
    """Return the name of a class in records."""
    return stable_name(full_name(cls))


def stable_name(name: str) -> str:
    """Return a full name; one of the library without its modules, so that code can move and its records stay resumable.

    Examples:
        >>> stable_name("ensemble_ray.tools.builtin.plain.CalculatorTool")
        'ensemble_ray.CalculatorTool'
        >>> stable_name("my_team.tools.Search")
        'my_team.tools.Search'
    """
    if not name.startswith(_OWN):
        return name
    _, *parts = name.split(".")
    while len(parts) > 1 and parts[0].islower():
        del parts[0]
    return ".".join(["ensemble_ray", *parts])
