"""Facts' data as text and back."""

import json
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray import RunState, TaskOutput
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.record.journal import BODY_LIMIT, WHOLE_LIMIT, body_digest, data_of, in_json_form, plain_data, text_of
from ensemble_ray.values.value import utc_of

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.just("x" * 2000)
    | st.just("{" * 1025)
    | st.just("one " * 5000 + "\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$body", "$$body", "body", "$pieces", "$$pieces"]), inner, max_size=2)
    ),
    max_leaves=8,
)


def _fact(data: dict[str, object]) -> Fact:
    return read_fact(run="r", kind="output", name="facts#0", at=12.5, data=data)


def _trip(data: dict[str, object]) -> dict[str, object]:
    bodies: dict[str, str] = {}

    def keep(text: str) -> str:
        bodies[body_digest(text)] = text
        return body_digest(text)

    return data_of(text_of(data, keep), bodies.__getitem__)


@pytest.mark.heavy
@given(data=st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=4))
def test_json_data_comes_back_unchanged(data: dict[str, object]) -> None:
    """Long texts, and users' keys that look like references to them, included."""
    assert _trip(data) == data


@pytest.mark.parametrize("length", [BODY_LIMIT, BODY_LIMIT + 1])
def test_text_lies_among_the_bodies_when_it_is_long(length: int) -> None:
    """More than 1,024 characters, not bytes; at any depth."""
    text = "ä" * length
    written = json.loads(text_of({"a": [{"b": text}]}, body_digest))
    expected: object = text if length <= BODY_LIMIT else {"$body": sha256(text.encode()).hexdigest()}
    assert written == {"a": [{"b": expected}]}


@dataclass
class Point:
    """A user's object."""

    x: int


def test_very_long_text_lies_there_in_pieces() -> None:
    """S-MEM-150: each is named where it would stand as a text of its own, so that whoever looks for bodies finds it."""
    text = "".join(f"{number} " for number in range(WHOLE_LIMIT))
    written = json.loads(text_of({"a": text[:WHOLE_LIMIT], "b": text}, body_digest))
    assert written["a"] == {"$body": body_digest(text[:WHOLE_LIMIT])}
    pieces = [text[start : start + 8192] for start in range(0, len(text), 8192)]
    assert written["b"] == {"$pieces": [{"$body": body_digest(piece)} for piece in pieces]}


@pytest.mark.heavy
def test_texts_that_grow_at_their_end_share_what_they_begin_with() -> None:
    """S-MEM-150: what a thousand of them take grows as their number does, not as its square."""
    bodies: dict[str, int] = {}
    sizes: list[int] = []

    def keep(text: str) -> str:
        return bodies.setdefault(body_digest(text), len(text)) and body_digest(text)

    text = ""
    for number in range(1000):
        text += f"note {number} " + "x" * 250
        written = text_of({"prompt": text}, keep)
        sizes.append(sum(bodies.values()) + len(written))
    first, second = sizes[499] - sizes[99], sizes[999] - sizes[599]
    assert second < 1.2 * first
    assert sizes[-1] < 60 * len(text)  # all of them: 500 times as much


def test_users_data_of_before_there_were_pieces_is_left_as_it_is() -> None:
    """S-MEM-150: a key of theirs that looks the same was not escaped then."""
    for data in ({"$pieces": "x"}, {"$pieces": ["x", 5]}, {"$pieces": []}, {"$pieces": [{"$$body": "x"}]}):
        read = data_of(json.dumps({"theirs": data}), {}.__getitem__)
        assert read == {"theirs": {"$pieces": [{"$body": "x"}]} if data["$pieces"] == [{"$$body": "x"}] else data}


def test_objects_are_written_in_their_json_form() -> None:
    """Frozen values, instants, durations, decimals, enums: data, no pickles."""
    output = TaskOutput(raw="x", task_description="d", agent_role="r", completed_at=utc_of(0), duration=1.5)
    data = plain_data(
        {"output": output, "at": utc_of(0), "took": timedelta(seconds=90), "cost": Decimal("0.10"), "state": RunState.FAILED, "p": Point(1)}
    )  # fmt: skip
    assert data["output"] == output.model_dump(mode="json")
    assert data == {
        **data,
        "at": "1970-01-01T00:00:00Z",
        "took": "PT1M30S",
        "cost": "0.10",
        "state": "failed",
        "p": {"x": 1},
    }


def test_writing_goes_on_when_a_value_has_no_json_form() -> None:
    """S-TRC-52: its text stands for it; half of a surrogate pair is kept."""
    loop: list[object] = []
    loop.append(loop)
    data: dict[str, object] = {
        "o": object,
        "loop": loop,
        "bytes": b"\xff",
        "half": "\ud83d" * 2000,
        "nan": float("nan"),
    }
    read = _trip(data)
    assert read["o"] == "<class 'object'>"
    assert read["loop"] == ["[[...]]"]
    assert read["bytes"] == "b'\\xff'"
    assert read["half"] == "\ud83d" * 2000


def test_recorded_form_is_what_a_reader_gets() -> None:
    """With the epoch of its writer and its number."""
    fact = _fact({"took": timedelta(seconds=1)})
    assert in_json_form(fact, epoch=2, seq=7) == read_fact(
        run="r", kind="output", name="facts#0", at=12.5, data={"took": "PT1S"}, epoch=2, seq=7
    )


@pytest.mark.parametrize("text", ["[]", "1", '{"a":', "x", ""])
def test_text_is_refused_when_it_is_no_data(text: str) -> None:
    """S-DUR-9: a reader says so instead of guessing."""
    with pytest.raises(ValueError, match=r"."):
        data_of(text, str)
