"""Render an `ExecutionTrace` as a tree of rows or plain text lines for users. Pure.

The rows have no colours and no control characters from texts of models or tools.
"""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal, Union, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.execute.agent.context_window import describe_context
from ensemble_ray.facts.effects import ReflectionRecorded, ReflectionStored
from ensemble_ray.facts.fact import Fact, as_count, as_mapping, as_sequence, as_text
from ensemble_ray.facts.runs import DirectiveFact, DirectiveRecorded, ModelSwitched
from ensemble_ray.record.batches import RecordedBatch
from ensemble_ray.record.units import LevelTally, level_tallies, unknown_calls
from ensemble_ray.text.foreign_text import escape_controls
from ensemble_ray.values.ids import node_key, reflected_instance
from ensemble_ray.values.messages import ChatResponse, incomplete_reason
from ensemble_ray.values.metrics import CostEstimate
from ensemble_ray.values.trace import (
    DelegationTrace,
    ErrorTrace,
    ExecutionTrace,
    LlmInteraction,
    TaskTrace,
    ToolCallTrace,
)
from ensemble_ray.values.value import utc_of

if TYPE_CHECKING:
    from ensemble_ray.record.units import PredicateAnswer


class UnitBranch(Struct, kw_only=True):
    path: str  # `loop:refine`, or `loop:refine#2` for an execution
    entries: list[Entry] = msgspec.field(default_factory=list["Entry"])

    @property
    def is_unit(self) -> bool:
        return "#" not in self.path.rpartition("/")[2]

    def tasks(self) -> Iterator[TaskTrace]:
        for entry in self.entries:
            if isinstance(entry, UnitBranch):
                yield from entry.tasks()
            else:
                yield entry


Entry = Union[TaskTrace, UnitBranch]  # noqa: UP007  a name for the union, also at run time


def branches_of(traces: Iterable[TaskTrace]) -> list[Entry]:
    root = UnitBranch(path="")
    known: dict[str, UnitBranch] = {"": root}
    for trace in traces:
        path = str(trace.metadata.get("instance", "")).rpartition("/")[0]
        _branch(path, known).entries.append(trace)
    return root.entries


def _branch(path: str, known: dict[str, UnitBranch]) -> UnitBranch:
    found = known.get(path)
    if found is None:
        before, _, last = path.rpartition("/")
        key, mark, _ = last.rpartition("#")
        above = path.rpartition("#")[0] if mark and key else before
        found = known[path] = UnitBranch(path=path)
        _branch(above, known).entries.append(found)
    return found


def describe_unit(trace: ExecutionTrace, path: str) -> tuple[str, ...]:
    for loop in trace.loop_traces:
        if loop.path == path:
            ran = f"{loop.iterations_run} of at most {loop.max_iterations} iterations"
            return (ran, loop.termination_reason) if loop.termination_reason else (ran,)
    for phase in trace.phases:
        if phase.path == path and not phase.name.startswith("__review__"):
            attempts = f"{phase.attempts} attempt{'' if phase.attempts == 1 else 's'}"
            return (phase.status.value, attempts) if phase.attempts else (phase.status.value,)
    graph = trace.graph_trace
    if graph is None:
        return ()
    if graph.path == path:
        ran = f"{graph.steps_run} of at most {graph.max_steps} steps"
        return (ran, graph.termination_reason) if graph.termination_reason else (ran,)
    step = next((step for step in graph.steps if step.path == path), None)
    if step is None:
        return ()
    return (step.state_name,) if step.next_state is None else (f"{step.state_name} → {step.next_state}",)


def is_named(name: str, instance: str) -> bool:
    """Return whether a name given by a user selects an execution of a task, alone or among others (S-LOOP-184).

    Examples:
        >>> [is_named(name, "loop:refine#2/writer#0") for name in ("writer", "loop:refine", "loop:refine#2", "critic")]
        [True, True, True, False]
    """
    return node_key(instance) == name or instance == name or instance.startswith((f"{name}/", f"{name}#"))


