"""Hostile pages and answers of the web: what they may cost, in bytes and processor time, whatever they are made of."""

from __future__ import annotations

import ast
import asyncio
import functools
import gzip
import json
import os
import resource
import sys
import threading
import tracemalloc
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ensemble_ray import AbstractAgentTool, HttpAgentTool, ToolResult, WebScraperTool, WebSearchTool, aresume
from ensemble_ray.testing import ModelServer
from ensemble_ray.text.unpacking import STEP_BYTES, BodyUnpacker
from ensemble_ray.tools.builtin.web import TavilySearch
from ensemble_ray.tools.web import net, page_reader
from ensemble_ray.tools.web.page_reader import PageError, read_page
from tests.attack.reading_run import DIED, MARKS, MODEL, PATHS, RUN_ID, WEB, answers, team
from tests.contracts.web_server import Answer, WebServer, serving

ROOT = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 5_242_880
#: Processor time that an attack may cost here, s; before, most took minutes.
LIMIT_S = 5.0
#: Memory that an answer of one limit may take on its way, all copies together.
MEMORY_BYTES = 8 * LIMIT_BYTES


@pytest.fixture
async def server() -> AsyncIterator[WebServer]:
    """A server on loopback."""
    async with serving() as found:
        yield found


@contextmanager
def costs_at_most(limit_s: float = LIMIT_S, *, memory_bytes: int | None = None) -> Generator[None]:
    """Let the block cost at most that much processor time, its processes included, and that much of Python's memory."""
    before = _used_s()
    if memory_bytes is not None:
        tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert _used_s() - before < limit_s
    assert memory_bytes is None or peak < memory_bytes


def _used_s() -> float:
    own, theirs = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + theirs.ru_utime + theirs.ru_stime


