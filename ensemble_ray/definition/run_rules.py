"""The rules that every kind of ensemble runs under, and who watches its runs.

In: what the user declares. Out: frozen values that kinds of ensembles are made of. What an ensemble does is declared by
those (`ensemble`, `map_reduce`); nothing of it stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, Self, TypeAlias, cast

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, SkipValidation, model_validator

from ensemble_ray.definition.fields import (
    Callbacks,
    CaptureModeField,
    Durability,
    DurabilityField,
    ErrorStrategyField,
    ModelCatalogField,
    OnUnknown,
    OnUnknownField,
    OptionalModelField,
    Origin,
    ParallelErrorStrategy,
    ReviewPolicyField,
    ReviewWaitField,
    StrictAmount,
    StrictInt,
    StrictText,
    check_models,
    check_positive,
    initially,
    resolve_model,
)
from ensemble_ray.definition.run_options import RetryPolicy, RunOptions, check_budget, check_options, check_tags
from ensemble_ray.definition.task import Task
from ensemble_ray.errors import ValidationError
from ensemble_ray.errors.texts import brief
from ensemble_ray.events import (
    EVENT_TYPES,
    DelegationCompletedEvent,
    DelegationFailedEvent,
    DelegationStartedEvent,
    FileChangedEvent,
    GraphStateCompletedEvent,
    LlmIterationCompletedEvent,
    LlmIterationStartedEvent,
    LoopIterationCompletedEvent,
    TaskCompleteEvent,
    TaskFailedEvent,
    TaskInputEvent,
    TaskReflectedEvent,
    TaskStartEvent,
    TokenEvent,
    ToolCallEvent,
)
from ensemble_ray.events.delivery import EnsembleListener
from ensemble_ray.ports import Dashboard, ToolMetrics
from ensemble_ray.text.foreign_text import whole_data
from ensemble_ray.values.messages import OnIncomplete
from ensemble_ray.values.metrics import CostConfiguration
from ensemble_ray.values.outputs import ExitReason
from ensemble_ray.values.reviews import ReviewFunction, Reviewing, ReviewPolicy, ReviewWait
from ensemble_ray.values.trace import ExecutionTrace, ExecutionTraceExporter
from ensemble_ray.values.value import Accepts, RateLimit, Value, to_tuple

_LONGEST_NAME = 128


class Synthesizer(Protocol):
    """Makes an agent for a task that names none (S-DET-25); `AgentSynthesizer` has the built-in ones."""

    def synthesize(self, task: Task, context: Any, /) -> object:
        """Return the agent, or an awaitable of it; the context is a `SynthesisContext`."""
        ...


def _listeners_of(value: object) -> tuple[object, ...]:
    """Return listeners as a tuple, and refuse an entry that could never be called."""
    entries = to_tuple(value)
    for index, entry in enumerate(entries):
        if not isinstance(entry, EnsembleListener) and not any(hasattr(entry, method) for method in EVENT_TYPES):
            raise ValidationError(
                f"Ensemble listener at index {index} ({type(entry).__name__}) has none of the listener methods: "
                f"[{', '.join(EVENT_TYPES)}]"
            )
    return entries


def _synthesizer_of(value: object) -> object:
    if value is None or callable(value) or callable(getattr(value, "synthesize", None)):
        return value
    raise ValidationError(
        f"Ensemble agent_synthesizer must be callable or have a method 'synthesize', got: {type(value).__name__}"
    )


def _exporter_of(value: object) -> object:
    if value is None or callable(value) or isinstance(value, ExecutionTraceExporter):
        return value
    raise ValidationError(
        f"Ensemble trace_exporter must be callable or have a method 'export', got: {type(value).__name__}"
    )


def _review_handler_of(value: object) -> object:
    if value is None or callable(value) or callable(getattr(value, "review", None)):
        return value
    raise ValidationError(
        f"Ensemble review_handler must be callable or have a method 'review', got: {type(value).__name__}"
    )


def _dashboard_of(value: object) -> object:
    if value is None or isinstance(value, Dashboard):
        return value
    raise ValidationError(f"Ensemble dashboard must be a WebDashboard, got: {type(value).__name__}")


def _check_name(name: object, owner: str) -> None:
    """Refuse a name that cannot stand in a list, in a URL or among the teams of a key (S-DOM-84)."""
    if isinstance(name, str) and not (
        0 < len(name) <= _LONGEST_NAME and name[0].isalnum() and name == name.rstrip() and name.isprintable()
        and not {"/", ","} & set(name)
    ):  # fmt: skip
        raise ValidationError(
            f"{owner} name must have 1 to {_LONGEST_NAME} characters in one line without '/' and ',', and begin with a "
            f"letter or a digit, got: {brief(name)!r}"
        )


def _inputs_of(value: object) -> object:
    return {} if value is None else value


def _tags_of(value: object) -> object:
    return {} if value is None else whole_data(value)


def _copy(value: Mapping[str, object]) -> Mapping[str, object]:
    return dict(value)


if TYPE_CHECKING:
    _Synthesizer: TypeAlias = Synthesizer | Callable[[Task, Any], object] | None
    _Exporter: TypeAlias = ExecutionTraceExporter | Callable[[ExecutionTrace], object] | None
    _ReviewHandler: TypeAlias = Reviewing | ReviewFunction | None
    _Dashboard: TypeAlias = Dashboard | None
    _Listeners: TypeAlias = Accepts[Sequence[object], object]
    _Inputs: TypeAlias = Accepts[Mapping[str, object], Mapping[str, object] | None]
    _Tags: TypeAlias = Accepts[Mapping[str, str], Mapping[str, str] | None]
    _Started: TypeAlias = Callable[[str, str, int], object]
    _Completed: TypeAlias = Callable[[str, timedelta, ExitReason], object]
    _OnStarted: TypeAlias = Accepts[tuple[_Started, ...], _Started | Sequence[_Started] | None]
    _OnCompleted: TypeAlias = Accepts[tuple[_Completed, ...], _Completed | Sequence[_Completed] | None]
else:
    _Synthesizer = Annotated[Any, BeforeValidator(_synthesizer_of)]
    _Exporter = Annotated[Any, BeforeValidator(_exporter_of)]
    _ReviewHandler = Annotated[Any, BeforeValidator(_review_handler_of)]
    _Dashboard = Annotated[Any, BeforeValidator(_dashboard_of)]
    _Listeners = Annotated[Sequence[object], SkipValidation, BeforeValidator(_listeners_of)]
    _Inputs = Annotated[Mapping[str, object], BeforeValidator(_inputs_of), AfterValidator(_copy)]
    _Tags = Annotated[Mapping[str, str], BeforeValidator(_tags_of), AfterValidator(_copy)]
    _OnStarted = _OnCompleted = Callbacks[object]


class RunRules(Value):
    """What the runs of an ensemble are held to, whatever it does.

    Attributes:
        name: What lists, traces and other programs call the team: up to 128 characters in one line. None: the file or
            the variable that it was loaded from.
        description: What the team is for, for people and models that choose a team.
        tags: Words of your own about the team, by name: all its runs have them, beside their own (`RunOptions.tags`).
        verbose: Whether prompts, answers and outputs are logged at INFO.
        llm: Model of the agents that are made for tasks without one; a model or a string.
        models: Models by name that a run which goes on can be told to ask, in place of its agents' own (`run.switch_model`).
        is_streaming: Written as `stream=`: whether answers stream where neither agent nor task say otherwise.
        agent_synthesizer: Makes agents for tasks that name none; None: by template, without a model call.
        inputs: Values of the variables in task texts; those given to a run win.
        chat_input: Variable that takes the user's message where the team is served as a model of the OpenAI API; None: the
            only one that has no value.
        parallel_error_strategy: What a failed task does to the others of a parallel run.
        max_parallel_tasks: Tasks that may run at the same time, and workers of a manager; None: no cap.
        listeners: Objects with methods such as `on_task_start`.
        rate_limit: Limit of the calls of `llm`, but by tasks and agents with a limit of their own; one bucket per run.
        context_budget: Most tokens that a request of a task may have, by the library's estimate; context of other tasks,
            memory, history and results of tools are cut until it fits, and the trace tells it. None: no limit.
        max_tool_output_length: Characters of a tool's output that the model sees; negative: all.
        tool_log_truncate_length: Characters of tool input and output in log lines; -1: all.
        tool_metrics: Counts tool calls for a monitoring system; None: nobody does.
        capture_mode: How much the trace keeps; None: as `ENSEMBLE_RAY_CAPTURE_MODE` says, else `"off"`.
        trace_exporter: Takes the trace of each successful run.
        cost_configuration: Money per token, for cost estimates.
        max_tokens: Tokens of input and output together that one run may spend; then it ends early, with what it has.
            None: no limit.
        max_cost: Money that one run may spend, in the currency of `cost_configuration`; None: no limit.
        durability: `"effects"`: what a step depends on is on record before it, so that nothing recorded is repeated
            after a crash; `"run"`: facts are written within 200 ms; `"off"`: nothing is.
        on_unknown: What becomes of a tool call that was begun before a crash and has no result: `"tell_model"`,
            `"fail"`, `"ask"` at the terminal, or a callable that is given an `UnknownEffect` and returns `"done"`,
            `"repeat"` or `"fail"`.
        review_handler: Decides at review gates: a callable of a `ReviewRequest` that returns a `ReviewDecision`, sync or
            async, or an object with `review`, such as `ReviewHandler.console()`; None: gates are passed.
        review_policy: After which tasks it is asked that say nothing themselves: `"never"`, `"after_every_task"` or
            `"after_last_task"`, which is that of a sequential list of tasks.
        review_wait: Where a run waits for decisions: `"attached"`: in the program that called `run()`, which asks the
            `review_handler`; `"detach"`: in its record: the call ends with an output whose `open_reviews` lists what is
            open, and `resume` goes on when it is decided. A `review_handler` beside it is not asked.
        retry: How patient a run is with model calls that fail by the provider's fault; None: not at all.
        on_incomplete: What becomes of an answer that was cut off or is empty, where its agent does not say:
            `"warn"`: it is used, with a warning; `"fail"`: the task fails; `"retry"`: the model is asked again, twice
            at most, then the task fails.
    """

    #: how messages name what is being made
    _called: ClassVar[str] = "Ensemble"
    _origin: Origin = PrivateAttr(default=Origin())

    name: StrictText | None = None
    description: StrictText | None = None
    tags: _Tags = initially({})
    verbose: bool = False
    llm: OptionalModelField = initially(None)
    models: ModelCatalogField = initially({})
    #: written as `stream=`; read under another name, since `Ensemble.stream` is what streams a run's events
    is_streaming: bool = Field(default=False, alias="stream")
    agent_synthesizer: _Synthesizer = None
    inputs: _Inputs = initially({})
    chat_input: StrictText | None = None
    parallel_error_strategy: ErrorStrategyField = initially(ParallelErrorStrategy.FAIL_FAST)
    max_parallel_tasks: StrictInt | None = None
    listeners: _Listeners = initially(())
    rate_limit: RateLimit | None = None
    context_budget: StrictInt | None = None
    max_tool_output_length: StrictInt = -1
    tool_log_truncate_length: StrictInt = 200
    tool_metrics: ToolMetrics | None = None
    capture_mode: CaptureModeField = initially(None)
    trace_exporter: _Exporter = None
    cost_configuration: CostConfiguration | None = None
    max_tokens: StrictInt | None = None
    max_cost: StrictAmount | None = None
    durability: DurabilityField = initially(Durability.EFFECTS)
    on_unknown: OnUnknownField = initially(OnUnknown.TELL_MODEL)
    review_handler: _ReviewHandler = None
    review_policy: ReviewPolicyField = initially(ReviewPolicy.NEVER)
    review_wait: ReviewWaitField = initially(ReviewWait.ATTACHED)
    retry: RetryPolicy | None = RetryPolicy()
    on_incomplete: OnIncomplete = "warn"

    @model_validator(mode="before")
    @classmethod
    def _check_rules(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        arguments = dict(cast("Mapping[str, Any]", data))
        _check_name(arguments.get("name"), cls._called)
        check_tags(arguments.get("tags"), cls._called)
        check_positive(arguments.get("max_parallel_tasks"), f"{cls._called} max_parallel_tasks must be > 0 when set")
        check_positive(arguments.get("context_budget"), f"{cls._called} context_budget must be > 0 when set")
        check_budget(arguments, cls._called)
        arguments["llm"] = resolve_model(arguments.get("llm"))
        arguments["models"] = check_models(arguments.get("models"), cls._called)
        return arguments

    @property
    def has_reviews(self) -> bool:
        """Whether somebody decides at gates; without that they are passed."""
        return self.review_handler is not None or self.is_detached

    @property
    def is_detached(self) -> bool:
        """Whether decisions are waited for in the record."""
        return self.review_wait is ReviewWait.DETACH

    @property
    def origin(self) -> str | None:
        """Where the definition came from: a YAML path or `module:attribute`; None: a program made it."""
        return self._origin.place or None

    @property
    def source(self) -> Origin:
        """Origin and what was chosen in place of what stands there: what a run needs to be resumed later."""
        return self._origin

    def with_origin(self, origin: str, overrides: Mapping[str, str] | None = None, *, called: str = "") -> Self:
        """Keep where it came from and what was chosen in place of what stands there, and return it; for loaders."""
        return self.with_source(Origin(place=origin, overrides=dict(overrides or {}), called=called))

    def with_source(self, source: Origin) -> Self:
        """Keep where it came from, as another definition knows it, and return it."""
        self._origin = source
        return self

    def with_options(self, options: RunOptions | None) -> Self:
        """Return this ensemble as one run sees it; options that are None change nothing."""
        if options is None:
            return self
        check_options(options)
        chosen = {name: getattr(options, name) for name in RunOptions.model_fields if name != "tags"}
        return self.model_copy(update={name: value for name, value in chosen.items() if value is not None})


class Watched(RunRules):
    """What listens to the runs of an ensemble.

    Attributes:
        dashboard: A `WebDashboard`, whose page shows the runs and answers their review gates, where there is no
            `review_handler`; it is started when a run begins, and stopped behind the last one that it was started for.
        on_task_start: Called with each event of that kind; one callable or several. The same holds for every `on_*`.
    """

    dashboard: _Dashboard = None
    # One field per kind of event, in the order in which they are registered (S-EVT-2).
    on_ensemble_started: _OnStarted = initially(())
    on_ensemble_completed: _OnCompleted = initially(())
    on_task_start: Callbacks[TaskStartEvent] = initially(())
    on_task_complete: Callbacks[TaskCompleteEvent] = initially(())
    on_task_failed: Callbacks[TaskFailedEvent] = initially(())
    on_tool_call: Callbacks[ToolCallEvent] = initially(())
    on_task_input: Callbacks[TaskInputEvent] = initially(())
    on_llm_iteration_started: Callbacks[LlmIterationStartedEvent] = initially(())
    on_llm_iteration_completed: Callbacks[LlmIterationCompletedEvent] = initially(())
    on_token: Callbacks[TokenEvent] = initially(())
    on_delegation_started: Callbacks[DelegationStartedEvent] = initially(())
    on_delegation_completed: Callbacks[DelegationCompletedEvent] = initially(())
    on_delegation_failed: Callbacks[DelegationFailedEvent] = initially(())
    on_file_changed: Callbacks[FileChangedEvent] = initially(())
    on_loop_iteration_completed: Callbacks[LoopIterationCompletedEvent] = initially(())
    on_graph_state_completed: Callbacks[GraphStateCompletedEvent] = initially(())
    on_task_reflected: Callbacks[TaskReflectedEvent] = initially(())

    @property
    def callbacks(self) -> Mapping[str, tuple[Callable[..., object], ...]]:
        """The `on_*` callables by listener method, in the order of registration; kinds without any are left out."""
        handlers = {method: cast("tuple[Callable[..., object], ...]", getattr(self, method)) for method in EVENT_TYPES}
        return {method: callables for method, callables in handlers.items() if callables}

    def with_dashboard_parts(self) -> Self:
        """Return this ensemble as its runs see it: with the listener of its dashboard, and the parts that it has none of."""
        dashboard = self.dashboard
        if dashboard is None:
            return self
        changes: dict[str, object] = {}
        if not any(each is dashboard.streaming_listener for each in self.listeners):
            changes["listeners"] = (*self.listeners, dashboard.streaming_listener)
        if self.review_handler is None:
            changes["review_handler"] = dashboard.review_handler
        if self.trace_exporter is None:
            changes["trace_exporter"] = dashboard.trace_exporter
        return self.model_copy(update=changes)

    def with_additional_listener(self, listener: object) -> Self:
        """Return this ensemble with one more listener, behind the others."""
        return self.replace(listeners=(*self.listeners, listener))
