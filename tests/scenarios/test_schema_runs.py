"""Typed tasks whose endpoint can be held to a schema, over HTTP in this process: what is asked how, and what comes of it."""

from __future__ import annotations

import dataclasses
import enum
import json
import typing
from collections.abc import Callable
from pathlib import Path

import pytest
import typing_extensions
from pydantic import BaseModel

from ensemble_ray import (
    Ensemble,
    GuardrailResult,
    InlineRuntime,
    OpenAIChatModel,
    RetryPolicy,
    Runtime,
    Task,
    TaskExecutionError,
    fork,
    parse_output,
    tool,
)
from ensemble_ray.record.runs import read_facts
from ensemble_ray.testing import Fault, ModelServer, Reply, ScriptedModel, ServedRequest
from tests.builders import agent, call, task

Servers = Callable[..., ModelServer]


class City(BaseModel):
    """A typed answer."""

    name: str
    people: int = 0


@dataclasses.dataclass
class Point:
    """Another."""

    x: int
    y: int = 0


class Movie(typing_extensions.TypedDict):
    """Of the backport."""

    title: str


class Song(typing.TypedDict):
    """Of the standard library."""

    title: str
    year: typing.NotRequired[int]


class Mood(enum.Enum):
    """A scalar answer."""

    GOOD = "good"


class Tree(BaseModel):
    """Holds its own kind."""

    branches: list[Tree]


GOOD = '{"name": "Bern", "people": 140000}'
BERN = City(name="Bern", people=140000)
#: Quick about retries, and open after one failure would be seen: five are the least.
ONE_ATTEMPT = RetryPolicy(max_attempts=1)


@pytest.fixture
def inline() -> InlineRuntime:
    """This process."""
    return InlineRuntime()


@pytest.fixture
def model_at(request: pytest.FixtureRequest) -> Callable[..., OpenAIChatModel]:
    """Makes models of a name of this test's own: what is remembered is remembered for the process."""

    def made(server: ModelServer, **options: object) -> OpenAIChatModel:
        return OpenAIChatModel(request.node.name, base_url=server.base_url, api_key="k", **options)  # type: ignore[arg-type]

    return made


Models = Callable[..., OpenAIChatModel]


@tool
def look() -> str:
    """Look."""
    return "seen"


def typed_form(request: ServedRequest) -> dict[str, object] | None:
    """The schema of a request, with its name and strictness."""
    form = request.response_format
    return None if form is None else typing.cast("dict[str, object]", form["json_schema"])


def names(server: ModelServer) -> list[object]:
    """Names of the schemas that the requests came with."""
    return [form and form["name"] for form in map(typed_form, server.requests)]


def typed(model: object, kind: object = City, **fields: object) -> Task:
    """A task with a typed answer, of an agent without tools."""
    return task("describe a city", agent(model), output_type=kind, **fields)


#: Type, answer, object, and whether the schema is strict; None: there is none.
KINDS = [
    (City, GOOD, BERN, True),
    (Point, '{"x": 1, "y": 2}', Point(1, 2), True),
    (Movie, '{"title": "M"}', {"title": "M"}, True),
    (Song, '{"title": "S"}', {"title": "S"}, False),
    (Tree, '{"branches": [{"branches": []}]}', Tree(branches=[Tree(branches=[])]), True),
    (dict[str, int], '{"a": 1}', {"a": 1}, False),
    (dict[Mood, int], '{"good": 1}', {Mood.GOOD: 1}, False),
    (dict, '{"a": [1]}', {"a": [1]}, False),
    (Mood, '"good"', Mood.GOOD, None),
    (str, '"plain"', "plain", None),
]


def test_every_type_is_asked_for_and_read(inline: InlineRuntime, model_server: Servers, model_at: Models) -> None:
    """S-OUT-40, S-OUT-45, S-OUT-46, S-DOM-32: with a schema where its JSON is an object; the prompt is there anyway."""
    server = model_server([text for _, text, _, _ in KINDS])
    model = model_at(server)
    team = Ensemble(tasks=[typed(model, kind) for kind, _, _, _ in KINDS], workflow="sequential")
    output = team.run(runtime=inline)
    assert [done.parsed_output for done in output.task_outputs] == [expected for _, _, expected, _ in KINDS]
    forms = [typed_form(request) for request in server.requests]
    assert [form and form["strict"] for form in forms] == [is_strict for _, _, _, is_strict in KINDS]
    assert all("## Output Format" in request.text for request in server.requests)


