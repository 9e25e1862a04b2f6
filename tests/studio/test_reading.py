"""What the page is told of recorded runs, over real HTTP."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from ensemble_ray import (
    Agent,
    Case,
    ChatResponse,
    Ensemble,
    EnsembleError,
    Evaluation,
    GuardrailInput,
    GuardrailOutput,
    GuardrailResult,
    InlineRuntime,
    ModelPrice,
    RunOptions,
    Task,
    TokenUsage,
)
from ensemble_ray.studio.views.steps import CUT
from ensemble_ray.testing import ScriptedModel

from .conftest import Serve

API = "api/studio"


def ids(answer: httpx.Response) -> list[str]:
    """The ids of the runs of a page."""
    return [run["run_id"] for run in answer.json()["runs"]]


def accept(_: GuardrailInput | GuardrailOutput) -> GuardrailResult:
    """Let everything pass."""
    return GuardrailResult.success()


def refuse(_: GuardrailInput | GuardrailOutput) -> GuardrailResult:
    """Let nothing pass."""
    return GuardrailResult.failure("no names, please")


def one_task(
    home: Path,
    run_id: str,
    model: object,
    description: str = "Say it",
    *,
    tags: dict[str, str] | None = None,
    **fields: Any,
) -> None:
    """Run a team of one task; a failure is a run, too."""
    agent = Agent(role="Speaker", goal="Speak", llm=model)  # type: ignore[arg-type]
    task = Task(name="say", description=description, expected_output="x", agent=agent, **fields)
    team = Ensemble(name="Speakers of news", tags={"by": "us"}, tasks=[task])
    try:
        team.run(runtime=InlineRuntime(home=home), run_id=run_id, options=RunOptions(tags=tags))
    except EnsembleError:
        return


def test_cached_tokens_are_shown(serve: Serve, tmp_path: Path) -> None:
    """S-PRC-3: of an answer and its step."""
    one_task(tmp_path, "cached", ScriptedModel(ChatResponse(text="42", usage=TokenUsage(7, 5, -1, 4))))
    detail = serve(tmp_path).get(f"{API}/runs/cached/steps/say%230").json()
    assert detail["answers"][0]["cached_tokens"] == 4
    assert detail["tokens"] == {"input": 7, "output": 5, "cached": 4}


def test_cost_names_the_calls_that_it_lacks(serve: Serve, tmp_path: Path) -> None:
    """S-PRC-12: of a run and of a step."""
    priced, other = (ScriptedModel(ChatResponse(text="x", usage=TokenUsage(1000, 0))) for _ in range(2))
    priced.model_name = "priced"  # type: ignore[attr-defined]  a name, as models have it
    tasks = [
        Task(name=name, description=name, expected_output="x", agent=Agent(role=name, goal="g", llm=model))
        for name, model in (("a", priced), ("b", other))
    ]
    prices = {"priced": ModelPrice(input=1, output=1)}
    Ensemble(tasks=tasks, prices=prices).run(runtime=InlineRuntime(home=tmp_path), run_id="half")
    client = serve(tmp_path)
    assert client.get(f"{API}/runs/half").json()["cost"] == {
        "amount": "0.00100000",
        "currency": "USD",
        "unpriced_calls": 1,
    }
    steps = {each["id"]: each["cost"] for each in client.get(f"{API}/runs/half/steps").json()["steps"]}
    assert steps == {"a#0": {"amount": "0.00100000", "currency": "USD", "unpriced_calls": 0}, "b#0": None}


def test_reasoning_is_shown_apart_from_the_answer(serve: Serve, tmp_path: Path) -> None:
    """S-LLM-4, S-LLM-6: with its tokens; a long one is cut, and given whole where it is asked for."""
    thought = "Perhaps 41? " * CUT
    reply = ChatResponse(text=f"<think>{thought}</think>42", usage=TokenUsage(7, 5, 3))
    one_task(tmp_path, "thinking", ScriptedModel(reply))
    step = f"{API}/runs/thinking/steps/say%230"
    client = serve(tmp_path)
    detail = client.get(step).json()
    (answer,) = detail["answers"]
    assert (answer["text"], answer["reasoning_tokens"], detail["output"]) == ("42", 3, "42")
    assert answer["reasoning"] == thought[:CUT]
    assert detail["cut"] == {"answers.0.reasoning": len(thought.strip())}
    assert client.get(f"{step}/text", params={"field": "answers.0.reasoning"}).text == thought.strip()


def test_reused_answers_are_shown_apart_from_asked_ones(serve: Serve, tmp_path: Path) -> None:
    """S-USE-40: the run of the answer, its tokens there, and their sum for the run."""
    model = ScriptedModel(ChatResponse(text="42", usage=TokenUsage(7, 5)))
    for run_id in ("first", "second"):
        one_task(tmp_path, run_id, model, reuse="1d")
    client = serve(tmp_path)
    asked, reused = (
        client.get(f"{API}/runs/{run_id}/steps/say%230").json()["answers"][0] for run_id in ("first", "second")
    )
    assert (asked["reused"], asked["input_tokens"]) == (None, 7)
    assert (reused["reused"], reused["reused_tokens"], reused["input_tokens"]) == ("first", 12, 0)
    rows = {row["run_id"]: row for row in client.get(f"{API}/runs").json()["runs"]}
    shown = {run_id: (row["tokens"], row["reused_calls"], row["reused_tokens"]) for run_id, row in rows.items()}
    assert shown == {"first": (12, 0, 0), "second": (None, 1, 12)}


def test_runs_are_listed_newest_first_page_by_page(serve: Serve, runs: Path) -> None:
    """S-STU-2: pages have each run once; the last one has no cursor."""
    client = serve(runs)
    found: list[str] = []
    cursor = ""
    for _ in range(10):
        page = client.get(f"{API}/runs", params={"limit": 3, "cursor": cursor}).json()
        found += [run["run_id"] for run in page["runs"]]
        assert page["total_known"] == 7
        if page["next_cursor"] is None:
            break
        cursor = page["next_cursor"]
    assert found == ["loser-worked", "first-counts", "fork", "graph", "phases", "side-by-side", "flat"]
    assert client.get(f"{API}/runs", params={"cursor": "x"}).json()["code"] == "INVALID_CURSOR"


def test_runs_are_looked_for(serve: Serve, runs: Path) -> None:
    """S-STU-3: by words of ids, else of summaries; by state, team and time."""
    client = serve(runs)
    assert ids(client.get(f"{API}/runs", params={"q": "SIDE"})) == ["side-by-side"]
    assert ids(client.get(f"{API}/runs", params={"q": "last +18"})) == ["flat"]
    assert ids(client.get(f"{API}/runs", params={"q": "nothing has this"})) == []
    assert ids(client.get(f"{API}/runs", params={"status": "failed,waiting"})) == []
    assert len(ids(client.get(f"{API}/runs", params={"status": "completed"}))) == 7
    assert ids(client.get(f"{API}/runs", params={"since": "2200-01-01"})) == []
    assert ids(client.get(f"{API}/runs", params={"until": "2000-01-01"})) == []
    assert client.get(f"{API}/runs", params={"tag": "a"}).json() == {
        "runs": [], "next_cursor": None, "total_known": 7, "counts": {}, "unread": 0, "groups": []
    }  # fmt: skip
    for instant in ("yesterday", "9" * 999):
        for name in ("since", "until"):
            answer = client.get(f"{API}/runs", params={name: instant})
            assert (answer.status_code, answer.json()["message"].partition(":")[0]) == (422, name)
    for name in ("sort", "group"):
        assert client.get(f"{API}/runs", params={name: "colour"}).status_code == 422
    for since in ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "9" * 20):
        assert client.get(f"{API}/runs", params={"since": since}).status_code == 200


def test_runs_are_sorted_and_grouped(serve: Serve, runs: Path, tmp_path: Path) -> None:
    """S-STU-231, S-STU-233: over HTTP; a date as the end of a range includes its day."""
    client = serve(runs)
    durations = [run["duration_ms"] for run in client.get(f"{API}/runs", params={"sort": "-duration"}).json()["runs"]]
    assert durations == sorted(durations, reverse=True)
    assert ids(client.get(f"{API}/runs", params={"sort": "started", "limit": 1})) == ["flat"]
    (group,) = client.get(f"{API}/runs", params={"group": "error"}).json()["groups"]
    assert (group["key"], group["statuses"]) == ("", {"completed": 7})
    assert len(ids(client.get(f"{API}/runs", params={"group": "error", "within": ""}))) == 7
    one_task(tmp_path, "one", ScriptedModel("ok"))
    today = datetime.now(UTC).date().isoformat()
    assert ids(serve(tmp_path).get(f"{API}/runs", params={"since": today, "until": today})) == ["one"]


def test_runs_are_found_by_their_tags(serve: Serve, tmp_path: Path) -> None:
    """S-STU-3, S-STU-186: by name, or name and value, with other words too; rows and runs have them, the team's among them."""
    for number, tags in enumerate(({"for": "docs:a", "urgent": ""}, {"for": "tests"}, {})):
        one_task(tmp_path, f"run-{number}", ScriptedModel("ok"), tags=tags)
    client = serve(tmp_path)

    def found(**params: str) -> list[str]:
        return ids(client.get(f"{API}/runs", params=params))

    assert found(tag="for") == ["run-1", "run-0"]
    assert found(tag="for:docs:a") == found(tag="urgent") == ["run-0"]
    assert found(tag="for:docs") == found(tag="fo") == []
    assert found(tag="for", q="RUN-1") == found(tag="for", q="run", limit="1") == ["run-1"]
    assert found(tag="for", q="speaker run-0") == ["run-0"]
    assert found(tag="by:us") == ["run-2", "run-1", "run-0"]
    page = client.get(f"{API}/runs", params={"tag": "for", "limit": 1}).json()
    assert found(tag="for", limit="1", cursor=page["next_cursor"]) == ["run-0"]
    assert page["runs"][0]["tags"] == client.get(f"{API}/runs/run-1").json()["tags"]
    assert page["runs"][0]["tags"] == {"by": "us", "for": "tests"}


