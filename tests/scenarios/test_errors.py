"""What a failed run raises: classes, texts, causes, across processes."""

from __future__ import annotations

import asyncio
import pickle
import traceback

import pydantic
import pytest

from ensemble_ray import (
    AgentExecutionError,
    ChatResponse,
    Ensemble,
    EnsembleError,
    OutputParsingError,
    RateLimit,
    RateLimitedChatModel,
    RateLimitTimeoutError,
    Runtime,
    TaskExecutionError,
    TaskHandlerContext,
)
from ensemble_ray.testing import Fault, ModelServer, ScriptedModel
from tests.builders import agent, task


class OwnError(Exception):
    """An error of the user's, with fields and a constructor that pickling cannot repeat."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"own error {code}")
        self.code = code


def test_a_traceback_of_a_failed_run_is_short(inline_runtime: Runtime) -> None:
    """S-ERR-51: the caller's lines, the call of `run`, and the line of user code that raised."""

    def handle(context: TaskHandlerContext) -> str:
        raise LookupError(context.description)

    error = None
    try:
        Ensemble(tasks=[task("look", handler=handle)]).run(runtime=inline_runtime)
    except TaskExecutionError as raised:
        error = raised
    assert error is not None
    assert error.__cause__ is not None
    assert error.__cause__.__cause__ is not None
    assert len(traceback.extract_tb(error.__traceback__)) <= 4
    assert error.__cause__.__traceback__ is None
    assert [each.name for each in traceback.extract_tb(error.__cause__.__cause__.__traceback__)] == ["handle"]


def test_a_traceback_names_file_and_line_of_code_that_travelled(runtime: Runtime) -> None:
    """S-ERR-48: of a handler and of a tool that are no attributes of a module."""

    def handle(context: TaskHandlerContext) -> str:
        raise LookupError(context.description)

    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[task("look", handler=handle)]).run(runtime=runtime)
    assert caught.value.trace is not None
    (error,) = caught.value.trace.errors
    line = handle.__code__.co_firstlineno + 1
    assert f'File "{__file__}", line {line}, in handle' in error.stack_trace


class Failing:
    """A model that raises in the process where the agent lives."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def chat(self, messages: object, tools: object = ()) -> ChatResponse:
        if self._kind == "own":
            raise OwnError(code=7)
        if self._kind == "local":

            class LocalError(Exception):
                pass

            raise LocalError("made here")
        if self._kind == "chain":
            raise ConnectionError("no network") from KeyError("deep")
        if self._kind == "empty":
            raise TimeoutError
        raise SystemExit(3)


def failure_of(runtime: Runtime, llm: object) -> TaskExecutionError:
    """What a run with that model raises."""
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[task("go", agent(llm))], retry=None).run(runtime=runtime)
    return caught.value


def chain_of(error: BaseException | None) -> list[tuple[str, str]]:
    """Class names and texts along the causes."""
    chain: list[tuple[str, str]] = []
    while error is not None:
        chain.append((type(error).__name__, str(error)))
        error = error.__cause__
    return chain


@pytest.mark.parametrize(
    ("kind", "causes"),
    [
        ("own", [("AgentExecutionError", "Agent 'Writer': own error 7 (OwnError)"), ("OwnError", "own error 7")]),
        ("local", [("AgentExecutionError", "Agent 'Writer': made here (LocalError)"), ("LocalError", "made here")]),
        (
            "chain",
            [
                ("AgentExecutionError", "Agent 'Writer': no network (ConnectionError)"),
                ("ConnectionError", "no network"),
                ("KeyError", "'deep'"),
            ],
        ),
        ("empty", [("AgentExecutionError", "Agent 'Writer': TimeoutError"), ("TimeoutError", "")]),
    ],
)
def test_chain_of_causes_reaches_the_caller(runtime: Runtime, kind: str, causes: list[tuple[str, str]]) -> None:
    """S-ERR-31, S-CONV-32, S-ENG-50, S-ENG-61: to the provider's own error, or one of its name and text."""
    top = ("TaskExecutionError", f"Task 'go' failed: {causes[0][1]}")
    assert chain_of(failure_of(runtime, Failing(kind))) == [top, *causes]


def test_model_that_exits_fails_its_task_only(runtime: Runtime) -> None:
    """S-ENG-50: `sys.exit` in a model ends neither the run's process nor the agent's."""
    error = failure_of(runtime, Failing("exit"))
    assert chain_of(error)[1] == ("AgentExecutionError", "Agent 'Writer': 3 (SystemExit)")


