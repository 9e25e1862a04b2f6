"""A trace as a tree of lines for people. Room: record. Pure.

In: an `ExecutionTrace`, of a live run or folded from a record. Out: rows (depth, title, details) or plain text lines.
Never: colours, terminal sizes, or a control character that a model or a tool put into its text.
"""

from __future__ import annotations

import unicodedata
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

from ensemble_ray.trace import (
    DelegationTrace,
    ErrorTrace,
    ExecutionTrace,
    LlmInteraction,
    TaskTrace,
    ToolCallTrace,
)

__all__ = ["TreeRow", "render_tree", "tree_rows"]

#: Longest text of a row's title and of a quoted answer, characters.
_TITLE = 72
_QUOTE = 100

#: Tools that hand work on; a malformed call of theirs leaves no delegation.
_DELEGATING = frozenset({"delegate", "delegate_task"})

RowKind = Literal["run", "task", "model", "tool", "answer", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRow:
    """One line of the tree."""

    #: 0 is the run
    depth: int
    kind: RowKind
    title: str
    #: times, tokens, counts; shown behind the title
    details: tuple[str, ...] = ()
    #: something went wrong here
    is_bad: bool = False


def tree_rows(trace: ExecutionTrace) -> tuple[TreeRow, ...]:
    """The rows of a trace, top down."""
    return tuple(_rows(trace))


def render_tree(trace: ExecutionTrace) -> str:
    """The tree as text, one row per line, no line feed at the end."""
    rows = tree_rows(trace)
    lines: list[str] = []
    for position, row in enumerate(rows):
        text = "  ".join((row.title, *(f"[{detail}]" for detail in row.details)))
        lines.append(_branches(rows, position) + text)
    return "\n".join(lines)


def _branches(rows: Sequence[TreeRow], position: int) -> str:
    """What stands before a row: for each depth, whether something of that depth is still to come."""
    row = rows[position]
    parts = [("├─ " if _goes_on(rows, position, row.depth) else "└─ ")] if row.depth else []
    parts += ["│  " if _goes_on(rows, position, depth) else "   " for depth in range(row.depth - 1, 0, -1)]
    return "".join(reversed(parts))


def _goes_on(rows: Sequence[TreeRow], position: int, depth: int) -> bool:
    """Whether a later row of that depth belongs to the same parent."""
    for later in rows[position + 1 :]:
        if later.depth < depth:
            return False
        if later.depth == depth:
            return True
    return False


def _rows(trace: ExecutionTrace) -> Iterator[TreeRow]:
    named = (trace.ensemble_id, trace.workflow, str(trace.metadata.get("state", "completed")))
    ensemble_id, workflow, state = (_one_line(text, _TITLE) for text in named)
    yield TreeRow(
        depth=0,
        kind="run",
        title=f"Run {ensemble_id}: {workflow}, {state}",
        details=tuple(_run_details(trace)),
        is_bad=bool(trace.errors),
    )
    failed = {(error.agent_role, error.task_description) for error in trace.errors}
    for task in trace.task_traces:
        yield from _task_rows(task, is_failed=(task.agent_role, task.task_description) in failed)
    for error in trace.errors:
        yield _error_row(error)


def _run_details(trace: ExecutionTrace) -> Iterator[str]:
    metrics, cost = trace.metrics, trace.total_cost_estimate
    yield _seconds(trace.total_duration)
    # The traces of a manager's workers stand beside its own, and are none of the run's tasks.
    yield _count(min(len(trace.task_traces), 1) if trace.workflow == "hierarchical" else len(trace.task_traces), "task")
    yield _count(metrics.total_llm_call_count, "model call")
    yield _tokens(metrics.total_input_tokens, metrics.total_output_tokens)
    if metrics.total_tool_calls:
        yield _count(metrics.total_tool_calls, "tool call")
    if metrics.total_delegations:
        yield _count(metrics.total_delegations, "delegation")
    if cost is not None:
        yield f"{cost.total_cost:f} {cost.currency}"


def _task_rows(task: TaskTrace, *, is_failed: bool, depth: int = 1, more: Sequence[str] = ()) -> Iterator[TreeRow]:
    """A task and what it did; `more` are details of work that was handed on."""
    metrics = task.metrics
    state = "failed" if is_failed else str(task.metadata.get("state", ""))
    details = [_seconds(task.duration), *more]
    if metrics.llm_call_count:
        details += [_count(metrics.llm_call_count, "model call"), _tokens(metrics.input_tokens, metrics.output_tokens)]
    if metrics.retry_count:
        details.append(f"{metrics.retry_count:,} made again")
    if metrics.tool_call_count:
        details.append(_count(metrics.tool_call_count, "tool call"))
    if state:
        details.append(_one_line(state, _TITLE))
    role = _one_line(task.agent_role or "?", _TITLE)
    title = f"{role}: {_one_line(task.task_description, _TITLE)}"
    yield TreeRow(depth=depth, kind="task", title=title, details=tuple(details), is_bad=bool(state))
    left = deque(task.delegations)
    for interaction in task.llm_interactions:
        yield from _interaction_rows(interaction, left, depth + 1)
    for delegation in left:  # of a turn that never came to its end
        yield from _delegation_rows(delegation, depth + 1)
    if task.final_output:
        yield TreeRow(depth=depth + 1, kind="answer", title=f"answer: {_one_line(task.final_output, _QUOTE)}")


def _interaction_rows(interaction: LlmInteraction, left: deque[DelegationTrace], depth: int) -> Iterator[TreeRow]:
    """A model call and its tool calls; of `left`, the task's delegations in order, theirs are taken."""
    what = "answered" if interaction.response_type == "final_answer" else "asked for tools"
    yield TreeRow(
        depth=depth,
        kind="model",
        title=f"model call {interaction.iteration_index + 1}: {what}",
        details=(_seconds(interaction.latency), _tokens(interaction.input_tokens, interaction.output_tokens)),
    )
    for call in interaction.tool_calls:
        yield _tool_row(call, depth + 1)
        if left and call.tool_name in _DELEGATING and (call.outcome == "unknown" or call.result == left[0].result):
            yield from _delegation_rows(left.popleft(), depth + 2)


def _delegation_rows(delegation: DelegationTrace, depth: int) -> Iterator[TreeRow]:
    """Who was asked, and what they did where that does not stand beside the asking task."""
    worker = delegation.worker_trace
    outcome = "success" if delegation.succeeded else "failure"
    told = (outcome, f"depth {delegation.depth + 1}")
    if worker is not None:
        first, *rows = _task_rows(worker, is_failed=False, depth=depth, more=told)
        yield replace(first, is_bad=not delegation.succeeded)
        yield from rows
        return
    title = f"{_one_line(delegation.worker_role or '?', _TITLE)}: {_one_line(delegation.task_description, _TITLE)}"
    details = (_seconds(delegation.duration), *told)
    yield TreeRow(depth=depth, kind="task", title=title, details=details, is_bad=not delegation.succeeded)


def _tool_row(call: ToolCallTrace, depth: int) -> TreeRow:
    return TreeRow(
        depth=depth,
        kind="tool",
        title=f"{_one_line(call.tool_name, _TITLE)}({_one_line(call.arguments, _TITLE)}) -> {_one_line(call.result, _QUOTE)}",
        details=(_seconds(call.duration), call.outcome),
        is_bad=call.outcome != "success",
    )


def _error_row(error: ErrorTrace) -> TreeRow:
    where = _one_line(error.task_description, _TITLE)
    title = f"{_one_line(error.error_type, _TITLE)}: {_one_line(error.message, _QUOTE)}"
    return TreeRow(depth=1, kind="error", title=title, details=(where,) if where else (), is_bad=True)


def _one_line(text: str, length: int) -> str:
    """A text on one line, without control characters, cut to a length."""
    # Cut first: an answer may be as large as a book. Twice the length leaves room for white space that is joined.
    words = " ".join(text[: 2 * length].split())
    clean = "".join("�" if unicodedata.category(char) in {"Cc", "Cf", "Cs"} else char for char in words)
    return clean if len(clean) <= length and len(text) <= 2 * length else f"{clean[:length].rstrip()}..."


def _seconds(duration: timedelta) -> str:
    seconds = duration.total_seconds()
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    minutes, rest = divmod(round(seconds, 2), 60)
    return f"{minutes:.0f} min {rest:.0f} s" if minutes else f"{rest:.2f} s"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _tokens(input_tokens: int, output_tokens: int) -> str:
    known = [f"{count:,}" if count >= 0 else "?" for count in (input_tokens, output_tokens)]
    return f"{known[0]} + {known[1]} tokens"
