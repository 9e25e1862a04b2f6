"""One step in all detail: prompt, answers, calls, output. Pure. `cut_detail` shortens long texts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal, cast

from ensemble_ray.errors import RecordError
from ensemble_ray.execute.guardrails import GuardrailType
from ensemble_ray.facts.effects import DelegationDecided, ModelAnswered, OutcomeDecided, ToolIntended, ToolReturned
from ensemble_ray.facts.fact import as_count, as_mapping, as_sequence, as_text
from ensemble_ray.facts.runs import DirectivesShown, FailureRecorded, OutputRecorded, RecordedOutput
from ensemble_ray.record.history import RunHistory
from ensemble_ray.record.work import RecordedWork
from ensemble_ray.studio.schemas import (
    AnswerSchema,
    ComparedRuns,
    ComparedSide,
    ComparedStep,
    ConstraintCheck,
    ContextCut,
    GuardrailCheck,
    MessageSchema,
    RequestedCall,
    StepDetail,
    StepError,
    ToolCallDetail,
)
from ensemble_ray.studio.views.steps import as_millis
from ensemble_ray.values.ids import task_instance
from ensemble_ray.values.trace import TaskTrace, jsonable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic import JsonValue

    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.facts.runs import PlanRecorded
    from ensemble_ray.studio.schemas import ReviewSchema, RunRow, StepSchema
    from ensemble_ray.studio.views.steps import StepsView


_VIOLATION = "GuardrailViolationError"


def guardrail_checks(
    header: PlanRecorded,
    node: str | None,
    links: Sequence[Mapping[str, object]],
    *,
    has_answer: bool,
    has_output: bool,
) -> list[GuardrailCheck]:
    """Return the results of the guardrails of a step, in the order of their calls.

    Args:
        header: The run's first fact.
        node: The task's name in the plan; None: it has none.
        links: The error of the step and its causes; empty: the step did not fail.
        has_answer: Whether the record has an answer of its model.
        has_output: Whether the record has its output.
    """
    task = as_mapping(as_mapping((header.definition or {}).get("tasks")).get(node or ""))
    refusal = next((each for each in links if as_text(each.get("type")).endswith(_VIOLATION)), None)
    refused = [] if refusal is None else [_refusal(refusal)]
    is_past_input = has_output or has_answer or GuardrailType.OUTPUT in [each.kind for each in refused]
    found = _list_accepted(task, "input") if is_past_input else []
    return [*found, *(_list_accepted(task, "output") if has_output else []), *([] if has_output else refused)]


def _list_accepted(task: Mapping[str, object], stage: Literal["input", "output"]) -> list[GuardrailCheck]:
    names = (as_text(as_mapping(each).get("callable")) for each in as_sequence(task.get(f"{stage}_guardrails")))
    return [GuardrailCheck(kind=stage, name=name, accepted=True) for name in names]


def _refusal(link: Mapping[str, object]) -> GuardrailCheck:
    kind = as_text(as_mapping(link.get("fields")).get("guardrail_type"), "guardrail")
    return GuardrailCheck(kind=kind, accepted=False, message=as_text(link.get("text")))


#: Longest text in a step, characters.
CUT = 64 * 1024


def detail_of(
    row: StepSchema, facts: Sequence[Fact], header: PlanRecorded, *, reviews: Sequence[ReviewSchema], question: str = ""
) -> StepDetail:
    """Return a step in all detail, with full texts.

    Args:
        row: Its row.
        facts: Its recorded facts, in order.
        header: The run's first fact.
        reviews: Its gates.
        question: The request, if the step is delegated work.
    """
    trace, output = _trace_of(row.id, facts), _output_of(facts)
    answers = [(fact, fact.data) for fact in facts if isinstance(fact.data, ModelAnswered)]
    failure = next((fact.data for fact in reversed(facts) if isinstance(fact.data, FailureRecorded)), None)
    model = _model_of(row, header)
    return StepDetail(
        **dict(row),
        prompt=_prompt(trace, question),
        answers=[_answer(fact, answer, model) for fact, answer in answers],
        tools_offered=_tools_of(row, header),
        tool_calls=_calls(facts),
        output=None if output is None else output.raw,
        structured_output=None if output is None else cast("JsonValue", output.parsed_output),
        guardrails=guardrail_checks(
            header, row.node, _links(failure), has_answer=bool(answers), has_output=output is not None
        ),
        constraints=_constraints(facts),
        context_cuts=[] if trace is None else _cuts(trace.metadata),
        directives=[text for fact in facts if isinstance(fact.data, DirectivesShown) for text in fact.data.texts],
        reviews=[each for each in reviews if each.step == row.id],
        failure=None if failure is None or output is not None else _failure(failure),
        fork_spec=_fork_spec(row, header),
    )


def cut_detail(detail: StepDetail) -> StepDetail:
    """Return a detail with short texts. `cut` has the full lengths, under the names that `text_of` accepts."""
    cut: dict[str, int] = {}

    def short(name: str, text: str | None) -> str | None:
        if text is None or len(text) <= CUT:
            return text
        cut[name] = len(text)
        return text[:CUT]

    prompt = [
        each.model_copy(update={"content": short(f"prompt.{place}", each.content)})
        for place, each in enumerate(detail.prompt)
    ]
    answers = [
        each.model_copy(
            update={
                "text": short(f"answers.{place}", each.text),
                "reasoning": short(f"answers.{place}.reasoning", each.reasoning),
            }
        )
        for place, each in enumerate(detail.answers)
    ]
    calls = [
        each.model_copy(
            update={
                "arguments": short(f"tool_calls.{place}.arguments", each.arguments),
                "result": short(f"tool_calls.{place}.result", each.result),
            }
        )
        for place, each in enumerate(detail.tool_calls)
    ]
    structured = detail.structured_output
    if structured is not None and len(text := _json(structured)) > CUT:
        cut["structured_output"], structured = len(text), None
    return detail.model_copy(
        update={
            "prompt": prompt,
            "answers": answers,
            "tool_calls": calls,
            "output": short("output", detail.output),
            "structured_output": structured,
            "cut": cut,
        }
    )


def text_of(detail: StepDetail, name: str) -> str | None:
    """Return the full text of a detail with this name; None: there is no such text."""
    match name.split("."):
        case ["output"]:
            return detail.output
        case ["structured_output"]:
            return None if detail.structured_output is None else _json(detail.structured_output)
        case ["prompt", place] if place.isdecimal() and int(place) < len(detail.prompt):
            return detail.prompt[int(place)].content
        case ["answers", place] if place.isdecimal() and int(place) < len(detail.answers):
            return detail.answers[int(place)].text
        case ["answers", place, "reasoning"] if place.isdecimal() and int(place) < len(detail.answers):
            return detail.answers[int(place)].reasoning
        case ["tool_calls", place, "arguments"] if place.isdecimal() and int(place) < len(detail.tool_calls):
            return detail.tool_calls[int(place)].arguments
        case ["tool_calls", place, "result"] if place.isdecimal() and int(place) < len(detail.tool_calls):
            return detail.tool_calls[int(place)].result
        case _:
            return None


def _json(value: object) -> str:
    return json.dumps(jsonable(value), indent=2, ensure_ascii=False)


def _trace_of(instance: str, facts: Sequence[Fact]) -> TaskTrace | None:
    try:
        return RecordedWork(RunHistory(facts, has_details=True), instance).trace("")
    except RecordError:  # a trace of another version: the effects contain the rest
        return None


def _output_of(facts: Sequence[Fact]) -> RecordedOutput | None:
    found = (fact.data for fact in reversed(facts) if isinstance(fact.data, OutputRecorded))
    given = next(found, None)
    return None if given is None else given.read()


def _prompt(trace: TaskTrace | None, question: str) -> list[MessageSchema]:
    if trace is None or trace.prompts is None:
        return [MessageSchema(role="user", content=question)] if question else []
    prompts = trace.prompts
    said = [MessageSchema(role=each.role, content=each.content or "") for each in prompts.history]
    return [
        MessageSchema(role="system", content=prompts.system_prompt),
        *said,
        MessageSchema(role="user", content=prompts.user_prompt),
    ]


def _answer(fact: Fact, answer: ModelAnswered, model: str | None) -> AnswerSchema:
    turn = fact.name.rsplit("/", 2)[1]
    return AnswerSchema(
        iteration=int(turn) if turn.isdecimal() else 0,
        text=answer.text,
        reasoning=answer.reasoning,
        tool_calls=[RequestedCall(id=c.id, name=c.name, arguments=c.arguments) for c in answer.tool_calls],
        input_tokens=None if answer.input_tokens < 0 else int(answer.input_tokens),
        output_tokens=None if answer.output_tokens < 0 else int(answer.output_tokens),
        reasoning_tokens=None if answer.reasoning_tokens < 0 else int(answer.reasoning_tokens),
        latency_ms=max(0, round(answer.latency_s * 1000)),
        model=model,
        started_at=as_millis(answer.started_at),
    )


def _calls(facts: Sequence[Fact]) -> list[ToolCallDetail]:
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
    found: list[ToolCallDetail] = []
    for name, (begun_as, at, again) in begun.items():
        call, given = asked.get(name), results.get(name)
        if name.endswith("/runner") and given is not None and given.is_success:
            continue  # its answer is listed as an answer of a model
        turn = name.rsplit("/", 2)[1]
        effect = "unknown" if given is None or given.is_unknown else "repeated" if again else "recorded"
        decided = f"decided: {decisions[name]}" if name in decisions else None
        found.append(
            ToolCallDetail(
                name=begun_as.tool_name if begun_as else call.name if call else "delegate_task",
                arguments=begun_as.arguments if begun_as else call.arguments if call else "",
                result=decided if given is None else given.text,
                outcome="unknown" if given is None else given.outcome,
                duration_ms=None if given is None else max(0, round(given.duration_s * 1000)),
                started_at=as_millis(at if given is None else given.started_at),
                effect=effect,
                iteration=int(turn) if turn.isdecimal() else None,
            )
        )
    return found


def _agent_of(row: StepSchema, header: PlanRecorded) -> Mapping[str, object]:
    """Return the agent of a step in the plan, by the key of the task or else by the role; empty: not found."""
    nodes = map(as_mapping, as_sequence((header.plan or {}).get("nodes")))
    key = next((as_text(node.get("agent_key")) for node in nodes if node.get("key") == row.node), "")
    agents = [*map(as_mapping, as_sequence((header.plan or {}).get("agents")))]
    found = next((each for each in agents if key and each.get("key") == key), None)
    return found or next((each for each in agents if each.get("role") == row.agent), {})


def _tools_of(row: StepSchema, header: PlanRecorded) -> list[str]:
    found = _agent_of(row, header)
    if not found:  # created during the run
        agents = map(as_mapping, header.agents or ())
        found = next((each for each in agents if each.get("role") == row.agent), {})
    return [str(name) for name in as_sequence(found.get("tool_names"))]


def _model_of(row: StepSchema, header: PlanRecorded) -> str | None:
    """Return the model or the runner of the agent of a step; None: the definition names none."""
    key = as_text(_agent_of(row, header).get("key"))
    agent = as_mapping(as_mapping((header.definition or {}).get("agents")).get(key))
    model = as_mapping(agent.get("llm") or agent.get("runner"))
    named = (as_text(model.get(name)) for name in ("model", "name", "spec", "class"))
    return next((each for each in named if each), None)


def _constraints(facts: Sequence[Fact]) -> list[ConstraintCheck]:
    found: list[ConstraintCheck] = []
    for fact in facts:
        if isinstance(fact.data, DelegationDecided):
            role = as_text(fact.data.request.get("agent_role"))
            refusal = fact.data.refusal
            message = "" if refusal is None else f"{refusal.reason} {refusal.hint}".strip()
            found.append(
                ConstraintCheck(rule=f"delegation to {role}", allowed=fact.data.worker is not None, message=message)
            )
    return found


def _cuts(metadata: Mapping[str, object]) -> list[ContextCut]:
    return [
        ContextCut(
            section=as_text(cut.get("name")),
            kept_tokens=as_count(cut.get("tokens")) - as_count(cut.get("cut_tokens")),
            cut_tokens=as_count(cut.get("cut_tokens")),
            how=f"model call {as_count(entry.get('turn')) + 1}, budget {as_count(entry.get('budget_tokens'))} tokens",
        )
        for entry in map(as_mapping, as_sequence(metadata.get("context")))
        for cut in map(as_mapping, as_sequence(entry.get("cut")))
    ]


def _links(failure: FailureRecorded | None) -> list[Mapping[str, object]]:
    found: list[Mapping[str, object]] = []
    at: Mapping[str, object] = {} if failure is None else failure.error_data
    while at:
        found.append(at)
        at = as_mapping(at.get("cause"))
    return found


def _failure(failure: FailureRecorded) -> StepError:
    links = _links(failure)[1:]
    causes = [f"{as_text(each.get('type')).rpartition('.')[2]}: {as_text(each.get('text'))}" for each in links]
    return StepError(class_=failure.error_type, message=failure.message, causes=causes)


def _fork_spec(row: StepSchema, header: PlanRecorded) -> str | None:
    """Return the argument of `fork --from` that repeats the step. For delegated work it is the delegating task."""
    if header.is_dynamic or header.is_empty or row.kind in {"loop", "phase", "graph"}:
        return None
    task = task_instance(row.id)
    return task if "/" in task or row.kind in {"iteration", "attempt", "state"} else task.rpartition("#")[0]


def compare_steps(a: tuple[RunRow, StepsView], b: tuple[RunRow, StepsView]) -> ComparedRuns:
    """Return the steps of two runs by name, without units. Steps of the first run come first."""
    sides = (_sides(a[1]), _sides(b[1]))
    titles = {state.id: view.show(state).title for view in (b[1], a[1]) for state in view.states.values()}
    steps = [
        ComparedStep(
            id=name,
            title=titles[name],
            a=sides[0].get(name),
            b=sides[1].get(name),
            same=_is_same(sides[0].get(name), sides[1].get(name)),
        )
        for name in dict.fromkeys((*sides[0], *sides[1]))
    ]
    return ComparedRuns(a=a[0], b=b[0], steps=steps)


def _sides(view: StepsView) -> Mapping[str, ComparedSide]:
    return {
        state.id: ComparedSide(
            status=state.status,
            tokens=shown.total_tokens if shown.model_calls else None,
            duration_ms=None
            if state.started_at is None or state.ended_at is None
            else max(0, round((state.ended_at - state.started_at) * 1000)),
            output_digest=shown.output_digest,
        )
        for state in view.states.values()
        if not state.is_unit
        for shown in (view.show(state),)
    }


def _is_same(a: ComparedSide | None, b: ComparedSide | None) -> bool:
    return a is not None and b is not None and a.status == b.status and a.output_digest == b.output_digest
