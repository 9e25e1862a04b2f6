"""Models of embeddings: an endpoint of the protocol, the one that comes with its package, and what names them."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import openai
import pytest

from ensemble_ray import LocalEmbeddingModel, MemoryEntry, OpenAIEmbeddingModel, SqliteMemory, ValidationError
from ensemble_ray.memory import openai_embeddings
from ensemble_ray.memory.embedding_models import resolve_embedding_model
from ensemble_ray.memory.embeddings import metered_embeddings
from ensemble_ray.memory.openai_embeddings import Embedded, TextBatcher, shares_of
from ensemble_ray.process.concurrency import run_blocking, threads
from ensemble_ray.testing import Fault, ModelServer, ServedRequest
from ensemble_ray.testing.model_server.server import count_words

SECRET = "sk-secret"  # noqa: S105  made up, and looked for in what must not hold it


def model_at(server: ModelServer, **options: object) -> OpenAIEmbeddingModel:
    """The model of a server."""
    given = {"base_url": server.base_url, "api_key": SECRET, **options}
    return OpenAIEmbeddingModel("embed-small", **given)  # type: ignore[arg-type]  its options


def test_vectors_come_in_the_order_of_the_texts(model_server: Callable[..., ModelServer]) -> None:
    """S-MEM-121: batches of that size; answers go by their index, whatever their order."""
    server = model_server(api_key=SECRET)
    texts = [f"word{number} again" for number in range(5)]
    assert model_at(server, batch_size=2).embed_all(texts) == [count_words(text) for text in texts]
    bodies = [json.loads(request.raw) for request in server.requests]
    assert [body["input"] for body in bodies] == [texts[:2], texts[2:4], texts[4:]]
    assert all(body["model"] == "embed-small" and body["encoding_format"] == "float" for body in bodies)
    assert all("dimensions" not in body for body in bodies)
    assert {request.path for request in server.requests} == {"/v1/embeddings"}
    assert model_at(server, dimensions=8).embed("one") == count_words("one")
    assert json.loads(server.requests[-1].raw)["dimensions"] == 8
    assert model_at(server).embed_all([]) == []


def test_tokens_are_counted_for_whoever_meters_them(model_server: Callable[..., ModelServer]) -> None:
    """S-MEM-128: as the endpoint counts; in threads that are started from the block too."""
    model = model_at(model_server(api_key=SECRET), batch_size=2)
    model.embed("nobody counts these")
    with metered_embeddings() as meter:
        model.embed_all(["a b", "c", "d e f"])
        run_blocking(threads.run(model.embed, "g h"))
    model.embed("nor these")
    assert meter.tokens == 8


def test_texts_of_the_same_time_share_a_request(model_server: Callable[..., ModelServer]) -> None:
    """S-MEM-151: what comes while a request is under way goes with the next one; each caller counts its own tokens."""
    began, go_on = threading.Event(), threading.Event()

    def answer(request: ServedRequest) -> str:
        if not request.number:
            began.set()
            go_on.wait(timeout=60)
        return "vectors"

    server = model_server(answer)
    model = model_at(server)
    texts = ["first", *(f"{'word ' * number}last" for number in range(7))]
    found: dict[str, tuple[object, int]] = {}

    def embed(text: str) -> None:
        with metered_embeddings() as meter:
            found[text] = (model.embed(text), meter.tokens)

    threads = [threading.Thread(target=embed, args=(text,)) for text in texts]
    threads[0].start()
    began.wait(timeout=60)
    for thread in threads[1:]:
        thread.start()
    while len(model._batcher._waiting) < 7:
        time.sleep(0.001)
    go_on.set()
    for thread in threads:
        thread.join()
    assert {text: vector for text, (vector, _) in found.items()} == {text: count_words(text) for text in texts}
    assert len(server.requests) == 2
    assert sum(tokens for _, tokens in found.values()) == sum(len(text.split()) for text in texts)
    assert found["first"][1] == 1


def test_a_text_that_is_refused_fails_alone(model_server: Callable[..., ModelServer]) -> None:
    """S-MEM-151: the others of its request are asked for again, each alone."""

    async def embed_side_by_side(send: Callable[[list[str]], Awaitable[Embedded]]) -> list[object]:
        batcher = TextBatcher(send, 128)
        first = asyncio.ensure_future(batcher.embed("one"))
        await asyncio.sleep(0)
        return await asyncio.gather(
            first, *(batcher.embed(text) for text in ("two", "bad", "three")), return_exceptions=True
        )

    def answer(request: ServedRequest) -> Fault | str:
        return Fault(status=400, message="too long") if "bad" in json.loads(request.raw)["input"] else "vectors"

    server = model_server(answer)
    found = run_blocking(embed_side_by_side(model_at(server)._embed_batch))
    assert [each[0] if isinstance(each, tuple) else type(each) for each in found] == [
        count_words("one"),
        count_words("two"),
        openai.BadRequestError,
        count_words("three"),
    ]


@pytest.mark.parametrize(
    ("texts", "tokens", "shares"),
    [
        (["ab", "ab"], 5, [2, 3]),
        (["a" * 90, "b" * 10], 10, [9, 1]),
        (["", ""], 3, [0, 3]),
        (["a", "b"], None, [None, None]),
    ],
)
def test_tokens_are_shared_by_length(texts: list[str], tokens: int | None, shares: list[int | None]) -> None:
    """S-MEM-151: together they are what was counted."""
    assert shares_of(texts, tokens) == shares


def test_many_entries_without_vectors_are_embedded_in_batches(
    model_server: Callable[..., ModelServer], tmp_path: Path
) -> None:
    """S-MEM-116, S-MEM-121: the first search with a model does not send a request for each."""
    server = model_server()
    path = tmp_path / "memory.db"
    plain = SqliteMemory(path)
    for number in range(300):
        plain.store("a", MemoryEntry(content=f"word{number}"))
    memory = SqliteMemory(path, embedding_model=model_at(server))
    assert len(memory.retrieve("a", "word7", 300)) == 300
    assert [len(json.loads(request.raw)["input"]) for request in server.requests] == [128, 128, 44, 1]


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": "3"}, {"prompt_tokens": -1}, "none"])
def test_tokens_are_estimated_where_the_endpoint_counts_none(usage: object) -> None:
    """S-MEM-128: None stands for no count, whatever the endpoint says in its place."""
    body = {"data": [{"index": 0, "embedding": [1.0]}], "usage": usage}
    assert openai_embeddings._parse_answer(json.dumps(body).encode(), 1) == ([[1.0]], None)


def test_a_failure_of_the_provider_is_repeated(model_server: Callable[..., ModelServer]) -> None:
    """S-MEM-121, S-MEM-130: as often as asked for."""

    def answer(request: ServedRequest) -> Fault | str:
        return Fault(status=500, retry_after_s=0.0) if request.number < 2 else "vectors"

    server = model_server(answer)
    assert model_at(server).embed("one") == count_words("one")
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Fault(status=401, message="no"), openai.AuthenticationError),
        (Fault(kind="garbage"), openai.APIError),
        (Fault(status=500), openai.InternalServerError),
    ],
)
def test_failures_are_those_of_the_package(
    model_server: Callable[..., ModelServer], answer: Fault, error: type[Exception]
) -> None:
    """S-MEM-121: no key in them."""
    server = model_server(lambda _: answer)
    with pytest.raises(error) as caught:
        model_at(server, max_retries=0).embed("one")
    assert SECRET not in str(caught.value)


def test_an_answer_that_lacks_a_vector_is_refused(model_server: Callable[..., ModelServer]) -> None:
    """S-MEM-121: one for each text."""
    server = model_server(embed=lambda text: ["x"] if text == "bad" else [1.0])
    with pytest.raises(openai.APIError, match="no embedding for each of 2 texts"):
        model_at(server, max_retries=0).embed_all(["good", "bad"])


def test_the_key_and_the_place_come_from_the_environment(
    model_server: Callable[..., ModelServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-MEM-121, S-CONV-22: when a call is made."""
    server = model_server(api_key=SECRET)
    model = OpenAIEmbeddingModel("embed-small")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ValidationError, match="no API key"):
        model.embed("one")
    monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    assert model.embed("one") == count_words("one")
    monkeypatch.setenv("OPENAI_BASE_URL", "nowhere")
    with pytest.raises(ValidationError, match="OPENAI_BASE_URL"):
        model.embed("one")


