"""One step in all detail: prompt, answers, calls, output. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeVar, cast

from pydantic import JsonValue

from ensemble_ray.errors import RecordError
from ensemble_ray.execute.guardrails import GuardrailType
from ensemble_ray.facts.effects import DelegationDecided, ModelAnswered, OutcomeDecided, ToolIntended, ToolReturned
from ensemble_ray.facts.fact import Fact, as_count, as_mapping, as_sequence, as_text
from ensemble_ray.facts.runs import DirectivesShown, FailureRecorded, OutputRecorded, PlanRecorded
from ensemble_ray.record.history import RunHistory
from ensemble_ray.record.work import RecordedWork
from ensemble_ray.studio import schemas
from ensemble_ray.studio.views.steps import StepsView, as_millis
from ensemble_ray.values.ids import task_instance
from ensemble_ray.values.trace import TaskTrace, jsonable

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
    if trace is not None and (prompts := trace.prompts) is not None:
        said = [(each.role, each.content or "") for each in prompts.history]
        said = [("system", prompts.system_prompt), *said, ("user", prompts.user_prompt)]
    agent, model = _planned_agent(row, header)
    created = map(as_mapping, header.agents or ())  # during the run
    agent = agent or next((each for each in created if each.get("role") == row.agent), {})
    return schemas.StepDetail(
        **dict(row),
        prompt=[schemas.MessageSchema(role=role, content=content) for role, content in said],
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
        latency_ms=max(0, round(answer.latency_s * 1000)),
        model=model,
        started_at=as_millis(answer.started_at),
    )


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
