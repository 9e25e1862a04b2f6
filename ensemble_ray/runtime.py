"""The choice of a runtime; `ray_runtime_class` contains the core's only import of `actors`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.definition.fields import nearest
from ensemble_ray.errors import ValidationError
from ensemble_ray.process.config import Settings

if TYPE_CHECKING:
    from ensemble_ray.actors.driver.runtime import RayRuntime
    from ensemble_ray.runs.ports import Runtime

_NAMES = ("inline", "ray")
_shared: dict[str, Runtime] = {}


def connect(choice: Runtime | str | None = None) -> Runtime:
    """Return the runtime for a choice: an object as it is, `"ray"`, `"inline"`, or the environment's default.

    A runtime chosen by name exists once per process, so that the next run finds its actors warm.

    Raises:
        ValidationError: the name is unknown.
    """
    if choice is not None and not isinstance(choice, str):
        if isinstance(choice, type) or not hasattr(choice, "store_address"):
            shown = f"the class {choice.__name__}" if isinstance(choice, type) else type(choice).__name__
            raise ValidationError(f"runtime must be 'inline', 'ray' or a Runtime object, got: {shown}")
        return choice
    name = (choice or Settings.from_environment().runtime).strip().lower()
    if name not in _shared:
        if name == "inline":
            from ensemble_ray.runs.inline import InlineRuntime

            _shared[name] = InlineRuntime()
        elif name == "ray":
            _shared[name] = ray_runtime_class()()
        else:
            where = "" if choice else " in ENSEMBLE_RAY_RUNTIME"
            raise ValidationError(
                f"Unknown runtime '{name}'{where}.{nearest(name, _NAMES)} Known: [inline, ray], or a Runtime object"
            )
    return _shared[name]


def ray_runtime_class() -> type[RayRuntime]:
    """Import Ray, and return its runtime."""
    from ensemble_ray.actors.driver.runtime import RayRuntime

    return RayRuntime