def test_runs_are_found_by_the_names_of_their_teams(serve: Serve, tmp_path: Path) -> None:
    """S-STU-3, S-STU-5: by the name that their rows show, which only records have; with other words, and page by page."""
    for number in range(3):
        one_task(tmp_path, f"run-{number}", ScriptedModel("ok"))
    Ensemble(tasks=[Task(name="a", description="a", expected_output="x", handler=lambda _: "ok")]).run(
        runtime=InlineRuntime(home=tmp_path), run_id="handled"
    )
    client = serve(tmp_path)

    def found(**params: str) -> list[str]:
        return ids(client.get(f"{API}/runs", params=params))

    assert found(ensemble="speak") == found(q="speakers news") == ["run-2", "run-1", "run-0"]
    assert found(ensemble="speak", q="run-1") == ["run-1"]
    assert found(ensemble="listener") == []
    page = client.get(f"{API}/runs", params={"ensemble": "Speaker", "limit": 2}).json()
    assert found(ensemble="Speaker", limit="2", cursor=page["next_cursor"]) == ["run-0"]


def test_trends_are_of_teams_and_days(serve: Serve, tmp_path: Path) -> None:
    """S-STU-260, S-STU-261: over the last days; a wrong number of days or minutes is 422."""
    one_task(tmp_path, "good", ScriptedModel(ChatResponse(text="ok", usage=TokenUsage(7, 5))))
    one_task(tmp_path, "bad", ScriptedModel(RuntimeError("no such thing")))
    client = serve(tmp_path)
    trends = client.get(f"{API}/trends", params={"days": 7, "offset": 60, "ensemble": "speak"}).json()
    (team,) = trends["teams"]
    assert (team["ensemble"], team["total"]["runs"], team["total"]["failed"]) == ("Speakers of news", 2, 1)
    assert (team["total"]["tokens"], team["total"]["tokens_unknown"]) == (12, 1)
    assert sum(day["runs"] for day in team["days"]) == 2
    assert (trends["runs"], trends["counted"], trends["is_complete"]) == (2, 2, True)
    assert client.get(f"{API}/trends", params={"ensemble": "listener"}).json()["teams"] == []
    for wrong in ({"days": 0}, {"days": 367}, {"offset": 1441}):
        assert client.get(f"{API}/trends", params=wrong).status_code == 422


