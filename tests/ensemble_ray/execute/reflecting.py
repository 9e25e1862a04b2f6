"""Runners of tasks that are reflected on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from msgspec.structs import replace

from ensemble_ray import (
    InMemoryReflectionStore,
    ReflectionStore,
    Task,
    TaskReflectedEvent,
    TaskReflection,
)
from ensemble_ray.execute.memory import LocalRunReflections
from ensemble_ray.execute.orders import RunContext
from ensemble_ray.facts.fact import Fact
from ensemble_ray.testing import RecordingSink, ScriptedModel
from tests.ensemble_ray.execute.running import RUN_CONTEXT, Bench, WatchedJournal, writer

ANSWER = "REFINED_DESCRIPTION:\nBetter\nREFINED_EXPECTED_OUTPUT:\nGood\nOBSERVATIONS:\n- dull\nSUGGESTIONS:\n- cut"
REFLECTED = Task(description="Do draft", expected_output="Prose", reflection_config=True)
KEY = hashlib.sha256(b"Do draft").hexdigest()
NAMES = [
    ("reflection_recalled", "draft#0/0/reflection"),
    ("model", "draft#0/0/model"),
    ("reflection_made", "draft#0/0/reflection"),
    ("reflection_stored", "draft#0/0/reflection"),
    ("output", "draft#0"),
]


class Broken:
    """A store that cannot be used."""

    def __init__(self, *methods: str) -> None:
        self._methods = methods

    def store(self, key: str, reflection: TaskReflection) -> None:
        """Refuse, where it should."""
        if "store" in self._methods:
            raise OSError("no room")

    def retrieve(self, key: str) -> TaskReflection | None:
        """Refuse, where it should."""
        if "retrieve" in self._methods:
            raise OSError("gone")
        return None


def notes(text: str = "Better", run_count: int = 1) -> TaskReflection:
    """A reflection."""
    return TaskReflection(refined_description=text, refined_expected_output="x", run_count=run_count)


def bench(
    *answers: object,
    store: ReflectionStore | None = None,
    known: Sequence[Fact] = (),
    sink: RecordingSink | None = None,
    context: RunContext = RUN_CONTEXT,
    journal: WatchedJournal | None = None,
) -> Bench:
    """A runner of one task that is reflected on by the model that does it."""
    return Bench(
        agents={"draft": writer(ScriptedModel(*(answers or ("Text", ANSWER))))},  # type: ignore[arg-type]  entries
        context=replace(context, has_reflections=True),
        reflections=LocalRunReflections(InMemoryReflectionStore() if store is None else store),
        known=known,
        sink=sink,
        journal=journal,
    )


async def done(made: Bench, task: Task = REFLECTED, **changes: object) -> str:
    """Do the task; its text."""
    result = await made.run(task=task, **changes)
    assert result.status == "completed", result.error
    assert result.output is not None
    return result.output.raw


def events(made: Bench) -> list[TaskReflectedEvent]:
    """Those about reflections."""
    return [event for event in made.sink.events if isinstance(event, TaskReflectedEvent)]
