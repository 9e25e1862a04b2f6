"""Agents: the role, goal, model and tools of a worker, here or in another system."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import timedelta
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias, Unpack, cast, get_args

from pydantic import Field, SkipValidation

from ensemble_ray.definition import fields
from ensemble_ray.errors import ToolConfigurationError, ValidationError
from ensemble_ray.ports import RunsTask
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.tools.tool import AgentTool
from ensemble_ray.values.attachments import Attachment
from ensemble_ray.values.delegation import TaskAnswer, TaskRequest
from ensemble_ray.values.messages import ChatMessage, Effect, OnIncomplete
from ensemble_ray.values.outputs import AgentOutput, EnsembleOutput, Parsed
from ensemble_ray.values.task_output import OutputType
from ensemble_ray.values.value import Accepts, RateLimit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from ensemble_ray.definition.run_options import RunFields, RunOptions
    from ensemble_ray.ensemble import Ensemble
    from ensemble_ray.events import Event
    from ensemble_ray.runs.ports import Runtime
    from ensemble_ray.tools.a2a.client import AgentAddress

    #: An earlier output, or alternating questions and answers.
    History: TypeAlias = AgentOutput[Any] | Sequence[ChatMessage]

_EFFECTS = get_args(Effect)
_DEFAULT_MAX_ITERATIONS = 25
_RELEASE_S = 10.0  # wait for a run to end after the reader of its stream has left

if TYPE_CHECKING:
    AmountsField = Accepts[Mapping[str, float], Mapping[str, float] | None]
    LabelsField = Accepts[Mapping[str, str], Mapping[str, str] | None]
else:
    AmountsField = fields.CopiedMapping[fields.StrictText, fields.StrictAmount]
    LabelsField = fields.CopiedMapping[fields.StrictText, fields.StrictText]


class Agent(fields.Identified):
    """A worker: a role, a goal, a model, and the tools it may call. It does tasks of ensembles and answers questions.

    One agent may serve many tasks and many runs at the same time. It is equal only to itself.

    Attributes:
        role: Its function, such as `"Researcher"`; shown in prompts, events and traces.
        goal: The purpose of its work.
        background: Experience and manner. Prompts show it after the role.
        tools: `@tool` functions, objects with `@tool` methods, `AgentTool`s, `DynamicToolProvider`s. Without tools a
            task is one model call.
        llm: Its model, or a string such as `"openai:gpt-4o-mini"` or `"local"`, or a list of these, which is a fallback chain.
            Default: the model of the ensemble.
        runner: Does its tasks in place of a model and tools: an object with `run(request)`, such as an agent of another
            framework; see `RunsTask`.
        runner_effect: Whether the runner may run again after a crash, as `Task.effect` of a handler. None: the attribute
            `effect` of the runner, else `once`.
        stream: Whether answers stream. None: as the task, then the ensemble declares.
        verbose: Whether prompts and answers are logged at INFO.
        max_iterations: Tool requests allowed per task; > 0.
        response_format: Instructions on the form of the answer, added to the end of the system prompt.
        allow_delegation: Whether it may delegate work to the ensemble's other agents with the tool `delegate`.
        rate_limit: Limit of this agent's model calls, shared by all its runs; `llm` is then the limited model.
        max_concurrency: Tasks that one process of it does at the same time; None: no limit.
        replicas: Processes that host it on Ray. Each has a copy of the state of its tools. By default one; agents without
            tools that are busy for long may get more.
        on_incomplete: How an answer that is empty or was cut off is handled. `"warn"`: it is used, with a warning;
            `"fail"`: the task fails; `"retry"`: the model is asked again, at most twice, then the task fails; None: as the
            ensemble declares.
        keep_reasoning: Whether answers keep reasoning in tags such as `<think>`. By default reasoning is stored apart
            from the answer.
        isolation: `"process"`: it always has a process on Ray that no other agent and no other run uses. None: agents
            without tools share one, and so do agents with the same tools and model. `"shared"`: agents with the same
            runner or the same requests for their nodes share, too.
        num_cpus: Processors that each of its processes on Ray reserves on its node. 0, the default, fits an agent that
            waits for models.
        num_gpus: GPUs that each of its processes reserves; fractions below 1 are possible.
        resources: Amounts of custom cluster resources that each of its processes reserves, by name.
        labels: Labels that its node must have, by name: a value, `"!value"`, `"in(a, b)"` or `"!in(a, b)"`.
    """

    role: fields.StrictText = Field(kw_only=False)
    goal: fields.StrictText = Field(kw_only=False)
    background: fields.StrictText | None = None
    tools: fields.ToolsField = fields.initially(())
    llm: fields.ModelField = fields.initially(fields.TEAM_MODEL)
    runner: Annotated[RunsTask | None, SkipValidation] = None
    runner_effect: Effect | None = None
    is_streaming: bool | None = Field(default=None, alias="stream")  # written as `stream=`, since `stream` is a method
    verbose: bool = False
    max_iterations: fields.StrictInt = _DEFAULT_MAX_ITERATIONS
    response_format: fields.StrictText = ""
    on_incomplete: OnIncomplete | None = None
    keep_reasoning: bool = False
    allow_delegation: bool = False
    rate_limit: RateLimit | None = None
    max_concurrency: fields.StrictInt | None = None
    replicas: fields.StrictInt = 1
    isolation: Literal["process", "shared"] | None = None
    num_cpus: fields.StrictAmount = 0.0
    num_gpus: fields.StrictAmount = 0.0
    resources: AmountsField = fields.initially({})
    labels: LabelsField = fields.initially({})

    __hash__ = fields.Identified.__hash__  # for type checkers, since there is `__eq__`

    @fields.checks_arguments
    @classmethod
    def _check(cls, arguments: dict[str, Any]) -> None:
        """In the order of S-DOM-1 to S-DOM-8; a missing role or goal counts as None (S-CONV-13)."""
        fields.check_text(arguments.get("role"), "Agent role must not be blank")
        fields.check_text(arguments.get("goal"), "Agent goal must not be blank")
        if arguments.setdefault("llm", fields.TEAM_MODEL) is None:
            raise ValidationError("Agent llm must not be None")
        fields.check_positive(arguments.get("max_iterations"), "Agent max_iterations must be > 0")
        arguments["tools"] = fields.check_tools(arguments.get("tools"), subject="Tool")
        fields.check_positive(arguments.get("max_concurrency"), "Agent max_concurrency must be > 0 when set")
        fields.check_positive(arguments.get("replicas"), "Agent replicas must be > 0")
        _check_process_fields(arguments)
        if arguments.get("response_format", "") is None:
            arguments["response_format"] = ""
        arguments["llm"] = fields.limit_own_model(arguments)
        _check_runner(arguments)

    def replace(self, **changes: object) -> Self:
        """Return a copy with these fields changed and checked. The copy is another agent, with another id.

        A new `rate_limit` replaces the old one.

        Raises:
            ValidationError: a field is unknown or its value is refused.
        """
        return super().replace(**fields.replace_limit(self.llm, self.rate_limit, changes))

    # Questions (S-DOM-78). Each is a run with its own record.

    def run(
        self,
        question: str,
        *,
        output_type: type[Parsed] | UnionType | None = None,
        history: History | None = None,
        attachments: Attachment | Sequence[Attachment] = (),
        runtime: Runtime | str | None = None,
        run_id: str | None = None,
        options: RunOptions | None = None,
        **fields: Unpack[RunFields],
    ) -> AgentOutput[Parsed]:
        """Ask, and wait for the answer. It works in scripts and inside a running event loop. Ctrl-C ends the run.

        Args:
            question: Used word for word; braces are text.
            output_type: Type that the answer is parsed into, as `Task.output_type`; read the value from `output.parsed`.
            history: Conversation to continue: the output of an earlier question, or alternating questions and answers.
            attachments: Pictures, audio and files that are sent with the question.
            runtime: As for `Ensemble.run`.
            run_id: As for `Ensemble.run`.
            options: As for `Ensemble.run`.
            fields: As for `Ensemble.run`: `tags`, `max_tokens` and the others.

        Raises:
            ValidationError: the question or the history is not valid, or the agent has no model.
            EnsembleError: the run failed, as for `Ensemble.run`.
        """
        asked = self.to_ensemble(question, output_type=output_type, history=history, attachments=attachments)
        return _answer_of(asked, asked.run(runtime=runtime, run_id=run_id, options=options, **fields))

    async def arun(
        self,
        question: str,
        *,
        output_type: type[Parsed] | UnionType | None = None,
        history: History | None = None,
        attachments: Attachment | Sequence[Attachment] = (),
        runtime: Runtime | str | None = None,
        run_id: str | None = None,
        options: RunOptions | None = None,
        **fields: Unpack[RunFields],
    ) -> AgentOutput[Parsed]:
        """`run` for async code, with the same contract. Cancelling it ends the run first."""
        asked = self.to_ensemble(question, output_type=output_type, history=history, attachments=attachments)
        return _answer_of(asked, await asked.arun(runtime=runtime, run_id=run_id, options=options, **fields))

    def stream(
        self,
        question: str,
        *,
        output_type: type[Parsed] | UnionType | None = None,
        history: History | None = None,
        attachments: Attachment | Sequence[Attachment] = (),
        runtime: Runtime | str | None = None,
        run_id: str | None = None,
        options: RunOptions | None = None,
        **fields: Unpack[RunFields],
    ) -> Iterator[Event | AgentOutput[Parsed]]:
        """Yield events as they happen, with pieces of text (`TokenEvent`), and the output as the last item.

        Leaving the loop early, or Ctrl-C in it, ends the run.

        Raises:
            ValidationError, EnsembleError: as `run`.
        """
        asked = self.to_ensemble(question, output_type=output_type, history=history, attachments=attachments).replace(
            stream=True
        )

        def events() -> Iterator[Event | AgentOutput[Parsed]]:
            begun = asked.start(runtime=runtime, run_id=run_id, options=options, **fields)
            try:
                yield from begun.events()
                yield _answer_of(asked, begun.result())
            finally:
                if begun.state.is_active:
                    begun.cancel()
                    begun.join(_RELEASE_S)

        return events()

    async def astream(
        self,
        question: str,
        *,
        output_type: type[Parsed] | UnionType | None = None,
        history: History | None = None,
        attachments: Attachment | Sequence[Attachment] = (),
        runtime: Runtime | str | None = None,
        run_id: str | None = None,
        options: RunOptions | None = None,
        **fields: Unpack[RunFields],
    ) -> AsyncIterator[Event | AgentOutput[Parsed]]:
        """`stream` for async code, with the same contract."""
        asked = self.to_ensemble(question, output_type=output_type, history=history, attachments=attachments).replace(
            stream=True
        )
        events = cast("Any", asked.stream(runtime=runtime, run_id=run_id, options=options, **fields))
        async with aclosing(events):
            async for each in events:
                yield _answer_of(asked, each) if isinstance(each, EnsembleOutput) else each

    def to_ensemble(
        self,
        question: str,
        *,
        output_type: OutputType | None = None,
        history: History | None = None,
        attachments: Attachment | Sequence[Attachment] = (),
    ) -> Ensemble:
        """Return the ensemble of one task that runs for this question.

        Use it to add listeners or costs to a question, or to resume or fork its run: `resume(run_id, ensemble)`. For a run
        that `stream` or `astream` began, use `to_ensemble(...).replace(stream=True)`.
        """
        # A layer above the definitions.
        from ensemble_ray.ensemble import build_question

        if not isinstance(question, str):
            raise ValidationError(f"Agent question must be a text, got: {type(question).__name__}")
        fields.check_text(question, "Agent question must not be blank")
        return build_question(
            self,
            fields.escape_template(question),
            output_type=output_type,
            history=_messages_of(history),
            attachments=attachments,
        )


_CONNECT_S, _RUN_S, _CALL_S = 10.0, 1800.0, 30.0
_GOAL = "Do the task that it is handed"


class RemoteAgent(Agent):
    """An agent of another system that does tasks of ensembles over the A2A protocol.

    It has the arguments of an `Agent` with a runner, and these. The default `role` is the last part of the URL.

    Attributes:
        url: Base URL of its card: the part before `/.well-known/agent-card.json`.
        headers: Sent with every request, such as `{"Authorization": "Bearer ..."}`. No output shows their values.
        hosts: Hosts that its card may name besides the host of the URL. Requests go to no other host.
        timeout: For one task, in seconds or as a `timedelta`; a task that takes longer is cancelled there.
        connect_timeout: For opening a connection, in seconds or as a `timedelta`.
    """

    url: fields.StrictText
    headers: Mapping[str, str] = Field(default_factory=dict, repr=False)
    hosts: tuple[str, ...] = fields.initially(())
    timeout: float | timedelta = _RUN_S
    connect_timeout: float | timedelta = _CONNECT_S

    def __init__(self, url: str, *, role: str | None = None, goal: str = _GOAL, **fields: Any) -> None:
        values: dict[str, Any] = {"url": url, "goal": goal, **fields}
        if role is not None:
            values["role"] = role
        super().__init__(**values)

    @fields.checks_arguments
    @classmethod
    def _connect(cls, arguments: dict[str, Any]) -> None:
        if not isinstance(arguments.get("runner"), _Asker | None):
            raise ValidationError("RemoteAgent already has a runner: leave out runner, or use an Agent")
        from ensemble_ray.tools.a2a import client  # few agents are remote

        connect_timeout = arguments.get("connect_timeout", _CONNECT_S)
        address = client.AgentAddress.of(
            arguments.get("url", ""),
            headers=arguments.get("headers"),
            hosts=() if arguments.get("hosts") is None else arguments["hosts"],
            connect_timeout_s=client.seconds_of(connect_timeout, "connect_timeout"),
        )
        arguments["hosts"] = tuple(sorted(address.hosts))
        arguments["headers"] = dict(address.headers)
        timeout_s = client.seconds_of(arguments.get("timeout", _RUN_S), "timeout")
        effect: Effect = arguments.get("runner_effect") or "once"
        arguments["runner"] = _Asker(address, timeout_s, effect)
        arguments.setdefault("role", address.name)

    @classmethod
    def discover(cls, url: str, **fields: Any) -> RemoteAgent:
        """Return the agent with the name in its card as role, and the description as goal.

        If the card allows a message to be sent again, the message is sent again after a crash (`runner_effect="idempotent"`).

        Raises:
            ToolConfigurationError: the card cannot be read.
            ValidationError: a field is refused.
        """
        return run_blocking(cls.adiscover(url, **fields))

    @classmethod
    async def adiscover(cls, url: str, **fields: Any) -> RemoteAgent:
        """`discover` for async code, with the same contract."""
        from ensemble_ray.tools.a2a import client

        known = cls(url, **fields)
        try:
            card = await client.fetch_card(cast("_Asker", known.runner).address)
        except client.RemoteAgentError as error:
            raise ToolConfigurationError(str(error)) from error
        said: dict[str, Any] = {"role": card.name or known.role, "goal": card.description or known.goal}
        if any(each.uri == client.IDEMPOTENT_MESSAGES for each in card.capabilities.extensions):
            said["runner_effect"] = "idempotent"
        return cls(url, **{**said, **fields})

    def as_tool(
        self, *, name: str | None = None, description: str | None = None, timeout: float | timedelta = _CALL_S
    ) -> AgentTool:
        """Return a tool that asks it. The calling model sees failures as the result of the tool.

        Args:
            name: Name of the tool; None: `ask_` and the last part of its URL.
            description: When the model should use the tool; None: says that it asks the agent.
            timeout: For one question, in seconds or as a `timedelta`.
        """
        from ensemble_ray.tools.a2a import client

        return client.A2ATool(
            self.url,
            name=name,
            description=description,
            headers=self.headers,
            hosts=self.hosts,
            effect=self.runner_effect or "once",
            timeout=timeout,
            connect_timeout=self.connect_timeout,
        )


def effect_of_runner(runner: object, declared: Effect | None) -> Effect:
    """Return the declared effect, else the runner's, else `once`."""
    if declared is not None:
        return declared
    own: object = getattr(runner, "effect", None)
    return cast("Effect", own) if isinstance(own, str) and own in _EFFECTS else "once"


