"""Runs scenarios: a protocol server, one process per variant, rounds in turn. In: scenarios. Out: what was measured.

Variants take turns within each round, and the order moves by one from round to round, so that drift of the machine
hits all alike. Every round's requests are counted by the server: a variant that makes more or fewer calls than the
work needs is an error, not a result.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from urllib.request import urlopen

from benchmarks.children import Child, clean_environment, start_child
from benchmarks.jobs.cpu_tools import loops_of_100_ms
from benchmarks.process_tree import cpu_seconds, memory_of
from benchmarks.scenarios import Scenario

__all__ = ["Conditions", "Measured", "WrongCountError", "chosen_variants", "measure"]

_SCRIPTS = Path(__file__).parent / "scripts"
#: A process must have been looked at this often while it works, s between two looks.
_LOOK_EVERY_S = 0.1


class WrongCountError(RuntimeError):
    """A variant made another number of requests than the work needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How to measure."""

    rounds: int = 5
    #: things per round; None: as many as the scenario says
    size: int | None = None
    with_ray: bool = True
    #: of the variants whose runs are recorded; `off`: they are left out
    durability: str = "effects"
    #: told about each step
    progress: Callable[[str], None] = print


@dataclass(slots=True, kw_only=True)
class Measured:
    """What one variant of one scenario took, round by round."""

    scenario: str
    variant: str
    #: seconds per thing, or bytes
    values: list[float] = field(default_factory=list[float])
    #: processor time of the variant's whole tree per round, s; the server's is not in it
    cpu_s: list[float] = field(default_factory=list[float])
    #: per round: what nothing can be faster than, by the server's delays: the longest, or all of them over the slots, s
    bound_s: list[float] = field(default_factory=list[float])
    #: requests of all rounds, the first one, which is not measured, included
    requests: int = 0
    #: memory only: peak RSS of the tree, bytes, and its processes then
    rss_bytes: list[int] = field(default_factory=list[int])
    processes: list[int] = field(default_factory=list[int])


def measure(scenario: Scenario, conditions: Conditions) -> list[Measured]:
    """All variants of a scenario.

    Raises:
        ChildFailedError: a process ended or hung.
        WrongCountError: a variant made another number of requests than the work needs.
    """
    scenario = scenario.resize(conditions.size)
    chosen = chosen_variants(scenario, conditions)
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ensemble-ray-bench-")))
        loops = loops_of_100_ms() if "{loops}" in "".join(scenario.server) else 0
        arguments = [argument.format(size=scenario.size, loops=loops) for argument in scenario.server]
        command = ["-m", "ensemble_ray.testing.model_server", "--until-stdin-closes", "--text", "A short answer."]
        server = stack.enter_context(
            start_child([*command, "--latency-ms", str(scenario.latency_ms), *arguments], clean_environment(home))
        )
        place = _Place(scenario=scenario, url=server.line(), home=home, durability=conditions.durability)
        rounds = _warm(place, chosen, stack) if scenario.measure == "warm" else _fresh(place, chosen, stack)
        return _in_turn(place, rounds, conditions)


def chosen_variants(scenario: Scenario, conditions: Conditions) -> dict[str, str]:
    """Choose the variants to measure: leave out those that need Ray, or that record, where that is not wanted."""
    left_out: frozenset[str] = frozenset() if conditions.with_ray else scenario.on_ray
    if conditions.durability == "off":
        left_out |= scenario.recorded
    return {name: made for name, made in scenario.variants.items() if name not in left_out}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a scenario's variants work."""

    scenario: Scenario
    url: str
    home: Path
    durability: str


#: Does a round of a variant and writes what it took into the result.
_DoRound = Callable[[Measured], None]


