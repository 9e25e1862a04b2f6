"""Why a run failed and what to do next, read from its record: one text for the exception, `trace` and Studio."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from msgspec import Struct

from ensemble_ray.facts.effects import ModelAnswered, began_at
from ensemble_ray.facts.fact import Fact, as_mapping, as_sequence, as_text, kinds_of
from ensemble_ray.facts.runs import NO_REASON, FailureRecorded, OutputRecorded, RecordedError
from ensemble_ray.plan.plan import MANAGER_KEY, Plan
from ensemble_ray.record.head import RunHead, read_head
from ensemble_ray.record.identity.definition import position_of
from ensemble_ray.record.map_reduce_fold import refusal_of
from ensemble_ray.record.result import task_label
from ensemble_ray.record.source import readable_plan
from ensemble_ray.record.stores import RecordedRun, RunReader, fork_advice, fork_point, resume_advice
from ensemble_ray.record.view.tree import TreeRow, format_count, format_seconds, row_text
from ensemble_ray.values.ids import instance_of, node_key
from ensemble_ray.values.outputs import RunState
from ensemble_ray.values.trace import TaskTrace

_ENDPOINT = "Look at the endpoint alone: ensemble-ray doctor --no-ray --llm openai:MODEL"
_PATIENCE = "Try again when the endpoint is well, or be more patient: Ensemble(retry=RetryPolicy(max_wait=...))."
#: Remedies by the class of an error.
REMEDIES: Mapping[str, str] = {
    "AuthenticationError": _ENDPOINT,
    "PermissionDeniedError": _ENDPOINT,
    "NotFoundError": _ENDPOINT,
    "APIConnectionError": _ENDPOINT,
    "InternalServerError": _PATIENCE,
    "CircuitOpenError": _PATIENCE,
    "AllModelsFailedError": "Look at each endpoint alone: ensemble-ray doctor --no-ray --llm openai:MODEL,openai:MODEL",
    "MaxIterationsExceededError": "Raise max_iterations of the agent (manager_max_iterations for a manager), or make the task smaller.",
    "MaxLoopIterationsExceededError": "Raise max_iterations of the loop, or continue with its last output: on_max_iterations='return_last'.",
    "MaxGraphStepsExceededError": "Raise max_steps of the graph, or continue with its last output: on_max_steps='return_last'.",
    "GraphNoEdgeMatchedError": "Add an edge without a condition from this state, as the last one.",
    "ConstraintViolationError": "Say in the tasks what these workers are for, or use a stronger model for the manager: manager_llm.",
    "RecordError": "Choose another directory for records: export ENSEMBLE_RAY_HOME=DIRECTORY",
    "OutputParsingError": "Raise max_output_retries, simplify output_type, or use a stronger model.",
}  # fmt: skip
#: Runs in other states left failed work out.
WITH_REASON = frozenset({RunState.FAILED, RunState.BUDGET_EXHAUSTED, RunState.INTERRUPTED})
_ENDS = kinds_of(OutputRecorded, FailureRecorded)
_SHOWN = 72  # characters of a name or a description
_LONGEST = 400  # of another line
_INPUTS = 300  # of recorded inputs in a command


class NextStep(NamedTuple):
    text: str
    command: str = ""  # at the command line, or in the program that began the run

    def __str__(self) -> str:
        return f"{self.text}: {self.command}" if self.command else self.text


class FailedAttempt(NamedTuple):
    """One start of the failed execution. Times are Unix times, s."""

    started_at: float
    ended_at: float
    waited_s: float = 0.0  # for rate limits


class RunFailure(Struct, frozen=True, kw_only=True):
    """A failed or interrupted run.

    Attributes:
        what: What failed, such as `Task 'draft' (agent 'Writer'), iteration 2 of loop 'refine', failed`.
        error: The recorded error, with causes and the line of user code; `NO_REASON` if the process died.
        step: The failed execution or unit; empty if the run itself failed.
        others: Number of further errors of the run.
        answer: The last answer, if it did not have the declared type.
        refusal: Why that answer was refused.
        attempts: Starts of the failed execution, the earliest first.
        requests: Requests of its last model call; 0 if it did not end with one.
        remedy: What helps against errors of that class.
        next: What to do with the run.
        fork_from: Where a fork can begin; empty: nothing can be reused.
    """

    what: str
    error: RecordedError
    step: str
    others: int
    answer: str | None
    refusal: str
    attempts: Sequence[FailedAttempt]
    requests: int
    remedy: str
    next: NextStep | None
    fork_from: str

    def lines(self) -> tuple[str, ...]:
        """Return the text for people, without control characters; the first line says what failed."""
        error = self.error
        told = [f"{error.error_type}: {error.message}", *error.lines()] if error.error_type else []
        return tuple(row_text(line, _LONGEST) for line in (self.what, *told, *self._rest()))

    def note(self) -> str:
        """Return the lines that Python's traceback of the error does not have."""
        return "\n".join(row_text(line, _LONGEST) for line in (self.what, *self._rest()))

    def _rest(self) -> list[str]:
        lines: list[str] = []
        if self.answer is not None:
            lines += [f"Last answer: {self.answer}", f"Refused: {self.refusal}"]
        remedy = f"What to do: {self.remedy}" if self.remedy else ""
        lines += [text for text in (self._attempts(), self._others(), remedy) if text]
        return [*lines, str(self.next)] if self.next else lines

    def rows(self) -> tuple[TreeRow, ...]:
        first, *rest = self.lines()
        return (
            TreeRow(depth=0, kind="error", title=first, is_bad=True),
            *(TreeRow(depth=1, kind="answer", title=each) for each in rest),
        )

    def _attempts(self) -> str:
        if not self.attempts:
            return ""
        spent = []
        for each in self.attempts:
            waited = f", {_seconds(each.waited_s)} of it for a rate limit" if each.waited_s else ""
            spent.append(f"{_seconds(each.ended_at - each.started_at)}{waited}")
        requests = f"; its last model call: {format_count(self.requests, 'request')}" if self.requests > 1 else ""
        beginning = f"{len(spent)} attempts: " if len(spent) > 1 else "Ran for "
        return f"{beginning}{', '.join(spent)}{requests}"

    def _others(self) -> str:
        return f"and {format_count(self.others, 'more error')}" if self.others else ""