def test_guardrails_that_accepted_are_told(serve: Serve, tmp_path: Path) -> None:
    """S-STU-23: by side and name, once the task went past them; of a refusal the side and the reason."""
    checks = {"input_guardrails": [accept], "output_guardrails": [accept]}
    one_task(tmp_path, "fine", ScriptedModel("ok"), **checks)
    one_task(tmp_path, "late", ScriptedModel("ok"), **(checks | {"output_guardrails": [refuse]}))
    one_task(tmp_path, "early", ScriptedModel("ok"), **(checks | {"input_guardrails": [refuse]}))
    client = serve(tmp_path)

    def said(run_id: str) -> list[tuple[str, str, bool, str]]:
        checks = client.get(f"{API}/runs/{run_id}/steps/say%230").json()["guardrails"]
        return [(each["kind"], each["name"].rpartition(".")[2], each["accepted"], each["message"]) for each in checks]

    assert said("fine") == [("input", "accept", True, ""), ("output", "accept", True, "")]
    (passed, (kind, name, accepted, message)) = said("late")
    assert (passed[:3], kind, name, accepted) == (("input", "accept", True), "output", "", False)
    assert "no names, please" in message
    assert [(kind, accepted) for kind, _, accepted, _ in said("early")] == [("input", False)]


def test_a_run_tells_what_it_was(serve: Serve, runs: Path) -> None:
    """S-STU-5, S-STU-7, S-STU-8: a team without a name, which is not called by its roles; state, tokens, words of its end, steps by status, budget by agent."""
    run = serve(runs).get(f"{API}/runs/flat").json()
    assert (run["status"], run["tokens"], run["ensemble"]) == ("completed", 165, "")
    assert (run["exit_reason"], run["exit_reason_text"]) == ("completed", "All of it is done.")
    assert run["counts"] == {"completed": 8}
    assert run["budget"]["tokens"] == {"spent": 165, "allowed": None}
    assert [(each["agent"], each["tokens"], each["steps"]) for each in run["budget"]["by_agent"]] == [
        ("Writer", 165, 8)
    ]
    assert (run["is_live"], run["problem"], run["error"]) == (False, None, None)


