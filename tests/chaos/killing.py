"""Kills a process of a run at its moment, and sees to it that the run goes on.

In: a run, and a moment. Out: whether there was anybody to kill. Never: a kill that the run's audit does not know of.
"""

from __future__ import annotations

import contextlib
import random
import time

from tests.chaos.audit import answers_in
from tests.chaos.audit_map_reduce import judge_files
from tests.chaos.disturbed import PATIENCE_S, Disturbed
from tests.chaos.gate import all_read
from tests.chaos.kills import Kill
from tests.chaos.moments import Moment
from tests.chaos.victims import (
    Victim,
    actors_of,
    end_session,
    is_there,
    kill_all,
    one_of,
    wait_gone,
    workers_of,
)
from tests.processes import Program

__all__ = ["actor_of", "end_program", "kill", "kill_only"]

#: How long a first process of a kind is waited for, s; a scenario need not have each kind.
_BIRTH_S = 10.0


def kill(run: Disturbed, moment: Moment, rng: random.Random) -> bool:
    """Wait for the moment, kill, and see to it that the run goes on; False when the run ended before."""
    kills = len(run.kills)
    if not kill_only(run, moment, rng):
        return False
    if len(run.kills) == kills:  # there was nothing of that kind
        return True
    if moment.victim.interrupts_run:
        run.go_on()
    elif moment.victim.takes_driver:
        run.driver = None
    return True


def kill_only(run: Disturbed, moment: Moment, rng: random.Random) -> bool:
    """Wait for the moment, and kill; False when the run ended before."""
    if not run.until_reached(moment):
        return False
    with contextlib.nullcontext() if moment.most is None else run.gate.closed(run.server, moment.most):
        time.sleep(moment.delay_s)
        run.pick_up()
        if run.is_over():
            return False
        at = _kill(run, moment.victim, rng)
        read_at = all_read(run.server)
    if at is None:
        return not run.is_over()
    victim, settled = moment.victim, dict[str, int]()
    if victim.interrupts_run:
        counts, facts = run.server.requests_by_key(), run.facts()
        settled = {key: counts[key] for key in answers_in(run.run_id, facts)}
        run.report.violations += judge_files(facts, run.world.rows(), run.world.letters())
    run.kills.append(
        Kill(
            victim=victim.name,
            at=at,
            repeats_calls=victim.repeats_calls,
            when=str(moment),
            settled=settled,
            until=max(read_at, at + victim.lives_on_s),
        )
    )
    run.tell(f"kill {moment}")
    run.report.strikes += 1
    return True


def _kill(run: Disturbed, victim: Victim, rng: random.Random) -> float | None:
    """Kill it; when that was, or None where there is nothing of that kind."""
    if victim.interrupts_run or victim.takes_driver:
        assert run.driver is not None or not victim.interrupts_run
        return None if run.driver is None else end_program(victim, run.driver)
    pid = actor_of(run, victim, rng)
    if pid is None:
        return None
    at = kill_all([pid])
    wait_gone(lambda: [str(pid)] if is_there(pid) else [], victim.name)
    return at


def actor_of(run: Disturbed, victim: Victim, rng: random.Random) -> int | None:
    """A process of that kind in the run's cluster, by lot; None where there is none."""
    assert run.cluster is not None, f"{victim.name} lives in a cluster"
    if victim.ground == "two_nodes":
        return run.cluster.second_raylet
    session = run.cluster.program.process.pid
    # Between its death and its successor's birth an actor has no process.
    was_killed = any(kill.victim == victim.name for kill in run.kills)
    deadline = time.monotonic() + (PATIENCE_S if was_killed else _BIRTH_S)
    while (pid := one_of(actors_of(session, victim.actor), rng)) is None and time.monotonic() < deadline:
        if run.is_over():
            return None
        time.sleep(0.01)
    return pid


def end_program(victim: Victim, driver: Program) -> float:
    """Kill a driver, and what dies with it; gives the time of it."""
    session = driver.process.pid
    at = kill_all([session]) if victim.name in {"driver", "own-driver"} else end_session(session)
    driver.process.wait(timeout=PATIENCE_S)
    # Ray's processes end themselves when their driver is gone; it takes them a moment. Two helpers stay for ever.
    wait_gone(lambda: workers_of(session), f"{victim.name} (session {session})")
    end_session(session)
    return at
