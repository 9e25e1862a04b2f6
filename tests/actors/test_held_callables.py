"""Callables of a run on their way to their host: packed, held, loaded, forgotten."""

from __future__ import annotations

import pytest

from ensemble_ray import GuardrailResult, Task, ValidationError
from ensemble_ray.actors.driver.packing import pack_callables
from ensemble_ray.actors.link.wire import CallableRef, CallablesUpdate, TaskCallables
from ensemble_ray.actors.worker.callable_host import HeldCallables


class Memory:
    """Handler, guardrail and policy of one run, which share what they know."""

    def __call__(self, given: object) -> str:
        return str(given)

    def check(self, given: object) -> GuardrailResult:
        del given
        return GuardrailResult.success()


def test_what_callables_of_a_plan_share_stays_shared() -> None:
    """S-SET-31: they travel in one bundle; a task without any is not in it."""
    memory = Memory()
    tasks = {
        "a": Task(description="a", expected_output="text", handler=memory),
        "b": Task(description="b", expected_output="text", output_guardrails=[memory.check]),
        "c": Task(description="c", expected_output="text"),
    }
    update = pack_callables(tasks, [memory])
    assert update is not None
    held = HeldCallables()
    held.update(update)
    assert set(held) == {"a", "b"}
    handler, guardrail = held["a"].handler, held["b"].output_guardrails[0]
    assert guardrail.__self__ is handler  # type: ignore[attr-defined]  a bound method
    assert [held.load(ref) for ref in update.policies] == [handler]
    assert handler is not memory


def test_plan_without_callables_has_no_bundle() -> None:
    """S-SET-31: no process is started for it."""
    assert pack_callables({"c": Task(description="c", expected_output="text")}, ()) is None


def test_bundle_is_loaded_once_and_forgotten_when_it_is_needed_no_longer() -> None:
    """S-MR-142: tasks that share a callable share the object; the next bundle of that name is another."""
    update = pack_callables({"a": Task(description="a", expected_output="text", handler=Memory())}, ())
    assert update is not None
    (body,) = update.bundles.values()
    asked = TaskCallables(handler=CallableRef("one", 0))
    held = HeldCallables()
    held.update(CallablesUpdate(bundles={"one": body}, tasks={"a": asked, "b": asked}))
    assert held["a"].handler is held["b"].handler
    first = held["a"].handler
    held.update(CallablesUpdate(bundles={"one": body}, tasks={}, done_tasks=["b"], done_bundles=["one"]))
    assert set(held) == {"a"}
    assert held["a"].handler is not first


def test_callable_that_cannot_be_loaded_is_told_when_it_is_asked() -> None:
    """S-CONV-34, S-MR-106: its own task fails, and no other."""
    held = HeldCallables()
    held.update(CallablesUpdate(bundles={"bad": b"no pickle"}, tasks={"a": TaskCallables(handler=CallableRef("bad"))}))
    with pytest.raises(ValidationError, match="A handler or guardrail cannot be loaded in a worker process"):
        _ = held["a"]