def _messages_of(history: History | None) -> Sequence[ChatMessage]:
    """S-DOM-81."""
    if not isinstance(history, AgentOutput):
        return history or ()
    if not history.is_complete:
        raise ValidationError(
            f"Agent history must end with an answer, and run '{history.run_id}' ended early "
            f"({history.output.exit_reason.value}): give the output before it"
        )
    return history.messages


def _answer_of(asked: Ensemble, output: EnsembleOutput) -> AgentOutput[Any]:
    (task,) = asked.tasks
    turns = [ChatMessage(role="user", content=fields.unescape_template(task.description))]
    if output.is_complete:
        turns.append(ChatMessage(role="assistant", content=whole_text(output.raw)))
    return AgentOutput(output=output, messages=(*task.history, *turns))


@dataclass(frozen=True, slots=True)
class _Asker:
    address: AgentAddress
    timeout_s: float
    effect: Effect

    async def run(self, request: TaskRequest) -> AsyncGenerator[str | TaskAnswer]:
        from ensemble_ray.tools.a2a import client

        said = [f"{each.role.capitalize()}: {each.content or ''}" for each in request.history]
        asking = client.ask_agent(
            self.address,
            "\n\n".join((*said, request.prompt)),
            message_id=request.idempotency_key,
            may_repeat=self.effect != "once",
            timeout_s=self.timeout_s,
        )
        try:
            async with aclosing(asking) as pieces:
                async for piece in pieces:
                    if isinstance(piece, client.RemoteAnswer):
                        yield TaskAnswer(text=piece.shown, structured_output=piece.data)
                    elif request.is_streaming:
                        yield piece
        except client.RemoteAgentError as error:
            if not error.may_be_done or self.effect != "once":
                raise
            raise client.RemoteAgentError(f"Outcome unknown: {error}", may_be_done=True) from error


