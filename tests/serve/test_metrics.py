"""What an endpoint counts, and what its metrics say to whom."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ensemble_ray import ChatResponse, TaskMetrics, TokenUsage
from ensemble_ray.access.admission import Right
from ensemble_ray.serve.driving.requests import EndpointLimits
from ensemble_ray.serve.driving.run_driver import Outcome
from ensemble_ray.serve.run_service import METRICS, Metric, RunTally, Sample, render_samples
from ensemble_ray.serve.schemas import Cost, FinishedRun, Metrics, RunStatus
from ensemble_ray.testing import ScriptedModel
from tests.serve.conftest import Connect
from tests.serve.gates import Gate
from tests.serve.keys import guarded, make_key
from tests.serve.teams import INPUTS, pair
from tests.serve.test_waiting import asked

REQUEST = {"inputs": INPUTS, "tags": {"of": "tag-of-a-client"}, "run_id": "id-of-a-client"}


def _broken(call: object) -> str:
    raise OSError("no model")


async def test_runs_tokens_and_states_are_counted_by_team(home: str) -> None:
    """S-SRV-170: of a run that failed, what its tasks that completed cost; nothing of a request is a label."""
    fine = ChatResponse("fine", usage=TokenUsage(input_tokens=3, output_tokens=2))
    teams = {"letters": pair(ScriptedModel(fine, fine)), "broken": pair(ScriptedModel(fine, otherwise=_broken))}
    async with guarded(Path(home), teams) as endpoint:
        assert (await endpoint.client.get("/metrics")).text == ""
        await endpoint.client.post("/runs?wait=60", json={"ensemble": "letters", **REQUEST})
        await endpoint.client.post("/runs?wait=60", json={"ensemble": "broken", "inputs": INPUTS})
        answer = await endpoint.client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        lines = answer.text.splitlines()
        assert 'ensemble_ray_runs_ended_total{ensemble="letters",status="completed"} 1' in lines
        assert 'ensemble_ray_runs_ended_total{ensemble="broken",status="failed"} 1' in lines
        assert 'ensemble_ray_runs{ensemble="letters",status="running"} 0' in lines
        tokens = {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("ensemble_ray_tokens")}
        assert tokens == {
            'ensemble_ray_tokens_total{ensemble="letters",kind="input"}': 6,
            'ensemble_ray_tokens_total{ensemble="letters",kind="output"}': 4,
            'ensemble_ray_tokens_total{ensemble="broken",kind="input"}': 3,
            'ensemble_ray_tokens_total{ensemble="broken",kind="output"}': 2,
        }
        assert "# TYPE ensemble_ray_runs gauge" in lines
        assert "-client" not in answer.text
        headers = make_key(endpoint.file, teams=["broken"], rights=[Right.READ])
        assert "letters" not in (await endpoint.client.get("/metrics", headers=headers)).text


async def test_runs_that_wait_are_seen_while_they_wait(connect: Connect) -> None:
    """S-SRV-170: as `accepted`."""
    gate = Gate("a draft")
    limits = EndpointLimits(max_running=1)
    async with connect(pair(ScriptedModel(gate, otherwise="fine")), limits=limits) as client:
        await client.post("/runs", json={"inputs": INPUTS, "run_id": "1"})
        await gate.is_asked.wait()
        await client.post("/runs", json={"inputs": INPUTS, "run_id": "2"})
        await client.get("/runs/2")
        shown = (await client.get("/metrics")).text.splitlines()
        gate.open()
        await client.post("/runs?wait=60", json={"inputs": INPUTS, "run_id": "2"})
        after = (await client.get("/metrics")).text.splitlines()
    for status, before_and_after in {"accepted": (1, 0), "running": (1, 0)}.items():
        line = f'ensemble_ray_runs{{ensemble="team",status="{status}"}}'
        assert (f"{line} {before_and_after[0]}" in shown, f"{line} {before_and_after[1]}" in after) == (True, True)


class Exported:
    """Hears of changes."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, dict[str, str], float]] = []

    def add(self, metric: Metric, labels: Mapping[str, str], amount: float) -> None:
        self.heard.append(("add", metric.name, dict(labels), amount))

    def put(self, metric: Metric, labels: Mapping[str, str], amount: float) -> None:
        self.heard.append(("put", metric.name, dict(labels), amount))


