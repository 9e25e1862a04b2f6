"""What a model call leaves in the record, and when it is safe there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from pydantic import BaseModel

from ensemble_ray import ChatMessage, Effect, RetryPolicy, Task
from ensemble_ray.facts.fact import Fact
from ensemble_ray.ports import Persistence
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.testing import ScriptedModel
from tests.ensemble_ray.execute.running import RUN_CONTEXT, Bench, Search, call, searching, writer


class City(BaseModel):
    """An answer's type."""

    city: str


class WatchedJournal(MemoryJournal):
    """Keeps how safe each append had to be."""

    def __init__(self, run_id: str = "run") -> None:
        super().__init__(run_id)
        self.appends: list[tuple[tuple[str, ...], Persistence]] = []

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED) -> None:
        self.appends.append((tuple(fact.name for fact in facts), until))
        await super().append(facts, epoch=epoch, until=until)

    def waits_of(self, name: str) -> list[Persistence]:
        """How the facts of that name were appended."""
        return [until for names, until in self.appends if name in names]


async def test_an_answer_waits_for_nothing_when_the_task_ends_with_it() -> None:
    """S-DUR-2: the task's own output is committed, and the answer with it: one commit."""
    journal = WatchedJournal()
    await Bench(agents={"draft": writer(ScriptedModel("Done"))}, journal=journal).run()
    assert journal.waits_of("draft#0/0/model") == [Persistence.SOON]
    assert journal.waits_of("draft#0") == [Persistence.COMMITTED]


async def test_an_answer_waits_for_nothing_when_a_correction_may_follow() -> None:
    """S-DUR-2: the next request may leave while the answer is being committed."""
    journal = WatchedJournal()
    model = ScriptedModel("no JSON", '{"city": "Bern"}')
    bench = Bench(agents={"draft": writer(model)}, journal=journal)
    bench.tasks["draft"] = Task(description="Do draft", expected_output="A city", output_type=City)
    assert (await bench.run()).status == "completed"
    assert journal.waits_of("draft#0/0/model") == [Persistence.SOON]
    assert journal.waits_of("draft#0/1/model") == [Persistence.SOON]


async def test_nothing_is_waited_for_when_no_tool_of_an_answer_was_called() -> None:
    """S-DUR-2: an unknown tool leaves no fact; the answer is committed soon all the same."""
    journal = WatchedJournal()
    model = ScriptedModel(call("nonsense"), "Done")
    await Bench(agents={"draft": writer(model, tools=[Search()])}, journal=journal).run()
    assert journal.waits_of("draft#0/0/model") == [Persistence.SOON]
    assert ((), Persistence.COMMITTED) not in journal.appends


@pytest.mark.parametrize("effect", ["none", "once"])
async def test_output_waits_as_its_run_says_unless_the_task_had_an_effect(effect: Effect) -> None:
    """S-DUR-2: where all facts of a run are in one queue, the next request may leave before they are committed."""
    journal = WatchedJournal()
    _, model = searching(Search())
    bench = Bench(agents={"draft": writer(model, tools=[Search(effect)])}, journal=journal)
    bench.runner.ports = replace(bench.runner.ports, report_after=Persistence.SOON)
    await bench.run()
    assert journal.waits_of("draft#0") == [Persistence.SOON if effect == "none" else Persistence.COMMITTED]


async def test_nothing_more_is_waited_for_when_a_tool_was_called() -> None:
    """S-DUR-2: its result was committed, and the answer before it."""
    journal = WatchedJournal()
    bench, model = searching(Search())
    bench = Bench(agents={"draft": writer(model, tools=[Search()])}, journal=journal)
    await bench.run()
    assert ((), Persistence.COMMITTED) not in journal.appends
    assert journal.waits_of("draft#0/0/call-0")[-1] is Persistence.COMMITTED


async def resumed(entries: Sequence[object], **fields: object) -> tuple[Bench, Bench, list[tuple[object, ...]]]:
    """A task that ended, and one that goes on with what it recorded, its output left out."""
    first = Bench(agents={"draft": writer(ScriptedModel(*entries), **fields)})  # type: ignore[arg-type]  entries
    first.runner.context = replace(RUN_CONTEXT, retry=RetryPolicy(first_delay=0, max_delay=0))
    await first.run()
    known = [fact for fact in first.journal.facts() if fact.kind == "model"]
    again = Bench(agents={"draft": writer(ScriptedModel(), **fields)}, known=known)
    compared: list[tuple[object, ...]] = []

    def compare(name: str, recorded: Fact, digest: str, messages: Sequence[ChatMessage]) -> None:
        compared.append(
            (name, recorded.data.to_data()["request_digest"] == digest, [message.role for message in messages])
        )

    again.runner.ports = replace(again.runner.ports, compare=compare)
    return first, again, compared


async def test_todays_request_is_told_when_a_recorded_answer_is_used() -> None:
    """S-DUR-55: with the digest that it would have been recorded with."""
    _, again, compared = await resumed(["Done"])
    assert (await again.run(epoch=1)).status == "completed"
    assert compared == [("draft#0/0/model", True, ["system", "user"])]


async def test_todays_request_has_another_digest_when_the_prompt_changed() -> None:
    """S-DUR-55: an agent with another goal asks for something else."""
    _, again, compared = await resumed(["Done"])
    again.agents["draft"] = writer(ScriptedModel(), goal="Sing")
    again.runner._agents = again.agents
    await again.run(epoch=1)
    assert [is_same for _, is_same, _ in compared] == [False]


async def test_retries_are_counted_when_their_answer_is_recorded() -> None:
    """S-DUR-38, S-DUR-66: metrics of a resumed task are those of the whole task."""
    first, again, _ = await resumed([ConnectionResetError("reset"), "Done"])
    assert [fact.data.to_data()["retries"] for fact in first.journal.facts() if fact.kind == "model"] == [1]
    result = await again.run(epoch=1)
    assert result.output is not None
    assert result.output.metrics.retry_count == 1
