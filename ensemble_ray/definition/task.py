"""A task: what to do, by whom, after what.

In: what the user declares. Out: a frozen value; variables such as `{topic}` stay in it and are resolved only in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NewType, Self, TypeAlias, cast, get_args, get_origin

from pydantic import Field, InstanceOf, PrivateAttr, SkipValidation, model_validator
from typing_extensions import TypeAliasType

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.fields import (
    Identified,
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
    resolve_model,
)
from ensemble_ray.errors import ValidationError
from ensemble_ray.memory.store import (
    REFLECTION_METHODS,
    STORE_METHODS,
    EnsembleMemory,
    InMemoryReflectionStore,
    MemoryStore,
)
from ensemble_ray.memory.tools import HeldObject
from ensemble_ray.ports import ChatModel, ReflectionStore
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import new_lock
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.values.memory import MemoryScope, TaskReflection
from ensemble_ray.values.messages import ChatMessage, Effect
from ensemble_ray.values.reviews import Review
from ensemble_ray.values.task_output import Parsed_co, TaskOutput
from ensemble_ray.values.value import Accepts, OneOrMany, RateLimit, Value, to_tuple

#: Whose turn it is, by turns; endpoints and chat templates refuse other orders.
_TURNS = ("user", "assistant")


def check_history(value: object) -> tuple[ChatMessage, ...]:
    """Return a conversation as a tuple of messages: question, answer, question, answer...

    Raises:
        ValidationError: it is no such conversation (S-DOM-76); the first bad message is named.
    """
    messages = tuple(_check_turn(entry, index, _TURNS[index % 2]) for index, entry in enumerate(to_tuple(value)))
    if len(messages) % 2:
        raise ValidationError("Task history must end with an answer (role 'assistant'): the new question follows it")
    return messages


def _check_turn(entry: object, index: int, role: str) -> ChatMessage:
    """Return the message, if it is the text of the one whose turn it is."""
    at = f"Task history element at index {index}"
    if not isinstance(entry, ChatMessage):
        raise ValidationError(f"{at} must be a ChatMessage, got: {type(entry).__name__}")
    if entry.role != role:
        raise ValidationError(
            f"{at} must have role '{role}', since questions and answers take turns, got: '{entry.role}'"
        )
    if entry.tool_calls or not isinstance(entry.content, str) or not entry.content.strip():
        raise ValidationError(f"{at} must have a text and no tool calls")
    return ChatMessage(role=entry.role, content=whole_text(entry.content))


if TYPE_CHECKING:
    MemoryScopesField: TypeAlias = Accepts[
        tuple[MemoryScope, ...], str | MemoryScope | Sequence[str | MemoryScope] | None
    ]
else:
    MemoryScopesField = Annotated[tuple, SkipValidation]


class Remembers(Value):
    """What an ensemble remembers by.

    Attributes:
        memory: Memory that all tasks use; None: none.
        memory_store: Keeps the scopes that tasks declare, and has the data wherever they run; None: scopes mean nothing.
    """

    memory: InstanceOf[EnsembleMemory] | None = None
    memory_store: Annotated[MemoryStore | None, SkipValidation] = None

    @model_validator(mode="before")
    @classmethod
    def _check_memory(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        store = cast("Mapping[str, Any]", data).get("memory_store")
        missing = () if store is None else [name for name in STORE_METHODS if not callable(getattr(store, name, None))]
        if missing:
            raise ValidationError(
                f"Ensemble memory_store ({type(store).__name__}) has no method {' and no method '.join(map(repr, missing))}"
            )
        return cast("object", data)


def check_scopes(value: object) -> tuple[MemoryScope, ...]:
    """Return what a task declares as scopes, in order.

    Raises:
        ValidationError: one is no scope, or is there twice (S-MEM-72).
    """
    entries = to_tuple(value)
    scopes: list[MemoryScope] = []
    for index, entry in enumerate(entries):
        if isinstance(entry, str):
            scopes.append(MemoryScope(name=entry))
        elif isinstance(entry, MemoryScope):
            scopes.append(entry)
        else:
            raise ValidationError(
                f"Task memory_scopes[{index}] must be a name or a MemoryScope, got: {type(entry).__name__}"
            )
        if any(scope.name == scopes[-1].name for scope in scopes[:-1]):
            raise ValidationError(f"Task memory_scopes has scope '{scopes[-1].name}' more than once")
    return tuple(scopes)


if TYPE_CHECKING:
    from collections.abc import Awaitable

    from ensemble_ray.values.memory import TaskReflection

    #: Takes a `ReflectionInput`, returns a `TaskReflection`; sync or async.
    Strategy: TypeAlias = Callable[[Any], TaskReflection | Awaitable[TaskReflection]]
    _Strategy: TypeAlias = Strategy | None
else:
    Strategy = Any
    _Strategy = Annotated[Any, SkipValidation]


_log = bounded_logger(__name__)


class ReflectionConfig(Value):
    """How the outputs of a task are reflected on.

    Attributes:
        model: Who reflects: a model or a string; None: the task's `llm`, else its agent's model.
        strategy: Reflects in place of a model: a callable of a `ReflectionInput` that returns a `TaskReflection`, sync or
            async. It is called in the process that began the run, wherever the task was done.
    """

    model: OptionalModelField = initially(None)
    strategy: _Strategy = None
    #: the way to the strategy from other processes
    _held: HeldObject | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        arguments = dict(cast("Mapping[str, Any]", data))
        arguments["model"] = resolve_model(arguments.get("model"))
        strategy = arguments.get("strategy")
        if strategy is not None and not callable(strategy):
            raise ValidationError(f"ReflectionConfig strategy must be callable, got: {type(strategy).__name__}")
        return arguments

    def __reduce__(self) -> tuple[Any, ...]:
        if self.strategy is None:
            return (ReflectionConfig._rebuilt, (self.model, None))
        if self._held is None:
            self._held = HeldObject(self.strategy)
        return (ReflectionConfig._rebuilt, (self.model, self._held))

    @classmethod
    def _rebuilt(cls, model: ChatModel | None, held: HeldObject | None) -> ReflectionConfig:
        """Return what a pickle stands for: at home with the strategy itself, elsewhere with the way to it."""
        strategy = None if held is None else held.thing if held.is_here else _away
        config = cls(model=model, strategy=strategy)
        config._held = held
        return config

    @property
    def is_strategy_here(self) -> bool:
        """Whether the strategy, where there is one, can be called in this process."""
        return self._held is None or self._held.is_here

    @property
    def needs_this_process(self) -> bool:
        """Whether other processes come back to this one for its strategy."""
        return self.strategy is not None and self.is_strategy_here


def _away(_asked: object) -> TaskReflection:
    """Stand for a strategy of another process.

    Raises:
        ValidationError: always.
    """
    raise ValidationError("The strategy of a reflection is called in the process that began the run")


if TYPE_CHECKING:
    ReflectionField = Accepts[ReflectionConfig | None, ReflectionConfig | bool | None]
else:
    ReflectionField = Annotated[InstanceOf[ReflectionConfig] | None, SkipValidation]


def check_reflection_config(value: object) -> ReflectionConfig | None:
    """Return how a task is reflected on; None: not at all (S-REFL-1).

    Raises:
        ValidationError: it is neither a config nor a flag.
    """
    if value is None or value is False:
        return None
    if value is True:
        return ReflectionConfig()
    if not isinstance(value, ReflectionConfig):
        raise ValidationError(
            f"Task reflection_config must be a ReflectionConfig, True or False, got: {type(value).__name__}"
        )
    return value


class _OwnStore:
    """The store of an ensemble that was given none; one for all copies of the ensemble, made when it is first needed."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._store: InMemoryReflectionStore | None = None

    def get(self) -> InMemoryReflectionStore:
        """Return it; the first caller makes it, and a WARN line says what that means (S-REFL-6)."""
        with self._lock:
            if self._store is None:
                self._store = InMemoryReflectionStore()
                _log.warning(
                    "Tasks are reflected on and the ensemble has no reflection_store: their notes are kept in memory, and "
                    "nothing of them outlives this process. SqliteReflectionStore(path) keeps them"
                )
            return self._store

    def __reduce__(self) -> tuple[Any, ...]:
        return (_OwnStore, ())


