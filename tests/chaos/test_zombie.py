"""A process that was thought dead comes back; two processes want the same run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from ensemble_ray import RunState
from ensemble_ray.facts.fact import Fact
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.sqlite.journal import COMMIT_LOCK
from ensemble_ray.record.stores import RunStore, StoreAddress
from ensemble_ray.testing import Fault, ModelServer, Reply, ServedRequest
from tests.chaos.audit import audit
from tests.chaos.cluster import ROOT, inline_environment_in
from tests.chaos.freezing import holds
from tests.chaos.gate import Gate
from tests.chaos.kills import Kill
from tests.chaos.scenarios import SCENARIOS, Scenario
from tests.chaos.teams import QUESTIONS
from tests.chaos.victims import stop_all, wake_all
from tests.chaos.world import World
from tests.command_line import COMMAND
from tests.processes import Program, own_directory, program

RUN_ID = "frozen"
#: Generous: processes start on two cores while other things run.
PATIENCE_S = 240.0


class Place:
    """A directory, a protocol server, and programs that work on one run there."""

    def __init__(self, directory: Path, scenario: Scenario, server: ModelServer, gate: Gate) -> None:
        self.directory = directory
        self.scenario = scenario
        self.server = server
        self.gate = gate
        self.world = World(lines=directory / "lines")
        paths = {QUESTIONS: str(self.world.questions)}
        self.environment = inline_environment_in(directory, OPENAI_BASE_URL=server.base_url, **paths)

    def first(self) -> AbstractContextManager[Program]:
        """Begin the run."""
        return self._program("run", self.scenario.target, "--input", "topic=zombies", "--run-id", RUN_ID)

    def second(self, *options: str, name: str = "second") -> AbstractContextManager[Program]:
        """Resume the run."""
        return self._program("resume", RUN_ID, *options, name=name)

    def _program(self, *arguments: str, name: str = "first") -> AbstractContextManager[Program]:
        command = [*COMMAND, *arguments, "--quiet"]
        return program(command, log=self.directory / name, env=self.environment, cwd=ROOT)

    @property
    def record(self) -> Path:
        """The directory of the run's record."""
        return Path(self.environment["ENSEMBLE_RAY_HOME"]) / "runs" / RUN_ID

    def store(self) -> RunStore:
        """Where the run is recorded."""
        return store_at(StoreAddress(home=self.environment["ENSEMBLE_RAY_HOME"]))

    def facts(self) -> list[Fact]:
        """All that is recorded."""
        return asyncio.run(self.store().facts(RUN_ID))

    def state(self) -> RunState | None:
        """How the run stands."""
        summary = asyncio.run(self.store().summary(RUN_ID))
        return None if summary is None else summary.state

    def held_after(self, answers: int) -> AbstractContextManager[None]:
        """Meanwhile the server gives so many answers, and holds all others."""
        return self.gate.closed(self.server, most=answers + 1)

    def until_held(self, answers: int, next_ones: int = 1) -> None:
        """Wait until those were given, and the next ones are waited for."""
        self.server.wait_served(answers, timeout_s=PATIENCE_S)
        self.server.wait_in_flight(next_ones, timeout_s=PATIENCE_S)

    def judge(self, kill_at: float) -> None:
        """Nothing that is recorded was done again, though one process was as good as dead from then on."""
        kill = Kill(victim="frozen", at=kill_at, repeats_calls=True, when="in a model call")
        asked = self.world.asked()
        found = audit(RUN_ID, self.facts(), self.server.requests, self.world.done(), [kill], asked=asked)
        assert not found.violations, found.violations
        # A manager's workers are at it at the same time.
        assert found.repeats_in_flight <= (3 if self.scenario.has_manager else 1)


@pytest.fixture(params=["chain-with-tools"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A run of a team of one agent."""
    scenario = SCENARIOS[request.param]
    with own_directory() as directory:
        world, gate = World(lines=directory / "lines"), Gate()

        def answer(request: ServedRequest) -> Reply | Fault:
            gate.note(request)
            return scenario.answer(request, world)

        with ModelServer(answer) as server:
            yield Place(directory, scenario, server, gate)


@pytest.mark.parametrize(
    "place",
    ["chain", *(pytest.param(name, marks=pytest.mark.extended) for name in ("chain-with-tools", "newsroom"))],
    indirect=True,
)
def test_a_frozen_process_does_nothing_more_when_it_wakes_after_a_takeover(place: Place) -> None:
    """S-DUR-15, S-DUR-16, S-DUR-17: it asks nothing, does nothing, writes nothing, and says why it ends."""
    with contextlib.ExitStack() as opened:
        # Three workers of a manager are at it, and none has come to a tool.
        answers, next_ones = (1, 3) if place.scenario.has_manager else (3, 1)
        with place.held_after(answers):
            zombie = opened.enter_context(place.first())
            place.until_held(answers, next_ones)
            frozen_at = freeze(place, zombie)
        if place.scenario.name == "chain":  # once is enough: it is refused before it knows what it would resume
            with place.second() as refused:
                assert refused.process.wait(timeout=PATIENCE_S) != 0
                assert str(zombie.process.pid) in refused.text
                assert "--take-over" in refused.text
        with place.second("--take-over", name="third") as heir:
            assert heir.process.wait(timeout=PATIENCE_S) == 0, heir.text
            output = heir.text
        facts, asked, done = place.facts(), len(place.server.requests), (_effects(place), place.world.asked())
        assert place.state() is RunState.COMPLETED
        os.kill(zombie.process.pid, signal.SIGCONT)
        assert zombie.process.wait(timeout=PATIENCE_S) != 0
        assert "epoch 0 must stop" in zombie.text
        assert output not in zombie.text
    assert (place.facts(), len(place.server.requests)) == (facts, asked)
    assert (_effects(place), place.world.asked()) == done
    assert place.state() is RunState.COMPLETED
    place.judge(frozen_at)


def _effects(place: Place) -> list[Mapping[str, str]]:
    """Return what tools did, without those that only read: a process may call one more of these when it wakes."""
    return [each for each in place.world.done() if each["tool"] != "look_up"]


def freeze(place: Place, running: Program) -> float:
    """Stop a program and return when all its threads stand still, outside a commit: in one, an heir would end it (S-DUR-87)."""
    pids = [running.process.pid]
    frozen_at = stop_all(pids)
    while holds(running.process.pid, place.record / COMMIT_LOCK):
        wake_all(pids)
        time.sleep(0.01)  # its commit goes on
        frozen_at = stop_all(pids)
    return frozen_at


def first_to_end(*programs: Program) -> Program:
    """The program that ends first."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for each in programs:
            if each.process.poll() is not None:
                return each
        time.sleep(0.05)
    raise AssertionError("none of them ends")


def test_one_wins_and_the_other_is_told_when_two_resume_at_once(place: Place) -> None:
    """S-DUR-15: the loser names the process that owns the run; nothing is asked twice."""
    with contextlib.ExitStack() as opened:
        with place.held_after(2):  # until one has lost, so that none can end otherwise
            with place.first() as first:
                place.until_held(2)
                first.process.kill()
                first.process.wait(timeout=PATIENCE_S)
                killed_at = time.time()
            a, b = (opened.enter_context(place.second(name=name)) for name in ("a", "b"))
            loser = first_to_end(a, b)
            winner = b if loser is a else a
            assert loser.process.returncode != 0
            assert f"{winner.process.pid}" in loser.text
        assert winner.process.wait(timeout=PATIENCE_S) == 0, winner.text
    assert place.state() is RunState.COMPLETED
    place.judge(killed_at)
