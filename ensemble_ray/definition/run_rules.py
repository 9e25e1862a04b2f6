"""Rules that every kind of ensemble runs under, and listeners of its runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, Self, TypeAlias, cast

from pydantic import BeforeValidator, Field, PrivateAttr, SkipValidation

from ensemble_ray import events
from ensemble_ray.definition import fields
from ensemble_ray.definition.run_options import RetryPolicy, RunOptions, check_budget, check_options, check_tags
from ensemble_ray.definition.task import Task
from ensemble_ray.errors import ValidationError
from ensemble_ray.errors.texts import brief
from ensemble_ray.events.delivery import EnsembleListener
from ensemble_ray.ports import Dashboard, ToolMetrics
from ensemble_ray.process.run_context import DepsPlace
from ensemble_ray.text.foreign_text import whole_data
from ensemble_ray.values.messages import OnIncomplete
from ensemble_ray.values.metrics import CostConfiguration
from ensemble_ray.values.outputs import ExitReason
from ensemble_ray.values.prices import GivenPrice, ModelPrice
from ensemble_ray.values.reviews import ReviewFunction, Reviewing, ReviewPolicy, ReviewWait
from ensemble_ray.values.trace import ExecutionTrace, ExecutionTraceExporter
from ensemble_ray.values.value import Accepts, RateLimit, Value, to_tuple

_LONGEST_NAME = 128
_OF_ONE_RUN = {"tags", "user"}  # options that a definition does not have


class Synthesizer(Protocol):
    """Makes an agent for a task that names none (S-DET-25)."""

    def synthesize(self, task: Task, context: Any, /) -> object:
        """Return the agent, or an awaitable of it. The context is a `SynthesisContext`."""
        ...


def _callable_or(field: str, method: str) -> Callable[[object], object]:
    """Return a validator that accepts None, a callable, or an object with that method."""

    def check(value: object) -> object:
        if value is None or callable(value) or callable(getattr(value, method, None)):
            return value
        msg = f"Ensemble {field} must be callable or have a method '{method}', got: {type(value).__name__}"
        raise ValidationError(msg)

    return check


def _to_listeners(value: object) -> tuple[object, ...]:
    entries = to_tuple(value)
    for index, entry in enumerate(entries):
        if not isinstance(entry, EnsembleListener) and not any(hasattr(entry, method) for method in events.EVENT_TYPES):
            raise ValidationError(
                f"Ensemble listener at index {index} ({type(entry).__name__}) has none of the listener methods: "
                f"[{', '.join(events.EVENT_TYPES)}]"
            )
    return entries


def _check_dashboard(value: object) -> object:
    if value is None or isinstance(value, Dashboard):
        return value
    raise ValidationError(f"Ensemble dashboard must be a WebDashboard, got: {type(value).__name__}")


def _check_prices(value: object) -> object:
    """Refuse entries of another form (S-PRC-13)."""
    for name, price in cast("Mapping[object, object]", value).items() if isinstance(value, Mapping) else ():
        if not isinstance(price, ModelPrice | Mapping | str):
            raise ValidationError(
                f"Ensemble prices: '{name}' must be a ModelPrice or the name of a model, 'PROVIDER:MODEL', got: "
                f"{type(price).__name__}"
            )
    return value


def _check_deps_type(value: object) -> object:
    if value is None or isinstance(value, type):
        return value
    raise ValidationError(f"Ensemble deps_type must be a class, got: {type(value).__name__}")


if TYPE_CHECKING:
    _DepsType: TypeAlias = type[Any] | None
    _Synthesizer: TypeAlias = Synthesizer | Callable[[Task, Any], object] | None
    _Exporter: TypeAlias = ExecutionTraceExporter | Callable[[ExecutionTrace], object] | None
    _ReviewHandler: TypeAlias = Reviewing | ReviewFunction | None
    _Dashboard: TypeAlias = Dashboard | None
    _Listeners: TypeAlias = Accepts[Sequence[object], object]
    _Inputs: TypeAlias = Accepts[Mapping[str, object], Mapping[str, object] | None]
    _Tags: TypeAlias = Accepts[Mapping[str, str], Mapping[str, str] | None]
    _Started: TypeAlias = Callable[[str, str, int], object]
    _Completed: TypeAlias = Callable[[str, timedelta, ExitReason], object]
    _Prices: TypeAlias = Accepts[Mapping[str, GivenPrice], Mapping[str, GivenPrice] | None]
    _OnStarted: TypeAlias = Accepts[tuple[_Started, ...], _Started | Sequence[_Started] | None]
    _OnCompleted: TypeAlias = Accepts[tuple[_Completed, ...], _Completed | Sequence[_Completed] | None]
else:
    _DepsType = Annotated[Any, BeforeValidator(_check_deps_type)]
    _Synthesizer = Annotated[Any, BeforeValidator(_callable_or("agent_synthesizer", "synthesize"))]
    _Exporter = Annotated[Any, BeforeValidator(_callable_or("trace_exporter", "export"))]
    _ReviewHandler = Annotated[Any, BeforeValidator(_callable_or("review_handler", "review"))]
    _Dashboard = Annotated[Any, BeforeValidator(_check_dashboard)]
    _Listeners = Annotated[Sequence[object], SkipValidation, BeforeValidator(_to_listeners)]
    _Inputs = fields.CopiedMapping[str, object]
    _Prices = Annotated[fields.CopiedMapping[str, GivenPrice], BeforeValidator(_check_prices)]
    _Tags = Annotated[fields.CopiedMapping[str, str], BeforeValidator(whole_data)]
    _OnStarted = _OnCompleted = fields.Callbacks[object]


class RunRules(Value):
    """Rules for the runs of an ensemble of any kind.

    Attributes:
        name: The team's name in lists, traces and other programs: up to 128 characters in one line. None: the file or the
            variable that it was loaded from.
        description: Purpose of the team, for people and models that choose a team.
        tags: Labels of the team, by name. All its runs have them, in addition to their own (`RunOptions.tags`).
        verbose: Whether prompts, answers and outputs are logged at INFO.
        llm: Model of all agents and tasks that declare no model: a model, a string, or a list of these, which is a fallback chain.
        models: Models by name that a running run can switch to, in place of its agents' models (`run.switch_model`).
        stream: Whether answers stream, if neither agent nor task declares it.
        agent_synthesizer: Makes agents for tasks that name none; None: by template, without a model call.
        inputs: Values of the variables in task texts; inputs of a run replace them.
        chat_input: Variable for the user's message, if the team is served as a model of the OpenAI API; None: the only variable
            without a value.
        parallel_error_strategy: Effect of a failed task on the others of a parallel run.
        max_parallel_tasks: Tasks that may run at the same time, also workers of a manager; None: no limit.
        listeners: Objects with methods such as `on_task_start`.
        rate_limit: Limit of the calls of `llm`, one bucket per run. It does not apply to tasks and agents with their own limit.
        context_budget: Most tokens that a request of a task may have, by the library's estimate. Context of other tasks,
            memory, history and results of tools are cut until it fits, and the trace says so. None: no limit.
        max_tool_output_length: Characters of a tool's output that the model sees; negative: all.
        tool_log_truncate_length: Characters of tool input and output in log lines; -1: all.
        tool_metrics: Counts tool calls for a monitoring system; None: no counting.
        capture_mode: Level of detail of the trace; None: `ENSEMBLE_RAY_CAPTURE_MODE`, else `"off"`.
        trace_exporter: Receives the traces of successful runs.
        cost_configuration: Money per token of every model, in place of `prices` and of the library's prices.
        prices: Prices of models by name, or by `PROVIDER:MODEL`: a `ModelPrice`, whose missing rates are the library's, or the
            name of a model with the same price, such as `"openai:gpt-5"`.
        max_tokens: Tokens of input and output together that one run may use. Then it ends early, with the outputs so far.
            None: no limit.
        max_cost: Money that one run may spend, in USD or the currency of `cost_configuration`; None: no limit.
        durability: When facts are committed. `"effects"`: before a tool with an effect is called and before a result leaves
            the run, else within 2 ms, so that no effect happens twice; `"run"`: within 200 ms; `"off"`: never.
        on_unknown: Handling of a tool call that began before a crash and has no result: `"tell_model"`, `"fail"`, `"ask"` at
            the terminal, or a function of an `UnknownEffect` that returns `"done"`, `"repeat"` or `"fail"`.
        review_handler: Decides at review gates: a callable of a `ReviewRequest` that returns a `ReviewDecision`, sync or
            async, or an object with `review`, such as `ReviewHandler.console()`; None: all gates pass.
        review_policy: Tasks with a review gate, unless they declare it themselves: `"never"`, `"after_every_task"` or
            `"after_last_task"`, which means the last task of a sequential list.
        review_wait: Where a run waits for decisions. `"attached"`: in the program that called `run()`; the
            `review_handler` decides. `"detach"`: in its record. The call returns an output with the open gates
            in `open_reviews`, and `resume` continues the run after the decisions. A `review_handler` is not used.
        retry: Retries of model calls that fail because of the provider; None: no retries.
        on_incomplete: Handling of an answer that is empty or was cut off, unless its agent declares it. `"warn"`: it is used,
            with a warning; `"fail"`: the task fails; `"retry"`: the model is asked again, at most twice, then the task fails.
        deps_type: Class of the deps that runs need. A run with deps of another class, or without, ends before any model call.
            None: not checked.
        deps: Deps of the runs that are begun without their own (`run(deps=...)`): a value, or `provide(function)`.
        deps_place: Process that has the deps of a run on Ray. `"worker"`: each process that runs tasks, so that a value is
            pickled once per run; `"driver"`: only the process that starts the run. Handlers, guardrails, delegation policies,
            and `@tool` functions with a context parameter are then called there.
    """

    _called: ClassVar[str] = "Ensemble"  # in messages
    _origin: fields.Origin = PrivateAttr(default=fields.Origin())

    name: fields.StrictText | None = None
    description: fields.StrictText | None = None
    tags: _Tags = fields.initially({})
    verbose: bool = False
    llm: fields.OptionalModelField = fields.initially(None)
    models: fields.ModelCatalogField = fields.initially({})
    is_streaming: bool = Field(default=False, alias="stream")  # written as `stream=`, since `stream` is a method
    agent_synthesizer: _Synthesizer = None
    inputs: _Inputs = fields.initially({})
    chat_input: fields.StrictText | None = None
    parallel_error_strategy: fields.ErrorStrategyField = fields.initially(fields.ParallelErrorStrategy.FAIL_FAST)
    max_parallel_tasks: fields.StrictInt | None = None
    listeners: _Listeners = fields.initially(())
    rate_limit: RateLimit | None = None
    context_budget: fields.StrictInt | None = None
    max_tool_output_length: fields.StrictInt = -1
    tool_log_truncate_length: fields.StrictInt = 200
    tool_metrics: ToolMetrics | None = None
    capture_mode: fields.CaptureModeField = fields.initially(None)
    trace_exporter: _Exporter = None
    cost_configuration: CostConfiguration | None = None
    prices: _Prices = fields.initially({})
    max_tokens: fields.StrictInt | None = None
    max_cost: fields.StrictAmount | None = None
    durability: fields.DurabilityField = fields.initially(fields.Durability.EFFECTS)
    on_unknown: fields.OnUnknownField = fields.initially(fields.OnUnknown.TELL_MODEL)
    review_handler: _ReviewHandler = None
    review_policy: fields.ReviewPolicyField = fields.initially(ReviewPolicy.NEVER)
    review_wait: fields.ReviewWaitField = fields.initially(ReviewWait.ATTACHED)
    retry: RetryPolicy | None = Field(default_factory=RetryPolicy)
    on_incomplete: OnIncomplete = "warn"
    deps_type: _DepsType = None
    deps: Any = Field(default=None, repr=False, exclude=True)
    deps_place: DepsPlace = "worker"

    @fields.checks_arguments
    @classmethod
    def _check_rules(cls, arguments: dict[str, Any]) -> None:
        _check_name(arguments.get("name"), cls._called)
        check_tags(arguments.get("tags"), cls._called)
        fields.check_positive(
            arguments.get("max_parallel_tasks"), f"{cls._called} max_parallel_tasks must be > 0 when set"
        )
        fields.check_positive(arguments.get("context_budget"), f"{cls._called} context_budget must be > 0 when set")
        check_budget(arguments, cls._called)
        arguments["llm"] = fields.resolve_model(arguments.get("llm"))
        arguments["models"] = fields.check_models(arguments.get("models"), cls._called)

    @property
    def has_reviews(self) -> bool:
        """Whether review gates wait for decisions; otherwise they pass."""
        return self.review_handler is not None or self.is_detached

    @property
    def is_detached(self) -> bool:
        """Whether runs wait for decisions in their record."""
        return self.review_wait is ReviewWait.DETACH

    @property
    def origin(self) -> str | None:
        """Source of the definition: a YAML path or `module:attribute`; None: a program made it."""
        return self._origin.place or None

    @property
    def source(self) -> fields.Origin:
        """Source and options of the loader: all that is needed to make the definition again for a later resume."""
        return self._origin

    def with_origin(self, origin: str, overrides: Mapping[str, str] | None = None, *, called: str = "") -> Self:
        """Store the source and the options of the loader, and return this definition. For loaders."""
        return self.with_source(fields.Origin(place=origin, overrides=dict(overrides or {}), called=called))

    def with_source(self, source: fields.Origin) -> Self:
        """Store the source of another definition, and return this one."""
        self._origin = source
        return self

    def with_options(self, options: RunOptions | None) -> Self:
        """Return this ensemble with the options of one run; options that are None have no effect."""
        if options is None:
            return self
        check_options(options)
        chosen = {name: getattr(options, name) for name in RunOptions.model_fields if name not in _OF_ONE_RUN}
        return self.model_copy(update={name: value for name, value in chosen.items() if value is not None})


class RunListeners(RunRules):
    """Listeners of the runs of an ensemble.

    Attributes:
        dashboard: A `WebDashboard`, which shows the runs, and answers their review gates if there is no `review_handler`.
        on_task_start: Called with each event of that kind; one callable or several. The same holds for every `on_*`.
    """

    dashboard: _Dashboard = None
    # In the order of registration (S-EVT-2).
    on_ensemble_started: _OnStarted = fields.initially(())
    on_ensemble_completed: _OnCompleted = fields.initially(())
    on_task_start: fields.Callbacks[events.TaskStartEvent] = fields.initially(())
    on_task_complete: fields.Callbacks[events.TaskCompleteEvent] = fields.initially(())
    on_task_failed: fields.Callbacks[events.TaskFailedEvent] = fields.initially(())
    on_tool_call: fields.Callbacks[events.ToolCallEvent] = fields.initially(())
    on_task_input: fields.Callbacks[events.TaskInputEvent] = fields.initially(())
    on_llm_iteration_started: fields.Callbacks[events.LlmIterationStartedEvent] = fields.initially(())
    on_llm_iteration_completed: fields.Callbacks[events.LlmIterationCompletedEvent] = fields.initially(())
    on_token: fields.Callbacks[events.TokenEvent] = fields.initially(())
    on_delegation_started: fields.Callbacks[events.DelegationStartedEvent] = fields.initially(())
    on_delegation_completed: fields.Callbacks[events.DelegationCompletedEvent] = fields.initially(())
    on_delegation_failed: fields.Callbacks[events.DelegationFailedEvent] = fields.initially(())
    on_file_changed: fields.Callbacks[events.FileChangedEvent] = fields.initially(())
    on_loop_iteration_completed: fields.Callbacks[events.LoopIterationCompletedEvent] = fields.initially(())
    on_graph_state_completed: fields.Callbacks[events.GraphStateCompletedEvent] = fields.initially(())
    on_task_reflected: fields.Callbacks[events.TaskReflectedEvent] = fields.initially(())
    on_batch_progress: fields.Callbacks[events.BatchProgressEvent] = fields.initially(())

    @property
    def callbacks(self) -> Mapping[str, tuple[Callable[..., object], ...]]:
        """The `on_*` callables by listener method, in the order of registration."""
        handlers = {
            method: cast("tuple[Callable[..., object], ...]", getattr(self, method)) for method in events.EVENT_TYPES
        }
        return {method: callables for method, callables in handlers.items() if callables}

    def with_dashboard_parts(self) -> Self:
        """Return this ensemble with the parts of its dashboard."""
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
        """Return this ensemble with one more listener, after the others."""
        return self.replace(listeners=(*self.listeners, listener))


def _check_name(name: object, owner: str) -> None:
    """Refuse a name that lists, URLs or access keys could not contain (S-DOM-84)."""
    if isinstance(name, str) and not (
        0 < len(name) <= _LONGEST_NAME and name[0].isalnum() and name == name.rstrip() and name.isprintable()
        and not {"/", ","} & set(name)
    ):  # fmt: skip
        raise ValidationError(
            f"{owner} name must have 1 to {_LONGEST_NAME} characters in one line without '/' and ',', and begin with a "
            f"letter or a digit, got: {brief(name)!r}"
        )
