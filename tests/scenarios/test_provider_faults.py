"""Providers that fail and come back: what a run makes of it, request by request, in this process."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable

import openai
import pytest

from ensemble_ray import (
    AgentExecutionError,
    Ensemble,
    InlineRuntime,
    OpenAIChatModel,
    ParallelExecutionError,
    RateLimit,
    RateLimitedChatModel,
    RetryPolicy,
    TaskExecutionError,
    Workflow,
)
from ensemble_ray.testing import Fault, ModelServer, Reply, ServedRequest
from tests.builders import agent, task

Servers = Callable[..., ModelServer]

#: Patient, but quick about it.
QUICK = RetryPolicy(first_delay=0.001, max_delay=0.002)


@pytest.fixture
def runtime() -> InlineRuntime:
    """Keeps no record."""
    return InlineRuntime()


def model_at(server: ModelServer, **options: object) -> OpenAIChatModel:
    """The model behind a server."""
    return OpenAIChatModel("m", base_url=server.base_url, api_key="sk-of-a-test", **options)  # type: ignore[arg-type]  options


def failure_of(team: Ensemble, runtime: InlineRuntime) -> BaseException | None:
    """What the provider's failure was, from below the run's error."""
    with pytest.raises(TaskExecutionError) as failed:
        team.run(runtime=runtime)
    assert isinstance(failed.value.__cause__, AgentExecutionError)
    return failed.value.__cause__.__cause__


def test_a_run_goes_on_when_its_provider_fails_in_every_way_that_passes(
    runtime: InlineRuntime, model_server: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """S-DUR-61, S-DUR-62, S-DUR-66, S-DUR-27: refused for now, failed, cut off: one effect, one answer."""
    server = model_server([Fault(status=429, retry_after_s=0.01), Fault(status=500), Fault(kind="drop"), "Done"])
    with caplog.at_level(logging.WARNING, "ensemble_ray"):
        output = Ensemble(tasks=[task("go", agent(model_at(server)))], retry=QUICK).run(runtime=runtime)
    assert output.raw == "Done"
    metrics = output.task_outputs[0].metrics
    assert (metrics.retry_count, metrics.llm_call_count, len(server.requests)) == (3, 1, 4)
    assert len({request.key for request in server.requests}) == 1
    assert server.requests[0].key
    lines = [message for message in caplog.messages if "failed, again in" in message]
    assert len(lines) == 3
    assert "attempt 1 of 5" in lines[0]
    assert "HTTP 429" in lines[0]
    assert "sk-of-a-test" not in caplog.text


def test_a_run_goes_on_when_an_answer_came_too_late(inline_runtime: InlineRuntime, model_server: Servers) -> None:
    """S-DUR-61: a timeout is the provider's fault."""
    server = model_server(lambda request: "Done" if request.number else Fault(kind="silence"))
    team = Ensemble(tasks=[task("go", agent(model_at(server, timeout=0.5)))], retry=QUICK.replace(max_attempts=30))
    output = team.run(runtime=inline_runtime)
    assert output.raw == "Done"
    retries = output.task_outputs[0].metrics.retry_count
    # On a slow machine "Done" may come too late as well, or an attempt may end before it is sent.
    assert 2 <= len(server.requests) <= retries + 1
    assert set(server.requests_by_key()) == {server.requests[0].key}


def test_a_stream_goes_on_when_it_failed_before_it_began(inline_runtime: InlineRuntime, model_server: Servers) -> None:
    """S-DUR-61: and is not repeated once it has begun."""
    server = model_server([Fault(status=503), "It works"])
    team = Ensemble(tasks=[task("go", agent(model_at(server), stream=True))], retry=QUICK)
    assert team.run(runtime=inline_runtime).raw == "It works"
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault(status=400, message="too long"), openai.BadRequestError),
        (Fault(status=401), openai.AuthenticationError),
        (Fault(kind="garbage"), openai.APIResponseValidationError),
    ],
)
def test_a_run_fails_at_once_when_another_attempt_is_of_no_use(
    inline_runtime: InlineRuntime, model_server: Servers, fault: Fault, kind: type[Exception]
) -> None:
    """S-DUR-61: a refusal, and an answer that nobody can read."""
    server = model_server(fault)
    team = Ensemble(tasks=[task("go", agent(model_at(server)))], retry=QUICK)
    assert isinstance(failure_of(team, inline_runtime), kind)
    assert len(server.requests) == 1


@pytest.mark.parametrize("policy", [None, RetryPolicy(max_attempts=1)])
def test_a_run_fails_at_once_when_it_is_to_be_impatient(
    inline_runtime: InlineRuntime, model_server: Servers, policy: RetryPolicy | None
) -> None:
    """S-DUR-60: no retries."""
    server = model_server(Fault(status=500))
    team = Ensemble(tasks=[task("go", agent(model_at(server)))], retry=policy)
    assert isinstance(failure_of(team, inline_runtime), openai.InternalServerError)
    assert len(server.requests) == 1