def test_it_pickles_and_hides_its_key() -> None:
    """S-MEM-121."""
    model = OpenAIEmbeddingModel("m", base_url="http://me:pw@localhost:1/v1", api_key=SECRET)
    again = pickle.loads(pickle.dumps(model))  # noqa: S301  our own
    assert again == model
    assert hash(again) == hash(model)
    assert SECRET not in repr(model)
    assert "pw" not in repr(model)
    assert model != OpenAIEmbeddingModel("m")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"model": " "}, "model must not be blank"),
        ({"base_url": "nowhere"}, "base_url"),
        ({"batch_size": 0}, "batch_size must be >= 1, got: 0"),
        ({"max_retries": -1}, "max_retries must be >= 0, got: -1"),
        ({"dimensions": 0}, "dimensions must be >= 1, got: 0"),
        ({"timeout": 0}, "timeout must be > 0, got: 0"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], text: str) -> None:
    """S-MEM-121."""
    with pytest.raises(ValidationError, match=f"^OpenAIEmbeddingModel {text}"):
        OpenAIEmbeddingModel(**{"model": "m", **options})  # type: ignore[arg-type]  what is refused


def test_the_local_model_knows_what_words_mean() -> None:
    """S-MEM-120: offline; `local` names it."""
    model = resolve_embedding_model("local")
    assert model == LocalEmbeddingModel()
    assert pickle.loads(pickle.dumps(model)) == model  # noqa: S301  our own
    assert model is not None
    asked, near, far = (
        model.embed(text)
        for text in ("the customer wants the money back", "refund requested by the buyer", "a recipe for onion soup")
    )
    assert len(asked) == 256

    def alike(one: object, other: object) -> float:
        return sum(a * b for a, b in zip(one, other, strict=True))  # type: ignore[call-overload]  vectors

    assert alike(asked, near) > alike(asked, far)


def test_a_model_is_named_by_a_word() -> None:
    """S-MEM-120: and what names none is told with the known forms."""
    assert resolve_embedding_model(None) is None
    assert resolve_embedding_model("openai:text-embedding-3-small") == OpenAIEmbeddingModel("text-embedding-3-small")
    with pytest.raises(ValidationError, match=r"Unknown embedding_model 'best'. Known: \[local, openai:MODEL\]"):
        SqliteMemory("x.db", embedding_model="best")
    with pytest.raises(ValidationError, match=r"a method 'embed' or one of \[local, openai:MODEL\], got: int"):
        SqliteMemory("x.db", embedding_model=5)  # type: ignore[arg-type]  what is refused


def test_the_local_model_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-MEM-120: the error names it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValidationError, match=r'pip install "ensemble-ray\[memory\]"'):
        LocalEmbeddingModel()
