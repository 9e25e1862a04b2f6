"""Loops: tasks that are repeated until a predicate holds or a limit is reached.

The start of a run checks a loop against the rest of its ensemble (`validation`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias, cast

from pydantic import BeforeValidator, Field, SkipValidation

from ensemble_ray.definition import fields
from ensemble_ray.definition.task import Task, UnitOutput, check_context
from ensemble_ray.errors import ValidationError
from ensemble_ray.values.task_output import GraphRoutingContext, LoopIterationContext
from ensemble_ray.values.value import Accepts, OneOrMany, to_tuple

Predicate: TypeAlias = Callable[[LoopIterationContext], bool | Awaitable[bool]]  # sync or async


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    """A predicate for `Loop(until=...)` and `GraphEdge(condition=...)`.

    Create it with `Until.parsed`, `Until.text_contains` or `Until.unchanged`.

    Examples:
        >>> Until.text_contains("APPROVED", ignore_case=True)
        Until(kind='text_contains', text='APPROVED', ignore_case=True, condition=None)
    """

    kind: Literal["parsed", "text_contains", "unchanged"]
    text: str = ""
    ignore_case: bool = False
    condition: Callable[[Any], bool | Awaitable[bool]] | None = None  # of the parsed answer

    @classmethod
    def parsed(cls, condition: Callable[[Any], bool | Awaitable[bool]]) -> Until:
        """Stop when a condition holds for the parsed output of the last body task. The task needs an `output_type`.

        Raises:
            ValidationError: the condition is not callable.
        """
        if not callable(condition):
            raise ValidationError(f"Until.parsed needs a callable, got: {type(condition).__name__}")
        return cls(kind="parsed", condition=condition)

    @classmethod
    def text_contains(cls, text: str, *, ignore_case: bool = False) -> Until:
        """Stop when the output of the last body task contains this text.

        Raises:
            ValidationError: the text is blank.
        """
        if not isinstance(text, str) or not text.strip():
            raise ValidationError("Until.text_contains needs a text that is not blank")
        return cls(kind="text_contains", text=text, ignore_case=ignore_case)

    @classmethod
    def unchanged(cls) -> Until:
        """Stop when the last body task repeats its output of the iteration before; spaces at the ends do not count."""
        return cls(kind="unchanged")

    def __call__(self, context: LoopIterationContext | GraphRoutingContext) -> bool | Awaitable[bool]:
        """Return whether the predicate holds after this iteration or step."""
        if isinstance(context, GraphRoutingContext):
            visits = context.state_history[context.current_state]
            output, before = context.last_output, visits[-2] if len(visits) > 1 else None
        else:
            output, iterations = context.last_body_output, context.history
            before = list(iterations[-2].values())[-1] if len(iterations) > 1 else None
        if self.condition is not None:
            return self.condition(output.parsed)
        if self.kind == "unchanged":
            return before is not None and before.raw.strip() == output.raw.strip()
        if self.ignore_case:
            return self.text.casefold() in output.raw.casefold()
        return self.text in output.raw


DEFAULT_MAX_ITERATIONS = 5  # no loop is unbounded (S-LOOP-20)


class LoopMemoryMode(StrEnum):
    """Handling of the memory scopes of a loop's body between iterations."""

    ACCUMULATE = "accumulate"  # all entries stay
    FRESH_PER_ITERATION = "fresh_per_iteration"  # cleared before each further iteration
    WINDOW = "window"  # only the newest entries stay


class LoopOutputMode(StrEnum):
    """Output of a loop, as the rest of the ensemble sees it."""

    LAST_ITERATION = "last_iteration"  # the outputs of the last iteration
    FINAL_TASK_ONLY = "final_task_only"  # of the last body task in the last iteration
    ALL_ITERATIONS = "all_iterations"  # the texts of all iterations, joined per body task


class MaxIterationsAction(StrEnum):
    """Result of a loop that reaches its limit."""

    RETURN_LAST = "return_last"  # the outputs of the last iteration
    THROW = "throw"  # fails with `MaxLoopIterationsExceededError`
    RETURN_WITH_FLAG = "return_with_flag"  # and `was_loop_terminated_by_max_iterations` is true


_to_memory_mode = fields.to_member(LoopMemoryMode, "memory_mode")

