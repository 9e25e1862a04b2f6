"""A team file becomes an ensemble. Room: loader.

Order: the text becomes a tree, every value is read, names are looked up, objects are made. Each step notes all that is
wrong with the file before the next one is refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.task import Task
from ensemble_ray.ensemble import Ensemble
from ensemble_ray.errors import ValidationError
from ensemble_ray.loader.document import MAX_BYTES, Entries, Entry, Items, Located, Scalar, read_document
from ensemble_ray.loader.kinds import TEXT, Field, Reading, read_fields
from ensemble_ray.loader.problems import Problems, Spot, known_names, suggestion
from ensemble_ray.loader.tables import AGENT, TASK, TEAM, Named
from ensemble_ray.values.value import Value

if TYPE_CHECKING:
    from ensemble_ray.items.sources import ItemSource
    from ensemble_ray.map_reduce import MapEnsemble, MapReduceEnsemble
    from ensemble_ray.ports import ChatModel

__all__ = ["load_team_file"]

V = TypeVar("V", bound=Value)
_SECTIONS = ("agents", "tasks")
_MAP_REDUCE = "map_reduce"
_NAME = {"name": Field(kind=TEXT)}


def load_team_file(
    target: str, *, llm: ChatModel | None = None, needs_keys: bool = True, items: ItemSource | None = None
) -> Ensemble | MapReduceEnsemble | MapEnsemble:
    """The team of a YAML file.

    Args:
        target: Its path.
        llm: Takes the place of every model that the file names.
        needs_keys: False: the team will only be looked at, so keys of models and tools may be missing.
        items: Takes the place of the items of a map-reduce.

    Raises:
        ValidationError: there is no such file, or something in it is wrong; everything is named with its place.
    """
    path = Path(target).expanduser()
    text = _text(path, target)
    directory = path.resolve().parent
    problems = Problems(target)
    root = read_document(text, problems)
    problems.check()
    reading = Reading(problems, directory, llm=llm, needs_keys=needs_keys, items=items)
    ensemble = _Team(reading).ensemble(cast("Located", root))
    problems.check()
    if ensemble is None:
        raise ValidationError(f"{target}: cannot be read as a team")
    return ensemble.with_origin(str(path.resolve()))


def _text(path: Path, target: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValidationError(f"'{target}' is longer than {MAX_BYTES:,} bytes, and no team file")
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        raise ValidationError(f"There is no file '{target}'.{_nearest_file(path)}") from None
    except IsADirectoryError:
        raise ValidationError(f"'{target}' is a directory, and not a team file") from None
    except OSError as error:
        raise ValidationError(f"Cannot read '{target}': {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValidationError(f"{target}:{line}:1: not UTF-8 text; save the file as UTF-8") from None


def _nearest_file(path: Path) -> str:
    try:
        known = [each.name for each in path.parent.iterdir() if each.suffix in {".yaml", ".yml"}]
    except OSError:
        return f" There is no directory '{path.parent}' either."
    close = difflib.get_close_matches(path.name, known, n=1) or known[:1]
    return f" Did you mean '{path.parent / close[0]}'?" if close else ""


@dataclass(slots=True, kw_only=True)
class _Declared:
    """An agent or a task of the file."""

    name: str | None
    node: Entries
    spot: Spot
    where: str
    values: dict[str, object] | None = None
    #: positions, in the same section, of the tasks that this one waits for
    waits_for: list[int] = field(default_factory=list[int])


class _Team:
    """Reads one file."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._problems = reading.problems

    def ensemble(self, root: Located) -> Ensemble | MapReduceEnsemble | MapEnsemble | None:
        """The team; None when something was noted."""
        if not isinstance(root, Entries):
            self._reading.refuse(root, "", f"a team file is a mapping with keys of [{', '.join((*_SECTIONS, *TEAM))}]")
            return None
        if (section := root.entries.get(_MAP_REDUCE)) is not None:
            return self._map_reduce(root, section)
        sections = {name: Field(kind=TEXT) for name in _SECTIONS}
        own = Entries(spot=root.spot, entries={k: entry for k, entry in root.entries.items() if k not in sections})
        known = {**sections, _MAP_REDUCE: Field(kind=TEXT), **TEAM}
        values = read_fields(self._reading, own, known, "", what="a team")
        agents = list(self._section(root, "agents", AGENT))
        tasks = list(self._section(root, "tasks", TASK))
        if "tasks" not in root.entries:
            self._problems.add(root.spot, "", "a team needs the key 'tasks', or 'map_reduce'")
        team_llm = self._reading.llm or (values or {}).get("llm")
        self._look_up(agents, tasks, has_llm=team_llm is not None or _says_llm(root))
        if values is None or self._problems:
            return None
        if team_llm is not None:
            values["llm"] = team_llm
        if (workflow := root.entries.get("workflow")) is not None and _is_null(workflow.value):
            values["workflow"] = None
        made_agents = [self._made(Agent, each, self._agent_values(each)) for each in agents]
        made_tasks = self._tasks(tasks, dict(zip((each.name for each in agents), made_agents, strict=True)))
        if self._problems:
            return None
        whole = _Declared(name=None, node=root, spot=root.spot, where="")
        return self._made(Ensemble, whole, {**values, "tasks": made_tasks, "agents": made_agents or None})

    def _map_reduce(self, root: Entries, entry: Entry) -> MapReduceEnsemble | MapEnsemble | None:
        """The map-reduce; None when something was noted."""
        from ensemble_ray.loader.map_reduce import MAP_REDUCE, MAP_TEAM, SIDES, Side  # most teams do not need them

        if (tasks := root.entries.get("tasks")) is not None:
            text = "a file with 'map_reduce' has no tasks beside it: its tasks are made of its items"
            self._problems.add(tasks.spot, "tasks", text)
        apart = {"agents": Field(kind=TEXT), "tasks": Field(kind=TEXT), _MAP_REDUCE: Field(kind=TEXT)}
        own = Entries(spot=root.spot, entries={name: each for name, each in root.entries.items() if name not in apart})
        rules = read_fields(self._reading, own, {**apart, **MAP_TEAM}, "", what="a team with a map-reduce")
        agents = list(self._section(root, "agents", AGENT))
        values = read_fields(self._reading, entry.value, MAP_REDUCE, _MAP_REDUCE, what="the map-reduce")
        team_llm = self._reading.llm or (rules or {}).get("llm")
        sides = {name: side for name in SIDES if isinstance(side := (values or {}).get(name), Side)}
        declared = [
            _Declared(name=None, node=side.node, spot=side.node.spot, where=side.where, values=side.values)
            for side in sides.values()
        ]
        self._look_up(agents, declared, has_llm=team_llm is not None or _says_llm(root))
        if rules is None or values is None or self._problems:
            return None
        made_agents = [self._made(Agent, each, self._agent_values(each)) for each in agents]
        made = self._tasks(declared, dict(zip((each.name for each in agents), made_agents, strict=True)))
        if self._problems:
            return None
        rules = {**rules, "llm": team_llm}
        fields = {name: value for name, value in values.items() if name not in SIDES}
        whole = _Declared(name=None, node=cast("Entries", entry.value), spot=entry.spot, where=_MAP_REDUCE)
        return self._brought_together(whole, root, {**rules, **fields}, dict(zip(sides, made, strict=True)))

    def _brought_together(
        self, section: _Declared, root: Entries, values: dict[str, object], tasks: Mapping[str, Task]
    ) -> MapReduceEnsemble | MapEnsemble | None:
        from ensemble_ray.items.screening import screened
        from ensemble_ray.items.sources import ItemSource
        from ensemble_ray.loader.item_prompts import AllItemsPrompt, GroupPrompt, ItemPrompt
        from ensemble_ray.map_reduce import MapEnsemble, MapReduceEnsemble

        inputs = frozenset(cast("Mapping[str, object]", values.get("inputs", {})))
        prompt = ItemPrompt(tasks["map"], inputs)
        source = values.get("items", self._reading.items)
        if not isinstance(source, ItemSource):
            self._problems.add(section.spot, section.where, "the map-reduce needs the key 'items'")
            return None
        factories: dict[str, object] = {"items": screened(source, problem=prompt.problem), "map_task": prompt}
        if "reduce" in tasks:
            factories["reduce_task"] = GroupPrompt(tasks["reduce"], inputs)
        if "direct" in tasks:
            factories["direct_task"] = AllItemsPrompt(tasks["direct"], inputs)
        kind = MapReduceEnsemble if "reduce" in tasks else MapEnsemble
        if kind is MapEnsemble:
            known = {info.alias or name for name, info in kind.model_fields.items()}
            text = "it is of use only with the section 'reduce', which says how outputs are brought together"
            for name in {*values, *tasks} - known - {"map"}:
                self._problems.add(section.node.entries[name].spot, f"{section.where}.{name}", text)
        if self._problems:
            return None
        try:
            return kind(**cast("dict[str, Any]", {**values, **factories}))
        except ValidationError as error:
            spot, where = _place_of(str(error), section)
            if where == section.where:
                spot, where = _place_of(str(error), _Declared(name=None, node=root, spot=spot, where=""))
            self._problems.add(spot, where or section.where, str(error))
            return None

    # Reading a section.

    def _section(self, root: Entries, section: str, table: Mapping[str, Field]) -> Iterator[_Declared]:
        entry = root.entries.get(section)
        if entry is None:
            return
        seen: dict[str, _Declared] = {}
        found = False
        for declared in self._members(entry, section):
            found = True
            keys = table if isinstance(entry.value, Entries) else {**_NAME, **table}
            what = f"{section[:-1]} '{declared.name}'" if declared.name else f"this {section[:-1]}"
            declared.values = read_fields(self._reading, declared.node, keys, declared.where, what=what)
            if declared.name is not None and declared.name in seen:
                first = seen[declared.name].spot.line
                text = f"two {section} are named '{declared.name}'; the first is in line {first}"
                self._problems.add(declared.spot, declared.where, text)
            elif declared.name is not None:
                seen[declared.name] = declared
            yield declared
        if not found and isinstance(entry.value, Entries | Items):
            self._problems.add(entry.spot, section, f"there must be at least one {section[:-1]}")

    def _members(self, entry: Entry, section: str) -> Iterator[_Declared]:
        node, one = entry.value, section[:-1]
        if isinstance(node, Entries):
            for name, member in node.entries.items():
                where = f"{section}.{name}"
                if isinstance(member.value, Entries):
                    yield _Declared(name=name, node=member.value, spot=member.spot, where=where)
                else:
                    self._reading.refuse(member.value, where, f"{one} '{name}' must be a mapping")
        elif isinstance(node, Items):
            for index, item in enumerate(node.items):
                where = f"{section}[{index}]"
                if isinstance(item, Entries):
                    yield self._listed(item, where, one)
                else:
                    self._reading.refuse(item, where, f"each {one} must be a mapping")
        else:
            self._problems.add(entry.spot, section, f"must be a mapping of names to {section}, or a list of {section}")

    def _listed(self, item: Entries, where: str, one: str) -> _Declared:
        """A member of a list; agents must have a name there, since tasks refer to them."""
        given = item.entries.get("name")
        name = given.value.value if given is not None and isinstance(given.value, Scalar) else None
        if one == "agent" and name is None:
            self._problems.add(item.spot, where, "each agent of a list needs the key 'name'")
        return _Declared(name=name if isinstance(name, str) else None, node=item, spot=item.spot, where=where)

    # Names.

    def _look_up(self, agents: Sequence[_Declared], tasks: Sequence[_Declared], *, has_llm: bool) -> None:
        agent_names = [each.name for each in agents if each.name]
        positions = {each.name: position for position, each in enumerate(tasks) if each.name}
        for agent in agents:
            if not has_llm and agent.values is not None and "llm" not in agent.values:
                text = "it has no llm: give it one, or one to the whole team (key 'llm' at the top), or use --llm"
                self._problems.add(agent.spot, agent.where, text)
        for task in tasks:
            values = task.values or {}
            named = cast("Named | None", values.get("agent"))
            if named is not None and named.name not in agent_names:
                self._unknown(named, "agent", agent_names)
            for context in cast("list[Named]", values.get("context", [])):
                if context.name not in positions:
                    self._unknown(context, "task", list(positions))
                else:
                    task.waits_for.append(positions[context.name])
        if circle := _circle(tasks):
            shown = " -> ".join(tasks[position].name or "?" for position in circle)
            first = tasks[circle[0]]
            spot = cast("list[Named]", (first.values or {})["context"])[0].node.spot
            self._problems.add(spot, f"{first.where}.context", f"the tasks wait for each other in a circle: {shown}")

    def _unknown(self, named: Named, what: str, known: Sequence[str]) -> None:
        listed = known_names(known) if known else f"The file declares no {what}s by name"
        text = f"unknown {what} '{named.name}'.{suggestion(named.name, known)} {listed}"
        self._reading.refuse(named.node, named.where, text)

    # Making.

    @staticmethod
    def _agent_values(agent: _Declared) -> dict[str, object]:
        values = dict(agent.values or {})
        values.pop("name", None)
        values.setdefault("role", agent.name)
        return values

    def _tasks(self, tasks: Sequence[_Declared], agents: Mapping[str | None, Agent | None]) -> list[Task]:
        """The tasks in file order; each is made behind those that it waits for."""
        made: dict[int, Task] = {}
        default = Task.of("any").expected_output
        waiting = list(range(len(tasks)))
        while waiting:
            ready = [position for position in waiting if all(each in made for each in tasks[position].waits_for)]
            if not ready:
                break  # one of those that they wait for was refused
            for position in ready:
                declared = tasks[position]
                values = {"expected_output": default, **(declared.values or {}), "name": declared.name}
                if isinstance(named := values.get("agent"), Named):
                    values["agent"] = agents[named.name]
                values["context"] = [made[each] for each in declared.waits_for]
                task = self._made(Task, declared, values)
                if task is not None:
                    made[position] = task
            waiting = [position for position in waiting if position not in ready]
        return [made[position] for position in sorted(made)]

    def _made(self, kind: type[V], declared: _Declared, values: Mapping[str, object]) -> V | None:
        try:
            return kind(**values)
        except ValidationError as error:
            spot, where = _place_of(str(error), declared)
            self._problems.add(spot, where, str(error))
            return None


