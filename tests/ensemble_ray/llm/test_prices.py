"""Prices from the library, and those that users give."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ensemble_ray import LocalChatModel, ModelPrice, OpenAIChatModel, RateLimit, RateLimitedChatModel, ValidationError
from ensemble_ray.llm.prices import (
    check_given,
    decide_prices,
    embedding_price,
    named_price,
    price_lines,
    price_mark,
    price_of,
    source_of_prices,
    url_price,
)
from ensemble_ray.memory.openai_embeddings import OpenAIEmbeddingModel
from ensemble_ray.testing import ScriptedModel
from ensemble_ray.values.prices import EMBEDDINGS, RunPrices

OPENAI = "https://api.openai.com/v1"


def at(model: str, url: str = OPENAI) -> OpenAIChatModel:
    """A model at an endpoint."""
    return OpenAIChatModel(model, base_url=url, api_key="k")


@pytest.mark.parametrize(
    ("url", "model", "provider"),
    [
        (OPENAI, "gpt-5", "openai"),
        ("https://team.openai.azure.com/openai/v1", "gpt-5", "azure"),
        ("https://api.anthropic.com/v1", "claude-sonnet-4-5", "anthropic"),
        ("https://api.deepseek.com/v1", "deepseek-chat", "deepseek"),
        ("https://api.groq.com/openai/v1", "llama-3.3-70b-versatile", "groq"),
        ("https://openrouter.ai/api/v1", "anthropic/claude-sonnet-4.5", "openrouter"),
        ("https://generativelanguage.googleapis.com/v1beta/openai/", "gemini-2.5-flash", "google"),
        ("https://api.mistral.ai/v1", "mistral-small-latest", "mistral"),
    ],
)
def test_price_is_found_by_endpoint_and_name(url: str, model: str, provider: str) -> None:
    """S-PRC-10: of the provider at that address."""
    found = price_of(RunPrices(), at(model, url))
    assert found is not None
    assert found == named_price(f"{provider}:{model}")
    assert (found.is_complete, found.source) == (True, source_of_prices())


@pytest.mark.parametrize(
    "model",
    [
        at("gpt-5", "http://127.0.0.1:8000/v1"),
        at("gpt-5", "https://127.0.0.1/v1"),
        at("gpt-5", "https://vllm/v1"),
        at("gpt-5", "https://models.example.com/v1"),
        at("a-model-of-our-own"),
        ScriptedModel(),
        object(),
    ],
    ids=["http", "address", "no dot", "other host", "other model", "own class", "no model"],
)
def test_other_models_have_no_price(model: object) -> None:
    """S-PRC-10: their cost is unknown, not 0."""
    assert price_of(RunPrices(), model) is None


def test_local_model_is_free(tmp_path: object) -> None:
    """S-PRC-10."""
    found = price_of(RunPrices(), LocalChatModel(path=f"{tmp_path}/own.gguf"))
    assert found is not None
    assert (found.input, found.output) == (0, 0)


def test_library_has_batches_long_prompts_and_caches() -> None:
    """S-PRC-10: the rates of all are taken over."""
    found = named_price("openai:gpt-5.5")
    assert found is not None
    assert found.batch is not None
    assert found.cached_input is not None
    assert found.input is not None
    ((start, longer),) = found.above.items()
    assert longer.input is not None
    assert longer.input > found.input > found.cached_input
    assert found.batch.input is not None
    assert found.batch.input < found.input
    assert start in found.batch.above
    written = named_price("anthropic:claude-sonnet-4-5")
    assert written is not None
    assert written.cache_write is not None


def test_given_price_wins_and_the_library_fills_its_gaps() -> None:
    """S-PRC-13: by name, by provider and name before it, by the name of another model; behind a rate limit too."""
    library = named_price("openai:gpt-5")
    assert library is not None
    mine = price_of(RunPrices(given={"gpt-5": ModelPrice(input=1)}), at("gpt-5"))
    assert mine is not None
    assert (mine.input, mine.output, mine.batch) == (1, library.output, library.batch)
    exact = {"gpt-5": ModelPrice(input=1), "openai:gpt-5": ModelPrice(input=3)}
    found = price_of(RunPrices(given=exact), at("gpt-5"))
    assert found is not None
    assert found.input == 3
    own = RateLimitedChatModel.of(at("our-gpt", "http://gateway:4000/v1"), RateLimit.per_minute(5))
    assert price_of(RunPrices(given={"our-gpt": "openai:gpt-5"}), own) == library


@pytest.mark.parametrize("name", ["openai:nothing", "gpt-5", "nobody:gpt-5"])
def test_name_of_an_unknown_model_is_refused(name: str) -> None:
    """S-PRC-13: with how to write it."""
    with pytest.raises(
        ValidationError, match=f"Ensemble prices: 'm' has the price of '{name}', which genai-prices .*PROVIDER"
    ):
        check_given(RunPrices(given={"m": name}), [])


def test_half_a_price_is_refused() -> None:
    """S-PRC-13: for a model that the library does not have."""
    prices = RunPrices(given={"m": ModelPrice(input=1), "gpt-5": ModelPrice(input=1)})
    check_given(prices, [("llm", at("gpt-5"))])
    with pytest.raises(ValidationError, match=r"price of 'm' at '127\.0\.0\.1' \(llm\) has no rate of output"):
        check_given(prices, [("llm", at("m", "http://127.0.0.1/v1"))])


def test_run_decides_on_the_prices_of_its_models() -> None:
    """S-PRC-14: a decided one stays, whatever users give; an answer names its price if it is not the first."""
    known, mini, unknown = at("gpt-5"), at("gpt-4o-mini"), at("gpt-5", "http://127.0.0.1/v1")
    prices = decide_prices(
        RunPrices(), [known, mini, unknown], [OpenAIEmbeddingModel("text-embedding-3-small", base_url=OPENAI)]
    )
    assert list(prices.decided) == ["openai:gpt-5", "openai:gpt-4o-mini", EMBEDDINGS]
    assert [price_mark(prices, each) for each in (mini, known, unknown)] == [None, "openai:gpt-5", ""]
    late = price_mark(prices, at("gpt-4.1"))
    assert isinstance(late, dict)
    assert late["source"] == source_of_prices()
    again = RunPrices(decided=prices.decided, given={"gpt-5": ModelPrice(input=99)})
    assert price_of(again, known) == prices.decided["openai:gpt-5"]
    assert price_mark(None, known) is None
    assert price_mark(RunPrices(), unknown) is None


def test_embedding_model_has_a_price_without_output() -> None:
    """S-PRC-11."""
    found = embedding_price(RunPrices(), OpenAIEmbeddingModel("text-embedding-3-small", base_url=OPENAI))
    assert found is not None
    assert found.output == 0
    assert embedding_price(RunPrices(), OpenAIEmbeddingModel("m", base_url="http://127.0.0.1/v1")) is None


def test_price_as_lines() -> None:
    """S-PRC-16: all rates, with what they are for, and their source."""
    price = ModelPrice(input=2, output="8.5", above={1000: ModelPrice(input=4)}, batch=ModelPrice(input=1), source="me")
    assert price_lines(price) == [
        "         2  input",
        "       8.5  output",
        "         4  input, above 1,000 tokens of input",
        "         1  input, batch",
        "USD per million tokens; source: me",
    ]


@pytest.mark.program
def test_library_is_imported_only_for_public_endpoints() -> None:
    """S-PRC-15: and nothing is downloaded, which a process without a network shows."""
    program = f"""
import socket, sys
from ensemble_ray import Agent, Ensemble, InlineRuntime, OpenAIChatModel, Task
from ensemble_ray.llm.prices import url_price
from ensemble_ray.testing import ScriptedModel
Ensemble(Task("Say it", agent=Agent("A", "g", llm=ScriptedModel("x")))).run(runtime="inline", durability="off")
url_price("gpt-5", "http://127.0.0.1:1/v1")
assert "genai_prices" not in sys.modules
def refuse(*_):
    raise OSError("no network")
socket.socket.connect = refuse
assert url_price("gpt-5", "{OPENAI}") is not None
assert "genai_prices" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)  # noqa: S603  our own program


def test_price_at_an_address_needs_a_name() -> None:
    """S-PRC-10."""
    assert url_price("", OPENAI) is None
