"""The examples run as a user runs them: a process of its own, an endpoint named by the environment."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from ensemble_ray import SqliteMemory, ToolCall
from ensemble_ray.testing import Fault, ServedRequest
from ensemble_ray.testing.model_server import Answer
from tests.scenarios import test_agents_of_others, test_shown_examples
from tests.scenarios.running_examples import EXAMPLES, results_of, run_example
from tests.template import run_forked


def test_every_example_is_run_here() -> None:
    """A new example gets its test."""
    names = (*globals(), *vars(test_shown_examples), *vars(test_agents_of_others))
    tested = {name.removeprefix("test_").removesuffix("_runs") + ".py" for name in names if name.endswith("_runs")}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_quickstart_runs(tmp_path: Path) -> None:
    """The first example of the README, with the model's use of the tool."""

    def script(request: ServedRequest) -> Answer:
        if "word_count" in request.tools and not results_of(request):
            return ToolCall("call_1", "word_count", '{"text": "one two three"}')
        return f"Counted {results_of(request)[0]}" if results_of(request) else "Five facts about tides"

    printed, server = run_example("quickstart.py", script, tmp_path, "openai:some-model")
    assert printed.startswith("Counted 3\n")
    assert {request.model for request in server.requests} == {"some-model"}
    assert "Five facts about tides" in str(server.requests[1].messages)
    (record,) = (tmp_path / "runs").iterdir()
    assert f"ensemble-ray trace {record.name}" in printed


def test_parallel_digest_runs(tmp_path: Path) -> None:
    """Every text is read by a task of its own, braces in it included, and the editor is given all of them."""
    texts = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for path in texts:
        path.write_text('Sets are written {like: "this"}.', encoding="utf-8")

    def script(request: ServedRequest) -> Answer:
        return "The digest" if "Join the summaries" in request.text else f"Read {len(request.text)} characters"

    printed, server = run_example("parallel_digest.py", script, tmp_path / "home", "openai:m", *map(str, texts))
    assert printed.splitlines()[-1] == "The digest"
    assert [line.partition(":")[0] for line in printed.splitlines()[2:3]] == ["[3/3] Editor"]
    assert 'Sets are written {like: "this"}.' in server.requests[0].text
    assert server.requests[-1].text.count("Read ") == 2


def test_custom_tool_runs(tmp_path: Path) -> None:
    """A function, a function in another process, and a typed tool, called by name and told to a listener."""
    asked = [
        [
            ToolCall("call_1", "price_of", '{"item": "tea"}'),
            ToolCall("call_2", "price_of", '{"item": "gold"}'),
            ToolCall("call_3", "count_primes", '{"below": 1000}'),
        ],
        [ToolCall("call_4", "order", '{"item": "tea", "amount": 2}')],
    ]

    def script(request: ServedRequest) -> Answer:
        turn = {0: 0, 3: 1}.get(len(results_of(request)))
        return "All done" if turn is None else asked[turn]

    printed, server = run_example("custom_tool.py", script, tmp_path, "openai:m")
    assert printed.splitlines() == [
        'price_of({"item": "tea"}) -> tea costs 3.20 [success]',
        'price_of({"item": "gold"}) -> Error: no item \'gold\'. Known: rice, tea [failure]',
        'count_primes({"below": 1000}) -> 168 [success]',
        'order({"item": "tea", "amount": 2}) -> Ordered 2 x tea [success]',
        "",
        "All done",
    ]
    offered = json.dumps(server.requests[0].body["tools"])
    assert "Name of the item, for example tea" in offered


def test_handler_pipeline_runs(tmp_path: Path) -> None:
    """Three tasks without a model, one with; the last is given what the others made."""
    printed, server = run_example("handler_pipeline.py", lambda _: "It falls by 5.5 m", tmp_path, "openai:m")
    assert printed.splitlines() == [
        'measure: {"place":"Brest","high_m":6.9,"low_m":1.4}',
        "range: 5.5",
        "sentence: It falls by 5.5 m",
    ]
    (request,) = server.requests
    assert "5.5" in request.text


