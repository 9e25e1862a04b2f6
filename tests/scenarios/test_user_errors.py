"""Errors of user code on both runtimes: where it raised, of which class, and each told once."""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn, cast

import openai
import pytest

from ensemble_ray import (
    AgentExecutionError,
    ChatResponse,
    Ensemble,
    GuardrailInput,
    GuardrailResult,
    OpenAIChatModel,
    ParallelErrorStrategy,
    ParallelExecutionError,
    Runtime,
    Task,
    TaskExecutionError,
    TaskHandlerContext,
    Workflow,
    tool,
)
from ensemble_ray.record.runs import read_facts
from ensemble_ray.testing import Fault, ModelServer, ScriptedModel
from ensemble_ray.values.error_data import error_from
from tests.builders import agent, call, task

HERE = "test_user_errors.py"
Servers = Callable[..., ModelServer]


def look_up(key: str) -> NoReturn:
    """Raise in a line of this file, one function deeper than what the run calls."""
    raise {}[key]


class Broken:
    """A model that fails."""

    def chat(self, messages: object, tools: object = ()) -> ChatResponse:
        look_up("model")


class BrokenLater:
    """The same on the event loop."""

    async def chat(self, messages: object, tools: object = ()) -> ChatResponse:
        await asyncio.sleep(0)
        look_up("model")


class CodedError(Exception):
    """An error whose constructor does not take what pickle keeps of it."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


def by_handler(context: TaskHandlerContext) -> str:
    """Fail."""
    look_up("handler")


def by_guardrail(subject: object) -> GuardrailResult:
    """Fail."""
    look_up("guardrail")


def coded(context: TaskHandlerContext) -> str:
    """Fail with a class of this file, of another error."""
    try:
        look_up("inner")
    except KeyError as error:
        raise CodedError(code=7) from error


def refusing(subject: GuardrailInput) -> GuardrailResult:
    """Say no, at length."""
    return GuardrailResult.failure("w" * 5000)


@tool
def find(name: str) -> str:
    """Find a name."""
    look_up(name)


@tool(cpu=True)
def crunch(name: str) -> str:
    """Find a name in another process."""
    look_up(name)


def failure_of(runtime: Runtime, failing: Task) -> TaskExecutionError:
    """What a run of that task raises."""
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[failing], retry=None).run(runtime=runtime)
    return caught.value


FAILING = {
    "model": lambda: task("go", agent(Broken())),
    "async model": lambda: task("go", agent(BrokenLater())),
    "handler": lambda: task("go", handler=by_handler),
    "guardrail": lambda: task("go", agent(ScriptedModel("x")), input_guardrails=[by_guardrail]),
}


@pytest.mark.parametrize("what", FAILING)
def test_file_and_line_of_user_code_come_with_the_error(runtime: Runtime, what: str) -> None:
    """S-ERR-42, S-ERR-43: in the traceback that Python prints, and as text in the trace; once in each."""
    error = failure_of(runtime, FAILING[what]())
    printed = "".join(traceback.format_exception(error))
    assert error.trace is not None
    stored = error.trace.errors[0].stack_trace
    line = look_up.__code__.co_firstlineno + 2
    for text in (printed, stored):
        assert text.count(f'{HERE}", line {line}, in look_up') == 1
    cause = error.__cause__.__cause__ if error.__cause__ is not None else None
    assert isinstance(cause, KeyError)
    assert cause.args == (what.removeprefix("async "),)


def test_class_fields_and_causes_of_a_users_error_arrive(runtime: Runtime) -> None:
    """S-ERR-44, S-ERR-42: the class itself, so that `except` works alike on both runtimes; and what it was raised from."""
    error = failure_of(runtime, task("go", handler=coded))
    assert error.__cause__ is not None
    cause = error.__cause__.__cause__
    assert isinstance(cause, CodedError)
    assert (cause.code, str(cause)) == (7, "code 7")
    assert isinstance(cause.__cause__, KeyError)
    printed = "".join(traceback.format_exception(error))
    assert (printed.count("in coded"), printed.count("in look_up")) == (2, 1)


def test_error_that_was_being_handled_is_told(runtime: Runtime) -> None:
    """S-ERR-42: `raise` inside `except`, without `from`."""

    def careless(context: TaskHandlerContext) -> str:
        try:
            look_up("first")
        except KeyError:
            raise ValueError("second")  # noqa: B904  what users write

    printed = "".join(traceback.format_exception(failure_of(runtime, task("go", handler=careless))))
    assert "in careless" in printed
    assert printed.count("in look_up") == 1


@pytest.mark.parametrize("broken", [find, crunch], ids=["here", "in a process"])
def test_model_is_told_class_and_text_of_what_a_tool_raised(runtime: Runtime, broken: Callable[..., str]) -> None:
    """S-ENG-51: `KeyError: 'zzz'`, not `'zzz'`; the task goes on."""
    name = broken.__name__
    model = ScriptedModel(call(name, '{"name": "zzz"}'), "done")
    output = Ensemble(tasks=[task("go", agent(model, tools=[broken]))]).run(runtime=runtime)
    assert output.raw == "done"
    assert model.calls[1].messages[-1].content == "Tool error: KeyError: 'zzz'"


class Heard(logging.Handler):
    """Keeps the warnings of the process that it is in."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.lines.append(record.getMessage())


HEARD = Heard()


@tool
def listen() -> str:
    """Listen to the log where the agent lives."""
    HEARD.lines.clear()
    logging.getLogger("ensemble_ray").addHandler(HEARD)
    return "yes"


