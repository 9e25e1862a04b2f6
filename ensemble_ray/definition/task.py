"""A task: what to do, by whom, after what. Package: definition.

In: what the user declares. Out: a frozen value; variables such as `{topic}` stay in it and are resolved only in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Generic, NewType, Self, TypeAlias, cast, get_args, get_origin

from pydantic import Field, InstanceOf, SkipValidation, model_validator
from typing_extensions import TypeAliasType

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.fields import (
    OneOrMany,
    OptionalModelField,
    StrictInt,
    StrictText,
    ToolsField,
    check_positive,
    check_text,
    check_tools,
    initially,
    limit_own_model,
    replace_limit,
    to_tuple,
)
from ensemble_ray.definition.history import check_history
from ensemble_ray.definition.identity import Identified
from ensemble_ray.definition.memory import MemoryScopesField, check_scopes
from ensemble_ray.definition.reflection import ReflectionField, check_reflection_config
from ensemble_ray.definition.unit_output import UnitOutput, name_output
from ensemble_ray.errors import ValidationError
from ensemble_ray.values.messages import ChatMessage, Effect
from ensemble_ray.values.rate_limit import RateLimit
from ensemble_ray.values.reviews import Review
from ensemble_ray.values.task_output import Parsed_co

if TYPE_CHECKING:
    from ensemble_ray.tools.tool import AgentTool

    #: What does a task without a model: a function of a `TaskHandlerContext`, sync or async, or a tool.
    Handler: TypeAlias = Callable[[Any], object] | AgentTool
else:
    Handler = Any  # checked by `_check_handler`: importing the tools here would cost every start

__all__ = ["Handler", "Task"]

_DEFAULT_EXPECTED_OUTPUT = "Produce a complete and accurate response to the task."


class Task(Identified, Generic[Parsed_co]):
    """A piece of work. It is equal only to itself: two built alike are two tasks.

    `Task(..., output_type=Report)` is a `Task[Report]` to type checkers; at run time there is one class.

    Attributes:
        name: What YAML, plans and records call it; None: its position does.
        description: What to do; `{topic}` is filled in from the run's inputs.
        expected_output: What the result looks like; a template as well. May be left out.
        agent: Who does it; None: an agent is made for the run, unless a handler does the work.
        context: Tasks whose outputs it is given, in this order; `loop.output` and `phase.output` for those of a loop or phase.
        output_type: Type that the answer is parsed into: a pydantic model, dataclass, TypedDict or enum, `str`, `int`,
            `list[X]`, `dict[str, X]`, `Literal[...]`, `X | None`, or whatever else pydantic reads.
        max_output_retries: Further answers asked for when one does not parse, or an output guardrail raises `TryAgain`.
        input_guardrails: Asked before anything else; each may refuse the task.
        output_guardrails: Asked about the answer; each may refuse it.
        llm: Model that does it, a model or a string; None: that of its agent, else the ensemble's. With an agent, it is asked for
            this task alone.
        stream: Whether the answer streams; None: as the ensemble says.
        tools: Tools of the agent that is made for it; an agent of its own has its own.
        max_iterations: Tool requests allowed to the agent that is made for it; None: the agent's own number.
        rate_limit: Limit of the model calls of this task, when it names a model or no agent.
        handler: Does the task without a model: a function of a `TaskHandlerContext`, sync or async, or an `AgentTool`.
        effect: What the handler does to the world: `none`: it only reads; `idempotent`: doing it again under the same
            `idempotency_key` changes nothing more; `once`: it must not be done twice. None: as the tool given as
            handler says, else `once`.
        history: What was said before: questions and answers in turns, sent to the model before the task. A manager, who
            hands tasks on as texts, does not see it.
        memory_scopes: Parts of the ensemble's `memory_store` that it reads before and writes after: a name, a `MemoryScope`,
            or a list of these.
        context_budget: Most tokens that a request of this task may have, by the library's estimate; context, memory, history
            and results of tools are cut until it fits, what the task itself says never is. None: as the ensemble says.
        review: Whether somebody is asked about its output: `Review.required()`, `Review.skip()`, or a `Review` with a
            prompt and a timeout; None: as the ensemble's `review_policy` says. No effect without a `review_handler`.
        before_review: Whether somebody is asked before it begins; None: nobody.
        reflection_config: How its outputs are reflected on, so that later runs do it better: True, or a `ReflectionConfig`
            with a model or a strategy; None or False: not at all.
        revision_feedback: What was wrong with the previous attempt.
        prior_attempt_output: The previous attempt.
        attempt_number: 0 for the first attempt.
    """

    name: StrictText | None = None
    description: StrictText = Field(kw_only=False)
    expected_output: StrictText = Field(default=_DEFAULT_EXPECTED_OUTPUT, kw_only=False)
    agent: InstanceOf[Agent] | None = None
    context: Annotated[OneOrMany[Task | UnitOutput], SkipValidation] = initially(())
    output_type: Annotated[type[Parsed_co] | UnionType | None, SkipValidation] = None
    max_output_retries: StrictInt = 3
    input_guardrails: OneOrMany[Callable[[Any], object]] = initially(())
    output_guardrails: OneOrMany[Callable[[Any], object]] = initially(())
    llm: OptionalModelField = initially(None)
    stream: bool | None = None
    tools: ToolsField = initially(())
    max_iterations: StrictInt | None = None
    rate_limit: RateLimit | None = None
    handler: Annotated[Handler | None, SkipValidation] = None
    effect: Effect | None = None
    history: Annotated[Sequence[ChatMessage], SkipValidation] = ()
    memory_scopes: MemoryScopesField = initially(())
    context_budget: StrictInt | None = None
    review: InstanceOf[Review] | None = None
    before_review: InstanceOf[Review] | None = None
    reflection_config: ReflectionField = initially(None)
    revision_feedback: StrictText | None = None
    prior_attempt_output: StrictText | None = None
    attempt_number: StrictInt = 0

    __hash__ = Identified.__hash__  # type checkers take a value class to be unhashable unless it says so itself

    if not TYPE_CHECKING:

        def __class_getitem__(cls, parsed: object) -> type[Self]:
            """Return the class: a type per answer would give tasks of their own to pickles and to `isinstance`."""
            return cls

    @classmethod
    def of(cls, description: str, expected_output: str = _DEFAULT_EXPECTED_OUTPUT) -> Self:
        """Return a task in one line; the agent is made for it."""
        return cls(description=description, expected_output=expected_output)

    @property
    def handler_effect(self) -> Effect:
        """What the handler does to the world; of a task without one nothing is known: `once`."""
        return _effect_of(self.handler) if self.effect is None else self.effect

    def with_revision_feedback(self, feedback: str | None, prior_output: str | None, attempt: int) -> Self:
        """Return this task for another attempt: the same task, so its output is found under it."""
        return self.rewritten(
            revision_feedback=feedback or "", prior_attempt_output=prior_output, attempt_number=attempt
        )

    def replace(self, **changes: object) -> Self:
        """Return a copy with these fields changed, checked like a new one; it is another task with an id of its own.

        A new `rate_limit` takes the place of the old one.

        Raises:
            ValidationError: a field is unknown or its value is refused.
        """
        return super().replace(**replace_limit(self.llm, self.rate_limit, changes))

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        """Check the fields in the table's order (S-DOM-20 to S-DOM-31); a missing argument counts as None (S-CONV-13)."""
        if not isinstance(data, Mapping):
            return data
        arguments = dict(cast("Mapping[str, Any]", data))
        if arguments.get("name") is not None:
            check_text(arguments["name"], "Task name must not be blank when set")
        check_text(arguments.get("description"), "Task description must not be blank")
        check_text(arguments.get("expected_output", _DEFAULT_EXPECTED_OUTPUT), "Task expected_output must not be blank")
        arguments["tools"] = check_tools(arguments.get("tools"), subject="Task tool")
        check_positive(arguments.get("max_iterations"), "Task max_iterations must be > 0 when set")
        arguments["context"] = _check_context(arguments)
        _check_output_type(arguments.get("output_type"))
        retries = arguments.get("max_output_retries")
        if isinstance(retries, int | float) and retries < 0:
            raise ValidationError(f"Task max_output_retries must be >= 0, got: {retries}")
        arguments["history"] = check_history(arguments.get("history"))
        arguments["memory_scopes"] = check_scopes(arguments.get("memory_scopes"))
        arguments["reflection_config"] = check_reflection_config(arguments.get("reflection_config"))
        check_positive(arguments.get("context_budget"), "Task context_budget must be > 0 when set")
        _check_handler(arguments)
        arguments["llm"] = limit_own_model(arguments)
        return arguments

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Only what was given, and context by name: a chain of tasks would otherwise be shown over and over."""
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            if name == "context" and value:
                yield name, [entry.name or entry.description[:40] for entry in self.context]
            elif name == "agent" and value is not None:
                yield name, value.role
            elif value != info.default:
                yield name, value


def _check_context(arguments: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the context as a tuple of tasks (S-DOM-25, S-DOM-26)."""
    entries = to_tuple(arguments.get("context"))
    agent = arguments.get("agent")
    for index, entry in enumerate(entries):
        if entry is None:
            raise ValidationError(f"Task context element at index {index} must not be None")
        if not isinstance(entry, Task | UnitOutput):
            raise ValidationError(
                f"Task context element at index {index} must be a Task, got: {type(entry).__name__}{name_output(entry)}"
            )
    for entry in cast("tuple[Task | UnitOutput, ...]", entries):
        # A frozen task cannot hold itself; what a user can do by mistake is to build it twice (S-DOM-33). A reduce over
        # reduces looks like what it brings together, and is none.
        if (
            agent is not None
            and isinstance(entry, Task)
            and not entry.context
            and entry.agent == agent
            and entry.description == arguments.get("description")
            and entry.expected_output == arguments.get("expected_output")
        ):
            raise ValidationError("Task cannot reference itself in context")
    return entries


