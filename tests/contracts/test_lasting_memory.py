"""One contract for memory that lasts, in a file or in a database: three kinds of it in one place, which others share."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from datetime import UTC, datetime

import pydantic
import pytest

from ensemble_ray import EvictionPolicy, MemoryEntry, ValidationError
from ensemble_ray.memory.lasting import LastingMemory
from tests.contracts.memory_adapters import LASTING, Place, parameters
from tests.ensemble_ray.memory.doubles import WordsModel

AT = datetime(2026, 5, 1, tzinfo=UTC)


class Report(pydantic.BaseModel):
    """What a task gave."""

    title: str


@pytest.fixture(params=parameters(LASTING))
def place(request: pytest.FixtureRequest) -> Place:
    """An empty one."""
    return LASTING[request.param](request)


def stored(memory: LastingMemory, scope: str = "a") -> list[str]:
    """All contents of a scope."""
    return [entry.content for entry in memory.retrieve(scope, "money", 10_000)]


def test_it_outlasts_the_object(place: Place) -> None:
    """S-MEM-116, S-MEM-140: all three kinds of memory."""
    memory = place(WordsModel())
    memory.store("a", MemoryEntry(content="refund", structured_content=Report(title="R"), stored_at=AT))
    memory.long_term.store(MemoryEntry(content="price", metadata={"agent_role": "Writer"}))
    memory.entities.put("Acme", "a firm")
    memory.close()
    again = place(WordsModel())
    (entry,) = again.retrieve("a", "money", 5)
    assert (entry.content, entry.structured_content, entry.stored_at) == ("refund", {"title": "R"}, AT)
    assert [found.metadata for found in again.long_term.retrieve("money", 5)] == [{"agent_role": "Writer"}]
    assert dict(again.entities.get_all()) == {"Acme": "a firm"}
    assert again.scopes() == {"a": 1}


def test_it_is_usable_after_it_was_closed(place: Place) -> None:
    """S-MEM-117: what is needed is opened again."""
    memory = place(None)
    memory.store("a", MemoryEntry(content="one"))
    memory.close()
    memory.store("a", MemoryEntry(content="two"))
    assert stored(memory) == ["one", "two"]


def test_long_term_memory_is_apart_from_scopes_and_needs_a_model(place: Place) -> None:
    """S-MEM-116, S-MEM-33, S-MEM-118."""
    memory = place(WordsModel())
    for content in ("sea", "refund", "refund price"):
        memory.long_term.store(MemoryEntry(content=content))
    memory.store("a", MemoryEntry(content="price"))
    assert [entry.content for entry in memory.long_term.retrieve("ship", 1)] == ["sea"]
    assert list(memory.long_term.retrieve(" ", 5)) == []
    assert stored(memory) == ["price"]
    memory.long_term.evict(EvictionPolicy.keep_last_entries(2))
    assert [entry.content for entry in memory.long_term.retrieve("money", 5)] == ["refund", "refund price"]
    memory.long_term.clear()
    assert list(memory.long_term.retrieve("money", 5)) == []
    assert stored(memory) == ["price"]
    with pytest.raises(ValidationError, match="Memory long_term needs an embedding_model"):
        _ = place(None).long_term


def test_an_id_is_taken_once_by_long_term_memory(place: Place) -> None:
    """S-MEM-112: a task that is done again on its record leaves its note once."""
    memory = place(WordsModel()).long_term
    for _ in range(2):
        memory.store(MemoryEntry(content="refund", entry_id="run/task#0/0/memory"))
    assert len(memory.retrieve("money", 5)) == 1


def test_facts_are_kept_by_trimmed_names(place: Place) -> None:
    """S-MEM-40, S-MEM-41, S-MEM-118, S-MEM-140, S-MEM-147: as in memory; and they can be removed."""
    facts = place(None).entities
    assert facts.is_empty()
    facts.put(" Bolt ", "a screw")
    facts.put("Acme", "a firm")
    facts.put("Bolt", "a bolt \x00")
    assert (facts.get("Bolt "), facts.get("bolt"), facts.get(None)) == ("a bolt \x00", None, None)
    assert list(facts.get_all().items()) == [("Bolt", "a bolt \x00"), ("Acme", "a firm")]
    with pytest.raises(ValueError, match=r"^entity_name must not be None or blank$"):
        facts.put(" ", "fact")
    with pytest.raises(ValueError, match=r"^fact must not be None$"):
        facts.put("Acme", None)  # type: ignore[arg-type]  what is refused
    facts.remove(" Bolt")
    assert (facts.is_empty(), dict(facts.get_all())) == (False, {"Acme": "a firm"})


def test_entries_of_before_the_model_are_found_too(place: Place) -> None:
    """S-MEM-116: they get their vectors at the first search."""
    place(None).store("a", MemoryEntry(content="refund"))
    model = WordsModel()
    memory = place(model)
    assert stored(memory) == ["refund"]
    assert stored(memory) == ["refund"]
    assert sorted(model.asked) == ["money", "money", "refund"]


def test_a_search_sees_what_others_stored_and_deleted(place: Place) -> None:
    """S-MEM-117: what a process keeps in memory is checked against the place."""
    mine, theirs = (place(WordsModel()) for _ in range(2))
    for number in range(4):
        mine.store("a", MemoryEntry(content=f"refund {number}"))
        assert sorted(stored(theirs)) == [f"refund {each}" for each in range(number + 1)]
    theirs.evict("a", EvictionPolicy.keep_last_entries(2))
    assert sorted(stored(mine)) == ["refund 2", "refund 3"]
    theirs.evict("a", EvictionPolicy.keep_last_entries(1))
    theirs.store("a", MemoryEntry(content="price"))
    assert sorted(stored(mine)) == ["price", "refund 3"]


def test_entries_beyond_a_right_angle_are_not_found(place: Place) -> None:
    """S-MEM-116: nearest first, of equally near ones that which came first."""

    class Plane:
        """Texts are points: `x,y`."""

        def embed(self, text: str) -> Sequence[float]:
            """Return the point."""
            return [float(each) for each in text.split(",")]

    memory = place(Plane())
    for content in ("-1,0", "0,5", "3,3", "1,0", "0,0", "2,0", "-1,-1"):
        memory.store("a", MemoryEntry(content=content))
    found = [entry.content for entry in memory.retrieve("a", "7,0", 10)]
    assert found == ["1,0", "2,0", "3,3", "0,5", "0,0"]
    assert [entry.content for entry in memory.retrieve("a", "7,0", 3)] == found[:3]


def test_another_model_s_vectors_are_not_compared(place: Place) -> None:
    """S-MEM-119: by name and by length."""
    place(WordsModel()).store("a", MemoryEntry(content="refund"))
    other = place(WordsModel({"one": ("one",)}))
    for use in (lambda: other.store("a", MemoryEntry(content="x")), lambda: other.retrieve("a", "x", 1)):
        with pytest.raises(ValidationError, match=r"vectors of WordsModel \(3 numbers each\).*WordsModel \(1\)"):
            use()


def test_it_pickles_as_its_place_and_model(place: Place) -> None:
    """S-MEM-117: wherever it is loaded, it is the same place."""
    memory = place(WordsModel())
    memory.store("a", MemoryEntry(content="refund"))
    again = pickle.loads(pickle.dumps(memory))  # noqa: S301  our own
    assert repr(again) == repr(memory)
    assert stored(again) == ["refund"]


class _Joining(EvictionPolicy):
    """Brings all entries together in one; waits for another in between, the first time."""

    def __init__(self, meeting: threading.Barrier | None = None) -> None:
        self._meeting = meeting

    def apply(self, entries: Sequence[MemoryEntry]) -> Sequence[MemoryEntry]:
        """Return one entry with all contents."""
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.wait(timeout=60)
        return [MemoryEntry(content="+".join(entry.content for entry in entries))]


def test_two_that_rewrite_a_scope_do_not_double_it(place: Place) -> None:
    """S-MEM-142: who comes second looks at what the first one left."""
    place(None).store("a", MemoryEntry(content="one"))
    place(None).store("a", MemoryEntry(content="two"))
    meeting = threading.Barrier(2)
    evicting = [threading.Thread(target=place(None).evict, args=("a", _Joining(meeting))) for _ in range(2)]
    for thread in evicting:
        thread.start()
    for thread in evicting:
        thread.join()
    assert stored(place(None)) == ["one+two"]
