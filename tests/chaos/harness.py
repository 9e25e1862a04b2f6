"""Runs a scenario, kills what it lives in at seeded moments, goes on until it has ended, and judges it.

In: a scenario, who is killed, a seed, how often. Out: a `Report`; a broken promise is a line in it, never an exception.
The moments hang on requests that reach the protocol server, not on the clock, so that a seed means the same on a busy
machine. The server lives in this process and survives all kills.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cache
from pathlib import Path
from unittest.mock import patch

from ensemble_ray.cli.app import invoke
from ensemble_ray.messages import Fact
from ensemble_ray.outputs import RunState
from ensemble_ray.record.stores import RunStore, StoreAddress, store_at
from ensemble_ray.testing import Fault, ModelServer, Reply, ServedRequest
from tests.chaos.audit import Audit, answers_in, audit
from tests.chaos.audit_map_reduce import judge_files
from tests.chaos.cluster import ROOT, Cluster, environment_in
from tests.chaos.comparison import OUTPUT, Undisturbed, output_in
from tests.chaos.gate import Gate, all_read
from tests.chaos.kills import Kill
from tests.chaos.moments import ASKED, ENDING, OWNED, Moment, moments
from tests.chaos.report import Report
from tests.chaos.scenarios import Scenario
from tests.chaos.teams import QUESTIONS
from tests.chaos.victims import (
    Ground,
    Victim,
    actors_of,
    end_session,
    is_there,
    kill_all,
    one_of,
    wait_gone,
    workers_of,
)
from tests.chaos.world import World
from tests.processes import Program, own_directory, program

__all__ = ["run_with_kills", "undisturbed"]

#: Longest wait for a process that must come or go, s.
PATIENCE_S = 240.0
#: How long a first process of a kind is waited for, s; a scenario need not have each kind.
_BIRTH_S = 10.0
#: How often a run is resumed without having been killed before it counts as lost.
_TRIES = 3
#: So many answers before the last one a run is about to end: some have a shape of their own, and fewer answers.
_ABOUT = 3
_FINAL = {RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED}
#: What a run hears in the environment of its process.
_HEARD = ("CHAOS_", "ENSEMBLE_RAY_", "OPENAI_")
_COMMAND = (sys.executable, "-m", "ensemble_ray.cli")


@cache
def undisturbed(name: str) -> Undisturbed:
    """What a scenario gives when nobody is killed; it does not depend on where it runs."""
    from tests.chaos.scenarios import SCENARIOS

    scenario = SCENARIOS[name]
    with _Disturbed.of(scenario, cluster=None, ground="inline") as run:
        output = run.run_here()
        assert run.server.stats()["requests"] == scenario.calls or scenario.has_own_shape, run.server.stats()
        assert len(run.world.asked()) == scenario.questions, run.world.asked()
        found = run.judged()
        assert not found.violations, found.violations
        assert not scenario.check(output, run.world)
        return Undisturbed.of(output, run.facts(), run.world.letters(), has_own_shape=scenario.has_own_shape)


def run_with_kills(
    scenario: Scenario, victims: Sequence[Victim], seed: int, kills: int, *, cluster: Cluster | None = None
) -> Report:
    """Run it, kill, go on, judge.

    Args:
        scenario: What is run.
        victims: Who is killed, by lot; all of the same ground.
        seed: Decides when whom.
        kills: How often at most; a run that ends before is not killed any more.
        cluster: The one that is there, for victims that live in one; a run that loses its own goes on there.
    """
    if cluster is not None and any(victim.ground == "two_nodes" for victim in victims):
        cluster.have_second_node()
    expected = undisturbed(scenario.name) if scenario.is_compared else None
    if scenario.is_fed:
        victims = [victim.in_fed_run() for victim in victims]
    rng = random.Random(f"{scenario.name}/{seed}")  # noqa: S311  repeatable, keeps no secret
    begun = time.monotonic()
    with _Disturbed.of(scenario, cluster=cluster, ground=victims[0].ground) as run:
        report = run.report
        report.seed, report.victims = seed, "+".join(victim.name for victim in victims)
        try:
            run.start_first()
            for moment in moments(scenario, victims, kills, rng):
                if not run.strike(moment, rng):
                    break
            output = run.finish()
            if output is not None and expected is not None:
                report.violations += expected.differences(output, run.facts(), run.world.letters())
            if output is not None:
                report.violations += scenario.check(output, run.world)
        except (AssertionError, TimeoutError) as error:
            report.violations.append(f"the harness gave up: {error}")
        found = run.judged()
        report.violations += found.violations
        report.repeats_of_recorded, report.repeats_in_flight = found.repeats_of_recorded, found.repeats_in_flight
        report.unknown_outcomes, report.rules_broken = found.unknown_outcomes, found.rules_broken
        report.policies_asked_again = found.policies_asked_again
        report.requests, report.kills = run.server.stats()["requests"], len(run.kills)
        report.record_bytes, report.most_alike = run.record_bytes(), max(run.server.counts.values(), default=0)
        if report.violations:
            report.violations += run.last_words()
    report.seconds = time.monotonic() - begun
    return report


class _Disturbed:
    """One run and all programs that work on it."""

    def __init__(
        self, scenario: Scenario, directory: Path, server: ModelServer, environment: Mapping[str, str], gate: Gate
    ) -> None:
        self.scenario = scenario
        self.directory = directory
        self.server = server
        self.environment = environment
        self.gate = gate
        self.world = World(lines=directory / "lines")
        self.run_id = f"chaos-{directory.name}"
        self.report = Report(scenario=scenario.name, victims="", seed=0)
        self.kills: list[Kill] = []
        self.cluster: Cluster | None = None
        #: whether its first program starts a cluster, also where there is one
        self.has_own_cluster = False
        self.driver: Program | None = None
        self._programs = contextlib.ExitStack()

    @classmethod
    @contextlib.contextmanager
    def of(cls, scenario: Scenario, *, cluster: Cluster | None, ground: Ground) -> Generator[_Disturbed, None, None]:
        """A run with a directory and a server of its own."""
        with own_directory() as directory, contextlib.ExitStack() as opened:
            world, gate = World(lines=directory / "lines"), Gate()

            def answer(request: ServedRequest) -> Reply | Fault:
                gate.note(request)
                return scenario.answer(request, world)

            server = opened.enter_context(ModelServer(answer))
            environment = environment_in(
                directory,
                OPENAI_BASE_URL=server.base_url,
                ENSEMBLE_RAY_RUNTIME="inline" if ground == "inline" else "ray",
                **{QUESTIONS: str(world.questions), **scenario.environment},
            )
            run = cls(scenario, directory, server, environment, gate)
            run.cluster, run.has_own_cluster = cluster, ground == "own_cluster"
            opened.enter_context(run._programs)
            yield run

    # Programs.

    def start_first(self) -> None:
        """Begin the run."""
        self._start(*self._first())

    def _first(self) -> list[str]:
        inputs = [part for name, value in self.scenario.inputs.items() for part in ("--input", f"{name}={value}")]
        return ["run", self.scenario.target, *inputs, "--run-id", self.run_id]

    def run_here(self) -> Mapping[str, object]:
        """Run it in this process, where nobody is killed; gives its output."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_HEARD)}
        ours = {name: value for name, value in self.environment.items() if name.startswith(_HEARD)}
        printed = io.StringIO()
        with patch.dict(os.environ, kept | ours, clear=True), contextlib.redirect_stdout(printed):
            code = invoke([*self._first(), "--json", "--quiet"])
        assert code == self.scenario.exit_code, f"{self.scenario.name} does not even run when nobody is killed"
        assert self.state() is RunState.COMPLETED
        return output_in(printed.getvalue())

    def _go_on(self) -> None:
        """Resume the run; one that recorded no plan has not begun, and is begun."""
        if any(fact.kind == "plan" for fact in self.facts()):
            self._start("resume", self.run_id)
        else:
            self.start_first()

    def _start(self, *arguments: str) -> None:
        self.report.runs += 1
        log = self.directory / f"log-{self.report.runs}"
        command = [*_COMMAND, *arguments, "--json", "--quiet"]
        joins = self.cluster is not None and not (self.has_own_cluster and self.report.runs == 1)
        environment = {**self.environment, **(self.cluster.environment if self.cluster and joins else {})}
        self.driver = self._programs.enter_context(program(command, log=log, env=environment, cwd=ROOT))
        self.report.story.append(" ".join(arguments))

    def _has_ended(self) -> bool:
        return self.driver is not None and self.driver.process.poll() is not None

    # The record.

    def _store(self) -> RunStore:
        return store_at(StoreAddress(home=self.environment["ENSEMBLE_RAY_HOME"]))

    def facts(self) -> list[Fact]:
        """All that is recorded."""
        return asyncio.run(self._store().facts(self.run_id))

    def record_bytes(self) -> int:
        """What the record takes on the disk."""
        return sum(each.stat().st_size for each in Path(self.environment["ENSEMBLE_RAY_HOME"]).rglob("*"))

    def state(self) -> RunState | None:
        """How the run stands; None while it has not begun."""
        summary = asyncio.run(self._store().summary(self.run_id))
        return None if summary is None else summary.state

    # Killing.

    def strike(self, moment: Moment, rng: random.Random) -> bool:
        """Wait for the moment, kill, and see to it that the run goes on; False when the run ended before."""
        if not self._until_reached(self._wait_for(moment)):
            return False
        with contextlib.nullcontext() if moment.most is None else self.gate.closed(self.server, moment.most):
            time.sleep(moment.delay_s)
            if self._is_over():
                return False
            at = self._kill(moment.victim, rng)
            read_at = all_read(self.server)
        if at is None:
            return not self._is_over()
        victim, settled = moment.victim, dict[str, int]()
        if victim.interrupts_run:
            counts, facts = self.server.requests_by_key(), self.facts()
            settled = {key: counts[key] for key in answers_in(self.run_id, facts)}
            self.report.violations += judge_files(facts, self.world.rows(), self.world.letters())
        self.kills.append(
            Kill(
                victim=victim.name,
                at=at,
                repeats_calls=victim.repeats_calls,
                when=str(moment),
                settled=settled,
                until=max(read_at, at + victim.lives_on_s),
            )
        )
        self.report.story.append(f"kill {moment}")
        if victim.interrupts_run:
            self._go_on()
        elif victim.takes_driver:
            self.driver = None
        return True

    def _wait_for(self, moment: Moment) -> Callable[[], object]:
        """What waits for it, a moment long, and raises `TimeoutError` when it has not come."""
        if moment.kind == OWNED:
            return self._wait_owned
        if moment.kind == ASKED:
            most = len(self.world.asked()) + moment.more
            return lambda: self._wait_asked(most)
        if moment.kind == ENDING:
            count = self.scenario.calls - _ABOUT
            return lambda: self.server.wait_served(count, timeout_s=0.1)
        stats = self.server.stats()
        count = stats["requests" if moment.kind == "arrived" else "served"] + moment.more
        wait = self.server.wait_arrived if moment.kind == "arrived" else self.server.wait_served
        return lambda: wait(count, timeout_s=0.1)

    def _wait_owned(self) -> None:
        if self.state() is not RunState.RUNNING:
            time.sleep(0.01)
            raise TimeoutError

    def _wait_asked(self, count: int) -> None:
        if len(self.world.asked()) < count:
            time.sleep(0.005)
            raise TimeoutError

    def _is_over(self) -> bool:
        if self.driver is not None:
            return self._has_ended()
        return self.state() in _FINAL

    def _until_reached(self, wait: Callable[[], object]) -> bool:
        """Whether it came to that while the run went on."""
        deadline = time.monotonic() + self.scenario.patience_s
        while time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                wait()
                return True
            if self._is_over():
                return False
        raise TimeoutError(f"no further request within {self.scenario.patience_s} s; state: {self.state()}")

    def _kill(self, victim: Victim, rng: random.Random) -> float | None:
        """Kill it; when that was, or None where there is nothing of that kind."""
        if victim.interrupts_run or victim.takes_driver:
            assert self.driver is not None or not victim.interrupts_run
            return None if self.driver is None else self._kill_driver(victim, self.driver)
        assert self.cluster is not None, f"{victim.name} lives in a cluster"
        if victim.ground == "two_nodes":
            pid: int | None = self.cluster.second_raylet
        else:
            session = self.cluster.program.process.pid
            # Between its death and its successor's birth an actor has no process.
            was_killed = any(kill.victim == victim.name for kill in self.kills)
            deadline = time.monotonic() + (PATIENCE_S if was_killed else _BIRTH_S)
            while (pid := one_of(actors_of(session, victim.actor), rng)) is None and time.monotonic() < deadline:
                if self._is_over():
                    return None
                time.sleep(0.01)
        if pid is None:
            return None
        at = kill_all([pid])
        wait_gone(lambda: [str(pid)] if is_there(pid) else [], victim.name)
        return at

    def _kill_driver(self, victim: Victim, driver: Program) -> float:
        session = driver.process.pid
        at = kill_all([session]) if victim.name in {"driver", "own-driver"} else end_session(session)
        driver.process.wait(timeout=PATIENCE_S)
        # Ray's processes end themselves when their driver is gone; it takes them a moment. Two helpers stay for ever.
        wait_gone(lambda: workers_of(session), f"{victim.name} (session {session})")
        end_session(session)
        return at

    # Ending.

    def finish(self) -> Mapping[str, object] | None:
        """Wait until the run has ended, resuming it where it must be; gives its output, None when it failed."""
        for _ in range(_TRIES):
            if self.driver is None:
                self._until_final()
                self._go_on()  # of a run that completed it gives the recorded output
            driver = self.driver
            assert driver is not None
            try:
                code = driver.process.wait(timeout=self.scenario.patience_s)
            except subprocess.TimeoutExpired:
                self.report.violations.append(
                    f"the run did not end within {self.scenario.patience_s} s; state: {self.state()}"
                )
                return None
            if code == self.scenario.exit_code:
                state = self.state()
                if state is not RunState.COMPLETED:
                    self.report.violations.append(f"the run gave its output, and its state is {state}")
                return output_in(driver.text)
            self.report.violations.append(f"'{self.report.story[-1]}' and then exit code {code}; state: {self.state()}")
            self.driver = None
            if self.state() is RunState.FAILED:
                return None
        return None

    def _until_final(self) -> None:
        deadline = time.monotonic() + self.scenario.patience_s
        # Between a scheduler's death and its successor the run has no owner, and is not lost.
        while (state := self.state()) not in _FINAL:
            assert time.monotonic() < deadline, (
                f"no end within {self.scenario.patience_s} s without the driver; state: {state}"
            )
            time.sleep(0.05)
        self.report.story.append(f"state {state}")

    def judged(self) -> Audit:
        """What the record, the server and the disk say."""
        return audit(
            self.run_id,
            self.facts(),
            self.server.requests,
            self.world.done(),
            self.kills,
            asked=self.world.asked(),
            rows=self.world.rows(),
            letters=self.world.letters(),
        )

    def last_words(self) -> list[str]:
        """What happened, and what the last programs printed, for whoever looks for the reason."""
        words = [f"story: {' | '.join(self.report.story)}"]
        for number in range(max(1, self.report.runs - 1), self.report.runs + 1):
            text = (self.directory / f"log-{number}").read_text(encoding="utf-8", errors="replace")
            words.append(f"log {number}: {text.partition(OUTPUT)[0][-3000:]}")
        return words