def test_no_class_of_ray_escapes(runtime: Runtime) -> None:
    """S-CONV-32: neither as the error nor anywhere in its chain or its traceback's causes."""
    error: BaseException | None = failure_of(runtime, Failing("own"))
    assert "ray" not in {type(each).__module__.partition(".")[0] for each in _links(error)}
    assert "RayTaskError" not in "".join(traceback.format_exception(error))


def _links(error: BaseException | None) -> list[BaseException]:
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links


def test_error_of_a_run_pickles_with_all_it_carries(runtime: Runtime) -> None:
    """S-SET-26, S-ERR-33, S-ERR-36: outputs with their parsed objects, trace, run id, causes."""
    writer = agent(ScriptedModel('{"a": 1}', ValueError("no")))
    typed = task("typed", writer, output_type=Numbers)
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[typed, task("bad", writer)]).run(runtime=runtime, run_id="carried")
    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301  our own bytes
    assert str(copy) == "Task 'bad' failed: Agent 'Writer': no (ValueError)"
    assert copy.run_id == "carried"
    assert copy.trace == caught.value.trace
    (done,) = copy.completed_task_outputs
    assert done.get_parsed_output(Numbers) == Numbers(a=1)
    assert chain_of(copy) == chain_of(caught.value)


class Numbers(pydantic.BaseModel):
    """A typed answer."""

    a: int


def test_one_except_covers_what_runs_raise(inline_runtime: Runtime) -> None:
    """S-ERR-37, S-ERR-18, S-ENG-15: an unparsable answer is a TaskExecutionError as it is, with what was completed."""
    writer = agent(ScriptedModel("fine", "no JSON"))
    typed = task("typed", writer, output_type=Numbers, max_output_retries=0)
    with pytest.raises(EnsembleError) as caught:
        Ensemble(tasks=[task("first", writer), typed]).run(runtime=inline_runtime)
    error = caught.value
    assert isinstance(error, OutputParsingError)
    assert isinstance(error, TaskExecutionError)
    assert [each.raw for each in error.completed_task_outputs] == ["fine"]


def test_keys_are_in_no_error(runtime: Runtime, model_server: type[ModelServer]) -> None:
    """S-ERR-39, S-CONV-22: a provider that refuses the key."""
    from ensemble_ray import OpenAIChatModel

    secret = "sk-very-secret-0123456789"  # noqa: S105  a key that opens nothing
    server = model_server(Fault(status=401, message="Incorrect API key provided."), api_key="another")
    model = OpenAIChatModel("scripted", base_url=server.base_url, api_key=secret)
    error = failure_of(runtime, model)
    told = "".join(traceback.format_exception(error)) + repr(error.trace) + repr(vars(error))
    assert secret not in told
    assert secret[3:14] not in told
    assert chain_of(error)[1][0] == "AgentExecutionError"


def test_rate_limit_timeout_surfaces_in_the_chain(inline_runtime: Runtime) -> None:
    """S-RATE-15, S-ERR-20, S-RATE-12: the model is not called without a permit."""
    inner = ScriptedModel("one")
    limited = RateLimitedChatModel.of(inner, RateLimit.of(1, 3600), wait_timeout=0.01)
    writer = agent(limited)
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[task("first", writer), task("second", writer)]).run(runtime=inline_runtime)
    cause = caught.value.__cause__
    assert isinstance(cause, AgentExecutionError)
    assert isinstance(cause.__cause__, RateLimitTimeoutError)
    assert cause.__cause__.rate_limit == RateLimit.of(1, 3600)
    assert len(inner.calls) == 1


def test_failure_of_a_task_leaves_the_process_fit_for_the_next_run(runtime: Runtime) -> None:
    """S-CONV-37, S-ENG-20: nothing of a failed run stays behind."""
    for _ in range(2):
        failure_of(runtime, Failing("chain"))
        assert Ensemble(tasks=[task("go", agent(ScriptedModel("fine")))]).run(runtime=runtime).raw == "fine"


class Cancelling:
    """A model whose client raises a cancellation of its own."""

    async def chat(self, messages: object, tools: object = ()) -> ChatResponse:
        raise asyncio.CancelledError("client closed")


def test_cancellation_that_nobody_asked_for_is_a_failure(inline_runtime: Runtime) -> None:
    """S-ENG-50, S-PAR-12: the task resolves, the run ends."""
    assert chain_of(failure_of(inline_runtime, Cancelling()))[1:] == [
        ("AgentExecutionError", "Agent 'Writer': client closed (CancelledError)"),
        ("CancelledError", "client closed"),
    ]
