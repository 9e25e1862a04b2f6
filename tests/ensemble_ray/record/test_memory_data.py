"""What a definition's data says of memory."""

from __future__ import annotations

from ensemble_ray import Ensemble, EnsembleMemory, InMemoryEntityMemory, MemoryScope, MemoryStore, Task, TaskOutput
from ensemble_ray.plan.planner import plan_run, resolve_tasks
from ensemble_ray.record.identity.definition import definition_data, run_data
from tests.builders import agent, task
from tests.ensemble_ray.memory.test_embeddings import long_term
from tests.ensemble_ray.record.test_definition_data import MODEL


def _data(*tasks: Task, **more: object) -> dict[str, object]:
    ensemble = Ensemble(tasks=tasks, **more)  # type: ignore[arg-type]  its fields
    return definition_data(plan_run(ensemble, resolve_tasks(ensemble)), ensemble)


def _digest(*tasks: Task, **more: object) -> str:
    ensemble = Ensemble(tasks=tasks, **more)  # type: ignore[arg-type]  its fields
    return run_data(plan_run(ensemble, resolve_tasks(ensemble)), ensemble).digest


def _first_words(output: TaskOutput) -> str:
    return output.raw[:10]


def test_the_data_of_a_definition_without_memory_says_nothing_of_it() -> None:
    """S-MEM-113: it is what it was before."""
    assert "memory" not in _data(task("write", agent(MODEL), name="write"))
    assert _data(task("write", agent(MODEL), name="write"))["tasks"] == {}


def test_the_data_has_what_decides_what_a_task_sees() -> None:
    """S-MEM-113: scopes with their limits, kinds of memory, classes of stores, the extractor."""
    scopes = ["notes", MemoryScope(name="last", keep_last_entries=2), MemoryScope(name="new", keep_entries_within=60)]
    memory = EnsembleMemory(
        short_term=True, long_term=long_term(), entity_memory=InMemoryEntityMemory(), extractor=_first_words
    )
    data = _data(
        task("write", agent(MODEL), name="write", memory_scopes=scopes),
        memory=memory,
        memory_store=MemoryStore.in_memory(),
    )
    assert data["tasks"] == {
        "write": {
            "memory_scopes": [
                {"name": "notes"},
                {"name": "last", "keep_last_entries": 2},
                {"name": "new", "keep_entries_within": 60.0},
            ]
        }
    }
    found = data["memory"]
    assert isinstance(found, dict)
    assert found.pop("extractor")
    assert found == {
        "store": "ensemble_ray.InMemoryStore",
        "short_term": True,
        "long_term": "ensemble_ray.EmbeddingStoreLongTermMemory",
        "long_term_max_results": 5,
        "entity_memory": "ensemble_ray.InMemoryEntityMemory",
    }


def test_the_digest_changes_with_memory() -> None:
    """S-MEM-113, S-DUR-36."""
    by = agent(MODEL)
    digests = [
        _digest(task("write", by, name="write")),
        _digest(task("write", by, name="write", memory_scopes="notes")),
        _digest(task("write", by, name="write", memory_scopes="other")),
        _digest(task("write", by, name="write"), memory=EnsembleMemory(short_term=True)),
        _digest(task("write", by, name="write"), memory_store=MemoryStore.in_memory()),
    ]
    assert len(set(digests)) == len(digests)