def test_typed_answers_are_held_to_a_schema_wherever_the_run_is(
    runtime: Runtime, model_server: Servers, model_at: Models
) -> None:
    """S-OUT-40: the schema is made where the call is made."""
    server = model_server([GOOD])
    output = Ensemble(tasks=[typed(model_at(server))]).run(runtime=runtime)
    assert output.task_outputs[0].get_parsed_output(City) == BERN
    assert names(server) == ["City"]


def test_dataclasses_of_a_programs_own_file_are_answers_too(runtime: Runtime) -> None:
    """S-DOM-32, S-CONV-34: such classes travel by value, both ways, and stay what they were."""

    @dataclasses.dataclass
    class Place:
        """As if it stood in `__main__`."""

        x: int
        tags: list[str] = dataclasses.field(default_factory=list)

    team = Ensemble(tasks=[typed(ScriptedModel('{"x": 1}'), Place)])
    (done,) = team.run(runtime=runtime).task_outputs
    assert dataclasses.asdict(typing.cast("Place", done.parsed_output)) == {"x": 1, "tags": []}
    assert parse_output('{"x": 2}', Place).is_success


def test_what_is_said_is_the_same_when_no_schema_is_sent(
    inline: InlineRuntime, model_server: Servers, model_at: Models, home: str
) -> None:
    """S-OUT-40, S-OUT-53: messages, and with them the recorded digests."""
    ways = {"schema": None, "prompt": False}
    bodies, digests = [], []
    for way, value in ways.items():
        server = model_server([GOOD])
        model = model_at(server, structured_outputs=value)
        output = Ensemble(tasks=[typed(model)]).run(runtime=inline, run_id=way)
        bodies.append({name: each for name, each in server.requests[0].body.items() if name != "response_format"})
        (fact,) = [fact for fact in read_facts(output.run_id, Path(home)) if fact.kind == "model"]
        digests.append(fact.data.to_data()["request_digest"])
    assert bodies[0] == bodies[1]
    assert digests[0] == digests[1]


def test_tools_and_schemas_are_not_sent_together(
    inline: InlineRuntime, model_server: Servers, model_at: Models
) -> None:
    """S-OUT-41, S-OUT-31: with tools the prompt asks; the correction turn has none, and a schema."""
    server = model_server([call("look"), "no JSON", GOOD])
    worker = agent(model_at(server), tools=[look])
    output = Ensemble(tasks=[task("describe a city", worker, output_type=City)]).run(runtime=inline)
    assert output.task_outputs[0].parsed_output == BERN
    assert names(server) == [None, None, "City"]
    assert [bool(request.tools) for request in server.requests] == [True, True, False]


def test_streams_stay_streams(inline: InlineRuntime, model_server: Servers, model_at: Models) -> None:
    """S-OUT-41: and their corrections, which are none, carry the schema."""
    server = model_server(["no JSON", GOOD])
    tokens: list[str] = []
    team = Ensemble(tasks=[typed(model_at(server))], stream=True, on_token=lambda event: tokens.append(event.token))
    assert team.run(runtime=inline).task_outputs[0].parsed_output == BERN
    assert "".join(tokens) == "no JSON"
    assert [request.stream for request in server.requests] == [True, False]
    assert names(server) == [None, "City"]


def test_untyped_tasks_are_asked_as_ever(inline: InlineRuntime, model_server: Servers, model_at: Models) -> None:
    """S-OUT-40."""
    server = model_server(["text"])
    Ensemble(tasks=[task("write", agent(model_at(server, structured_outputs=True)))]).run(runtime=inline)
    assert names(server) == [None]


def test_an_answer_is_corrected_when_the_endpoint_ignores_the_schema(
    inline: InlineRuntime, model_server: Servers, model_at: Models
) -> None:
    """S-OUT-50, S-OUT-30, S-OUT-32: as any other."""
    server = model_server(["Bern, of course", GOOD])
    output = Ensemble(tasks=[typed(model_at(server))]).run(runtime=inline)
    assert (output.task_outputs[0].raw, output.task_outputs[0].parsed_output) == ("Bern, of course", BERN)
    assert names(server) == ["City", "City"]


