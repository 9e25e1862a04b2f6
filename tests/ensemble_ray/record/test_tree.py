"""The tree for people."""

from datetime import timedelta
from pathlib import Path

import pytest

from ensemble_ray import Agent, ExecutionTrace, InlineRuntime
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.record.trace import fold_trace
from ensemble_ray.record.view.tree import render_tree, tree_rows
from ensemble_ray.testing import ScriptedModel

from .delegating_team import Counted
from .facts_of_runs import altered, begun, completed, ended, failed, intent, model, node, output, result, task_trace

READ, EDIT = node("read", "Read Ray"), node("edit", "Edit Ray", "Editor")


def _finished() -> ExecutionTrace:
    facts = [*begun(READ, EDIT), *completed("read", output("Read Ray", "facts"), 105)]
    return fold_trace([*facts, *completed("edit", output("Edit Ray", "digest\nof Ray"), 110), ended(171.5)])


def test_tree_of_a_finished_run() -> None:
    """S-TRC-2: run, task, model call, tool call; with times, tokens and counts."""
    assert render_tree(_finished()).splitlines() == [
        "Run run-1: parallel, completed  [team team]  [1 min 12 s]  [2 tasks]  [2 model calls]  [200 + 40 tokens]  [2 tool calls]  [0.6 USD]",
        "├─ Reader: Read Ray  [4.00 s]  [1 model call]  [100 + 20 tokens]  [1 tool call]",
        "│  ├─ model call 1: asked for tools  [1.00 s]  [100 + 20 tokens]",
        '│  │  └─ search({"q": 1}) -> 3 hits  [1.00 s]  [success]',
        "│  └─ answer: facts",
        "└─ Reader: Edit Ray  [4.00 s]  [1 model call]  [100 + 20 tokens]  [1 tool call]",
        "   ├─ model call 1: asked for tools  [1.00 s]  [100 + 20 tokens]",
        '   │  └─ search({"q": 1}) -> 3 hits  [1.00 s]  [success]',
        "   └─ answer: digest of Ray",
    ]


async def test_tree_tells_of_the_conversation_that_a_task_continues(tmp_path: Path) -> None:
    """S-DOM-77: how many messages, and the last of them; a task without one has no such line."""
    runtime, agent = (
        InlineRuntime(home=tmp_path),
        Agent(role="Guide", goal="Guide", llm=ScriptedModel("Bern", "Yes\nit is")),
    )
    first = await agent.arun("What is the capital?", runtime=runtime, run_id="first")
    await agent.arun("Is it large?", history=first, runtime=runtime, run_id="second")
    store = SqliteStore(tmp_path)
    texts = [render_tree(fold_trace(await store.facts(run_id))) for run_id in ("first", "second")]
    assert ["continues" in text for text in texts] == [False, True]
    assert "├─ continues a conversation of 2 messages, the last: Bern\n" in texts[1]


def test_tree_of_a_failed_run() -> None:
    """S-TRC-61: what failed is marked, and why."""
    facts = [*begun(READ), *failed("read", 105, trace=task_trace("Read Ray", "")), ended(106, "failed", "error")]
    trace = fold_trace(facts)
    lines = render_tree(trace).splitlines()
    assert lines[0].startswith("Run run-1: parallel, failed")
    assert lines[1].endswith("[failed]")
    assert lines[-1] == "└─ AgentExecutionError: LLM failed  [Read Ray]"
    assert [row.kind for row in tree_rows(trace) if row.is_bad] == ["run", "task", "error"]


def test_tree_of_a_torn_run() -> None:
    """S-TRC-31: it ends in the middle of a tool call; unknown tokens are a question mark."""
    facts = [*begun(READ), altered(model("read#0", 0, 102, calls=["search"]), output_tokens=-1)]
    facts += [intent("read#0", 0, 0, 102)]
    text = render_tree(fold_trace(facts))
    assert "Run run-1: parallel, interrupted" in text
    assert "[100 + ? tokens]" in text
    assert "[interrupted]" in text
    assert "No result was recorded" in text


