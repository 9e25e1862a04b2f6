"""What scheduling alone costs: sources, and runs whose tasks are done at once: `python -m benchmarks.jobs.scale KIND SIZE`.

In: a kind and how many tasks or items. Out, as JSON: processor time of each round, the garbage collector's part of the
best one, and the most memory that a round holds. No runtime, no model; facts stay in memory, as those of `durability=off`
do for planned runs, or are not kept where a map-reduce keeps none.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Never

from ensemble_ray import Agent, MapReduceEnsemble, Task
from ensemble_ray.execute.orders import TaskBody, TaskFailure, TaskOrder, TaskResult
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.items.pulling import ListReader
from ensemble_ray.plan.plan import EdgeEntry, GraphUnit, LoopUnit, Node, Plan, StateEntry, Unit
from ensemble_ray.process.concurrency import SystemClock
from ensemble_ray.record.journal import ForgetfulJournal, MemoryJournal
from ensemble_ray.runs.coordinator import AnyOrder, AnyResult, Coordinator, RunDirectives, RunJournal
from ensemble_ray.runs.map_reduce.items import ItemBuffer, ItemLog, ItemResultWriter
from ensemble_ray.runs.map_reduce.orders import DefinitionFactories, OrderMaker, TaskMaker
from ensemble_ray.runs.map_reduce.outputs import MapReduceOutputs
from ensemble_ray.runs.map_reduce.tasks import MapReduceTasks
from ensemble_ray.runs.outputs import InMemoryOutputs
from ensemble_ray.runs.planned_tasks import PlannedTasks
from ensemble_ray.schedule import machine_for
from ensemble_ray.schedule.graph import END_STATE
from ensemble_ray.schedule.instructions import (
    Announce,
    EdgeMatches,
    End,
    Evaluate,
    Inform,
    Instruction,
    MapItem,
    PullItems,
    ReduceGroup,
    Start,
    UntilHolds,
)
from ensemble_ray.schedule.machine import Source
from ensemble_ray.schedule.map_reduce import MapReduceMachine
from ensemble_ray.schedule.map_reduce_groups import Grouping, MapReduceRules
from ensemble_ray.schedule.stimuli import Begun, Completed, Evaluated, ItemsPulled, Stimulus
from ensemble_ray.testing import ScriptedModel
from ensemble_ray.values.metrics import TaskMetrics
from ensemble_ray.values.task_output import TaskOutput

__all__ = ["KINDS", "Cost", "cost_of"]

#: Tasks in flight, and outputs of a group: by number, or by the tokens that each of them has.
_WINDOW = 200
_GROUP = 50
_TOKENS = 100
#: Every so many tasks of a parallel plan, one has those before it as context.
_FAN = 10
#: Rounds of small sizes are repeated until that many tasks were done, so that a clock can tell them apart.
_PER_ROUND = 5_000
#: A round of as many tasks comes before the first one that is measured.
_WARM = 200
_AT = datetime(2026, 1, 1, tzinfo=UTC)

#: Does a whole run.
Work = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What runs of one kind and size cost."""

    kind: str
    size: int
    #: processor time of one run, s, by round
    cpu_s: Sequence[float]
    #: the garbage collector's part of the best of them
    collector_s: float
    #: the most that a run holds beside what it is made of; -1: not measured
    peak_bytes: int


# Sources.


def _plan(workflow: str, size: int) -> Plan:
    """Return a chain of tasks, or groups of tasks with one that needs them."""
    nodes: list[Node] = []
    for index in range(size):
        if workflow == "sequential":
            needed = range(max(index - 1, 0), index)
        else:
            needed = range(index + 1 - _FAN, index) if index % _FAN == _FAN - 1 else range(0)
        nodes.append(_node(index, tuple(f"t{each}" for each in needed)))
    return Plan(workflow=workflow, nodes=tuple(nodes))


def _node(index: int, context: tuple[str, ...] = ()) -> Node:
    return Node(
        key=f"t{index}",
        index=index + 1,
        description="Do it",
        expected_output="a text",
        agent_role="Worker",
        agent_key="worker",
        context=context,
    )


def _repeating_plan(unit: Unit) -> Plan:
    """Return a plan of one task that a unit repeats."""
    return Plan(workflow="sequential", nodes=(_node(0),), units=(unit,))


