"""Tools that ask a person: approvals, questions, and time that stands still."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import (
    AbstractAgentTool,
    ExitEarlyError,
    FileWriteTool,
    HttpAgentTool,
    HumanInputTool,
    IllegalStateError,
    OnTimeoutAction,
    ProcessAgentTool,
    ReviewDecision,
    ReviewRequest,
    ReviewTiming,
    ToolConfigurationError,
    ToolContext,
    ToolPipeline,
    ToolResult,
    ValidationError,
)
from ensemble_ray.tools.tool import use_tool_context
from ensemble_ray.tools.user_code import TimeLimit
from tests.ensemble_ray.virtual_time import run_in_virtual_time


class Person:
    """Decides the same each time, and keeps what it was asked."""

    def __init__(self, decision: ReviewDecision) -> None:
        self._decision = decision
        self.asked: list[ReviewRequest] = []

    def review(self, request: ReviewRequest) -> ReviewDecision:
        """Decide."""
        self.asked.append(request)
        return self._decision


CONTINUE, EDIT, REJECT = (
    ReviewDecision.continue_execution(),
    ReviewDecision.edit("edited"),
    ReviewDecision.exit_early(),
)


class Payment(AbstractAgentTool):
    """Asks before it pays."""

    name = "pay"
    description = "Pays."

    def do_execute(self, text: str, /) -> ToolResult:
        """Ask and pay."""
        return ToolResult.success(repr(self.request_approval(f"Pay {text}", timeout=60, on_timeout="fail")))


class AsyncPayment(AbstractAgentTool):
    """The same, async."""

    name = "pay"
    description = "Pays."

    async def do_execute(self, text: str, /) -> ToolResult:  # type: ignore[override]  async is allowed
        """Ask and pay."""
        return ToolResult.success(repr(await self.arequest_approval(f"Pay {text}", timeout=60, on_timeout="fail")))


async def called(tool: AbstractAgentTool, text: str, handler: object) -> ToolResult:
    """One call with that handler."""
    with use_tool_context(ToolContext(tool_name=tool.name, review_handler=handler)):
        return await tool.aexecute(text)


@pytest.mark.parametrize("tool", [Payment(), AsyncPayment()], ids=["sync", "async"])
async def test_a_tool_asks_for_approval(tool: AbstractAgentTool) -> None:
    """S-REV-60, S-REV-62, S-TOOL-60, S-REV-90: the request of a tool ends no run."""
    person = Person(EDIT)
    assert (await called(tool, "5", person)).output == repr(EDIT)
    assert person.asked == [
        ReviewRequest(
            task_description="Pay 5",
            timing=ReviewTiming.DURING_EXECUTION,
            timeout=timedelta(seconds=60),
            on_timeout=OnTimeoutAction.FAIL,
            ends_run=False,
        )
    ]


@pytest.mark.parametrize("tool", [Payment(), AsyncPayment()], ids=["sync", "async"])
async def test_without_a_handler_everything_is_approved(tool: AbstractAgentTool) -> None:
    """S-REV-61, S-TOOL-60, S-TOOL-43: also outside any run."""
    assert (await called(tool, "5", None)).output == repr(CONTINUE)
    assert (await tool.aexecute("5")).output == repr(CONTINUE)


async def test_default_limits_of_an_approval() -> None:
    """S-REV-60: five minutes, then it is refused."""

    class Plain(AbstractAgentTool):
        name, description = "plain", "Asks."

        def do_execute(self, text: str, /) -> ToolResult:
            return ToolResult.success(repr(self.request_approval(text)))

    person = Person(CONTINUE)
    await called(Plain(), "x", person)
    assert [(each.timeout, each.on_timeout) for each in person.asked] == [(timedelta(minutes=5), "exit_early")]


@pytest.mark.parametrize("handler", [5, "console"])
async def test_what_is_no_handler_is_refused(handler: object) -> None:
    """S-TOOL-64."""
    with pytest.raises(ToolConfigurationError, match="must be callable or have a method 'review'"):
        await called(Payment(), "5", handler)


async def test_an_async_tool_must_await_its_approval() -> None:
    """S-REV-90: waiting in a running loop would stop the run."""

    class Wrong(AbstractAgentTool):
        name, description = "wrong", "Asks."

        async def do_execute(self, text: str, /) -> ToolResult:  # type: ignore[override]  async is allowed
            return ToolResult.success(repr(self.request_approval(text)))

    with pytest.raises(IllegalStateError, match=r"await self\.arequest_approval"):
        await called(Wrong(), "5", Person(CONTINUE))


# Built-in tools.


def names_in(folder: Path) -> list[str]:
    """What a folder holds."""
    return [each.name for each in folder.iterdir()]


def write(tool: FileWriteTool, handler: object) -> Any:
    """A call that writes a page."""
    return called(tool, '{"path": "out/page.txt", "content": "' + "c" * 201 + '"}', handler)


async def test_a_file_is_written_when_it_was_approved(tmp_path: Path) -> None:
    """S-BIT-26, S-TOOL-62: with path and a beginning of the content; an edit takes the place of the content."""
    person = Person(CONTINUE)
    result = await write(FileWriteTool(tmp_path, require_approval=True), person)
    assert (result.output, (tmp_path / "out" / "page.txt").read_text()) == (
        "Successfully wrote to: out/page.txt",
        "c" * 201,
    )
    (asked,) = person.asked
    assert asked.task_description == f"Write file: out/page.txt\nContent: {'c' * 200}..."
    await write(FileWriteTool(tmp_path, require_approval=True), Person(EDIT))
    assert (tmp_path / "out" / "page.txt").read_text() == "edited"


async def test_a_file_that_was_refused_is_not_written(tmp_path: Path) -> None:
    """S-BIT-26, S-REV-65: nor its directory."""
    result = await write(FileWriteTool(tmp_path, require_approval=True), Person(REJECT))
    assert result.error_message == "File write rejected by reviewer: out/page.txt"
    assert names_in(tmp_path) == []


async def test_nobody_is_asked_about_a_path_that_is_refused_anyway(tmp_path: Path) -> None:
    """S-BIT-26: outside of the directory."""
    person = Person(CONTINUE)
    tool = FileWriteTool(tmp_path, require_approval=True)
    result = await called(tool, '{"path": "../page.txt", "content": "c"}', person)
    assert (result.is_success, person.asked) == (False, [])


async def test_a_request_that_was_refused_is_not_sent() -> None:
    """S-BIT-74, S-REV-65: sockets are closed to this test."""
    tool = HttpAgentTool("post", "Posts.", "http://shop.example/orders", require_approval=True)
    person = Person(REJECT)
    result = await called(tool, "b" * 201, person)
    assert result.error_message == "HTTP request rejected by reviewer: POST http://shop.example/orders"
    (asked,) = person.asked
    assert asked.task_description == f"HTTP POST http://shop.example/orders\nBody: {'b' * 200}..."


@pytest.mark.program
async def test_a_program_gets_what_was_approved() -> None:
    """S-BIT-66, S-REV-65: its input is the edited one."""
    tool = ProcessAgentTool("cat", "Copies.", ["cat", "-"], require_approval=True)
    person = Person(EDIT)
    result = await called(tool, "i" * 201, person)
    assert result.output == '{"input": "edited"}'
    (asked,) = person.asked
    assert asked.task_description == f"Run command: cat -\nInput: {'i' * 200}..."


async def test_a_program_that_was_refused_is_not_started() -> None:
    """S-BIT-66, S-REV-65: this test may start none."""
    tool = ProcessAgentTool("cat", "Copies.", ["cat", "-"], require_approval=True)
    result = await called(tool, "input", Person(REJECT))
    assert result.error_message == "Command execution rejected by reviewer: cat -"


async def test_required_approval_needs_somebody(tmp_path: Path) -> None:
    """S-REV-64, S-TOOL-62: it is no failure of the tool."""
    for tool in (
        FileWriteTool(tmp_path, require_approval=True),
        HttpAgentTool("post", "Posts.", "http://shop.example/orders", require_approval=True),
        ProcessAgentTool("cat", "Copies.", ["cat"], require_approval=True),
    ):
        with pytest.raises(ToolConfigurationError) as refused:
            await called(tool, '{"path": "p", "content": "c"}', None)
        start = f"Tool '{tool.name}' requires approval but no ReviewHandler is configured."
        assert str(refused.value).startswith(start)
    assert names_in(tmp_path) == []


async def test_without_require_approval_nobody_is_asked(tmp_path: Path) -> None:
    """S-REV-67."""
    person = Person(REJECT)
    assert (await write(FileWriteTool(tmp_path), person)).is_success
    assert person.asked == []


# Questions of the model.


@pytest.mark.parametrize(
    ("decision", "text"), [(CONTINUE, "Understood. Please continue."), (EDIT, "edited"), (ReviewDecision.edit(""), "")]
)
async def test_answers_of_a_person(decision: ReviewDecision, text: str) -> None:
    """S-REV-50, S-REV-51, S-REV-52, S-TOOL-65: the question is the description; an exit ends the run."""
    person, tool = Person(decision), HumanInputTool()
    assert tool.name == "human_input"
    assert await called(tool, "Send it?", person) == ToolResult.success(text)
    assert person.asked == [
        ReviewRequest(
            task_description="Send it?", timing=ReviewTiming.DURING_EXECUTION, on_timeout=OnTimeoutAction.CONTINUE
        )
    ]


@pytest.mark.parametrize("timed_out", [False, True])
async def test_a_person_can_end_the_run(*, timed_out: bool) -> None:
    """S-REV-52, S-TOOL-65, S-REV-66: with the reason."""
    with pytest.raises(ExitEarlyError) as ended:
        await called(HumanInputTool(), "Go on?", Person(ReviewDecision.ExitEarly(timed_out=timed_out)))
    assert ended.value.timed_out is timed_out


async def test_a_question_without_anybody_to_ask(caplog: pytest.LogCaptureFixture) -> None:
    """S-REV-53, S-TOOL-65: with a warning."""
    with caplog.at_level(logging.WARNING):
        result = await called(HumanInputTool(), "Go on?", None)
    assert result.output == "No reviewer is available. Please proceed with your best judgment."
    assert [each.getMessage() for each in caplog.records] == [
        "Tool 'human_input' cannot ask a person: the run has no review_handler"
    ]


def test_limits_of_a_question_are_checked() -> None:
    """S-REV-50, S-REV-3, S-REV-6."""
    with pytest.raises(ValidationError, match="timeout must not be negative"):
        HumanInputTool(timeout=-1)
    with pytest.raises(ValidationError, match="on_timeout must be one of"):
        HumanInputTool(on_timeout="wait")


async def test_steps_of_a_pipeline_ask_too() -> None:
    """S-REV-69, S-TOOL-77: the handler of the call is theirs."""
    person = Person(EDIT)
    pipeline = ToolPipeline.of(HumanInputTool(), Payment())
    result = await called(pipeline, "Which?", person)
    assert result.output == repr(EDIT)
    assert [each.task_description for each in person.asked] == ["Which?", "Pay edited"]


# Time limits.


async def limited(limit_s: float | None, waits: list[tuple[float, bool]]) -> bool:
    """Whether work is done within the limit that waits so long, partly for a person."""
    limits: list[TimeLimit] = []
    try:
        async with TimeLimit(limit_s, limits) as limit:
            for length_s, is_paused in waits:
                if is_paused:
                    limit.pause()
                await asyncio.sleep(length_s)
                if is_paused:
                    limit.resume()
    except TimeoutError:
        assert limit.is_over
        return False
    assert limits == []
    return True


@pytest.mark.parametrize(
    ("limit_s", "waits", "is_done"),
    [
        (10.0, [(9.0, False)], True),
        (10.0, [(11.0, False)], False),
        (10.0, [(5.0, False), (3600.0, True), (4.0, False)], True),
        (10.0, [(5.0, False), (3600.0, True), (6.0, False)], False),
        (10.0, [(5.0, False), (60.0, True), (2.0, False), (60.0, True), (4.0, False)], False),
        (None, [(5.0, False), (3600.0, True), (3600.0, False)], True),
    ],
)
def test_a_persons_time_is_not_the_tools(
    limit_s: float | None, waits: list[tuple[float, bool]], *, is_done: bool
) -> None:
    """S-REV-88."""
    assert run_in_virtual_time(limited(limit_s, waits))[0] is is_done
