"""The lines of the tables: which variants of a scenario stand in which column, and what they should come to. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["OVERHEADS", "ROWS", "Overhead", "Row", "Target"]

#: Targets below this are told in ms.
_SHOWN_IN_MS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a figure should come to, against the floor of its row."""

    kind: Literal["ratio", "more_s", "at_most_s"]
    value: float

    def holds(self, *, value: float, ratio: float, more: float) -> bool:
        """Whether it does: by the value itself, its ratio to the floor, or what it has on top of it."""
        return {"at_most_s": value, "ratio": ratio, "more_s": more}[self.kind] <= self.value

    def __str__(self) -> str:
        if self.kind == "ratio":
            return f"{self.value:.2f}"
        amount = f"{self.value:.2f} s" if self.value >= _SHOWN_IN_MS else f"{self.value * 1e3:.2f} ms"
        return f"+{amount}" if self.kind == "more_s" else amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: which variants of a scenario stand in which column."""

    scenario: str
    title: str
    unit: Literal["s", "ms", "MB"]
    floor: str | None = "floor"
    #: None: the teams on Ray are compared with `floor`
    floor_ray: str | None = None
    inline: str | None = "inline-recorded"
    ray: str | None = "ray-recorded"
    target_inline: Target | None = None
    target_ray: Target | None = None
    #: variants shown under the table
    references: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """One line of the table of what recording costs: a variant whose runs are recorded beside one whose runs are not."""

    scenario: str
    title: str
    unit: Literal["s", "ms"]
    off: str
    recorded: str
    #: None: shown, not judged
    allowed: Target | None = None


def _ratio(value: float) -> Target:
    return Target(kind="ratio", value=value)


#: Replicas are told of under the table.
_TWO = (("ray-2", "with two agent processes on Ray"),)
_BY_HAND = (("hand", "two Ray actors by hand"),)

ROWS = (
    Row(
        scenario="fan-out-200ms",
        title="fan-out 1,000 at 200 ms, 200 slots, one reduce",
        unit="s",
        target_inline=_ratio(1.25),
        target_ray=_ratio(1.35),
        references=_BY_HAND,
    ),
    Row(
        scenario="map-reduce-200ms",
        title="map-reduce of the same",
        unit="s",
        target_inline=_ratio(1.25),
        target_ray=_ratio(1.35),
    ),
    Row(
        scenario="fan-out-0ms",
        title="fan-out 1,000 at 0 ms, one reduce",
        unit="s",
        references=_BY_HAND,
    ),
    Row(
        scenario="map-10k-1000",
        title="map 10,000 items at 200 ms, 1,000 slots",
        unit="s",
        target_inline=_ratio(1.56),
        target_ray=_ratio(1.56),
        references=(*_BY_HAND, ("ray-2-recorded", "with two agent processes on Ray")),
    ),
    *(
        Row(
            scenario=name,
            title=f"map {items} items at {latency} ms, {slots} slots, no record",
            unit="s",
            inline="inline",
            ray="ray",
            references=(*_TWO, *_BY_HAND),
        )
        for name, items, latency, slots in (
            ("map-1k-200", "1,000", 200, "200"),
            ("map-1k-1000", "1,000", 200, "1,000"),
            ("map-10k-200", "10,000", 200, "200"),
            ("map-10k-0ms", "10,000", 0, "200"),
        )
    ),
    Row(
        scenario="map-10k-batch",
        title="map 10,000 items in one batch at 0 ms; floor: as many calls, 200 slots",
        unit="s",
    ),
    Row(
        scenario="stragglers",
        title="map-reduce of 1,000, lognormal latency (median 100 ms, sigma 1), 200 slots: level by level",
        unit="s",
        inline="levels",
        ray="levels-ray",
    ),
    Row(
        scenario="stragglers",
        title="the same pipelined",
        unit="s",
        inline="pipelined",
        ray="pipelined-ray",
    ),
    *(
        Row(
            scenario="reuse-1k",
            title=f"map 1,000 items whose answers an earlier run has, {'on Ray' if runtime == 'ray' else 'inline'}; floor: the same "
            "recorded map at 0 ms without",
            unit="s",
            floor=runtime,
            inline="inline-reuse" if runtime == "inline" else None,
            ray="ray-reuse" if runtime == "ray" else None,
        )
        for runtime in ("inline", "ray")
    ),
    Row(
        scenario="chain",
        title="chain of 50 at 0 ms, per task",
        unit="ms",
        floor_ray="hand",
        target_inline=_ratio(2.0),
        target_ray=_ratio(1.0),
    ),
    Row(
        scenario="many-runs",
        title="100 recorded runs of one task at 0 ms, 32 at once, over two schedulers, per run; floor: over one",
        unit="ms",
        floor="ray",
        inline=None,
        ray="ray-2",
        references=(("ray-4", "over four schedulers"),),
    ),
    *(
        Row(
            scenario=scenario,
            title=f"{title}, {'on Ray' if runtime == 'ray' else 'inline'}, per task; floor: the same recorded chain without",
            unit="ms",
            floor=runtime,
            inline=f"inline-{scenario}" if runtime == "inline" else None,
            ray=f"ray-{scenario}" if runtime == "ray" else None,
        )
        for scenario, title in (
            ("remembering", "chain of 50 that reads and writes a scope in a file"),
            ("approved", "chain of 50 with a gate behind each task, approved by a handler"),
            ("fallback", "chain of 50 with a second model that is never asked"),
        )
        for runtime in ("inline", "ray")
    ),
    *(
        Row(
            scenario=f"{unit}-{size}",
            title=f"{unit} of {size:,} {steps} at 0 ms, each with a question to the user's code, per {steps[:-1]}",
            unit="ms",
            inline="inline",
            ray="ray",
            target_inline=Target(kind="more_s", value=0.0015),
            target_ray=Target(kind="more_s", value=0.004),
        )
        for unit, steps in (("loop", "iterations"), ("graph", "steps"))
        for size in (10, 1_000)
    ),
    Row(
        scenario="tool-loop",
        title="one agent, 20 tool calls at 0 ms, per model call",
        unit="ms",
        floor_ray="hand",
        target_inline=_ratio(2.15),
        target_ray=_ratio(2.15),
    ),
    Row(
        scenario="manager",
        title="manager, 10 delegations at 0 ms, per model call",
        unit="ms",
        floor_ray="hand",
        target_inline=_ratio(2.4),
        target_ray=_ratio(1.65),
    ),
    Row(
        scenario="cpu-tools",
        title="64 CPU-bound tools of 100 ms",
        unit="s",
        inline="inline",
        ray="ray",
        target_inline=_ratio(0.55),
        target_ray=_ratio(0.53),
        references=(("pool", "the same with a process pool by hand"),),
    ),
    Row(
        scenario="cold-start",
        title="process start to first answer (Ray: running already)",
        unit="s",
        inline="inline",
        ray="ray-running",
        target_inline=_ratio(0.76),
        target_ray=_ratio(2.0),
    ),
    Row(
        scenario="cold-start",
        title="the same with Ray's own start; floor: bare Ray's first call",
        unit="s",
        floor="bare-ray",
        inline=None,
        ray="ray",
        target_ray=_ratio(0.75),
    ),
    Row(
        scenario="memory",
        title="peak memory (PSS) after 100 agents, whole tree",
        unit="MB",
        floor_ray="bare-ray",
        inline="inline",
        ray="ray",
        target_inline=_ratio(0.87),
        target_ray=_ratio(0.82),
    ),
    Row(
        scenario="import",
        title="import ensemble_ray",
        unit="s",
        floor=None,
        inline="inline",
        ray=None,
        target_inline=Target(kind="at_most_s", value=0.20),
    ),
)

_A_STEP = Target(kind="more_s", value=0.001)


def _on_both(scenario: str, title: str, unit: Literal["s", "ms"], allowed: Target) -> tuple[Overhead, ...]:
    return tuple(
        Overhead(
            scenario=scenario, title=title, unit=unit, off=runtime, recorded=f"{runtime}-recorded", allowed=allowed
        )
        for runtime in ("inline", "ray")
    )


OVERHEADS = (
    *_on_both("fan-out-200ms", "fan-out 1,000 at 200 ms", "s", _ratio(1.25)),
    *_on_both("fan-out-0ms", "fan-out 1,000 at 0 ms", "s", _ratio(1.25)),
    Overhead(
        scenario="map-10k-0ms",
        title="map 10,000 items at 0 ms",
        unit="s",
        off="inline",
        recorded="inline-recorded",
        allowed=_ratio(1.25),
    ),
    Overhead(
        scenario="map-10k-0ms",
        title="map 10,000 items at 0 ms, two agent processes",
        unit="s",
        off="ray-2",
        recorded="ray-2-recorded",
        allowed=_ratio(1.25),
    ),
    *_on_both("chain", "chain of 50 at 0 ms, per task", "ms", _A_STEP),
    *_on_both("manager", "manager, 10 delegations, per model call", "ms", _A_STEP),
    *_on_both("tool-loop", "20 tool calls that only read, per model call", "ms", _A_STEP),
    Overhead(
        scenario="tool-loop",
        title="20 tool calls that must not be repeated, per model call",
        unit="ms",
        off="inline",
        recorded="inline-once",
    ),
)
