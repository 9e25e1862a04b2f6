"""Teams behind a real Serve instance: `ensemble-ray serve`, on a cluster of its own."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from openai import APIStatusError, OpenAI

from ensemble_ray import InlineRuntime, ReviewDecision, decide
from ensemble_ray.access.key_store import KeyFile
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.serve.driving.webhooks import SECRET_VARIABLE
from ensemble_ray.testing import ModelServer
from tests.command_line import COMMAND
from tests.processes import free_ports, own_directory, own_environment, program
from tests.serve.endpoint import Endpoint
from tests.serve.keys import make_key
from tests.serve.teams import KEY, KEY_VARIABLE, script, write_asking_team, write_map_reduce, write_team
from tests.serve.webhook_receiver import SECRET, Receiver


@pytest.fixture(scope="module")
def models() -> Iterator[ModelServer]:
    """The models' endpoint."""
    with ModelServer(script, api_key=KEY) as server:
        yield server


@pytest.fixture(scope="module")
def endpoint(models: ModelServer) -> Iterator[Endpoint]:
    """Four teams and a tool, served until they are interrupted; that leaves no process behind (S-SRV-61)."""
    with own_directory() as directory:
        team = write_team(directory, models.base_url)
        (port,) = free_ports(1)
        said = directory / "said.yaml"
        said.write_text(f"{team.read_text(encoding='utf-8')}\nstream: true\n", encoding="utf-8")
        others = [write(directory, models.base_url) for write in (write_map_reduce, write_asking_team)]
        teams = [each.name for each in (team, said, *others)]
        env = own_environment(directory, **{KEY_VARIABLE: KEY, SECRET_VARIABLE: SECRET})
        command = [*COMMAND, "serve", *teams, "--tool", "team_tools:shout", "--port", str(port)]
        command += ["--webhook-host", "127.0.0.1"]
        with program(command, log=directory / "log", env=env, cwd=directory) as running:
            served = Endpoint(running, port, directory / "records")
            running.until(lambda: "Ctrl-C stops" in running.text, "the address")
            yield served
            running.process.send_signal(signal.SIGINT)
            assert running.process.wait(timeout=180) == 0, running.text
        assert not running.members()


def test_a_served_team_runs_on_the_cluster_it_lives_in(endpoint: Endpoint, models: ModelServer) -> None:
    """S-SRV-61: the address is said, the answer and the record are there, and no second cluster was started."""
    assert f"Serving [team, said, many, asking] at http://127.0.0.1:{endpoint.port}" in endpoint.program.text
    status, answer = endpoint.run({"ensemble": "team", "inputs": {"topic": "Ray"}, "run_id": "served"})
    assert (status, answer.get("status")) == (200, "completed"), endpoint.program.text
    assert answer["result"]["raw"] == "a line"
    tasks = answer["result"]["tasks"]
    assert [(each["role"], each["text"]) for each in tasks] == [("Writer", "a draft"), ("Editor", "a line")]
    assert any("shout" in request.tools for request in models.requests)
    assert (endpoint.records / "runs" / "served" / "meta.json").is_file()
    assert len(endpoint.program.members(named="gcs_server")) == 1


def test_options_reach_the_agents_on_the_cluster_when_a_request_has_them(
    endpoint: Endpoint, models: ModelServer
) -> None:
    """S-REQ-5, S-REQ-21, S-REQ-30, S-REQ-40: by way of the replica, the driver, the scheduler and the agents' processes."""
    asked_before = len(models.requests)
    body = {
        "ensemble": "team",
        "inputs": {"topic": "Ray"},
        "run_id": "options",
        "additional_context": "For {children}",
        "options": {"max_iterations": 3},
        "task_overrides": {"draft": {"tools": {"remove": ["shout"]}}, "final": {"tools": {"add": ["shout"]}}},
        "output_schema": {"type": "string", "enum": ["a line", "two lines"]},
    }
    status, answer = endpoint.run(body)
    assert (status, answer.get("status")) == (200, "completed"), endpoint.program.text
    assert [each["structured"] for each in answer["result"]["tasks"]] == [None, "a line"]
    draft, final = models.requests[asked_before:]
    assert all("## Additional Context" in each.text and "For {children}" in each.text for each in (draft, final))
    assert ("shout" in draft.tools, "shout" in final.tools) == (False, True)
    assert '"two lines"' in final.text
    connection = endpoint.send("GET", "/runs/options/events?events=task_completed")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    kinds = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert kinds == ["task_completed", "task_completed", "ensemble_completed"]
    status, failure = endpoint.ask("GET", "/runs?limt=5")
    assert (status, "query.limt: unknown parameter" in failure["message"]) == (422, True)