def test_a_failed_run_names_its_first_error(serve: Serve, tmp_path: Path) -> None:
    """S-STU-7, S-STU-20: class, text and step; the step has the causes."""
    one_task(tmp_path, "bad", ScriptedModel(RuntimeError("no such thing")))
    client = serve()
    run = client.get(f"{API}/runs/bad").json()
    assert (run["status"], run["first_error_step"]) == ("failed", "say#0")
    assert run["error"]["first_failed_step"] == "say#0"
    step = client.get(f"{API}/runs/bad/steps/say%230").json()
    assert step["status"] == "failed"
    assert "no such thing" in step["failure"]["message"] + "".join(step["failure"]["causes"])
    assert ids(client.get(f"{API}/runs", params={"status": "failed"})) == ["bad"]


def test_steps_have_all_details(serve: Serve, runs: Path) -> None:
    """S-STU-20, S-STU-22: prompt, answers, calls with arguments and results, output; how it is done again."""
    step = serve(runs).get(f"{API}/runs/flat/steps/loop:refine%230/refine%20writer%230").json()
    assert [message["role"] for message in step["prompt"]] == ["system", "user"]
    assert "do refine writer" in step["prompt"][1]["content"]
    assert [answer["iteration"] for answer in step["answers"]] == [0, 1]
    assert step["answers"][0]["tool_calls"][0]["name"] == "put_down"
    call = step["tool_calls"][0]
    assert (call["name"], call["arguments"], call["result"], call["outcome"], call["effect"]) == (
        "put_down",
        '{"text": "x"}',
        "put",
        "success",
        "recorded",
    )
    assert step["tools_offered"] == ["put_down"]
    assert step["output"].startswith("refine writer")
    assert step["fork_spec"] == "loop:refine#0/refine writer#0"
    assert serve(runs).get(f"{API}/runs/flat/steps/first%230").json()["fork_spec"] == "first"


