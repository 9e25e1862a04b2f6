"""Fallback chains as values and as models, the failures after which they go on, and their rules."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta

import pytest

from ensemble_ray import (
    Agent,
    AllModelsFailedError,
    ChatMessage,
    ChatResponse,
    CircuitOpenError,
    Ensemble,
    Fallback,
    OpenAIChatModel,
    RateLimit,
    RateLimitedChatModel,
    RateLimitTimeoutError,
    Task,
    ToolSpec,
    ValidationError,
    When,
)
from ensemble_ray.definition.validation import check_team_keys
from ensemble_ray.errors import BudgetExhaustedError
from ensemble_ray.llm.factory import resolve_llm
from ensemble_ray.llm.fallback import chain_of, resolve_chain
from ensemble_ray.llm.names import ModelNames, declared_names, model_names, recorded_names
from ensemble_ray.record.identity.definition import model_data
from ensemble_ray.testing import ScriptedModel
from ensemble_ray.values.attachments import AttachmentKind

ASK = [ChatMessage(role="user", content="Hi")]


class StatusError(Exception):
    """A provider's error, as any package may have it."""

    def __init__(self, status: int, body: object = None) -> None:
        super().__init__(f"status {status}")
        self.status_code = status
        self.body = body


class PlainError(Exception):
    """An error of a model's own code."""


def code(name: str, message: str = "No") -> dict[str, object]:
    return {"error": {"code": name, "message": message}}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StatusError(429, code("insufficient_quota")), "quota"),
        (StatusError(402), "quota"),
        (StatusError(401), "refusal"),
        (StatusError(403), "refusal"),
        (StatusError(404, code("model_not_found")), "refusal"),
        (StatusError(400, code("content_policy_violation")), "refusal"),
        (StatusError(429), "failure"),
        (StatusError(503), "failure"),
        (ConnectionResetError("reset"), "failure"),
        (TimeoutError("late"), "failure"),
        (RateLimitTimeoutError(RateLimit.per_second(1), timedelta(seconds=1)), "failure"),
        (CircuitOpenError("open"), "breaker"),
        (StatusError(413), "context"),
        (StatusError(400, code("context_length_exceeded")), "context"),
        (StatusError(400, code("", "This model's maximum context length is 8192 tokens")), "context"),
        (StatusError(400, code("", "prompt is too long: 210000 tokens > 200000 maximum")), "context"),
        (StatusError(500, code("", "the request exceeds the available context size, try increasing it")), "context"),
        (StatusError(400, code("", "Your input exceeds the context window of this model")), "context"),
        (StatusError(400, code("", "input length and `max_tokens` exceed context limit: 190000 + 20000")), "context"),
        (StatusError(400, code("", "The context window of this assistant is configurable")), "refusal"),
        (StatusError(400, code("", "The input token count (2000) exceeds the maximum number of tokens")), "context"),
        (PlainError("mine"), None),
        (ValidationError("no key"), None),
        (BudgetExhaustedError("spent"), None),
        (asyncio.CancelledError(), None),
    ],
)
def test_failures_have_a_reason(error: BaseException, reason: str | None) -> None:
    """S-FBK-10: each failure is known by one word, and `on` without the word ends the call."""
    models = [ScriptedModel("a"), ScriptedModel("b")]
    assert Fallback(models).reason_of(error) == reason
    others = [each for each in ("quota", "refusal", "breaker", "failure", "context") if each != reason]
    assert Fallback(models, on=others).reason_of(error) is None  # type: ignore[arg-type]  words of the table


def test_classes_of_exceptions_count_with_their_subclasses() -> None:
    """S-FBK-10: also those of a model's own code; the end of a run is never a failure of a model."""
    chain = Fallback([ScriptedModel("a"), ScriptedModel("b")], on=("quota", Exception))
    assert chain.reason_of(PlainError("mine")) == "PlainError"
    assert chain.reason_of(BudgetExhaustedError("spent")) is None


