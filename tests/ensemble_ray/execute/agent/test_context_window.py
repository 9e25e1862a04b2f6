"""Requests that are held to a context budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray import ChatMessage, Task, TaskReflection, ToolSpec, ValidationError
from ensemble_ray.execute.agent.context_window import ContextWindow, estimated_input
from ensemble_ray.prompts.task import (
    PromptPart,
    context_part,
    fixed_parts,
    memory_sections,
    render_parts,
    scope_sections,
    user_prompt_parts,
)
from ensemble_ray.values.memory import RecalledMemory
from tests.builders import call
from tests.ensemble_ray.prompts.test_memory import OUTPUT

TASK = Task(
    description="Write",
    expected_output="Prose",
    output_type=dict,
    revision_feedback="too long",
    prior_attempt_output="Before",
)
TOOL = ToolSpec(name="search", description="Searches.", parameters={"type": "object"})
LENGTHS = st.lists(st.integers(1, 6000), max_size=4)


def parts(context: list[int], notes: list[int], facts: list[int]) -> list[PromptPart]:
    """What a prompt is made of, texts by their lengths."""
    memory = RecalledMemory(
        scopes=(("notes", tuple("n" * size for size in notes)),) if notes else (),
        long_term=tuple("l" * size for size in facts),
        entities=(("Acme", "a firm"),),
    )
    outputs = [OUTPUT.model_copy(update={"raw": "c" * size}) for size in context]
    sections = [*scope_sections(memory), context_part(outputs), *memory_sections(memory)]
    return [*(each for each in sections if each.pieces), *fixed_parts(TASK)]


def history_of(answers: list[int]) -> list[ChatMessage]:
    """A conversation with answers of these lengths."""
    turns = [
        (ChatMessage(role="user", content=f"Question {number}?"), ChatMessage(role="assistant", content="h" * size))
        for number, size in enumerate(answers)
    ]
    return [message for turn in turns for message in turn]


def conversation(given_parts: list[PromptPart], history: list[ChatMessage], results: list[int]) -> list[ChatMessage]:
    """System prompt, history, user prompt, and calls of a tool with results of these lengths."""
    made = [
        ChatMessage(role="system", content="You are Writer."),
        *history,
        ChatMessage(role="user", content=render_parts(given_parts)),
    ]
    for number, size in enumerate(results):
        asked = call("search", '{"q": 1}', number=number)
        made += [
            ChatMessage(role="assistant", tool_calls=(asked,)),
            ChatMessage(role="tool", content="t" * size, tool_call_id=asked.id, name="search"),
        ]
    return made


@pytest.mark.heavy
@given(st.tuples(LENGTHS, LENGTHS, LENGTHS), LENGTHS, LENGTHS, st.integers(1, 5000))
def test_a_request_is_never_above_its_budget(
    texts: tuple[list[int], list[int], list[int]], answers: list[int], results: list[int], budget: int
) -> None:
    """S-MEM-132, S-MEM-135, S-MEM-137: what is never cut is whole, turns stay turns, each call keeps its result."""
    given_parts, history = parts(*texts), history_of(answers)
    messages = conversation(given_parts, history, results)
    window = ContextWindow("write", budget, parts=given_parts, history=history, tools=[TOOL])
    try:
        fitted = window.fit(messages)
    except ValidationError as error:
        smallest = int(str(error).rpartition(" at least ")[2].partition(" ")[0].replace(",", ""))
        assert smallest > budget
        window = ContextWindow("write", smallest, parts=given_parts, history=history, tools=[TOOL])
        fitted, budget = window.fit(messages), smallest  # what it says is enough
    sent = list(fitted.messages)
    assert estimated_input(sent, [TOOL]) <= budget
    assert (fitted.messages is messages) == (estimated_input(messages, [TOOL]) <= budget or sent == messages)
    assert sent[0] == messages[0]
    asked = next(message for message in sent[1:] if "## Task\n" in (message.content or ""))
    assert (asked.content or "").endswith(render_parts(fixed_parts(TASK)))
    before = sent[1 : sent.index(asked)]
    assert [message.role for message in before] == ["user", "assistant"] * (len(before) // 2)
    after = sent[sent.index(asked) + 1 :]
    assert [(each.role, each.tool_calls, each.tool_call_id) for each in after] == [
        (each.role, each.tool_calls, each.tool_call_id) for each in messages[2 + len(history) :]
    ]
    assert window.fit(messages).messages == fitted.messages
    assert any(cut.cut_tokens for cut in fitted.cuts) == (sent != messages)


def test_the_oldest_turns_give_way_first() -> None:
    """S-MEM-133, S-MEM-135: and what is left of the conversation says what was before it."""
    history, fixed = history_of([2000, 2000, 2000]), fixed_parts(TASK)
    messages = conversation([*fixed], history, [])
    needed = estimated_input(messages, [])
    window = ContextWindow("write", needed - 300, parts=fixed, history=history)
    shortened = [message.content or "" for message in window.fit(messages).messages[2:7:2]]
    assert [len(text) < 2000 for text in shortened] == [True, False, False]
    window = ContextWindow("write", needed - 1000, parts=fixed, history=history)
    left = window.fit(messages).messages[1:-1]
    assert left[0].content == "[... 1 entry with 500 tokens left out ...]\n\nQuestion 1?"
    assert "tokens left out" in (left[1].content or "")
    assert (left[2].content or "", len(left)) == ("Question 2?", 4)


def test_the_oldest_results_give_way_first() -> None:
    """S-MEM-133, S-MEM-135: the newest one is whole as long as it can be."""
    fixed = fixed_parts(TASK)
    messages = conversation([*fixed], [], [4000, 4000])
    fitted = ContextWindow("write", estimated_input(messages, []) - 600, parts=fixed).fit(messages)
    texts = [each.content or "" for each in fitted.messages if each.role == "tool"]
    assert (texts[0].count("tokens left out"), texts[1]) == (1, "t" * 4000)
    assert [(cut.label, cut.tokens, cut.cut_tokens > 600) for cut in fitted.cuts] == [
        ("search", 1000, True),
        ("search", 1000, False),
    ]


def test_improvement_notes_give_way_before_context() -> None:
    """S-MEM-133, S-REFL-8: what earlier runs learned is no part of the task itself."""
    notes = TaskReflection(
        refined_description="d" * 3000, refined_expected_output="e", reflected_at=OUTPUT.completed_at, run_count=1
    )
    outputs = [OUTPUT.model_copy(update={"raw": "c" * 1000})]
    prompt = user_prompt_parts(TASK, outputs, notes=notes)
    messages = conversation(prompt, [], [])
    fitted = ContextWindow("write", estimated_input(messages, []) - 300, parts=prompt).fit(messages)
    asked = fitted.messages[1].content or ""
    assert asked.count("tokens left out") == 1
    assert asked.index("c" * 1000) < asked.index("## Task Improvement Notes") < asked.index("tokens left out")
    assert [cut.label for cut in fitted.cuts if cut.cut_tokens] == ["improvement notes"]


def test_a_budget_that_is_too_small_says_what_is_needed() -> None:
    """S-MEM-137: no request is made."""
    given_parts = parts([100], [], [])
    messages = conversation(given_parts, [], [])
    with pytest.raises(
        ValidationError, match=r"Task 'write': context_budget 10 is too small: .* needs at least \d+ tokens$"
    ):
        ContextWindow("write", 10, parts=given_parts, tools=[TOOL]).fit(messages)
