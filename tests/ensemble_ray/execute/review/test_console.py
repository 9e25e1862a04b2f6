"""A person at a terminal: what is shown, what is read, what follows when nobody answers."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import pytest

from ensemble_ray import (
    Agent,
    Ensemble,
    ReviewDecision,
    ReviewHandler,
    ReviewRequest,
    ReviewTimeoutError,
    ReviewTiming,
    Task,
)
from ensemble_ray.execute.review.handlers import ConsoleReviewHandler
from ensemble_ray.testing import ScriptedModel

CHOICE = "[c] Continue  [e] Edit  [x] Exit early"


def request(**fields: Any) -> ReviewRequest:
    """A request about a draft, without a limit."""
    usual = {"task_description": "Draft", "timing": ReviewTiming.AFTER_EXECUTION, "timeout": None}
    return ReviewRequest(**{**usual, **fields})


async def ask(text: str, **fields: Any) -> tuple[ReviewDecision, str]:
    """What is decided with that input, and what was shown."""
    output = io.StringIO()
    decision = await ReviewHandler.console(io.StringIO(text), output).review(request(**fields))  # type: ignore[misc]
    return decision, output.getvalue()


@pytest.mark.parametrize(
    ("typed", "decision"),
    [
        *((f"{word}\n", ReviewDecision.Continue()) for word in ("c", "  C ", "y", "Yes", "continue", "approve")),
        *((f"{word}\n", ReviewDecision.ExitEarly()) for word in ("x", " X", "n", "NO", "q", "exit")),
        ("e\nBetter text \n", ReviewDecision.Edit("Better text ")),
        ("edit\nlast line", ReviewDecision.Edit("last line")),
        ("E\n\n", ReviewDecision.Edit("")),
        ("\nno idea\nyess\nn\n", ReviewDecision.ExitEarly()),
        ("\nc\n", ReviewDecision.Continue()),
    ],
)
async def test_what_is_typed_decides(typed: str, decision: ReviewDecision) -> None:
    """S-REV-42, S-REV-46: by whole words, trimmed, in any case; other lines ask again."""
    decided, shown = await ask(typed)
    assert decided == decision
    others = sum(line.strip() in {"", "no idea", "yess"} for line in typed.split("\n")[:-1])
    is_edit = isinstance(decision, ReviewDecision.Edit)
    assert shown.count("Type one of these words: ") == (0 if is_edit else others)


class Broken(io.StringIO):
    """A stream that cannot be read."""

    def readline(self, _size: int | None = -1, /) -> str:
        """Fail."""
        raise OSError("the line is cut")


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (io.StringIO, "the input of the console has ended"),
        (lambda: io.StringIO("maybe\n"), "the input of the console has ended"),
        (lambda: io.StringIO("e\n"), "the input of the console has ended before the new text"),
        (Broken, "the console cannot be read: the line is cut"),
    ],
)
async def test_nothing_continues_when_no_answer_can_come(
    stream: Callable[[], io.StringIO], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """S-REV-46: the run exits early, or its task fails where the gate says so; a question is an error of its tool."""
    after, during = ReviewTiming.AFTER_EXECUTION, ReviewTiming.DURING_EXECUTION
    for fields in (
        {"timing": after, "on_timeout": "continue"},
        {"timing": during, "on_timeout": "exit_early"},
        {"timing": during, "on_timeout": "continue", "ends_run": False},
    ):
        handler = ReviewHandler.console(stream(), io.StringIO())
        decision = await handler.review(request(**fields))  # type: ignore[misc]
        assert decision == ReviewDecision.ExitEarly(timed_out=True)
    assert [each.getMessage() for each in caplog.records] == [f"A review exits early: {reason}"] * 3
    for timing, on_timeout in ((after, "fail"), (during, "continue")):
        handler = ReviewHandler.console(stream(), io.StringIO())
        with pytest.raises(ReviewTimeoutError, match=reason):
            await handler.review(request(timing=timing, on_timeout=on_timeout))  # type: ignore[misc]


def test_a_console_without_a_terminal_warns_before_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S-REV-46: once for each run; a stream that the user passed is their choice."""
    monkeypatch.setattr("sys.stdin", io.StringIO("c\n"))
    own = ReviewHandler.console(io.StringIO("c\n"), io.StringIO())
    for handler, warnings in ((ReviewHandler.console(), 1), (own, 0)):
        caplog.clear()
        agent = Agent(role="Writer", goal="Write", llm=ScriptedModel("a"))
        task = Task(description="Draft", expected_output="text", agent=agent)
        Ensemble(tasks=[task], review_handler=handler).run(runtime="inline")
        assert sum("standard input is no terminal" in each.getMessage() for each in caplog.records) == warnings