def test_a_list_is_a_chain() -> None:
    """S-FBK-1: everywhere a model is accepted; a list of one model is that model."""
    names = ["openai:gpt-5", "openai:gpt-4o-mini"]
    first = Agent(role="Writer", goal="Write", llm=names).llm
    assert isinstance(first, Fallback)
    assert first.names == tuple(names)
    assert [model_names(each).model for each in first.models] == ["gpt-5", "gpt-4o-mini"]
    assert Task(description="Go", llm=tuple(names)).llm == first
    assert Ensemble(tasks=[Task.of("Go")], llm=names, manager_llm=names).manager_llm == first
    assert Ensemble(tasks=[Task.of("Go")], llm="local", models={"two": names}).models["two"] == first
    assert RateLimitedChatModel.of(names, RateLimit.per_minute(1)).delegate == first
    assert resolve_chain(["openai:gpt-5"]) == OpenAIChatModel("gpt-5")


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: resolve_chain([]), "llm must be a chat model or one of"),
        (lambda: Fallback([]), "at least one"),
        (lambda: Fallback("openai:a"), "must be a list of models"),
        (lambda: Fallback(["openai:a", "opnai:b"]), "Unknown llm 'opnai:b'"),
        (lambda: Fallback([Fallback(["openai:a"]), "openai:b"]), "is a chain itself"),
        (lambda: Fallback(["openai:a"], on="quoat"), "unknown failure 'quoat'"),
        (lambda: Fallback(["openai:a"], on=()), "on must not be empty"),
        (lambda: Fallback(["openai:a"], on=BaseException), "unknown failure"),
        (lambda: Fallback(["openai:a"], when="later"), "when must be a When"),
        (lambda: Fallback(["openai:a"], when=When(tokens_above=1, use="c")), "no model 'c'. Known: [openai:a]"),
        (lambda: When(use="a"), "needs a condition"),
        (lambda: When(budget_above=1.0), "budget_above must be a number from 0 to below 1"),
        (lambda: When(tokens_above=-1), "tokens_above must be a number >= 0"),
        (lambda: When(run_time_above=timedelta(seconds=-1)), "run_time_above must be a number >= 0"),
        (lambda: When(tokens_above=1, use=" "), "use must be the name"),
    ],
)
def test_wrong_chains_are_refused(build: object, text: str) -> None:
    """S-FBK-1, S-FBK-2, S-FBK-20: when they are made, with the remedy."""
    with pytest.raises(ValidationError) as refused:
        build()  # type: ignore[operator]  a lambda of the table
    assert text in str(refused.value)


def test_names_are_unique() -> None:
    """S-FBK-2: a repeated name has its position."""
    chain = Fallback([ScriptedModel("a"), ScriptedModel("b"), OpenAIChatModel("m")])
    assert chain.names == ("ScriptedModel", "ScriptedModel#2", "m")
    assert [chain.names_at(place).model for place in range(3)] == list(chain.names)
    assert [chain.find(chain.names_at(place)) for place in range(3)] == [0, 1, 2]
    assert chain.find(ModelNames("unknown", None)) == 0


def test_a_chain_is_a_value() -> None:
    """S-FBK-3: equal, hashed and pickled by its parts; equal chains have equal bytes, so agents share processes."""
    build = lambda: Fallback(["openai:a", "openai:b"], on=["quota"], when=When(budget_above=0.5, use="b"))  # noqa: E731
    chain, other = build(), build()
    copied = pickle.loads(pickle.dumps(chain))  # noqa: S301  our own bytes
    assert chain == other == copied
    assert len({chain, other, copied}) == 1
    assert copied.names == chain.names
    assert pickle.dumps(chain) == pickle.dumps(other)
    assert chain != Fallback(["openai:a", "openai:b"])
    assert repr(chain) == (
        "Fallback([OpenAIChatModel('a'), OpenAIChatModel('b')], on=['quota'], when=[When(budget_above=0.5, use='b')])"
    )


async def test_each_model_needs_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-FBK-4: an endpoint checks every model of the chain; in a run a missing key is no failure of a model."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(ValidationError, match=r"OpenAIChatModel\('b'\): no API key"):
        Fallback([OpenAIChatModel("a", api_key="x"), "openai:b"]).check_key()
    with pytest.raises(ValidationError, match=r"llm: OpenAIChatModel\('b'\): no API key"):
        check_team_keys({"team": Ensemble(tasks=[Task.of("Go")], llm=[ScriptedModel("a"), "openai:b"])})
    with pytest.raises(ValidationError, match="no API key"):
        await Fallback(["openai:b", ScriptedModel("a")]).chat(ASK)


async def test_a_chain_answers_as_a_model() -> None:
    """S-FBK-5: the first model that can; an error of a model's code is raised unchanged."""
    chain = Fallback([ScriptedModel(StatusError(401)), ScriptedModel("b", PlainError("mine"))])
    assert (await chain.chat(ASK)).text == "b"
    with pytest.raises(PlainError):
        await Fallback([ScriptedModel(PlainError("mine")), ScriptedModel("b")]).chat(ASK)


async def test_the_error_names_each_model() -> None:
    """S-FBK-14: in order, with the last error as its cause; of one model it is unchanged."""
    with pytest.raises(AllModelsFailedError) as failed:
        await Fallback([ScriptedModel(StatusError(401)), ScriptedModel(StatusError(503))]).chat(ASK)
    assert failed.value.failures == {"ScriptedModel": "status 401", "ScriptedModel#2": "status 503"}
    assert str(failed.value) == "No model of the chain answered. ScriptedModel: status 401; ScriptedModel#2: status 503"
    assert isinstance(failed.value.__cause__, StatusError)
    with pytest.raises(StatusError):
        await Fallback([ScriptedModel(StatusError(401))]).chat(ASK)


