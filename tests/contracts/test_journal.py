"""The contract of the `Journal` port, over the journals in memory and on disk."""

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import pytest

from ensemble_ray.errors import EnsembleError, IllegalStateError, StaleEpochError
from ensemble_ray.messages import Fact
from ensemble_ray.outputs import TaskOutput
from ensemble_ray.ports import Journal
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.record.journal_file import FileJournal
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.values import utc_of

RUN = "run-1"
OUTPUT = TaskOutput(raw="text", task_description="Write", agent_role="Writer", completed_at=utc_of(1), duration=2)

#: Closes a journal and opens the same record again.
Reopen = Callable[[Journal], Awaitable[Journal]]


def _fact(name: str = "facts#0/0/model", kind: str = "model", at: float = 1.0, **data: object) -> Fact:
    return Fact(run=RUN, kind=kind, name=name, at=at, data=data)


@pytest.fixture(params=["memory", "file"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Journal, Reopen, str]]:
    """A journal, the way to open its record again, and which adapter it is."""
    opened: list[Journal] = []

    async def reopen(journal: Journal) -> Journal:
        await journal.close()
        if isinstance(journal, MemoryJournal):
            opened.append(MemoryJournal(RUN, journal.facts()))
        else:
            opened.append(FileJournal(RunDirectory(tmp_path, RUN).path, RUN))
        return opened[-1]

    opened.append(
        MemoryJournal(RUN) if request.param == "memory" else FileJournal(RunDirectory(tmp_path, RUN).path, RUN)
    )
    yield opened[0], reopen, request.param
    for journal in opened:
        await journal.close()


def _read(journal: Journal, home: Path) -> list[Fact]:
    return journal.facts() if isinstance(journal, MemoryJournal) else RunDirectory(home, RUN).facts()


async def test_nothing_is_recorded_at_first(store: tuple[Journal, Reopen, str]) -> None:
    """A runner that asks first performs its effect."""
    journal, _, _ = store
    assert journal.recorded("facts#0/0/model", "model") is None


@pytest.mark.parametrize("is_flushed", [False, True])
async def test_appended_effect_is_recorded(store: tuple[Journal, Reopen, str], *, is_flushed: bool) -> None:
    """At once, and after it was written: same name, same kind, same data."""
    journal, _, _ = store
    await journal.append([_fact(text="answer", input_tokens=5)])
    if is_flushed:
        await journal.flush()
    found = journal.recorded("facts#0/0/model", "model")
    assert found is not None
    assert (found.run, found.kind, found.name, found.at) == (RUN, "model", "facts#0/0/model", 1.0)
    assert found.data == {"text": "answer", "input_tokens": 5}
    assert journal.recorded("facts#0/0/model", "tool_result") is None
    assert journal.recorded("facts#0/1/model", "model") is None


@pytest.mark.parametrize("is_flushed", [False, True])
async def test_recorded_data_is_json_data(store: tuple[Journal, Reopen, str], *, is_flushed: bool) -> None:
    """Whether it comes from memory or from the disk, values are in the form in which a reader gets them."""
    journal, _, _ = store
    await journal.append([_fact("facts#0", "output", output=OUTPUT, took=timedelta(seconds=2), ones={1})])
    if is_flushed:
        await journal.flush()
    found = journal.recorded("facts#0", "output")
    assert found is not None
    assert found.data == {"output": OUTPUT.model_dump(mode="json"), "took": "PT2S", "ones": [1]}


async def test_effects_are_recorded_when_the_record_is_opened_again(store: tuple[Journal, Reopen, str]) -> None:
    """What an earlier process did need not be done again."""
    journal, reopen, _ = store
    await journal.append([_fact(text="answer" * 1000), _fact("facts#0", "output", raw="x")])
    again = await reopen(journal)
    found = again.recorded("facts#0/0/model", "model")
    assert found is not None
    assert found.data == {"text": "answer" * 1000}
    assert again.recorded("facts#0", "output") is not None


async def test_facts_are_read_in_the_order_of_appending(store: tuple[Journal, Reopen, str], tmp_path: Path) -> None:
    """Numbered from 1, also where their times are equal."""
    journal, _, _ = store
    for number in range(300):
        await journal.append([_fact(f"t{number}#0", "stimulus", key=number)])
    await journal.flush()
    facts = _read(journal, tmp_path)
    assert [fact.data["key"] for fact in facts] == list(range(300))
    assert [fact.seq for fact in facts] == list(range(1, 301))