class Reflects(Value):
    """Where an ensemble keeps what was learned of its tasks.

    Attributes:
        reflection_store: Keeps the reflections of tasks with a `reflection_config`, from run to run; None: an
            `InMemoryReflectionStore` of this ensemble's own.
    """

    reflection_store: Annotated[ReflectionStore | None, SkipValidation] = None
    _own_reflections: _OwnStore = PrivateAttr(default_factory=_OwnStore)

    @model_validator(mode="before")
    @classmethod
    def _check_reflections(cls, data: Any) -> Any:
        store = cast("Mapping[str, Any]", data).get("reflection_store") if isinstance(data, Mapping) else None
        if store is None:
            return data
        missing = [name for name in REFLECTION_METHODS if not callable(getattr(store, name, None))]
        if missing:
            raise ValidationError(
                f"Ensemble reflection_store ({type(store).__name__}) has no method "
                f"{' and no method '.join(map(repr, missing))}"
            )
        return data

    def find_reflection_store(self, configs: Iterable[ReflectionConfig | None]) -> ReflectionStore | None:
        """Return where reflections are kept; None: nothing is given, and none of the tasks with these configs needs one."""
        if self.reflection_store is not None or all(config is None for config in configs):
            return self.reflection_store
        return self._own_reflections.get()

    def share_reflections(self, other: Reflects) -> None:
        """Keep them where that ensemble does which this one is made of."""
        self._own_reflections = other._own_reflections


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOutput:
    """The outputs of a loop or a phase, or of one body task of a loop.

    Made by `loop.output`, `loop.output_of(task)` and `phase.output` alone.
    """

    #: hidden id of the loop or phase; for look-up inside a process
    object_id: str
    unit: Literal["loop", "phase"]
    #: of the loop or phase
    name: str
    #: of a body task that is meant alone: its hidden id and what histories call it; empty: all that the unit gives
    task_id: str = ""
    task: str = ""
    #: the loop itself where it was made in this process, so that a factory can return what one of its tasks gives (S-MR-190)
    loop: object = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        """Travel without the loop."""
        return _restore, (self.object_id, self.unit, self.name, self.task_id, self.task)

    @property
    def description(self) -> str:
        """What messages call it."""
        whole = f"{self.unit} '{self.name}'"
        return f"output of task '{self.task}' of {whole}" if self.task_id else f"output of {whole}"