def _in_turn(place: _Place, rounds: Mapping[str, _DoRound], conditions: Conditions) -> list[Measured]:
    scenario = place.scenario
    names = list(rounds)
    results = {name: Measured(scenario=scenario.name, variant=name) for name in names}
    for name in names:  # not measured: opens connections and pools, writes bytecode
        conditions.progress(f"{scenario.name}: {name}, first round (not measured)")
        _count(place, rounds[name], Measured(scenario=scenario.name, variant=name), total=results[name])
    for number in range(conditions.rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            _count(place, rounds[name], results[name], total=results[name])
            conditions.progress(f"{scenario.name}: {name}, round {number + 1}: {results[name].values[-1]:.4g}")
    return list(results.values())


def _count(place: _Place, do_round: _DoRound, result: Measured, *, total: Measured) -> None:
    scenario = place.scenario
    before = _stats(place.url)
    do_round(result)
    after = _stats(place.url)
    made = after["requests"] - before["requests"]
    needed = scenario.requests_of(result.variant)
    if made != needed:
        raise WrongCountError(f"{scenario.name}: {result.variant} made {made} requests in a round, needed are {needed}")
    total.requests += made
    if slots := scenario.extra.get("slots"):
        work_s = (after["delays_ms"] - before["delays_ms"]) / 1e3
        result.bound_s.append(max(after["longest_delay_ms"] / 1e3, work_s / slots))


def _stats(url: str) -> Mapping[str, int]:
    with urlopen(f"{url}/stats", timeout=30) as answer:  # noqa: S310  our own server on loopback
        return cast("Mapping[str, int]", json.load(answer))


# ---- one process for all rounds


def _warm(place: _Place, variants: Mapping[str, str], stack: contextlib.ExitStack) -> dict[str, _DoRound]:
    return {name: _worker_rounds(place, name, _worker(place, name, job, stack)) for name, job in variants.items()}


def _worker(place: _Place, name: str, job: str, stack: contextlib.ExitStack) -> Child:
    setting = {
        "url": place.url,
        "runtime": "ray" if name in place.scenario.on_ray else "inline",
        "size": place.scenario.size,
        "durability": place.durability if name in place.scenario.recorded else "off",
        "extra": dict(place.scenario.extra),
    }
    arguments = ["-m", "benchmarks.worker", job, json.dumps(setting)]
    worker = stack.enter_context(start_child(arguments, clean_environment(place.home)))
    worker.line()
    return worker


def _worker_rounds(place: _Place, name: str, worker: Child) -> _DoRound:
    divisor = place.scenario.requests_of(name) if place.scenario.is_per_request else 1

    def do_round(result: Measured) -> None:
        before_s = cpu_seconds(worker.pid)
        result.values.append(float(worker.ask()) / divisor)
        result.cpu_s.append(cpu_seconds(worker.pid) - before_s)

    return do_round


# ---- a new process for each round


def _fresh(place: _Place, variants: Mapping[str, str], stack: contextlib.ExitStack) -> dict[str, _DoRound]:
    cluster = _cluster(place, stack) if place.scenario.on_cluster & set(variants) else None
    return {
        name: _script_rounds(place, name, script, cluster if name in place.scenario.on_cluster else None)
        for name, script in variants.items()
    }


def _cluster(place: _Place, stack: contextlib.ExitStack) -> str:
    script = str(_SCRIPTS / "running_cluster.py")
    return stack.enter_context(start_child([script], clean_environment(place.home))).line()


def _script_rounds(place: _Place, name: str, script: str, cluster: str | None) -> _DoRound:
    scenario = place.scenario
    environment = clean_environment(place.home, ray_address=cluster)
    runtime = "ray" if name in scenario.on_ray else "inline"
    arguments = [str(_SCRIPTS / script), place.url, str(scenario.size), runtime]

    def do_round(result: Measured) -> None:
        began = time.perf_counter()
        with start_child(arguments, environment) as child:
            if scenario.measure == "memory":
                _peak(child, result)
                return
            answer = child.line()
            took_s = time.perf_counter() - began
            result.cpu_s.append(cpu_seconds(child.pid))
        result.values.append(float(answer) if scenario.measure == "reported" else took_s)

    return do_round


def _peak(child: Child, result: Measured) -> None:
    """Look at the tree's memory until the child says that it is done, and once more then."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as waiting:
        done = waiting.submit(child.line)
        seen = [memory_of(child.pid)]
        while not done.done():
            time.sleep(_LOOK_EVERY_S)
            seen.append(memory_of(child.pid))
        done.result()
    seen.append(memory_of(child.pid))
    peak = max(seen, key=lambda memory: memory.pss_bytes)
    result.values.append(float(peak.pss_bytes))
    result.rss_bytes.append(peak.rss_bytes)
    result.processes.append(peak.processes)


def scenarios_named(names: Collection[str], known: Sequence[Scenario]) -> list[Scenario]:
    """Return the scenarios of those names; all of them for no name.

    Raises:
        KeyError: there is none of a name.
    """
    by_name = {scenario.name: scenario for scenario in known}
    return [by_name[name] for name in names] if names else list(known)