async def test_facts_of_both_writers_are_read_when_the_record_was_opened_again(
    store: tuple[Journal, Reopen, str], tmp_path: Path
) -> None:
    """In one order."""
    journal, reopen, _ = store
    await journal.append([_fact(at=1.0, text="first")])
    again = await reopen(journal)
    await again.append([_fact("facts#0/1/model", at=2.0, text="second")])
    await again.flush()
    assert [fact.data["text"] for fact in _read(again, tmp_path)] == ["first", "second"]


async def test_older_epoch_of_an_instance_is_refused(store: tuple[Journal, Reopen, str], tmp_path: Path) -> None:
    """A frozen process that comes back learns that it was replaced; other instances go on."""
    journal, _, _ = store
    await journal.append([_fact("a#0/0/model")], epoch=2)
    with pytest.raises(StaleEpochError) as caught:
        await journal.append([_fact("a#0/1/call-0", "tool_intent")], epoch=1)
    assert (caught.value.run, caught.value.name, caught.value.epoch, caught.value.newest) == (RUN, "a#0", 1, 2)
    await journal.append([_fact("b#0/0/model")], epoch=1)
    await journal.append([_fact("a#0/2/model")], epoch=2)
    await journal.flush()
    assert [(fact.name, fact.epoch) for fact in _read(journal, tmp_path)] == [
        ("a#0/0/model", 2),
        ("b#0/0/model", 1),
        ("a#0/2/model", 2),
    ]


async def test_older_epoch_is_refused_everywhere_when_the_run_was_taken_over(
    store: tuple[Journal, Reopen, str],
) -> None:
    """Resuming raises the run's epoch: every writer of before must stop."""
    journal, _, _ = store
    await journal.append([_fact("run", "plan")], epoch=1)
    with pytest.raises(StaleEpochError):
        await journal.append([_fact("a#0/0/model")], epoch=0)


async def test_group_is_refused_as_a_whole(store: tuple[Journal, Reopen, str], tmp_path: Path) -> None:
    """None of its facts is kept."""
    journal, _, _ = store
    await journal.append([_fact("a#0/0/model")], epoch=3)
    with pytest.raises(StaleEpochError):
        await journal.append([_fact("b#0/0/model"), _fact("a#0/1/model")], epoch=2)
    assert journal.recorded("b#0/0/model", "model") is None
    await journal.flush()
    assert len(_read(journal, tmp_path)) == 1


async def test_epochs_are_known_when_the_record_is_opened_again(store: tuple[Journal, Reopen, str]) -> None:
    """The newest one is in the record."""
    journal, reopen, _ = store
    await journal.append([_fact("a#0", "output")], epoch=4)
    again = await reopen(journal)
    with pytest.raises(StaleEpochError):
        await again.append([_fact("a#0/0/model")], epoch=3)


async def test_refusal_is_an_ensemble_error() -> None:
    """S-ERR-37: whoever catches the library's errors catches it."""
    assert issubclass(StaleEpochError, EnsembleError)


async def test_task_key_may_hold_anything(store: tuple[Journal, Reopen, str]) -> None:
    """Its instance is found from the end of an effect's name."""
    journal, _, _ = store
    await journal.append([_fact("a/b#c#0/0/model")], epoch=2)
    with pytest.raises(StaleEpochError, match="'a/b#c#0'"):
        await journal.append([_fact("a/b#c#0", "output")], epoch=1)


async def test_closing_writes_everything(store: tuple[Journal, Reopen, str], tmp_path: Path) -> None:
    """And closing twice is fine."""
    journal, _, _ = store
    await journal.append([_fact(text="last")])
    await journal.close()
    await journal.close()
    assert [fact.data for fact in _read(journal, tmp_path)] == [{"text": "last"}]


async def test_append_is_refused_when_closed(store: tuple[Journal, Reopen, str]) -> None:
    """Nothing is lost in silence."""
    journal, _, _ = store
    await journal.close()
    with pytest.raises(IllegalStateError, match="closed"):
        await journal.append([_fact()])


async def test_flush_returns_when_there_is_nothing(store: tuple[Journal, Reopen, str]) -> None:
    """Nobody waits for nothing."""
    journal, _, _ = store
    await journal.flush()
    await journal.append([])
    await journal.flush()
