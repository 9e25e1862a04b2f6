"""Secrets planted wherever texts come into a run, and all that leaves its processes."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

from ensemble_ray import (
    Agent,
    Ensemble,
    EnsembleError,
    EnsembleMemory,
    File,
    InlineRuntime,
    MapEnsemble,
    MemoryStore,
    OpenAIChatModel,
    Redactor,
    Review,
    ReviewDecision,
    Runtime,
    Task,
    TaskHandlerContext,
    ToolCall,
    ValidationError,
    decide,
    fork,
    resume,
    reveal,
    tool,
)
from ensemble_ray.events import EVENT_TYPES
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.opening import store_at
from ensemble_ray.testing import ModelServer, ScriptedModel
from tests.builders import agent, task
from tests.command_line import calling
from tests.otlp_receiver import receiving_by_environment
from tests.scenarios.dying import kill_first, staying, until_recorded
from tests.scenarios.teams import PATIENCE_S, Marks, until

KEY = "k" * 43
#: One for each place where a text comes in; none of them may leave.
SECRETS = {
    place: f"{place}.person@corp.example"
    for place in (
        "input",
        "goal",
        "item",
        "tool",
        "error",
        "answer",
        "directive",
        "review",
        "printed",
        "handler",
        "call",
    )
}
OTHERS = (
    "030 12345678",
    "4111 1111 1111 1111",
    "DE89 3704 0044 0532 0130 00",
    "sk-proj-abcDEF0123456789abcd",
    "CASE-654321",
)
LEFT = re.compile("|".join(map(re.escape, (*(each.split(".")[0] + ".person" for each in SECRETS.values()), *OTHERS))))


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ENSEMBLE_RAY_REDACTION_KEY", KEY)
    monkeypatch.chdir(tmp_path)  # runs with the capture mode `full` write their traces there


def redactor(**options: Any) -> Redactor:
    return Redactor(region="DE", custom={"case_number": r"CASE-\d{6}"}, **options)


@tool(effect="none")
def look_up(to: str, path: str) -> str:
    """Note what it received, print it, and return more."""
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(f"{to}\n")
    print(to, SECRETS["printed"])  # noqa: T201  as user code does
    logging.getLogger("team").warning("found %s", SECRETS["printed"])
    return f"{to} {SECRETS['tool']} {' '.join(OTHERS)}"


@tool(effect="none")
def fail(to: str) -> str:
    """Raise an error with values."""
    raise ValueError(f"no {to} {SECRETS['error']}")


class All:
    """Listens to all events."""

    def __init__(self) -> None:
        self.seen: list[str] = []


for _name in EVENT_TYPES:
    setattr(All, _name, lambda self, event: self.seen.append(repr(event)))


def files_below(*folders: Path) -> Iterator[tuple[Path, str]]:
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and path.name != "received":
                yield path, path.read_bytes().decode("latin-1")


def assert_clean(what: str, texts: Iterable[str]) -> None:
    for text in texts:
        found = LEFT.findall(text)
        assert not found, f"{what} has {set(found)}"


def placeholder_in(text: str, kind: str = "EMAIL") -> str:
    found = re.search(rf"\[{kind}_[0-9a-f]{{12}}\]", text)
    assert found is not None, text
    return found.group()


def team(path: Path, llm: Any, listener: All, **options: Any) -> Ensemble:
    worker = Agent("Worker", f"Help {SECRETS['goal']}", tools=[look_up, fail], llm=llm)
    other = Agent("Other", "Help again", tools=[look_up], llm=llm)
    first = Task("Write to {who}", "A line", agent=worker, name="first")
    handled = Task("Handle", handler=handle, context=[first], name="handled")
    last = Task("Once more", agent=other, context=[first, handled], name="last")
    return Ensemble(
        tasks=[first, handled, last], listeners=[listener], capture_mode="full", verbose=True, workflow="sequential",
        redactor=options.pop("redactor", redactor(reversible=True)), **options,
    )  # fmt: skip


def handle(context: Any) -> str:
    """Return a value."""
    assert_clean("the handler", [repr(context)])
    return f"handled {SECRETS['handler']}"


def calls(path: Path, text: str, *names: str) -> list[ToolCall]:
    to = f"{placeholder_in(text)} {SECRETS['call']}"
    arguments = {"look_up": {"to": to, "path": str(path)}, "fail": {"to": to}}
    return [ToolCall(str(place), name, json.dumps(arguments[name])) for place, name in enumerate(names)]


def script(path: Path) -> ScriptedModel:
    return ScriptedModel(*answers(path))


def answers(path: Path) -> tuple[Any, ...]:
    def first(asked: Any) -> list[ToolCall]:
        return calls(path, asked.text, "look_up", "fail")

    def last(asked: Any) -> list[ToolCall]:
        return calls(path, asked.text[asked.text.index("handled ") :], "look_up")

    return (first, f"done {SECRETS['answer']} {' '.join(OTHERS)}", last, "end")


def test_no_value_leaves_when_a_run_has_a_redactor(
    runtime: Runtime, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """S-RED-20, S-RED-21, S-RED-24, S-RED-25, S-RED-30, S-RED-50: the tools receive values, all others placeholders."""
    caplog.set_level(logging.DEBUG)
    is_remote = not isinstance(runtime, InlineRuntime)  # in this process, user code logs as it does everywhere
    received, listener = tmp_path / "received", All()
    model = script(received)
    output = team(received, model, listener).run({"who": f"{SECRETS['input']} {' '.join(OTHERS)}"}, runtime=runtime)
    assert received.read_text().splitlines() == [
        f"{SECRETS['input']} {SECRETS['call']}",
        f"{SECRETS['handler']} {SECRETS['call']}",
    ]
    assert_clean("a model request", [each.text + repr(each) for each in model.calls])
    assert len(listener.seen) > 15
    assert_clean("an event", listener.seen)
    assert_clean("the output", [repr(output), repr(output.trace), output.raw])
    assert_clean(
        "a log line",
        [each.getMessage() + str(each.exc_text) for each in caplog.records if each.name != "team" or is_remote],
    )
    store = store_at(runtime.store_address)
    facts = run_blocking(store.facts(str(output.run_id)))
    assert_clean("a fact", map(repr, facts))
    record = Path(run_blocking(store.find(str(output.run_id))).location)
    assert_clean("the record", [text for _, text in files_below(record.parent if record.is_file() else record)])
    # What leaves on request: the trace as a tree and as data, and a replayed output.
    assert output.task_outputs[0].raw.startswith("done [EMAIL_")
    assert SECRETS["answer"] in reveal(output, runtime=runtime).task_outputs[0].raw
    assert "CASE-654321" in reveal(output.task_outputs[0].raw, output.run_id, runtime=runtime)


def test_commands_show_placeholders_when_they_are_not_asked_to_reveal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """S-RED-20, S-RED-61."""
    received = tmp_path / "received"
    output = team(received, script(received), All()).run({"who": SECRETS["input"]}, runtime="inline")
    run_id, command = str(output.run_id), calling(capsys)
    for more in ([], ["--json"], ["--task", "first"], ["--mermaid", "-"], ["--dag", "-"], ["--svg", "-"]):
        shown = command("trace", run_id, *more)
        assert shown.code == 0
        assert_clean(f"trace {more}", [shown.printed + shown.said])
    for more in ([], ["--json"]):
        assert SECRETS["answer"] in command("trace", run_id, "--reveal", *more).printed
    monkeypatch.setenv("ENSEMBLE_RAY_REDACTION_KEY", "w" * 43)
    refused = command("trace", run_id, "--reveal")
    assert (refused.code, refused.printed) == (2, "")
    assert "is not the one that the run was redacted with" in refused.said
    monkeypatch.delenv("ENSEMBLE_RAY_REDACTION_KEY")
    assert "needs a key in the environment variable" in command("trace", run_id, "--reveal").said
    assert_clean("trace", [command("trace", run_id).printed])


def test_requests_have_placeholders_when_they_reach_the_server_of_a_model(
    runtime: Runtime, tmp_path: Path, model_server: Callable[..., ModelServer]
) -> None:
    """S-RED-20: the bodies of the requests, with tool results and the texts of attachments of tools."""
    received, listener = tmp_path / "received", All()
    server = model_server(list(answers(received)))
    model = OpenAIChatModel("m", base_url=server.base_url, api_key="k")
    team(received, model, listener).run({"who": f"{SECRETS['input']} {' '.join(OTHERS)}"}, runtime=runtime)
    assert len(server.requests) == 4
    assert_clean("a request", [json.dumps(each.body, ensure_ascii=False) for each in server.requests])
    assert_clean("an event", listener.seen)


def test_spans_have_placeholders_when_they_reach_a_receiver(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-RED-20: with the contents of messages."""
    from ensemble_ray import OpenTelemetryListener

    received = tmp_path / "received"
    with receiving_by_environment(monkeypatch) as receiver:
        listener = OpenTelemetryListener(content=True)
        made = team(received, script(received), All())
        made.with_additional_listener(listener).run({"who": SECRETS["input"]}, runtime=runtime)
        listener.close()
        assert any("[EMAIL_" in repr(each) for each in receiver.spans)
        assert_clean("a span", map(repr, receiver.spans))


