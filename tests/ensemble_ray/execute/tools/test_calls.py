"""What is recorded around tool calls, and how safe it is before the next step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from ensemble_ray import AgentTool, Effect, StaleEpochError, ToolResult, current_tool_context, tool
from ensemble_ray.facts.fact import Fact
from ensemble_ray.ports import Persistence
from ensemble_ray.testing import ScriptedModel
from tests.ensemble_ray.execute.running import Bench, Search, WatchedJournal, call, writer


def bench_of(
    *tools: object, calls: tuple[str, ...], journal: WatchedJournal | None = None
) -> tuple[Bench, WatchedJournal]:
    """A task whose model asks for these tools at once, then answers."""
    asked = [call(name, number=number) for number, name in enumerate(calls)]
    journal = journal or WatchedJournal()
    model = ScriptedModel(asked, "Done")  # type: ignore[arg-type]  a list of requests is an entry
    return Bench(agents={"draft": writer(model, tools=list(tools))}, journal=journal), journal


@pytest.mark.parametrize(
    ("effect", "begun"),
    [("none", Persistence.SOON), ("idempotent", Persistence.SYNCED), ("once", Persistence.SYNCED)],
)
async def test_intent_is_on_the_disk_when_the_tool_has_an_effect(effect: Effect, begun: Persistence) -> None:
    """S-DUR-2, S-DUR-3: what only reads waits for no commit; every result is committed before a listener hears of it."""
    bench, journal = bench_of(Search(effect), calls=("search",))
    await bench.run()
    assert journal.degrees_of("tool_intent", "tool_result") == [
        ("tool_intent", begun),
        ("tool_result", Persistence.COMMITTED),
    ]
    assert (await journal.lookup_recorded("draft#0"))["draft#0/0/call-0", "tool_intent"].data.to_data()[
        "effect"
    ] == effect


@pytest.mark.parametrize("effect", ["none", "once"])
async def test_result_of_a_read_waits_for_nothing_when_nobody_listens(effect: Effect) -> None:
    """S-DUR-2: the next request may leave while it is being committed; the result of an effect waits."""
    bench, journal = bench_of(Search(effect), calls=("search",))
    bench.sink.wants = lambda _: False  # type: ignore[method-assign]  a run without listeners
    await bench.run()
    expected = Persistence.SOON if effect == "none" else Persistence.COMMITTED
    assert [degree for _, degree in journal.degrees_of("tool_result")] == [expected]


async def test_results_of_reading_calls_wait_together_when_several_run() -> None:
    """S-DUR-2: the last one that comes back waits for all, before listeners hear of them."""
    bench, journal = bench_of(Search("none"), calls=("search", "search", "search"))
    await bench.run()
    assert [degree for _, degree in journal.degrees_of("tool_result")] == [
        Persistence.SOON,
        Persistence.SOON,
        Persistence.COMMITTED,
    ]


async def test_batch_is_written_when_an_unknown_tool_comes_last() -> None:
    """S-DUR-22, S-SET-25: a request for no tool leaves no fact, and nothing that others could wait with."""
    bench, journal = bench_of(Search("none"), calls=("search", "nowhere"))
    await bench.run()
    assert journal.degrees_of("tool_intent", "tool_result") == [
        ("tool_intent", Persistence.SOON),
        ("tool_result", Persistence.COMMITTED),
    ]


async def test_result_of_an_effect_is_written_while_a_sibling_still_runs() -> None:
    """S-DUR-22: a process that dies during the slow call has not lost the other's result."""
    came = asyncio.Event()

    class Telling(WatchedJournal):
        async def append(
            self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED
        ) -> None:
            await super().append(facts, epoch=epoch, until=until)
            if facts[0].kind == "tool_result":
                came.set()

    @tool(effect="none")
    async def slow() -> str:
        """Waits for the other's result."""
        await came.wait()
        return str(journal.degrees_of("tool_result")[0][1].name)

    bench, journal = bench_of(slow, Search("once"), calls=("slow", "search"), journal=Telling())
    await bench.run()
    assert (await journal.lookup_recorded("draft#0"))["draft#0/0/call-0", "tool_result"].data.to_data()[
        "text"
    ] == "COMMITTED"


async def test_effect_of_a_plain_tool_is_once_unless_it_says_otherwise() -> None:
    """S-DUR-20: class and instance may say so."""

    class Post(AgentTool):
        name = "post"
        description = "Posts."

        def execute(self, text: str, /) -> ToolResult:
            return ToolResult.success(text)

    class Peek(Post):
        name = "peek"
        effect = "none"

    put = Post()
    put.name, put.effect = "put", "idempotent"
    bench, journal = bench_of(Post(), Peek(), put, calls=("post", "peek", "put"))
    await bench.run()
    facts = [fact for fact in journal.facts() if fact.kind == "tool_intent"]
    assert {fact.data.to_data()["tool_name"]: fact.data.to_data()["effect"] for fact in facts} == {
        "post": "once",
        "peek": "none",
        "put": "idempotent",
    }


async def test_replaced_house_is_stopped_before_it_repeats_a_call() -> None:
    """S-DUR-16: a process that slept after it read the record finds a newer one, and does not call again."""
    search = Search("idempotent")
    known = [
        fact
        for fact in await recorded_search()
        if (fact.kind, fact.name) in {("model", "draft#0/0/model"), ("tool_intent", "draft#0/0/call-0")}
    ]
    newer = replace(known[1], at=1.0, epoch=2)
    bench = Bench(agents={"draft": writer(ScriptedModel("Three"), tools=[search])}, known=[*known, newer])
    result = await bench.run(epoch=1)
    assert isinstance(result.error, StaleEpochError)
    assert search.asked == []


async def recorded_search() -> list[Fact]:
    """What a task records that searches once."""
    bench, journal = bench_of(Search("idempotent"), calls=("search",))
    await bench.run()
    return journal.facts()


async def test_key_is_the_same_in_another_process_when_the_call_is_repeated() -> None:
    """S-DUR-23: also of a tool that runs in the pool of processes (S-SET-35)."""
    keys: list[str] = []

    @tool(cpu=True, effect="idempotent")
    def crunch() -> str:
        """Crunch."""
        return current_tool_context().idempotency_key

    bench, journal = bench_of(crunch, calls=("crunch",))
    await bench.run()
    again = Bench(agents={"draft": writer(ScriptedModel("Done"), tools=[crunch])}, known=journal.facts()[:2])
    await again.run(epoch=1)
    for each in (journal, again.journal):
        result = (await each.lookup_recorded("draft#0"))["draft#0/0/call-0", "tool_result"]
        keys.append(str(result.data.to_data()["text"]))
    assert keys[0] == keys[1] != ""
