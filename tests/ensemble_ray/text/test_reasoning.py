"""Reasoning in tags: what of a model's text is its answer (37, section 1)."""

from __future__ import annotations

import pytest

from ensemble_ray.text.answers import ReasoningSplitter, split_reasoning

_SPLIT = (
    ("<think>\nPerhaps 41?\n</think>\n\n42", "Perhaps 41?", "42"),
    ("  \n<think>a</think>b", "a", "b"),
    ("<THINK>a</Think> b", "a", "b"),
    ("<thinking>a</thinking>b", "a", "b"),
    ("<reasoning>a</reasoning>\nb", "a", "b"),
    ("<thought>a</thought>\nb\n", "a", "b\n"),
    ("<think>a</think>\n<think>b</think>\nc", "a\n\nb", "c"),
    ("<think></think>\n\nc", None, "c"),
    ("<think>use </thinking> here</think>c", "use </thinking> here", "c"),
    ("<think>a < b </ think> </thin", "a < b </ think> </thin", ""),
    ("<think>", None, ""),
    ("<think>a</think>", "a", ""),
    ("</think>\n\nc", None, "c"),
    ("<think>secret plan</think>\n<", "secret plan", "<"),
    ("<think>a</think></", "a", "</"),
    ("<think>a</think>\n<think>b</think> <t", "a\n\nb", "<t"),
    ("<think>a</think><think></th", "a</th", ""),
    ("<think>a</think>```\n<think>b</think>\n```", "a", "```\n<think>b</think>\n```"),
)
_LONE = (
    ("Perhaps 41?\n</think>\n\n42", "Perhaps 41?", "42"),
    ("Perhaps 41.</think>42", "Perhaps 41.", "42"),
    ("Perhaps 41 </think>\n42", "Perhaps 41", "42"),
    ("{not json}\n</think>\n42", "{not json}", "42"),
)
_ANSWERS = (
    "",
    "42",
    "a < b",
    " \n42 ",
    "<thin",
    "<thinker>42</thinker>",
    "Models write <think> and </think> around it.",
    "The tag is </think>, which ends it.",
    'Cut at "</think>" please',
    "Write `a</think>` there",
    "```\na\n</think>\n```\nSo it is.",
    '{"html": "a</think>b"}',
    "Sure:\n<think>a</think>\nb",
    " " * 300 + "<think>a</think>b",
    "```xml\n<think>a</think>\n```",
)


@pytest.mark.parametrize(("text", "reasoning", "answer"), [*_SPLIT, *_LONE])
def test_reasoning_is_apart_from_the_answer(text: str, reasoning: str | None, answer: str) -> None:
    """S-LLM-1: tags at the beginning, several blocks, one that is not closed, a closing tag alone."""
    assert split_reasoning(text) == (reasoning, answer)


@pytest.mark.parametrize("text", _ANSWERS)
def test_a_text_that_only_mentions_a_tag_is_an_answer(text: str) -> None:
    """S-LLM-1: in code, in JSON, in a sentence, or behind words."""
    assert split_reasoning(text) == (None, text)


@pytest.mark.parametrize("text", [*(text for text, *_ in _SPLIT), *_ANSWERS])
def test_a_stream_is_split_like_the_whole_text_wherever_it_is_cut(text: str) -> None:
    """S-LLM-2: two pieces cut anywhere, and single characters, give the parts of the whole."""
    cuts = [[text[:cut], text[cut:]] for cut in range(len(text) + 1)]
    reasoning, answer = split_reasoning(text)
    for pieces in (*cuts, list(text)):
        splitter = ReasoningSplitter()
        parts = [part for piece in pieces for part in splitter.feed(piece)] + splitter.finish()
        assert "".join(part for part, is_reasoning in parts if not is_reasoning) == answer
        said = "".join(part for part, is_reasoning in parts if is_reasoning)
        assert "".join(said.split()) == "".join((reasoning or "").split())


def test_a_stream_passes_reasoning_and_answer_on_as_they_come() -> None:
    """S-LLM-2: less than a tag is held back."""
    splitter = ReasoningSplitter()
    assert splitter.feed("<think>a long thought, ") == [("a long thought, ", True)]
    assert splitter.feed("and a < b </thi") == [("and a < b ", True)]
    assert splitter.feed("s</think>\n\nfour") == [("</this", True), ("four", False)]
    assert splitter.feed("ty <think>") == [("ty <think>", False)]
    assert splitter.finish() == []