async def read_failure(
    store: RunReader, run: RecordedRun, *, command: str = "ensemble-ray", is_partial: bool = False
) -> RunFailure | None:
    """Return why a run failed or was interrupted; None for runs in other states. `command`: the command line here."""
    head = await read_head(store, run.run_id, is_partial=is_partial)
    state = run.state if head.end is None else head.state
    if state not in WITH_REASON:
        return None
    error = head.errors[0] if head.errors else NO_REASON
    ends = [] if head.is_dynamic else await _read_ends(store, run.run_id, is_partial=is_partial)
    step = _find_step(error, ends)
    facts = [each for each in await store.facts_of(run.run_id, step) if each.instance == step] if step else []
    failure = next((fact.data for fact in reversed(facts) if isinstance(fact.data, FailureRecorded)), None)
    answer, refusal = _refused_answer(failure)
    return RunFailure(
        what=_describe(head, state, error, step),
        error=error,
        step=step or error.instance,
        others=max(0, len(head.errors) - 1),
        answer=answer,
        refusal=refusal,
        attempts=_attempts_in(facts, failure),
        requests=0 if failure is None else failure.attempts,
        remedy=remedy_for([error.error_type, *(each.error_type for each in error.causes)]),
        next=_next_of(run, head, state, ends, command),
        fork_from=fork_point(ends, head.failed_unit) if state is RunState.FAILED else "",
    )


