"""What is measured. Data only: scenarios with their variants.

Floors are written by hand: `floor` in one process with aiohttp, `hand` with two Ray actors, each with aiohttp. Teams
record their runs; the same teams without a record (durability `off`) show what recording costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

__all__ = ["SCENARIOS", "Scenario"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One kind of work, done by several variants in turn."""

    name: str
    #: `warm`: one process per variant that does all rounds; `start`: a new process per round, timed from its start to
    #: its first answer; `memory`: a new process per round, its tree's peak; `reported`: a new process that tells
    measure: Literal["warm", "start", "memory", "reported"]
    #: variant -> what runs it: a function of `benchmarks.jobs.NAME`, or a file in `benchmarks/scripts`
    variants: Mapping[str, str]
    #: things done in one round, at full size
    size: int = 1
    #: requests of one round: `requests_each` per thing, and `requests_more` on top
    requests_each: int = 1
    requests_more: int = 0
    #: whether a figure is per request, not per round
    is_per_request: bool = False
    latency_ms: int = 0
    #: more arguments of the model server
    server: tuple[str, ...] = ()
    #: what a job may need to know besides
    extra: Mapping[str, int] = field(default_factory=dict[str, int])
    #: variants that need Ray
    on_ray: frozenset[str] = frozenset({"ray"})
    #: a Ray cluster is kept running for these
    on_cluster: frozenset[str] = frozenset()
    #: these ask no model
    mute: frozenset[str] = frozenset()
    #: the runs of these are recorded
    recorded: frozenset[str] = frozenset()

    def requests_of(self, variant: str) -> int:
        """Return the number of requests that one round of a variant needs."""
        return 0 if variant in self.mute else self.requests_each * self.size + self.requests_more

    def resize(self, size: int | None) -> Scenario:
        """Return the same with another number of things per round, where it does many at all."""
        return self if size is None or self.size == 1 else replace(self, size=size)


_JOBS = {"floor": "floor", "inline": "team", "ray": "team", "inline-recorded": "team", "ray-recorded": "team"}
_ON_RAY = frozenset({"ray", "ray-recorded", "hand"})
_RECORDED = frozenset({"inline-recorded", "ray-recorded"})

_MAPPING = {"floor": "floor", "inline": "team", "ray": "team", "ray-2": "team_two"}
_MAPPING_RECORDED = _MAPPING | {"inline-recorded": "team", "ray-recorded": "team", "ray-2-recorded": "team_two"}


def _jobs(module: str) -> dict[str, str]:
    return {name: f"{module}:{made}" for name, made in _JOBS.items()} | {"hand": f"by_hand:{module}"}


def _mapping(name: str, *, size: int, slots: int, latency_ms: int, is_recorded: bool = False) -> Scenario:
    """Return the scenario of a map over items: in one process, in one agent process on Ray, and in two."""
    variants = _MAPPING_RECORDED if is_recorded else _MAPPING
    return Scenario(
        name=name,
        measure="warm",
        variants={variant: f"mapping:{made}" for variant, made in variants.items()} | {"hand": "by_hand:mapping"},
        on_ray=_ON_RAY | {"ray-2", "ray-2-recorded"},
        recorded=_RECORDED | {"ray-2-recorded"},
        size=size,
        latency_ms=latency_ms,
        extra={"slots": slots},
    )


