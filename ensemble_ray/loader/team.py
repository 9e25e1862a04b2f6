"""A team file becomes an ensemble. Package: loader.

Order: the text becomes a tree, its sections are validated, names are looked up, objects are made. Each step notes all
that is wrong with the file before the next one is refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pydantic

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.graph import Graph
from ensemble_ray.definition.identity import Identified
from ensemble_ray.definition.loop import Loop
from ensemble_ray.definition.phase import Phase, PhaseReview
from ensemble_ray.definition.task import Task
from ensemble_ray.ensemble import Ensemble
from ensemble_ray.errors import ValidationError
from ensemble_ray.loader.document import MAX_BYTES, Entries, Loc, locate, read_document
from ensemble_ray.loader.members import Members, TeamEntry
from ensemble_ray.loader.problems import Problems, Spot
from ensemble_ray.loader.reading import Reading
from ensemble_ray.loader.section import FileSection, is_null, report
from ensemble_ray.loader.sections import MapTeamKeys, TeamKeys
from ensemble_ray.values.value import Value

if TYPE_CHECKING:
    from ensemble_ray.items.sources import ItemSource
    from ensemble_ray.map_reduce import MapEnsemble, MapReduceEnsemble
    from ensemble_ray.ports import ChatModel

__all__ = ["load_team_file"]

V = TypeVar("V", bound=Value)
S = TypeVar("S", bound=FileSection)
_MAP_REDUCE = "map_reduce"
#: Key of an agent that is asked by A2A.
_REMOTE = "a2a"
#: Sections of a map-reduce that stand for factories.
_SIDES = ("map", "reduce", "direct")
#: Sections that say what a team does; a map-reduce takes the place of all of them.
_WORK = ("tasks", "loops", "phases", "graph")
_EXPECTED_OUTPUT = Task.of("any").expected_output


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
        keys = [name for name in TeamKeys.list_keys() if name != _MAP_REDUCE]
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


class _Team:
    """One file on its way to an ensemble."""

    def __init__(self, root: Entries, reading: Reading, problems: Problems) -> None:
        self._root = root
        self._reading = reading
        self._problems = problems
        self._members = Members(root, problems)
        #: paths of what pydantic refused
        self._refused: set[Loc] = set()

    def build(self) -> Ensemble | MapReduceEnsemble | MapEnsemble | None:
        """Return the ensemble; None: something was noted."""
        has_items = _MAP_REDUCE in self._root
        section = self._validate(MapTeamKeys if has_items else TeamKeys)
        members = self._members
        if has_items:
            members.add_sides(_MAP_REDUCE, _SIDES)
        members.collect()
        if not has_items and not any(name in self._root for name in _WORK):
            text = f"a team needs the key 'tasks', or one of [{', '.join((*_WORK[1:], _MAP_REDUCE))}]"
            self._problems.add(self._root.spot, "", text)
        self._look_up()
        if section is None or self._problems:
            return None
        values = section.values()
        if self._reading.llm is not None:
            values["llm"] = self._reading.llm
        for member in (*members.agents, *members.work):
            member.values = _values_at(section, member.path)
        agents = [self._make_agent(each) for each in members.agents]
        made = self._make_work(dict(zip((each.name for each in members.agents), agents, strict=True)))
        if self._problems:
            return None
        if has_items:
            values.pop("agents", None)
            by_name = {str(each.path[-1]): cast("Task", made[at]) for at, each in enumerate(members.work)}
            fields = {name: value for name, value in values.pop(_MAP_REDUCE).values().items() if name not in _SIDES}
            return self._bring_together({**values, **fields}, by_name)
        work: dict[str, object] = {name: [made[at] for at in members.top.get(name, ())] for name in _WORK[:-1]}
        graph = next((made[at] for at in members.top.get("graph", ())), None)
        return self._make(Ensemble, {**values, **work, "graph": graph, "agents": agents or None}, ())

    def _validate(self, kind: type[S]) -> S | None:
        try:
            return kind.model_validate(self._root, context=self._reading)
        except pydantic.ValidationError as error:
            self._refused = {found["loc"] for found in error.errors(include_url=False, include_input=False)}
            report(error, self._root, self._problems)
            return None

    def _bring_together(
        self, values: dict[str, Any], tasks: Mapping[str, Task]
    ) -> MapReduceEnsemble | MapEnsemble | None:
        from ensemble_ray.items.screening import screen_source
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
        values |= {"items": screen_source(source, problem=prompt.problem), "map_task": prompt}
        if "reduce" in tasks:
            values["reduce_task"] = GroupPrompt(tasks["reduce"], inputs)
        if "direct" in tasks:
            values["direct_task"] = AllItemsPrompt(tasks["direct"], inputs)
        return self._make(kind, values, (_MAP_REDUCE,), ())

    def _look_up(self) -> None:
        has_llm = self._reading.llm is not None or _has_value(self._root, "llm")
        for agent in self._members.agents:
            has_own = any(_has_value(agent.node, name) for name in ("llm", "runner", _REMOTE))
            if not has_llm and not self._is_refused(agent) and not has_own:
                text = "it has no llm: give it one, or one to the whole team (key 'llm' at the top), or use --llm"
                place = locate(self._root, agent.path)
                self._problems.add(place.key_spot, place.path, text)
        self._members.look_up(self._refused)

    def _is_refused(self, member: TeamEntry) -> bool:
        return any(path[: len(member.path)] == member.path for path in self._refused)

    # Making.

    def _make_work(self, agents: Mapping[str | None, Agent | None]) -> dict[int, Identified]:
        """Make tasks and units, each behind what it waits for; return them by their positions."""
        made: dict[int, Identified] = {}
        work = self._members.work
        for position in self._members.in_order():
            member = work[position]
            if any(each not in made for each in member.waits_for):
                continue  # one of those that it waits for was refused
            done = self._make_member(member, made, agents)
            if done is not None:
                made[position] = done
        return made

    def _make_member(
        self, member: TeamEntry, made: Mapping[int, Identified], agents: Mapping[str | None, Agent | None]
    ) -> Identified | None:
        values: dict[str, object] = {**member.values, "name": member.name}
        parts = {name: [made[at] for at in positions] for name, positions in member.parts.items()}
        context = [cast("Loop | Phase", made[at]).output if is_output else made[at] for at, is_output in member.context]
        match member.kind:
            case "loop":
                return self._make(Loop, {**values, **parts, "context": context}, member.path)
            case "phase":
                review = values.pop("review", None)
                if review is not None:
                    rules = {**cast("FileSection", review).values(), "task": parts.pop("review")[0]}
                    values["review"] = self._make(PhaseReview, rules, (*member.path, "review"))
                values["after"] = [made[at] for at in member.after]
                return self._make(Phase, {**values, **parts}, member.path)
            case "graph":
                names = (str(self._members.work[at].path[-1]) for at in member.parts["states"])
                values["states"] = dict(zip(names, parts["states"], strict=True))
                return self._make(Graph, values, member.path)
            case _:
                if "agent" in values:
                    values["agent"] = agents[cast("str", values["agent"])]
                return self._make(
                    Task, {"expected_output": _EXPECTED_OUTPUT, **values, "context": context}, member.path
                )

    def _make_agent(self, agent: TeamEntry) -> Agent | None:
        given = {name: value for name, value in agent.values.items() if name != "name"}
        values: dict[str, Any] = {"role": agent.name, **given}
        remote = values.pop(_REMOTE, None)
        if remote is None:
            return self._make(Agent, values, agent.path)
        from ensemble_ray.definition.remote_agent import RemoteAgent  # a team without one does not pay for it

        return self._make(RemoteAgent, {**values, **remote.values()}, (*agent.path, _REMOTE), agent.path)

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


def _has_value(node: Entries, name: str) -> bool:
    """Return whether a key has a value, be it one that was refused."""
    return name in node and not is_null(node[name])


def _values_at(section: FileSection, path: Sequence[str | int]) -> dict[str, Any]:
    found: Any = section
    for step in path:
        found = getattr(found, str(step)) if isinstance(found, FileSection) else found[step]
    return cast("FileSection", found).values()
