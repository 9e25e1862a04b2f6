"""What each reader of a record says of its run, so that a test can compare them wherever the record ends.

Where two readers mean different things by definition, they say them under different names, or one of them says nothing:

- The work of a task begins with its first effect (trace, spans), when its run wanted it (steps), or at the time of the fact (messages).
- A failed task ends with its last effect (trace, spans), or at the time of the fact (errors, messages, steps).
- Messages, spans and the progress of a command tell of a task's own model calls: not of those for servers of tools.
- A call of an unknown tool has no fact: before its task ends it is counted, but neither the spans nor the steps show it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from hashlib import sha256
from typing import Any

from ensemble_ray.cli.view.followed import event_of
from ensemble_ray.cli.view.progress import TaskProgress
from ensemble_ray.facts.fact import Fact
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.following import EventProjection
from ensemble_ray.record.head import RunHead
from ensemble_ray.record.history import RecordedExecution, RunHistory
from ensemble_ray.record.progress import tasks_done
from ensemble_ray.record.stores import RecordedRun
from ensemble_ray.record.trace import trace_of, works_of
from ensemble_ray.record.view.exporters import recorded_spans
from ensemble_ray.studio.views.run_view import RunView
from ensemble_ray.text.foreign_text import one_line
from ensemble_ray.values.ids import delegating_call, is_inside_unit
from ensemble_ray.values.outputs import RunState
from ensemble_ray.values.value import utc_of

#: Values by name; what two readers call the same has to be equal.
Said = Mapping[str, object]


def differences(facts: Sequence[Fact]) -> Iterator[str]:
    """Yield what readers disagree on, of the record cut after each of its facts."""
    readers = {
        "messages": _messages(facts),
        "progress": _progress(facts),
        "studio": _studio(facts),
        "spans": _spans(facts),
        "heads": _heads(facts),
    }
    if not RunHead(facts).is_dynamic:
        readers["trace"] = _trace(facts)
    for fact, *said in zip(facts, *readers.values(), strict=True):
        where = f"after {fact.seq} {fact.kind} {fact.name}"
        for name in dict.fromkeys(name for each in said for name in each):
            values = {reader: each[name] for reader, each in zip(readers, said, strict=True) if name in each}
            first = next(iter(values.values()), None)
            if not all(_is_same(name, value, first) for value in values.values()):
                yield f"{where}: {name}: {values}"


def _is_same(name: str, value: Any, other: Any) -> bool:
    """Return whether two values are equal; times may be rounded to the ms before or behind one of .5."""
    if isinstance(value, Mapping) and isinstance(other, Mapping) and name.endswith(" at"):
        return value.keys() == other.keys() and all(abs(value[key] - other[key]) <= 1 for key in value)
    if name in {"run began", "run ended"} and isinstance(value, int) and isinstance(other, int):
        return abs(value - other) <= 1
    return bool(value == other)


def _trace(facts: Iterable[Fact]) -> Iterator[Said]:
    history = RunHistory(has_details=True)
    for fact in facts:
        history.apply(fact)
        trace, head = trace_of(history), history.head
        metrics, estimate = trace.metrics, trace.metrics.total_cost_estimate
        calls = [call for task in trace.task_traces for each in task.with_workers() for call in each.llm_interactions]
        works = works_of(history)
        given = {work.instance: output for work in works if (output := work.summary()) is not None}
        failures = {work.instance: work.failure for work in works if work.failure and work.has_failed}
        errors = {(each.error_type, each.message, _ms(each.occurred_at)) for each in trace.errors}
        of_tasks = {(each.data.error_type, each.data.message, _ms(each.at)) for each in failures.values()}
        yield {
            "state": head.state,
            "run began": _ms(trace.started_at),
            "run ended": _ms(trace.completed_at) if head.state.is_final else None,
            "tokens": _known(metrics.total_tokens) if trace.task_traces else 0,
            "all model calls": metrics.total_llm_call_count,
            "reused answers": metrics.total_reused_calls,
            "reused tokens": _known(metrics.total_reused_tokens),
            "model calls": sum(not call.reused for call in calls),
            "tokens of model calls": sum(max(0, call.input_tokens) + max(0, call.output_tokens) for call in calls),
            "cached tokens": metrics.total_cached_tokens,
            "cached tokens of model calls": sum(max(0, call.cached_tokens) for call in calls),
            "tool calls": metrics.total_tool_calls,
            "cost": None if estimate is None else estimate.total_cost.normalize(),
            "completed": set(given),
            "completed at": {name: _ms(output.completed_at) for name, output in given.items()},
            "outputs": {name: _digest(output.raw) for name, output in given.items()},
            "failed": set(failures),
            "failed at": {name: _ms(each.at) for name, each in failures.items()},
            "errors": {name: _line(each.data.error_type, each.data.message) for name, each in failures.items()},
            "reasons": {name: each.data.message or each.data.error_type for name, each in failures.items()},
            "failures without an error": of_tasks - errors,
        }


def _messages(facts: Sequence[Fact]) -> Iterator[Said]:
    projection = EventProjection(facts[0].run)
    began: int | None = None
    started: dict[str, Mapping[str, Any]] = {}
    completed: dict[str, Mapping[str, Any]] = {}
    failed: dict[str, Mapping[str, Any]] = {}
    gates: set[str] = set()
    cached = 0
    for fact in facts:
        for message in projection.apply(fact):
            data: Mapping[str, Any] = message.data
            match message.type:
                case "llm_iteration_completed":
                    cached += data.get("cached_tokens", 0)
                case "ensemble_started":
                    began = _instant(data["started_at"])
                case "task_started":
                    assert data["instance"] not in started, "a task starts once"
                    started[data["instance"]] = data
                case "task_completed":
                    completed[data["instance"]] = data
                case "task_failed":
                    failed[data["instance"]] = data
                case "review_requested":
                    gates.add(data["review_id"])
                case "review_decided" | "review_timed_out":
                    gates.discard(data["review_id"])
                case _:
                    pass
        end = projection.end()
        totals: Mapping[str, Any] = (end or projection.unrecorded_end("interrupted", fact.at)).data
        yield {
            "run began": began,
            "run ended": None if end is None else _instant(totals["completed_at"]),
            "exit reason": None if end is None else totals["exit_reason"],
            "tokens": _known(totals["total_tokens"]),
            "cached tokens of model calls": cached,
            "tool calls": totals["total_tool_calls"],
            "completed": set(completed),
            "completed at": {name: _instant(data["completed_at"]) for name, data in completed.items()},
            "failed": set(failed),
            "failed at": {name: _instant(data["failed_at"]) for name, data in failed.items()},
            "reasons": {name: data["reason"] for name, data in failed.items()},
            "undecided gates": set(gates),
            "ended without a start": {*completed, *failed} - set(started),
        }


def _progress(facts: Sequence[Fact]) -> Iterator[Said]:
    """Say what the command line shows of a run of another process."""
    projection, progress = EventProjection(facts[0].run), TaskProgress()
    for fact in facts:
        for message in projection.apply(fact):
            event = event_of(message)
            if event is not None:
                progress.receive(event, fact.at)
        yield {
            "model calls": progress.model_calls,
            "reused answers": progress.reused,
            "tokens of model calls": progress.input_tokens + progress.output_tokens,
            "number completed": progress.done,
            "number failed": progress.failed,
        }


def _studio(facts: Sequence[Fact]) -> Iterator[Said]:
    view = RunView(facts[0].run)
    for fact in facts:
        view.apply([fact])
        state = view.totals.head.state
        summary = RecordedRun(run_id=fact.run, created_at=utc_of(facts[0].at), origin="", state=state, location="")
        row = view.totals.row(summary)
        steps = {name: each for name, each in view.steps.history.executions.items() if not each.is_unit}
        tasks = {name: each for name, each in steps.items() if each.kind != "delegation"}
        # An item of several tasks is a step, too.
        inner = {name.partition("/")[0] for name in tasks if is_inside_unit(name)}
        shown = {name: view.steps.show(each) for name, each in steps.items()}
        tasks = {name: each for name, each in tasks.items() if name not in inner or shown[name].model_calls}
        tokens = [each.total_tokens for each in shown.values()]
        costs = [each.cost[0] for each in shown.values() if each.cost is not None]
        total = None if None in tokens else sum(each or 0 for each in tokens)
        calls = sum(each.model_calls for each in shown.values())
        assert row.tokens == (total if calls else None)
        assert view.totals.cost == (sum(costs) if costs else None)
        yield {
            "state": RunState(row.status),
            "run ended": row.ended_at if state.is_final else None,
            "tokens": total,
            "cached tokens": sum(each.cached_tokens for each in shown.values()),
            "all model calls": calls,
            "reused answers": row.reused_calls,
            "reused tokens": row.reused_tokens,
            "cost": None if row.cost is None else Decimal(row.cost.amount).normalize(),
            "completed": _with(tasks, "completed"),
            "completed at": {name: _ms(tasks[name].ended_at or 0) for name in _with(tasks, "completed")},
            "outputs": {name: view.steps.show(tasks[name]).output_digest for name in _with(tasks, "completed")},
            "failed": _with(tasks, "failed"),
            "failed at": {name: _ms(tasks[name].ended_at or 0) for name in _with(tasks, "failed")},
            "errors": {name: tasks[name].error for name in _with(tasks, "failed")},
            "undecided gates": {each.gate_id for each in view.totals.gates if each.decided is None},
            "number completed": len(_with(tasks, "completed")),
            "number failed": len(_with(tasks, "failed")),
        }


def _spans(facts: Sequence[Fact]) -> Iterator[Said]:
    for end in range(1, len(facts) + 1):
        calls: list[Mapping[str, Any]] = []
        reused: list[Mapping[str, Any]] = []
        status: dict[str, set[str]] = {"completed": set(), "failed": set(), "exited": set()}
        for span in recorded_spans(facts[:end]):
            said: Mapping[str, Any] = span.attributes
            instance = said.get("ensemble_ray.task.instance", "")
            if said.get("gen_ai.operation.name") == "chat":
                (reused if "ensemble_ray.model.reused" in said else calls).append(said)
            elif "ensemble_ray.task.status" in said and delegating_call(instance) is None:
                status.setdefault(said["ensemble_ray.task.status"], set()).add(instance)
        tokens = ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens")
        yield {
            "model calls": len(calls),
            "reused answers": len(reused),
            "tokens of model calls": sum(each.get(name) or 0 for each in calls for name in tokens),
            "cached tokens of model calls": sum(
                each.get("gen_ai.usage.cache_read.input_tokens") or 0 for each in calls
            ),
            "completed": status["completed"],
            "failed": status["failed"],
        }


def _heads(facts: Sequence[Fact]) -> Iterator[Said]:
    """Say what lists and `runs` show of a run."""
    head = RunHead()
    for end, fact in enumerate(facts, start=1):
        head.apply(fact)
        progress = run_blocking(tasks_done(_Store(facts[:end]), fact.run))  # type: ignore[arg-type]  # it reads alone
        has_ended = head.end is not None and head.state is not RunState.WAITING
        said: dict[str, object] = {
            "state": head.state,
            "run began": _ms(head.started_at),
            "exit reason": head.end.reason if has_ended and head.end is not None else None,
        }
        if not head.is_dynamic:
            said["number completed"] = progress.executions
        yield said


class _Store:
    """Facts, as a store returns them."""

    def __init__(self, facts: Sequence[Fact]) -> None:
        self._facts = facts

    async def read(self, _run: str, *, kinds: Collection[str], has_data: bool = True) -> AsyncGenerator[Sequence[Fact]]:
        yield [fact for fact in self._facts if fact.kind in kinds]


def _with(steps: Mapping[str, RecordedExecution], status: str) -> set[str]:
    return {name for name, each in steps.items() if each.status == status}


def _ms(at: float | datetime) -> int:
    return round((at.timestamp() if isinstance(at, datetime) else at) * 1000)


def _instant(text: str) -> int:
    return _ms(datetime.fromisoformat(text))


def _known(tokens: int) -> int | None:
    return None if tokens < 0 else tokens


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _line(error_type: str, message: str) -> str:
    return str(one_line(f"{error_type}: {message}" if message else error_type, 300))