class Streamer:
    """Yields pieces, or raises after them."""

    def __init__(self, *pieces: str, error: Exception | None = None) -> None:
        self._pieces, self._error = pieces, error

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        return ChatResponse(text="".join(self._pieces))

    async def stream(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> AsyncIterator[str | ChatResponse]:
        for piece in self._pieces:
            yield piece
        if self._error is not None:
            raise self._error


async def test_a_chain_streams() -> None:
    """S-FBK-5, S-FBK-6, S-FBK-15: the next model before the first piece, none after it; a whole answer of one that cannot stream."""
    broken = Streamer(error=StatusError(503))
    assert [each async for each in Fallback([broken, Streamer("a", "b")]).stream(ASK)] == ["a", "b"]
    whole = [each async for each in Fallback([broken, ScriptedModel("b")]).stream(ASK)]
    assert "b" in [each.text if isinstance(each, ChatResponse) else each for each in whole]
    pieces = Fallback([Streamer("a", error=StatusError(503)), Streamer("b")]).stream(ASK)
    assert await anext(pieces) == "a"
    with pytest.raises(StatusError):
        await anext(pieces)


def test_filtered_answers_are_refusals() -> None:
    """S-FBK-11: by the finish reason, unless `on` lacks the word."""
    models = [ScriptedModel("a"), ScriptedModel("b")]
    cut = ChatResponse(text="The", finish_reason="content_filter")
    assert Fallback(models).reason_of_answer(cut) == "content_filter"
    assert Fallback(models).reason_of_answer(ChatResponse(text="The", finish_reason="length")) is None
    assert Fallback(models).reason_of_answer(ChatResponse(text="The")) is None
    assert Fallback(models, on="quota").reason_of_answer(cut) is None


async def test_a_limit_around_a_chain_holds_for_all_its_models() -> None:
    """S-FBK-7: they share its bucket; a chain behind a limit is a chain."""
    chain = Fallback([ScriptedModel("a"), ScriptedModel("b")])
    agent = Agent(role="Writer", goal="Write", llm=chain, rate_limit=RateLimit.per_minute(60))
    found = chain_of(agent.llm)
    assert found is not None
    assert found.names == chain.names
    buckets = {each.bucket for each in found.models if isinstance(each, RateLimitedChatModel)}
    assert len(buckets) == 1
    assert [getattr(each, "delegate", None) for each in found.models] == list(chain.models)
    assert chain_of(ScriptedModel("a")) is None


def test_rules_name_the_first_model_that_may_be_asked() -> None:
    """S-FBK-20: by the name in the chain or the model's own; by default the last one."""
    chain = Fallback(["openai:a", "openai:b", "openai:c"])
    uses = (When(tokens_above=1), When(tokens_above=1, use="openai:b"), When(tokens_above=1, use="a"))
    assert [chain.place_of(rule) for rule in uses] == [2, 1, 0]
    assert When(run_time_above=timedelta(minutes=2)).run_time_above_s == 120
    assert When(budget_above=0.8, run_time_above=5).to_data() == {"budget_above": 0.8, "run_time_above": 5}


def test_a_chain_is_a_part_of_the_definition() -> None:
    """S-FBK-43, S-FBK-41: its models, and `on` and `when` if set; its declared name is the first one's."""
    plain = Fallback(["openai:a", "openai:b"])
    assert model_data(plain) == {
        "class": "ensemble_ray.Fallback",
        "models": [
            {"class": "ensemble_ray.OpenAIChatModel", "model": "a"},
            {"class": "ensemble_ray.OpenAIChatModel", "model": "b"},
        ],
    }
    ruled = Fallback(["openai:a", "openai:b"], on=("quota", PlainError), when=When(budget_above=0.5))
    data = model_data(ruled)
    assert data["on"] == ["quota", f"{__name__}.PlainError"]
    assert data["when"] == [{"budget_above": 0.5}]
    assert declared_names(plain, model_names(plain)) == recorded_names(model_data(plain)) == ModelNames("a", "openai")


@pytest.mark.parametrize(
    ("llm", "names"),
    [
        ("openai:a", ModelNames("a", "openai")),
        ("local", ModelNames("local", "local")),
        ("local:/tmp/x.y.gguf", ModelNames("x.y", "local")),
        (ScriptedModel("a"), ModelNames(None, None)),
        (RateLimitedChatModel.of("openai:a", RateLimit.per_second(1)), ModelNames("a", "openai")),
    ],
)
def test_readers_of_a_record_name_a_declared_model(llm: object, names: ModelNames) -> None:
    """S-FBK-41: as the writer of its answers does."""
    model = resolve_llm(llm)
    assert declared_names(model, model_names(model)) == recorded_names(model_data(model)) == names


@pytest.mark.parametrize(
    ("kinds", "reads"),
    [([("image",), ("file", "image")], ("file", "image")), ([(), ("audio",)], ("audio",)), ([("image",), None], None)],
)
def test_a_chain_reads_what_one_of_its_models_reads(
    kinds: list[tuple[AttachmentKind, ...] | None], reads: tuple[str, ...] | None
) -> None:
    """S-FBK-18: if an endpoint decides about one of them, it decides about the chain."""
    models = [OpenAIChatModel(f"m{number}", api_key="k", reads=each) for number, each in enumerate(kinds)]
    assert Fallback(models).reads == reads