def test_every_change_is_exported_once() -> None:
    """S-SRV-171, S-VER-8: counters as what they grew by, and only what is counted; money with its currency."""
    exported = Exported()
    tally = RunTally(exported)
    task = Metrics.of_task(TaskMetrics.EMPTY).model_copy(
        update={"input_tokens": 7, "cost": Cost(input="1", output="0.5", total="1.5", currency="EUR")}
    )
    result = FinishedRun(run_id="1", raw="", exit_reason="completed", duration_s=1, metrics=task, tasks=[])
    tally.end("letters", Outcome(status=RunStatus.COMPLETED, result=result))
    for code in ("UNAUTHENTICATED", "QUEUE_FULL", "RATE_LIMITED", "DRAINING", "RUN_NOT_FOUND"):
        tally.refuse(code)
    assert exported.heard == [
        ("add", "ensemble_ray_runs_ended_total", {"ensemble": "letters", "status": "completed"}, 1),
        ("add", "ensemble_ray_tokens_total", {"ensemble": "letters", "kind": "input"}, 7),
        ("add", "ensemble_ray_cost_total", {"ensemble": "letters", "currency": "EUR"}, 1.5),
        ("add", "ensemble_ray_requests_refused_total", {"code": "UNAUTHENTICATED"}, 1),
        ("add", "ensemble_ray_requests_refused_total", {"code": "QUEUE_FULL"}, 1),
        ("add", "ensemble_ray_requests_refused_total", {"code": "RATE_LIMITED"}, 1),
        ("add", "ensemble_ray_requests_refused_total", {"code": "DRAINING"}, 1),
    ]
    assert 'ensemble_ray_cost_total{ensemble="letters",currency="EUR"} 1.5' in render_samples(tally.samples())


def test_names_of_teams_are_written_as_the_format_has_it() -> None:
    """S-SRV-170: a file may be called anything."""
    sample = Sample(metric=METRICS[0], values=('a"b\\c\n', "running"), amount=2)
    assert render_samples([sample]).splitlines()[2] == 'ensemble_ray_runs{ensemble="a\\"b\\\\c\\n",status="running"} 2'


def test_every_metric_is_documented() -> None:
    """S-SRV-170: with its labels."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    for metric in METRICS:
        assert f"| `{metric.name}` | {', '.join(f'`{each}`' for each in metric.labels)} |" in page


async def test_runs_that_wait_for_people_have_a_state_of_their_own(connect: Connect) -> None:
    """S-SRV-170: they hold no place, and are not counted as ended."""
    async with connect(asked()) as client:
        await client.post("/runs?wait=60", json={"run_id": "first"})
        lines = (await client.get("/metrics")).text.splitlines()
        assert 'ensemble_ray_runs{ensemble="team",status="waiting"} 1' in lines
        assert 'ensemble_ray_runs{ensemble="team",status="running"} 0' in lines
        await client.post("/runs/first/cancel")
        await client.get("/runs/first/events")
        lines = (await client.get("/metrics")).text.splitlines()
    assert 'ensemble_ray_runs{ensemble="team",status="waiting"} 0' in lines
    assert 'ensemble_ray_runs_ended_total{ensemble="team",status="cancelled"} 1' in lines


def test_shares_of_versions_are_a_gauge() -> None:
    """S-VER-38: a version that is gone has none."""
    exported = Exported()
    tally = RunTally(exported)
    tally.set_shares("letters", {"old": 1.0})
    tally.set_shares("letters", {"new": 0.25, "old": 0.75})
    tally.set_shares("letters", {"new": 1.0})
    tally.end("letters", Outcome(status=RunStatus.CANCELLED), "new")
    shares = [(labels["version"], value) for _, name, labels, value in exported.heard if name.endswith("_share")]
    assert shares[0] == ("old", 1.0)
    assert sorted(shares[1:3]) == [("new", 0.25), ("old", 0.75)]
    assert sorted(shares[3:]) == [("new", 1.0), ("old", 0.0)]
    ended = {"ensemble": "letters", "version": "new", "status": "cancelled"}
    assert exported.heard[-1] == ("add", "ensemble_ray_version_runs_ended_total", ended, 1)
