"""The steps of a run, and one step in full: rows of the executions in its history. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from hashlib import sha256
from sys import intern
from typing import TypeVar, cast

import msgspec
from msgspec import Struct
from pydantic import JsonValue

from ensemble_ray.errors import RecordError
from ensemble_ray.execute.guardrails import GuardrailType
from ensemble_ray.facts.effects import DelegationDecided, ModelAnswered, OutcomeDecided, ToolIntended, ToolReturned
from ensemble_ray.facts.fact import Fact, as_count, as_mapping, as_sequence, as_text
from ensemble_ray.facts.runs import DirectivesShown, FailureRecorded, OutputRecorded, PlanRecorded, RecordedOutput
from ensemble_ray.llm.names import recorded_names
from ensemble_ray.plan.plan import GraphUnit
from ensemble_ray.record import history
from ensemble_ray.record.history import RecordedExecution, RunHistory
from ensemble_ray.record.work import RecordedWork
from ensemble_ray.schedule.instructions import StepEnded
from ensemble_ray.studio import schemas
from ensemble_ray.studio.schemas import CostSchema, Effect, SegmentKind, StepSchema, StepTokens
from ensemble_ray.text.foreign_text import one_line
from ensemble_ray.values.ids import node_key, task_instance
from ensemble_ray.values.metrics import add_tokens
from ensemble_ray.values.outputs import ExitReason, RunState
from ensemble_ray.values.trace import GraphTrace, GraphTraceStep, TaskTrace, jsonable

TITLE = 120
_MOST_PARTS = 200  # segments and calls of a row. Later segments extend the last one.
_DELEGATING = "delegate"  # tools that delegate work begin so


def as_millis(at: float) -> int:
    return round(at * 1000)


def title_of(text: str) -> str:
    """Return the first line with text as a title."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    shown = str(one_line(first[: TITLE + 1], None))
    return shown if len(shown) <= TITLE else f"{shown[: TITLE - 1]}…"


def cost_of(metrics: Mapping[str, object]) -> tuple[Decimal, str] | None:
    """Return the estimated cost in JSON data of `TaskMetrics`, and its currency."""
    estimate = as_mapping(metrics.get("cost_estimate"))
    if not estimate:
        return None
    try:
        return Decimal(str(estimate.get("total_cost"))), intern(as_text(estimate.get("currency")))
    except InvalidOperation:  # another program wrote the record
        return None


def cost_schema(cost: tuple[Decimal, str] | None, unpriced_calls: int) -> CostSchema | None:
    if cost is None:
        return None
    return CostSchema(amount=f"{cost[0]:f}", currency=cost[1], unpriced_calls=unpriced_calls)