async def read_next_step(
    store: RunReader, run: RecordedRun, *, command: str = "ensemble-ray", is_partial: bool = False
) -> NextStep | None:
    """Return what to do with a run; None if it is active or completed."""
    head = await read_head(store, run.run_id, is_partial=is_partial)
    state = run.state if head.end is None else head.state
    ends = (
        await _read_ends(store, run.run_id, is_partial=is_partial)
        if state is RunState.FAILED and not head.is_dynamic
        else []
    )
    return _next_of(run, head, state, ends, command)


def remedy_for(names: Iterable[str]) -> str:
    """Return what helps against an error, by its class and the classes of its causes; the last one with a remedy wins."""
    found = ""
    for name in names:
        found = REMEDIES.get(name, found)
    return found


async def _read_ends(store: RunReader, run_id: str, *, is_partial: bool) -> list[Fact]:
    pages = store.read(run_id, kinds=_ENDS, has_data=False, is_partial=is_partial)
    return [fact async for page in pages for fact in page]


def _find_step(error: RecordedError, ends: Sequence[Fact]) -> str:
    if not error.key:
        return ""
    failed = [fact.name for fact in ends if isinstance(fact.data, FailureRecorded) and node_key(fact.name) == error.key]
    return error.instance or (failed[-1] if failed else instance_of(error.key))


_RESUMES: Mapping[RunState, str] = {
    RunState.INTERRUPTED: "Resume it",
    RunState.WAITING: "When it is decided",
    RunState.CANCELLED: "Resume it",
    RunState.BUDGET_EXHAUSTED: "Resume it with a larger budget (max_tokens or max_cost)",
}


def _next_of(run: RecordedRun, head: RunHead, state: RunState, ends: Sequence[Fact], command: str) -> NextStep | None:
    origin, text = head.source.place, _RESUMES.get(state, "")
    if state is RunState.FAILED and head.is_dynamic:
        text = "" if refusal_of(head) else "Resume it, which tries again what failed"  # S-MR-163
    if text:
        field = "max_tokens=N" if state is RunState.BUDGET_EXHAUSTED else ""
        return NextStep(text, resume_advice(run.run_id, origin, field=field, command=command))
    if state is not RunState.FAILED:
        return None
    if fork := fork_advice(run.run_id, origin, ends, unit=head.failed_unit, command=command):
        return NextStep("Reuse its results", fork)
    inputs = " ".join(f"--input {shlex.quote(f'{name}={value}')}" for name, value in (head.header.inputs or {}).items())
    is_attached = "attached" in (head.header.definition or {})  # the record does not contain the paths of inputs
    if not origin or head.is_dynamic or head.source.overrides or is_attached or len(inputs) > _INPUTS:
        return NextStep("Run it again when the cause is removed: no finished task can be reused")
    return NextStep("Run it again when the cause is removed", f"{command} run {shlex.quote(origin)} {inputs}".rstrip())


# Names.

_WHOLE = "The run"
_UNITS = {"loop": ("Loop", "iteration"), "phase": ("Phase", "attempt"), "graph": ("Graph", "step")}


def _describe(head: RunHead, state: RunState, error: RecordedError, step: str) -> str:
    if error is NO_REASON:
        return "The process of the run died" if state is RunState.INTERRUPTED else "The run failed"
    plan = readable_plan(head.header)
    subject = _subject(head, plan, error)
    around = [_describe_round(plan, each) for each in reversed((step or error.instance).split("/")[:-1])]
    named = ", ".join([subject, *filter(None, around)])
    is_whole = subject == _WHOLE
    if state is RunState.BUDGET_EXHAUSTED:
        return "The budget is exhausted" if is_whole else f"The budget was exhausted at: {named}"
    if state is RunState.INTERRUPTED:
        return "The run stopped" if is_whole else f"The run stopped at: {named}"
    return f"{named}{',' if ', ' in named else ''} failed"


