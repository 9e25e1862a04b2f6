"""Memory modes of loops: what happens to the scopes of a body between its iterations."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ensemble_ray import Ensemble, Loop, LoopIterationContext, MemoryStore, Runtime, Task, TaskHandlerContext
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, task
from tests.ensemble_ray.memory.test_run_memory import Refusing
from tests.scenarios.teams import by_task, prompt_of, task_of

#: A scope that the loops' bodies do not name.
OUTSIDE = "outside"


class Broken(Refusing):
    """A store whose clearing fails of itself."""

    def clear(self, scope: str) -> None:
        """Fail."""
        raise OSError(f"no such disk: {scope}")


def numbered(name: str) -> Callable[[TaskHandlerContext], str]:
    """A handler that counts its calls."""
    calls: list[str] = []

    def work(_: TaskHandlerContext) -> str:
        calls.append(name)
        return f"{name} {len(calls)}"

    return work


def writing(name: str, scopes: str | list[str]) -> Task:
    """A task that stores what it gives."""
    return task(f"do {name}", name=name, handler=numbered(name), memory_scopes=scopes)


def contents(store: MemoryStore, scope: str) -> list[str]:
    """What is in a scope, oldest first."""
    return [entry.content for entry in store.retrieve(scope, "", 99)]


def test_each_mode_does_to_the_scopes_of_its_body_what_it_says(runtime: Runtime) -> None:
    """S-LOOP-90, S-LOOP-91, S-LOOP-93, S-LOOP-95: in the caller's own store, wherever the tasks run."""
    store = MemoryStore.in_memory()
    model = ScriptedModel(*[by_task(read="a", think="b")] * 6)
    thinker = agent(model)
    body = [
        task("read", thinker, memory_scopes="window"),
        task("think", thinker, memory_scopes=["window", "second"]),
    ]
    loops = [
        Loop(name="keeping", body=[writing("keep", "kept")], max_iterations=3),
        Loop(name="clearing", body=[writing("clear", "cleared")], max_iterations=3, memory_mode="fresh_per_iteration"),
        Loop(name="cutting", body=body, max_iterations=3, memory_mode="window", memory_window_size=1),
    ]
    before = [writing("early", ["cleared", "window", OUTSIDE])]
    output = Ensemble(tasks=before, loops=loops, memory_store=store).run(runtime=runtime)
    assert [len(output.get_loop_history(loop.name)) for loop in loops] == [3, 3, 3]
    assert contents(store, "kept") == ["keep 1", "keep 2", "keep 3"]
    assert contents(store, "cleared") == ["clear 3"]  # never after the last, and the entry from before is gone
    assert contents(store, OUTSIDE) == ["early 1"]
    assert contents(store, "window") == ["b", "a", "b"]  # one entry was left of the second iteration
    assert contents(store, "second") == ["b", "b"]
    first, second, third = (prompt_of(asked) for asked in model.calls if task_of(asked) == "read")
    assert "early 1" in first  # nothing is done before the first iteration
    assert "early 1" not in second
    assert second.count("---\nb\n---") == third.count("---\nb\n---") == 1


def stop(_: LoopIterationContext) -> bool:
    """Stop after the first iteration."""
    return True


def test_a_store_that_cannot_clear_ends_the_run_at_the_second_iteration(inline_runtime: Runtime) -> None:
    """S-LOOP-92: not where the loop stops after its first; S-LOOP-93: a window is as good as none there."""
    refusing = Refusing(is_open=True)
    body = writing("write", "notes")
    cutting = Loop(name="cutting", body=[body], max_iterations=2, memory_mode="window", memory_window_size=1)
    once = Loop(name="once", body=[writing("other", "notes")], until=stop, memory_mode="fresh_per_iteration")
    fresh = Loop(name="refine", body=[writing("third", "notes")], max_iterations=2, memory_mode="fresh_per_iteration")
    team = Ensemble(loops=[cutting, once, fresh], memory_store=refusing)  # type: ignore[arg-type]  by its shape
    with pytest.raises(NotImplementedError) as caught:
        team.run(runtime=inline_runtime)
    assert str(caught.value).startswith(
        "Loop 'refine' has memory_mode=fresh_per_iteration but the configured MemoryStore (Refusing) does not support "
        "per-scope clear for scope 'notes'. Refusing keeps everything"
    )
    assert "accumulate" in str(caught.value)
    assert "MemoryStore.in_memory()" in str(caught.value)


def test_what_a_store_raises_ends_the_run(runtime: Runtime) -> None:
    """S-LOOP-187: any other error of the store's leaves the run as it is."""
    fresh = Loop(name="refine", body=[writing("write", "notes")], max_iterations=2, memory_mode="fresh_per_iteration")
    with pytest.raises(OSError, match="no such disk: notes"):
        Ensemble(loops=[fresh], memory_store=Broken(is_open=True)).run(runtime=runtime)  # type: ignore[arg-type]  by its shape


def test_modes_do_nothing_where_there_is_nothing_to_do(inline_runtime: Runtime) -> None:
    """S-LOOP-94: no store, or no scope in the body."""
    scoped = Loop(name="scoped", body=[writing("a", "notes")], max_iterations=2, memory_mode="fresh_per_iteration")
    assert Ensemble(loops=[scoped]).run(runtime=inline_runtime).raw == "a 2"
    store = MemoryStore.in_memory()
    plain = task("plain", name="plain", handler=numbered("b"))
    bare = Loop(name="bare", body=[plain], max_iterations=2, memory_mode="window", memory_window_size=1)
    early = [writing("c", "notes"), writing("d", "notes")]
    assert Ensemble(tasks=early, loops=[bare], memory_store=store).run(runtime=inline_runtime).raw == "b 2"
    assert contents(store, "notes") == ["c 1", "d 1"]