def row_text(text: str, length: int) -> str:
    """Return a text on one line, without control characters, cut to a length."""
    # Cut first, since an answer may be as large as a book. Twice the length leaves room for collapsed white space.
    words = " ".join(text[: 2 * length].split())
    clean = escape_controls(words)
    return clean if len(clean) <= length and len(text) <= 2 * length else f"{clean[:length].rstrip()}..."


def format_seconds(duration: timedelta) -> str:
    seconds = duration.total_seconds()
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    minutes, rest = divmod(round(seconds, 2), 60)
    return f"{minutes:.0f} min {rest:.0f} s" if minutes else f"{rest:.2f} s"


def format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_tokens(input_tokens: int, output_tokens: int, reasoning_tokens: int = 0, cached_tokens: int = 0) -> str:
    """Return input and output tokens, `?` for unknown numbers, and the numbers of reasoning and cached tokens above 0."""
    counts = [f"{count:,}" if count >= 0 else "?" for count in (input_tokens, output_tokens)]
    parts = [(reasoning_tokens, "reasoning"), (cached_tokens, "cached")]
    return f"{counts[0]} + {counts[1]} tokens{''.join(f', {n:,} of them {what}' for n, what in parts if n > 0)}"


def format_cost(cost: CostEstimate, unpriced_calls: int) -> str:
    """Return a cost, and the number of model calls that it does not contain."""
    unknown = f", without {format_count(unpriced_calls, 'model call')} of unknown price" if unpriced_calls else ""
    return f"{cost.total_cost:f} {cost.currency}{unknown}"


def format_reused(answers: int, tokens: int) -> Iterator[str]:
    """Yield how many answers of earlier runs were reused, if any (S-USE-40)."""
    if answers:
        yield f"{format_count(answers, 'reused answer')} ({_format_known(tokens)})"


def _format_known(tokens: int) -> str:
    return format_count(tokens, "token") if tokens >= 0 else "? tokens"


def branch_lines(depths: Sequence[int]) -> list[str]:
    """Return the prefixes of rows, with a line for the depths that have later rows."""
    found: list[str] = []
    to_come: set[int] = set()
    for row_depth in reversed(depths):
        parts = ["│  " if depth in to_come else "   " for depth in range(1, row_depth)]
        if row_depth:
            parts.append("├─ " if row_depth in to_come else "└─ ")
        found.append("".join(parts))
        to_come = {depth for depth in to_come if depth < row_depth} | {row_depth}
    return found[::-1]