@tool
def heard() -> list[str]:
    """Tell what was heard."""
    logging.getLogger("ensemble_ray").removeHandler(HEARD)
    return HEARD.lines


@pytest.mark.parametrize("broken", [find, crunch], ids=["here", "in a process"])
def test_log_has_one_line_with_the_traceback_of_a_tool(runtime: Runtime, broken: Callable[..., str]) -> None:
    """S-TOOL-90, S-ERR-46: on Ray in the log of the agent's process, also of a tool that runs in another one."""
    asked = [call("listen"), call(broken.__name__, '{"name": "zzz"}'), call("heard")]
    model = ScriptedModel(*asked, "done")
    Ensemble(tasks=[task("go", agent(model, tools=[listen, broken, heard]))]).run(runtime=runtime)
    (line,) = json.loads(model.calls[3].messages[-1].content or "")
    head, _, rest = line.partition("\n")
    assert head.startswith(f'[Writer] Tool error: {broken.__name__}({{"name": "zzz"}}) -> Tool error: KeyError: ')
    assert HERE in rest
    assert "in look_up" in rest


STATUS = {
    400: openai.BadRequestError,
    401: openai.AuthenticationError,
    429: openai.RateLimitError,
    503: openai.InternalServerError,
}


@pytest.mark.parametrize("status", STATUS)
def test_cause_is_the_providers_class_with_status_and_body(
    runtime: Runtime, model_server: Servers, status: int
) -> None:
    """S-ERR-40, S-ERR-31, S-ERR-47: `except openai.RateLimitError` works on both runtimes; the message names all."""
    server = model_server(Fault(status=status, message="not today"))
    model = OpenAIChatModel("scripted", base_url=server.base_url, api_key="sk-very-secret-0123456789")
    error = failure_of(runtime, task("Collect the facts", agent(model), name="facts"))
    assert error.__cause__ is not None
    with pytest.raises(STATUS[status]) as caught:
        raise error.__cause__.__cause__ or AssertionError
    cause = caught.value
    assert type(cause) is STATUS[status]
    assert (cause.status_code, cause.response.status_code) == (status, status)
    assert isinstance(cause.body, dict)
    assert cause.body["message"] == "not today"
    assert str(error).startswith("Task 'facts' failed: Agent 'Writer': ")
    assert "not today" in str(error)
    assert str(error).endswith(f"({STATUS[status].__name__})")
    assert "very-secret" not in repr(vars(cause)) + repr(cause.response.headers) + repr(cause.request.headers)


def test_providers_class_is_read_from_the_record(runtime: Runtime, model_server: Servers, home: str) -> None:
    """S-ERR-41: what a finished run recorded of its failure is an error of the same class, on both runtimes."""
    server = model_server([Fault(status=429, message="slow down")])
    model = OpenAIChatModel("scripted", base_url=server.base_url, api_key="k-0123456789")
    team = Ensemble(
        tasks=[task("a", agent(model)), task("b", handler=by_handler)],
        retry=None,
        workflow=Workflow.PARALLEL,
        parallel_error_strategy=ParallelErrorStrategy.CONTINUE_ON_ERROR,
    )
    with pytest.raises(ParallelExecutionError, match=r"^2 of 2 tasks failed: .*'a': Agent 'Writer': ") as caught:
        team.run(runtime=runtime, run_id="twice")
    assert set(caught.value.failed_task_causes) == {"a", "b"}
    facts = [fact for fact in read_facts("twice", Path(home)) if fact.kind == "task_failed"]
    errors = [error_from(cast("Mapping[str, object]", fact.data.to_data()["error"])) for fact in facts]
    provider = next(each.__cause__ for each in errors if isinstance(each.__cause__, openai.APIError))
    assert isinstance(provider, openai.RateLimitError)
    assert provider.status_code == 429
    users = next(each.__cause__ for each in errors if isinstance(each.__cause__, KeyError))
    assert any(HERE in note and "in look_up" in note for note in users.__notes__)


def test_guardrail_is_named_by_its_function(inline_runtime: Runtime) -> None:
    """S-GRD-11: with the class of what it raised."""
    error = failure_of(inline_runtime, FAILING["guardrail"]())
    assert str(error.__cause__) == "Agent 'Writer': guardrail 'by_guardrail' raised KeyError: 'guardrail'"
    assert str(error) == f"Task 'go' failed: {error.__cause__}"


def test_what_users_wrote_is_cut_in_messages_and_log_lines(
    inline_runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    """S-ERR-45, S-ERR-30: 200 characters of each text; fields have all of it."""
    long, role = "d" * 9000, "r" * 900
    with caplog.at_level(logging.INFO, "ensemble_ray"):
        error = failure_of(
            inline_runtime, task(long, agent(ScriptedModel("x"), role=role), input_guardrails=[refusing])
        )
    assert len(str(error)) < 1200
    assert error.task_description == long
    assert str(error).startswith(f"Task '{'d' * 200}...' failed: INPUT guardrail violation on agent '{'r' * 200}...'")
    assert getattr(error.__cause__, "violation_message", "") == "w" * 5000
    assert max(len(record.getMessage()) for record in caplog.records) < 1500


@pytest.mark.parametrize("what", FAILING)
def test_no_warning_repeats_what_the_error_tells(
    inline_runtime: Runtime, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """S-ERR-46: each error once: the caller has it."""
    with caplog.at_level(logging.WARNING, "ensemble_ray"):
        error = failure_of(inline_runtime, FAILING[what]())
    assert isinstance(error.__cause__, AgentExecutionError)
    assert [record.getMessage() for record in caplog.records] == []
