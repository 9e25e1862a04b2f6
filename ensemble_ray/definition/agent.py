"""An agent: who works, with which model and tools. Package: definition.

In: what the user declares. Out: a frozen value that travels to whoever runs its tasks. It never calls its model: a
question to it is a run like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from functools import partial
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Unpack, cast

from pydantic import Field, SkipValidation, model_validator

from ensemble_ray.definition.fields import (
    ModelField,
    StrictAmount,
    StrictInt,
    StrictText,
    ToolsField,
    check_positive,
    check_text,
    check_tools,
    initially,
    limit_own_model,
    replace_limit,
)
from ensemble_ray.definition.identity import Identified
from ensemble_ray.definition.model_placeholder import TEAM_MODEL
from ensemble_ray.definition.own_runner import check_runner
from ensemble_ray.definition.process_fields import AmountsField, LabelsField, check_process_fields
from ensemble_ray.definition.questions import build_answer, build_description, get_messages, stream_answer
from ensemble_ray.errors import ValidationError
from ensemble_ray.ports.runners import RunsTask
from ensemble_ray.values.agent_output import AgentOutput
from ensemble_ray.values.messages import Effect, OnIncomplete
from ensemble_ray.values.outputs import EnsembleOutput, Parsed
from ensemble_ray.values.rate_limit import RateLimit
from ensemble_ray.values.task_output import OutputType

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from ensemble_ray.definition.questions import History
    from ensemble_ray.definition.run_options import RunFields, RunOptions
    from ensemble_ray.ensemble import Ensemble  # a seam, as `to_ensemble` says
    from ensemble_ray.events import Event
    from ensemble_ray.runs.ports import Runtime

__all__ = ["Agent"]


class Agent(Identified):
    """A worker: a role, a goal, a model, and the tools it may call. It does tasks of ensembles, and answers questions.

    One agent may serve many tasks and many runs at once; it is equal only to itself.

    Attributes:
        role: Who it is; shown in prompts, events and traces.
        goal: What it works towards.
        background: Experience and manner, told to the model after the role.
        tools: `@tool` functions, objects with `@tool` methods, `AgentTool`s, `DynamicToolProvider`s. Without tools a
            task is one model call.
        llm: Its model, or a string such as `"openai:gpt-4o-mini"` or `"local"`; left out: that of the ensemble it runs in.
        runner: Does its tasks in place of a model and tools: an object with `run(request)`, such as an agent of another
            framework; see `RunsTask`.
        runner_effect: What the runner does to the world, as `Task.effect` of a handler. None: as its attribute `effect`
            says, else `once`.
        stream: Whether answers stream; None: as the task, then the ensemble say.
        verbose: Whether prompts and answers are logged at INFO.
        max_iterations: Tool requests allowed per task; > 0.
        response_format: Instructions on the form of the answer, put at the end of the system prompt.
        allow_delegation: Whether it may hand work to the ensemble's other agents, by a tool named `delegate`.
        rate_limit: Limit of this agent's model calls, kept across runs; `llm` is then the limited model.
        max_concurrency: Tasks it works on at the same time in one process; None: no cap.
        replicas: Processes that host it on Ray; its tools' state is then one copy per process.
        on_incomplete: What becomes of an answer that was cut off or is empty: `"warn"`: it is used, with a warning;
            `"fail"`: the task fails; `"retry"`: the model is asked again, twice at most, then the task fails; None: as
            the ensemble says.
        keep_reasoning: Whether the text of answers stays as it came, with reasoning in tags such as `<think>`. By default
            reasoning is stored apart from the answer.
        isolation: `"process"`: always a process of its own on Ray, which no other agent and no other run has; `"shared"`: never
            one; None: the runtime decides.
        num_cpus: Processors of its node that each of its processes on Ray reserves; 0: none, since it waits for models.
        num_gpus: The same for GPUs; parts of one are possible.
        resources: The same for resources of the cluster's own, by their names.
        labels: Labels that its node has, by their names: a value, `"!value"`, `"in(a, b)"` or `"!in(a, b)"`.
    """

    role: StrictText = Field(kw_only=False)
    goal: StrictText = Field(kw_only=False)
    background: StrictText | None = None
    tools: ToolsField = initially(())
    llm: ModelField = initially(TEAM_MODEL)
    runner: Annotated[RunsTask | None, SkipValidation] = None
    runner_effect: Effect | None = None
    #: written as `stream=`; read under another name, since `Agent.stream` is what streams a run's events
    is_streaming: bool | None = Field(default=None, alias="stream")
    verbose: bool = False
    max_iterations: StrictInt = 25
    response_format: StrictText = ""
    on_incomplete: OnIncomplete | None = None
    keep_reasoning: bool = False
    allow_delegation: bool = False
    rate_limit: RateLimit | None = None
    max_concurrency: StrictInt | None = None
    replicas: StrictInt = 1
    isolation: Literal["process", "shared"] | None = None
    num_cpus: StrictAmount = 0.0
    num_gpus: StrictAmount = 0.0
    resources: AmountsField = initially({})
    labels: LabelsField = initially({})

    __hash__ = Identified.__hash__  # type checkers take a value class to be unhashable unless it says so itself

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        """Check the fields in the table's order (S-DOM-1 to S-DOM-8); a missing role or goal counts as None (S-CONV-13)."""
        if not isinstance(data, Mapping):
            return data
        arguments = dict(cast("Mapping[str, Any]", data))
        check_text(arguments.get("role"), "Agent role must not be blank")
        check_text(arguments.get("goal"), "Agent goal must not be blank")
        if arguments.setdefault("llm", TEAM_MODEL) is None:
            raise ValidationError("Agent llm must not be None")
        check_positive(arguments.get("max_iterations"), "Agent max_iterations must be > 0")
        arguments["tools"] = check_tools(arguments.get("tools"), subject="Tool")
        check_positive(arguments.get("max_concurrency"), "Agent max_concurrency must be > 0 when set")
        check_positive(arguments.get("replicas"), "Agent replicas must be > 0")
        check_process_fields(arguments)
        if arguments.get("response_format", "") is None:
            arguments["response_format"] = ""
        arguments["llm"] = limit_own_model(arguments)
        check_runner(arguments)
        return arguments

    def replace(self, **changes: object) -> Self:
        """Return a copy with these fields changed, checked like a new one; it is another agent with an id of its own.

        A new `rate_limit` takes the place of the old one.

        Raises:
            ValidationError: a field is unknown or its value is refused.
        """
        return super().replace(**replace_limit(self.llm, self.rate_limit, changes))

    # Questions (S-DOM-78). Each is a run with a record of its own, and the four ways to ask take the same arguments.

    def run(
        self,
        question: str,
        *,
        output_type: type[Parsed] | UnionType | None = None,
        history: History | None = None,
        runtime: Runtime | str | None = None,
        run_id: str | None = None,
        options: RunOptions | None = None,
        **fields: Unpack[RunFields],
    ) -> AgentOutput[Parsed]:
        """Ask, and wait for the answer; works in scripts and inside a running event loop. Ctrl-C ends the run.

        Args:
            question: What is asked, word for word: braces are text.
            output_type: Type that the answer is parsed into, as `Task.output_type`; read it from `output.parsed`.
            history: Conversation to continue: the output of an earlier question, or questions and answers in turns.
            runtime: As of `Ensemble.run`.
            run_id: As of `Ensemble.run`.
            options: As of `Ensemble.run`.
            fields: As of `Ensemble.run`: `tags`, `max_tokens` and the others.

        Raises:
            ValidationError: the question or the history cannot be asked, or the agent has no model.
            EnsembleError: the run failed; as `Ensemble.run`.
        """
        asked = self.to_ensemble(question, output_type=output_type, history=history)
        return build_answer(asked.tasks, asked.run(runtime=runtime, run_id=run_id, options=options, **fields))

    async def arun(
        self,
        question: str,
        *,
        output_type: type[Parsed] | UnionType | None = None,
        history: History | None = None,
        runtime: Runtime | str | None = None,
        run_id: str | None = None,
        options: RunOptions | None = None,
        **fields: Unpack[RunFields],
    ) -> AgentOutput[Parsed]:
        """`run` for async code, with the same contract; cancelling it ends the run first."""
        asked = self.to_ensemble(question, output_type=output_type, history=history)
        return build_answer(asked.tasks, await asked.arun(runtime=runtime, run_id=run_id, options=options, **fields))

    def stream(
        self,
        question: str,
        *,
        output_type: type[Parsed] | UnionType | None = None,
        history: History | None = None,
        runtime: Runtime | str | None = None,
        run_id: str | None = None,
        options: RunOptions | None = None,
        **fields: Unpack[RunFields],
    ) -> Iterator[Event | AgentOutput[Parsed]]:
        """Give events as they happen, pieces of text (`TokenEvent`) among them, then the output as the last item.

        Leaving the loop early, or Ctrl-C in it, ends the run.

        Raises:
            ValidationError, EnsembleError: as `run`.
        """
        asked = self.to_ensemble(question, output_type=output_type, history=history).replace(stream=True)
        return stream_answer(
            asked.tasks, partial(asked.start, runtime=runtime, run_id=run_id, options=options, **fields)
        )

    async def astream(
        self,
        question: str,
        *,
        output_type: type[Parsed] | UnionType | None = None,
        history: History | None = None,
        runtime: Runtime | str | None = None,
        run_id: str | None = None,
        options: RunOptions | None = None,
        **fields: Unpack[RunFields],
    ) -> AsyncIterator[Event | AgentOutput[Parsed]]:
        """`stream` for async code, with the same contract."""
        asked = self.to_ensemble(question, output_type=output_type, history=history).replace(stream=True)
        events = cast("Any", asked.stream(runtime=runtime, run_id=run_id, options=options, **fields))
        async with aclosing(events):
            async for each in events:
                yield build_answer(asked.tasks, each) if isinstance(each, EnsembleOutput) else each

    def to_ensemble(
        self, question: str, *, output_type: OutputType | None = None, history: History | None = None
    ) -> Ensemble:
        """Return what is run when the agent is asked: an ensemble of one task.

        Use it to add listeners or costs to a question, or to resume or fork its run: `resume(run_id, ensemble)`. A run
        that `stream` or `astream` began is that of `to_ensemble(...).replace(stream=True)`.
        """
        # A seam: what runs an agent stands far above it, and is imported when a user asks, never before.
        from ensemble_ray.ensemble import build_question

        messages = get_messages(history)
        return build_question(self, build_description(question), output_type=output_type, history=messages)