def _check_runner(arguments: Mapping[str, Any]) -> None:
    """Refuse an invalid runner, and fields that only a model would use."""
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
        msg = f"Agent runner must be an object, got the class {runner.__name__}. Write {runner.__name__}(...)"
        raise ValidationError(msg)
    if not callable(getattr(runner, "run", None)):
        msg = f"Agent runner must have a method run(request), as RunsTask says, got: {type(runner).__name__}"
        raise ValidationError(msg)
    said: object = getattr(runner, "effect", None)
    if isinstance(said, str) and said not in _EFFECTS:
        msg = f"Agent runner {type(runner).__name__}: effect must be one of [{', '.join(_EFFECTS)}], got: {said!r}"
        raise ValidationError(msg)
    iterations = arguments.get("max_iterations", _DEFAULT_MAX_ITERATIONS)
    others = (
        (arguments.get("llm") is not fields.TEAM_MODEL and arguments.get("rate_limit") is None, "a llm", "llm"),
        (arguments.get("tools"), "tools", "tools"),
        (iterations != _DEFAULT_MAX_ITERATIONS, "max_iterations", "max_iterations"),
        (arguments.get("rate_limit") is not None, "a rate_limit", "rate_limit"),
        (arguments.get("on_incomplete") == "retry", "on_incomplete='retry'", "on_incomplete"),
        (arguments.get("allow_delegation"), "allow_delegation", "allow_delegation"),
    )
    fields.check_exclusive("Agent", "runner", others, why="A runner brings its own model and tools")