SCENARIOS = (
    Scenario(
        name="fan-out-200ms",
        measure="warm",
        variants=_jobs("fan_out"),
        on_ray=_ON_RAY,
        recorded=_RECORDED,
        size=1000,
        requests_more=1,
        latency_ms=200,
        extra={"slots": 200},
    ),
    Scenario(
        name="fan-out-0ms",
        measure="warm",
        variants=_jobs("fan_out"),
        on_ray=_ON_RAY,
        recorded=_RECORDED,
        size=1000,
        requests_more=1,
        extra={"slots": 200},
    ),
    _mapping("map-1k-200", size=1_000, slots=200, latency_ms=200),
    _mapping("map-1k-1000", size=1_000, slots=1_000, latency_ms=200),
    _mapping("map-10k-200", size=10_000, slots=200, latency_ms=200),
    _mapping("map-10k-1000", size=10_000, slots=1_000, latency_ms=200, is_recorded=True),
    _mapping("map-10k-0ms", size=10_000, slots=200, latency_ms=0, is_recorded=True),
    Scenario(
        name="reuse-1k",
        measure="warm",
        variants={
            "inline": "mapping:team",
            "ray": "mapping:team",
            "inline-reuse": "mapping:reusing",
            "ray-reuse": "mapping:reusing",
        },
        on_ray=frozenset({"ray", "ray-reuse"}),
        mute=frozenset({"inline-reuse", "ray-reuse"}),
        recorded=frozenset({"inline", "ray", "inline-reuse", "ray-reuse"}),
        size=1_000,
        extra={"slots": 200},
    ),
    Scenario(
        name="map-10k-batch",
        measure="warm",
        variants={"floor": "mapping:floor", "inline-recorded": "batched:team", "ray-recorded": "batched:team"},
        on_ray=_ON_RAY,
        recorded=_RECORDED,
        size=10_000,
        extra={"slots": 200},
    ),
    Scenario(
        name="map-reduce-200ms",
        measure="warm",
        variants={
            "floor": "stragglers:floor",
            "inline-recorded": "stragglers:levels",
            "ray-recorded": "stragglers:levels",
        },
        on_ray=_ON_RAY,
        recorded=_RECORDED,
        size=1000,
        requests_more=1,
        latency_ms=200,
        extra={"slots": 200, "group": 1000},
    ),
    Scenario(
        name="stragglers",
        measure="warm",
        variants={
            "floor": "stragglers:floor",
            "levels": "stragglers:levels",
            "pipelined": "stragglers:pipelined",
            "levels-ray": "stragglers:levels",
            "pipelined-ray": "stragglers:pipelined",
        },
        on_ray=frozenset({"levels-ray", "pipelined-ray"}),
        size=1_000,
        # By tens: 100, 10 and 1.
        requests_more=111,
        latency_ms=100,
        server=("--latency-spread", "1"),
        extra={"slots": 200, "group": 10},
    ),
    Scenario(
        name="chain",
        measure="warm",
        variants=_jobs("chain"),
        on_ray=_ON_RAY,
        recorded=_RECORDED,
        size=50,
        is_per_request=True,
    ),
    Scenario(
        name="many-runs",
        measure="warm",
        variants={"ray": "many_runs:one", "ray-2": "many_runs:two", "ray-4": "many_runs:four"},
        on_ray=frozenset({"ray", "ray-2", "ray-4"}),
        recorded=frozenset({"ray", "ray-2", "ray-4"}),
        size=100,
        is_per_request=True,
    ),
    *(
        Scenario(
            name=name,
            measure="warm",
            variants={"inline": "chain:team", "ray": "chain:team", f"inline-{name}": job, f"ray-{name}": job},
            on_ray=frozenset({"ray", f"ray-{name}"}),
            recorded=frozenset({"inline", "ray", f"inline-{name}", f"ray-{name}"}),
            size=50,
            is_per_request=True,
        )
        for name, job in (
            ("remembering", "remembering:team"),
            ("approved", "remembering:approved"),
            ("fallback", "chain:fallback"),
        )
    ),
    *(
        Scenario(
            name=name,
            measure="warm",
            variants={variant: f"refining:{'floor' if variant == 'floor' else made}" for variant in _JOBS},
            on_ray=_ON_RAY,
            recorded=_RECORDED,
            size=size,
            is_per_request=True,
        )
        for name, made, size in (
            ("loop-10", "loop", 10),
            ("loop-1000", "loop", 1_000),
            ("graph-10", "graph", 10),
            ("graph-1000", "graph", 1_000),
        )
    ),
    Scenario(
        name="tool-loop",
        measure="warm",
        variants=_jobs("tool_loop") | {"inline-once": "tool_loop:team_once"},
        on_ray=_ON_RAY,
        recorded=_RECORDED | {"inline-once"},
        size=20,
        requests_more=1,
        is_per_request=True,
        # The server needs the number of turns: the harness puts the size in.
        server=("--tool-turns", "{size}", "--tool-arguments", '{{"number": 7}}'),
    ),
    Scenario(
        name="manager",
        measure="warm",
        variants=_jobs("manager"),
        on_ray=_ON_RAY,
        recorded=_RECORDED,
        size=10,
        requests_each=2,
        requests_more=1,
        is_per_request=True,
        server=(
            "--tool-turns",
            "{size}",
            "--tool-arguments",
            '{{"agent_role": "Worker", "task_description": "Do your part"}}',
        ),
    ),
    Scenario(
        name="cpu-tools",
        measure="warm",
        variants={
            "floor": "cpu_tools:threads",
            "pool": "cpu_tools:pool",
            "inline": "cpu_tools:team",
            "ray": "cpu_tools:team",
        },
        size=64,
        requests_each=2,
        server=("--tool-turns", "1", "--tool-arguments", '{{"loops": {loops}}}'),
    ),
    Scenario(
        name="cold-start",
        measure="start",
        variants={
            "floor": "first_answer_bare.py",
            "inline": "first_answer_inline.py",
            "bare-ray": "first_call_of_bare_ray.py",
            "ray": "first_answer_on_ray.py",
            "ray-running": "first_answer_on_ray.py",
        },
        on_ray=frozenset({"ray", "bare-ray", "ray-running"}),
        on_cluster=frozenset({"ray-running"}),
        mute=frozenset({"bare-ray"}),
    ),
    Scenario(
        name="memory",
        measure="memory",
        variants={
            "floor": "hundred_agents_bare.py",
            "inline": "hundred_agents.py",
            "bare-ray": "two_actors_by_hand.py",
            "ray": "hundred_agents.py",
        },
        size=100,
        on_ray=frozenset({"ray", "bare-ray"}),
    ),
    Scenario(name="import", measure="reported", variants={"inline": "import_time.py"}, requests_each=0),
)
