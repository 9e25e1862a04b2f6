"""The demo's team: a reader, an editor, levels of notes; any number of passages."""

from __future__ import annotations

import pytest

from ensemble_ray import ChatResponse, TokenUsage
from ensemble_ray.cli.demo import BUDGET_TOKENS, Passage, digest_team, render_digest, whole_sentences
from ensemble_ray.testing import ScriptedModel
from tests.command_line import Call


def _passages(count: int) -> list[Passage]:
    return [Passage(label=f"page {number}", text=f"Text {number}.") for number in range(1, count + 1)]


@pytest.mark.parametrize(("count", "editions"), [(1, 1), (2, 1), (9, 3), (70, 15)])
def test_one_digest_is_left_when_there_are_many_passages(count: int, editions: int) -> None:
    """S-MR-42, S-MR-43: groups of notes fit the budget, and groups of groups; the last task gives the digest."""
    tokens = TokenUsage(input_tokens=10, output_tokens=BUDGET_TOKENS // 6)
    readers = ScriptedModel(
        otherwise=lambda call: ChatResponse(text=f"Note on {call.text.split(chr(39))[1]}.", usage=tokens)
    )
    editor = ScriptedModel(otherwise=lambda _: ChatResponse(text="All of it. And mo", usage=tokens))
    passages = _passages(count)
    team = digest_team(passages, reader_llm=readers, editor_llm=editor, max_parallel_tasks=4)
    output = team.run(runtime="inline")
    assert len(readers.calls) == count
    assert len(editor.calls) == editions
    assert output.raw == "All of it. And mo"
    lines = render_digest(passages, output).splitlines()
    assert lines[:6] == ["Digest", "", "All of it.", "", "Notes", ""]
    assert lines[6 : 6 + count] == [f"- page {number}: Note on page {number}." for number in range(1, count + 1)]
    tree = lines[6 + count :]
    assert tree[:3] == ["", "Tree", ""]
    assert tree[3].startswith(f"level 0  {count} map")
    assert "1 final-reduce" in tree[-1]


def test_the_editor_is_given_notes_and_not_the_passages() -> None:
    """S-MR-118: or its window would overflow."""
    readers, editor = ScriptedModel(otherwise=lambda _: "A note."), ScriptedModel(otherwise=lambda _: "All.")
    passages = [Passage(label="a", text="SECRET"), Passage(label="b", text="SECRET")]
    team = digest_team(passages, reader_llm=readers, editor_llm=editor, max_parallel_tasks=4)
    team.run(runtime="inline")
    prompt = str(editor.calls[0].messages)
    assert "SECRET" not in prompt
    assert "text about 'a' says. ..." in prompt
    assert "A note." in prompt


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two. Thr", "One. Two."),
        ("One", "One"),
        ("Version 3.11 is", "Version 3.11 is"),
        ("1. One. 2. Two. 3. Thr", "1. One. 2. Two."),
        ("1. One. 2.", "1. One."),
        ('He said "no." And', 'He said "no."'),
        ("\u4e00\u4e8c\u3002\u4e09", "\u4e00\u4e8c\u3002"),
        ("a\n b!", "a b!"),
        ("", ""),
    ],
)
def test_sentences_that_the_token_limit_cut_are_left_out(text: str, expected: str) -> None:
    """A note ends where its last whole sentence does."""
    assert whole_sentences(text) == expected


def test_the_command_is_named_when_the_embedded_model_is_missing(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started."""
    monkeypatch.setattr("ensemble_ray.llm.local.find_weights", lambda: None)
    called = call("demo")
    assert called.code == 2
    assert "ensemble-ray models install" in called.said
    assert "Reading" not in called.said
