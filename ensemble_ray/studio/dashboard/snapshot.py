"""The stored messages of recent runs, for the first message of a new connection (S-WEB-40 to S-WEB-44). Pure."""

from __future__ import annotations

import heapq
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ensemble_ray.events.messages import Message

_STARTED = "ensemble_started"
_ITERATIONS = {"llm_iteration_started": "started", "llm_iteration_completed": "completed"}
_REVIEW_ENDS = frozenset({"review_timed_out", "review_decided"})
_NOT_STORED = frozenset({"token", "heartbeat", "hello", "pong", *_ITERATIONS})
#: Most stored characters of one run, over all its messages (S-WEB-66).
MOST_CHARACTERS = 67_108_864
#: Number of tasks whose newest requests are stored: the last active ones. A map over ten thousand items has as many tasks.
_KEPT_TASKS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A sent message."""

    #: empty: the message belongs to no run
    run_id: str
    message: Message
    #: the full message as JSON
    text: str


@dataclass(slots=True)
class _Run:
    """The stored messages of one run: position and text."""

    started_at: object
    stored: deque[tuple[int, str]] = field(default_factory=deque[tuple[int, str]])
    #: total of the stored texts
    characters: int = 0

    def add(self, position: int, text: str) -> None:
        """Store a message. Over the limit the oldest are evicted, except the first: it reports the start of the run."""
        self.stored.append((position, text))
        self.characters += len(text)
        while self.characters > MOST_CHARACTERS and len(self.stored) > 2:  # noqa: PLR2004  the first, and the newest
            first = self.stored.popleft()
            self.characters -= len(self.stored.popleft()[1])
            self.stored.appendleft(first)


#: The two messages of a request to a model, by name.
_Pair = dict[str, str]


class Snapshot:
    """The messages of the newest runs.

    - Over the limit the oldest run is removed, and its later messages are not stored.
    - Tokens, model requests and messages to one connection are not stored in the list of a run.
    - An open review is stored until its end, also if its run is unknown.
    - The newest model requests per task are stored separately, until the next run starts.
    - `hello` returns messages in the order in which they were sent, over all runs.
    """

    def __init__(self, *, most_runs: int, most_iterations: int) -> None:
        """Create an empty snapshot.

        Args:
            most_runs: Most stored runs.
            most_iterations: Most stored model requests per task; 0: none.
        """
        self._most_runs = most_runs
        self._most_iterations = most_iterations
        self._positions = itertools.count()
        #: in the order in which they began
        self._runs: dict[str, _Run] = {}
        #: by id of the review
        self._reviews: dict[str, tuple[int, str]] = {}
        #: by run and task, the last active at the end
        self._iterations: dict[tuple[str, str], deque[_Pair]] = {}

    def add(self, sent: Sent) -> None:
        """Add the next message."""
        kind, data = sent.message
        if kind == _STARTED:
            self._begin(sent.run_id, data.get("started_at"))
        if kind in _ITERATIONS:
            self._add_iteration(sent)
        elif kind == "review_requested":
            self._reviews[str(data["review_id"])] = (next(self._positions), sent.text)
        elif kind in _REVIEW_ENDS:
            self._reviews.pop(str(data["review_id"]), None)
        if kind == "review_decided" or kind not in _NOT_STORED | _REVIEW_ENDS | {"review_requested"}:
            run = self._runs.get(sent.run_id)
            if run is not None:
                run.add(next(self._positions), sent.text)

    def hello(self) -> Callable[[], str]:
        """Copy the current messages, and return a function that encodes them as the first message of a connection.

        S-WEB-40 and S-WEB-41 define that message. The function is thread-safe.
        """
        latest = next(reversed(self._runs.items()), None)
        return partial(
            _hello,
            None if latest is None else (latest[0], latest[1].started_at),
            [*(list(run.stored) for run in self._runs.values()), sorted(self._reviews.values())],
            [dict(pair) for kept in self._iterations.values() for pair in kept],
        )

    def _begin(self, run_id: str, started_at: object) -> None:
        self._iterations.clear()
        # A run that resumes in this process sends its tasks again.
        self._runs.pop(run_id, None)
        self._runs[run_id] = _Run(started_at)
        while len(self._runs) > self._most_runs:
            del self._runs[next(iter(self._runs))]

    def _add_iteration(self, sent: Sent) -> None:
        if not self._most_iterations or sent.run_id not in self._runs:
            return
        kind, data = sent.message
        task = (sent.run_id, str(data.get("instance", "")))
        pairs = self._iterations.pop(task, None)
        pairs = self._iterations[task] = deque(maxlen=self._most_iterations) if pairs is None else pairs
        while len(self._iterations) > _KEPT_TASKS:
            del self._iterations[next(iter(self._iterations))]
        part = _ITERATIONS[kind]
        if part == "started" or not pairs or "completed" in pairs[-1]:
            pairs.append({part: sent.text})
        else:
            pairs[-1][part] = sent.text


def _hello(
    latest: tuple[str, object] | None, stored: Sequence[Sequence[tuple[int, str]]], pairs: Sequence[_Pair]
) -> str:
    parts = ['"type":"hello"']
    if latest is not None:
        parts += [f'"ensemble_id":{json.dumps(latest[0])}', f'"started_at":{json.dumps(latest[1])}']
    if texts := [text for _, text in heapq.merge(*stored)]:
        parts.append(f'"snapshot_trace":{_array(texts)}')
    if pairs:
        parts.append(f'"recent_iterations":{_array(map(_object, pairs))}')
    return f"{{{','.join(parts)}}}"


def _array(texts: Iterable[str]) -> str:
    return f"[{','.join(texts)}]"


def _object(pair: _Pair) -> str:
    return "{" + ",".join(f'"{name}":{text}' for name, text in pair.items()) + "}"