def test_long_texts_are_cut_and_had_whole(serve: Serve, tmp_path: Path) -> None:
    """S-STU-21, S-STU-75: the beginning, with the length; whole as plain text. What a model writes is data."""
    text = "<script>alert(1)</script>\u202e\x1b[31m" + "x" * (CUT + 10)
    one_task(tmp_path, "long", ScriptedModel(ChatResponse(text=text + "\ud800", usage=TokenUsage(1, 1))))
    client = serve()
    step = client.get(f"{API}/runs/long/steps/say%230").json()
    assert (step["output"], len(step["output"])) == (text[:CUT], CUT)
    assert step["cut"] == {"output": len(text) + 1, "answers.0": len(text) + 1}
    whole = client.get(f"{API}/runs/long/steps/say%230/text", params={"field": "output"})
    assert whole.text == text + "\ufffd"
    assert whole.headers["content-type"].startswith("text/plain")
    assert client.get(f"{API}/runs/long/steps/say%230/text", params={"field": "answers.7"}).status_code == 404
    assert client.get(f"{API}/runs", params={"q": "alert(1)"}).json()["runs"][0]["summary"].startswith("<script>")


def test_a_position_that_is_none_is_that_of_the_address(serve: Serve, runs: Path) -> None:
    """S-STU-30: whatever a client sends as `Last-Event-ID`, it is told what it asked for."""
    client = serve(runs)
    for sent in ("x", "-1", "9" * 5000):
        answer = client.get(f"{API}/runs/flat/live", headers={"last-event-id": sent})
        assert answer.status_code == 200, sent[:10]
        assert "event: end" in answer.text


def test_what_there_is_not_is_404(serve: Serve, runs: Path) -> None:
    """S-STU-40: with a class, a code and a message."""
    client = serve(runs)
    for path in (
        "runs/nope",
        "runs/..%2F..%2Fetc",
        "runs/flat/steps/nope",
        "runs/nope/steps",
        "runs/nope/live",
        "nope",
    ):
        answer = client.get(f"{API}/{path}")
        assert answer.status_code == 404, path
        assert set(answer.json()) == {"error", "code", "message"}


@pytest.mark.parametrize("name", ["flat", "phases", "graph", "fork", "side-by-side"])
def test_graphs_have_places(name: str, serve: Serve, runs: Path) -> None:
    """S-STU-25: all that ran is on the graph of what ran; what is declared has the steps of each node."""
    client = serve(runs)
    steps = client.get(f"{API}/runs/{name}/steps").json()["steps"]
    ran = client.get(f"{API}/runs/{name}/flow", params={"as": "ran"}).json()
    declared = client.get(f"{API}/runs/{name}/flow").json()
    units = {"loop", "iteration", "phase", "attempt", "graph", "state"}
    begun = {step["id"] for step in steps if step["kind"] not in units and step["started_at"]}
    assert {step for node in ran["nodes"] for step in node["steps"] or []} == begun
    assert {step for node in declared["nodes"] for step in node["steps"] or []} == begun
    for flow in (ran, declared):
        assert all(0 <= node["x"] < node["x"] + node["w"] <= flow["width"] for node in flow["nodes"])
        names = {each["id"] for each in (*flow["nodes"], *flow["groups"])}
        assert all({edge["from"], edge["to"]} <= names for edge in flow["edges"])
    assert client.get(f"{API}/runs/{name}/flow", params={"as": "x"}).status_code == 422


def test_edges_that_a_graph_took_are_told(serve: Serve, runs: Path) -> None:
    """S-STU-25: fired or not."""
    edges = serve(runs).get(f"{API}/runs/graph/flow").json()["edges"]
    fired = {(edge["from"], edge["to"]): edge["fired"] for edge in edges}
    assert fired["write", "write"] is True
    assert fired["loop:refine", "write"] is False


def test_two_runs_are_compared(serve: Serve, tmp_path: Path) -> None:
    """S-STU-27: the same where both ended alike with the same text."""
    one_task(tmp_path, "a", ScriptedModel("yes"))
    one_task(tmp_path, "b", ScriptedModel("yes"))
    one_task(tmp_path, "c", ScriptedModel("no"))
    client = serve()
    assert [step["same"] for step in client.get(f"{API}/compare?a=a&b=b").json()["steps"]] == [True]
    assert [step["same"] for step in client.get(f"{API}/compare?a=a&b=c").json()["steps"]] == [False]
    assert client.get(f"{API}/compare?a=a&b=nope").status_code == 404