def _says_llm(root: Entries) -> bool:
    """Return whether a file gives the whole team a model, be it one that was refused."""
    entry = root.entries.get("llm")
    return entry is not None and not _is_null(entry.value)


def _is_null(node: Located) -> bool:
    return isinstance(node, Scalar) and node.value is None


def _place_of(message: str, declared: _Declared) -> tuple[Spot, str]:
    """Where the value stands that a message of a class is about: it names the field."""
    for word in re.findall(r"\w+", message):
        entry = declared.node.entries.get(word)
        if entry is not None:
            return entry.value.spot, f"{declared.where}.{word}" if declared.where else word
    return declared.spot, declared.where


def _circle(tasks: Sequence[_Declared]) -> list[int]:
    """Tasks that wait for each other, the first one again at the end; empty when there are none."""
    waits = {position: set(task.waits_for) for position, task in enumerate(tasks)}
    while done := [position for position, on in waits.items() if not on]:
        for position in done:
            del waits[position]
        for on in waits.values():
            on.difference_update(done)
    if not waits:
        return []
    path = [min(waits)]
    while True:
        # Whatever is left waits for something that is left, so the walk must come round.
        following = min(each for each in waits[path[-1]])
        if following in path:
            return [*path[path.index(following) :], following]
        path.append(following)