def test_a_served_team_listens_on_loopback_alone(endpoint: Endpoint) -> None:
    """What listens on every interface answers to every address of loopback."""
    assert endpoint.is_up()
    with pytest.raises(OSError, match=r".+"):
        http.client.HTTPConnection("127.0.0.2", endpoint.port, timeout=5).connect()


@pytest.mark.skipif(sys.platform != "linux", reason="the peaks of other processes are read from /proc")
def test_a_long_body_fills_the_memory_of_no_process(endpoint: Endpoint) -> None:
    """S-SEC-80: neither Serve's proxy nor the replica nor the scheduler keeps the 100 MB of a client that goes on sending."""
    assert endpoint.run({"ensemble": "team", "inputs": {"topic": "Ray"}})[0] == 200
    before = endpoint.peaks()
    part = b"[" * 1_000_000
    for how in ("content-length: 100000000", "transfer-encoding: chunked"):
        with socket.create_connection(("127.0.0.1", endpoint.port), timeout=300) as opened:
            head = f"POST /runs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{how}\r\n\r\n"
            opened.sendall(head.encode())
            with contextlib.suppress(OSError):  # it has had enough
                for _ in range(100):
                    opened.sendall(part if "length" in how else b"%x\r\n%s\r\n" % (len(part), part))
    assert endpoint.run({"ensemble": "team", "inputs": {"topic": "Ray"}})[0] == 200
    grown = {pid: peak - before[pid] for pid, peak in endpoint.peaks().items() if pid in before}
    assert max(grown.values()) < 60_000_000


def test_a_foreign_host_and_a_long_body_are_refused_with_a_failure(endpoint: Endpoint) -> None:
    """S-SEC-80, S-SEC-82: through Serve's proxy too."""
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=300)
    connection.request("GET", "/healthz", headers={"host": "evil.example"})
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]) == (421, "InvalidRequest")
    connection.close()
    status, failure = endpoint.ask("POST", "/runs", {"inputs": {"topic": "x" * 8_500_000}})
    assert (status, failure["error"]) == (413, "InvalidRequest")


def test_a_replica_that_dies_loses_no_run_and_no_event(endpoint: Endpoint, models: ModelServer) -> None:
    """S-SRV-40: the run goes on, and a reader that comes back has every event once."""
    asked_before = len(models.requests)
    models.pause()
    try:
        status, _ = endpoint.ask("POST", "/runs", {"ensemble": "team", "inputs": {"topic": "x"}, "run_id": "kept"})
        assert status == 202
        models.wait_arrived(asked_before + 1, timeout_s=120)
        following = endpoint.follow("kept")
        first = [next(following), next(following)]
        assert [kind for _, kind, _ in first] == ["ensemble_started", "task_started"]
        endpoint.kill("ray::ServeRepli")
        assert list(following) == []
    finally:
        models.resume()
    endpoint.program.until(endpoint.is_up, "another replica")
    rest = list(endpoint.follow("kept", after=first[-1][0]))
    assert rest[-1][1] == "ensemble_completed"
    assert [*first, *rest] == list(endpoint.follow("kept"))
    assert endpoint.ask("GET", "/runs/kept")[1]["result"]["raw"] == "a line"
    assert len(models.requests) == asked_before + 2


def test_a_run_on_the_cluster_is_told_a_directive(endpoint: Endpoint, models: ModelServer) -> None:
    """S-SRV-200, S-CTL-5: by way of the replica, what drives runs and the scheduler; the task that had begun is not told."""
    asked_before = len(models.requests)
    models.pause()
    try:
        endpoint.ask("POST", "/runs", {"ensemble": "team", "inputs": {"topic": "x"}, "run_id": "told"})
        models.wait_arrived(asked_before + 1, timeout_s=120)
        status, run = endpoint.ask("POST", "/runs/told/inject", {"text": "Write in French"})
        assert (status, run["status"]) == (200, "running")
    finally:
        models.resume()
    assert [kind for _, kind, _ in endpoint.follow("told")][-1] == "ensemble_completed"
    told = ["## Active Directives\n- Write in French" in each.text for each in models.requests[asked_before:]]
    assert told == [False, True]


def test_a_tool_of_the_operator_is_called(endpoint: Endpoint) -> None:
    """S-SRV-206, S-SRV-207: in the process that drives runs."""
    status, reply = endpoint.ask("POST", "/tools/shout/invoke", {"arguments": {"text": "Ray"}})
    assert (status, reply["outcome"], reply["output"]) == (200, "success", "RAY")
    assert [each["name"] for each in endpoint.ask("GET", "/capabilities")[1]["tools"]] == ["shout"]


