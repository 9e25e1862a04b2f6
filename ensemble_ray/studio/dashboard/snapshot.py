"""Snapshot: what a page that joins late is told (S-WEB-40 to S-WEB-44). Pure.

In: messages about runs, as they are sent. Out: the first message on a connection. Rules:

1. Each run has a list; over the cap the run that began first is dropped whole, and nothing of it is stored any more.
2. Fragments of answers, requests to models and their answers, and what is sent to one connection alone are not stored. A review is
   stored as long as it is open, also where its run is not known.
3. Of requests to models the newest pairs of each task are kept aside, until a run starts.
4. Everything is given in the order in which it was sent, whatever run it is about.
"""

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
#: What is stored of one run, characters of all its messages (S-WEB-66).
MOST_CHARACTERS = 67_108_864
#: Tasks whose newest requests are kept: those that were heard of last. A map over ten thousand items has as many tasks.
_KEPT_TASKS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A message as it was sent."""

    #: empty where it is about none
    run_id: str
    message: Message
    #: the whole of it as JSON
    text: str


@dataclass(slots=True)
class _Run:
    """What is stored of one run: position and text of each message."""

    started_at: object
    stored: deque[tuple[int, str]] = field(default_factory=deque[tuple[int, str]])
    #: of all that is stored
    characters: int = 0

    def add(self, position: int, text: str) -> None:
        """Store a message; of very many the oldest are let go behind the first one, which says that the run began."""
        self.stored.append((position, text))
        self.characters += len(text)
        while self.characters > MOST_CHARACTERS and len(self.stored) > 2:  # noqa: PLR2004  the first, and the newest
            first = self.stored.popleft()
            self.characters -= len(self.stored.popleft()[1])
            self.stored.appendleft(first)


#: The two messages of a request to a model, by name.
_Pair = dict[str, str]


class Snapshot:
    """The messages of the newest runs."""

    def __init__(self, *, most_runs: int, most_iterations: int) -> None:
        """Make an empty one.

        Args:
            most_runs: Runs that are kept.
            most_iterations: Requests to models that are kept of each task; 0: none.
        """
        self._most_runs = most_runs
        self._most_iterations = most_iterations
        self._positions = itertools.count()
        #: in the order in which they began
        self._runs: dict[str, _Run] = {}
        #: by id of the review
        self._reviews: dict[str, tuple[int, str]] = {}
        #: by run and task, those heard of last behind
        self._iterations: dict[tuple[str, str], deque[_Pair]] = {}

    def add(self, sent: Sent) -> None:
        """Take the next message."""
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
        """Return what writes the first message on a connection, as JSON, of all that was added until now.

        That first message is S-WEB-40 and S-WEB-41. What is returned may be called from any thread.
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
        # One that goes on in this process begins anew: it tells its tasks again.
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