def context_lines(metadata: Mapping[str, object]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return the lines of the first shortened request, and of the last one with another shortening (S-MEM-136)."""
    cuts = [as_mapping(entry) for entry in as_sequence(metadata.get("context"))]
    for data in cuts[:1] + cuts[1:][-1:]:
        turn = as_count(data.get("turn"))
        needed, budget = as_count(data.get("needed_tokens")), as_count(data.get("budget_tokens"))
        where = f" of model call {turn + 1}" if turn else ""
        yield f"context{where}: {describe_context(data)}", (f"{needed:,} tokens, budget {budget:,}",)


_MOST_LINES = 20
_TIMINGS = {"before_execution": "before", "during_execution": "during", "after_execution": "after"}
_VERDICTS = {"approve": "approved", "edit": "edited", "exit": "ended the run", "waiting": "waits"}


def review_lines(metadata: Mapping[str, object]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return a title and details per gate, followed by the lines of its difference, which have no details."""
    for gate in map(as_mapping, as_sequence(metadata.get("reviews"))):
        verdict, timing = as_text(gate.get("verdict")), as_text(gate.get("timing"))
        asked = as_text(gate.get("question")) or as_text(gate.get("prompt"))
        title = f"review {_TIMINGS.get(timing, timing)}: {_VERDICTS.get(verdict, verdict)}"
        details = (as_text(gate.get("by")), as_text(gate.get("comment")), "timed out" if gate.get("timed_out") else "")
        yield f"{title}, asked: {asked}" if asked else title, tuple(each for each in details if each)
        if verdict == "edit":
            before, after = (as_text(gate.get(name)).splitlines() for name in ("original", "text"))
            compared = difflib.unified_diff(before, after, lineterm="", n=1)
            lines = [line for line in compared if not line.startswith(("---", "+++", "@@"))]
            yield from ((line, ()) for line in lines[:_MOST_LINES])
            if (left_out := len(lines) - _MOST_LINES) > 0:
                yield f"... {left_out:,} more lines", ()


_MOST_TASKS = 100  # A map-reduce with more tasks is shown by its levels only; also the maximum number of errors.
_TITLE = 72  # Longest text of a row's title and of a quoted answer, characters.
_QUOTE = 100
_REASON = 400  # Longest reason of a failure and its location.
_LOST = 300

_ASKED = "(tool calls)"  # Replaces the text of an answer that requests tools, since such an answer is never empty.
_DELEGATING = frozenset({"delegate", "delegate_task"})  # a malformed call of these makes no delegation

RowKind = Literal[
    "run",
    "tags",
    "level",
    "batch",
    "unit",
    "verdict",
    "task",
    "history",
    "reasoning",
    "context",
    "review",
    "reflection",
    "directive",
    "model",
    "tool",
    "answer",
    "error",
]


class TreeRow(Struct, frozen=True, kw_only=True):
    depth: int
    kind: RowKind
    title: str
    details: tuple[str, ...] = ()
    is_bad: bool = False


def tree_rows(trace: ExecutionTrace, verdicts: Sequence[PredicateAnswer] = ()) -> tuple[TreeRow, ...]:
    """Return the rows of a trace, top down; `verdicts` are the recorded answers of predicates and conditions."""
    return tuple(_rows(trace, verdicts))


def render_tree(trace: ExecutionTrace) -> str:
    return render_rows(tree_rows(trace))


def render_rows(rows: Sequence[TreeRow]) -> str:
    lines: list[str] = []
    for row, branches in zip(rows, branch_lines([row.depth for row in rows]), strict=True):
        lines.append(branches + "  ".join((row.title, *(f"[{detail}]" for detail in row.details))))
    return "\n".join(lines)


def _rows(trace: ExecutionTrace, verdicts: Sequence[PredicateAnswer]) -> Iterator[TreeRow]:
    named = (trace.ensemble_id, trace.workflow, str(trace.metadata.get("state", "completed")))
    ensemble_id, workflow, state = (row_text(text, _TITLE) for text in named)
    parent, origin = "", as_mapping(trace.metadata.get("forked_from"))
    if origin:
        run, task = (row_text(str(origin.get(name, "")), _TITLE) for name in ("run", "task"))
        parent = f", fork of {run} from {task}"
    yield TreeRow(
        depth=0,
        kind="run",
        title=f"Run {ensemble_id}: {workflow}, {state}{parent}",
        details=(*name_details(trace.ensemble_name), *_run_details(trace)),
        is_bad=bool(trace.errors),
    )
    if tags := as_mapping(trace.metadata.get("tags")):
        yield tags_row(tags)
    lost: object = trace.metadata.get("lost")
    if isinstance(lost, list | tuple):
        yield from map(lost_row, map(str, cast("list[object]", lost)))
    failed = {(error.agent_role, error.task_description) for error in trace.errors}
    if trace.map_reduce_levels:
        tallies = level_tallies(trace, failed)
        yield from map(level_row, tallies)
        if sum(tally.total for tally in tallies) > _MOST_TASKS:
            unknown = [_tool_row(call, 1) for task in trace.task_traces for call in unknown_calls(task)]  # S-DUR-26
            yield from unknown[:_MOST_TASKS]
            if len(unknown) > _MOST_TASKS:
                title = f"and {len(unknown) - _MOST_TASKS:,} more of unknown outcome"
                yield TreeRow(depth=1, kind="tool", title=title, is_bad=True)
            yield from _error_rows(trace.errors)
            return
    of_path: dict[str, list[PredicateAnswer]] = {}
    for verdict in verdicts:
        of_path.setdefault(verdict.path, []).append(verdict)
    yield from _entry_rows(trace, branches_of(trace.task_traces), of_path, failed, depth=1)
    shown = {str(task.metadata.get("instance", "")).partition("#")[0] for task in trace.task_traces}
    for phase in trace.phases:
        if phase.path not in shown and not phase.task_traces:
            yield TreeRow(depth=1, kind="unit", title=row_text(phase.path, _TITLE), details=(phase.status.value,))
    yield from _error_rows(trace.errors)


def _entry_rows(
    trace: ExecutionTrace,
    entries: Sequence[Entry],
    verdicts: Mapping[str, Sequence[PredicateAnswer]],
    failed: Collection[tuple[str, str]],
    *,
    depth: int,
) -> Iterator[TreeRow]:
    for entry in entries:
        if isinstance(entry, TaskTrace):
            is_failed = (entry.agent_role, entry.task_description) in failed
            yield from _task_rows(entry, is_failed=is_failed, depth=depth)
            continue
        tasks = list(entry.tasks())
        took = max(task.completed_at for task in tasks) - min(task.started_at for task in tasks)
        details = (format_seconds(took), *(row_text(each, _TITLE) for each in describe_unit(trace, entry.path)))
        yield TreeRow(depth=depth, kind="unit", title=row_text(entry.path, _QUOTE), details=details)
        yield from _entry_rows(trace, entry.entries, verdicts, failed, depth=depth + 1)
        for verdict in verdicts.get(entry.path, ()):
            yield _verdict_row(trace, verdict, depth + 1)


def _verdict_row(trace: ExecutionTrace, verdict: PredicateAnswer, depth: int) -> TreeRow:
    asked = "until" if verdict.edge is None else f"edge {verdict.edge}"
    answer = f"raised {row_text(verdict.error, _QUOTE)}" if verdict.answer is None else str(verdict.answer).lower()
    after = format_seconds(max(timedelta(), utc_of(verdict.at) - trace.started_at))
    return TreeRow(
        depth=depth,
        kind="verdict",
        title=f"{asked}: {answer}",
        details=(f"after {after}",),
        is_bad=verdict.answer is None,
    )


def name_details(name: str | None) -> tuple[str, ...]:
    return (f"team {row_text(name, _TITLE)}",) if name else ()


def tags_row(tags: Mapping[str, object]) -> TreeRow:
    shown = (row_text(f"{name}={value}" if value else name, _TITLE) for name, value in tags.items())
    return TreeRow(depth=1, kind="tags", title="tags", details=tuple(shown))


def level_row(tally: LevelTally) -> TreeRow:
    details = [f"{tally.done:,} of {format_count(tally.total, 'task')} done"]
    if tally.failed:
        details.append(f"{tally.failed:,} failed")
    if tally.unknown:
        details.append(format_count(tally.unknown, "unknown outcome"))
    if tally.incomplete:
        details.append(format_count(tally.incomplete, "incomplete answer"))
    details.append(format_seconds(tally.duration))
    if tally.model_calls:
        details += [
            format_count(tally.model_calls, "model call"),
            format_tokens(tally.input_tokens, tally.output_tokens),
        ]
    details += format_reused(tally.reused_calls, tally.reused_tokens)
    if tally.uncounted:
        details.append(f"tokens of {format_count(tally.uncounted, 'task')} unknown")
    if tally.tool_calls:
        details.append(format_count(tally.tool_calls, "tool call"))
    title = f"level {tally.level}: {row_text(tally.node_type, _TITLE)}"
    return TreeRow(
        depth=1, kind="level", title=title, details=tuple(details), is_bad=bool(tally.failed or tally.unknown)
    )


def batch_row(batch: RecordedBatch) -> TreeRow:
    shown = batch.status if batch.is_open and batch.status else batch.state
    details = [row_text(shown, _TITLE), f"{batch.answered:,} of {format_count(batch.total, 'request')} answered"]
    if batch.failed:
        details.append(f"{batch.failed:,} without an answer")
    title = f"batch {row_text(batch.provider_batch or batch.batch, _TITLE)}"
    return TreeRow(depth=1, kind="batch", title=title, details=tuple(details))


def lost_row(text: str) -> TreeRow:
    return TreeRow(depth=1, kind="error", title=f"a part of its record is lost: {row_text(text, _LOST)}", is_bad=True)


def _error_rows(errors: Sequence[ErrorTrace]) -> Iterator[TreeRow]:
    for error in errors[:_MOST_TASKS]:
        details = tuple(filter(None, (row_text(error.task_description, _TITLE), row_text(error.place, _REASON))))
        title = f"{row_text(error.error_type, _TITLE)}: {row_text(error.message, _REASON)}"
        yield TreeRow(depth=1, kind="error", title=title, details=details, is_bad=True)
    if len(errors) > _MOST_TASKS:
        yield TreeRow(depth=1, kind="error", title=f"and {len(errors) - _MOST_TASKS:,} more errors", is_bad=True)


def _run_details(trace: ExecutionTrace) -> Iterator[str]:
    metrics, cost = trace.metrics, trace.total_cost_estimate
    yield format_seconds(trace.total_duration)
    # The traces of a manager's workers follow its own trace, and are not tasks of the run.
    yield format_count(
        min(len(trace.task_traces), 1) if trace.workflow == "hierarchical" else len(trace.task_traces), "task"
    )
    yield format_count(metrics.total_llm_call_count, "model call")
    yield from _answers_by_model(metrics.answers_by_model)
    yield format_tokens(
        metrics.total_input_tokens,
        metrics.total_output_tokens,
        metrics.total_reasoning_tokens,
        metrics.total_cached_tokens,
    )
    yield from format_reused(metrics.total_reused_calls, metrics.total_reused_tokens)
    if metrics.total_incomplete_answers:
        yield format_count(metrics.total_incomplete_answers, "incomplete answer")
    if metrics.total_tool_calls:
        yield format_count(metrics.total_tool_calls, "tool call")
    if metrics.total_delegations:
        yield format_count(metrics.total_delegations, "delegation")
    if cost is not None:
        yield format_cost(cost, metrics.total_unpriced_calls)


def _task_rows(task: TaskTrace, *, is_failed: bool, depth: int = 1, more: Sequence[str] = ()) -> Iterator[TreeRow]:
    state = "failed" if is_failed else str(task.metadata.get("state", ""))
    details = (format_seconds(task.duration), *more, *_task_details(task, state))
    role = row_text(task.agent_role or "?", _TITLE)
    title = f"{role}: {row_text(task.task_description, _TITLE)}"
    yield TreeRow(depth=depth, kind="task", title=title, details=details, is_bad=bool(state))
    yield from _input_rows(task, depth + 1)
    left = deque(task.delegations)
    for interaction in task.llm_interactions:
        yield from _interaction_rows(interaction, left, depth + 1)
    for delegation in left:  # of an unfinished turn
        yield from _delegation_rows(delegation, depth + 1)
    for title, reviewed in review_lines(task.metadata):
        shown = tuple(row_text(each, _TITLE) for each in reviewed)
        yield TreeRow(depth=depth + 1, kind="review", title=row_text(title, _QUOTE), details=shown)
    if task.final_output:
        yield TreeRow(depth=depth + 1, kind="answer", title=f"answer: {row_text(task.final_output, _QUOTE)}")


def _task_details(task: TaskTrace, state: str) -> Iterator[str]:
    metrics = task.metrics
    if metrics.llm_call_count:
        yield format_count(metrics.llm_call_count, "model call")
        yield from _answers_by_model(metrics.answers_by_model)
        yield format_tokens(
            metrics.input_tokens, metrics.output_tokens, metrics.reasoning_tokens, metrics.cached_tokens
        )
    yield from format_reused(metrics.reused_calls, metrics.reused_tokens)
    if metrics.retry_count:
        yield f"{metrics.retry_count:,} made again"
    if metrics.incomplete_answers:
        yield format_count(metrics.incomplete_answers, "incomplete answer")
    if metrics.tool_call_count:
        yield format_count(metrics.tool_call_count, "tool call")
    if state:
        yield row_text(state, _TITLE)
    if "/" in (instance := str(task.metadata.get("instance", ""))):
        yield row_text(instance, _QUOTE)  # the argument of `--task` and `fork --from`


def _input_rows(task: TaskTrace, depth: int) -> Iterator[TreeRow]:
    if task.prompts is not None and task.prompts.history:
        said = task.prompts.history
        last = row_text(said[-1].content or "", _QUOTE)
        title = f"continues a conversation of {format_count(len(said), 'message')}, the last: {last}"
        yield TreeRow(depth=depth, kind="history", title=title)
    for each in () if task.prompts is None else task.prompts.attachments:
        yield TreeRow(depth=depth, kind="context", title=f"attached {_attachment_text(each)}")
    for title, details in context_lines(task.metadata):
        yield TreeRow(depth=depth, kind="context", title=row_text(title, _LOST), details=details)


def _interaction_rows(interaction: LlmInteraction, left: deque[DelegationTrace], depth: int) -> Iterator[TreeRow]:
    is_final = interaction.response_type == "final_answer"
    what, waited = "answered" if is_final else "asked for tools", interaction.permit_wait
    text = interaction.response_text if is_final else _ASKED
    reason = incomplete_reason(ChatResponse(text, finish_reason=interaction.finish_reason))
    if reason is not None and reason != "empty":
        reason = f"cut off: {reason}"
    yield TreeRow(
        depth=depth,
        kind="model",
        title=f"model call {interaction.iteration_index + 1}: {what}",
        details=(
            format_seconds(interaction.latency),
            *(() if waited is None else (f"{format_seconds(waited)} of it for a permit",)),
            *_count_and_last("wait", interaction.waits),
            f"reused from run {row_text(interaction.reused, _TITLE)} ({_format_known(interaction.reused_tokens)})"
            if interaction.reused
            else format_tokens(
                interaction.input_tokens,
                interaction.output_tokens,
                interaction.reasoning_tokens,
                interaction.cached_tokens,
            ),
            *(() if reason is None else (reason,)),
        ),
        is_bad=reason is not None,
    )
    if interaction.reasoning:
        title = f"reasoning: {row_text(interaction.reasoning, _QUOTE)}"
        yield TreeRow(depth=depth + 1, kind="reasoning", title=title)
    for call in interaction.tool_calls:
        if not (
            left and call.tool_name in _DELEGATING and (call.outcome == "unknown" or call.result == left[0].result)
        ):
            yield _tool_row(call, depth + 1)
            continue
        delegation = left.popleft()
        # The refusal is an answer of the tool (S-EVT-14), so only both together show that no worker was called.
        is_refused = call.outcome == "success" and not delegation.succeeded
        yield _tool_row(call, depth + 1, is_refused=is_refused)
        yield from _delegation_rows(delegation, depth + 2, is_refused=is_refused)


def _delegation_rows(delegation: DelegationTrace, depth: int, *, is_refused: bool = False) -> Iterator[TreeRow]:
    """Return the rows of a worker and of its actions, unless these follow the delegating task."""
    worker = delegation.worker_trace
    outcome = "success" if delegation.succeeded else "refused" if is_refused else "failure"
    shown = (outcome, f"depth {delegation.depth + 1}")
    if worker is not None:
        first, *rows = _task_rows(worker, is_failed=False, depth=depth, more=shown)
        yield replace(first, is_bad=not delegation.succeeded)
        yield from rows
        return
    title = f"{row_text(delegation.worker_role or '?', _TITLE)}: {row_text(delegation.task_description, _TITLE)}"
    details = (format_seconds(delegation.duration), *shown)
    yield TreeRow(depth=depth, kind="task", title=title, details=details, is_bad=not delegation.succeeded)


def _tool_row(call: ToolCallTrace, depth: int, *, is_refused: bool = False) -> TreeRow:
    outcome = "refused" if is_refused else call.outcome
    return TreeRow(
        depth=depth,
        kind="tool",
        title=f"{row_text(call.tool_name, _TITLE)}({row_text(call.arguments, _TITLE)}) -> {row_text(call.result, _QUOTE)}",
        details=(
            format_seconds(call.duration),
            outcome,
            *(f"repaired {row_text(each, _TITLE)}" for each in call.repairs),
            *(f"returned {_attachment_text(each)}" for each in call.attachments),
            *_count_and_last("line", call.log),
        ),
        is_bad=outcome != "success",
    )


def _attachment_text(reference: Mapping[str, object]) -> str:
    name, media_type = (row_text(as_text(reference.get(key)), _TITLE) for key in ("name", "media_type"))
    return f"{name} ({media_type}, {as_count(reference.get('size_bytes')):,} bytes)"


def _answers_by_model(answers: Mapping[str, int] | None) -> tuple[str, ...]:
    shown = [f"{count:,} by {row_text(model, _TITLE)}" for model, count in (answers or {}).items()]
    return (", ".join(shown),) if shown else ()


def _count_and_last(word: str, texts: Sequence[str]) -> tuple[str, ...]:
    if not texts:
        return ()
    count = f"{format_count(len(texts), word)}{', the last' if len(texts) > 1 else ''}"
    return (f"{count}: {row_text(texts[-1], _TITLE)}",)


_REFLECTION_LENGTH = 120


def reflection_rows(facts: Iterable[Fact]) -> tuple[TreeRow, ...]:
    made: dict[str, ReflectionRecorded] = {}
    stored: set[str] = set()
    for fact in facts:
        if isinstance(fact.data, ReflectionRecorded):
            made[fact.instance] = fact.data
        elif isinstance(fact.data, ReflectionStored):
            stored.add(fact.instance)
    return tuple(_reflection_row(instance, data, is_stored=instance in stored) for instance, data in made.items())


def _reflection_row(instance: str, data: ReflectionRecorded, *, is_stored: bool) -> TreeRow:
    learned = data.reflection_value
    tokens = data.input_tokens + data.output_tokens
    details = (
        f"execution {learned.run_count:,}",
        f"{len(learned.observations):,} observations",
        f"{len(learned.suggestions):,} suggestions",
        *((f"{tokens:,} tokens",) if tokens else ()),
        *(() if is_stored else ("not stored",)),
    )
    title = row_text(f"reflected on {reflected_instance(instance)}", _REFLECTION_LENGTH)
    return TreeRow(depth=1, kind="reflection", title=title, details=details, is_bad=not is_stored)


_DIRECTIVE_LENGTH = 200


def directives_in(facts: Iterable[Fact]) -> list[DirectiveFact]:
    return [fact.data for fact in facts if isinstance(fact.data, DirectiveFact)]


def directive_rows(given: Iterable[DirectiveFact]) -> tuple[TreeRow, ...]:
    return tuple(_directive_row(each) for each in given)


def directive_data(given: Iterable[DirectiveFact]) -> dict[str, list[dict[str, object]]]:
    directives: list[dict[str, object]] = []
    switches: list[dict[str, object]] = []
    for each in given:
        by = each.given_by or None
        if isinstance(each, DirectiveRecorded):
            directives.append({"text": each.text, "expires_at": _instant(each), "given_by": by})
        else:
            switches.append({"model": each.model, "agent": each.agent, "given_by": by})
    found = {"directives": directives, "model_switches": switches}
    return {name: rows for name, rows in found.items() if rows}


def _directive_row(given: DirectiveFact) -> TreeRow:
    if isinstance(given, ModelSwitched):
        whose = "all agents" if given.agent is None else row_text(given.agent, _DIRECTIVE_LENGTH)
        chosen = "own" if given.model is None else row_text(given.model, _DIRECTIVE_LENGTH)
        by = (row_text(given.given_by, _DIRECTIVE_LENGTH),) if given.given_by else ()
        return TreeRow(depth=1, kind="directive", title=f"model of {whose}: {chosen}", details=by)
    until = _instant(given)
    details = tuple(filter(None, (row_text(given.given_by, _DIRECTIVE_LENGTH), f"until {until}" if until else "")))
    return TreeRow(depth=1, kind="directive", title=f"told: {row_text(given.text, _DIRECTIVE_LENGTH)}", details=details)


def _instant(given: DirectiveRecorded) -> str | None:
    if given.expires_at is None:
        return None
    return datetime.fromtimestamp(given.expires_at, UTC).isoformat(timespec="seconds")