def test_a_run_fails_at_once_when_its_provider_asks_for_more_patience_than_it_has(
    inline_runtime: InlineRuntime, model_server: Servers
) -> None:
    """S-DUR-62: with the provider's error, which tells what it asked for."""
    server = model_server(Fault(status=429, retry_after_s=121))
    failure = failure_of(Ensemble(tasks=[task("go", agent(model_at(server)))]), inline_runtime)
    assert isinstance(failure, openai.RateLimitError)
    assert "It asks to wait 121 s" in str(failure)
    assert len(server.requests) == 1


def test_each_attempt_takes_a_permit_when_the_run_has_a_limit(runtime: InlineRuntime, model_server: Servers) -> None:
    """S-DUR-63: a limit of one request per hour is not passed by a retry."""
    server = model_server([Fault(status=503), "never"])
    limited = RateLimitedChatModel.of(model_at(server), RateLimit.of(1, 3600), wait_timeout=0)
    team = Ensemble(tasks=[task("go", agent(limited))], retry=QUICK)
    assert "Rate limit exceeded" in str(failure_of(team, runtime))
    assert len(server.requests) == 1


def test_no_more_requests_are_sent_when_an_endpoint_fails_for_everybody(
    runtime: InlineRuntime, model_server: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """S-DUR-64: twenty tasks ask an endpoint that is down; those that were not asked yet fail without a request."""
    server = model_server(Fault(status=503, message="down"))
    model = model_at(server)
    team = Ensemble(
        tasks=[task(f"t{number}", agent(model)) for number in range(20)],
        workflow=Workflow.PARALLEL,
        parallel_error_strategy="continue_on_error",
        max_parallel_tasks=2,
        # Nobody waits for the breaker: while it lets a probe through, one more would be asked.
        retry=RetryPolicy(first_delay=0, max_delay=0, max_wait=0),
    )
    with caplog.at_level(logging.WARNING, "ensemble_ray"), pytest.raises(ParallelExecutionError) as failed:
        team.run(runtime=runtime)
    # Five failures open the breaker; the other task's request may have been on its way.
    assert 5 <= len(server.requests) <= 6
    causes = [error.__cause__ for error in failed.value.failed_task_causes.values()]
    assert sum("fails for everybody and is not asked for now" in str(cause) for cause in causes) >= 18
    assert len([message for message in caplog.messages if "fails for everybody; calls to it wait" in message]) == 1
    assert "sk-of-a-test" not in caplog.text + "".join(map(str, causes))


def test_a_crowd_gets_all_its_answers_when_the_endpoint_lets_few_in(
    runtime: InlineRuntime, model_server: Servers
) -> None:
    """S-DUR-65: forty calls at once, refused until fewer come; nobody fails."""

    def few(request: ServedRequest) -> Fault | str:
        return Fault(status=429, retry_after_s=0.01) if request.number < 20 else "Done"

    server = model_server(few)
    team = Ensemble(
        tasks=[task(f"t{number}", agent(model_at(server))) for number in range(40)],
        workflow=Workflow.PARALLEL,
        # One of them may be refused again and again.
        retry=QUICK.replace(max_attempts=30),
    )
    output = team.run(runtime=runtime)
    assert [one.raw for one in output.task_outputs] == ["Done"] * 40
    assert len(server.requests) == 60
    assert sum(one.metrics.retry_count for one in output.task_outputs) == 20


#: A fresh process, in which the provider's package is imported at the first failure, while other calls are answered.
_WIDE = """
import sys
from ensemble_ray import Ensemble, OpenAIChatModel, RetryPolicy, Task
assert "openai" not in sys.modules
model = OpenAIChatModel("m", base_url=sys.argv[1], api_key="sk-of-a-test")
tasks = [Task.of(f"task {number}") for number in range(400)]
team = Ensemble(tasks=tasks, llm=model, workflow="parallel", max_parallel_tasks=50, durability="off",
                retry=RetryPolicy(first_delay=0.001, max_delay=0.002))
print(len(team.run(runtime="inline").task_outputs))
"""


def test_the_breaker_stays_closed_when_one_call_in_twenty_fails_in_a_fresh_process(model_server: Servers) -> None:
    """S-DUR-64: failures that wait for an import of the provider's package are not told as a row."""
    server = model_server(
        lambda asked: Fault(status=503) if asked.number % 20 == 7 else Reply(text="ok", latency_s=0.01)
    )
    ended = subprocess.run(  # noqa: S603  this interpreter
        [sys.executable, "-c", _WIDE, server.base_url], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.stdout, ended.returncode) == ("400\n", 0), ended.stderr
    assert ended.stderr.count("failed, again in") == sum(request.number % 20 == 7 for request in server.requests)
    assert "fails for everybody" not in ended.stderr