def _subject(head: RunHead, plan: Plan, error: RecordedError) -> str:
    key = error.key
    if not key:
        if error.error_type == "ConstraintViolationError":
            return "The manager"
        code = f" ('{name}')" if (name := error.place.rpartition(", in ")[2]) else ""
        if head.end is not None and head.end.failure == "source":
            return f"Code that makes items or tasks{code}"
        own = error.instance.rpartition("/")[2]
        unit, mark, occurrence = own.rpartition("#") if "#" in own else (own, "", "")
        word, inside = _UNITS.get(unit.partition(":")[0], ("", ""))
        if not word:
            return _WHOLE
        at = f", {inside} {int(occurrence) + 1}" if mark and occurrence.isdecimal() else ""
        return f"{word} '{_unit_name(plan, unit)}'{at}{code}"
    if head.is_dynamic and (position := position_of(key)) is not None:
        level, number = position
        return f"Reduce {number} of level {level}" if level else f"Item {number}"
    node = next((each for each in plan.nodes if each.key == key), None)
    if plan.hierarchy is not None and key == MANAGER_KEY:
        return "The manager"
    if node is None:
        return f"Task '{row_text(key, _SHOWN)}'"
    agent = f" (agent '{row_text(node.agent_role, _SHOWN)}')" if node.agent_key is not None else ""
    return f"Task '{row_text(task_label(node), _SHOWN)}'{agent}"


def _describe_round(plan: Plan, part: str) -> str:
    unit, _, occurrence = part.rpartition("#")
    word, inside = _UNITS.get(unit.partition(":")[0], ("", ""))
    if not (word and occurrence.isdecimal()):
        return ""
    return f"{inside} {int(occurrence) + 1} of {word.lower()} '{_unit_name(plan, unit)}'"


def _unit_name(plan: Plan, key: str) -> str:
    name = next((unit.name for unit in plan.units if unit.key == key), key.partition(":")[2])
    return row_text(name, _SHOWN)


# The failed execution.


def _refused_answer(failure: FailureRecorded | None) -> tuple[str | None, str]:
    """Return the last answer that could not be parsed, and why."""
    link: Mapping[str, object] = {} if failure is None else failure.error_data
    while link:
        fields = as_mapping(link.get("fields"))
        if link.get("type") == "OutputParsingError" and "raw_output" in fields:
            errors = as_sequence(fields.get("parse_errors"))
            return as_text(fields.get("raw_output")), as_text(errors[-1]) if errors else ""
        link = as_mapping(link.get("cause"))
    return None, ""


def _attempts_in(facts: Sequence[Fact], failure: FailureRecorded | None) -> list[FailedAttempt]:
    """Return the starts: facts of a higher epoch are of another one."""
    found: dict[int, FailedAttempt] = {}
    for fact in facts:
        began, ended, waited_s = found.get(fact.epoch, FailedAttempt(fact.at, fact.at))
        if isinstance(fact.data, ModelAnswered):
            waited_s += fact.data.waited_s
        found[fact.epoch] = FailedAttempt(min(began, began_at(fact)), max(ended, fact.at), waited_s)
    if found and (started_at := _start_in(failure)) is not None:
        last = max(found)
        found[last] = found[last]._replace(started_at=min(started_at, found[last].started_at))
    attempts = [found[epoch] for epoch in sorted(found)]
    return attempts if len(attempts) > 1 or any(each.ended_at > each.started_at for each in attempts) else []


def _start_in(failure: FailureRecorded | None) -> float | None:
    trace = None if failure is None else failure.trace
    if isinstance(trace, TaskTrace):
        return trace.started_at.timestamp()
    try:
        return datetime.fromisoformat(as_text(as_mapping(trace).get("started_at"))).timestamp()
    except ValueError:  # no trace, or a damaged one
        return None


def _seconds(duration_s: float) -> str:
    return format_seconds(timedelta(seconds=max(0.0, duration_s)))