@pytest.mark.parametrize(("team", "calls"), [("team", 2), ("many", 6)])
def test_runs_are_gone_on_with_when_what_drives_them_dies(
    endpoint: Endpoint, models: ModelServer, team: str, calls: int
) -> None:
    """S-SRV-41, S-SRV-42: a planned run and a map-reduce; its reader has every event once, and its answers are used again."""
    asked_before = len(models.requests)
    run_id = f"taken-{team}"
    models.pause()
    try:
        endpoint.ask("POST", "/runs", {"ensemble": team, "inputs": {"topic": "x"}, "run_id": run_id})
        models.wait_arrived(asked_before + 1, timeout_s=120)
        endpoint.kill("ray::RunDriver")
    finally:
        models.resume()
    events = list(endpoint.follow(run_id))
    assert events[-1][1:] == ("ensemble_completed", events[-1][2])
    assert events[-1][2]["exit_reason"] == "completed", endpoint.program.text
    assert events == list(endpoint.follow(run_id))
    assert endpoint.ask("GET", f"/runs/{run_id}")[1]["result"]["raw"] == "a line"
    # What was on its way when the process died may be asked twice; nothing else is.
    assert len(models.requests) <= asked_before + calls + (3 if team == "many" else 0)


def test_keys_hold_for_a_served_team(endpoint: Endpoint) -> None:
    """S-SRV-151, S-SRV-152, S-SRV-154, S-SRV-161, S-SRV-170: through Serve, from the request after they were made or revoked."""
    file = KeyFile(endpoint.records)
    try:
        assert endpoint.run({"ensemble": "team", "inputs": {"topic": "Ray"}})[0] == 200
        mine = make_key(file, teams=["team"])
        assert endpoint.ask("GET", "/ensembles")[0] == 401
        connection = endpoint.send("GET", "/ensembles", **mine)
        answer = connection.getresponse()
        assert [each["name"] for each in json.loads(answer.read())["ensembles"]] == ["team"]
        assert answer.headers["cache-control"] == "no-store"
        assert len(answer.headers.get_all("x-request-id", [])) == 1
        connection.close()
        scraped = endpoint.send("GET", "/metrics", **make_key(file, "prometheus")).getresponse().read().decode()
        assert 'ensemble_ray_requests_refused_total{code="UNAUTHENTICATED"} 1' in scraped
        assert 'ensemble_ray_runs{ensemble="team",status="running"} 0' in scraped
        file.revoke("ann")
        assert endpoint.send("GET", "/ensembles", **mine).getresponse().status == 401
        assert endpoint.is_up()
        assert mine["authorization"].removeprefix("Bearer ") not in endpoint.program.text
    finally:
        file.path.unlink()


def test_a_run_is_charged_once_when_what_drives_it_dies_between_its_end_and_the_report(
    endpoint: Endpoint, models: ModelServer
) -> None:
    """S-QUO-21, S-QUO-30, S-QUO-31: the cluster ends it while the driver is frozen and then killed; another death changes nothing."""
    file, asked_before = KeyFile(endpoint.records), len(models.requests)
    body = {"ensemble": "team", "inputs": {"topic": "x"}, "run_id": "charged"}

    def ask(method: str, path: str, body: object = None) -> tuple[int, dict[str, Any], dict[str, str]]:
        connection = endpoint.send(method, path, body, **ann)
        answer = connection.getresponse()
        found = answer.status, json.loads(answer.read()), dict(answer.headers)
        connection.close()
        return found

    def used() -> dict[str, str]:
        (key,) = ask("GET", "/quota")[1]["keys"]
        return {each["quantity"]: each["used"] for each in key["quotas"]}

    try:
        ann = make_key(file, teams=["team"], quotas=["runs=1/day", "tokens=100k/day"])
        models.pause()
        try:
            assert ask("POST", "/runs", body)[0] == 202
            models.wait_arrived(asked_before + 1, timeout_s=120)
            assert ask("GET", "/ensembles")[2]["x-quota-remaining-runs"] == "0"
            for pid in endpoint.program.members(named="ray::RunDriver"):
                os.kill(pid, signal.SIGSTOP)
        finally:
            models.resume()
        store = SqliteStore(endpoint.records)

        def is_recorded() -> bool:
            found = run_blocking(store.summary("charged"))
            return found is not None and found.state.value == "completed"

        endpoint.program.until(is_recorded, "the end of the run", timeout_s=180)
        endpoint.kill("ray::RunDriver")
        status, ended, _ = ask("POST", "/runs?wait=300", body)
        assert (status, ended["status"]) == (200, "completed"), endpoint.program.text[-3000:]
        charged = used()
        assert charged == {"runs": "1", "tokens": str(ended["result"]["metrics"]["total_tokens"]), "cost": "0"}
        assert int(charged["tokens"]) > 0
        endpoint.kill("ray::RunDriver")
        assert used() == charged
        refused, failure, _ = ask("POST", "/runs", {**body, "run_id": "more"})
        assert (refused, failure["code"]) == (429, "QUOTA_EXCEEDED")
        assert ask("POST", "/runs?wait=300", body)[0] == 200
        assert len(models.requests) == asked_before + 2
    finally:
        file.path.unlink(missing_ok=True)


