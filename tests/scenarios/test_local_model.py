"""The embedded model, for real: loaded once per machine, shared by processes, gone with the last of them."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel

from ensemble_ray import ChatMessage, ChatResponse, LocalChatModel, parse_output
from ensemble_ray.execute.agent.answer_schema import answer_schema
from ensemble_ray.llm import local as local_server
from ensemble_ray.llm.factory import resolve_llm
from ensemble_ray.llm.local import EngineProcess, find_weights

pytestmark = pytest.mark.skipif(
    find_weights() is None or importlib.util.find_spec("xllamacpp") is None,
    reason="the embedded model is not installed: ensemble-ray models install",
)

HOLDER = """
import asyncio, sys
from ensemble_ray.llm.local import LocalChatModel
from ensemble_ray.values.messages import ChatMessage
print(asyncio.run(LocalChatModel(max_tokens=4).chat([ChatMessage("user", "Say hi")])).text is not None, flush=True)
sys.stdin.read()
"""
#: Generous: two cores load the model while other tests run.
PATIENCE_S = 180.0


@pytest.fixture(autouse=True, scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home of these tests' own, so that no server of this machine is met or stopped; theirs is loaded once."""
    with pytest.MonkeyPatch.context() as patched:
        path = tmp_path_factory.mktemp("models")
        patched.setenv("ENSEMBLE_RAY_HOME", str(path))
        local_server.release_all()  # what tests before these started is of another home
        yield path
        local_server.release_all()


def record_of(home: Path) -> dict[str, list[list[int]]]:
    """What the registry says now; under its lock, since the server rewrites it every second."""
    (file,) = (home / "models").glob("*.json")
    with file.open(encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_SH)
        return json.load(stream)


def holder(home: Path) -> subprocess.Popen[str]:
    """Another process that holds the model until its input ends or it is killed."""
    return subprocess.Popen(  # noqa: S603  our own interpreter
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "ENSEMBLE_RAY_HOME": str(home)},
    )


def first_word(process: subprocess.Popen[str]) -> str:
    """Wait until that process got its answer."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def wait_until_dead(server: EngineProcess) -> None:
    """Return when that server has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while server.is_alive:
        assert time.monotonic() < deadline, "the server outlived its holders"
        threading.Event().wait(0.05)


async def test_it_answers_and_streams_when_asked() -> None:
    """S-CONV-19, S-CONV-23, S-SET-47: `llm="local"` is a real model on this machine, over loopback."""
    model = resolve_llm("local")
    assert isinstance(model, LocalChatModel)
    short = LocalChatModel(max_tokens=8, temperature=0)
    answer = await short.chat([ChatMessage("user", "What is the capital of France?")])
    assert answer.text
    assert answer.usage is not None
    assert answer.usage.output_tokens in range(1, 9)
    *fragments, whole = [part async for part in short.stream([ChatMessage("user", "Say hi")])]
    assert isinstance(whole, ChatResponse)
    assert whole.text == "".join(str(fragment) for fragment in fragments)
    address = local_server.find_held(short.spec)
    assert address is not None
    assert address.url.startswith("http://127.0.0.1:")


class Trip(BaseModel):
    """What a small model is made to answer with."""

    kind: Literal["short", "long"]
    days: int
    begins: date
    is_booked: bool


async def test_answers_keep_to_a_schema_when_one_is_given() -> None:
    """S-OUT-52: the engine enforces it, whatever the model would have written."""
    schema = answer_schema(Trip)
    assert schema is not None
    model = LocalChatModel(max_tokens=300, temperature=0)
    answer = await model.chat_structured([ChatMessage("user", "Describe a short trip as JSON")], schema)
    assert parse_output(answer.text, Trip).error_message is None


async def test_the_server_is_started_again_when_it_died(home: Path) -> None:
    """S-SET-47: a server that was killed is replaced by the next call."""
    model = LocalChatModel(max_tokens=4)
    await model.chat([ChatMessage("user", "Say hi")])
    server = EngineProcess(*record_of(home)["server"])  # type: ignore[arg-type]  # a pair of numbers
    os.kill(server.pid, signal.SIGKILL)
    wait_until_dead(server)
    assert (await model.chat([ChatMessage("user", "Say hi")])).text
    assert EngineProcess(*record_of(home)["server"]) != server  # type: ignore[arg-type]  # as above


@pytest.mark.extended
def test_processes_share_one_server_when_they_use_the_same_model(tmp_path: Path) -> None:
    """S-SET-47: started once by whoever is first, listed holders, stopped by the last one that leaves."""
    with holder(tmp_path) as one, holder(tmp_path) as two:
        assert [first_word(one), first_word(two)] == ["True", "True"]
        record = record_of(tmp_path)
        server = EngineProcess(*record["server"])  # type: ignore[arg-type]  # a pair of numbers
        assert sorted(pid for pid, _ in record["holders"]) == sorted([one.pid, two.pid])
        assert one.stdin is not None
        assert two.stdin is not None
        one.stdin.close()
        assert one.wait(PATIENCE_S) == 0
        assert server.is_alive
        assert [pid for pid, _ in record_of(tmp_path)["holders"]] == [two.pid]
        two.stdin.close()
        assert two.wait(PATIENCE_S) == 0
        assert not server.is_alive, "the last holder stops it before it ends"


@pytest.mark.extended
def test_the_server_ends_itself_when_its_holders_were_killed(tmp_path: Path) -> None:
    """S-SET-47: a holder that died does not count."""
    with holder(tmp_path) as only:
        assert first_word(only) == "True"
        server = EngineProcess(*record_of(tmp_path)["server"])  # type: ignore[arg-type]  # a pair of numbers
        only.kill()
        only.wait()
        wait_until_dead(server)
