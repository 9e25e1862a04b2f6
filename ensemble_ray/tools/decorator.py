"""Package tools: `@tool`. In: a typed function. Out: the same function, marked as a tool.

The function itself stays what it was: directly callable, typed, picklable by reference or by value. The mark rides on
it as an attribute; everything derived from it (schema, validator) is made where the tool is used and never travels.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar, cast, overload
from weakref import WeakKeyDictionary

from ensemble_ray.errors import ValidationError
from ensemble_ray.tools.schema import parameter_types
from ensemble_ray.tools.tool import DEFAULT_TIMEOUT_S, check_effect, check_tool_name, timeout_seconds
from ensemble_ray.values.messages import Effect

__all__ = ["FunctionTool", "marked_functions", "tool", "tool_mark"]

_MARK = "__ensemble_tool__"

#: A function, or what `@staticmethod` and `@classmethod` made of one.
F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTool:
    """The mark that `@tool` leaves on a function."""

    name: str
    description: str
    #: seconds; None: as long as it likes (S-SET-34)
    timeout_s: float | None = DEFAULT_TIMEOUT_S
    #: heavy on the processor and stateless: it runs outside the agent's process (S-SET-35)
    cpu: bool = False
    #: what a call does to the world (S-DUR-20)
    effect: Effect = "once"
    #: a person is asked before each call (S-TOOL-96)
    approval: bool = False


class _Decorator(Protocol):
    def __call__(self, function: F, /) -> F: ...


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(
    description: str | None = None,
    /,
    *,
    name: str | None = None,
    timeout: float | timedelta | None = DEFAULT_TIMEOUT_S,
    cpu: bool = False,
    effect: Effect = "once",
    approval: bool = False,
) -> _Decorator: ...
@overload
def tool(
    *,
    description: str,
    name: str | None = None,
    timeout: float | timedelta | None = DEFAULT_TIMEOUT_S,
    cpu: bool = False,
    effect: Effect = "once",
    approval: bool = False,
) -> _Decorator: ...
def tool(
    target: Callable[..., object] | str | None = None,
    /,
    *,
    description: str | None = None,
    name: str | None = None,
    timeout: float | timedelta | None = DEFAULT_TIMEOUT_S,
    cpu: bool = False,
    effect: Effect = "once",
    approval: bool = False,
) -> object:
    """Make a tool of a function or method: `@tool`, `@tool("description")`, `@tool(name=..., timeout=...)`.

    The signature becomes the tool's JSON schema: annotations, defaults, `Annotated[..., Field(description=...)]`, else
    the parameter's words in the docstring. The function may be `async`.

    Args:
        target: The function, or the description.
        description: What the model reads; default: the first paragraph of the docstring.
        name: What the model calls it by; default: the function's name.
        timeout: How long one call may take, in seconds or as a `timedelta`; None: as long as it likes.
        cpu: It is heavy on the processor and stateless; it then runs in another process, so that cores add up.
        effect: What a call does to the world: `none`: it only reads; `idempotent`: doing it again under the same
            `idempotency_key` changes nothing more; `once`: it must not be done twice, and is not repeated after a crash.
        approval: Whether the run's review handler is asked before each call, with the arguments; a refusal is an error for the model.

    Raises:
        ValidationError: the name, the timeout or the effect cannot be.
    """
    words = description if target is None or not isinstance(target, str) or description is not None else target
    options = _Options(
        name=name,
        description=words,
        timeout_s=timeout_seconds(timeout),
        cpu=cpu,
        effect=check_effect(effect, "@tool"),
        approval=approval,
    )
    if target is not None and not isinstance(target, str):
        return _mark(target, options)

    def decorate(function: F) -> F:
        return _mark(function, options)

    return decorate


def tool_mark(entry: object) -> FunctionTool | None:
    """Return the mark on a function or bound method; None when there is none."""
    if inspect.isclass(entry) or not callable(entry):
        return None
    mark = getattr(entry, _MARK, None)
    return mark if isinstance(mark, FunctionTool) else None


def marked_functions(kind: type[object]) -> tuple[str, ...]:
    """Names of a class's public `@tool` methods, inherited ones first, in the order of their definition."""
    cached = _methods.get(kind)
    if cached is not None:
        return cached
    found: dict[str, None] = {}
    for owner in reversed(kind.__mro__):
        found.update(dict.fromkeys(name for name in vars(owner) if not name.startswith("_")))
    names = tuple(name for name in found if tool_mark(_function_of(inspect.getattr_static(kind, name))) is not None)
    _methods[kind] = names
    return names


def _function_of(attribute: object) -> object:
    return attribute.__func__ if isinstance(attribute, staticmethod | classmethod) else attribute


#: Class -> names of its tool methods; classes are looked through once.
_methods: WeakKeyDictionary[type[object], tuple[str, ...]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What was said in the decorator."""

    name: str | None
    description: str | None
    timeout_s: float | None
    cpu: bool
    effect: Effect
    approval: bool


def _mark(function: F, options: _Options) -> F:
    target = cast("Callable[..., object]", _function_of(function))
    chosen = getattr(target, "__name__", "") if options.name is None else options.name
    problem = check_tool_name(chosen)
    if problem is not None:
        raise ValidationError(problem)
    said = options.description
    mark = FunctionTool(
        name=chosen,
        description=_summary(inspect.getdoc(target) or "") if said is None else said.strip(),
        timeout_s=options.timeout_s,
        cpu=options.cpu,
        effect=options.effect,
        approval=options.approval,
    )
    _resolve_fleeting_names(target)
    try:
        setattr(target, _MARK, mark)
    except AttributeError:
        raise ValidationError(f"@tool needs a function, got: {type(function).__name__}") from None
    return function


def _summary(doc: str) -> str:
    """Return the first paragraph of a docstring as one line."""
    lines: list[str] = []
    for line in doc.splitlines():
        text = line.strip()
        if (
            not text
            or text.startswith(":param")
            or text in {"Args:", "Arguments:", "Parameters:", "Returns:", "Raises:"}
        ):
            break
        lines.append(text)
    return " ".join(lines)


def _resolve_fleeting_names(function: Callable[..., object]) -> None:
    """Turn string annotations into types while the names they use are still in reach.

    A nested function's scope ends; a script's functions travel to other processes without what only annotations name.
    """
    annotations = cast("Mapping[str, object]", getattr(function, "__annotations__", {}))
    is_nested = "<locals>" in getattr(function, "__qualname__", "")
    is_of_a_script = getattr(function, "__module__", "") == "__main__"
    if not (is_nested or is_of_a_script) or not any(isinstance(value, str) for value in annotations.values()):
        return
    # the frame that applies the decorator; there is no public way
    frame = sys._getframe(3)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    around = frame.f_back.f_locals if frame.f_back is not None else {}  # the function around a class, for methods
    with contextlib.suppress(Exception):  # a name defined later: told at resolution, if it is still missing then
        function.__annotations__ = {**annotations, **parameter_types(function, {**around, **frame.f_locals})}