def _loop_plan(size: int) -> Plan:
    """Return a loop whose predicate never holds."""
    unit = LoopUnit(key="loop:l", name="l", body=("t0",), body_names=("t0",), max_iterations=size, has_until=True)
    return _repeating_plan(unit)


def _graph_plan(size: int) -> Plan:
    """Return a graph whose only state is followed by itself; the condition of leaving it is asked at each step."""
    unit = GraphUnit(
        key="graph:g",
        name="g",
        states=(StateEntry(name="s", member="t0"),),
        edges=(
            EdgeEntry(from_state="s", to_state=END_STATE, has_condition=True),
            EdgeEntry(from_state="s", to_state="s"),
        ),
        start="s",
        max_steps=size,
    )
    return _repeating_plan(unit)


def _rules(grouping: Grouping) -> MapReduceRules:
    is_adaptive = grouping is Grouping.BUDGET
    return MapReduceRules(
        grouping=grouping,
        capacity=_GROUP * _TOKENS if is_adaptive else _GROUP,
        max_levels=10 if is_adaptive else None,
        window=_WINDOW,
        fails_on_item=False,
        fails_on_reduce=True,
    )


def _instance(made_of: MapItem | ReduceGroup) -> str:
    return f"map-{made_of.number}#0" if isinstance(made_of, MapItem) else f"reduce-{made_of.level}-{made_of.number}#0"


def _drive(source: Source, items: int) -> None:
    """Tell a source the end of each task that it starts, one by one, until the run ends; what it asks of user code is false."""
    told: deque[Stimulus] = deque([Begun(at=0.0)])
    left = items
    ending: Instruction | None = None
    while told:
        for instruction in source.handle(told.popleft()):
            match instruction:
                case Start():
                    told.append(Completed(at=0.0, instance=instruction.instance, output_tokens=_TOKENS))
                case Evaluate(question=PullItems(count=wanted)):
                    count = min(wanted, left)
                    left -= count
                    pulled = ItemsPulled(count=count, is_exhausted=not left)
                    told.append(Evaluated(at=0.0, question=instruction.question, answer=pulled))
                case Evaluate(question=UntilHolds() | EdgeMatches()):
                    told.append(Evaluated(at=0.0, question=instruction.question, answer=False))
                case Announce() | Inform():
                    pass
                case End():
                    ending = instruction
                case _:
                    raise AssertionError(f"nobody expected {instruction}")
    assert ending is not None


def _planned_source(plan: Plan) -> Work:
    return lambda: _drive(machine_for(plan), 0)


def _map_reduce_source(grouping: Grouping, size: int) -> Work:
    rules = _rules(grouping)
    return lambda: _drive(MapReduceMachine(rules, _instance), size)


# Runs.


class _Answering:
    """An executor that has every task done when it is started."""

    def __init__(self, deliver: Callable[[Sequence[AnyResult]], None], answer: Callable[[Any], AnyResult]) -> None:
        self._deliver = deliver
        self._answer = answer

    def start(self, orders: Sequence[AnyOrder]) -> None:
        """Deliver what came of them."""
        self._deliver([self._answer(order) for order in orders])

    def stop(self, instances: Sequence[str]) -> None:
        """Stop nothing: nothing runs."""


def _planned_result(order: TaskOrder[str, Never, str]) -> TaskResult[str, TaskFailure]:
    return TaskResult(key=order.key, instance=order.instance, status="completed", at=0.0, output="done")


async def _run_plan(plan: Plan) -> None:
    journal = RunJournal(run_id="run", epoch=0, journal=MemoryJournal("run"), clock=SystemClock())
    tasks: PlannedTasks = PlannedTasks(plan, journal, InMemoryOutputs(), TaskBody, header=PlanRecorded())
    coordinator = Coordinator(journal, tasks)
    ended = await coordinator.run(tasks.source, _Answering(coordinator.deliver, _planned_result))
    assert len(ended.completed) == len(plan.nodes)


def _planned_run(workflow: str, size: int) -> Work:
    plan = _plan(workflow, size)
    return lambda: asyncio.run(_run_plan(plan))


def _result(order: TaskOrder) -> TaskResult:
    output = TaskOutput(
        raw="done",
        task_description=order.task.description,
        agent_role=order.agent_role,
        completed_at=_AT,
        duration=timedelta(seconds=1),
        metrics=TaskMetrics(output_tokens=_TOKENS),
    )
    return TaskResult(key=order.key, instance=order.instance, status="completed", at=0.0, duration_s=1.0, output=output)


