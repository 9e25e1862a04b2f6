"""What hostile model endpoints answer: bodies and streams without an end, bombs, redirects, headers, nested JSON."""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache

import openai
import pytest

from ensemble_ray import ChatMessage, ChatResponse, EnsembleError, OpenAIChatModel
from ensemble_ray.llm.failures import fault_of
from tests.attack.raw_server import RawServer, Write

MIB = 2**20
#: What the clients under test may take of one answer.
LIMIT = MIB
#: The same where many small events are traced.
SHORT = LIMIT // 4
HELLO = [ChatMessage("user", "the secret plan")]
KEY = "sk-very-secret"
OK = {"choices": [{"message": {"content": "hi"}}]}


def head(*lines: str, status: str = "200 OK", content_type: str = "application/json") -> bytes:
    """The head of an answer whose body ends with the connection."""
    return "\r\n".join(
        (f"HTTP/1.1 {status}", f"Content-Type: {content_type}", "Connection: close", *lines, "", "")
    ).encode("utf-8", "surrogateescape")


SSE = head(content_type="text/event-stream")


def event(data: object) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def delta(change: object) -> bytes:
    """A piece of a streamed answer."""
    return event({"choices": [{"index": 0, "delta": change}]})


def repeated(begin: bytes, piece: bytes) -> Callable[[Write, int], None]:
    """An answer that never ends by itself."""

    def answer(write: Write, _: int) -> None:
        write(begin)
        while True:
            write(piece)

    return answer


def once(*parts: bytes) -> Callable[[Write, int], None]:
    """An answer in parts."""

    def answer(write: Write, _: int) -> None:
        for part in parts:
            write(part)

    return answer


@pytest.fixture(params=["lean", "package"])
def client(request: pytest.FixtureRequest) -> str:
    """Which client sends: ours, or that of the `openai` package."""
    return str(request.param)


def model_at(server: RawServer, client: str, **options: object) -> OpenAIChatModel:
    """A model of that client, with a limit on answers."""
    given: dict[str, object] = {"max_answer_bytes": LIMIT, "timeout": 60, **options}
    if client == "package":
        given["client_options"] = {"max_retries": 2}
    return OpenAIChatModel("m", base_url=server.base_url, api_key=KEY, **given)  # type: ignore[arg-type]


async def ask(model: OpenAIChatModel, *, stream: bool) -> list[str | ChatResponse]:
    """Everything that the model gives."""
    if stream:
        return [part async for part in model.stream(HELLO)]
    return [await model.chat(HELLO)]


async def refused(model: OpenAIChatModel, *, stream: bool) -> Exception:
    """The error that a call ends with; it must be one that is not repeated."""
    with pytest.raises(openai.APIError) as caught:
        await ask(model, stream=stream)
    assert fault_of(caught.value) is None, "it would be asked again"
    assert model.base_url in str(caught.value)
    return caught.value


@contextmanager
def memory_below(limit_bytes: int) -> Generator[None]:
    """Nothing in the block holds more at any time."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < limit_bytes, f"{peak / MIB:.0f} MiB"


async def warm(client: str) -> None:
    """Import what the first call imports, so that its memory is not counted."""
    with RawServer(once(head(), json.dumps(OK).encode())) as server:
        assert await ask(model_at(server, client), stream=False) == [ChatResponse("hi")]
    with RawServer(once(head(status="500 No"))) as server, pytest.raises(openai.APIError):
        await ask(model_at(server, client), stream=False)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_endless_body_ends_at_the_limit_when_an_endpoint_sends_one(client: str, stream: bool) -> None:  # noqa: FBT001
    """S-SEC-50: what is beyond `max_answer_bytes` is not read; the error says so, and nothing is asked again."""
    await warm(client)
    with RawServer(repeated(head(), b"x" * 65536)) as server, memory_below(12 * LIMIT):
        error = await refused(model_at(server, client), stream=stream)
        assert f"it is longer than {LIMIT} bytes" in str(error)
        assert "max_answer_bytes" in str(error)
        assert len(server.requests) == 1
    assert server.sent_bytes < 32 * LIMIT  # with what the kernel buffers


@cache
def gzip_bomb(mebibytes: int) -> bytes:
    """Return so many of the same byte, packed; packing them takes longer than what is done with them."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([packer.compress(b"x" * MIB) for _ in range(mebibytes)]) + packer.flush()


async def test_a_packed_body_is_unpacked_no_further_than_the_limit_when_it_is_a_bomb(client: str) -> None:
    """S-SEC-50: limits count unpacked bytes while unpacking: 200 kB that become 200 MiB."""
    bomb = gzip_bomb(200)
    assert len(bomb) < MIB
    await warm(client)
    with RawServer(once(head("Content-Encoding: gzip"), bomb)) as server, memory_below(12 * LIMIT):
        error = await refused(model_at(server, client), stream=False)
    assert f"it is longer than {LIMIT} bytes" in str(error)