_STEP = 0.0001  # smallest amount that Ray counts
#: Resources of Ray with their own fields, or that agents cannot reserve.
_FIELD_OF = {"CPU": "num_cpus", "GPU": "num_gpus"}
_RESERVED = frozenset({"memory", "object_store_memory"})
#: Kubernetes syntax for names and values of labels, with operators in front of a value.
_WORD = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_LABEL_NAME = re.compile(rf"(?:{_WORD}/)?{_WORD}")
_LABEL_SELECTOR = re.compile(rf"!?{_WORD}|!?in\({_WORD}(?:, ?{_WORD})*\)")


def _check_process_fields(arguments: Mapping[str, object]) -> None:
    """S-CLU-41; pydantic checks the types."""
    for name in ("num_cpus", "num_gpus"):
        _check_amount(arguments.get(name), f"Agent {name}", is_zero_fine=True)
    gpus = arguments.get("num_gpus")
    if isinstance(gpus, float) and gpus > 1 and not gpus.is_integer():
        raise ValidationError(f"Agent num_gpus must be whole where it is above 1, got: {gpus}")
    for name, amount in _entries(arguments.get("resources")):
        if name in _FIELD_OF:
            raise ValidationError(f"Agent resources must not name '{name}': use {_FIELD_OF[name]}")
        if not name.strip() or name in _RESERVED:
            raise ValidationError(f"Agent resources must name resources that nodes were started with, got: '{name}'")
        _check_amount(amount, f"Agent resources['{name}']", is_zero_fine=False)
    for name, selector in _entries(arguments.get("labels")):
        if not _LABEL_NAME.fullmatch(name):
            raise ValidationError(f"Agent labels must name labels of nodes, got: '{name}'")
        if isinstance(selector, str) and not _LABEL_SELECTOR.fullmatch(selector):
            msg = f"Agent labels['{name}'] must be a value, '!value', 'in(a, b)' or '!in(a, b)', got: '{selector}'"
            raise ValidationError(msg)


def _check_amount(value: object, subject: str, *, is_zero_fine: bool) -> None:
    if not isinstance(value, int | float) or (value == 0 and is_zero_fine):
        return
    if not math.isfinite(value) or value < _STEP:
        least = f"0 or at least {_STEP}" if is_zero_fine else f"at least {_STEP}"
        raise ValidationError(f"{subject} must be {least}, got: {value}")


def _entries(value: object) -> list[tuple[str, object]]:
    if not isinstance(value, Mapping):
        return []
    return [(name, each) for name, each in cast("Mapping[object, object]", value).items() if isinstance(name, str)]