def test_the_record_in_a_database_has_placeholders_when_its_run_has_a_redactor(postgres: Any, tmp_path: Path) -> None:
    """S-RED-20, S-RED-40: PostgreSQL; values of other processes are read from there."""
    import psycopg

    received, url = tmp_path / "received", postgres.new_database()
    with InlineRuntime(store=url) as runtime:
        output = team(received, script(received), All()).run({"who": SECRETS["input"]}, runtime=runtime)
        assert SECRETS["answer"] in reveal(output, runtime=runtime).task_outputs[0].raw
    with psycopg.connect(url) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'ensemble_ray'").fetchall()
        rows = [connection.execute(f'SELECT t::text FROM ensemble_ray."{name}" t').fetchall() for (name,) in tables]  # type: ignore[arg-type]  # noqa: S608
        bodies = connection.execute("SELECT convert_from(body, 'UTF8') FROM ensemble_ray.bodies").fetchall()
    assert_clean("the database", [str(row) for row in (*chain.from_iterable(rows), *bodies)])


def test_tools_receive_placeholders_when_the_run_cannot_be_reversed(tmp_path: Path) -> None:
    """S-RED-52, S-RED-42: the record has no value, also not encrypted."""
    received = tmp_path / "received"
    output = team(received, script(received), All(), redactor=redactor()).run(
        {"who": SECRETS["input"]}, runtime="inline"
    )
    assert "@" not in received.read_text()
    facts = run_blocking(store_at(InlineRuntime().store_address).facts(str(output.run_id)))
    assert {"redacted"} & {fact.kind for fact in facts} == set()
    with pytest.raises(ValidationError, match="cannot be revealed: its redactor is not reversible"):
        reveal(output, runtime="inline")