async def test_header_of_a_task() -> None:
    """S-REV-44, S-REV-45: description and output are cut; without a timeout there is no countdown."""
    _, shown = await ask("c\n", task_description="d" * 201, task_output="o" * 501, prompt="Is it polite?")
    lines = shown.split("\n")
    assert lines[0] == ""
    assert "Review Required" in lines[1]
    assert lines[2:6] == [f"Task:   {'d' * 200}...", f"Output: {'o' * 500}...", "Prompt: Is it polite?", "---"]
    assert lines[6] == f"{CHOICE} > "


async def test_header_shows_the_role_when_the_gate_requires_one() -> None:
    """S-REV-44, S-REV-70: its reviewer sees whose decision it is."""
    _, shown = await ask("c\n", prompt="Fine?", required_role="legal")
    assert shown.split("\n")[3:6] == ["Prompt: Fine?", "Role:   legal", "---"]


async def test_header_of_a_question() -> None:
    """S-REV-44: a gate during a task has a question in place of an output; a blank output is none."""
    _, asked = await ask("c\n", task_description="Send it?", timing=ReviewTiming.DURING_EXECUTION)
    assert asked.split("\n")[2:5] == ["Task:   Send it?", "Question: Send it?", "---"]
    _, before = await ask("c\n", task_output=" \n", timing=ReviewTiming.BEFORE_EXECUTION)
    assert before.split("\n")[2:4] == ["Task:   Draft", "---"]


async def test_header_cannot_move_the_cursor() -> None:
    """S-SEC-60: texts of models are shown without control characters."""
    _, shown = await ask("c\n", task_output="fine\x1b[2Jgone")
    assert "\x1b" not in shown


class Typist:
    """Lines that come at given times of a clock of its own, which only reading moves."""

    def __init__(self, *lines: tuple[float, str]) -> None:
        self.now = 0.0
        self._lines = list(lines)

    def read(self, stream: TextIO, timeout_s: float) -> str | None:
        """Return the next line if its time has come by then."""
        del stream
        if self._lines and self._lines[0][0] <= self.now + timeout_s:
            at, line = self._lines.pop(0)
            self.now = max(at, self.now)
            return line
        self.now = round(self.now + max(timeout_s, 0.001), 6)  # a clock that always goes on
        return None

    def put_back(self, line: str) -> None:
        """Keep it."""
        self._lines.insert(0, (self.now, line))


def console_of(typist: Typist) -> tuple[ConsoleReviewHandler, io.StringIO]:
    """A console whose time is the typist's."""
    output = io.StringIO()
    handler = ConsoleReviewHandler(io.StringIO, lambda: output, lines=lambda _: typist, now=lambda: typist.now)
    return handler, output


def countdowns(shown: str, action: str = "auto-x") -> Sequence[str]:
    """What stood behind the choices, in turn."""
    return [part.split(")")[0] for part in shown.split(f"({action} in ")[1:]]


async def test_countdown_is_rewritten_each_second() -> None:
    """S-REV-45: in place; an answer ends it."""
    handler, output = console_of(Typist((2.5, "x\n")))
    assert await handler.review(request(timeout=61)) == ReviewDecision.ExitEarly()
    assert countdowns(output.getvalue()) == ["1:01", "1:00", "0:59"]
    assert output.getvalue().count(f"\r{CHOICE}") == 2
    assert f"{CHOICE} (auto-x in 1:01) > " in output.getvalue()


@pytest.mark.parametrize(
    ("action", "coming", "decision"),
    [
        ("continue", "auto-c", ReviewDecision.Continue()),
        ("exit_early", "auto-x", ReviewDecision.ExitEarly(timed_out=True)),
    ],
)
async def test_what_follows_when_nobody_types(action: str, coming: str, decision: ReviewDecision) -> None:
    """S-REV-47."""
    handler, output = console_of(Typist())
    assert await handler.review(request(timeout=3, on_timeout=action)) == decision
    assert countdowns(output.getvalue(), coming) == ["0:03", "0:02", "0:01"]