def _zeros(size: int, head: bytes = b"") -> bytes:
    """So many zero bytes as raw deflate, one block repeated; no reader may come to its end, so it has no checksum."""
    packer, block = zlib.compressobj(9, wbits=-15), bytes(1_000_000)
    return head + (packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)) * (size // len(block))


_GZIP_HEAD = gzip.compress(b"")[:10]
_EMPTY_BLOCKS = b"\x78\x9c" + b"\x00\x00\x00\xff\xff" * 10_000_000
#: Makes a Content-Encoding, and a body of a few kilobytes that unfolds to gigabytes, or to nothing after gigabytes of work.
BOMBS: dict[str, Callable[[], tuple[str, bytes]]] = {
    "gzip": lambda: ("gzip", _zeros(500_000_000, _GZIP_HEAD)),
    "bare deflate": lambda: ("deflate", _zeros(500_000_000)),
    "gzip twice": lambda: ("gzip, gzip", gzip.compress(_zeros(1_800_000_000, _GZIP_HEAD))),
    "empty blocks in gzip": lambda: ("deflate, gzip", gzip.compress(_EMPTY_BLOCKS)),
    "many members": lambda: ("gzip", gzip.compress(b"") * 50_000),
}


@functools.cache
def _bomb(name: str) -> tuple[str, bytes]:
    return BOMBS[name]()


def _tool(name: str, url: str) -> AbstractAgentTool:
    """Make one of the web tools, its service at that address."""
    match name:
        case "scraper":
            return WebScraperTool(allow_private_hosts=True)
        case "http":
            return HttpAgentTool("api", "d", url, max_response_bytes=LIMIT_BYTES)
        case _:
            return WebSearchTool(TavilySearch("key", endpoint=url))


async def _asked(name: str, url: str) -> ToolResult:
    arguments = {"scraper": {"url": url}, "search": {"query": "x"}}.get(name, {"input": "x"})
    return await _tool(name, url).aexecute(json.dumps(arguments))


@pytest.mark.parametrize("name", ["scraper", "http", "search"])
@pytest.mark.parametrize("bomb", BOMBS)
async def test_memory_and_time_are_bounded_when_a_body_unfolds(server: WebServer, name: str, bomb: str) -> None:
    """S-SEC-10: limits count unpacked bytes while they are unpacked, at each layer."""
    coding, body = _bomb(bomb)
    server.answers["/a"] = Answer(body=body, headers={"Content-Encoding": coding, "Content-Type": "text/html"})
    with costs_at_most(memory_bytes=MEMORY_BYTES + len(body)):
        result = await _asked(name, f"{server.base}/a")
    assert len(result.output) <= LIMIT_BYTES + 100
    assert len(server.asked) == 1


@pytest.mark.parametrize("name", ["scraper", "http", "search"])
@pytest.mark.parametrize(
    "coding", ["br", "zstd", "compress", "gzip, gzip, gzip", "\x1b[31mred" * 1000, ", ".join(["gzip"] * 5000)]
)
async def test_failure_is_told_when_a_body_is_packed_as_nobody_asked(server: WebServer, name: str, coding: str) -> None:
    """S-SEC-11: the text says what is supported, and shows nothing that a terminal would obey."""
    server.answers["/a"] = Answer(body=b"x" * 1000, headers={"Content-Encoding": coding})
    with costs_at_most():
        told = str((await _asked(name, f"{server.base}/a")).error_message)
    assert len(told) < 500
    assert told.isprintable()
    assert "packed" in told or "not valid" in told or "illegal" in told.lower()


async def test_failure_is_told_when_a_packed_body_is_damaged_or_cut(server: WebServer) -> None:
    """S-SEC-11: what is there of it is no page."""
    whole = gzip.compress(b"<p>" + os.urandom(5000).hex().encode())
    for body, reason in ((b"no gzip", "no valid gzip data"), (whole[:-9], "ends in the middle")):
        server.answers["/a"] = Answer(body=body, headers={"Content-Encoding": "gzip"})
        told = str((await _asked("scraper", f"{server.base}/a")).error_message)
        assert told.startswith("Failed to fetch URL: ")
        assert reason in told


@pytest.mark.parametrize("name", ["scraper", "http", "search"])
async def test_loop_has_its_turns_when_a_body_is_unpacked_and_read(
    server: WebServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-SEC-12: decoding and parsing leave the event loop; what stays there is done in small steps."""
    page = ("<p>\u00fc<b>x</b>" * 100_000).encode("cp1252")[:LIMIT_BYTES]
    headers = {"Content-Encoding": "gzip", "Content-Type": "text/html; charset=windows-1255"}
    server.answers["/a"] = Answer(body=gzip.compress(page, 1), headers=headers)
    turn, turns_of_pieces, readers = 0, list[int](), set[int]()
    unpack = BodyUnpacker.feed

    async def turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def feed(unpacker: BodyUnpacker, data: bytes) -> Iterator[bytes]:
        for piece in unpack(unpacker, data):
            assert len(piece) <= STEP_BYTES
            turns_of_pieces.append(turn)
            yield piece

    def noted(read: Callable[..., Any]) -> Callable[..., Any]:
        def noting(text: str | bytes, *rest: object, **options: object) -> object:
            if len(text) > STEP_BYTES:
                readers.add(threading.get_ident())
            return read(text, *rest, **options)

        return noting

    monkeypatch.setattr(BodyUnpacker, "feed", feed)
    monkeypatch.setattr(net, "decode", noted(net.decode))
    monkeypatch.setattr(json, "loads", noted(json.loads))
    turning = asyncio.create_task(turns())
    await _asked(name, f"{server.base}/a")
    turning.cancel()
    assert len(turns_of_pieces) >= 1_000_000 // STEP_BYTES  # a search reads no more
    assert len(set(turns_of_pieces)) == len(turns_of_pieces), "two pieces in one turn"
    assert readers
    assert threading.get_ident() not in readers


@pytest.mark.parametrize(
    "charset", ["punycode", "idna", "unicode_escape", "utf-7", "rot13", "zlib", "uu", "mbcs", "x" * 60_000]
)
@pytest.mark.parametrize("name", ["scraper", "http", "search"])
async def test_charset_is_refused_when_it_is_no_plain_one(server: WebServer, name: str, charset: str) -> None:
    """S-SEC-13: the body is read as UTF-8 then, and in a time in proportion to its length."""
    body = "<p>gr\u00fcn ".encode() + b"-" + b"a" * 1_000_000
    server.answers["/a"] = Answer(body=body, headers={"Content-Type": f"text/html; charset={charset}"})
    with costs_at_most():
        result = await _asked(name, f"{server.base}/a")
    assert result.output.removeprefix("<p>").startswith("gr\u00fcn -aaa") or name == "search"


async def test_charset_is_refused_when_the_page_names_it(server: WebServer) -> None:
    """S-SEC-13: the same for what stands in the page."""
    body = b"<meta charset=punycode><p>gr\xc3\xbcn -" + b"a" * 1_000_000
    server.answers["/a"] = Answer(body=body, headers={"Content-Type": "text/html"})
    with costs_at_most():
        assert (await _asked("scraper", f"{server.base}/a")).output.startswith("gr\u00fcn -aaa")


#: Pages of the largest size that parsers take quadratic time for, or much memory.
HTML: dict[str, Callable[[], str]] = {
    "nested": lambda: "<div>" * (LIMIT_BYTES // 5),
    "attributes": lambda: f"<a {' '.join(f'x{number}' for number in range(600_000))}>",
    "formatting": lambda: "".join(f"<font color={number}>" for number in range(20_000)) + "<p>x" * 1_000_000,
    "open everything": lambda: "<table><tr><td><select><svg><math>" * (LIMIT_BYTES // 34),
}


@pytest.mark.parametrize("page", HTML)
async def test_parser_is_ended_when_a_page_takes_too_long(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SEC-14: its process is held to a processor time and a memory; ten seconds and a gibibyte, here less."""
    assert (page_reader._CPU_S, page_reader._MEMORY_BYTES) == (10, 1 << 30)
    monkeypatch.setattr(page_reader, "_CPU_S", 1)
    # A fast processor parses what needs 280 MiB within a second; a small page needs less than 100.
    monkeypatch.setattr(page_reader, "_MEMORY_BYTES", 150 << 20)
    with costs_at_most(), pytest.raises(PageError, match=r"processor time|unexpectedly"):
        await read_page(HTML[page]()[:LIMIT_BYTES], most_characters=100)


async def test_model_is_told_when_a_page_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SEC-14, S-BIT-45: a failure that it can read."""
    monkeypatch.setattr(page_reader, "_CPU_S", 1)
    tool = WebScraperTool(fetcher=lambda _: HTML["nested"]())
    result = await tool.aexecute('{"url": "http://x"}')
    assert result.error_message == "Failed to read page: its HTML takes more than 1 s of processor time to parse"


async def test_parser_is_killed_when_its_call_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SEC-14: at once, and not when its time is over."""
    begun: asyncio.Queue[asyncio.subprocess.Process] = asyncio.Queue()
    start = asyncio.create_subprocess_exec

    async def seen(*arguments: str, **options: object) -> asyncio.subprocess.Process:
        process = await start(*arguments, **options)  # type: ignore[arg-type]  passed on as given
        begun.put_nowait(process)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", seen)
    monkeypatch.setattr(page_reader, "_CPU_S", 600)
    with costs_at_most():
        reading = asyncio.create_task(read_page(HTML["nested"](), most_characters=100))
        process = await begun.get()
        assert process.returncode is None
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert process.returncode == -9


async def test_parser_sees_no_key_when_this_process_has_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """S-SEC-15: a page that takes the parser over finds nothing in its environment."""
    told = tmp_path / "told"
    program = tmp_path / "program.py"
    program.write_text(f"import os; open({str(told)!r}, 'w').write(repr(sorted(os.environ)))")
    monkeypatch.setattr(page_reader, "_PROGRAM", program)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    await read_page("<p>x", most_characters=10)
    assert "OPENAI" not in told.read_text()
    assert set(ast.literal_eval(told.read_text())) <= {*page_reader._KEPT, "PYTHONPATH", "LC_CTYPE"}


async def test_answer_is_refused_when_its_head_is_endless(server: WebServer) -> None:
    """S-SEC-16: 500 fields, 64 KiB."""
    for fields in (600, 60_000):
        server.answers["/a"] = Answer(body=b"x", headers={f"x{number}": "y" for number in range(fields)})
        with costs_at_most():
            told = str((await _asked("http", f"{server.base}/a")).error_message)
        assert told.startswith("HTTP request failed: ")
        assert len(told) < 500
    server.answers["/a"] = Answer(body=b"x", headers={f"x{number}": "y" * 10_000 for number in range(9)})
    assert "more than 65536 bytes" in str((await _asked("http", f"{server.base}/a")).error_message)


async def test_answer_is_refused_when_each_byte_comes_alone(server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SEC-16: a piece costs far more than its bytes; 100,000 pieces."""
    assert net._MAX_PIECES == 100_000
    monkeypatch.setattr(net, "_MAX_PIECES", 5_000)
    chunks = b"1\r\nx\r\n" * 1_000_000
    server.answers["/a"] = Answer(body=chunks, headers={"Transfer-Encoding": "chunked"})
    with costs_at_most():
        told = str((await _asked("http", f"{server.base}/a")).error_message)
    assert told == "HTTP request failed: the answer comes in more than 5000 pieces"


async def test_pages_are_not_fetched_again_when_a_run_goes_on(
    server: WebServer, home: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """S-SEC-17, S-DUR-22: what the web said is on record, so a run that goes on reads what it has read."""
    server.answers |= {
        "/page": Answer(body=b"<p>high at noon", headers={"Content-Type": "text/html"}),
        "/api": Answer(body=b"6 metres"),
        "/search.json": Answer(body=json.dumps({"organic_results": [{"title": "Tides", "snippet": "twice"}]}).encode()),
    }
    left = answers(server.base)
    with ModelServer(lambda _: left.pop(0)) as model:
        for name, value in ((MODEL, model.base_url), (WEB, server.base), (MARKS, str(tmp_path / "marks"))):
            monkeypatch.setenv(name, value)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from tests.attack.reading_run import main; main()"),
            cwd=ROOT,
            stderr=asyncio.subprocess.PIPE,
        )
        _, told = await process.communicate()
        assert process.returncode == DIED, told.decode()
        assert Counter(urlsplit(asked.target).path for asked in server.asked) == dict.fromkeys(PATHS, 1)
        assert (await aresume(RUN_ID, team())).raw == "read"
        assert Counter(urlsplit(asked.target).path for asked in server.asked) == dict.fromkeys(PATHS, 1)
        told_to_model = json.dumps(model.requests[-1].messages)
    assert all(text in told_to_model for text in ("high at noon", "6 metres", "Tides"))