async def _run_map(definition: MapReduceEnsemble, rules: MapReduceRules, size: int) -> None:
    journal = RunJournal(run_id="run", epoch=0, journal=ForgetfulJournal("run"), clock=SystemClock())
    store = MapReduceOutputs()
    items = ItemBuffer(ListReader(range(size)), None)
    orders = OrderMaker(
        journal,
        factories=DefinitionFactories(definition),
        maker=TaskMaker(definition, {}),
        items=items,
        directives=RunDirectives(journal),
        store=store,
        record=None,
        item_count=None,
        is_direct=False,
    )
    log = ItemLog(store, is_read=False)
    log.window = rules.window
    results = ItemResultWriter(log)
    tasks = MapReduceTasks(journal, items=items, orders=orders, store=store, results=results, definition=definition)
    coordinator = Coordinator(journal, tasks)
    ended = await coordinator.run(MapReduceMachine(rules, orders.instance), _Answering(coordinator.deliver, _result))
    assert not ended.ending.failure
    assert len(store.outputs) >= size


def _map_reduce_run(grouping: Grouping, size: int) -> Work:
    rules = _rules(grouping)
    worker = Agent(role="Worker", goal="Work", llm=ScriptedModel())
    grouped: dict[str, Any] = (
        {"target_token_budget": rules.capacity} if grouping is Grouping.BUDGET else {"chunk_size": rules.capacity}
    )
    definition = MapReduceEnsemble(
        items=range(size),
        map_task=lambda item: Task(description=f"Do {item}", expected_output="a text", agent=worker),
        reduce_task=lambda chunk: Task(description="Reduce", expected_output="a text", agent=worker, context=chunk),
        **grouped,
    )
    return lambda: asyncio.run(_run_map(definition, rules, size))


#: What can be measured: `source` is a machine told one end after the other, `run` a coordinator with all around it.
KINDS: Mapping[str, Callable[[int], Work]] = {
    "source sequential": lambda size: _planned_source(_plan("sequential", size)),
    "source parallel": lambda size: _planned_source(_plan("parallel", size)),
    "source loop": lambda size: _planned_source(_loop_plan(size)),
    "source graph": lambda size: _planned_source(_graph_plan(size)),
    "source map-reduce by number": lambda size: _map_reduce_source(Grouping.CHUNK, size),
    "source map-reduce by tokens": lambda size: _map_reduce_source(Grouping.BUDGET, size),
    "run sequential": lambda size: _planned_run("sequential", size),
    "run parallel": lambda size: _planned_run("parallel", size),
    "run map-reduce by number": lambda size: _map_reduce_run(Grouping.CHUNK, size),
    "run map-reduce by tokens": lambda size: _map_reduce_run(Grouping.BUDGET, size),
}


# Measuring.


class _Collector:
    """Processor time of the garbage collector, from one question to the next."""

    def __init__(self) -> None:
        self._began = 0.0
        self._spent_s = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _info: Mapping[str, int]) -> None:
        if phase == "start":
            self._began = time.process_time()
        else:
            self._spent_s += time.process_time() - self._began

    def take(self) -> float:
        """Return what it spent since the last question, s."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


def cost_of(kind: str, size: int, *, rounds: int, with_memory: bool) -> Cost:
    """Measure runs of that kind and size."""
    KINDS[kind](_WARM)()
    work = KINDS[kind](size)
    repeats = max(1, _PER_ROUND // size)
    collector = _Collector()
    measured: list[tuple[float, float]] = []
    for _ in range(rounds):
        gc.collect()
        collector.take()
        began = time.process_time()
        for _ in range(repeats):
            work()
        measured.append(((time.process_time() - began) / repeats, collector.take() / repeats))
    _, collector_s = min(measured)
    peak = _peak_of(work) if with_memory else -1
    return Cost(kind=kind, size=size, cpu_s=[cpu for cpu, _ in measured], collector_s=collector_s, peak_bytes=peak)


def _peak_of(work: Work) -> int:
    gc.collect()
    tracemalloc.start()
    work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("size", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action="store_true")
    chosen = parser.parse_args()
    print(json.dumps(asdict(cost_of(chosen.kind, chosen.size, rounds=chosen.rounds, with_memory=chosen.memory))))