def test_a_run_is_exported_whole(serve: Serve, runs: Path) -> None:
    """S-STU-28: everything that the page is told, as one document."""
    answer = serve(runs).get(f"{API}/runs/graph/export", params={"format": "json"})
    found = answer.json()
    assert answer.headers["content-disposition"] == 'attachment; filename="run-graph.json"'
    assert found["run"]["run_id"] == "graph"
    assert set(found["details"]) == {s["id"] for s in found["steps"] if s["kind"] == "task"}
    assert all(found["details"][s]["output"] is not None for s in found["details"])
    assert found["flows"]["declared"]["nodes"]
    assert found["info"]["actions"] == []
    page = serve(runs).get(f"{API}/runs/graph/export")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "Run graph" in page.text
    assert "http://" not in page.text.replace("http://www.w3.org/", "")


def test_a_damaged_record_shows_what_is_left(serve: Serve, tmp_path: Path) -> None:
    """S-STU-6: the list and the run say what is wrong; other runs are as they were."""
    one_task(tmp_path, "good", ScriptedModel("yes"))
    whole, torn = tmp_path / "runs" / "good", tmp_path / "runs" / "torn"  # a copy: nobody has it open any more
    torn.mkdir()
    (torn / "meta.json").write_text((whole / "meta.json").read_text().replace('"good"', '"torn"'))
    (torn / "record.sqlite").write_bytes(b"no database at all" * 1000)
    client = serve()
    rows = {run["run_id"]: run for run in client.get(f"{API}/runs").json()["runs"]}
    assert "damaged" in rows["torn"]["summary"]
    assert rows["good"]["summary"] == "yes"
    assert "damaged" in client.get(f"{API}/runs/torn").json()["problem"]


def test_evaluations_are_listed_with_their_results(serve: Serve, tmp_path: Path) -> None:
    """S-EVL-50, S-EVL-51: by the tags of runs; an unknown evaluation is 404, a comparison without a common scorer is refused."""
    inline, model = InlineRuntime(home=tmp_path), ScriptedModel(otherwise="ok")
    team = Ensemble(tasks=[Task("Say {word}", agent=Agent("Speaker", "Speak", llm=model))], name="Speakers")
    cases = [Case("one", {"word": "ok"}, expected="ok", tags=["t"]), Case("two", {"word": "no"}, expected="no")]
    Evaluation(team, cases, ["exact"], id="first").run(runtime=inline)
    Evaluation(team, cases, ["contains"], id="second").run(runtime=inline)
    one_task(tmp_path, "alone", ScriptedModel("ok"), tags={"evaluation": "begun", "case": "x"})
    client = serve(tmp_path)
    listed = client.get(f"{API}/evaluations").json()
    rows = {row["id"]: row for row in listed["evaluations"]}
    assert listed["is_complete"]
    assert rows.keys() == {"begun", "second", "first"}
    assert (rows["first"]["team"], rows["first"]["runs"], rows["first"]["means"]) == (
        "Speakers", {"completed": 2}, {"exact": 0.5},
    )  # fmt: skip
    assert (rows["begun"]["has_result"], rows["begun"]["means"]) == (False, {})
    detail = client.get(f"{API}/evaluations/first").json()
    assert [(row["scorer"], row["tag"], row["mean"]) for row in detail["scores"]] == [
        ("exact", None, 0.5), ("exact", "t", 1.0),
    ]  # fmt: skip
    assert [case["runs"][0]["output"] for case in detail["cases"]] == ["ok", "ok"]
    compared = client.get(f"{API}/evaluations/first", params={"compare": "first"}).json()
    assert (compared["compared"], compared["comparison"][0]["verdict"]) == ("first", "same")
    assert client.get(f"{API}/evaluations/begun").status_code == 404
    refused = client.get(f"{API}/evaluations/first", params={"compare": "second"})
    assert (refused.status_code // 100, "cannot be compared" in refused.text) == (4, True)