async def test_a_timeout_can_fail_the_task() -> None:
    """S-REV-47: the text is exact."""
    handler, _ = console_of(Typist())
    with pytest.raises(ReviewTimeoutError) as failed:
        await handler.review(request(timeout=3, on_timeout="fail"))
    assert str(failed.value) == "Review gate timed out after 3s (on_timeout=fail)"


@pytest.mark.parametrize("limit", [None, 0, -5])
async def test_without_a_limit_the_console_waits(limit: float | None) -> None:
    """S-REV-47: for as long as it takes."""
    handler, output = console_of(Typist((600.0, "x\n")))
    assert await handler.review(request(timeout=limit)) == ReviewDecision.ExitEarly()
    assert countdowns(output.getvalue()) == []


async def test_whoever_writes_a_new_text_is_not_hurried() -> None:
    """S-REV-103: the timeout is for the choice."""
    handler, _ = console_of(Typist((1.0, "e\n"), (600.0, "At last\n")))
    assert await handler.review(request(timeout=3)) == ReviewDecision.Edit("At last")


class Screen(io.StringIO):
    """Shows when it shows a choice."""

    def __init__(self) -> None:
        super().__init__()
        self.has_choice = threading.Event()

    def write(self, text: str, /) -> int:
        """Show it."""
        written = super().write(text)
        if CHOICE in text:
            self.has_choice.set()
        return written


class Pipe(io.StringIO):
    """A stream whose lines come when they are put; reading waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []
        self._there = threading.Condition()
        self.readers = 0

    def put(self, line: str) -> None:
        """Add a line."""
        with self._there:
            self._lines.append(line)
            self._there.notify()

    def readline(self, _size: int | None = -1, /) -> str:
        """Wait for the next line."""
        with self._there:
            self.readers += 1
            self._there.wait_for(lambda: self._lines)
            self.readers -= 1
            return self._lines.pop(0)


async def test_a_timed_out_question_leaves_the_next_answer_to_the_next_one() -> None:
    """S-REV-48: also where the stream cannot be asked whether it has a line."""
    pipe = Pipe()
    handler = ReviewHandler.console(pipe, io.StringIO())
    assert await handler.review(request(timeout=0.01)) == ReviewDecision.ExitEarly(timed_out=True)  # type: ignore[misc]
    pipe.put("e\n")
    pipe.put("mine\n")
    assert await handler.review(request()) == ReviewDecision.Edit("mine")  # type: ignore[misc]
    assert pipe.readers == 0


async def test_a_question_of_a_cancelled_run_lets_the_terminal_go() -> None:
    """S-REV-48: the next question is asked and answered."""
    pipe, shown = Pipe(), Screen()
    handler = ReviewHandler.console(pipe, shown)
    asking = asyncio.ensure_future(handler.review(request()))  # type: ignore[arg-type]
    await asyncio.to_thread(shown.has_choice.wait)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    pipe.put("x\n")
    assert await handler.review(request()) == ReviewDecision.ExitEarly()  # type: ignore[misc]


async def test_two_consoles_ask_one_after_the_other() -> None:
    """S-REV-63: one lock for all of a process, whichever runs they are of."""
    pipe, shown = Pipe(), Screen()
    consoles = [ReviewHandler.console(pipe, shown) for _ in range(2)]
    asking = [asyncio.ensure_future(console.review(request())) for console in consoles]  # type: ignore[arg-type]
    await asyncio.to_thread(shown.has_choice.wait)
    assert shown.getvalue().count("Review Required") == 1
    pipe.put("c\n")
    pipe.put("c\n")
    assert await asyncio.gather(*asking) == [ReviewDecision.Continue()] * 2
    assert shown.getvalue().count("Review Required") == 2


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
async def test_a_question_is_shown_whole_when_the_terminal_lacks_characters(encoding: str) -> None:
    """S-LLM-34: as escapes."""
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    asked = request(task_description="Draft \u4e2d")
    decision = await ReviewHandler.console(io.StringIO("c\n"), output).review(asked)  # type: ignore[misc]
    assert decision == ReviewDecision.Continue()
    output.seek(0)
    assert r"Draft \u4e2d" in output.read()
