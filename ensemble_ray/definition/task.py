"""Tasks: what to do, by which agent, and after which other tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NewType, Self, TypeAlias, cast, get_args, get_origin

from pydantic import Field, InstanceOf, PrivateAttr, SkipValidation
from typing_extensions import TypeAliasType

from ensemble_ray.definition import fields
from ensemble_ray.definition.agent import Agent
from ensemble_ray.errors import ValidationError
from ensemble_ray.memory.embeddings import check_methods
from ensemble_ray.memory.store import (
    REFLECTION_METHODS,
    STORE_METHODS,
    EnsembleMemory,
    InMemoryReflectionStore,
    MemoryStore,
)
from ensemble_ray.memory.tools import HeldObject
from ensemble_ray.ports import ChatModel, ReflectionStore
from ensemble_ray.process.concurrency import new_lock
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.values.memory import MemoryScope, TaskReflection
from ensemble_ray.values.messages import ChatMessage, Effect
from ensemble_ray.values.reviews import Review
from ensemble_ray.values.task_output import Parsed_co, TaskOutput
from ensemble_ray.values.value import Accepts, OneOrMany, RateLimit, Value, age_from, to_tuple

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from ensemble_ray.tools.tool import AgentTool
    from ensemble_ray.values.attachments import Attachment

    AttachmentsField: TypeAlias = Accepts[tuple[Attachment, ...], Attachment | Sequence[Attachment] | None]
    MemoryScopesField: TypeAlias = Accepts[
        tuple[MemoryScope, ...], str | MemoryScope | Sequence[str | MemoryScope] | None
    ]
    ReuseField: TypeAlias = Accepts[timedelta | None, str | timedelta | None]
    #: A function of a `ReflectionInput`; sync or async.
    Strategy: TypeAlias = Callable[[Any], TaskReflection | Awaitable[TaskReflection]]
    _Strategy: TypeAlias = Strategy | None
    #: A function of a `TaskHandlerContext`, sync or async, or a tool.
    Handler: TypeAlias = Callable[[Any], object] | AgentTool
else:
    AttachmentsField = MemoryScopesField = Annotated[tuple, SkipValidation]
    ReuseField = Annotated[timedelta | None, SkipValidation]
    Strategy = Any
    _Strategy = Annotated[Any, SkipValidation]
    Handler = Any  # importing the tools here would slow down every start

_log = bounded_logger(__name__)
_DEFAULT_EXPECTED_OUTPUT = "Produce a complete and accurate response to the task."


class ReflectionConfig(Value):
    """How the outputs of a task are reflected on.

    Attributes:
        model: The reflecting model, or a string; None: the task's `llm`, else its agent's model.
        strategy: Reflects in place of a model: a callable of a `ReflectionInput` that returns a `TaskReflection`, sync or
            async. It always runs in the process that began the run.
    """

    model: fields.OptionalModelField = fields.initially(None)
    strategy: _Strategy = None
    _held: HeldObject | None = PrivateAttr(default=None)  # for other processes

    @fields.checks_arguments
    @classmethod
    def _check(cls, arguments: dict[str, Any]) -> None:
        arguments["model"] = fields.resolve_model(arguments.get("model"))
        strategy = arguments.get("strategy")
        if strategy is not None and not callable(strategy):
            raise ValidationError(f"ReflectionConfig strategy must be callable, got: {type(strategy).__name__}")

    def __reduce__(self) -> tuple[Any, ...]:
        if self.strategy is None:
            return (ReflectionConfig._rebuilt, (self.model, None))
        if self._held is None:
            self._held = HeldObject(self.strategy)
        return (ReflectionConfig._rebuilt, (self.model, self._held))

    @classmethod
    def _rebuilt(cls, model: ChatModel | None, held: HeldObject | None) -> ReflectionConfig:
        """Return the config with the strategy, in other processes with a reference to it."""
        strategy = None if held is None else held.thing if held.is_here else _away
        config = cls(model=model, strategy=strategy)
        config._held = held
        return config

    @property
    def is_strategy_here(self) -> bool:
        """Whether this process can call the strategy; True without a strategy."""
        return self._held is None or self._held.is_here


def _away(_input: object) -> TaskReflection:  # submissions contain its name
    raise ValidationError("The strategy of a reflection is called in the process that began the run")


if TYPE_CHECKING:
    ReflectionField = Accepts[ReflectionConfig | None, ReflectionConfig | bool | None]
else:
    ReflectionField = Annotated[InstanceOf[ReflectionConfig] | None, SkipValidation]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOutput:
    """The outputs of a loop or a phase, or of one body task of a loop.

    Made by `loop.output`, `loop.output_of(task)` and `phase.output` alone.
    """

    object_id: str  # hidden id of the loop or phase; for look-up inside a process
    unit: Literal["loop", "phase"]
    name: str  # of the loop or phase
    task_id: str = ""  # of one body task; empty: all outputs of the unit
    task: str = ""
    #: in the process that made this, so that a factory can return the output of a task (S-MR-190)
    loop: object = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        names = ("object_id", "unit", "name", "task_id", "task")  # not the loop
        return partial(UnitOutput, **{name: getattr(self, name) for name in names}), ()

    @property
    def description(self) -> str:
        """Its name in messages."""
        whole = f"{self.unit} '{self.name}'"
        return f"output of task '{self.task}' of {whole}" if self.task_id else f"output of {whole}"


class Task(fields.Identified, Generic[Parsed_co]):
    """A piece of work. It is equal only to itself: two built alike are two tasks.

    `Task(..., output_type=Report)` is a `Task[Report]` to type checkers; at run time there is one class.

    Attributes:
        name: Its name in team files, plans and records; None: its position is its name.
        description: What to do; the run's inputs fill in variables such as `{topic}`.
        expected_output: Form of the result; a template as well. Optional.
        agent: The agent that does it; None: the run makes an agent, unless there is a handler.
        context: Tasks that supply input by their outputs, in this order. For the outputs of a loop or a phase, use
            `loop.output` or `phase.output`.
        output_type: Type that the answer is parsed into: a pydantic model, dataclass, TypedDict or enum, `str`, `int`,
            `list[X]`, `dict[str, X]`, `Literal[...]`, `X | None`, or another type that pydantic reads.
        max_output_retries: Further answers requested if one does not parse, or an output guardrail raises `TryAgain`.
        input_guardrails: Called before all other work; each may refuse the task.
        output_guardrails: Called with the answer; each may refuse it.
        llm: Its model, a string or a list of these; None: the model of its agent, else of the ensemble. With an agent, only this task uses it.
        stream: Whether the answer streams; None: as the ensemble declares.
        tools: Tools of the agent that the run makes for it. An agent that it names has its own tools.
        max_iterations: Tool requests allowed to the agent that the run makes for it; None: the default of `Agent`.
        rate_limit: Limit of the model calls of this task, if it names a model or no agent.
        handler: Does the task without a model: a function of a `TaskHandlerContext`, sync or async, or an `AgentTool`.
        effect: Whether the handler may run again after a crash. `none`: it only reads; `idempotent`: a second call with the
            same `idempotency_key` changes no more than the first; `once`: it must not run twice. None: the effect of the
            tool given as handler, else `once`.
        attachments: Pictures, audio and files that the model receives with the task: `Image`, `Audio` or `File`, or a list of
            these. The run's inputs fill in variables of their paths and URLs. Inputs that are attachments are added where the
            texts name them. A handler receives them in its context.
        history: Earlier conversation: alternating questions and answers, sent to the model before the task. A manager
            does not see it, since it delegates tasks as texts.
        memory_scopes: Parts of the ensemble's `memory_store` that it reads before and writes after its work: a name, a
            `MemoryScope`, or a list of these.
        context_budget: Most tokens that a request of this task may have, by the library's estimate. Context, memory, history
            and results of tools are cut until it fits; the text of the task is not. None: as the ensemble declares.
        review: Review of its output by a person: `Review.required()`, `Review.skip()`, or a `Review` with a prompt and a
            timeout. None: as the ensemble's `review_policy` declares. No effect without a `review_handler`.
        before_review: Review by a person before it begins; None: no review.
        reflection_config: How its outputs are reflected on, to improve later runs: True, or a `ReflectionConfig` with a
            model or a strategy; None or False: no reflection.
        additional_context: Text for the prompt, in a section of its own; up to 20,000 characters. It is no template: braces are text.
        reuse: Age of answers of earlier runs that replace a request, such as `"7d"`, `"12h"`, or a `timedelta`: if the record
            of an earlier run has a whole answer to an identical request that is not older, the model is not asked. None:
            the model is always asked.
        revision_feedback: Feedback on the previous attempt.
        prior_attempt_output: Output of the previous attempt.
        attempt_number: 0 for the first attempt.
    """

    name: fields.StrictText | None = None
    description: fields.StrictText = Field(kw_only=False)
    expected_output: fields.StrictText = Field(default=_DEFAULT_EXPECTED_OUTPUT, kw_only=False)
    agent: InstanceOf[Agent] | None = None
    context: Annotated[OneOrMany[Task | UnitOutput], SkipValidation] = fields.initially(())
    output_type: Annotated[type[Parsed_co] | UnionType | None, SkipValidation] = None
    max_output_retries: fields.StrictInt = 3
    input_guardrails: OneOrMany[Callable[[Any], object]] = fields.initially(())
    output_guardrails: OneOrMany[Callable[[Any], object]] = fields.initially(())
    llm: fields.OptionalModelField = fields.initially(None)
    stream: bool | None = None
    tools: fields.ToolsField = fields.initially(())
    max_iterations: fields.StrictInt | None = None
    rate_limit: RateLimit | None = None
    handler: Annotated[Handler | None, SkipValidation] = None
    effect: Effect | None = None
    attachments: AttachmentsField = fields.initially(())
    history: Annotated[Sequence[ChatMessage], SkipValidation] = ()
    memory_scopes: MemoryScopesField = fields.initially(())
    context_budget: fields.StrictInt | None = None
    review: InstanceOf[Review] | None = None
    before_review: InstanceOf[Review] | None = None
    reflection_config: ReflectionField = fields.initially(None)
    additional_context: fields.StrictText | None = None
    reuse: ReuseField = fields.initially(None)
    revision_feedback: fields.StrictText | None = None
    prior_attempt_output: fields.StrictText | None = None
    attempt_number: fields.StrictInt = 0

    __hash__ = fields.Identified.__hash__  # for type checkers, since there is `__eq__`

    if not TYPE_CHECKING:

        def __class_getitem__(cls, parsed: object) -> type[Self]:
            return cls  # one class per output type would break pickles and `isinstance`

    @classmethod
    def of(cls, description: str, expected_output: str = _DEFAULT_EXPECTED_OUTPUT) -> Self:
        """Return a task in one line; the agent is made for it."""
        return cls(description=description, expected_output=expected_output)

    @property
    def handler_effect(self) -> Effect:
        """Effect of the handler: `effect`, else the effect of a tool given as handler, else `once`."""
        if self.effect is not None:
            return self.effect
        from ensemble_ray.tools.tool import AgentTool, check_effect, tool_mark  # needed only in a run

        if isinstance(self.handler, AgentTool):
            return check_effect(self.handler.effect, f"Tool '{self.handler.name}'")
        mark = tool_mark(self.handler)
        return "once" if mark is None else mark.effect

    def with_revision_feedback(self, feedback: str | None, prior_output: str | None, attempt: int) -> Self:
        """Return this task for another attempt; it keeps its id, so context finds its output."""
        return self.rewritten(
            revision_feedback=feedback or "", prior_attempt_output=prior_output, attempt_number=attempt
        )

    def replace(self, **changes: object) -> Self:
        """Return a copy with these fields changed and checked. The copy is another task, with another id.

        A new `rate_limit` replaces the old one.

        Raises:
            ValidationError: a field is unknown or its value is refused.
        """
        return super().replace(**fields.replace_limit(self.llm, self.rate_limit, changes))

    @fields.checks_arguments
    @classmethod
    def _check(cls, arguments: dict[str, Any]) -> None:
        """In the order of S-DOM-20 to S-DOM-31; a missing argument counts as None (S-CONV-13)."""
        if arguments.get("name") is not None:
            fields.check_text(arguments["name"], "Task name must not be blank when set")
        fields.check_text(arguments.get("description"), "Task description must not be blank")
        fields.check_text(
            arguments.get("expected_output", _DEFAULT_EXPECTED_OUTPUT), "Task expected_output must not be blank"
        )
        arguments["tools"] = fields.check_tools(arguments.get("tools"), subject="Task tool")
        fields.check_positive(arguments.get("max_iterations"), "Task max_iterations must be > 0 when set")
        arguments["context"] = _check_task_context(arguments)
        _check_output_type(arguments.get("output_type"))
        fields.check_least(arguments.get("max_output_retries"), 0, "Task max_output_retries")
        arguments["attachments"] = _check_attachments(arguments.get("attachments"))
        arguments["history"] = _check_history(arguments.get("history"))
        arguments["memory_scopes"] = _check_scopes(arguments.get("memory_scopes"))
        arguments["reflection_config"] = _check_reflection_config(arguments.get("reflection_config"))
        fields.check_positive(arguments.get("context_budget"), "Task context_budget must be > 0 when set")
        fields.check_additional_context(arguments.get("additional_context"), "Task")
        arguments["reuse"] = _check_reuse(arguments.get("reuse"))
        _check_handler(arguments)
        arguments["llm"] = fields.limit_own_model(arguments)

    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__(state)
        for name in type(self).model_fields.keys() - self.__dict__.keys():  # pickled by an earlier version (S-DUR-32)
            object.__setattr__(self, name, type(self).model_fields[name].get_default(call_default_factory=True))

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Show only changed fields, and context by name: else a chain of tasks would be shown repeatedly."""
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            if name == "context" and value:
                yield name, [entry.name or entry.description[:40] for entry in self.context]
            elif name == "agent" and value is not None:
                yield name, value.role
            elif value != info.default:
                yield name, value


