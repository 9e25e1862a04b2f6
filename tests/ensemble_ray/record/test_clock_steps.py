"""The computer's clock is set back in the middle of a run: nothing takes less than no time (S-DUR-88)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import pydantic
import pytest

from ensemble_ray import Agent, CaptureMode, Ensemble, EnsembleOutput, InlineRuntime, Task, ToolCall, tool
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.process import concurrency as clock
from ensemble_ray.process.concurrency import SystemClock
from ensemble_ray.record.trace import fold_trace
from ensemble_ray.testing import ScriptedModel
from tests.ensemble_ray.execute.running import Bench, Search, writer

HOUR_S = 3600.0


class Wall:
    """The computer's clock, which somebody sets."""

    def __init__(self) -> None:
        self.off_s = 0.0
        self._time = time.time

    def time(self) -> float:
        """Unix time, s."""
        return self._time() + self.off_s

    def set_back(self) -> None:
        """By an hour."""
        self.off_s -= HOUR_S


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    """That of this process; what a test sets forward is forgotten after it."""
    wall = Wall()
    monkeypatch.setattr(clock._steady, "_offset_s", float("-inf"))
    monkeypatch.setattr(time, "time", wall.time)
    return wall


def durations(value: object, path: str = "") -> Iterator[tuple[str, timedelta]]:
    """All durations in a value, with their paths."""
    if isinstance(value, timedelta):
        yield path, value
    elif isinstance(value, pydantic.BaseModel):
        for name in type(value).model_fields:
            yield from durations(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from durations(each, f"{path}[{number}]")


def test_time_goes_on_where_the_clock_is_set_back(wall: Wall) -> None:
    """S-DUR-88: and follows it forwards."""
    clock = SystemClock()
    shown = clock.now()
    assert abs(shown - wall.time()) < HOUR_S / 2
    wall.set_back()
    assert shown <= clock.now() < shown + HOUR_S / 2
    wall.off_s += 3 * HOUR_S
    assert clock.now() > shown + HOUR_S


def test_run_has_no_negative_duration(wall: Wall) -> None:
    """S-DUR-88: neither its output nor what its record tells."""

    @tool(effect="none")
    def look(place: str) -> str:
        """Look somewhere."""
        wall.set_back()
        return place

    def answer(_: object) -> str:
        wall.set_back()
        return "done"

    model = ScriptedModel(ToolCall("1", "look", '{"place": "here"}'), answer, answer, answer)
    agent = Agent(role="Looker", goal="Look", tools=[look], llm=model)
    tasks = [Task(name=name, description=name, expected_output="x", agent=agent) for name in ("a", "b")]
    handled = Task(name="c", description="c", expected_output="x", handler=answer, effect="none")
    facts: list[Fact] = []
    team = Ensemble(tasks=[*tasks, handled], capture_mode=CaptureMode.FULL, trace_exporter=lambda _: None)
    output = team.run(runtime=InlineRuntime())
    assert isinstance(output, EnsembleOutput)
    found = list(durations(output))
    assert len(found) > 10
    assert [path for path, each in found if each < timedelta()] == []
    facts = _facts(output.run_id)
    assert all(
        float(str(fact.data.to_data()[name])) >= 0
        for fact in facts
        for name in ("latency_s", "duration_s")
        if name in fact.data.to_data()
    )
    assert [path for path, each in durations(fold_trace(facts)) if each < timedelta()] == []


async def test_task_that_goes_on_under_an_earlier_clock_has_no_negative_duration() -> None:
    """S-DUR-88: what is recorded lies in the future of the process that goes on."""
    bench = Bench(agents={"draft": writer(ScriptedModel("Done"), tools=[Search()])})
    await bench.run()
    later = [fact for fact in bench.journal.facts() if fact.kind == "model"]
    late = [
        read_fact(
            run="run",
            kind=f.kind,
            name=f.name,
            at=f.at + HOUR_S,
            data={**f.data.to_data(), "started_at": f.at + HOUR_S, "latency_s": -5.0},
        )
        for f in later
    ]
    again = Bench(agents={"draft": writer(ScriptedModel(), tools=[])}, known=late)
    result = await again.run(epoch=1)
    assert result.error is None
    assert result.duration_s >= 0
    assert [path for path, each in durations(result.output) if each < timedelta()] == []


def _facts(run_id: str) -> list[Fact]:
    import asyncio

    from ensemble_ray.process.config import home_directory
    from ensemble_ray.record.sqlite.store import SqliteStore

    return asyncio.run(SqliteStore(home_directory()).facts(run_id))


def test_a_pause_between_two_readings_sets_no_clock_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-DUR-88: a process that is preempted there stays in step with the others."""
    elapsed_s, pauses_s = 0.0, [30.0, 0.0, 0.0, 0.0]

    def read(start_s: float) -> float:
        nonlocal elapsed_s
        shown_s = start_s + elapsed_s
        elapsed_s += pauses_s.pop(0)
        return shown_s

    monkeypatch.setattr(time, "time", lambda: read(1_000.0))
    monkeypatch.setattr(time, "monotonic", lambda: read(0.0))
    steady = clock._SteadyClock()
    steady.now()
    assert steady.now() == 1_030.0