@pytest.mark.parametrize("encoding", ["gzip, gzip", "br", "zstd, gzip", "x" * 5000])
async def test_an_answer_is_refused_when_it_is_packed_twice_or_in_another_way(client: str, encoding: str) -> None:
    """S-SEC-50: one layer of gzip or deflate; 300 bytes that become 300 MB are not unpacked once."""
    bomb = gzip.compress(gzip_bomb(50))
    await warm(client)
    with RawServer(once(head(f"Content-Encoding: {encoding}"), bomb)) as server, memory_below(12 * LIMIT):
        error = await _failed(model_at(server, client))
    assert len(str(error)) < 1500


async def _failed(model: OpenAIChatModel) -> Exception:
    with pytest.raises(openai.APIError) as caught:
        await model.chat(HELLO)
    return caught.value


@pytest.mark.parametrize("packed", ["gzip", "deflate"])
async def test_a_packed_answer_is_read_when_it_is_one_layer(client: str, packed: str) -> None:
    """S-SEC-50: gateways pack answers."""
    data = json.dumps(OK).encode()
    body = gzip.compress(data) if packed == "gzip" else zlib.compress(data)
    with RawServer(once(head(f"Content-Encoding: {packed}"), body)) as server:
        assert await ask(model_at(server, client), stream=False) == [ChatResponse("hi")]


async def test_an_error_of_a_failure_is_cut_when_its_body_has_no_end(client: str) -> None:
    """S-SEC-50, S-SEC-59: 64 KiB of a failure are read, 500 characters shown, and it stays that failure."""
    await warm(client)
    begin = head(status="400 Bad Request") + b'{"error": {"message": "'
    with RawServer(repeated(begin, b"\n\x1b[31mno " * 8192)) as server, memory_below(12 * LIMIT):
        error = await refused(model_at(server, client), stream=False)
        assert len(server.requests) == 1
    assert isinstance(error, openai.BadRequestError)
    assert len(str(error)) < 1500
    assert str(error).isprintable()
    assert server.sent_bytes < 32 * LIMIT


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        (b": still alive\n" * 4096, f"it is longer than {4 * SHORT} bytes, the limit of a stream"),
        (b"data: " + b"x" * 65536, f"it is longer than {SHORT} bytes, the limit of one event"),
        (b"x" * 65536, f"it is longer than {SHORT} bytes, the limit of a whole answer"),
        (b"data: x\n" * 4096, f"it is longer than {SHORT} bytes, the limit of one event"),
        (b'data: {"choices": []}\n\n' * 2048, f"it is longer than {4 * SHORT} bytes, the limit of a stream"),
        (delta({"content": "word "}) * 512, f"it is longer than {4 * SHORT} bytes, the limit of a stream"),
    ],
    ids=["comments", "line", "no stream", "event", "events", "tokens"],
)
async def test_an_endless_stream_ends_at_the_limit_when_an_endpoint_sends_one(
    client: str, piece: bytes, said: str
) -> None:
    """S-SEC-51: bytes of the stream, of one line and of one event are bounded, and reading them takes linear time."""
    await warm(client)
    with RawServer(repeated(SSE, piece)) as server, memory_below(48 * SHORT):
        began_s = time.process_time()
        error = await refused(model_at(server, client, max_answer_bytes=SHORT), stream=True)
        took_s = time.process_time() - began_s
        assert said in str(error)
        assert len(server.requests) == 1
    assert took_s < 5  # of processor time, traced
    assert server.sent_bytes < 64 * LIMIT  # with what the kernel buffers


async def test_a_call_in_many_pieces_takes_linear_time_when_its_arguments_come_letter_by_letter(client: str) -> None:
    """S-SEC-51: 40,000 pieces of a call's arguments onto a megabyte; each copy of it would take minutes."""
    long = delta({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "t", "arguments": "y" * MIB}}]})
    letter = delta({"tool_calls": [{"index": 0, "function": {"arguments": "x"}}]})
    with RawServer(once(SSE, long, letter * 40_000, b"data: [DONE]\n\n")) as server:
        began_s = time.process_time()
        *_, whole = await ask(model_at(server, client, max_answer_bytes=4 * LIMIT), stream=True)
        took_s = time.process_time() - began_s
    assert isinstance(whole, ChatResponse)
    assert len(whole.tool_calls[0].arguments) == MIB + 40_000
    assert took_s < 15


