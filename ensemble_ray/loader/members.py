"""What a team file declares by name: agents, and tasks, loops, phases and a graph with what they wait for. Package: loader.

In: the file's tree. Out: a list of members; each knows by position what it is made of and what it waits for. Names of tasks
are those of the whole file, wherever a task stands; `NAME.output` is what a loop or a phase gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

from ensemble_ray.loader.document import Entries, Items, Loc, Located, locate
from ensemble_ray.loader.field_types import text_in
from ensemble_ray.loader.problems import Problems, list_known_names, suggestion

__all__ = ["Members", "TeamEntry"]

_OUTPUT = ".output"


@dataclass(slots=True, kw_only=True)
class TeamEntry:
    """An agent, a task, a loop, a phase or the graph of the file."""

    kind: Literal["agent", "task", "loop", "phase", "graph"]
    name: str | None
    node: Entries
    path: Loc
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    #: positions of what its context names, and whether the outputs of a loop or phase are meant
    context: list[tuple[int, bool]] = field(default_factory=list[tuple[int, bool]])
    #: positions of what it is made of, by key: a body, tasks, loops, a review's task, states
    parts: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    #: positions of the phases before it
    after: list[int] = field(default_factory=list[int])

    @property
    def waits_for(self) -> list[int]:
        """Positions of what has to be made before it."""
        inside = (position for positions in self.parts.values() for position in positions)
        return [*(position for position, _ in self.context), *inside, *self.after]


class Members:
    """The members of one file, in the order in which they stand there."""

    def __init__(self, root: Entries, problems: Problems) -> None:
        self.agents: list[TeamEntry] = []
        #: tasks and units
        self.work: list[TeamEntry] = []
        #: those of the ensemble itself, by key of the file
        self.top: dict[str, list[int]] = {}
        self._root = root
        self._problems = problems
        self._lines: dict[tuple[str, str], int] = {}

    def collect(self) -> None:
        """List what the file declares; two of one name are noted."""
        self.agents = list(self._read("agent", ("agents",)))
        self.top["tasks"] = self._add_tasks(("tasks",))
        self.top["loops"] = self._add_loops(("loops",))
        for member in self._read("phase", ("phases",)):
            member.parts["tasks"] = self._add_tasks((*member.path, "tasks"))
            member.parts["loops"] = self._add_loops((*member.path, "loops"))
            reviewer = self._at((*member.path, "review", "task"))
            if isinstance(reviewer, Entries):
                path: Loc = (*member.path, "review", "task")
                review = TeamEntry(kind="task", name=text_in(reviewer.get("name")), node=reviewer, path=path)
                if review.name is not None:
                    self._note_twice("task", review.name, reviewer, path)
                member.parts["review"] = [self._add(review)]
            self.top.setdefault("phases", []).append(self._add(member))
        self._add_graph()

    def add_sides(self, section: str, sides: Sequence[str]) -> None:
        """List the tasks that stand for the factories of a map-reduce."""
        for side in sides:
            node = self._at((section, side))
            if isinstance(node, Entries):
                self._add(TeamEntry(kind="task", name=None, node=node, path=(section, side)))

    def look_up(self, refused: set[Loc]) -> None:
        """Find what members name; unknown names and circles are noted.

        Args:
            refused: Paths of what is wrong already, and not looked at.
        """
        agent_names = [each.name for each in self.agents if each.name]
        tasks = self._positions("task")
        outputs = {f"{name}{_OUTPUT}": at for kind in ("loop", "phase") for name, at in self._positions(kind).items()}
        phases = self._positions("phase")
        for member in self.work:
            if any(path[: len(member.path)] == member.path for path in refused):
                continue
            named = text_in(member.node.get("agent"))
            if named is not None and named not in agent_names:
                self._refuse_name(named, (*member.path, "agent"), "agent", agent_names)
            for position, name in self._texts(member.node.get("context")):
                if name in tasks or name in outputs:
                    member.context.append((tasks[name], False) if name in tasks else (outputs[name], True))
                else:
                    self._refuse_name(name, (*member.path, "context", position), "task", [*tasks, *outputs])
            for position, name in self._texts(member.node.get("after")) if member.kind == "phase" else ():
                if name in phases:
                    member.after.append(phases[name])
                else:
                    self._refuse_name(name, (*member.path, "after", position), "phase", list(phases))
        self._check_order()

    def in_order(self) -> Iterator[int]:
        """Give the positions of tasks and units, each behind what it waits for."""
        return iter(TopologicalSorter({index: each.waits_for for index, each in enumerate(self.work)}).static_order())

    # Listing.

    def _add(self, member: TeamEntry) -> int:
        self.work.append(member)
        return len(self.work) - 1

    def _add_tasks(self, path: Loc) -> list[int]:
        return [self._add(member) for member in self._read("task", path)]

    def _add_loops(self, path: Loc) -> list[int]:
        return [self._add_loop(member) for member in self._read("loop", path)]

    def _add_loop(self, member: TeamEntry) -> int:
        member.parts["body"] = self._add_tasks((*member.path, "body"))
        return self._add(member)

    def _add_graph(self) -> None:
        node = self._root.get("graph")
        if not isinstance(node, Entries):
            return
        graph = TeamEntry(kind="graph", name=text_in(node.get("name")), node=node, path=("graph",))
        states: list[int] = []
        for state in self._read("state", ("graph", "states")):
            if "body" in state.node:
                state.kind = "loop"
                states.append(self._add_loop(state))
            else:
                states.append(self._add(state))
        graph.parts["states"] = states
        self.top["graph"] = [self._add(graph)]

    def _read(self, kind: Literal["agent", "task", "loop", "phase", "state"], path: Loc) -> Iterator[TeamEntry]:
        """Give the members of a section, by name or as a list."""
        node = self._at(path)
        members = node.items() if isinstance(node, Entries) else enumerate(node) if isinstance(node, Items) else ()
        for step, member in members:
            if not isinstance(member, Entries):
                continue
            name = step if isinstance(step, str) else text_in(member.get("name"))
            if name is not None:
                self._note_twice(kind, name, member, (*path, step))
            yield TeamEntry(kind="task" if kind == "state" else kind, name=name, node=member, path=(*path, step))

    def _note_twice(self, kind: str, name: str, member: Entries, path: Loc) -> None:
        of = kind if kind != "state" else "loop" if "body" in member else "task"
        if (of, name) not in self._lines:
            self._lines[of, name] = member.spot.line
            return
        where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
        text = f"two {of}s are named '{name}'; the first is in line {self._lines[of, name]}"
        self._problems.add(member.spot, where, text)

    def _at(self, path: Loc) -> Located | None:
        """Return what stands at a place; None: nothing does."""
        node: Located | None = self._root
        for step in path:
            match node, step:
                case Entries() as entries, str():
                    node = entries.get(step)
                case Items() as items, int():
                    node = items[step]
                case _:
                    return None
        return node

    # Names.

    def _positions(self, kind: str) -> dict[str, int]:
        return {each.name: position for position, each in enumerate(self.work) if each.kind == kind and each.name}

    def _texts(self, node: Located | None) -> Iterator[tuple[int, str]]:
        for position, each in enumerate(node if isinstance(node, Items) else () if text_in(node) is None else (node,)):
            yield position, str(text_in(each))

    def _refuse_name(self, name: str, path: Loc, what: str, known: Sequence[str]) -> None:
        listed = list_known_names(known) if known else f"The file declares no {what}s by name"
        place = locate(self._root, path)
        self._problems.add(place.value.spot, place.path, f"unknown {what} '{name}'.{suggestion(name, known)} {listed}")

    def _check_order(self) -> None:
        """Note it when tasks wait for each other."""
        try:
            TopologicalSorter({index: each.waits_for for index, each in enumerate(self.work)}).prepare()
        except CycleError as error:
            circle: list[int] = error.args[1][:0:-1]  # each waits for the next, and the last for the first
            first = circle.index(min(circle))
            circle = [*circle[first:], *circle[: first + 1]]
            shown = " -> ".join(self.work[position].name or "?" for position in circle)
            member = self.work[circle[0]]
            path = (*member.path, "after" if member.after else "context")
            spot = locate(self._root, (*path, 0)).value.spot
            what = "phases" if member.after else "tasks"
            text = f"the {what} wait for each other in a circle: {shown}"
            self._problems.add(spot, locate(self._root, path).path, text)