class ShownStep(Struct, eq=False):
    execution: history.RecordedExecution
    title: str
    input_tokens: int = 0  # -1: unknown
    output_tokens: int = 0
    cached_tokens: int = 0  # 0 also if uncounted
    model_calls: int = 0
    output_digest: str | None = None
    cost: tuple[Decimal, str] | None = None  # with its currency
    unpriced_calls: int = 0
    effect: Effect | None = None  # of its calls that ended or were repeated
    is_reviewed: bool = False
    spans: list[tuple[SegmentKind, float, float]] = msgspec.field(
        default_factory=list["tuple[SegmentKind, float, float]"]
    )
    tools: list[tuple[str, str, float]] = msgspec.field(default_factory=list[tuple[str, str, float]])
    _begun_calls: set[str] | None = None  # until the step is completed
    _row: tuple[int, StepSchema] | None = None

    @property
    def total_tokens(self) -> int | None:
        """None: a provider did not count."""
        known = self.input_tokens >= 0 and self.output_tokens >= 0
        return self.input_tokens + self.output_tokens if known else None

    def apply(self, change: history.ExecutionChange) -> None:
        match change:
            case history.ModelReplied():
                self._add_answer(change.fact.data)
            case history.CallStarted():
                self._begin_call(change.fact)
            case history.CallEnded():
                self._add_call(change)
            case history.DelegationStarted():
                self._begin(change.fact.data.started_at)
            case history.GateOpened():
                self._begin(change.fact.at)
            case history.GateClosed():
                self.is_reviewed = True
                if change.asked is not None:
                    self._spend("person", change.asked.at, change.fact.at)
            case history.WorkRecorded():
                self._begin(change.fact.at)
                self.model_calls += change.model_calls
                self._count(change.input_tokens, change.output_tokens)
            case history.ExecutionEnded():
                self._end(change)
            case _:
                pass

    def row(self) -> StepSchema:
        version = self.execution.version
        if self._row is None or self._row[0] != version:
            self._row = (version, self._make_row())
        return self._row[1]

    def _begin(self, at: float) -> None:
        requested_at = self.execution.requested_at
        if not self.spans and requested_at is not None and at > requested_at:
            self.spans.append(("queue", requested_at, at))

    def _spend(self, kind: SegmentKind, start: float, end: float) -> None:
        end = max(start, end)
        if len(self.spans) < _MOST_PARTS:
            self.spans.append((kind, start, end))
        else:
            kind, start, _ = self.spans[-1]
            self.spans[-1] = (kind, start, end)

    def _count(self, sent: int, received: int) -> None:
        self.input_tokens = add_tokens((self.input_tokens, sent))
        self.output_tokens = add_tokens((self.output_tokens, received))

    def _add_answer(self, answer: ModelAnswered) -> None:
        self._begin(answer.started_at)
        self.model_calls += not answer.reused
        self._count(int(answer.input_tokens), int(answer.output_tokens))
        self.cached_tokens += max(0, int(answer.cached_tokens))
        asked_at = answer.started_at + min(answer.waited_s, max(0.0, answer.latency_s))
        if answer.waited_s:
            self._spend("rate_limit", answer.started_at, asked_at)
        self._spend("model", asked_at, answer.started_at + answer.latency_s)

    def _begin_call(self, fact: Fact) -> None:
        self._begin(fact.at)
        if self._begun_calls is None:
            self._begun_calls = set()
        if fact.name in self._begun_calls and self.effect != "unknown":
            self.effect = "repeated"
        self._begun_calls.add(fact.name)
        self.effect = self.effect or "recorded"

    def _add_call(self, change: history.CallEnded) -> None:
        result, name = change.fact.data, change.fact.name
        self._begin(result.started_at)
        ended = result.started_at + max(0.0, result.duration_s)
        if name.endswith("/handler"):
            self._spend("other", result.started_at, ended)
            return
        if result.is_unknown:
            self.effect = "unknown"
        if not name.endswith("/runner"):  # its answer is shown as an answer of a model
            self._spend("tool", result.started_at, ended)
            if len(self.tools) < _MOST_PARTS:
                outcome = "skipped" if result.outcome.startswith("skipped") else result.outcome
                tool = change.intent.tool_name if change.intent else change.requested.name if change.requested else ""
                if change.intent is None and not tool.startswith(_DELEGATING):
                    tool = _DELEGATING
                self.tools.append((str(one_line(tool, TITLE)), outcome, ended))

    def _end(self, change: history.ExecutionEnded) -> None:
        self.cost = cost_of(change.metrics) or self.cost
        self.unpriced_calls = as_count(change.metrics.get("unpriced_calls")) or self.unpriced_calls
        output, failure = change.output, change.fact.data
        text = "" if output is None else output.task_description
        if isinstance(failure, FailureRecorded):
            text = as_text(as_mapping(failure.trace).get("task_description"))
        if self.execution.node is None or not self.title or self.title == self.execution.node:
            self.title = title_of(text) or self.title
        if output is not None:
            self._begun_calls = None
            self.output_digest = sha256(output.raw.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def _make_row(self) -> StepSchema:
        step = self.execution
        spans: list[tuple[SegmentKind, int, int]] = [
            (kind, as_millis(start), as_millis(end)) for kind, start, end in self.spans
        ]
        for asked in step.gates.values() if step.gates and not step.is_ended else ():
            spans.append(("person", as_millis(asked.at), as_millis(asked.at)))  # noqa: PERF401  a list would lose the kind's type
        sent, received = (None if each < 0 else each for each in (self.input_tokens, self.output_tokens))
        return StepSchema(
            id=step.id,
            node=step.node,
            parent=None if step.parent is None else step.parent.id,
            kind=step.kind,
            title=(step.label if step.kind == "state" else "") or self.title,
            agent=step.agent,
            status=step.status,
            number=step.number,
            attempts=step.attempts,
            started_at=None if step.started_at is None else as_millis(step.started_at),
            ended_at=None if step.ended_at is None else as_millis(step.ended_at),
            segments=spans,
            tools=[(name, outcome, as_millis(at)) for name, outcome, at in self.tools],
            tokens=StepTokens(input=sent, output=received, cached=self.cached_tokens or None)
            if self.model_calls
            else None,
            cost=cost_schema(self.cost, self.unpriced_calls),
            level=step.level,
            error=step.error,
            effect="unknown" if step.is_ended and step.open_calls else self.effect,
            place=None,
            reviewed=self.is_reviewed,
        )


MOST_STEPS = 50_000  # the first steps of a run
_OF_RUN = (history.RunStarted, history.RunContinued, history.RunFinished, history.BatchChanged)
_NOT_SHOWN = (history.ExecutionStarted, *_OF_RUN)
_ROUNDS: Mapping[str, str] = {"iteration": "Iteration", "attempt": "Attempt", "state": "Step"}


class StepsView:
    """The steps of one run.

    Attributes:
        history: The run, with its executions and usage, without executions over the limit.
    """

    def __init__(self) -> None:
        self.history = history.RunHistory(limit=MOST_STEPS)
        self._shown: dict[str, ShownStep] = {}
        self._graph_steps: list[GraphTraceStep] = []

    def rows(self, *, after: int = 0) -> list[StepSchema]:
        """Return the rows of all steps that changed after a position."""
        return [self.show(state).row() for state in self.history.executions.values() if state.changed > after]

    def show(self, state: RecordedExecution) -> ShownStep:
        found = self._shown.get(state.id)
        if found is None:
            unit, node = self.history.units.get(state.node or ""), self.history.nodes.get(state.node or "")
            text = unit.name if unit is not None else node.description if node is not None else state.label
            title = title_of(text) or node_key(state.id) or state.id.rpartition("/")[2]
            if state.kind in _ROUNDS:
                title = f"{_ROUNDS[state.kind]} {state.number}"
            found = self._shown[state.id] = ShownStep(state, title)
        return found

    def counts(self) -> dict[str, int]:
        """Return the number of steps by status, without units and their executions."""
        return dict(Counter(state.status for state in self.history.executions.values() if not state.is_unit))

    def first_failed(self) -> RecordedExecution | None:
        """Return the step that failed first."""
        failed = (each for each in self.history.executions.values() if each.status == "failed" and not each.is_unit)
        return min(failed, key=lambda each: each.ended_at or 0.0, default=None)

    def apply(self, fact: Fact) -> RecordedOutput | None:
        """Apply the next fact, and return the output in it."""
        output = None
        for change in self.history.apply(fact):
            if isinstance(change, _NOT_SHOWN):
                continue
            if isinstance(change, history.ExecutionEnded):
                output = change.output or output
            elif isinstance(change, history.RoundEnded) and isinstance(ended := change.what, StepEnded):
                path, state = change.execution.id, ended.state
                step = GraphTraceStep(path=path, state_name=state, step_number=ended.step, next_state=ended.next_state)
                self._graph_steps.append(step)
            if not self.history.left_out or change.execution.id in self.history.executions:
                self.show(change.execution).apply(change)
        return output

    def graph_trace(self) -> GraphTrace | None:
        """Return the ended steps of the graph of the run."""
        states = self.history.executions.values()
        found = next((state for state in states if state.kind == "graph" and state.started_at), None)
        unit = None if found is None else self.history.units.get(found.node or "")
        if found is None or not isinstance(unit, GraphUnit):
            return None
        return GraphTrace(
            graph_name=unit.name,
            path=found.id,
            start_state=unit.start,
            termination_reason=None,
            steps_run=len(self._graph_steps),
            max_steps=unit.max_steps,
            steps=tuple(self._graph_steps),
        )


_EXITS: Mapping[ExitReason, str] = {
    ExitReason.COMPLETED: "All of it is done.",
    ExitReason.USER_EXIT_EARLY: "A user ended it early. Finished steps have their outputs.",
    ExitReason.TIMEOUT: "A review timed out, so it ended. Finished steps have their outputs.",
    ExitReason.ERROR: "It failed.",
    ExitReason.CANCELLED: "A user cancelled it.",
    ExitReason.BUDGET_EXHAUSTED: "Its budget is exhausted. Resume it with a larger budget.",
    ExitReason.WAITING: "It waits for a review decision.",
}
_INTERRUPTED = "Its process is gone, but it has not ended. It can be resumed."


def exit_text(reason: ExitReason | None, state: RunState) -> str | None:
    """Return why a run ended, in words."""
    if state.is_active:
        return None
    if state is RunState.INTERRUPTED:
        return _INTERRUPTED
    return None if reason is None else _EXITS[reason]


def wire_status(state: RunState) -> str:
    """Return the endpoint's word for the state of a run (S-SRV-3)."""
    return "accepted" if state is RunState.PENDING else state.value


_VIOLATION = "GuardrailViolationError"


def guardrail_checks(
    header: PlanRecorded,
    node: str | None,
    links: Sequence[Mapping[str, object]],
    *,
    has_answer: bool,
    has_output: bool,
) -> list[schemas.GuardrailCheck]:
    """Return the results of the guardrails of a step in call order. `links` are its error and the causes."""
    task = as_mapping(as_mapping((header.definition or {}).get("tasks")).get(node or ""))
    refused = [
        schemas.GuardrailCheck(
            kind=as_text(as_mapping(link.get("fields")).get("guardrail_type"), "guardrail"),
            accepted=False,
            message=as_text(link.get("text")),
        )
        for link in links
        if as_text(link.get("type")).endswith(_VIOLATION)
    ][:1]
    before, after = (
        [
            schemas.GuardrailCheck(kind=stage, name=as_text(as_mapping(each).get("callable")), accepted=True)
            for each in as_sequence(task.get(f"{stage}_guardrails"))
        ]
        for stage in ("input", "output")
    )
    is_past_input = has_output or has_answer or GuardrailType.OUTPUT in [each.kind for each in refused]
    return [*(before if is_past_input else []), *(after if has_output else refused)]


Model = TypeVar("Model", bound=schemas.StudioSchema)
CUT = 64 * 1024


def detail_of(
    row: schemas.StepSchema,
    facts: Sequence[Fact],
    header: PlanRecorded,
    *,
    reviews: Sequence[schemas.ReviewSchema],
    question: str = "",
) -> schemas.StepDetail:
    """Return a step with full texts. `question` is the request of delegated work."""
    trace: TaskTrace | None = None
    with suppress(RecordError):  # a trace of another version: the effects contain the rest
        trace = RecordedWork(RunHistory(facts, has_details=True), row.id).trace("")
    recorded = next((fact.data for fact in reversed(facts) if isinstance(fact.data, OutputRecorded)), None)
    output = None if recorded is None else recorded.read()
    answers = [(fact, fact.data) for fact in facts if isinstance(fact.data, ModelAnswered)]
    failure = next((fact.data for fact in reversed(facts) if isinstance(fact.data, FailureRecorded)), None)
    links: list[Mapping[str, object]] = []
    link: Mapping[str, object] = {} if failure is None else failure.error_data
    while link:
        links.append(link)
        link = as_mapping(link.get("cause"))
    causes = [f"{as_text(each.get('type')).rpartition('.')[2]}: {as_text(each.get('text'))}" for each in links[1:]]
    failed = None
    if failure is not None and output is None:
        failed = schemas.StepError(class_=failure.error_type, message=failure.message, causes=causes)
    task = task_instance(row.id)  # of delegated work the delegating task
    is_whole = "/" in task or row.kind in {"iteration", "attempt", "state"}
    is_fixed = header.is_dynamic or header.is_empty or row.kind in {"loop", "phase", "graph"}
    said = [("user", question)] if question else []
    attached: Sequence[Mapping[str, object]] = ()
    if trace is not None and (prompts := trace.prompts) is not None:
        said = [(each.role, each.content or "") for each in prompts.history]
        said = [("system", prompts.system_prompt), *said, ("user", prompts.user_prompt)]
        attached = prompts.attachments
    agent, model = _planned_agent(row, header)
    created = map(as_mapping, header.agents or ())  # during the run
    agent = agent or next((each for each in created if each.get("role") == row.agent), {})
    return schemas.StepDetail(
        **dict(row),
        prompt=[
            schemas.MessageSchema(role=role, content=content, attachments=_attachments(attached) if is_last else [])
            for is_last, (role, content) in ((at == len(said), each) for at, each in enumerate(said, start=1))
        ],
        answers=[_answer(fact, answer, model) for fact, answer in answers],
        tools_offered=[str(name) for name in as_sequence(agent.get("tool_names"))],
        tool_calls=_calls(facts),
        output=None if output is None else output.raw,
        structured_output=None if output is None else cast("JsonValue", output.parsed_output),
        guardrails=guardrail_checks(header, row.node, links, has_answer=bool(answers), has_output=output is not None),
        constraints=_constraints(facts),
        context_cuts=[] if trace is None else _cuts(trace.metadata),
        directives=[text for fact in facts if isinstance(fact.data, DirectivesShown) for text in fact.data.texts],
        reviews=[each for each in reviews if each.step == row.id],
        failure=failed,
        failed_attempts=None if failure is None else _attempts(failure, failure.attempts),
        fork_spec=None if is_fixed else task if is_whole else task.rpartition("#")[0],
    )


def cut_detail(detail: schemas.StepDetail) -> schemas.StepDetail:
    """Return a detail with short texts. `cut` has the full lengths, by the names of `text_of`."""
    cut = {name: len(text) for name, text in _texts(detail).items() if text is not None and len(text) > CUT}

    def shorten(part: Model, *fields: str) -> Model:
        texts = ((name, getattr(part, name)) for name in fields)
        return part.model_copy(update={name: text and text[:CUT] for name, text in texts})

    return shorten(detail, "output").model_copy(
        update={
            "prompt": [shorten(each, "content") for each in detail.prompt],
            "answers": [shorten(each, "text", "reasoning") for each in detail.answers],
            "tool_calls": [shorten(each, "arguments", "result") for each in detail.tool_calls],
            "structured_output": None if "structured_output" in cut else detail.structured_output,
            "cut": cut,
        }
    )


def text_of(detail: schemas.StepDetail, name: str) -> str | None:
    """Return a full text by its name."""
    return _texts(detail).get(name)


def _texts(detail: schemas.StepDetail) -> Mapping[str, str | None]:
    found: dict[str, str | None] = {f"prompt.{place}": each.content for place, each in enumerate(detail.prompt)}
    for place, answer in enumerate(detail.answers):
        found |= {f"answers.{place}": answer.text, f"answers.{place}.reasoning": answer.reasoning}
    for place, call in enumerate(detail.tool_calls):
        found |= {f"tool_calls.{place}.arguments": call.arguments, f"tool_calls.{place}.result": call.result}
    data = detail.structured_output
    text = None if data is None else json.dumps(jsonable(data), indent=2, ensure_ascii=False)
    return {**found, "structured_output": text, "output": detail.output}


def _attachments(references: Sequence[Mapping[str, object]]) -> list[schemas.AttachmentSchema]:
    return [
        schemas.AttachmentSchema(
            kind=as_text(each.get("kind")),
            name=as_text(each.get("name")),
            media_type=as_text(each.get("media_type")),
            size_bytes=as_count(each.get("size_bytes")),
            sha256=as_text(each.get("sha256")),
        )
        for each in references
    ]


def _answer(fact: Fact, answer: ModelAnswered, model: str | None) -> schemas.AnswerSchema:
    turn = fact.name.rsplit("/", 2)[1]
    return schemas.AnswerSchema(
        iteration=int(turn) if turn.isdecimal() else 0,
        text=answer.text,
        reasoning=answer.reasoning,
        tool_calls=[schemas.RequestedCall(id=c.id, name=c.name, arguments=c.arguments) for c in answer.tool_calls],
        input_tokens=None if answer.input_tokens < 0 else int(answer.input_tokens),
        output_tokens=None if answer.output_tokens < 0 else int(answer.output_tokens),
        reasoning_tokens=None if answer.reasoning_tokens < 0 else int(answer.reasoning_tokens),
        cached_tokens=None if answer.cached_tokens < 0 else int(answer.cached_tokens),
        latency_ms=max(0, round(answer.latency_s * 1000)),
        model=answer.model or model,
        started_at=as_millis(answer.started_at),
        attempts=_attempts(answer, answer.retries + 1),
        reused=answer.reused or None,
        reused_tokens=None if (tokens := add_tokens(answer.reused_tokens)) < 0 else tokens,
    )


def _attempts(call: ModelAnswered | FailureRecorded, number: int) -> schemas.ModelAttempts | None:
    """Return the attempts and waits of a model call; None: one attempt, without a wait."""
    waits = [
        schemas.ModelWaitSchema(
            cause=each.cause, reason=each.reason, at=as_millis(each.at), wait_ms=round(each.wait_s * 1000)
        )
        for each in call.waits
    ]
    if isinstance(call, ModelAnswered):
        if not waits:  # recorded by an earlier version
            waits = [schemas.ModelWaitSchema(cause="retry", reason=reason) for reason in call.attempts_failed]
        if call.waited_s:
            at, wait_ms = as_millis(call.started_at), round(call.waited_s * 1000)
            waits.append(schemas.ModelWaitSchema(cause="permit", at=at, wait_ms=wait_ms))
    if not waits:
        return None
    # Each repeat, and each model of a chain, has attempts of its own.
    is_repeated = any(each.cause in {"repeat", "fallback", "skipped"} for each in waits)
    return schemas.ModelAttempts(waits=waits, number=number, most=None if is_repeated else call.max_attempts or None)


def _calls(facts: Sequence[Fact]) -> list[schemas.ToolCallDetail]:
    """Return calls with their results, in the order in which they began."""
    asked = {
        f"{fact.instance}/{fact.name.rsplit('/', 2)[1]}/call-{number}": call
        for fact in facts
        if isinstance(fact.data, ModelAnswered)
        for number, call in enumerate(fact.data.tool_calls)
    }
    begun: dict[str, tuple[ToolIntended | None, float, int]] = {}
    results: dict[str, ToolReturned] = {}
    decisions: dict[str, str] = {}
    for fact in facts:
        match fact.data:
            case ToolIntended() as intent:
                begun[fact.name] = (intent, fact.at, begun[fact.name][2] + 1 if fact.name in begun else 0)
            case DelegationDecided(started_at=at):
                begun.setdefault(fact.name, (None, at, 0))
            case ToolReturned() as result:
                results[fact.name] = result
                begun.setdefault(fact.name, (None, result.started_at, 0))
            case OutcomeDecided(answer=answer):
                decisions[fact.name] = answer
            case _:
                pass
    found: list[schemas.ToolCallDetail] = []
    for name, (begun_as, at, again) in begun.items():
        call, given = asked.get(name), results.get(name)
        if name.endswith("/runner") and given is not None and given.is_success:
            continue  # its answer is listed as an answer of a model
        turn = name.rsplit("/", 2)[1]
        effect = "unknown" if given is None or given.is_unknown else "repeated" if again else "recorded"
        decided = f"decided: {decisions[name]}" if name in decisions else None
        found.append(
            schemas.ToolCallDetail(
                name=begun_as.tool_name if begun_as else call.name if call else "delegate_task",
                arguments=begun_as.arguments if begun_as else call.arguments if call else "",
                result=decided if given is None else given.text,
                outcome="unknown" if given is None else given.outcome,
                duration_ms=None if given is None else max(0, round(given.duration_s * 1000)),
                started_at=as_millis(at if given is None else given.started_at),
                effect=effect,
                iteration=int(turn) if turn.isdecimal() else None,
                repairs=[] if given is None else list(given.repairs),
                log=[] if given is None else list(given.log),
                attachments=_attachments([each.to_json() for each in given.attachments] if given else []),
            )
        )
    return found


def _planned_agent(row: schemas.StepSchema, header: PlanRecorded) -> tuple[Mapping[str, object], str | None]:
    """Return the agent of a step in the plan, by the task or else by the role, and its model or runner."""
    nodes = map(as_mapping, as_sequence((header.plan or {}).get("nodes")))
    key = next((as_text(node.get("agent_key")) for node in nodes if node.get("key") == row.node), "")
    agents = [*map(as_mapping, as_sequence((header.plan or {}).get("agents")))]
    found = next((each for each in agents if key and each.get("key") == key), None)
    found = found or next((each for each in agents if each.get("role") == row.agent), {})
    declared = as_mapping(as_mapping((header.definition or {}).get("agents")).get(as_text(found.get("key"))))
    model = as_mapping(declared.get("llm") or declared.get("runner"))
    named = (as_text(model.get(name)) for name in ("model", "name", "spec", "class"))
    if "models" in model:  # a chain: answers of other models than the first one name theirs (S-FBK-41)
        return found, recorded_names(model).model
    return found, next((each for each in named if each), None)


def _constraints(facts: Sequence[Fact]) -> list[schemas.ConstraintCheck]:
    found: list[schemas.ConstraintCheck] = []
    for fact in facts:
        if isinstance(fact.data, DelegationDecided):
            rule, refusal = f"delegation to {as_text(fact.data.request.get('agent_role'))}", fact.data.refusal
            message = "" if refusal is None else f"{refusal.reason} {refusal.hint}".strip()
            is_allowed = fact.data.worker is not None
            found.append(schemas.ConstraintCheck(rule=rule, allowed=is_allowed, message=message))
    return found


def _cuts(metadata: Mapping[str, object]) -> list[schemas.ContextCut]:
    return [
        schemas.ContextCut(
            section=as_text(cut.get("name")),
            kept_tokens=as_count(cut.get("tokens")) - as_count(cut.get("cut_tokens")),
            cut_tokens=as_count(cut.get("cut_tokens")),
            how=f"model call {as_count(entry.get('turn')) + 1}, budget {as_count(entry.get('budget_tokens'))} tokens",
        )
        for entry in map(as_mapping, as_sequence(metadata.get("context")))
        for cut in map(as_mapping, as_sequence(entry.get("cut")))
    ]


def compare_steps(
    first: tuple[schemas.RunRow, StepsView], second: tuple[schemas.RunRow, StepsView]
) -> schemas.ComparedRuns:
    """Return the steps of two runs by name, without units. Steps of the first run come first."""
    sides = (_sides(first[1]), _sides(second[1]))
    titles = {
        state.id: view.show(state).title for view in (second[1], first[1]) for state in view.history.executions.values()
    }
    steps = [
        schemas.ComparedStep(
            id=name,
            title=titles[name],
            a=a,
            b=b,
            same=a is not None and b is not None and (a.status, a.output_digest) == (b.status, b.output_digest),
        )
        for name in dict.fromkeys((*sides[0], *sides[1]))
        for a, b in ((sides[0].get(name), sides[1].get(name)),)
    ]
    return schemas.ComparedRuns(a=first[0], b=second[0], steps=steps)


def _sides(view: StepsView) -> Mapping[str, schemas.ComparedSide]:
    return {
        state.id: schemas.ComparedSide(
            status=state.status,
            tokens=shown.total_tokens if shown.model_calls else None,
            duration_ms=None
            if state.started_at is None or state.ended_at is None
            else max(0, round((state.ended_at - state.started_at) * 1000)),
            output_digest=shown.output_digest,
        )
        for state in view.history.executions.values()
        if not state.is_unit
        for shown in (view.show(state),)
    }