if TYPE_CHECKING:
    _Action = Accepts[MaxIterationsAction, MaxIterationsAction | str]
    _OutputMode = Accepts[LoopOutputMode, LoopOutputMode | str]
    _MemoryMode = Accepts[LoopMemoryMode, LoopMemoryMode | str]
else:
    _Action = Annotated[
        MaxIterationsAction, BeforeValidator(fields.to_member(MaxIterationsAction, "on_max_iterations"))
    ]
    _OutputMode = Annotated[LoopOutputMode, BeforeValidator(fields.to_member(LoopOutputMode, "output_mode"))]
    _MemoryMode = Annotated[LoopMemoryMode, BeforeValidator(_to_memory_mode)]


class Loop(fields.Identified):
    """Tasks that run in order, repeatedly, until a predicate holds or a limit is reached.

    Like a task it is equal only to itself.

    Attributes:
        name: Its name in histories, traces and messages.
        body: Tasks of one iteration, in this order. Their context must be in the body.
        until: Returns whether to stop: called with a `LoopIterationContext` after each iteration, sync or async, or an
            `Until`.
        max_iterations: Most iterations; None: 5.
        on_max_iterations: Result if that limit ends it: `"return_last"`, `"throw"` or `"return_with_flag"`.
        output_mode: Its output for the rest of the ensemble: `"last_iteration"`, `"final_task_only"` or `"all_iterations"`.
        memory_mode: Handling of the body's memory scopes between iterations: `"accumulate"`, `"fresh_per_iteration"` or
            `"window"`.
        memory_window_size: Entries per scope that stay in mode `"window"`.
        inject_feedback: Whether the first task of the body sees the last output of the iteration before.
        context: Tasks outside that it waits for; its first task sees their outputs. For another loop, use `other.output`.
        max_tokens: Tokens of input and output that its iterations may use together. It ends as by `max_iterations` after
            the iteration that reaches them. None: no limit.
    """

    name: fields.StrictText = Field(kw_only=False)
    body: Annotated[OneOrMany[Task], SkipValidation] = Field(kw_only=False)
    until: Annotated[Predicate | None, SkipValidation] = None
    max_iterations: fields.StrictInt | None = DEFAULT_MAX_ITERATIONS
    on_max_iterations: _Action = fields.initially(MaxIterationsAction.RETURN_LAST)
    output_mode: _OutputMode = fields.initially(LoopOutputMode.LAST_ITERATION)
    memory_mode: _MemoryMode = fields.initially(LoopMemoryMode.ACCUMULATE)
    memory_window_size: fields.StrictInt = 0
    inject_feedback: bool = True
    context: Annotated[OneOrMany[Task | UnitOutput], SkipValidation] = fields.initially(())
    max_tokens: fields.StrictInt | None = None

    __hash__ = fields.Identified.__hash__

    @property
    def output(self) -> UnitOutput:
        """Its outputs, as `output_mode` declares, for the context of a task."""
        return UnitOutput(object_id=self.object_id, unit="loop", name=self.name, loop=self)

    def output_of(self, task: Task) -> UnitOutput:
        """Return the output of one body task in the last iteration, for the context of a task.

        Raises:
            ValidationError: the task is not in the body.
        """
        if not isinstance(task, Task) or all(task.object_id != each.object_id for each in self.body):
            shown = f"'{body_key(task)}'" if isinstance(task, Task) else type(task).__name__
            bodies = ", ".join(f"'{body_key(each)}'" for each in self.body)
            raise ValidationError(f"Loop '{self.name}' output_of needs a task of its body ({bodies}), got: {shown}")
        return replace(self.output, task_id=task.object_id, task=body_key(task))

    @property
    def cap(self) -> int:
        """Most iterations."""
        return DEFAULT_MAX_ITERATIONS if self.max_iterations is None else self.max_iterations

    @fields.checks_arguments
    @classmethod
    def _check(cls, arguments: dict[str, Any]) -> None:
        """In the order of S-LOOP-10 to S-LOOP-24."""
        name = arguments.get("name")
        fields.check_text(name, "Loop name must be non-blank")
        arguments["body"] = body = cast("tuple[Task, ...]", to_tuple(arguments.get("body")))
        if not body:
            raise ValidationError(f"Loop '{name}' body must contain at least one task")
        _check_cap(arguments)
        _check_window(arguments)
        _check_members(body, name)
        _check_body(body, name)
        _check_until(arguments)
        arguments["context"] = check_context(f"Loop '{name}' context", arguments.get("context"))

    def with_tasks_of(self, tasks: Mapping[str, Task]) -> Self:
        """Return this loop with rewritten tasks, by their ids. For the library only."""
        return self.rewritten(
            body=tuple(tasks[task.object_id] for task in self.body),
            context=tuple(tasks.get(entry.object_id, entry) for entry in self.context),
        )