class WithMemory(Value):
    """Memory of an ensemble.

    Attributes:
        memory: Memory that all tasks use.
        memory_store: Stores the scopes that tasks declare; None: scopes have no effect.
    """

    memory: InstanceOf[EnsembleMemory] | None = None
    memory_store: Annotated[MemoryStore | None, SkipValidation] = None

    @fields.checks_arguments
    @classmethod
    def _check_memory(cls, arguments: dict[str, Any]) -> None:
        check_methods(arguments.get("memory_store"), STORE_METHODS, "Ensemble memory_store")


class _DefaultStore:
    """The store of an ensemble without a `reflection_store`, shared by all its copies."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._store: InMemoryReflectionStore | None = None

    def get(self) -> InMemoryReflectionStore:
        with self._lock:
            if self._store is None:
                self._store = InMemoryReflectionStore()
                # S-REFL-6
                _log.warning(
                    "Tasks are reflected on and the ensemble has no reflection_store: their notes stay in memory and end "
                    "with this process. SqliteReflectionStore(path) stores them"
                )
            return self._store

    def __reduce__(self) -> tuple[Any, ...]:
        return (_DefaultStore, ())


class WithReflection(Value):
    """Store for reflections on the tasks of an ensemble.

    Attributes:
        reflection_store: Stores the reflections of tasks with a `reflection_config`, from run to run; None: an
            `InMemoryReflectionStore` that only this ensemble uses.
    """

    reflection_store: Annotated[ReflectionStore | None, SkipValidation] = None
    _default_reflections: _DefaultStore = PrivateAttr(default_factory=_DefaultStore)

    @fields.checks_arguments
    @classmethod
    def _check_reflections(cls, arguments: dict[str, Any]) -> None:
        check_methods(arguments.get("reflection_store"), REFLECTION_METHODS, "Ensemble reflection_store")

    def find_reflection_store(self, configs: Iterable[ReflectionConfig | None]) -> ReflectionStore | None:
        """Return the store for tasks with these configs, if one of them needs it."""
        if self.reflection_store is not None or all(config is None for config in configs):
            return self.reflection_store
        return self._default_reflections.get()

    def share_reflections(self, other: WithReflection) -> None:
        """Store reflections in the store of the ensemble that this one was made from."""
        self._default_reflections = other._default_reflections


class ReflectionInput(Value):
    """Input of a reflection `strategy`.

    Attributes:
        task: The task with its variables resolved. On a cluster it has no agent, tools, handler, guardrails or context.
        task_output: Its output; after an edit at a review gate the edited output.
        prior_reflection: The newest reflection on the task, or None.
    """

    task: InstanceOf[Task]
    task_output: InstanceOf[TaskOutput]
    prior_reflection: InstanceOf[TaskReflection] | None = None


def check_context(subject: str, value: object) -> tuple[Task | UnitOutput, ...]:
    """Return the context of a task or a loop as a tuple."""
    entries = to_tuple(value)
    for index, entry in enumerate(entries):
        if entry is None:
            raise ValidationError(f"{subject} element at index {index} must not be None")
        if not isinstance(entry, Task | UnitOutput):
            output, hint = getattr(entry, "output", None), ""
            if isinstance(output, UnitOutput):
                hint = f". Name what it gives: the .output of {output.unit} '{output.name}'"
            msg = f"{subject} element at index {index} must be a Task, got: {type(entry).__name__}{hint}"
            raise ValidationError(msg)
    return cast("tuple[Task | UnitOutput, ...]", entries)


def _check_history(value: object) -> tuple[ChatMessage, ...]:
    """S-DOM-76: endpoints and chat templates require alternating questions and answers."""
    messages: list[ChatMessage] = []
    for index, entry in enumerate(to_tuple(value)):
        at, role = f"Task history element at index {index}", ("user", "assistant")[index % 2]
        if not isinstance(entry, ChatMessage):
            raise ValidationError(f"{at} must be a ChatMessage, got: {type(entry).__name__}")
        if entry.role != role:
            msg = f"{at} must have role '{role}', since questions and answers take turns, got: '{entry.role}'"
            raise ValidationError(msg)
        if entry.attachments:
            raise ValidationError(f"{at} must have no attachments: use Task(attachments=...)")
        if entry.tool_calls or not isinstance(entry.content, str) or not entry.content.strip():
            raise ValidationError(f"{at} must have a text and no tool calls")
        messages.append(ChatMessage(role=entry.role, content=whole_text(entry.content)))
    if len(messages) % 2:
        raise ValidationError("Task history must end with an answer (role 'assistant'): the new question follows it")
    return tuple(messages)


def _check_attachments(value: object) -> tuple[Attachment, ...]:
    """S-ATT-5."""
    if not value:
        return ()
    from ensemble_ray.values.attachments import Attachment  # few tasks have any

    entries = to_tuple(value)
    for index, entry in enumerate(entries):
        if not isinstance(entry, Attachment):
            raise ValidationError(
                f"Task attachments[{index}] must be an Image, an Audio or a File, such as Image('photo.png'), got: {entry!r:.80}"
            )
    return cast("tuple[Attachment, ...]", entries)


def _check_scopes(value: object) -> tuple[MemoryScope, ...]:
    """S-MEM-72."""
    scopes: list[MemoryScope] = []
    for index, entry in enumerate(to_tuple(value)):
        if isinstance(entry, str):
            scopes.append(MemoryScope(name=entry))
        elif isinstance(entry, MemoryScope):
            scopes.append(entry)
        else:
            msg = f"Task memory_scopes[{index}] must be a name or a MemoryScope, got: {type(entry).__name__}"
            raise ValidationError(msg)
        if any(scope.name == scopes[-1].name for scope in scopes[:-1]):
            raise ValidationError(f"Task memory_scopes has scope '{scopes[-1].name}' more than once")
    return tuple(scopes)


def _check_reflection_config(value: object) -> ReflectionConfig | None:
    """S-REFL-1."""
    if value is None or value is False:
        return None
    if value is True:
        return ReflectionConfig()
    if not isinstance(value, ReflectionConfig):
        msg = f"Task reflection_config must be a ReflectionConfig, True or False, got: {type(value).__name__}"
        raise ValidationError(msg)
    return value


def _check_reuse(value: object) -> timedelta | None:
    """S-USE-1."""
    age = age_from(value) if isinstance(value, str) else value
    if age is not None and not isinstance(age, timedelta):
        msg = f"Task reuse must be an age such as '7d' or '12h', or a timedelta, got: {type(value).__name__}"
        raise ValidationError(msg)
    if age is not None and age <= timedelta(0):
        raise ValidationError(f"Task reuse must be > 0 when set, got: {value}")
    return age


def _check_task_context(arguments: Mapping[str, Any]) -> tuple[Task | UnitOutput, ...]:
    """S-DOM-25, S-DOM-26."""
    entries, agent = check_context("Task context", arguments.get("context")), arguments.get("agent")
    for entry in entries:
        # A user may build a task twice by mistake (S-DOM-33). A reduce task over reduce tasks looks like its context.
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
    """S-DOM-27, S-DOM-28, S-DOM-32."""
    if output_type is type(None):
        raise ValidationError("Task output_type must not be Void")
    is_alias = get_origin(output_type) is not None or isinstance(output_type, NewType | TypeAliasType)
    if output_type is not None and not isinstance(output_type, type) and not is_alias:
        msg = f"Task output_type must be a type, such as a pydantic model, str or list[int], got: {output_type!r}"
        raise ValidationError(msg)
    try:
        hash(output_type)
    except TypeError as error:
        raise ValidationError(f"Task output_type must be hashable, and {output_type!r} is not: {error}") from error


def _check_handler(arguments: Mapping[str, Any]) -> None:
    """Refuse fields that only a model would use (S-DET-3), and handlers that cannot be called."""
    handler, effect = arguments.get("handler"), arguments.get("effect")
    if effect is not None and effect not in get_args(Effect):
        raise ValidationError(f"Task effect must be one of [{', '.join(get_args(Effect))}], got: {effect!r}")
    if handler is None:
        if effect is not None:
            msg = "Task effect is that of a handler, and this task has none. Tools say their own: @tool(effect=...)"
            raise ValidationError(msg)
        return
    others = (
        (arguments.get("agent") is not None, "an explicit agent", "agent"),
        (arguments.get("llm") is not None, "a llm", "llm"),
        (arguments.get("stream") is not None, "a streaming_llm", "stream"),
        (arguments.get("tools"), "tools", "tools"),
        (arguments.get("max_iterations") is not None, "max_iterations", "max_iterations"),
        (arguments.get("rate_limit") is not None, "a rate_limit", "rate_limit"),
        (arguments.get("history"), "a history", "history"),
        (arguments.get("context_budget") is not None, "a context_budget", "context_budget"),
        (arguments.get("reuse") is not None, "a reuse", "reuse"),
        (arguments.get("additional_context") is not None, "an additional_context", "additional_context"),
    )
    fields.check_exclusive("Task", "handler", others, why="A handler does its task without a model")
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