async def test_members_in_many_pieces_take_linear_time_when_they_come_letter_by_letter(client: str) -> None:
    """S-SEC-51, S-LLM-9: members that only the provider knows are joined once, however many pieces and items they have."""
    long = delta({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "t"}}], "reasoning": "y" * MIB})
    letters = (delta({"reasoning": "x", "details": [{"index": n, "text": "z"}, n]}) for n in range(20_000))
    with RawServer(once(SSE, long, b"".join(letters), b"data: [DONE]\n\n")) as server:
        began_s = time.process_time()
        *_, whole = await ask(model_at(server, client, max_answer_bytes=4 * LIMIT), stream=True)
        took_s = time.process_time() - began_s
    assert isinstance(whole, ChatResponse)
    assert whole.provider_fields is not None
    members = json.loads(whole.provider_fields.message)
    assert (len(members["reasoning"]), len(members["details"])) == (MIB + 20_000, 40_000)
    assert took_s < 15


async def test_members_are_refused_when_they_are_longer_than_an_answer(client: str) -> None:
    """S-SEC-51, S-LLM-9: also where each piece is short, and memory stays bounded."""
    await warm(client)
    with RawServer(repeated(SSE, delta({"x": [[], {}] * 20}) * 512)) as server, memory_below(48 * SHORT):
        error = await refused(model_at(server, client, max_answer_bytes=SHORT), stream=True)
    assert f"it is longer than {SHORT} bytes" in str(error)


async def test_a_dripping_stream_ends_when_its_time_is_up(client: str) -> None:
    """S-SEC-52: a byte now and then is no silence; the whole answer has a limit of its own, and is not asked for again."""

    def drip(write: Write, _: int) -> None:
        write(SSE)
        while not server.stopped.wait(0.05):
            write(b":\n")

    await warm(client)
    with RawServer(drip) as server:
        error = await refused(model_at(server, client, timeout=30, max_answer_time=1), stream=True)
        assert "not complete after 1 s" in str(error)
        assert "max_answer_time" in str(error)
        assert len(server.requests) == 1


async def test_a_dripping_body_ends_when_its_time_is_up(client: str) -> None:
    """S-SEC-52: `timeout` is on the whole of an answer that is not streamed; with the package's client the limit is."""

    def drip(write: Write, _: int) -> None:
        write(head())
        while not server.stopped.wait(0.05):
            write(b" ")

    await warm(client)
    with RawServer(drip) as server:
        error = await _failed(model_at(server, client, timeout=3, max_answer_time=3))
        assert "3 s" in str(error)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    "lines", [["X-Long: " + "x" * 100_000], [f"X-{n}: y" for n in range(5000)]], ids=["long", "many"]
)
async def test_headers_are_bounded_when_an_endpoint_sends_too_many(client: str, lines: list[str]) -> None:
    """S-SEC-57: an error of the call, whatever the headers are."""
    with RawServer(once(head(*lines), json.dumps(OK).encode())) as server:
        error = await _failed(model_at(server, client))
    assert len(str(error)) < 1500


@pytest.mark.parametrize(
    "wish",
    ["\u0663", "\uff13", "inf", "nan", "1e400", "-5", "9" * 5000, "Fri, 31 Dec 9999 23:59:59 GMT", "\udcff\udcfe"],
)
async def test_the_failure_is_told_when_its_headers_are_nonsense(client: str, wish: str) -> None:
    """S-SEC-57: a `Retry-After` that is no wish, or a request id that is no ASCII, changes nothing of the failure."""
    lines = [f"Retry-After: {wish}", "X-Request-Id: \u0663\udcff"]
    with RawServer(once(head(*lines, status="429 Slow"), b"{}")) as server:
        error = await _failed(model_at(server, "lean"))
        if client == "package":
            model = OpenAIChatModel("m", base_url=server.base_url, api_key=KEY, client_options={"max_retries": 0})
            error = await _failed(model)
    assert isinstance(error, openai.RateLimitError)
    assert str(error).isprintable()


NESTED = "[" * 200_000 + "]" * 200_000
DEEP = "[" * 900 + "]" * 900


def message(**members: str) -> bytes:
    """A completion whose message has these members, given as JSON text."""
    inner = ", ".join(f'"{name}": {text}' for name, text in members.items())
    return f'{{"choices": [{{"message": {{{inner}}}}}]}}'.encode()


BODIES = {
    "nested": NESTED.encode(),
    "nested error": f'{{"error": {DEEP}}}'.encode(),
    "nested message": f'{{"error": {{"message": {NESTED}}}}}'.encode(),
    "deep object": f'{{"x": {DEEP}}}'.encode(),
    "nested text": message(content=f'[{{"text": {NESTED}}}]'),
    "nested arguments": message(tool_calls=f'[{{"function": {{"name": "t", "arguments": {NESTED}}}}}]'),
    "nested name": message(tool_calls=f'[{{"function": {{"name": {NESTED}}}}}]'),
    "many calls": message(tool_calls=json.dumps([{"function": {"name": "t"}}] * 5000)),
    "long number": b"1" * 100_000,
    "odd choices": b'{"choices": {"0": 1}}',
    "odd calls": message(tool_calls="7"),
    "not utf-8": b"\xff\xfe\x00{",
}


