"""Which outputs a task's context gives, where tasks run more than once. Package: schedule.

Rules:
1. A path is a scope: the run is "", an iteration `loop:refine#2`, an attempt `phase:draft#1`, a step `graph:triage#4`.
2. What completes is put into the scope of its own parent path by its key; a later execution takes the place of an earlier.
3. An entry of a context is looked up in the task's own scope first and then outwards: `loop:refine#2`, `loop:refine`, "".
4. A unit gives what it projects: one part, or one for each of its tasks where iterations are joined (S-LOOP-72).
5. A loop that completed also gives each body task's output of its last iteration, under `loop:refine/writer` (S-LOOP-174).
6. Only names of outputs are here; nothing is copied from scope to scope.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType

from ensemble_ray.schedule.instructions import ContextPart
from ensemble_ray.values.ids import node_key

__all__ = ["Parts", "Scopes", "body_of", "scope_keys", "scope_of"]

#: What one entry of a context gives.
Parts = tuple[ContextPart, ...]
_NOTHING: Mapping[str, Parts] = MappingProxyType({})


def scope_of(instance: str) -> str:
    """Return the scope that an instance runs in.

    Examples:
        >>> scope_of("loop:refine#2/writer#0")
        'loop:refine#2'
    """
    return instance.rpartition("/")[0]


def scope_keys(context: Sequence[str], tasks: Sequence[str]) -> Iterator[str]:
    """Return under which keys the entries of a context are looked up.

    Args:
        context: Keys of tasks and units.
        tasks: In the place of each entry the body task that alone is meant, or ""; empty: there is none.

    Examples:
        >>> list(scope_keys(["notes", "loop:refine"], ["", "writer"]))
        ['notes', 'loop:refine/writer']
    """
    return (body_of(key, task) if task else key for key, task in zip_longest(context, tasks, fillvalue=""))


def body_of(unit: str, task: str) -> str:
    """Return the key under which a scope has what a body task of a loop gave in the last iteration."""
    return f"{unit}/{task}"


class Scopes:
    """The outputs of a run by scope and key."""

    def __init__(self) -> None:
        self._scopes: dict[str, dict[str, Parts]] = {}
        self._outer: dict[str, tuple[str, ...]] = {}

    def put(self, scope: str, key: str, parts: Parts) -> None:
        """Let a key stand for these outputs in a scope, the newest last."""
        outputs = self._scopes.setdefault(scope, {})
        outputs.pop(key, None)
        outputs[key] = parts

    def withdraw(self, scope: str, key: str) -> None:
        """Let a key stand for nothing in a scope any more."""
        self._scopes.get(scope, {}).pop(key, None)

    def enclose(self, scope: str, outer: Sequence[str]) -> None:
        """Look from this scope into these next, in order, and nowhere else; not where they look, nor where its path says.

        So a phase sees the attempts that were accepted when it started (S-PHASE-36).
        """
        self._outer[scope] = tuple(outer)

    def drop(self, scope: str) -> None:
        """Forget a scope that nothing looks into any more."""
        self._scopes.pop(scope, None)
        self._outer.pop(scope, None)

    def own(self, scope: str) -> Mapping[str, Parts]:
        """Return what completed in a scope itself, by key, in the order of completion."""
        return self._scopes.get(scope, _NOTHING)

    def find(self, scope: str, key: str) -> Parts | None:
        """Return what an entry of a context gives in a scope; None where it has no output yet."""
        while True:
            if (parts := self.own(scope).get(key)) is not None:
                return parts
            if scope in self._outer:
                found = (self.own(outer).get(key) for outer in self._outer[scope])
                return next((parts for parts in found if parts is not None), None)
            if not scope:
                return None
            scope = _outwards(scope)

    def last_output(self, instance: str) -> str:
        """Return the instance of the last output of a task or a unit that completed; "" where it gave none."""
        parts = self.own(scope_of(instance)).get(node_key(instance), ())
        return parts[-1].instances[-1] if parts and parts[-1].instances else ""

    def __len__(self) -> int:
        """Return how many scopes are kept."""
        return len(self._scopes)


def _outwards(scope: str) -> str:
    """Return the next scope: of `a#0/b#1` it is `a#0/b`, and of that `a#0`."""
    before, _, last = scope.rpartition("/")
    key, mark, _ = last.rpartition("#")
    if not mark:
        return before
    return f"{before}/{key}" if before else key