def body_key(task: Task) -> str:
    """Return the name of a body task in histories (S-LOOP-4)."""
    return task.name or task.description


def _check_cap(arguments: Mapping[str, Any]) -> None:
    """S-LOOP-12, S-LOOP-13, S-LOOP-163."""
    name, most = arguments["name"], arguments.get("max_tokens")
    cap = arguments.get("max_iterations", DEFAULT_MAX_ITERATIONS)
    fields.check_least(cap, 1, f"Loop '{name}' max_iterations")
    if cap is None and arguments.get("until") is None:
        msg = f"Loop '{name}' must declare either an 'until' predicate or a positive max_iterations (or both)"
        raise ValidationError(msg)
    if isinstance(most, int | float) and most < 1:
        raise ValidationError(f"Loop '{name}' max_tokens must be >= 1 when set, got: {most}")


def _check_window(arguments: Mapping[str, Any]) -> None:
    """S-LOOP-14, S-LOOP-15."""
    name, size = arguments["name"], arguments.get("memory_window_size", 0)
    mode = _to_memory_mode(arguments.get("memory_mode", LoopMemoryMode.ACCUMULATE))
    if not isinstance(size, int) or not isinstance(mode, LoopMemoryMode):
        return  # pydantic refuses it
    if mode is LoopMemoryMode.WINDOW and size < 1:
        raise ValidationError(f"Loop '{name}' has memory_mode=window but memory_window_size ({size}) must be >= 1")
    if mode is not LoopMemoryMode.WINDOW and size > 0:
        raise ValidationError(
            f"Loop '{name}' has memory_window_size={size} but memory_mode={mode}. "
            "memory_window_size is only meaningful with memory_mode=window"
        )


def _check_members(entries: tuple[object, ...], name: object) -> None:
    """S-LOOP-16 to S-LOOP-18."""
    if any(entry is None for entry in entries):
        raise ValidationError(f"Loop '{name}' body must not contain None")
    for entry in entries:
        if isinstance(entry, Loop):
            raise ValidationError(
                f"Loop '{name}' body must not contain a loop: loops do not nest. "
                f"Put the tasks of loop '{entry.name}' into one body, or visit both as states of a Graph"
            )
        if not isinstance(entry, Task):
            raise ValidationError(f"Loop '{name}' body must contain Tasks only, got: {type(entry).__name__}")


def _check_body(body: tuple[Task, ...], name: object) -> None:
    """S-LOOP-21 to S-LOOP-24."""
    keys: set[str] = set()
    for task in body:
        key = body_key(task)
        if key in keys:
            raise ValidationError(
                f"Loop '{name}' body has duplicate task name/description: '{key}'. "
                "Body tasks must be uniquely identifiable."
            )
        keys.add(key)
    inside = {task.object_id for task in body}
    for task in body:
        if any(entry.object_id not in inside for entry in task.context):
            raise ValidationError(
                f"Loop '{name}' body task '{body_key(task)}' declares context on a task outside the loop body. "
                "Outer dependencies must be declared with the Loop's own context."
            )
    seen: set[str] = set()
    for task in body:
        late = next((entry for entry in task.context if entry.object_id not in seen), None)
        if late is not None:
            raise ValidationError(
                f"Loop '{name}' body task '{body_key(task)}' declares context on body task "
                f"'{late.name or late.description}', which does not come before it"
            )
        seen.add(task.object_id)


def _check_until(arguments: Mapping[str, Any]) -> None:
    """S-LOOP-164, S-LOOP-165."""
    name, until = arguments["name"], arguments.get("until")
    if until is None:
        return
    if not callable(until):
        raise ValidationError(f"Loop '{name}' until must be a callable, got: {type(until).__name__}")
    last = cast("tuple[Task, ...]", arguments["body"])[-1]
    if isinstance(until, Until) and until.kind == "parsed" and last.output_type is None and last.handler is None:
        raise ValidationError(
            f"Loop '{name}' until is Until.parsed, and its last body task '{body_key(last)}' has no output_type to parse"
        )
