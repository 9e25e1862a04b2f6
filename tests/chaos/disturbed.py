"""One run that is disturbed, and all programs that work on it.

In: a scenario, and where it runs. Out: its programs, its record, its end, and what an audit says of it. The server lives
in this process and survives all faults. Never: a fault; `killing`, `freezing`, `damaging` and `deleting` have those.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

from ensemble_ray import RecordError, RunState
from ensemble_ray.cli.app import invoke
from ensemble_ray.cli.view.terminal import WAITING
from ensemble_ray.facts.fact import Fact
from ensemble_ray.record.open_reviews import open_reviews
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import RunStore, StoreAddress
from ensemble_ray.testing import Fault, ModelServer, Reply, ServedRequest
from tests.chaos.audit import Audit, audit
from tests.chaos.cluster import ROOT, Cluster, environment_in, inline_environment_in
from tests.chaos.comparison import OUTPUT, output_in
from tests.chaos.gate import Gate
from tests.chaos.kills import Kill
from tests.chaos.moments import ASKED, ENDING, OWNED, Moment
from tests.chaos.report import Report
from tests.chaos.scenarios import Scenario
from tests.chaos.team_reviews import decide_some
from tests.chaos.teams import QUESTIONS
from tests.chaos.victims import Ground, wake_all
from tests.chaos.world import World
from tests.command_line import COMMAND
from tests.processes import Program, own_directory, program

__all__ = ["PATIENCE_S", "Disturbed"]

#: Longest wait for a process that must come or go, s.
PATIENCE_S = 240.0
#: How often a run is resumed without having been disturbed before it counts as lost.
_TRIES = 3
#: So many answers before the last one a run is about to end: some have a shape of their own, and fewer answers.
_ABOUT = 3
_FINAL = {RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED}
#: What a run hears in the environment of its process.
_HEARD = ("CHAOS_", "ENSEMBLE_RAY_", "OPENAI_")


class Disturbed:
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
        #: processes that stand still now
        self.frozen: set[int] = set()
        self._asked = 0
        self._programs = contextlib.ExitStack()

    @classmethod
    @contextlib.contextmanager
    def of(cls, scenario: Scenario, *, cluster: Cluster | None, ground: Ground) -> Generator[Disturbed, None, None]:
        """A run with a directory and a server of its own."""
        with own_directory() as directory, contextlib.ExitStack() as opened:
            world, gate = World(lines=directory / "lines"), Gate()

            def answer(request: ServedRequest) -> Reply | Fault:
                gate.note(request)
                return scenario.answer(request, world)

            server = opened.enter_context(ModelServer(answer))
            variables = {"OPENAI_BASE_URL": server.base_url, QUESTIONS: str(world.questions), **scenario.environment}
            environment = (
                inline_environment_in(directory, **variables)
                if ground == "inline"
                else environment_in(directory, ENSEMBLE_RAY_RUNTIME="ray", **variables)
            )
            run = cls(scenario, directory, server, environment, gate)
            run.cluster, run.has_own_cluster = cluster, ground == "own_cluster"
            opened.enter_context(run._programs)
            try:
                yield run
            finally:
                wake_all(run.frozen)  # else those that end them would wait for them in vain

    # Programs.

    def start_first(self) -> None:
        """Begin the run."""
        self.start(*self._first())

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
            while code == WAITING and self.scenario.is_reviewed:
                self.decide()
                printed.seek(0)
                printed.truncate()
                code = invoke(["resume", self.run_id, "--json", "--quiet"])
        assert code == self.scenario.exit_code, f"{self.scenario.name} does not even run when nobody is killed"
        assert self.state() is RunState.COMPLETED
        return output_in(printed.getvalue())

    @property
    def has_begun(self) -> bool:
        """Whether it recorded a plan, so that it can be resumed."""
        return any(fact.kind == "plan" for fact in self.facts())

    def decide(self) -> None:
        """Decide at some of the gates that the run waits for; perhaps at none, where somebody was killed before all were asked."""
        waiting = open_reviews(asyncio.run(self._store().gates_of(self.run_id)))
        if waiting:
            most = len(waiting) if self.cluster is None else 1  # on a cluster the first decision lets it go on
            turn = len(self.report.story)
            decided = asyncio.run(decide_some(self._store(), self.run_id, list(waiting), turn, most=most))
            self.tell(f"decide {decided} of {len(waiting)}")

    def pick_up(self) -> None:
        """Decide and go on, where the run waits for a decision; on a cluster that stays it goes on by itself."""
        if not self.is_waiting:
            return
        self.decide()
        if self.cluster is not None and not self.has_own_cluster:
            self.driver = None
        else:
            self.go_on()

    @property
    def is_waiting(self) -> bool:
        """Whether the driver ended, since reviews are open; of a run that goes on without one, whether it waits."""
        if not self.scenario.is_reviewed:
            return False
        return self.state() is RunState.WAITING if self.driver is None else self.driver.process.poll() == WAITING

    def go_on(self) -> None:
        """Resume the run; one that recorded no plan has not begun, and is begun."""
        if self.has_begun:
            self.start("resume", self.run_id)
        else:
            self.start_first()

    def start(self, *arguments: str, runtime: str = "") -> Program:
        """Start a program that works on the run; it is the driver from now on.

        Args:
            arguments: Of `ensemble-ray`.
            runtime: Where it works, where that is not told by the run.
        """
        self.report.runs += 1
        log = self.directory / f"log-{self.report.runs}"
        command = [*COMMAND, *arguments, "--json", "--quiet"]
        joins = self.cluster is not None and not (self.has_own_cluster and self.report.runs == 1)
        environment = {**self.environment, **(self.cluster.environment if self.cluster and joins else {})}
        if runtime:
            environment["ENSEMBLE_RAY_RUNTIME"] = runtime
        self.driver = self._programs.enter_context(program(command, log=log, env=environment, cwd=ROOT))
        self.tell(" ".join(arguments))
        return self.driver

    def ask(self, *arguments: str) -> Program:
        """Run another program beside the run, to its end.

        Raises:
            AssertionError: it does not end.
        """
        self._asked += 1
        log = self.directory / f"asked-{self._asked}"
        with program([*COMMAND, *arguments], log=log, env=self.environment, cwd=ROOT) as running:
            try:
                running.process.wait(timeout=self.scenario.patience_s)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"'{' '.join(arguments)}' does not end: {running.text[-500:]}") from None
        return running

    @property
    def has_ended(self) -> bool:
        """Whether the driver has."""
        return self.driver is not None and self.driver.process.poll() is not None

    # The record.

    @property
    def home(self) -> Path:
        """Where runs are recorded."""
        return Path(self.environment["ENSEMBLE_RAY_HOME"])

    @property
    def record(self) -> Path:
        """The directory of the run's record."""
        return self.home / "runs" / self.run_id

    def tell(self, what: str) -> None:
        """Add to the run's story."""
        self.report.story.append(what)

    def break_promise(self, what: str) -> None:
        """Add to the promises that were broken."""
        self.report.violations.append(what)

    def _store(self) -> RunStore:
        return store_at(StoreAddress(home=str(self.home)))

    def facts(self, *, is_partial: bool = False) -> list[Fact]:
        """All that is recorded; `is_partial`: what is left, where something is lost."""
        return asyncio.run(self._store().facts(self.run_id, is_partial=is_partial))

    def record_bytes(self) -> int:
        """What the record takes on the disk."""
        return sum(each.stat().st_size for each in self.home.rglob("*"))

    def state(self) -> RunState | None:
        """How the run stands; None while it has not begun."""
        summary = asyncio.run(self._store().summary(self.run_id))
        return None if summary is None else summary.state

    # Waiting.

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

    def owners(self) -> int:
        """How often somebody went on with the run, as far as that can be read."""
        try:
            return self.owners_of(self.facts(is_partial=True))
        except RecordError:
            return 0

    @staticmethod
    def owners_of(facts: Sequence[Fact]) -> int:
        """How often somebody went on with the run."""
        return sum(fact.kind == "resume" for fact in facts)

    def wait_owner(self, owners: int) -> None:
        """Wait a moment for somebody who goes on with the run, beside so many before.

        Raises:
            TimeoutError: there is nobody yet.
        """
        if self.owners() <= owners:
            time.sleep(0.02)
            raise TimeoutError

    def is_over(self) -> bool:
        """Whether the run has ended, or its driver."""
        if self.driver is not None:
            return self.has_ended and not self.is_waiting
        return self.state() in _FINAL

    def until_reached(self, moment: Moment) -> bool:
        """Wait for it; whether it came to that while the run went on."""
        return self.until(self._wait_for(moment))

    def until(self, wait: Callable[[], object]) -> bool:
        """Wait for what returns when it has come, and raises `TimeoutError` after a moment; False when the run ended."""
        deadline = time.monotonic() + self.scenario.patience_s
        while time.monotonic() < deadline:
            self.pick_up()
            with contextlib.suppress(TimeoutError):
                wait()
                return True
            if self.is_over():
                return False
        raise TimeoutError(f"no further request within {self.scenario.patience_s} s; state: {self.state()}")

    # Ending.

    def finish(self) -> Mapping[str, object] | None:
        """Wait until the run has ended, resuming it where it must be; gives its output, None when it failed."""
        left = _TRIES
        while left:
            if self.driver is None:
                self._until_final()
                self.go_on()  # of a run that completed it gives the recorded output
            driver = self.driver
            assert driver is not None
            try:
                code = driver.process.wait(timeout=self.scenario.patience_s)
            except subprocess.TimeoutExpired:
                self.break_promise(f"the run did not end within {self.scenario.patience_s} s; state: {self.state()}")
                return None
            if self.is_waiting:
                self.pick_up()
                continue
            if code == self.scenario.exit_code:
                state = self.state()
                if state is not RunState.COMPLETED:
                    self.break_promise(f"the run gave its output, and its state is {state}")
                return output_in(driver.text)
            left -= 1
            self.break_promise(f"'{self.report.story[-1]}' and then exit code {code}; state: {self.state()}")
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
            self.pick_up()
            time.sleep(0.05)
        self.tell(f"state {state}")

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
