"""Planned runs whose provider says that the account has no credit: interrupted, so that they can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ensemble_ray import (
    AgentExecutionError,
    Ensemble,
    EnsembleError,
    ExitReason,
    Loop,
    OpenAIChatModel,
    ParallelExecutionError,
    Phase,
    RunState,
    Runtime,
    TaskExecutionError,
    TaskHandlerContext,
    resume,
)
from ensemble_ray.testing import Fault, ModelServer, Reply, ServedRequest
from tests.builders import task
from tests.command_line import calling
from tests.scenarios.delegating import hand, worker
from tests.scenarios.teams import recorded_state

BROKE = Fault(status=429, message="You exceeded your current quota", code="insufficient_quota")
RUN_ID = "broke"


class Account:
    """An account that has credit for some requests, then for none until somebody pays."""

    def __init__(self, credit: int) -> None:
        self.credit = credit

    def answer(self, request: ServedRequest) -> str | Reply | Fault:
        """Answer by the last line of the task."""
        if request.number >= self.credit:
            return BROKE
        return "ok"


@pytest.fixture
def account() -> Account:
    return Account(credit=1)


@pytest.fixture
def server(model_server: Callable[..., ModelServer], account: Account) -> ModelServer:
    return model_server(account.answer)


def fail(team: Ensemble, runtime: Runtime | str) -> EnsembleError:
    """Return what the run raised for lack of credit."""
    handle = team.start(runtime=runtime, run_id=RUN_ID)
    with pytest.raises(EnsembleError) as caught:
        handle.result()
    assert "has no credit or quota left" in str(caught.value)
    assert handle.state is RunState.INTERRUPTED
    return caught.value


def model(server: ModelServer) -> OpenAIChatModel:
    """The model of that server."""
    return OpenAIChatModel("m", base_url=server.base_url, api_key="sk-of-a-test")


def test_a_run_without_credit_is_interrupted_and_resumed(
    server: ModelServer, account: Account, runtime: Runtime, home: str
) -> None:
    """S-DUR-151, S-LLM-21: state and record are of an interrupted run; recorded answers are used, the task that was refused is done."""
    team = Ensemble(tasks=[task(name, name=name) for name in "abc"], llm=model(server))
    error = fail(team, runtime)
    assert isinstance(error, TaskExecutionError)
    assert isinstance(error.__cause__, AgentExecutionError)
    assert [each.raw for each in error.completed_task_outputs] == ["ok"]
    assert error.run_id == RUN_ID
    assert error.trace is not None
    assert len(server.requests) == 2
    account.credit = 10
    output = resume(RUN_ID, team, runtime=runtime)
    assert (len(output.task_outputs), output.exit_reason) == (3, ExitReason.COMPLETED)
    assert len(server.requests) == 4
    assert output.metrics.total_llm_call_count == 3


def test_an_interrupted_run_has_no_end_on_record(
    server: ModelServer, account: Account, home: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """S-DUR-151: neither the task's failure nor the run's end; `trace`, `runs` and `attach` say why it stopped, until it goes on."""
    team, call = Ensemble(tasks=[task(name, name=name) for name in "ab"], llm=model(server)), calling(capsys)
    commands = (("trace", RUN_ID), ("runs",), ("attach", RUN_ID))
    fail(team, "inline")
    assert recorded_state(home, RUN_ID) is RunState.INTERRUPTED
    assert all("has no credit or quota left" in f"{call(*command)}" for command in commands)
    (data,) = json.loads(call("runs", "--json").printed)
    assert "has no credit" in data["interruption"]
    account.credit = 10
    resume(RUN_ID, team, runtime="inline")
    assert not any("has no credit" in f"{call(*command)}" for command in commands)


@pytest.mark.parametrize("strategy", ["fail_fast", "continue_on_error"])
def test_parallel_tasks_do_not_ask_again_without_credit(
    server: ModelServer, account: Account, strategy: Any, runtime: Runtime
) -> None:
    """S-DUR-152: nothing starts after the first refusal, whatever becomes of failures."""
    tasks = [task(f"t{number}", name=f"t{number}") for number in range(20)]
    team = Ensemble(
        tasks=tasks, llm=model(server), workflow="parallel", parallel_error_strategy=strategy, max_parallel_tasks=2
    )
    error = fail(team, runtime)
    assert isinstance(error, ParallelExecutionError if strategy == "continue_on_error" else TaskExecutionError)
    asked = len(server.requests)
    assert asked <= 4
    account.credit = 100
    assert len(resume(RUN_ID, team, runtime=runtime).task_outputs) == 20
    assert len(server.requests) - asked == 19


@pytest.mark.parametrize("unit", ["loop", "phase"])
def test_a_unit_without_credit_is_resumed(server: ModelServer, account: Account, unit: str) -> None:
    """S-DUR-151: of loops and phases, too; what they did is not done again."""
    body = [task(name, name=name) for name in "ab"]
    fields: dict[str, Any] = {"loops": [Loop(name="l", body=body, max_iterations=2)]}
    if unit == "phase":
        fields = {"phases": [Phase(name="p", tasks=body)]}
    team = Ensemble(llm=model(server), **fields)
    fail(team, "inline")
    account.credit, asked = 10, len(server.requests)
    assert resume(RUN_ID, team, runtime="inline").raw == "ok"
    assert len(server.requests) - asked == (3 if unit == "loop" else 1)


def test_a_manager_ends_when_its_worker_has_no_credit(
    model_server: Callable[..., ModelServer], runtime: Runtime
) -> None:
    """S-DUR-152: the manager is not told of it, since its own model would only be refused too."""
    is_paid = False

    def answer(request: ServedRequest) -> str | Reply | Fault:
        if "delegate_task" not in request.tools:
            return "text" if is_paid else BROKE
        return "done" if request.messages[-1]["role"] == "tool" else Reply(tool_calls=[hand("Writer")])

    server = model_server(answer)
    writer = worker("Writer").replace(llm=model(server))
    team = Ensemble(tasks=[task("a")], agents=[writer], llm=model(server), workflow="hierarchical")
    fail(team, runtime)
    assert len(server.requests) == 2
    is_paid = True
    assert resume(RUN_ID, team, runtime=runtime).raw == "done"
    assert len(server.requests) == 4


def test_a_handler_without_credit_fails_its_run(home: str) -> None:
    """S-DUR-151: what user code raises is a failure of its task, whatever its class."""

    def handle(context: TaskHandlerContext) -> str:
        raise OutOfCreditError

    with pytest.raises(TaskExecutionError):
        Ensemble(tasks=[task("a", handler=handle)]).run(runtime="inline", run_id=RUN_ID)
    assert recorded_state(home, RUN_ID) is RunState.FAILED


class OutOfCreditError(Exception):
    """As packages of providers raise it."""

    status_code = 402