@pytest.mark.parametrize("name", BODIES)
async def test_an_answer_is_the_providers_error_when_its_form_is_hostile(client: str, name: str) -> None:
    """S-SEC-53: nothing of an answer's form gets past the endpoint's error; it is shown cut, on one line."""
    with RawServer(once(head(), BODIES[name])) as server:
        error = await refused(model_at(server, client, max_answer_bytes=4 * LIMIT), stream=False)
    assert len(str(error)) < 1500
    assert str(error).isprintable()


CHUNKS = {
    "nested": NESTED,
    "nested error": f'{{"error": {DEEP}}}',
    "endless index": '{"choices": [{"delta": {"tool_calls": [{"index": 1e400, "function": {"name": "t"}}]}}]}',
    "no index": '{"choices": [{"delta": {"tool_calls": [{"index": NaN, "function": {"name": "t"}}]}}]}',
    "odd choices": '{"choices": {"0": 1}}',
    "many calls": json.dumps({"choices": [{"delta": {"tool_calls": [{"index": n} for n in range(5000)]}}]}),
    "many calls under one index": json.dumps(
        {
            "choices": [
                {"delta": {"tool_calls": [{"index": 0, "id": n, "function": {"name": "t"}} for n in range(5000)]}}
            ]
        }
    ),
    "odd delta": '{"choices": [{"delta": [1]}]}',
}


@pytest.mark.parametrize("name", CHUNKS)
async def test_a_stream_is_the_providers_error_when_its_form_is_hostile(client: str, name: str) -> None:
    """S-SEC-53: the same for each piece of a stream."""
    with RawServer(once(SSE, b"data: " + CHUNKS[name].encode() + b"\n\n")) as server:
        error = await refused(model_at(server, client), stream=True)
    assert len(str(error)) < 1500


async def test_a_count_of_tokens_is_unknown_when_no_model_counts_so_far(client: str) -> None:
    """S-SEC-53: a count of a thousand digits would fail whatever adds it up or writes it."""
    lies = json.dumps({**OK, "usage": {"prompt_tokens": 10**4000, "completion_tokens": -5}}).encode()
    with RawServer(once(head(), lies)) as server:
        [answer] = await ask(model_at(server, client), stream=False)
    assert isinstance(answer, ChatResponse)
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (-1, -1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_nothing_arrives_elsewhere_when_an_endpoint_redirects_to_another_origin(
    client: str,
    status: int,
    stream: bool,  # noqa: FBT001
) -> None:
    """S-SEC-54: neither prompt nor key is sent there; the error names the origin without what else stands in the URL."""
    with RawServer(once(head(), json.dumps(OK).encode())) as other:
        place = f"http://user:pw@{other.origin.removeprefix('http://')}/v1/chat/completions?x=1"
        answer = once(head(f"Location: {place}", status=f"{status} Elsewhere"))
        with RawServer(answer) as server:
            error = await refused(model_at(server, client), stream=stream)
            assert len(server.requests) == 1
        assert other.requests == []
    if status in {307, 308}:
        assert f"to another origin, {other.origin}," in str(error)
    assert "pw" not in str(error)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_redirect_is_followed_when_it_stays_at_the_origin(client: str, stream: bool) -> None:  # noqa: FBT001
    """S-SEC-54: another path of the same scheme, host and port, with method and body kept."""

    def answer(write: Write, number: int) -> None:
        if number == 0:
            write(head("Location: /v1/chat/completions/", "Content-Length: 0", status="307 There"))
        elif stream:
            write(SSE + delta({"content": "hi"}) + b"data: [DONE]\n\n")
        else:
            write(head() + json.dumps(OK).encode())

    with RawServer(answer) as server:
        assert (await ask(model_at(server, client), stream=stream))[-1] == ChatResponse("hi")
        first, second = server.requests
    assert second.startswith(b"POST /v1/chat/completions/ ")
    assert first.partition(b"\r\n\r\n")[2] == second.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("place", ["/v1/chat/completions", "http://[::1", "//\x7f\u0663/", "", "file:///etc/passwd"])
async def test_a_redirect_ends_when_it_leads_nowhere(client: str, place: str) -> None:
    """S-SEC-54: no more than three in a row; what is no URL is shown as text."""
    with RawServer(once(head(f"Location: {place}", "Content-Length: 0", status="307 Again"))) as server:
        error = await _failed(model_at(server, client))
        assert len(server.requests) <= 4 * 3  # the package's own attempts
    assert str(error).isprintable()
    assert not isinstance(error, EnsembleError)
