"""Teams that improve their instructions: what stores hold, what later runs are told, what a resumed run does not ask again."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ensemble_ray import (
    Ensemble,
    Graph,
    GraphEdge,
    InlineRuntime,
    InMemoryReflectionStore,
    Loop,
    MapReduceEnsemble,
    Phase,
    PhaseReview,
    ReflectionConfig,
    ReflectionInput,
    RunState,
    Runtime,
    SqliteReflectionStore,
    TaskReflectedEvent,
    TaskReflection,
    Workflow,
    fork,
    resume,
)
from ensemble_ray.execute.memory import reflection_key
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.testing import ScriptedCall, ScriptedModel, replay
from tests.builders import agent, task
from tests.scenarios.delegating import hand
from tests.scenarios.teams import task_of

REQUEST = "You improve the instructions"


class Watch:
    """What is heard of reflections, by path of the execution."""

    def __init__(self) -> None:
        self.heard: list[TaskReflectedEvent] = []

    def on_task_reflected(self, event: TaskReflectedEvent) -> None:
        """Keep it."""
        self.heard.append(event)

    @property
    def instances(self) -> list[str]:
        """Whose outputs were reflected on, in order."""
        return [event.instance for event in self.heard]


def is_request(asked: ScriptedCall) -> bool:
    """Whether a model is asked to reflect."""
    return (asked.messages[-1].content or "").startswith(REQUEST)


def reflecting(asked: ScriptedCall) -> str:
    """Answer as a model does that does tasks and reflects on them: it learns what it wrote."""
    content = asked.messages[-1].content or ""
    if not content.startswith(REQUEST):
        return f"{task_of(asked)} is done"
    produced = content.partition("## Produced Output\n")[2].partition("\n")[0]
    return f"REFINED_DESCRIPTION:\nBetter than '{produced}'\nSUGGESTIONS:\n- shorter"


def model(count: int = 30) -> ScriptedModel:
    """One that answers so."""
    return ScriptedModel(*[reflecting] * count)


def kept(store: InMemoryReflectionStore | SqliteReflectionStore, description: str) -> TaskReflection:
    """What is known of a task."""
    found = store.retrieve(reflection_key(description))
    assert found is not None, description
    return found


def prompts(of: ScriptedModel, description: str) -> list[str]:
    """The user prompts of a task, in order."""
    return [
        asked.messages[1].content or "" for asked in of.calls if not is_request(asked) and task_of(asked) == description
    ]


def test_the_next_run_does_it_better(runtime: Runtime) -> None:
    """S-REFL-2, S-REFL-4, S-REFL-8, S-REFL-15, S-REFL-31: the user's store and strategy are used, wherever tasks run."""
    store, watch, lock = InMemoryReflectionStore(), Watch(), threading.Lock()
    asked: list[str] = []

    def strategy(given: ReflectionInput) -> TaskReflection:
        with lock:  # which could not travel
            asked.append(f"{given.task.description}: {given.task_output.raw}, {given.prior_reflection is None}")
        return TaskReflection(refined_description="Count to four", refined_expected_output="A number")

    by_model = model()
    by = agent(by_model)
    tasks = [
        task("write of {thing}", by, reflection_config=True),
        task("count", handler=lambda _: "three", reflection_config=ReflectionConfig(strategy=strategy)),
    ]
    team = Ensemble(tasks=tasks, reflection_store=store, listeners=[watch])
    first = team.run({"thing": "tea"}, runtime=runtime)
    assert kept(store, "write of tea").refined_description == "Better than 'write of tea is done'"
    assert asked == ["count: three, True"]
    assert first.metrics.total_llm_call_count == 1  # S-REFL-18
    second = team.run({"thing": "tea"}, runtime=runtime)
    assert (second.raw, asked[1]) == ("three", "count: three, False")
    before, after = prompts(by_model, "write of tea")
    assert before.startswith("## Task\nwrite of tea")
    assert "### Refined Instructions\nBetter than 'write of tea is done'" in after
    assert after.endswith("## Task\nwrite of tea\n\n## Expected Output\na text")
    assert kept(store, "write of tea").run_count == 2
    assert [event.is_first_reflection for event in watch.heard] == [True, True, False, False]
    assert tasks[0].description == "write of {thing}"


def test_units_of_all_kinds_are_reflected_on(inline_runtime: Runtime) -> None:
    """S-REFL-19, S-REFL-17, S-REFL-34: each iteration of a loop, the accepted attempt of a phase and no other."""
    store, watch = InMemoryReflectionStore(), Watch()
    verdicts = iter(["RETRY: more", "APPROVE"])
    by = agent(model())
    drafting = Phase(
        name="draft",
        tasks=[task("write", by, name="write", reflection_config=True)],
        loops=[Loop(name="refine", body=[task("polish", by, name="polish", reflection_config=True)], max_iterations=2)],
        review=PhaseReview.of(task("judge", name="judge", handler=lambda _: next(verdicts))),
    )
    telling = Phase(
        name="tell",
        tasks=[
            task("one", by, name="one", reflection_config=True),
            task("two", by, name="two", reflection_config=True),
        ],
        workflow=Workflow.PARALLEL,
        after=[drafting],
    )
    Ensemble(phases=[drafting, telling], reflection_store=store, listeners=[watch]).run(runtime=inline_runtime)
    accepted, told = watch.instances[:3], watch.instances[3:]
    assert sorted(accepted) == [
        "phase:draft#1/loop:refine#0/polish#0",
        "phase:draft#1/loop:refine#1/polish#0",
        "phase:draft#1/write#0",
    ]
    assert sorted(told) == ["phase:tell#0/one#0", "phase:tell#0/two#0"]
    assert kept(store, "polish").run_count == 2
    assert kept(store, "write").run_count == 1


