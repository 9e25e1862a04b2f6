"""Clients of an endpoint, in a process of their own: a line in, one load, a line out.

In: what to send, how often, and how many clients at a time, as JSON; each client sends its next request when it has had the
answer, or all are sent at a given rate whatever comes back. Out: how long each answer took, as JSON. An answer that is no
success is counted, and is in no figure.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import aiohttp

__all__ = ["Answers", "Load", "main", "send"]

#: `chat`: a completion, whole; `stream`: streamed; `run`: a run that is waited for; `events`: one whose events are read; `mixed`:
#: these in turn.
Kind = Literal["chat", "stream", "run", "events", "mixed"]
_WAIT_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent."""

    url: str
    #: of the team, as a model
    model: str
    kind: Kind
    requests: int
    #: at a time
    clients: int
    #: requests a second, whatever comes back; 0: as fast as the clients have their answers
    rate: float = 0.0


@dataclass(slots=True, kw_only=True)
class Answers:
    """What came back."""

    wall_s: float = 0.0
    #: of each success, in the order in which they ended
    took_s: list[float] = field(default_factory=list[float])
    #: of each success of a stream: until the first text
    first_s: list[float] = field(default_factory=list[float])
    #: what was no success, the first ones
    errors: list[str] = field(default_factory=list[str])
    failed: int = 0


async def send(load: Load) -> Answers:
    """Send a load and return what came back."""
    answers = Answers()
    timeout = aiohttp.ClientTimeout(total=_WAIT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        began = time.perf_counter()
        await (_at_rate(session, load, answers) if load.rate else _by_clients(session, load, answers))
        answers.wall_s = time.perf_counter() - began
    return answers


async def _by_clients(session: aiohttp.ClientSession, load: Load, answers: Answers) -> None:
    numbers = iter(range(load.requests))

    async def client() -> None:
        for number in numbers:
            await _one(session, load, number, answers)

    await asyncio.gather(*(client() for _ in range(load.clients)))


async def _at_rate(session: aiohttp.ClientSession, load: Load, answers: Answers) -> None:
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(load.requests):
            await asyncio.sleep(max(0.0, began + number / load.rate - time.perf_counter()))
            group.create_task(_one(session, load, number, answers))


async def _one(session: aiohttp.ClientSession, load: Load, number: int, answers: Answers) -> None:
    began = time.perf_counter()
    try:
        senders = _SENDERS[load.kind]
        first_s = await senders[number % len(senders)](session, load, f"Question {number}?")
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        answers.failed += 1
        if len(answers.errors) < 5:
            answers.errors.append(f"{type(error).__name__}: {error}"[:300])
        return
    answers.took_s.append(time.perf_counter() - began)
    if first_s is not None:
        answers.first_s.append(first_s - began)


async def _chat(session: aiohttp.ClientSession, load: Load, text: str) -> None:
    body = {"model": load.model, "messages": [{"role": "user", "content": text}]}
    answer = await _post(session, f"{load.url}/v1/chat/completions", body)
    if not answer["choices"][0]["message"]["content"]:
        raise ValueError("the answer is empty")


async def _stream(session: aiohttp.ClientSession, load: Load, text: str) -> float:
    body = {"model": load.model, "stream": True, "messages": [{"role": "user", "content": text}]}
    first_s, is_whole = None, False
    async with session.post(f"{load.url}/v1/chat/completions", json=body) as response:
        await _check(response)
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                is_whole = True
            elif line.startswith(b"data: ") and first_s is None and _text_of(json.loads(line[6:])):
                first_s = time.perf_counter()
    if first_s is None or not is_whole:
        raise ValueError("the stream ended early")
    return first_s


def _text_of(chunk: Any) -> str:
    if "error" in chunk:
        raise ValueError(str(chunk["error"])[:300])
    return (chunk["choices"] or [{}])[0].get("delta", {}).get("content") or ""


async def _run(session: aiohttp.ClientSession, load: Load, text: str) -> None:
    body = {"ensemble": load.model, "inputs": {"question": text}}
    ended = await _post(session, f"{load.url}/runs?wait={_WAIT_S}", body)
    if ended["status"] != "completed":
        raise ValueError(f"the run is {ended['status']}")


async def _events(session: aiohttp.ClientSession, load: Load, text: str) -> float:
    """Begin a run and read its events to the end."""
    taken = await _post(session, f"{load.url}/runs", {"ensemble": load.model, "inputs": {"question": text}})
    first_s, last = None, ""
    async with session.get(f"{load.url}/runs/{taken['run_id']}/events") as response:
        await _check(response)
        async for line in response.content:
            if line.startswith(b"event: "):
                first_s, last = first_s or time.perf_counter(), line[7:].decode().strip()
    if first_s is None or last != "ensemble_completed":
        raise ValueError(f"the last event is '{last}'")
    return first_s


async def _post(session: aiohttp.ClientSession, url: str, body: object) -> Any:
    async with session.post(url, json=body) as response:
        await _check(response)
        return await response.json()


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status >= 400:
        raise ValueError(f"{response.status}: {(await response.text())[:200]}")


_Sender = Callable[[aiohttp.ClientSession, Load, str], Awaitable[float | None]]
_SENDERS: Mapping[Kind, Sequence[_Sender]] = {
    "chat": (_chat,),
    "stream": (_stream,),
    "run": (_run,),
    "events": (_events,),
    "mixed": (_chat, _stream, _run, _events),
}


def main() -> None:
    """Send a load per line of input; the first line of output says that the clients are ready."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(asdict(asyncio.run(send(Load(**json.loads(line)))))), flush=True)


if __name__ == "__main__":
    main()