def test_only_the_named_tools_receive_values_when_the_redactor_names_tools(tmp_path: Path) -> None:
    """S-RED-51."""
    received = tmp_path / "received"
    team(received, script(received), All(), redactor=redactor(reversible=True, tools="fail")).run(
        {"who": SECRETS["input"]}, runtime="inline"
    )
    assert "@" not in received.read_text()


def test_no_model_is_called_when_the_key_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """S-RED-45."""
    monkeypatch.delenv("ENSEMBLE_RAY_REDACTION_KEY")
    model = script(tmp_path)
    with pytest.raises(ValidationError, match="needs a key in the environment variable ENSEMBLE_RAY_REDACTION_KEY"):
        team(tmp_path, model, All()).run({"who": "x"}, runtime="inline")
    assert model.calls == ()


def test_a_role_is_refused_when_it_has_a_value() -> None:
    """S-RED-12: roles name agents in the record, so they are not replaced."""
    model = ScriptedModel("x")
    with pytest.raises(ValidationError, match=r"the role of an agent contains a value .*\[EMAIL_"):
        Ensemble(tasks=[task("x", agent(model, "bob@corp.example"))], redactor=redactor()).run(runtime="inline")
    assert model.calls == ()


def test_placeholders_stay_when_a_run_is_resumed_and_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-RED-43, S-RED-44, S-RED-45: with the same secret; a wrong key is refused before a model is called."""
    received = tmp_path / "received"

    def die(_: object) -> str:
        raise KeyboardInterrupt

    def begin(llm: ScriptedModel) -> Ensemble:
        first = Task("Write to {who}", agent=agent(llm, "A", tools=[look_up]), name="first")
        last = Task("Once more", agent=agent(llm, "B"), context=[first], name="last")
        return Ensemble(tasks=[first, last], redactor=redactor(reversible=True))

    def ask(asked: Any) -> list[ToolCall]:
        return calls(received, asked.text, "look_up")

    model = ScriptedModel(ask, f"done {SECRETS['answer']}", EnsembleError("no"))
    with pytest.raises(EnsembleError):
        begin(model).run({"who": SECRETS["input"]}, runtime="inline", run_id="forked")
    seen = placeholder_in(model.calls[2].text)
    model = ScriptedModel("again")
    output = run_blocking_fork("forked", begin(model))
    assert placeholder_in(model.calls[0].text) == seen
    assert output.raw == "again"
    assert SECRETS["answer"] in reveal(output, runtime="inline").task_outputs[0].raw
    monkeypatch.setenv("ENSEMBLE_RAY_REDACTION_KEY", "w" * 43)
    model = ScriptedModel("never")
    with pytest.raises(ValidationError, match="is not the one that the run was redacted with"):
        run_blocking_fork("forked", begin(model))
    with pytest.raises(ValidationError, match="began with a redactor, and this definition has no redactor"):
        run_blocking_fork("forked", begin(model).replace(redactor=None))
    assert model.calls == ()


def run_blocking_fork(run_id: str, ensemble: Ensemble) -> Any:
    return fork(run_id, "last", ensemble, runtime="inline")


def test_delegated_work_has_placeholders_when_its_tools_receive_values(runtime: Runtime, tmp_path: Path) -> None:
    """S-RED-20, S-RED-50: the process of the worker reads the values of other processes from the record."""
    received = tmp_path / "received"

    def delegating(asked: Any) -> ToolCall:
        work = {"agent_role": "Mailer", "task": f"write to {placeholder_in(asked.text)}"}
        return ToolCall("1", "delegate", json.dumps(work))

    def working(asked: Any) -> list[ToolCall]:
        return calls(received, asked.text, "look_up")

    model = ScriptedModel(delegating, working, f"worker done {SECRETS['answer']}", "all done")
    boss = agent(model, "Boss", allow_delegation=True)
    made = Ensemble(
        agents=[boss, agent(model, "Mailer", tools=[look_up])],
        tasks=[task(f"tell {SECRETS['input']}", boss)],
        redactor=redactor(reversible=True),
        listeners=[listener := All()],
    )
    output = made.run(runtime=runtime)
    assert received.read_text().startswith(SECRETS["input"])
    assert_clean("a request", [each.text for each in model.calls])
    assert_clean("an event", listener.seen)
    assert_clean("the output", [repr(output), str(output.trace)])


class Answer(BaseModel):
    mail: str = Field(pattern="@")
    name: str


def test_an_answer_is_checked_with_its_values_when_its_task_has_a_type() -> None:
    """S-RED-31: after the check the object has placeholders."""
    model = ScriptedModel(json.dumps({"mail": SECRETS["answer"], "name": "x"}))
    output = Ensemble(tasks=[task("x", agent(model), output_type=Answer)], redactor=redactor()).run(runtime="inline")
    parsed = output.task_outputs[0].parsed_output
    assert isinstance(parsed, Answer)
    assert placeholder_in(parsed.mail) == parsed.mail
    assert len(model.calls) == 1


def test_no_value_streams_when_an_answer_arrives_in_pieces(runtime: Runtime) -> None:
    """S-RED-23."""
    tokens: list[str] = []
    model = ScriptedModel(f"word {SECRETS['answer']} and " + "more words " * 60 + SECRETS["item"])
    made = Ensemble(
        tasks=[task("x", agent(model, stream=True))],
        redactor=Redactor(patterns="email"),
        on_token=lambda event: tokens.append(event.token),
    )
    output = made.run(runtime=runtime)
    assert len(tokens) > 10
    assert "".join(tokens) == output.raw
    assert_clean("the stream", ["".join(tokens)])


def test_items_have_placeholders_when_they_leave_a_map(runtime: Runtime, tmp_path: Path) -> None:
    """S-RED-20: results, dead letters, results of items, and the record; factories receive the items."""
    made: list[str] = []

    def answering(asked: Any) -> Any:
        assert_clean("a request", [asked.text])
        return EnsembleError(f"broken {SECRETS['error']}") if "number 2" in asked.text else f"ok {SECRETS['answer']}"

    model = ScriptedModel(otherwise=answering)
    worker = agent(model)

    def mapped(item: str) -> Task:
        made.append(item)
        if "number 3" in item:
            raise ValueError(f"bad {item}")
        return task(f"Look at {item}", worker)

    run = MapEnsemble(
        items=[f"number {number} {SECRETS['item']}" for number in range(4)],
        map_task=mapped,
        results=tmp_path / "results.jsonl",
        dead_letters=tmp_path / "letters.jsonl",
        on_item_error="collect",
        redactor=redactor(reversible=True),
    ).start(runtime=runtime)
    items = list(run.items())
    assert all(SECRETS["item"] in each for each in made)
    assert_clean("a result", map(repr, items))
    for path, text in files_below(tmp_path):
        assert_clean(str(path), [text])
    assert "[EMAIL_" in (tmp_path / "results.jsonl").read_text()
    assert "[EMAIL_" in (tmp_path / "letters.jsonl").read_text()
    assert len((tmp_path / "letters.jsonl").read_text().splitlines()) == 2
    facts = run_blocking(store_at(runtime.store_address).facts(run.id))
    assert_clean("a fact", map(repr, facts))


def test_texts_of_people_have_placeholders_when_they_reach_a_run(tmp_path: Path) -> None:
    """S-RED-70, S-RED-71: reviews of a handler, decisions of other processes, and directives."""
    model = ScriptedModel("first", lambda asked: f"saw {asked.text}")
    first = task("one", agent(model), review=Review.required())
    made = Ensemble(
        tasks=[first, task("two", agent(model, "B"), context=[first])],
        review_handler=lambda _: ReviewDecision.edit(f"edited {SECRETS['review']}"),
        redactor=redactor(),
        listeners=[listener := All()],
    )
    output = made.run(runtime="inline")
    placeholder_in(model.calls[1].text)
    assert_clean("a request", [each.text for each in model.calls])
    assert_clean("an event", listener.seen)
    assert_clean("the output", [repr(output)])
    model = ScriptedModel("first", "second")
    first = task("one", agent(model), review=Review.required())
    waiting = Ensemble(
        tasks=[first, task("two", agent(model, "B"), context=[first])], review_wait="detach", redactor=redactor()
    )
    output = waiting.run(runtime="inline")
    (gate,) = output.open_reviews
    decide(str(output.run_id), gate.gate_id, ReviewDecision.edit(f"edited {SECRETS['review']}"), by="ann")
    facts = run_blocking(store_at(InlineRuntime().store_address).facts(str(output.run_id)))
    assert_clean("a fact", map(repr, facts))
    output = resume(str(output.run_id), waiting, runtime="inline")
    placeholder_in(model.calls[1].text)
    assert_clean("the output", [repr(output)])


def test_directives_have_placeholders_when_they_reach_a_run(runtime: Runtime) -> None:
    """S-RED-71."""
    begun: list[Any] = []

    def answering(asked: Any) -> str:
        if not begun:
            begun.append(1)
            run.inject(f"Ask {SECRETS['directive']}")
        return "done"

    model = ScriptedModel(answering, "second")
    made = Ensemble(tasks=[task("one", agent(model)), task("two", agent(model))], redactor=redactor())
    run = made.start(runtime=runtime)
    run.result()
    placeholder_in(model.calls[1].text)
    assert_clean("a request", [each.text for each in model.calls])
    assert_clean("a fact", map(repr, run_blocking(store_at(runtime.store_address).facts(run.id))))


def test_memory_has_placeholders_when_a_run_writes_and_reads_it(tmp_path: Path) -> None:
    """S-RED-26: what was stored before with values is clean in prompts."""
    store = MemoryStore.in_memory()
    model = ScriptedModel(f"kept {SECRETS['answer']}", "second")
    made = Ensemble(
        tasks=[task("one", agent(model), memory_scopes="notes"), task("two", agent(model), memory_scopes="notes")],
        memory=EnsembleMemory(short_term=True),
        memory_store=store,
        redactor=redactor(),
    )
    made.run(runtime="inline")
    placeholder_in(model.calls[1].text)
    assert_clean("a request", [each.text for each in model.calls])
    assert_clean("the memory", [repr(vars(store))])


def test_a_run_is_revealed_with_the_variable_that_its_redactor_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-RED-60, S-RED-41: the record has the name of the variable, and not its value."""
    monkeypatch.delenv("ENSEMBLE_RAY_REDACTION_KEY", raising=False)
    monkeypatch.setenv("MY_KEY", "a key of this test that is long enough")
    own = Redactor(reversible=True, key="MY_KEY")
    made = Ensemble(tasks=[task("one", agent(ScriptedModel(f"kept {SECRETS['answer']}")))], redactor=own)
    output = made.run(runtime="inline")
    assert SECRETS["answer"] not in output.text
    assert SECRETS["answer"] in reveal(output, runtime="inline").text
    with pytest.raises(ValidationError, match="environment variable OTHER"):
        reveal(output, runtime="inline", key="OTHER")