def test_steps_of_a_graph_are_reflected_on() -> None:
    """S-REFL-19: each visit of a state."""
    store, watch = InMemoryReflectionStore(), Watch()
    by = agent(model())
    states = {"a": task("ask", by, reflection_config=True), "b": task("end", by)}
    graph = Graph(
        name="triage",
        states=states,
        start="a",
        edges=[GraphEdge(from_state="a", to_state="b"), GraphEdge(from_state="b", to_state=Graph.END)],
    )
    Ensemble(graph=graph, reflection_store=store, listeners=[watch]).run(runtime="inline")
    assert len(watch.instances) == 1
    assert watch.instances[0].startswith("graph:triage#0/")


def test_a_rejected_attempt_teaches_nothing() -> None:
    """S-REFL-19: of a phase whose review rejects it no output was accepted."""
    store = InMemoryReflectionStore()
    by = agent(model())
    phase = Phase(
        name="draft",
        tasks=[task("write", by, reflection_config=True)],
        review=PhaseReview.of(task("judge", handler=lambda _: "REJECT: bad")),
    )
    with pytest.raises(Exception, match="bad"):
        Ensemble(phases=[phase], reflection_store=store).run(runtime="inline")
    assert store.retrieve(reflection_key("write")) is None


def test_parallel_tasks_are_reflected_on_by_themselves() -> None:
    """S-REFL-17: nothing of one comes to another."""
    store = InMemoryReflectionStore()
    by = agent(model(60))
    leaves = [task(f"leaf {number}", by, reflection_config=True) for number in range(12)]
    Ensemble(tasks=[*leaves, task("last", by, context=leaves)], workflow="parallel", reflection_store=store).run(
        runtime="inline"
    )
    for number in range(12):
        assert kept(store, f"leaf {number}").refined_description == f"Better than 'leaf {number} is done'"


def test_a_task_that_hands_work_on_is_reflected_on_and_the_work_is_not() -> None:
    """S-REFL-36: handed work is no task that anybody declared."""
    store, watch = InMemoryReflectionStore(), Watch()
    lead = ScriptedModel(hand("Digger", "dig"), "gold", reflecting)
    leader = agent(lead, "Lead", allow_delegation=True)
    digger = agent(ScriptedModel("found"), "Digger")
    Ensemble(
        tasks=[task("get rich", leader, name="rich", reflection_config=True)],
        agents=[leader, digger],
        reflection_store=store,
        listeners=[watch],
    ).run(runtime="inline")
    assert watch.instances == ["rich#0"]
    assert kept(store, "get rich").refined_description == "Better than 'gold'"


def test_a_managers_tasks_are_not_reflected_on(caplog: pytest.LogCaptureFixture) -> None:
    """S-REFL-36: which is said before the run."""
    worker = agent(ScriptedModel("gold"), "Digger")
    team = Ensemble(
        tasks=[task("get rich", worker, reflection_config=True)],
        agents=[worker],
        workflow=Workflow.HIERARCHICAL,
        manager_llm=ScriptedModel(hand("Digger", "dig"), "All done"),
    )
    assert team.run(runtime="inline").raw == "All done"
    assert [line for line in caplog.messages if "reflection_config without effect" in line]


def _mapped(store: InMemoryReflectionStore | None) -> MapReduceEnsemble:
    by = agent(ScriptedModel("a is done", "b is done", "all is done"))
    reflector = model()
    return MapReduceEnsemble(
        items=iter(["a", "b"]),
        map_task=lambda item: task(f"map {item}", llm=by.llm, reflection_config=ReflectionConfig(model=reflector)),
        reduce_task=lambda chunk: task("reduce", by, context=chunk),
        max_parallel_tasks=1,
        reflection_store=store,
    )


def test_tasks_of_a_map_reduce_are_reflected_on(runtime: Runtime) -> None:
    """S-REFL-36: those that are made while it runs, where a store is given."""
    store = InMemoryReflectionStore()
    _mapped(store).run(runtime=runtime)
    assert kept(store, "map b").refined_description == "Better than 'b is done'"


def test_tasks_of_a_map_reduce_without_a_store_are_not_reflected_on(caplog: pytest.LogCaptureFixture) -> None:
    """S-REFL-36: which a warning says."""
    _mapped(None).run(runtime="inline")
    assert [line for line in caplog.messages if "its run has no reflection_store" in line]