def _check_output_type(output_type: object) -> None:
    """Refuse what is no type (S-DOM-27, S-DOM-28, S-DOM-32)."""
    if output_type is type(None):
        raise ValidationError("Task output_type must not be Void")
    is_alias = get_origin(output_type) is not None or isinstance(output_type, NewType | TypeAliasType)
    if output_type is not None and not isinstance(output_type, type) and not is_alias:
        raise ValidationError(
            f"Task output_type must be a type, such as a pydantic model, str or list[int], got: {output_type!r}"
        )
    try:
        hash(output_type)
    except TypeError as error:
        raise ValidationError(f"Task output_type must be hashable, and {output_type!r} is not: {error}") from error


def _check_handler(arguments: Mapping[str, Any]) -> None:
    """Refuse fields that only a model could use beside a handler (S-DET-3), and handlers that cannot be called."""
    handler, effect = arguments.get("handler"), arguments.get("effect")
    if effect is not None and effect not in get_args(Effect):
        raise ValidationError(f"Task effect must be one of [{', '.join(get_args(Effect))}], got: {effect!r}")
    if handler is None:
        if effect is not None:
            raise ValidationError(
                "Task effect is that of a handler, and this task has none. Tools say their own: @tool(effect=...)"
            )
        return
    exclusive = (
        (arguments.get("agent") is not None, "an explicit agent", "agent"),
        (arguments.get("llm") is not None, "a llm", "llm"),
        (arguments.get("stream") is not None, "a streaming_llm", "stream"),
        (bool(arguments.get("tools")), "tools", "tools"),
        (arguments.get("max_iterations") is not None, "max_iterations", "max_iterations"),
        (arguments.get("rate_limit") is not None, "a rate_limit", "rate_limit"),
        (bool(arguments.get("history")), "a history", "history"),
        (arguments.get("context_budget") is not None, "a context_budget", "context_budget"),
    )
    for is_set, what, name in exclusive:
        if is_set:
            raise ValidationError(
                f"Task cannot have both a handler and {what}. "
                f"A handler does its task without a model: leave out either handler or {name}."
            )
    if getattr(getattr(handler, "__ensemble_tool__", None), "approval", False):
        raise ValidationError(
            f"Task handler '{getattr(handler, '__name__', handler)}' is marked @tool(approval=True), which asks before calls of "
            "models alone. Use a function without it, and give the task before_review= (asked before the call) or review= (after)"
        )
    if callable(handler) and not hasattr(handler, "effect"):
        return
    from ensemble_ray.tools.tool import AgentTool, check_effect  # nearly all handlers are functions

    if isinstance(handler, AgentTool):
        check_effect(handler.effect, f"Tool '{handler.name}'")
    elif not callable(handler):
        raise ValidationError(f"Task handler must be a callable or an AgentTool, got: {type(handler).__name__}")


def _effect_of(handler: object) -> Effect:
    """Return what a tool given as handler says; anything else may only be done once."""
    from ensemble_ray.tools.decorator import tool_mark  # asked only in a run, which needs them anyway
    from ensemble_ray.tools.tool import AgentTool, check_effect

    if isinstance(handler, AgentTool):
        return check_effect(handler.effect, f"Tool '{handler.name}'")
    mark = tool_mark(handler)
    return "once" if mark is None else mark.effect