def test_tree_tells_waits_and_lines_in_the_row_of_their_call() -> None:
    """S-TRC-2, S-DUR-66, S-TOOL-35: how many, and the last one."""
    waits = [["retry", "HTTP 429: slow down", 100.0, 0.5], ["breaker", "circuit breaker open: HTTP 503", 100.5, 5.0]]
    asked = altered(model("read#0", 0, 107, calls=["search"]), retries=1, attempts_failed=["HTTP 429"], waits=waits)
    told = altered(result("read#0", 0, 0, 108), log=["page 1", "page 2\x1b"], repairs=["q: a number in a string"])
    lines = render_tree(fold_trace([*begun(READ), asked, intent("read#0", 0, 0, 107), told])).splitlines()
    assert "  [2 waits, the last: circuit breaker open: HTTP 503, waited 5 s]  [" in lines[2]
    assert lines[3].endswith("[success]  [repaired q: a number in a string]  [2 lines, the last: page 2\\x1b]")


def test_control_characters_do_not_reach_the_terminal() -> None:
    """A model's answer cannot clear the screen, retitle the window or reverse the line."""
    trace = _finished()
    evil = "\x1b[2J\x1b]0;x\x07\u202eabc\x9b\r\nnext"
    task = trace.task_traces[0].replace(final_output=evil, agent_role=evil, task_description=evil)
    text = render_tree(trace.replace(task_traces=[task], ensemble_id=evil))
    assert all(char.isprintable() or char == "\n" for char in text)
    assert len(text.splitlines()) == len(tree_rows(trace.replace(task_traces=[task])))


def test_long_texts_are_cut() -> None:
    """A book as an answer is one line."""
    trace = _finished()
    task = trace.task_traces[0].replace(final_output="word " * 100_000)
    line = render_tree(trace.replace(task_traces=[task])).splitlines()[-1]
    assert line.endswith("word...")
    assert len(line) < 130


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (0.000249, "0.249 ms"), (0.25, "250 ms"), (1, "1.00 s"), (59.994, "59.99 s"), (59.999, "1 min 0 s"), (3605.4, "60 min 5 s")],
)  # fmt: skip
def test_times_are_short_and_exact(seconds: float, text: str) -> None:
    """For people: no zero where something took time, no 60 s."""
    trace = _finished().replace(total_duration=timedelta(seconds=seconds))
    assert tree_rows(trace)[0].details[1] == text


def test_rows_say_where_they_stand() -> None:
    """For whoever draws them with colours."""
    assert [(row.depth, row.kind) for row in tree_rows(_finished())] == [
        (0, "run"),
        *([(1, "task"), (2, "model"), (3, "tool"), (2, "answer")] * 2),
    ]


async def test_delegations_stand_below_their_calls(tmp_path: Path) -> None:
    """S-DUR-74, S-TRC-41: who was asked, what came of it, how deep; peers with what they did, a manager's workers beside it."""
    runtime, store = InlineRuntime(home=tmp_path), SqliteStore(tmp_path)
    await Counted().hierarchy().arun(runtime=runtime, run_id="one")
    facts = await store.facts("one")
    lines = [line.partition("  [")[0] for line in render_tree(fold_trace(facts)).splitlines()]
    assert lines[0] == "Run one: hierarchical, completed"
    (head, *_) = tree_rows(fold_trace(facts))
    assert {"1 task", "6 delegations"} <= set(head.details)
    bare = [line.lstrip("│├└─ ").partition("(")[0].partition(" ->")[0] for line in lines]
    start = next(place for place, text in enumerate(bare) if text.startswith("Manager: "))
    assert bare[start : start + 10] == [
        bare[start], "model call 1: asked for tools",
        "delegate_task", "Researcher: dig", "delegate_task", "Writer: write", "delegate_task", "Nobody: x",
        "delegate_task", "model call 2: asked for tools",
    ]  # fmt: skip
    beside = bare.index("Researcher: dig", start + 10)
    assert bare[beside : beside + 7] == [
        "Researcher: dig", "model call 1: asked for tools", "delegate",
        "Checker: check the site", "model call 1: asked for tools", "delegate", "Writer: note it",
    ]  # fmt: skip
    details = {row.title: row.details for row in tree_rows(fold_trace(facts))}
    assert details["Writer: note it"][1:3] == ("success", "depth 3")
    assert details["Nobody: x"][1:3] == ("refused", "depth 1")
    calls = [row for row in tree_rows(fold_trace(facts)) if row.kind == "tool" and "Nobody" in row.title]
    assert [(row.details[-1], row.is_bad) for row in calls] == [("refused", True)]
    for cut in range(2, len(facts)):  # torn wherever one likes
        assert render_tree(fold_trace(facts[:cut]))