def test_a_run_that_waits_goes_on_when_it_is_decided(endpoint: Endpoint) -> None:
    """S-SRV-26, S-SRV-27, S-SRV-41: also when what drives it died meanwhile."""
    body = {"ensemble": "asking", "inputs": {"topic": "x"}, "run_id": "asked"}
    status, answer = endpoint.run(body)
    assert (status, answer["status"]) == (202, "waiting"), endpoint.program.text
    endpoint.kill("ray::RunDriver")
    status, found = endpoint.ask("GET", "/runs/asked")
    assert (status, found["status"]) == (200, "waiting")
    (gate,) = found["reviews"]
    decide("asked", gate["gate_id"], ReviewDecision.edit("mine"), runtime=InlineRuntime(home=endpoint.records))
    events = list(endpoint.follow("asked"))
    assert events[-1][2]["exit_reason"] == "completed", str(endpoint.ask("GET", "/runs/asked")[1]["error"])[:900]
    assert [kind for _, kind, _ in events].count("review_decided") == 1
    tasks = endpoint.ask("GET", "/runs/asked")[1]["result"]["tasks"]
    assert [each["text"] for each in tasks] == ["mine", "a line"]


def deliveries(endpoint: Endpoint, run_id: str) -> list[dict[str, Any]]:
    """The webhooks of a run."""
    found: list[dict[str, Any]] = endpoint.ask("GET", f"/runs/{run_id}/deliveries")[1].get("deliveries", [])
    return found


def test_a_webhook_is_delivered_when_what_drives_runs_dies_before(endpoint: Endpoint, models: ModelServer) -> None:
    """S-HOK-8: during the run, between its end and the delivery, and between two attempts; each time under one id."""
    asked_before = len(models.requests)
    with Receiver() as receiver:

        def start(run_id: str) -> None:
            webhook = {"url": f"{receiver.origin}/{run_id}"}
            body = {"ensemble": "team", "inputs": {"topic": "x"}, "run_id": run_id, "webhook": webhook}
            assert endpoint.ask("POST", "/runs", body)[0] == 202, endpoint.program.text

        models.pause()
        try:
            start("hook-1")
            models.wait_arrived(asked_before + 1, timeout_s=120)
            endpoint.kill("ray::RunDriver")
        finally:
            models.resume()
        (during,) = receiver.wait(1)
        receiver.is_open.clear()
        start("hook-2")
        receiver.wait(2)
        assert endpoint.ask("GET", "/runs/hook-2")[1]["status"] == "completed"
        endpoint.kill("ray::RunDriver")
        receiver.is_open.set()
        _, behind, repeated = receiver.wait(3)
        receiver.statuses.append(503)
        start("hook-3")
        receiver.wait(4)
        endpoint.program.until(lambda: deliveries(endpoint, "hook-3")[0]["attempt_count"], "the failure of an attempt")
        endpoint.kill("ray::RunDriver")
        *_, failed, last = receiver.wait(5)
        for run_id in ("hook-1", "hook-2", "hook-3"):
            endpoint.program.until(
                lambda run_id=run_id: deliveries(endpoint, run_id)[0]["state"] == "delivered", "the delivery"
            )
    assert [each.path for each in receiver.received] == ["/hook-1", "/hook-2", "/hook-2", "/hook-3", "/hook-3"]
    assert during.content["data"] == endpoint.ask("GET", "/runs/hook-1")[1]
    assert (behind.delivery_id, behind.body) == (repeated.delivery_id, repeated.body)
    assert (failed.delivery_id, failed.body) == (last.delivery_id, last.body)
    assert [each["status"] for each in deliveries(endpoint, "hook-3")[0]["attempts"]] == [503, 204]


