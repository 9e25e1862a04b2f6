"""What an agent with a runner must be (S-INT-50). Package: definition. In: the arguments of an agent. Out: nothing, or an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

from ensemble_ray.definition.model_placeholder import TEAM_MODEL
from ensemble_ray.errors import ValidationError
from ensemble_ray.values.messages import Effect

__all__ = ["check_runner", "effect_of_runner"]

_EFFECTS = get_args(Effect)
#: Tool requests that an agent is allowed where nobody says how many.
_MAX_ITERATIONS = 25


def effect_of_runner(runner: object, declared: Effect | None) -> Effect:
    """Return what a runner does to the world: what is declared, else what it says itself; anything else may only be done once."""
    if declared is not None:
        return declared
    said: object = getattr(runner, "effect", None)
    return cast("Effect", said) if isinstance(said, str) and said in _EFFECTS else "once"


def check_runner(arguments: Mapping[str, Any]) -> None:
    """Refuse what is no runner, and fields that only a model could use beside one.

    Raises:
        ValidationError: one of them is given.
    """
    runner, effect = arguments.get("runner"), arguments.get("runner_effect")
    if effect is not None and effect not in _EFFECTS:
        raise ValidationError(f"Agent runner_effect must be one of [{', '.join(_EFFECTS)}], got: {effect!r}")
    if runner is None:
        if effect is not None:
            raise ValidationError(
                "Agent runner_effect is that of a runner, and this agent has none. Tools say their own: @tool(effect=...)"
            )
        return
    if isinstance(runner, type):
        raise ValidationError(
            f"Agent runner must be an object, got the class {runner.__name__}. Write {runner.__name__}(...)"
        )
    if not callable(getattr(runner, "run", None)):
        raise ValidationError(
            f"Agent runner must have a method run(request), as RunsTask says, got: {type(runner).__name__}"
        )
    said: object = getattr(runner, "effect", None)
    if isinstance(said, str) and said not in _EFFECTS:
        raise ValidationError(
            f"Agent runner {type(runner).__name__}: effect must be one of [{', '.join(_EFFECTS)}], got: {said!r}"
        )
    exclusive = (
        (arguments.get("llm") is not TEAM_MODEL and arguments.get("rate_limit") is None, "a llm", "llm"),
        (bool(arguments.get("tools")), "tools", "tools"),
        (arguments.get("max_iterations", _MAX_ITERATIONS) != _MAX_ITERATIONS, "max_iterations", "max_iterations"),
        (arguments.get("rate_limit") is not None, "a rate_limit", "rate_limit"),
        (arguments.get("on_incomplete") == "retry", "on_incomplete='retry'", "on_incomplete"),
        (bool(arguments.get("allow_delegation")), "allow_delegation", "allow_delegation"),
    )
    for is_set, what, field in exclusive:
        if is_set:
            raise ValidationError(
                f"Agent cannot have both a runner and {what}. "
                f"A runner brings its own model and tools: leave out either runner or {field}."
            )
