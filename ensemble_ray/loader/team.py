"""A team file becomes an ensemble. Package: loader.

Order: the text becomes a tree, its sections are validated, names are looked up, objects are made. Each step notes all
that is wrong with the file before the next one is refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pydantic

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.task import Task
from ensemble_ray.ensemble import Ensemble
from ensemble_ray.errors import ValidationError
from ensemble_ray.loader.document import MAX_BYTES, Entries, Items, Loc, locate, read_document
from ensemble_ray.loader.kinds import text_in
from ensemble_ray.loader.problems import Problems, Spot, known_names, suggestion
from ensemble_ray.loader.reading import Reading
from ensemble_ray.loader.section import Section, is_null, report
from ensemble_ray.loader.sections import MapTeamKeys, TeamKeys
from ensemble_ray.values.value import Value

if TYPE_CHECKING:
    from ensemble_ray.items.sources import ItemSource
    from ensemble_ray.map_reduce import MapEnsemble, MapReduceEnsemble
    from ensemble_ray.ports import ChatModel

__all__ = ["load_team_file"]

V = TypeVar("V", bound=Value)
S = TypeVar("S", bound=Section)
_MAP_REDUCE = "map_reduce"
#: Sections of a map-reduce that stand for factories.
_SIDES = ("map", "reduce", "direct")


def load_team_file(
    target: str, *, llm: ChatModel | None = None, needs_keys: bool = True, items: ItemSource | None = None
) -> Ensemble | MapReduceEnsemble | MapEnsemble:
    """Load the team of a YAML file.

    Args:
        target: Its path.
        llm: Takes the place of every model that the file names.
        needs_keys: False: the team will only be looked at, so keys of models and tools may be missing.
        items: Takes the place of the items of a map-reduce.

    Raises:
        ValidationError: there is no such file, or something in it is wrong; everything is named with its place.
    """
    path = Path(target).expanduser()
    text = _read_text(path, target)
    problems = Problems(target)
    root = read_document(text, problems)
    problems.check()
    if not isinstance(root, Entries):
        keys = [name for name in TeamKeys.known_keys() if name != _MAP_REDUCE]
        raise ValidationError(f"{target}:1:1: a team file is a mapping with keys of [{', '.join(keys)}]")
    reading = Reading(path.resolve().parent, llm=llm, needs_keys=needs_keys, items=items)
    ensemble = _Team(root, reading, problems).build()
    problems.check()
    if ensemble is None:
        raise ValidationError(f"{target}: cannot be read as a team")
    return ensemble.with_origin(str(path.resolve()))


def _read_text(path: Path, target: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValidationError(f"'{target}' is longer than {MAX_BYTES:,} bytes, and no team file")
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        raise ValidationError(f"There is no file '{target}'.{_suggest_file(path)}") from None
    except IsADirectoryError:
        raise ValidationError(f"'{target}' is a directory, and not a team file") from None
    except OSError as error:
        raise ValidationError(f"Cannot read '{target}': {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValidationError(f"{target}:{line}:1: not UTF-8 text; save the file as UTF-8") from None


def _suggest_file(path: Path) -> str:
    try:
        known = [each.name for each in path.parent.iterdir() if each.suffix in {".yaml", ".yml"}]
    except OSError:
        return f" There is no directory '{path.parent}' either."
    close = difflib.get_close_matches(path.name, known, n=1) or known[:1]
    return f" Did you mean '{path.parent / close[0]}'?" if close else ""


@dataclass(slots=True, kw_only=True)
class _Member:
    """An agent or a task of the file."""

    name: str | None
    node: Entries
    path: Loc
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    #: positions, among its like, of the tasks that this one waits for
    waits_for: list[int] = field(default_factory=list[int])


class _Team:
    """One file on its way to an ensemble."""

    def __init__(self, root: Entries, reading: Reading, problems: Problems) -> None:
        self._root = root
        self._reading = reading
        self._problems = problems
        #: paths of what pydantic refused, down to members
        self._refused: set[Loc] = set()

    def build(self) -> Ensemble | MapReduceEnsemble | MapEnsemble | None:
        """Return the ensemble; None: something was noted."""
        has_items = _MAP_REDUCE in self._root
        section = self._validate(MapTeamKeys if has_items else TeamKeys)
        agents = list(self._list_members("agents"))
        tasks = list(self._list_members("tasks"))
        if has_items:
            node = self._root[_MAP_REDUCE]
            sides = [side for side in _SIDES if isinstance(node, Entries) and isinstance(node.get(side), Entries)]
            tasks = [
                _Member(name=None, node=cast("Entries", cast("Entries", node)[side]), path=(_MAP_REDUCE, side))
                for side in sides
            ]
        elif "tasks" not in self._root:
            self._problems.add(self._root.spot, "", "a team needs the key 'tasks', or 'map_reduce'")
        self._look_up(agents, tasks)
        if section is None or self._problems:
            return None
        values = section.values()
        if self._reading.llm is not None:
            values["llm"] = self._reading.llm
        for member in (*agents, *tasks):
            member.values = _values_at(section, member.path)
        built_agents = [self._make(Agent, _agent_values(each), each.path) for each in agents]
        built_tasks = self._make_tasks(tasks, dict(zip((each.name for each in agents), built_agents, strict=True)))
        if self._problems:
            return None
        if has_items:
            values.pop("agents", None)
            by_name = dict(zip((str(each.path[-1]) for each in tasks), built_tasks, strict=True))
            fields = {name: value for name, value in values.pop(_MAP_REDUCE).values().items() if name not in _SIDES}
            return self._bring_together({**values, **fields}, by_name)
        return self._make(Ensemble, {**values, "tasks": built_tasks, "agents": built_agents or None}, ())

    def _validate(self, kind: type[S]) -> S | None:
        try:
            return kind.model_validate(self._root, context=self._reading)
        except pydantic.ValidationError as error:
            self._refused = {found["loc"][:2] for found in error.errors(include_url=False, include_input=False)}
            report(error, self._root, self._problems)
            return None

    def _bring_together(
        self, values: dict[str, Any], tasks: Mapping[str, Task]
    ) -> MapReduceEnsemble | MapEnsemble | None:
        from ensemble_ray.items.screening import screened
        from ensemble_ray.loader.item_prompts import AllItemsPrompt, GroupPrompt, ItemPrompt
        from ensemble_ray.map_reduce import MapEnsemble, MapReduceEnsemble

        kind: type[MapReduceEnsemble | MapEnsemble] = MapReduceEnsemble if "reduce" in tasks else MapEnsemble
        arguments = {**values, **tasks}
        inputs = frozenset[str](values.get("inputs", {}))
        source = values.pop("items", self._reading.items)
        if source is None:
            spot = locate(self._root, (_MAP_REDUCE,)).key_spot
            self._problems.add(spot, _MAP_REDUCE, "the map-reduce needs the key 'items'")
            return None
        if kind is MapEnsemble:
            known = {"map", *(info.alias or name for name, info in kind.model_fields.items())}
            for name in arguments.keys() - known:
                place = locate(self._root, (_MAP_REDUCE, name))
                text = "it is of use only with the section 'reduce', which says how outputs are brought together"
                self._problems.add(place.key_spot, place.path, text)
            if self._problems:
                return None
        prompt = ItemPrompt(tasks["map"], inputs)
        values |= {"items": screened(source, problem=prompt.problem), "map_task": prompt}
        if "reduce" in tasks:
            values["reduce_task"] = GroupPrompt(tasks["reduce"], inputs)
        if "direct" in tasks:
            values["direct_task"] = AllItemsPrompt(tasks["direct"], inputs)
        return self._make(kind, values, (_MAP_REDUCE,), ())

    # Members.

    def _list_members(self, section: str) -> Iterator[_Member]:
        node = self._root.get(section)
        members = node.items() if isinstance(node, Entries) else enumerate(node) if isinstance(node, Items) else ()
        seen: dict[str, int] = {}
        for step, member in members:
            if not isinstance(member, Entries):
                continue
            name = step if isinstance(step, str) else text_in(member.get("name"))
            if name is not None and name in seen:
                text = f"two {section} are named '{name}'; the first is in line {seen[name]}"
                self._problems.add(member.spot, f"{section}[{step}]", text)
            elif name is not None:
                seen[name] = member.spot.line
            yield _Member(name=name, node=member, path=(section, step))

    # Names.

    def _look_up(self, agents: Sequence[_Member], tasks: Sequence[_Member]) -> None:
        agent_names = [each.name for each in agents if each.name]
        positions = {each.name: position for position, each in enumerate(tasks) if each.name}
        has_llm = self._reading.llm is not None or _gives(self._root, "llm")
        for agent in agents:
            if not has_llm and agent.path not in self._refused and not _gives(agent.node, "llm"):
                text = "it has no llm: give it one, or one to the whole team (key 'llm' at the top), or use --llm"
                place = locate(self._root, agent.path)
                self._problems.add(place.key_spot, place.path, text)
        for task in tasks:
            if task.path in self._refused:
                continue
            if (named := text_in(task.node.get("agent"))) is not None and named not in agent_names:
                self._refuse_name(named, (*task.path, "agent"), "agent", agent_names)
            context = task.node.get("context")
            for position, node in enumerate(context if isinstance(context, Items) else ()):
                name = str(text_in(node))
                if name in positions:
                    task.waits_for.append(positions[name])
                else:
                    self._refuse_name(name, (*task.path, "context", position), "task", list(positions))
        self._check_order(tasks)

    def _refuse_name(self, name: str, path: Loc, what: str, known: Sequence[str]) -> None:
        listed = known_names(known) if known else f"The file declares no {what}s by name"
        place = locate(self._root, path)
        self._problems.add(place.value.spot, place.path, f"unknown {what} '{name}'.{suggestion(name, known)} {listed}")

    def _check_order(self, tasks: Sequence[_Member]) -> None:
        """Note it when tasks wait for each other."""
        try:
            TopologicalSorter({index: task.waits_for for index, task in enumerate(tasks)}).prepare()
        except CycleError as error:
            circle: list[int] = error.args[1][:0:-1]  # each waits for the next, and the last for the first
            first = circle.index(min(circle))
            circle = [*circle[first:], *circle[: first + 1]]
            shown = " -> ".join(tasks[position].name or "?" for position in circle)
            path = (*tasks[circle[0]].path, "context")
            spot = locate(self._root, (*path, 0)).value.spot
            where = locate(self._root, path).path
            self._problems.add(spot, where, f"the tasks wait for each other in a circle: {shown}")

    # Making.

    def _make_tasks(self, tasks: Sequence[_Member], agents: Mapping[str | None, Agent | None]) -> list[Task]:
        """Make the tasks, each behind those that it waits for; return them in file order."""
        built: dict[int, Task] = {}
        default = Task.of("any").expected_output
        order = TopologicalSorter({index: task.waits_for for index, task in enumerate(tasks)})
        for position in order.static_order():
            task = tasks[position]
            if any(each not in built for each in task.waits_for):
                continue  # one of those that it waits for was refused
            values = {"expected_output": default, **task.values, "name": task.name}
            if "agent" in values:
                values["agent"] = agents[values["agent"]]
            values["context"] = [built[each] for each in task.waits_for]
            if (done := self._make(Task, values, task.path)) is not None:
                built[position] = done
        return [built[position] for position in sorted(built)]

    def _make(self, kind: type[V], values: Mapping[str, object], *paths: Loc) -> V | None:
        """Make an object of what stands at these paths; None: the class refused it, which is noted."""
        try:
            return kind(**values)
        except ValidationError as error:
            place = locate(self._root, paths[0])
            self._problems.add(*self._place_of(str(error), paths) or (place.key_spot, place.path), str(error))
            return None

    def _place_of(self, message: str, paths: Sequence[Loc]) -> tuple[Spot, str] | None:
        """Find the value that a message of a class is about: it names the field."""
        for path in paths:
            node = locate(self._root, path).value
            for word in re.findall(r"\w+", message):
                if isinstance(node, Entries) and word in node:
                    place = locate(self._root, (*path, word))
                    return place.value.spot, place.path
        return None


def _gives(node: Entries, name: str) -> bool:
    """Return whether a key has a value, be it one that was refused."""
    return name in node and not is_null(node[name])


def _values_at(section: Section, path: Sequence[str | int]) -> dict[str, Any]:
    found: Any = section
    for step in path:
        found = getattr(found, str(step)) if isinstance(found, Section) else found[step]
    return cast("Section", found).values()


def _agent_values(agent: _Member) -> dict[str, Any]:
    return {"role": agent.name, **{name: value for name, value in agent.values.items() if name != "name"}}