def test_a_review_is_reported_once_when_what_drives_runs_dies(endpoint: Endpoint) -> None:
    """S-HOK-2: the next process knows which gates were reported."""
    with Receiver() as receiver:
        body = {"ensemble": "asking", "inputs": {"topic": "x"}, "run_id": "hooked", "webhook": {"url": receiver.origin}}
        assert endpoint.run(body)[1]["status"] == "waiting", endpoint.program.text
        (asked,) = receiver.wait(1)
        endpoint.program.until(lambda: deliveries(endpoint, "hooked")[0]["state"] == "delivered", "the delivery")
        endpoint.kill("ray::RunDriver")
        gate = asked.content["data"]["gate_id"]
        assert endpoint.ask("POST", f"/reviews/hooked/{gate}", {"decision": "approve"})[0] == 200
        receiver.wait(2)
    assert receiver.types == ["review.requested", "run.ended"]


async def test_a_served_team_is_a_tool_of_mcp(endpoint: Endpoint) -> None:
    """S-INT-25, S-INT-26, S-INT-27, S-INT-28: through Serve's proxy, with progress and a form for the review that is open."""
    mcp = pytest.importorskip("mcp")
    told: list[float] = []

    async def approve(_context: object, _params: object) -> Any:
        return mcp.types.ElicitResult(action="accept", content={"decision": "approve"})

    async def progress(done: float, _total: float | None, _message: str | None) -> None:
        told.append(done)

    url = f"http://127.0.0.1:{endpoint.port}/mcp"
    async with asyncio.timeout(180), mcp.Client(url, elicitation_callback=approve) as client:
        answer = await client.call_tool("team", {"topic": "Ray"}, progress_callback=progress)
        assert ([block.text for block in answer.content], told) == (["a line"], [1, 2])
        answer = await client.call_tool("asking", {"topic": "Ray"})
        assert [block.text for block in answer.content] == ["a line"]


def test_a_served_team_is_a_model_of_the_openai_api(endpoint: Endpoint, models: ModelServer) -> None:
    """S-SRV-100, S-SRV-110, S-SRV-120: through Serve's proxy; its tokens come as they are said, and a failure is an error."""
    hi: Any = [{"role": "user", "content": "Ray"}]
    asked_before = len(models.requests)
    with OpenAI(base_url=f"http://127.0.0.1:{endpoint.port}/v1", api_key="any") as client:
        assert [each.id for each in client.models.list()] == ["asking", "many", "said", "team"]
        found = client.chat.completions.create(model="team", messages=hi)
        chunks = list(client.chat.completions.create(model="said", messages=hi, stream=True))
        response = client.responses.create(model="said", input="Ray")
        *_, last = client.responses.create(model="said", input="Ray", stream=True)
        assert len(models.requests) == asked_before + 8
        with pytest.raises(APIStatusError, match="too much") as failed:
            client.chat.completions.create(model="team", messages=[{"role": "user", "content": "failure"}])
    assert (found.choices[0].message.content, response.output_text) == ("a line", "a line")
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == "a line"
    assert endpoint.ask("GET", f"/runs/{found.id}")[1]["result"]["raw"] == "a line"
    assert last.type == "response.completed"
    assert failed.value.status_code == 502
    assert endpoint.ask("GET", f"/runs/{failed.value.response.headers['x-run-id']}")[1]["status"] == "failed"
    assert len(models.requests) == asked_before + 9


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_run_ends_with_the_connection_of_its_client(
    endpoint: Endpoint,
    models: ModelServer,
    is_streamed: bool,  # noqa: FBT001  a case
) -> None:
    """S-SRV-130: Serve tells the replica that the client went away."""
    asked_before = len(models.requests)
    tag = f"gone-{is_streamed}"
    messages = [{"role": "user", "content": "x"}]
    body = {"model": "team", "messages": messages, "metadata": {"of": tag}, "stream": is_streamed}
    models.pause()
    try:
        connection = endpoint.send("POST", "/v1/chat/completions", body)
        models.wait_arrived(asked_before + 1, timeout_s=120)
        (run,) = endpoint.ask("GET", f"/runs?tag=of:{tag}")[1]["runs"]
        connection.close()
        events = list(endpoint.follow(run["run_id"]))
    finally:
        models.resume()
    assert events[-1][2]["exit_reason"] == "cancelled"


def test_a_failure_is_answered_as_json(endpoint: Endpoint) -> None:
    """Missing inputs are the client's, a model's refusal is not."""
    status, answer = endpoint.run({"ensemble": "team"})
    assert (status, answer["error"], answer["missing"]) == (422, "PromptTemplateError", ["topic"])
    status, answer = endpoint.run({"ensemble": "team", "inputs": {"topic": "failure"}, "run_id": "failed"})
    assert (status, answer["error"], answer["run_id"]) == (502, "TaskExecutionError", "failed")
    assert "too much" in str(answer["causes"])
    assert KEY not in endpoint.program.text
