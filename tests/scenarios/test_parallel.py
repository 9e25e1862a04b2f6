"""Parallel runs: what overlaps, what waits, what a failure does to the others."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from ensemble_ray import (
    AgentExecutionError,
    Ensemble,
    GuardrailInput,
    GuardrailResult,
    GuardrailViolationError,
    OutputParsingError,
    ParallelErrorStrategy,
    ParallelExecutionError,
    Runtime,
    Task,
    TaskExecutionError,
    TaskStartEvent,
)
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import agent, task
from tests.scenarios.teams import PATIENCE_S, Watcher, by_task, prompt_of, task_of, wait_for

PARALLEL = "parallel"


@dataclass
class City:
    name: str


def team(model: ScriptedModel, *edges: str, **fields: object) -> dict[str, Task]:
    """Tasks of one worker, from `name` or `name<dependency,dependency`."""
    worker = agent(model, "Worker")
    tasks: dict[str, Task] = {}
    for edge in edges:
        name, _, needs = edge.partition("<")
        context = [tasks[need] for need in needs.split(",") if need]
        tasks[name] = task(name, worker, context=context, **fields)
    return tasks


def test_roots_overlap_in_time(inline_runtime: Runtime) -> None:
    """S-PAR-10: three roots meet at a barrier, which one after the other could never do."""
    barrier = threading.Barrier(3)

    def meet(asked: ScriptedCall) -> str:
        barrier.wait(PATIENCE_S)
        return f"met {task_of(asked)}"

    tasks = team(ScriptedModel(otherwise=meet), "a", "b", "c")
    output = Ensemble(tasks=list(tasks.values()), workflow=PARALLEL).run(runtime=inline_runtime)
    assert sorted(each.raw for each in output.task_outputs) == ["met a", "met b", "met c"]


def test_a_slow_branch_does_not_delay_another(inline_runtime: Runtime) -> None:
    """S-PAR-11: in a -> c, b -> d, c runs while b does."""
    c_ran = threading.Event()

    def c(_asked: ScriptedCall) -> str:
        c_ran.set()
        return "c"

    def b(_asked: ScriptedCall) -> str:
        wait_for(c_ran)
        return "b"

    model = ScriptedModel(otherwise=by_task(a="a", b=b, c=c, d="d"))
    tasks = team(model, "a", "b", "c<a", "d<b")
    output = Ensemble(tasks=list(tasks.values()), workflow=PARALLEL).run(runtime=inline_runtime)
    order = [each.raw for each in output.task_outputs]  # b goes on as soon as c runs, so either may be told first
    assert sorted(order) == ["a", "b", "c", "d"]
    assert order.index("a") < order.index("c")
    assert order.index("b") < order.index("d")


def test_outputs_are_in_completion_order_and_context_in_its_own(runtime: Runtime) -> None:
    """S-PAR-12, S-PAR-13, S-PAR-14, S-PAR-41: b is done before a; the join runs once and gets a before b."""
    b_done = threading.Event()

    def a(_asked: ScriptedCall) -> str:
        wait_for(b_done)
        return "text a"

    model = ScriptedModel(otherwise=by_task(root="text root", a=a, b="text b", join="text join"))
    tasks = team(model, "root", "a<root", "b<root", "join<a,b")
    watcher = Watcher()

    def note(event: object) -> None:
        if event.task_description == "b":  # type: ignore[attr-defined]
            b_done.set()

    output = Ensemble(
        tasks=[tasks[name] for name in ("join", "b", "a", "root")],
        workflow=PARALLEL,
        listeners=[watcher],
        on_task_complete=note,
    ).run(runtime=runtime)
    assert [each.task_description for each in output.task_outputs] == ["root", "b", "a", "join"]
    assert output.raw == "text join"
    found = output.get_output(tasks["a"])
    assert found is not None
    assert found.raw == "text a"
    (joined,) = [prompt_of(asked) for asked in model.calls if task_of(asked) == "join"]
    assert 0 < joined.index("text a") < joined.index("text b")
    lines = watcher.lines
    assert sorted(lines) == sorted(f"{what} {name}" for what in ("start", "complete") for name in tasks)
    for name, needs in (("a", ["root"]), ("b", ["root"]), ("join", ["a", "b"])):
        for need in needs:
            assert lines.index(f"complete {need}") < lines.index(f"start {name}")


def test_task_index_is_the_place_in_the_list(inline_runtime: Runtime) -> None:
    """S-PAR-15, S-EVT-12, S-EVT-32: also where the list is not in the order of running."""
    tasks = team(ScriptedModel(otherwise="x"), "a", "b<a", "c<b")
    watcher = Watcher()
    Ensemble(tasks=[tasks["c"], tasks["a"], tasks["b"]], workflow=PARALLEL, listeners=[watcher]).run(
        runtime=inline_runtime
    )
    starts = watcher.of(TaskStartEvent)
    assert [(each.task_description, each.task_index, each.total_tasks, each.agent_role) for each in starts] == [
        ("a", 2, 3, "Worker"),
        ("b", 3, 3, "Worker"),
        ("c", 1, 3, "Worker"),
    ]


def test_context_outside_the_plan_is_left_out(inline_runtime: Runtime) -> None:
    """S-PAR-13, S-PAR-2: its dependent is a root."""
    model = ScriptedModel("in", "end")
    worker = agent(model)
    outside, inside = task("outside", worker), task("inside", worker)
    Ensemble(tasks=[task("last", worker, context=[outside, inside]), inside], workflow=PARALLEL).run(
        runtime=inline_runtime
    )
    assert task_of(model.calls[0]) == "inside"
    assert "### Writer: inside\nin" in prompt_of(model.calls[1])
    assert "outside" not in prompt_of(model.calls[1])


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_no_more_tasks_run_than_the_cap_allows(inline_runtime: Runtime, cap: int) -> None:
    """S-PAR-17: the cap is reached and never passed; the run finishes."""
    running, most, lock = 0, 0, threading.Lock()
    full = threading.Barrier(cap)

    def work(_asked: ScriptedCall) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        full.wait(PATIENCE_S)  # everybody who may run is here
        with lock:
            running -= 1
        return "x"

    tasks = team(ScriptedModel(otherwise=work), *(f"t{n}" for n in range(2 * cap)))
    output = Ensemble(tasks=list(tasks.values()), workflow=PARALLEL, max_parallel_tasks=cap).run(runtime=inline_runtime)
    assert most == cap
    assert len(output.task_outputs) == 2 * cap


def test_queued_tasks_start_in_list_order_under_a_cap(inline_runtime: Runtime) -> None:
    """S-PAR-17, S-PAR-2: one at a time, first come first served."""
    tasks = team(ScriptedModel(otherwise="x"), *(f"t{n}" for n in range(5)))
    output = Ensemble(tasks=list(tasks.values()), workflow=PARALLEL, max_parallel_tasks=1).run(runtime=inline_runtime)
    assert [each.task_description for each in output.task_outputs] == [f"t{n}" for n in range(5)]


def test_concurrent_runs_of_one_ensemble_share_nothing(runtime: Runtime) -> None:
    """S-PAR-18, S-CONV-37, S-DOM-12: they meet inside their models, each sees its own context."""
    meeting = threading.Barrier(3)

    def research(asked: ScriptedCall) -> str:
        meeting.wait(PATIENCE_S)
        return f"facts: {task_of(asked)}"

    def reply(asked: ScriptedCall) -> object:
        return research(asked) if "research" in task_of(asked) else prompt_of(asked)

    model = ScriptedModel(otherwise=reply)
    worker = agent(model)
    facts = task("research {x}", worker)
    ensemble = Ensemble(tasks=[facts, task("write {x}", worker, context=[facts])], workflow=PARALLEL)
    with ThreadPoolExecutor(3) as pool:
        outputs = list(pool.map(lambda x: ensemble.run({"x": x}, runtime=runtime), ["bees", "ants", "owls"]))
    for topic, output in zip(("bees", "ants", "owls"), outputs, strict=True):
        assert f"facts: research {topic}" in output.raw
        assert sum(name in output.raw for name in ("bees", "ants", "owls")) == 1
    assert len({output.run_id for output in outputs}) == 3


async def test_concurrent_aruns_work_on_one_loop(inline_runtime: Runtime) -> None:
    """S-PAR-18, S-CONV-15."""
    ensemble = Ensemble(tasks=[task("write {x}", agent(ScriptedModel(otherwise=task_of)))])
    outputs = await asyncio.gather(*(ensemble.arun({"x": n}, runtime=inline_runtime) for n in range(3)))
    assert [output.raw for output in outputs] == [f"write {n}" for n in range(3)]


def failing(error: object, after: threading.Event) -> Callable[[ScriptedCall], object]:
    """An answer that fails, after something happened."""

    def fail(_asked: ScriptedCall) -> object:
        wait_for(after)
        return error

    return fail


def test_fail_fast_starts_nothing_more_and_lets_running_tasks_finish(runtime: Runtime) -> None:
    """S-PAR-20, S-PAR-21, S-PAR-22: dependents, other branches and queued roots do not start."""
    failed, slow_began = threading.Event(), threading.Event()

    def slow(_asked: ScriptedCall) -> str:
        slow_began.set()
        wait_for(failed)
        return "slow"

    model = ScriptedModel(otherwise=by_task(quick="quick", bad=failing(ValueError("boom"), slow_began), slow=slow))
    tasks = team(model, "quick", "bad", "slow", "queued", "after bad<bad", "after slow<slow")
    watcher = Watcher()
    ensemble = Ensemble(
        tasks=list(tasks.values()),
        workflow=PARALLEL,
        max_parallel_tasks=2,
        listeners=[watcher],
        on_task_failed=lambda _event: failed.set(),
    )
    with pytest.raises(TaskExecutionError) as caught:
        ensemble.run(runtime=runtime)
    error = caught.value
    assert str(error) == "Task 'bad' failed: Agent 'Worker': boom (ValueError)"
    assert isinstance(error.__cause__, AgentExecutionError)
    assert [each.raw for each in error.completed_task_outputs] == ["quick"]
    assert sorted(task_of(asked) for asked in model.calls) == ["bad", "quick", "slow"]
    assert watcher.lines[-1] == "complete slow"
    assert len(watcher.lines) == 6


def test_second_failure_is_announced_and_does_not_replace_the_first(inline_runtime: Runtime) -> None:
    """S-PAR-23."""
    first_failed, second_began = threading.Event(), threading.Event()

    def second(asked: ScriptedCall) -> object:
        second_began.set()
        return failing(ValueError("two"), first_failed)(asked)

    model = ScriptedModel(otherwise=by_task(first=failing(ValueError("one"), second_began), second=second))
    watcher = Watcher()
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(
            tasks=list(team(model, "first", "second").values()),
            workflow=PARALLEL,
            listeners=[watcher],
            on_task_failed=lambda _event: first_failed.set(),
        ).run(runtime=inline_runtime)
    assert str(caught.value) == "Task 'first' failed: Agent 'Worker': one (ValueError)"
    assert [line for line in watcher.lines if "failed" in line] == ["failed first", "failed second"]
    assert caught.value.trace is not None
    assert [each.message.rpartition(": ")[2] for each in caught.value.trace.errors] == [
        "one (ValueError)",
        "two (ValueError)",
    ]


def refuse(_asked: GuardrailInput) -> GuardrailResult:
    """An input guardrail that says no."""
    return GuardrailResult.failure("not today")


def test_continue_on_error_finishes_what_does_not_depend_on_a_failure(runtime: Runtime) -> None:
    """S-PAR-24, S-PAR-25, S-PAR-26, S-PAR-27, S-PAR-28, S-ERR-13, S-OUT-34, S-GRD-8: causes unwrapped, skipped in neither."""
    model = ScriptedModel(
        otherwise=lambda asked: ValueError("boom") if task_of(asked) == "bad" else f"did {task_of(asked)}"
    )
    worker = agent(model, "Worker")
    bad, twin = task("bad", worker), task("bad", worker)
    guarded = task("guarded", worker, input_guardrails=[refuse])
    typed = task("typed", worker, output_type=City, max_output_retries=0)
    good = task("good", worker)
    next_good = task("next", worker, context=[good])
    skipped = task("skipped", worker, context=[good, bad])
    skipped_too = task("skipped too", worker, context=[skipped])
    watcher = Watcher()
    with pytest.raises(ParallelExecutionError) as caught:
        Ensemble(
            tasks=[bad, twin, guarded, typed, good, next_good, skipped, skipped_too],
            workflow=PARALLEL,
            parallel_error_strategy=ParallelErrorStrategy.CONTINUE_ON_ERROR,
            listeners=[watcher],
        ).run(runtime=runtime)
    error = caught.value
    head, first, second, third, more = re.split(r"(?:: |; )(?='|and )", str(error), maxsplit=4)
    assert (head, more) == ("4 of 8 tasks failed", "and 1 more")
    assert {first, second, third} < {
        "'bad': Agent 'Worker': boom (ValueError)",
        "'bad #2': Agent 'Worker': boom (ValueError)",
        "'guarded': INPUT guardrail violation on agent 'Worker' task 'guarded': not today (GuardrailViolationError)",
        (
            "'typed': Structured output parsing failed for task 'typed' after 1 attempt(s). Expected type: City. "
            "Could not find valid JSON in response: did typed (OutputParsingError)"
        ),
    }
    assert (error.failed_count, error.completed_count) == (4, 2)
    assert [each.raw for each in error.completed_task_outputs] == ["did good", "did next"]
    causes = {name: type(cause) for name, cause in error.failed_task_causes.items()}
    assert causes == {
        "bad": AgentExecutionError,
        "bad #2": AgentExecutionError,
        "guarded": GuardrailViolationError,
        "typed": OutputParsingError,
    }
    assert isinstance(error.failed_task_causes["bad"].__cause__, ValueError)
    asked = {task_of(asked) for asked in model.calls}
    assert asked == {"bad", "typed", "good", "next"}
    assert not [line for line in watcher.lines if "skipped" in line]
    assert error.trace is not None
    assert len(error.trace.errors) == 4


@pytest.mark.parametrize("strategy", list(ParallelErrorStrategy))
def test_both_strategies_give_an_output_when_nothing_fails(
    inline_runtime: Runtime, strategy: ParallelErrorStrategy
) -> None:
    """S-PAR-29."""
    tasks = team(ScriptedModel(otherwise=task_of), "a", "b<a")
    output = Ensemble(tasks=list(tasks.values()), workflow=PARALLEL, parallel_error_strategy=strategy).run(
        runtime=inline_runtime
    )
    assert [each.raw for each in output.task_outputs] == ["a", "b"]
    assert output.is_complete


def test_workflow_is_inferred_when_none_is_chosen(inline_runtime: Runtime) -> None:
    """S-DET-40, S-DET-42: a context task listed later makes it parallel."""
    model = ScriptedModel("one", "two")
    tasks = team(model, "a", "b<a")
    output = Ensemble(tasks=[tasks["b"], tasks["a"]], workflow=None).run(runtime=inline_runtime)
    assert [task_of(asked) for asked in model.calls] == ["a", "b"]
    assert output.raw == "two"


def test_a_wide_graph_runs_every_task_once(runtime: Runtime) -> None:
    """S-PAR-12, S-PAR-14, S-MET-24: many tasks at once; totals lose nothing."""
    from tests.builders import answer

    model = ScriptedModel(otherwise=lambda asked: answer(task_of(asked), 2, 1))
    leaves = [f"t{n}" for n in range(60)]
    tasks = team(model, *leaves, "join<" + ",".join(leaves))
    output = Ensemble(tasks=list(tasks.values()), workflow=PARALLEL).run(runtime=runtime)
    assert sorted(task_of(asked) for asked in model.calls) == sorted(tasks)
    assert output.raw == "join"
    assert (output.metrics.total_input_tokens, output.metrics.total_output_tokens) == (122, 61)
    assert output.metrics.total_llm_call_count == 61
    places = [prompt_of(model.calls[-1]).index(f"### Worker: {name}\n") for name in leaves]
    assert places == sorted(places)


def test_an_agent_takes_no_more_tasks_than_it_allows(runtime: Runtime) -> None:
    """S-SET-41: `Agent.max_concurrency`."""
    running, most, lock = 0, 0, threading.Lock()
    full = threading.Barrier(2)

    def work(_asked: ScriptedCall) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        full.wait(PATIENCE_S)
        with lock:
            running -= 1
        return "x"

    worker = agent(ScriptedModel(otherwise=work), max_concurrency=2)
    tasks = [task(f"t{n}", worker) for n in range(6)]
    Ensemble(tasks=tasks, workflow=PARALLEL).run(runtime=runtime)
    assert most == 2