def test_a_static_map_reduce_has_a_store_of_its_own() -> None:
    """S-REFL-6, S-REFL-36: across its runs, like any ensemble."""
    by_model = model()
    by = agent(by_model)
    team = MapReduceEnsemble(
        items=["a"],
        map_task=lambda item: task(f"map {item}", by, reflection_config=True),
        reduce_task=lambda chunk: task("reduce", by, context=chunk),
    )
    for _ in range(2):
        team.run(runtime="inline")
    assert "### Refined Instructions" in prompts(by_model, "map a")[1]


def test_an_ensemble_without_a_store_learns_as_long_as_it_lives() -> None:
    """S-REFL-6: from run to run of the same object."""
    by_model = model()
    team = Ensemble(tasks=[task("write", agent(by_model), reflection_config=True)])
    for _ in range(2):
        team.run(runtime="inline")
    assert "### Refined Instructions" in prompts(by_model, "write")[1]


# Runs that go on.


def _cut(home: Path, facts: list[Fact], run_id: str) -> None:
    """Write a record that ends earlier, as if the process had died there."""

    async def write() -> None:
        owned = await SqliteStore(home).begin(run_id)
        copies = [read_fact(run=run_id, kind=f.kind, name=f.name, at=f.at, data=f.data.to_data()) for f in facts]
        await owned.journal.append(copies)
        await owned.close(RunState.INTERRUPTED)

    run_blocking(write())


def _phased(store: InMemoryReflectionStore, by_model: ScriptedModel) -> Ensemble:
    by = agent(by_model)
    phase = Phase(
        name="draft",
        tasks=[task("write", by, name="write", reflection_config=True)],
        review=PhaseReview.of(task("judge", name="judge", handler=lambda _: "APPROVE", effect="none")),
    )
    rest = Phase(
        name="rest",
        tasks=[task("end", by, name="end", reflection_config=True)],
        loops=[Loop(name="again", body=[task("polish", by, name="polish", reflection_config=True)], max_iterations=2)],
        after=[phase],
    )
    return Ensemble(phases=[phase, rest], reflection_store=store)


def test_a_run_that_goes_on_reflects_on_nothing_twice(tmp_path: Path) -> None:
    """S-REFL-32, S-REFL-33, S-REFL-2: wherever its process died; and it sees what it saw before."""
    runtime = InlineRuntime(home=tmp_path)
    before = TaskReflection(refined_description="Old", refined_expected_output="x")
    _phased(InMemoryReflectionStore(), model()).run(runtime=runtime, run_id="warm")
    first_store, first_model = InMemoryReflectionStore(), model()
    first_store.store(reflection_key("polish"), before)
    _phased(first_store, first_model).run(runtime=runtime, run_id="whole")
    facts = list(run_blocking(SqliteStore(tmp_path).facts("whole")))
    for cut in range(2, len(facts) - 1):
        done, run_id = facts[:cut], f"cut-{cut}"
        _cut(tmp_path, done, run_id)
        store, by_model = InMemoryReflectionStore(), model()
        store.store(reflection_key("polish"), before)
        made = {fact.name: fact.data.to_data() for fact in done if fact.kind == "reflection_made"}
        for fact in done:
            if fact.kind == "reflection_stored":  # what an earlier process stored
                data = made[fact.name]
                store.store(str(data["key"]), TaskReflection(**data["reflection"]))  # type: ignore[arg-type]  its fields
        output = resume(run_id, _phased(store, by_model), runtime=runtime)
        assert output.raw == "polish is done"
        requests = [asked for asked in by_model.calls if is_request(asked)]
        assert len(requests) == 4 - len(made), cut
        assert kept(store, "polish").run_count == 3, cut
        assert (kept(store, "write").run_count, kept(store, "end").run_count) == (1, 1), cut
        for prompt in prompts(by_model, "polish"):
            assert "### Refined Instructions\nOld" in prompt, cut


def test_a_recorded_run_can_be_replayed_and_forked(tmp_path: Path) -> None:
    """S-REFL-39, S-REFL-35: nothing is asked, read or stored; a fork tells its tasks what they were told."""
    runtime = InlineRuntime(home=tmp_path)
    store = InMemoryReflectionStore()
    store.store(
        reflection_key("a"), TaskReflection(refined_description="Old", refined_expected_output="x", run_count=7)
    )

    def team(by_model: ScriptedModel) -> Ensemble:
        by = agent(by_model)
        return Ensemble(
            tasks=[task(name, by, name=name, reflection_config=True) for name in "ab"], reflection_store=store
        )

    team(model()).run(runtime=runtime, run_id="one")
    learned = kept(store, "a")
    assert replay("one", team(ScriptedModel()), home=tmp_path).is_same
    assert kept(store, "a") == learned
    again = model()
    fork("one", "b", team(again), runtime=runtime)
    assert prompts(again, "a") == []
    assert kept(store, "a") == learned
    assert kept(store, "b").run_count == 2
