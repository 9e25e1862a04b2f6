"""What crosses to another process and back; the processes themselves are tested in tests/contracts."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import cast

import pytest

from ensemble_ray import ExitEarlyError, IllegalStateError
from ensemble_ray.tools.cpu import CannotTravelError, ToolOutcome, call_packed, pack, pack_tool, unpack_reply

CALL = {"positional": (), "named": {}, "tool_name": "t", "idempotency_key": "k"}


class TouchyError(Exception):
    """Does not survive pickling: its constructor takes other arguments than it stores."""

    def __init__(self, code: int, place: str) -> None:
        super().__init__(f"code {code} at {place}")


def touchy() -> None:
    """Raise it."""
    raise TouchyError(3, "here")


def missing() -> None:
    """Raise."""
    raise KeyError("gone")


def leave() -> None:
    """Try to end the process."""
    raise SystemExit(2)


def go(function: object, **arguments: object) -> object:
    """There and back again, in this process."""
    return unpack_reply(call_packed(pack(function), pack(arguments)))


def test_value_comes_back_when_the_function_returns() -> None:
    """S-SET-35: closures and lambdas travel by value."""
    factor = 3
    assert go(lambda n: n * factor, n=2) == 6


def test_error_comes_back_when_the_function_raises() -> None:
    """S-SET-35, S-ERR-31: as itself, or as one of its name and text where it cannot travel."""
    with pytest.raises(KeyError, match="gone"):
        go(missing)
    with pytest.raises(Exception, match="code 3 at here") as caught:
        go(touchy)
    assert type(caught.value).__name__ == "TouchyError"
    with pytest.raises(RuntimeError, match="SystemExit: 2"):
        go(leave)


def test_error_says_so_when_something_cannot_travel() -> None:
    """S-SET-35: told apart are what goes out, what cannot be loaded there, and what comes back."""
    with pytest.raises(CannotTravelError, match="cannot pickle"):
        pack(threading.Lock())
    with pytest.raises(CannotTravelError, match="No module named 'nowhere'"):
        unpack_reply(call_packed(b"\x80\x04cnowhere\nthing\n.", pack({})))
    with pytest.raises(TypeError, match="its result cannot travel between processes"):
        go(threading.Lock)


def test_outcome_comes_back_when_a_tool_ran() -> None:
    """S-SET-35, S-ENG-51, S-LLM-45, S-LLM-47: also of an async function, a generator, and of one that raises."""

    async def later() -> str:
        return "later"

    async def lines() -> AsyncIterator[str]:
        yield "one"

    def run(function: object) -> object:
        return unpack_reply(call_packed(pack_tool(function), pack(CALL)))  # type: ignore[arg-type]

    assert run(lambda: {"a": 1}) == ToolOutcome('{"a":1}')
    assert run(later) == ToolOutcome("later")
    assert run(lines) == ToolOutcome('["one"]')
    assert run(lambda: (each for each in "ab")) == ToolOutcome('["a","b"]')
    assert "has no text" in cast("ToolOutcome", run(object)).text
    assert run(lambda: 1 / 0) == ToolOutcome("Tool error: ZeroDivisionError: division by zero", "error")
    assert run(leave) == ToolOutcome("Tool error: the tool called sys.exit(2)", "error")


@pytest.mark.parametrize("error", [ExitEarlyError("enough"), IllegalStateError("bad")])
def test_error_passes_when_it_ends_the_run(error: Exception) -> None:
    """S-TOOL-23: with its class, across the process."""

    def stop() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        unpack_reply(call_packed(pack_tool(stop), pack(CALL)))
