"""Requests of tasks with `reuse`: which are identical, and what becomes of an answer that an earlier run has."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta

import pytest

from ensemble_ray import (
    ChatResponse,
    OpenAIChatModel,
    RateLimit,
    RateLimitedChatModel,
    RecordError,
    ToolSpec,
)
from ensemble_ray.execute.agent.reuse import AnswerReuse, model_identity
from ensemble_ray.execute.effects import TaskEffects
from ensemble_ray.execute.scope import TaskScope
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact
from ensemble_ray.testing import ScriptedModel
from ensemble_ray.values.messages import JsonSchema
from tests.builders import task
from tests.ensemble_ray.execute.running import RUN_CONTEXT, Bench, writer

SEARCH = ToolSpec("search", "Searches.", {"type": "object"})
CALL = "draft#0/0/model"


class Answers:
    """Answers of earlier runs, by digest; it fails if there is an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.offered: dict[str, str] = {}
        self._error = error

    async def find_answer(self, digest: str, *, since: float, run_id: str) -> Fact[ModelAnswered] | None:
        """Find none."""
        del digest, since, run_id
        if self._error is not None:
            raise self._error
        return None

    async def offer_answers(self, run_id: str, answers: object) -> None:
        """Refuse, or keep none."""
        del run_id, answers
        if self._error is not None:
            raise self._error


def digest_of(
    name: str = CALL,
    conversation: str = "messages",
    *,
    tools: tuple[ToolSpec, ...] = (SEARCH,),
    schema: JsonSchema | None = None,
    keep_reasoning: bool = False,
    **options: object,
) -> str:
    """The digest of a request with these parts."""
    fields: dict[str, object] = {
        "model": "m",
        "base_url": "http://one/v1",
        "api_key": "sk-1",
        "temperature": 0,
        **options,
    }
    bench = Bench(agents={"draft": writer(ScriptedModel())}, answers=Answers())
    order = bench.order("draft", task=task("Do draft", reuse="1d"))
    effects = TaskEffects(task_description="", expected_output="", agent_role="", started_at=0.0)
    scope = TaskScope(context=RUN_CONTEXT, ports=bench.runner.ports, order=order, effects=effects)
    model = OpenAIChatModel(**fields)  # type: ignore[arg-type]  options
    return AnswerReuse(scope, model, keep_reasoning=keep_reasoning).digest(name, conversation, tools, schema)


@pytest.mark.parametrize(
    "change",
    [
        {"conversation": "others"},
        {"tools": ()},
        {"tools": (ToolSpec("search", "Looks for things.", {"type": "object"}),)},
        {"tools": (ToolSpec("search", "Searches.", {"type": "string"}),)},
        {"keep_reasoning": True},
        {"model": "n"},
        {"base_url": "http://two/v1"},
        {"temperature": 1},
        {"max_tokens": 7},
        {"extra_body": {"seed": 1}},
        {"extra_query": {"api-version": "2"}},
        {"name": "draft#1/0/model"},
        {"name": "loop:refine#2/draft#0/0/model"},
        {"name": "draft#0/1/model"},
        {"name": "draft#0/0/call-1/delegate#0/0/model"},
    ],
    ids=str,
)
def test_another_request_has_another_digest(change: Mapping[str, object]) -> None:
    """S-USE-10 to S-USE-12."""
    assert digest_of(**change) != digest_of()  # type: ignore[arg-type]  parts of a request


@pytest.mark.parametrize(
    "change",
    [
        {"api_key": "sk-2"},
        {"extra_headers": {"X-Caller": "me"}},
        {"access_token": "secret"},
        {"timeout": 3.0},
        {"system_role": "user"},
        {"max_retries": 2},
        {"name": "elsewhere#0/0/model"},
        {"name": "phase:first#0/draft#0/0/model"},
    ],
    ids=str,
)
def test_keys_and_places_make_no_other_request(change: Mapping[str, object]) -> None:
    """S-USE-11, S-USE-12: nor do headers, limits of time, or the name of the task."""
    assert digest_of(**change) == digest_of()  # type: ignore[arg-type]  parts of a request


def test_form_of_an_answer_is_part_of_its_request() -> None:
    """S-USE-10: a request with tools has none."""
    form, other = (JsonSchema("answer", {"type": each}) for each in ("object", "array"))
    assert len({digest_of(tools=(), schema=each) for each in (None, form, other)}) == 3
    assert digest_of(schema=form) == digest_of(schema=other)


def test_limited_model_makes_the_same_requests() -> None:
    """S-USE-11."""
    model = OpenAIChatModel("m", base_url="http://one/v1", api_key="sk-1")
    limited = RateLimitedChatModel.of(model, RateLimit.per_minute(5))
    assert model_identity(limited) == model_identity(model)


def test_chain_makes_the_requests_of_its_first_model() -> None:
    """S-USE-13."""

    class Chain:
        def __init__(self, *models: object) -> None:
            self.first_model = models[0]

    one, other = (OpenAIChatModel(name, base_url="http://one/v1", api_key="sk-1") for name in ("m", "n"))
    assert model_identity(Chain(one, other)) == model_identity(one) != model_identity(Chain(other, one))


def test_own_model_is_known_by_its_class_and_what_it_says_of_itself() -> None:
    """S-USE-11."""

    class Own:
        model = "mine"

        def __init__(self, **options: object) -> None:
            self.request_options = options

        def chat(self, messages: object, tools: object = ()) -> ChatResponse:
            del messages, tools
            return ChatResponse("x")

    one, other = model_identity(Own(temperature=0)), model_identity(Own(temperature=1))
    assert one != other
    assert (one["model"], one["options"]) == ("mine", {"temperature": 0})


@pytest.mark.parametrize("age", ["7d", timedelta(days=7)])
async def test_model_is_asked_when_stored_answers_cannot_be_read(
    age: str | timedelta, caplog: pytest.LogCaptureFixture
) -> None:
    """S-USE-25: WARN, and the task goes on; as when its answers cannot be offered."""
    bench = Bench(agents={"draft": writer(ScriptedModel("Done"))}, answers=Answers(RecordError("the disk is gone")))
    with caplog.at_level(logging.WARNING):
        result = await bench.run(task=task("Do draft", reuse=age))
    assert result.output is not None
    assert result.output.raw == "Done"
    assert caplog.messages == [
        "Task 'draft' asks its model, since stored answers cannot be read: the disk is gone",
        "Task 'draft': later runs cannot reuse its answers: the disk is gone",
    ]


async def test_tasks_without_reuse_record_no_digest_of_their_requests() -> None:
    """S-USE-51: and look nothing up."""
    bench = Bench(agents={"draft": writer(ScriptedModel("Done"))}, answers=Answers(RecordError("asked")))
    await bench.run()
    data = bench.journal.facts()[0].data.to_data()
    assert not {"reuse_digest", "reused", "reused_tokens"} & data.keys()