def test_a_record_has_no_trace_of_redaction_when_its_run_has_no_redactor() -> None:
    """S-RED-42."""
    output = Ensemble(tasks=[task(f"mail {SECRETS['input']}", agent(ScriptedModel("x")))]).run(runtime="inline")
    facts = run_blocking(store_at(InlineRuntime().store_address).facts(str(output.run_id)))
    assert all("redact" not in repr(fact.data.to_data()) for fact in facts)
    assert SECRETS["input"] in repr(facts)
    with pytest.raises(ValidationError, match="had no redactor"):
        reveal("x", str(output.run_id), runtime="inline")


def test_texts_of_a_request_have_placeholders_when_they_reach_a_run(runtime: Runtime) -> None:
    """S-RED-20, S-RED-53: additional contexts, names and texts of attachments, tags and the user."""

    def handled(context: TaskHandlerContext) -> str:
        assert_clean("the inputs of a handler", [repr(context.inputs)])
        return f"{context.user} {context.tags['case']}"

    model = ScriptedModel("done", reads=["file"])
    file = File(f"mail {SECRETS['tool']}".encode(), name=f"{SECRETS['item']}.txt", media_type="text/plain")
    looking = task(
        "Look at {note}", agent(model), attachments=file, additional_context=f"Ask {SECRETS['goal']}", name="look"
    )
    made = Ensemble(
        tasks=[looking, Task("Handle", handler=handled, context=[looking], name="handled")],
        capture_mode="full",
        redactor=redactor(reversible=True),
        listeners=[listener := All()],
    )
    note = File(f"note {SECRETS['error']}".encode(), name=f"{SECRETS['error']}.txt", media_type="text/plain")
    output = made.run(
        {"note": note},
        additional_context=f"Copy {SECRETS['directive']}",
        tags={"case": SECRETS["review"]},
        user=SECRETS["call"],
        runtime=runtime,
    )
    (asked,) = model.calls
    files = [each for message in asked.messages for each in message.attachments]
    texts = [asked.text, *((each.data or b"").decode() for each in files)]
    for place in ("Ask ", "Copy ", "mail ", "note "):
        placeholder_in(" ".join(texts).partition(place)[2][:30])
    assert_clean("a request", [*texts, repr(asked.messages)])
    assert_clean("an event", listener.seen)
    assert_clean("the output", [repr(output), str(output.trace)])
    assert_clean("a fact", map(repr, run_blocking(store_at(runtime.store_address).facts(str(output.run_id)))))
    # the handler received the real user and tags
    revealed = reveal(output.task_outputs[1].raw, output.run_id, runtime=runtime)
    assert revealed == f"{SECRETS['call']} {SECRETS['review']}"


