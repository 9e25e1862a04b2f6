"""Readers of a record agree on runs of every construct, wherever the record ends, and with what the run itself gave."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import EnsembleOutput, ExitReason
from ensemble_ray.events.messages import Message, RunMessages, WireEvent
from ensemble_ray.facts.effects import SamplingAnswered
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.following import EventProjection
from ensemble_ray.record.head import RunHead
from ensemble_ray.record.trace import fold_output, fold_trace
from ensemble_ray.studio.views.run_view import RunTotals
from ensemble_ray.values.outputs import RunState
from tests.readers import differences
from tests.scenarios.made_runs import STORIES, MadeRun, Maker

pytestmark = pytest.mark.filterwarnings("ignore:.*_task takes:DeprecationWarning")  # of golden teams

#: Messages that only a live run or only a record has.
_LIVE = {"task_input", "llm_iteration_started", "token"}
_RECORDED = {"review_requested", "review_decided", "review_timed_out"}


@pytest.mark.parametrize("story", STORIES)
def test_readers_agree_with_each_other_and_with_the_run(story: str, tmp_path: Path) -> None:
    """S-MET-38, S-MET-39."""
    found: list[str] = []
    with contextlib.chdir(tmp_path):  # some runs write files
        make = Maker(tmp_path / "home")
        for run in STORIES[story](make):
            found += [f"{run.name}: {each}" for each in differences(run.facts)]
            found += [f"{run.name}: {each}" for each in _differences_from(run, make)]
    assert not found, "\n".join(found)


def _differences_from(run: MadeRun, make: Maker) -> Iterator[str]:
    """Yield where a record and its readers differ from what the run gave."""
    head, totals = RunHead(run.facts), RunTotals()
    for fact in run.facts:
        totals.apply(fact)
    summary = run_blocking(make.store.summary(run.facts[0].run))
    assert summary is not None
    yield from _unequal("stored state", summary.state, head.state)
    if run.output is not None:
        yield from _unequal("state", run.output.state, head.state)
    if run.output is not None and not head.is_dynamic and head.state is not RunState.WAITING:
        recorded = fold_output(run.facts)
        yield from _unequal("output", *map(_output_data, (run.output, recorded)))
    if run.trace is not None:
        yield from _differing_trace(run, head, totals)
    # No event tells of an answer to a server of tools whose task failed.
    if run.events and (run.error is None or not any(isinstance(fact.data, SamplingAnswered) for fact in run.facts)):
        yield from _differing_messages(run, head)


def _differing_trace(run: MadeRun, head: RunHead, totals: RunTotals) -> Iterator[str]:
    """Yield where a trace differs; of a task that did not end, the record has neither prompts nor costs (S-MET-40)."""
    assert run.trace is not None
    metrics, estimate = run.trace.metrics, run.trace.total_cost_estimate
    counted = metrics.total_tokens if metrics.total_llm_call_count else 0
    yield from _unequal("tokens", counted, -1 if totals.tokens is None and counted else totals.tokens or 0)
    have_ended = head.is_dynamic or all(each.final_output or each.parsed_output for each in run.trace.task_traces)
    if have_ended:
        yield from _unequal("cost", None if estimate is None else estimate.total_cost, totals.cost)
    if not head.is_dynamic:
        one, other = (json.loads(each.to_json()) for each in (run.trace, fold_trace(run.facts)))
        names = [*one] if have_ended or run.error is not None else ["errors", "workflow", "inputs", "started_at"]
        yield from _unequal("trace", *({name: each[name] for name in names} for each in (one, other)))


def _output_data(output: EnsembleOutput) -> dict[str, object]:
    """Return an output without what a reader needs the team for, and what the trace has, too."""
    data = output.model_dump(
        mode="json", exclude={"trace": True, "metrics": True, "task_outputs": {"__all__": {"trace", "output_type"}}}
    )
    return {**data, "tokens": output.metrics.total_tokens, "model calls": output.metrics.total_llm_call_count}


def _differing_messages(run: MadeRun, head: RunHead) -> Iterator[str]:
    rendering, projection = RunMessages(run.facts[0].run), EventProjection(run.facts[0].run)
    live = [message for event in run.events if (message := rendering.apply(event, 0)) is not None]
    last = rendering.end(head.state.exit_reason.value, 0)
    recorded = [message for fact in run.facts for message in projection.apply(fact)]
    end = projection.end() or projection.unrecorded_end(head.state.exit_reason.value, 0)
    ended = {each.data["instance"] for each in recorded if each.type in {"task_completed", "task_failed"}}
    if head.end is not None and head.end.reason is ExitReason.COMPLETED:  # else some were wanted, and have not begun
        ended = {each.data["instance"] for each in [*live, *recorded] if each.type == "task_started"}
    # A record does not say what the tasks of a map-reduce were made of until they end, nor how far loops of items are.
    unknown = {"agent_role", "task_description", "task_index"} if head.is_dynamic else set[str]()
    one = _counted(
        [*live, *([last] if last else [])],
        _LIVE | ({"loop_iteration_completed"} if head.is_dynamic else set()),
        ended,
        unknown,
    )
    other = _counted([*recorded, end], _RECORDED, ended, unknown)
    yield from (f"only live: {each}" for each in one - other)
    yield from (f"only on record: {each}" for each in other - one)


def _counted(
    messages: Iterable[Message | WireEvent], without: set[str], ended: set[object], unknown: set[str]
) -> Counter[str]:
    """Count messages without the times at which somebody heard of something; of starts, those of tasks that ended."""
    return Counter(
        f"{each.type} {json.dumps(_timeless(each.type, each.data, unknown), sort_keys=True, default=str)}"
        for each in messages
        if each.type not in without
        and (each.type != "task_started" or each.data["instance"] in ended)
        and not str(each.data.get("tool_result")).startswith("Error: agent_role must not be")
    )


def _timeless(kind: str, data: Mapping[str, object], unknown: set[str]) -> Mapping[str, object]:
    heard = {"started_at", "failed_at", "total_tasks"} | unknown
    if kind == "ensemble_completed":
        heard |= {"completed_at", "duration_ms"}
    if kind == "delegation_failed":  # a record does not say how long a refusal took
        heard |= {"duration_ms"}
    if kind == "tool_called":  # of delegated work: that of the asking task, or 0
        heard |= {"task_index"}
    return {name: value for name, value in data.items() if name not in heard}


def _unequal(what: str, one: Any, other: Any) -> Iterator[str]:
    """Yield the places in which two values differ; stacks are of the process that raised."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in {**one, **other}:
            if name not in {"stack_trace", "occurred_at"}:
                yield from _unequal(f"{what}.{name}", one.get(name), other.get(name))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, pair in enumerate(zip(one, other, strict=True)):
            yield from _unequal(f"{what}[{place}]", *pair)
    elif one != other:
        yield f"{what}: {one!r} in the run, {other!r} on record"