@pytest.mark.parametrize("arguments", [("openai:m",), ()], ids=["model given", "default model"])
def test_streaming_runs(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Tokens are printed as they come, task after task; the output is the last item."""

    def script(request: ServedRequest) -> Answer:
        return "The title" if "a title" in request.text else "Four lines\nabout tides"

    printed, server = run_example("streaming.py", script, tmp_path, *arguments)
    assert printed == ("\n[Poet] Four lines\nabout tides\n[Poet] The title\n\n2 model calls, 30 tokens\n")
    assert all(request.stream for request in server.requests)


def test_newsroom_runs(tmp_path: Path) -> None:
    """A manager that writes too early is put right, and everybody's part is printed."""

    def delegation(number: int, role: str) -> ToolCall:
        arguments = {"agent_role": role, "task_description": f"part of {role}"}
        return ToolCall(f"call_{number}", "delegate_task", json.dumps(arguments))

    def script(request: ServedRequest) -> Answer:
        results = results_of(request)
        if "delegate_task" in request.tools:
            asked = ["Writer", "Researcher", "Analyst", "Writer"]
            return "The article" if len(results) == len(asked) else delegation(len(results), asked[len(results)])
        if "search_archive" in request.tools and not results:
            return ToolCall("call_0", "search_archive", '{"words": "boats"}')
        return results[0] if results else "Two sentences"

    printed, _ = run_example("newsroom.py", script, tmp_path, "openai:m")
    lines = printed.splitlines()
    assert (
        lines[0]
        == "!! Writer refused: Delegation rejected by policy: Cannot delegate to 'Writer': stage 1 is not yet complete"
    )
    assert lines[1:3] == [
        "-> Researcher: part of Researcher",
        "<- Researcher: Fishers' union: Eleven boats were damaged. The lower wall turned the water into the harbour, the fishers say.",
    ]
    assert "The article" in lines
    (record,) = (tmp_path / "runs").iterdir()
    assert lines[-1] == (
        f"Worked, in this order: Researcher, Analyst, Writer. All of it: ensemble-ray trace {record.name}"
    )


def test_map_reduce_runs(tmp_path: Path) -> None:
    """S-MR-118: rows of a file are read, and no review travels up to the editor."""
    file = tmp_path / "reviews.jsonl"
    file.write_text(
        "\n".join(json.dumps({"text": f"Lid {number} broke {{x}}"}) for number in range(3)), encoding="utf-8"
    )

    def script(request: ServedRequest) -> Answer:
        return "Lids: 3" if "Join the notes" in request.text else "blames the lid"

    printed, server = run_example("map_reduce.py", script, tmp_path / "home", "openai:m", str(file))
    lines = printed.splitlines()
    assert sorted(line.partition(":")[0] for line in lines[:4]) == ["final-reduce", "map-0", "map-1", "map-2"]
    assert lines[4:] == ["", "Lids: 3"]
    asked = [request.text for request in server.requests]
    assert sum("broke {x}" in text for text in asked) == 3
    assert asked[-1].count("blames the lid") == 3
    assert "broke" not in asked[-1]


def test_writer_critic_runs(tmp_path: Path) -> None:
    """S-LOOP-100: the writer is shown the critic's words, and the loop ends with the round that is approved."""
    critic = iter(["Too dry.", "APPROVED"])

    def script(request: ServedRequest) -> Answer:
        if "Criticise the draft" in request.text:
            return next(critic)
        return "Second draft" if "Too dry." in request.text else "First draft"

    printed, server = run_example("writer_critic.py", script, tmp_path, "openai:m")
    assert printed.splitlines() == [
        "Round 1 of 5: Too dry.",
        "Round 2 of 5: APPROVED",
        "",
        "Second draft",
        "",
        "Ended by: predicate",
    ]
    assert len(server.requests) == 4


def test_retry_until_valid_runs(tmp_path: Path) -> None:
    """S-LOOP-61: a tour that is too long is planned again; one that never fits is an error."""
    hours = iter([11.0, 7.5])

    def script(request: ServedRequest) -> Answer:
        del request
        return json.dumps({"stops": ["A", "B", "C", "D"], "hours": next(hours)})

    printed, server = run_example("retry_until_valid.py", script, tmp_path, "openai:m")
    assert printed == "A - B - C - D: 7.5 h, attempt 2\n"
    assert len(server.requests) == 2


def test_debate_runs(tmp_path: Path) -> None:
    """S-LOOP-72: the judge is given every round of both sides."""
    spoken = iter(range(1, 7))

    def script(request: ServedRequest) -> Answer:
        return "The sceptic" if "Decide who argued better" in request.text else f"Argument {next(spoken)}"

    printed, server = run_example("debate.py", script, tmp_path, "openai:m")
    assert printed == "The sceptic\n"
    assert all(f"Argument {number}" in server.requests[-1].text for number in range(1, 7))


def test_tool_router_runs(tmp_path: Path) -> None:
    """S-GRAPH-42: each answer of the triage names the next state, and the last one ends the graph."""
    decisions = iter(["DATE", "CALCULATE", "ANSWER 792"])

    def script(request: ServedRequest) -> Answer:
        return next(decisions) if "Say CALCULATE" in request.text else "33 days"

    printed, _ = run_example("tool_router.py", script, tmp_path, "openai:m")
    assert printed.splitlines() == [
        "1. decide -> date",
        "2. date -> decide",
        "3. decide -> calculate",
        "4. calculate -> decide",
        "5. decide -> __END__",
        "",
        "ANSWER 792",
    ]


def test_three_phases_runs(tmp_path: Path) -> None:
    """S-PHASE-81, S-PHASE-87: the review sends its own phase back, then the one before."""
    decisions = iter(["RETRY: shorter", "RETRY_PREDECESSOR outline: name the moon", "APPROVE"])

    def script(request: ServedRequest) -> Answer:
        if "May the article be printed?" in request.text:
            return next(decisions)
        if "Write the article" in request.text:
            return "A short article" if "shorter" in request.text else "The article"
        return "Outline with the moon" if "name the moon" in request.text else "Facts"

    printed, server = run_example("three_phases.py", script, tmp_path, "openai:m")
    lines = printed.splitlines()
    assert sorted(lines[:3]) == [
        "outline: completed after 2 attempt(s)",
        "research: completed after 1 attempt(s)",
        "write: completed after 3 attempt(s)",
    ]
    assert lines[-1] == "The article"
    assert "Outline with the moon" in server.requests[-2].text


def test_remembering_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run is shown what the first one noted, and the command line shows both."""
    monkeypatch.chdir(tmp_path)

    def script(request: ServedRequest) -> Answer:
        return "The answer" if "Answer the customer as" in request.text else "Likes short answers"

    first, server = run_example("remembering.py", script, tmp_path / "home", "Keep it short", "openai:m")
    assert first == "The answer\n"
    assert "## Memory: customer" not in server.requests[0].text
    _, server = run_example("remembering.py", script, tmp_path / "home", "How do tides work?", "openai:m")
    assert "## Memory: customer" in server.requests[0].text
    assert "Likes short answers" in server.requests[0].text
    assert SqliteMemory(tmp_path / "memory.db").scopes() == {"customer": 2}


def test_loop_per_row_runs(tmp_path: Path) -> None:
    """S-MR-190: each row's slogan is written again until its critic approves, and is what the row gives."""

    def script(request: ServedRequest) -> Answer:
        if "Write a slogan for this product" in request.text and "Criticise the slogan" not in request.text:
            return "Again better" if "Loop iteration" in request.text else "A slogan"
        return "APPROVED" if "Again better" in request.text else "Too short"

    printed, server = run_example("loop_per_row.py", script, tmp_path, "openai:m")
    assert printed.count("Again better") == 3
    assert len(server.requests) == 12


def test_describe_photos_runs(tmp_path: Path) -> None:
    """S-ATT-80, S-ATT-82: each picture is sent with its name, and an empty file is left out with the reason."""

    def script(request: ServedRequest) -> Answer:
        (picture,) = request.attachments
        return f"A square of {picture.size_bytes} bytes"

    printed, server = run_example("describe_photos.py", script, tmp_path, "openai:m")
    lines = sorted(printed.splitlines())
    assert [line.partition(":")[0] for line in lines] == ["broken.png", "sand.png", "sea.png", "sun/evening.png"]
    assert lines[0] == "broken.png: left out, File 'broken.png' is empty"
    assert all("A square of" in line for line in lines[1:])
    assert len(server.requests) == 3


def test_fallback_chain_runs(tmp_path: Path) -> None:
    """S-FBK-10: the small model answers what the large one refuses."""

    def script(request: ServedRequest) -> Answer:
        is_refused = request.model == "large" and "neap" in request.text
        return Fault(status=403) if is_refused else f"An answer of {request.model}"

    printed, _ = run_example("fallback_chain.py", script, tmp_path, "openai:large", "openai:small")
    assert printed.splitlines() == [
        "large: An answer of large",
        "small: An answer of small",
        "large: An answer of large",
        "45 tokens, cost unknown",
    ]


def test_batch_labels_runs(tmp_path: Path) -> None:
    """S-BAT-13: all labels come in one batch."""

    def script(request: ServedRequest) -> Answer:
        return "good" if "fine" in request.text else "bad"

    printed, server = run_example("batch_labels.py", script, tmp_path, "openai:m", "", "0.05")
    assert printed.splitlines()[:2] == ["bad   The kettle leaks.", "good  A fine lamp, and it arrived early."]
    assert printed.splitlines()[3:] == ["3 answers, 0 of an earlier run"]
    (batch,) = server.batches
    assert len(batch.custom_ids) == 3


def test_approval_runs(tmp_path: Path) -> None:
    """S-REV-114, S-REV-117: written at one terminal, decided at another, and put into a letter."""

    def script(request: ServedRequest) -> Answer:
        prompt = str(request.messages[-1]["content"])
        return "Dear customer" if "into a letter" in prompt else "Lamps for 40 EUR"

    home = tmp_path / "home"
    printed, server = run_example("approval.py", script, home, "lamps", "", "openai:m")
    assert printed.startswith("May this offer go out?\n\nLamps for 40 EUR\n")
    assert len(server.requests) == 1
    command = printed.partition("Decide:")[2].split()[:5]
    _decide(home, command)
    printed, server = run_example("approval.py", script, home, "--go-on", command[2], "openai:m")
    assert (printed, len(server.requests)) == ("Dear customer\n", 1)


def _decide(home: Path, command: list[str], *, text: Path | None = None) -> None:
    """Decide as an example says, or with a text in place of the approval."""
    arguments = command[1:5] if text is None else [*command[1:4], "edit", str(text)]
    arguments += command[5:]
    decided = run_forked(
        [sys.executable, "-m", "ensemble_ray.cli", *arguments],
        env={**os.environ, "ENSEMBLE_RAY_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert decided.returncode == 0, decided.stderr


def test_parallel_gates_runs(tmp_path: Path) -> None:
    """S-REV-116, S-REV-117: three gates are open at a time, are decided in any order, and nothing is written again."""

    def script(request: ServedRequest) -> Answer:
        languages = re.findall(r"slogan in (\w+) for tea", request.text)
        return "The plan" if len(languages) != 1 else f"Tea, {languages[0]}"

    home, edited = tmp_path / "home", tmp_path / "slogan"
    edited.write_text("Du thé !\n", encoding="utf-8")
    printed, server = run_example("parallel_gates.py", script, home, "tea", "", "openai:m")
    gates = {line.partition(":")[0]: line for line in printed.splitlines() if " editor: " in line}
    commands = [shlex.split(line) for line in printed.splitlines() if "ensemble-ray review " in line]
    assert sorted(gates) == ["English editor", "French editor", "German editor"]
    assert gates["French editor"].endswith("Good French? Tea, French")
    assert len(server.requests) == 3
    by_role = dict(zip(list(gates), commands, strict=True))
    run_id = commands[0][2]
    _decide(home, by_role["German editor"])
    _decide(home, by_role["French editor"], text=edited)
    printed, server = run_example("parallel_gates.py", script, home, "--go-on", run_id, "openai:m")
    assert [line for line in printed.splitlines() if " editor: " in line] == [gates["English editor"]]
    assert server.requests == []
    _decide(home, by_role["English editor"])
    printed, server = run_example("parallel_gates.py", script, home, "--go-on", run_id, "openai:m")
    assert (printed, len(server.requests)) == ("The plan\n", 1)
    assert "Du thé !" in server.requests[0].text
    assert "Tea, French" not in server.requests[0].text


def test_improving_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-REFL-8, S-REFL-30: the second run is told what the first one taught, and teaches more."""
    monkeypatch.chdir(tmp_path)

    def script(request: ServedRequest) -> Answer:
        if "You improve the instructions" in request.text:
            return "REFINED_DESCRIPTION:\nExplain it with the sea\nSUGGESTIONS:\n- use a picture"
        return "The moon pulls the sea"

    first, server = run_example("improving.py", script, tmp_path / "home", "tides", "openai:m")
    lines = ["Learned in execution 1: Explain it with the sea", "- use a picture", "The moon pulls the sea"]
    assert first.splitlines() == lines
    assert "## Task Improvement Notes" not in server.requests[0].text
    second, server = run_example("improving.py", script, tmp_path / "home", "tides", "openai:m")
    assert second.splitlines()[0] == "Learned in execution 2: Explain it with the sea"
    assert "Explain it with the sea" in server.requests[0].text


def test_mcp_tools_runs(tmp_path: Path) -> None:
    """S-INT-1: the agent starts the server, and uses its tool under the prefix."""

    def script(request: ServedRequest) -> Answer:
        if results_of(request):
            return f"Yes, {results_of(request)[0]}."
        assert request.tools == ("shop_in_stock",)
        return ToolCall("call_1", "shop_in_stock", '{"item": "tea"}')

    printed, _ = run_example("mcp_tools.py", script, tmp_path, "openai:some-model")
    assert printed == "Yes, 12.\n"


def test_run_deps_runs(tmp_path: Path) -> None:
    """Tools read and change the orders of the run's user alone, in a database that the run opens."""
    asked = [ToolCall("c1", "list_orders", "{}"), ToolCall("c2", "cancel_order", '{"item": "rice"}')]
    asked.append(ToolCall("c3", "cancel_order", '{"item": "salt"}'))

    def script(request: ServedRequest) -> Answer:
        return asked[len(results_of(request))] if len(results_of(request)) < len(asked) else "Your rice is cancelled"

    printed, server = run_example("run_deps.py", script, tmp_path, "openai:m")
    assert results_of(server.requests[-1]) == [
        '["tea: sent","rice: waits for payment"]', "rice is cancelled", "there is no order of salt",
    ]  # fmt: skip
    assert printed.splitlines() == [
        "Your rice is cancelled", "('ada', 'tea', 'sent')", "('ada', 'rice', 'cancelled')", "('bob', 'salt', 'sent')",
    ]  # fmt: skip


def test_evaluate_team_runs(tmp_path: Path) -> None:
    """Two prompts are evaluated, by fields, a function and a judge; the second reads one bill better. A second start asks nothing."""

    def script(request: ServedRequest) -> Answer:
        if "Judge an output" in request.text:
            return '{"reason": "as in the bill", "score": 1}'
        if "12.50" in request.text:
            return '{"total": 12.5, "currency": "EUR"}'
        if "rice" in request.text:
            return '{"total": 7, "currency": "USD"}' if "Add up" in request.text else '{"total": 4, "currency": "USD"}'
        return '{"total": 20, "currency": "GBP"}'

    printed, server = run_example("evaluate_team.py", script, tmp_path, "openai:m")
    assert len(server.requests) == 2 * 2 * (3 + 3)
    assert "Evaluation bills-1: 3 cases, 6 runs" in printed
    assert re.search(r"json_fields +3 +0.833 +1.000 +\+0.167", printed)
    again, server = run_example("evaluate_team.py", script, tmp_path, "openai:m")
    assert (again, len(server.requests)) == (printed, 0)