def test_a_resumed_run_keeps_its_additional_context_when_it_has_a_value() -> None:
    """S-RED-43."""
    model = ScriptedModel("first", EnsembleError("no"))
    first = task("one", agent(model), name="first")
    made = Ensemble(tasks=[first, task("two", agent(model, "B"), context=[first])], redactor=redactor(reversible=True))
    added = f"Copy {SECRETS['directive']}"
    with pytest.raises(EnsembleError):
        made.run(additional_context=added, runtime="inline", run_id="added")
    again = ScriptedModel("second")
    first = task("one", agent(again), name="first")
    made = Ensemble(tasks=[first, task("two", agent(again, "B"), context=[first])], redactor=redactor(reversible=True))
    output = fork("added", "task-2", made, runtime="inline", additional_context=added)
    assert output.raw == "second"
    assert placeholder_in(again.calls[0].text) == placeholder_in(model.calls[0].text)
    assert_clean("a request", [again.calls[0].text])


def test_placeholders_stay_when_the_process_of_an_agent_is_killed(
    ray_runtime: Runtime, home: str, tmp_path: Path
) -> None:
    """S-RED-43: another process continues the task, with the secret and the values of the run."""
    marks = Marks(tmp_path / "marks")
    model, worker = staying(marks)
    made = Ensemble(tasks=[task(f"go {SECRETS['input']}", worker)], redactor=redactor(reversible=True))
    run = made.start(runtime=ray_runtime)
    until(lambda: marks.lines, "the tool")
    until_recorded(home, run)
    kill_first(marks)
    until(lambda: len(marks.lines) == 2, "the other process")
    marks.add("over")
    output = run.result(timeout_s=PATIENCE_S)
    first, second = map(repr, [each.messages for each in model.calls])
    assert placeholder_in(first) == placeholder_in(second)
    assert_clean("a request", [first, second])
    assert SECRETS["input"] in reveal(str(output.trace), run.id, runtime=ray_runtime)
