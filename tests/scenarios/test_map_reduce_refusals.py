"""Map-reduces whose provider refuses every call: a wrong key must not burn a hundred thousand items."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from ensemble_ray import (
    AgentExecutionError,
    OpenAIChatModel,
    Runtime,
    TaskExecutionError,
    TaskHandlerContext,
    resume,
)
from ensemble_ray.testing import Fault, ModelServer
from tests.scenarios.mapping import map_task, mapping


@pytest.mark.parametrize("policy", ["fail", "collect", "skip"])
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, openai.AuthenticationError),
        (402, openai.APIStatusError),
        (403, openai.PermissionDeniedError),
        (404, openai.NotFoundError),
    ],
)
def test_refusal_of_the_model_ends_the_run_which_can_go_on(
    model_server: Callable[..., ModelServer],
    status: int,
    kind: type[openai.APIStatusError],
    policy: Any,
    tmp_path: Path,
) -> None:
    """S-MR-155: after the calls that were on their way; with a right key only what is missing is asked."""
    server = model_server(lambda request: "ok" if request.number < 5 or is_mended else Fault(status=status))
    is_mended = False
    llm = OpenAIChatModel("m", base_url=server.base_url, api_key="sk-of-a-test")
    dead = tmp_path / "dead.jsonl"
    fields: dict[str, Any] = {"llm": llm, "on_item_error": policy, "max_parallel_tasks": 2, "dead_letters": dead}
    with pytest.raises(TaskExecutionError) as caught:
        mapping(iter(range(30)), **fields).run(runtime="inline", run_id="refused")
    cause = caught.value.__cause__
    assert isinstance(cause, AgentExecutionError)
    assert isinstance(cause.__cause__, kind)
    assert len(server.requests) <= 7
    assert not dead.exists() or not dead.read_text()
    is_mended, asked = True, len(server.requests)
    output = resume("refused", mapping(iter(range(30)), **fields), runtime="inline")
    assert len(output.task_outputs) == 30
    assert len(server.requests) - asked == 25
    assert not output.failed_items


@pytest.mark.parametrize("policy", ["fail", "collect", "skip"])
@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=429, message="You exceeded your current quota", code="insufficient_quota"),
        Fault(status=400, message="Your credit balance is too low to access the API."),
        Fault(status=200, message="Insufficient credits", code="402"),
    ],
)
def test_an_account_without_credit_ends_the_run_which_can_go_on(
    model_server: Callable[..., ModelServer], fault: Fault, policy: Any
) -> None:
    """S-LLM-21, S-MR-155: no item fails for it, and with new credit only what is missing is asked."""
    server = model_server(lambda request: "ok" if request.number < 3 or is_paid else fault)
    is_paid = False
    llm = OpenAIChatModel("m", base_url=server.base_url, api_key="sk-of-a-test")
    fields: dict[str, Any] = {"llm": llm, "on_item_error": policy, "max_parallel_tasks": 2}
    with pytest.raises(TaskExecutionError, match="has no credit or quota left"):
        mapping(iter(range(20)), **fields).run(runtime="inline", run_id="broke")
    assert len(server.requests) <= 5
    is_paid, asked = True, len(server.requests)
    output = resume("broke", mapping(iter(range(20)), **fields), runtime="inline")
    assert len(output.task_outputs) == 20
    assert len(server.requests) - asked == 17
    assert not output.failed_items


def test_refusal_of_the_model_ends_a_run_on_ray(model_server: Callable[..., ModelServer], ray_runtime: Runtime) -> None:
    """S-MR-155, S-ERR-40: the provider's error arrives as such."""
    server = model_server(lambda request: "ok" if request.number < 5 else Fault(status=401))
    llm = OpenAIChatModel("m", base_url=server.base_url, api_key="sk-of-a-test")
    with pytest.raises(TaskExecutionError, match="AuthenticationError"):
        mapping(iter(range(1000)), llm=llm, on_item_error="collect", max_parallel_tasks=4).run(runtime=ray_runtime)
    assert len(server.requests) < 100


def test_error_of_a_handler_is_no_refusal() -> None:
    """S-MR-155: whatever its class; the other items go on."""

    def handle(context: TaskHandlerContext) -> str:
        if "map 3" in context.description:
            request = httpx2.Request("GET", "http://127.0.0.1/")
            raise openai.NotFoundError("no such page", response=httpx2.Response(404, request=request), body=None)
        return "ok"

    handled = mapping(
        iter(range(6)), map_task=lambda item: map_task(item).replace(handler=handle), on_item_error="collect"
    )
    assert [failed.index for failed in handled.run(runtime="inline").failed_items] == [3]