@pytest.mark.parametrize("status", [400, 501])
def test_a_refused_schema_leaves_no_trace_in_the_run(
    inline: InlineRuntime, model_server: Servers, model_at: Models, home: str, status: int
) -> None:
    """S-OUT-48: no error, no attempt, no fact; not for the corrections either, where nothing is sent in vain again."""
    server = model_server(
        ["no JSON", GOOD], rejects_response_format=Fault(status=status, message="unsupported response_format")
    )
    output = Ensemble(tasks=[typed(model_at(server))], retry=ONE_ATTEMPT).run(runtime=inline)
    (done,) = output.task_outputs
    assert done.parsed_output == BERN
    assert (done.metrics.retry_count, done.metrics.llm_call_count) == (0, 2)
    assert names(server) == ["City", None, None]
    refused, answered, correction = (request.key for request in server.requests)
    assert refused == answered != correction
    facts = [fact for fact in read_facts(output.run_id, Path(home)) if fact.kind == "model"]
    assert [fact.data.to_data()["text"] for fact in facts] == ["no JSON", GOOD]


def test_refused_schemas_are_no_faults_of_the_endpoint(
    inline: InlineRuntime, model_server: Servers, model_at: Models
) -> None:
    """S-OUT-48, S-DUR-64: ten at once do not close it for anybody."""
    server = model_server(GOOD, rejects_response_format=Fault(status=501, message="no"))
    model = model_at(server)
    server.pause()
    tasks = [typed(model, max_output_retries=0) for _ in range(10)]
    team = Ensemble(tasks=tasks, workflow="parallel", retry=ONE_ATTEMPT)
    run = team.start(runtime=inline)
    server.wait_in_flight(10, timeout_s=90)
    server.resume()
    output = run.result()
    assert [done.parsed_output for done in output.task_outputs] == [BERN] * 10
    assert [done.metrics.retry_count for done in output.task_outputs] == [0] * 10
    assert names(server) == ["City"] * 10 + [None] * 10


def test_a_failing_provider_is_asked_again_with_the_schema(
    inline: InlineRuntime, model_server: Servers, model_at: Models
) -> None:
    """S-OUT-50, S-DUR-61: its faults are faults as ever."""
    server = model_server([Fault(status=503, retry_after_s=0), Reply(text=GOOD)])
    output = Ensemble(tasks=[typed(model_at(server))]).run(runtime=inline)
    assert output.task_outputs[0].metrics.retry_count == 1
    assert names(server) == ["City", "City"]


def test_guardrails_are_as_ever_when_a_schema_is_sent(
    inline: InlineRuntime, model_server: Servers, model_at: Models
) -> None:
    """S-GRD-4, S-GRD-5, S-GRD-6: in order, sync and async, around the typed answer."""
    seen: list[object] = []

    def first(given: object) -> GuardrailResult:
        seen.append(type(given).__name__)
        return GuardrailResult.success()

    async def second(given: object) -> GuardrailResult:
        seen.append(getattr(given, "parsed_output", "before"))
        return GuardrailResult.success()

    guarded = typed(model_at(model_server([GOOD])), input_guardrails=[first, second], output_guardrails=[second, first])
    Ensemble(tasks=[guarded]).run(runtime=inline)
    assert seen == ["GuardrailInput", "before", BERN, "GuardrailOutput"]


def test_a_run_is_gone_on_with_when_schemas_were_switched_off(
    inline: InlineRuntime, model_server: Servers, model_at: Models
) -> None:
    """S-OUT-47, S-OUT-53: it is not another definition, and what is recorded is used."""
    server = model_server([GOOD, Fault(status=401), GOOD])

    def team(**options: object) -> Ensemble:
        by = agent(model_at(server, **options))
        tasks = [task(what, by, output_type=City, name=what) for what in ("one", "two")]
        return Ensemble(tasks=tasks, retry=None)

    with pytest.raises(TaskExecutionError):
        team().run(runtime=inline, run_id="first")
    output = fork("first", "two", ensemble=team(structured_outputs=False), runtime=inline)
    assert [done.parsed_output for done in output.task_outputs] == [BERN, BERN]
    assert names(server) == ["City", "City", None]
    assert json.loads(output.raw) == json.loads(GOOD)