def _restore(object_id: str, unit: Literal["loop", "phase"], name: str, task_id: str, task: str) -> UnitOutput:
    return UnitOutput(object_id=object_id, unit=unit, name=name, task_id=task_id, task=task)


def name_output(entry: object) -> str:
    """Return what a message adds where a loop or phase stands in place of its output; "" where it does not."""
    output = getattr(entry, "output", None)
    if not isinstance(output, UnitOutput):
        return ""
    return f". Name what it gives: the .output of {output.unit} '{output.name}'"


if TYPE_CHECKING:
    from ensemble_ray.tools.tool import AgentTool

    #: What does a task without a model: a function of a `TaskHandlerContext`, sync or async, or a tool.
    Handler: TypeAlias = Callable[[Any], object] | AgentTool
else:
    Handler = Any  # checked by `_check_handler`: importing the tools here would cost every start


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
    from ensemble_ray.tools.tool import (
        AgentTool,
        check_effect,
        tool_mark,  # asked only in a run, which needs them anyway
    )

    if isinstance(handler, AgentTool):
        return check_effect(handler.effect, f"Tool '{handler.name}'")
    mark = tool_mark(handler)
    return "once" if mark is None else mark.effect


class ReflectionInput(Value):
    """What a `strategy` reflects on.

    Attributes:
        task: The task with its variables resolved. On a cluster it comes without what stays elsewhere: agent, tools, handler,
            guardrails, context.
        task_output: What it gave; after an edit at a review gate the edited output.
        prior_reflection: The newest reflection on the task; None: there is none yet.
    """

    task: InstanceOf[Task]
    task_output: InstanceOf[TaskOutput]
    prior_reflection: InstanceOf[TaskReflection] | None = None
