"""Load a team file as an ensemble, and build the JSON schema of team files."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import msgspec
import pydantic
from msgspec import Struct

from ensemble_ray.definition.agent import Agent, RemoteAgent
from ensemble_ray.definition.fields import Identified
from ensemble_ray.definition.graph import Graph
from ensemble_ray.definition.loop import Loop
from ensemble_ray.definition.phase import Phase, PhaseReview
from ensemble_ray.definition.task import Task
from ensemble_ray.ensemble import Ensemble
from ensemble_ray.errors import ValidationError
from ensemble_ray.items.sources import ItemSource, screen_source
from ensemble_ray.ports import ChatModel
from ensemble_ray.teamfile.document import (
    MAX_BYTES,
    Entries,
    Items,
    Loc,
    Located,
    Position,
    Problems,
    list_known_names,
    locate,
    read_document,
    suggestion,
)
from ensemble_ray.teamfile.evaluation import EvaluationKeys
from ensemble_ray.teamfile.fields import AllItemsPrompt, GroupPrompt, ItemPrompt
from ensemble_ray.teamfile.section import FileSection, Reading, is_null, report, text_in
from ensemble_ray.teamfile.sections import MapTeamKeys, TeamKeys
from ensemble_ray.values.messages import JsonValue
from ensemble_ray.values.value import Value

if TYPE_CHECKING:
    from ensemble_ray.map_reduce import MapEnsemble, MapReduceEnsemble


V = TypeVar("V", bound=Value)
_MAP_REDUCE = "map_reduce"
_REMOTE = "a2a"  # of an agent of another system
_SIDES = ("map", "reduce", "direct")  # replace factories of a map-reduce
#: Only tasks and loops may be combined.
_WORK = ("tasks", "loops", "phases", "graph")
_EXPECTED_OUTPUT = Task.of("any").expected_output
_OUTPUT = ".output"


def load_team_file(
    target: str,
    *,
    llm: ChatModel | None = None,
    needs_keys: bool = True,
    items: ItemSource | None = None,
    text: str | None = None,
) -> Ensemble | MapReduceEnsemble | MapEnsemble:
    """Load the team of a YAML file, or report all mistakes. `text` replaces the content of the file."""
    path = Path(target).expanduser()
    if text is None:
        text = read_team_file(target)
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


def load_evaluation_keys(target: str) -> EvaluationKeys | None:
    """Read the section `evaluation` of a team file; None: it has none. `load_team_file` reports the mistakes of other sections."""
    path = Path(target).expanduser()
    problems = Problems(target)
    root = read_document(read_team_file(target), problems)
    problems.check()
    if not isinstance(root, Entries) or "evaluation" not in root:
        return None
    reading = Reading(path.resolve().parent, llm=None, needs_keys=True, evaluates=True)
    only = Entries(root.spot, {"evaluation": root["evaluation"]}, root.key_spots)
    try:
        return cast("EvaluationKeys | None", TeamKeys.model_validate(only, context=reading).evaluation)
    except pydantic.ValidationError as error:
        report(error, only, problems)
    problems.check()
    return None


def team_schema() -> dict[str, JsonValue]:
    schema = TeamKeys.model_json_schema(ref_template="#/definitions/{model}")
    definitions = schema.pop("$defs")
    units = (*_WORK, _MAP_REDUCE)
    schema = {
        **schema,
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "ensemble-ray team",
        "description": "A team of agents and its tasks; run it with `ensemble-ray run FILE`.",
        "anyOf": [{"required": [name]} for name in units],
        "not": {"anyOf": [{"required": [*pair]} for pair in combinations(units, 2) if pair != ("tasks", "loops")]},
        "definitions": definitions,
    }
    return cast("dict[str, JsonValue]", _convert(schema, is_map=False))


def read_team_file(target: str) -> str:
    """Return the text of a team file."""
    path = Path(target).expanduser()
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValidationError(f"'{target}' is longer than {MAX_BYTES:,} bytes, and no team file")
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        try:
            known = [each.name for each in path.parent.iterdir() if each.suffix in {".yaml", ".yml"}]
            close = difflib.get_close_matches(path.name, known, n=1) or known[:1]
            hint = f" Did you mean '{path.parent / close[0]}'?" if close else ""
        except OSError:
            hint = f" There is no directory '{path.parent}' either."
        raise ValidationError(f"There is no file '{target}'.{hint}") from None
    except IsADirectoryError:
        raise ValidationError(f"'{target}' is a directory, and not a team file") from None
    except OSError as error:
        raise ValidationError(f"Cannot read '{target}': {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValidationError(f"{target}:{line}:1: not UTF-8 text; save the file as UTF-8") from None


class _Team:
    def __init__(self, root: Entries, reading: Reading, problems: Problems) -> None:
        self._root = root
        self._reading = reading
        self._problems = problems
        self._members = Members(root, problems)
        self._refused: set[Loc] = set()  # of values

    def build(self) -> Ensemble | MapReduceEnsemble | MapEnsemble | None:
        has_items = _MAP_REDUCE in self._root
        section: FileSection | None = None
        try:
            section = (MapTeamKeys if has_items else TeamKeys).model_validate(self._root, context=self._reading)
        except pydantic.ValidationError as error:
            self._refused = {found["loc"] for found in error.errors(include_url=False, include_input=False)}
            report(error, self._root, self._problems)
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
        values.pop("evaluation", None)
        if self._reading.llm is not None:
            values["llm"] = self._reading.llm
        for member in (*members.agents, *members.work):
            found: Any = section
            for step in member.path:
                found = getattr(found, str(step)) if isinstance(found, FileSection) else found[step]
            member.values = cast("FileSection", found).values()
        agents = [cast("Agent | None", self._make_member(each, {}, {})) for each in members.agents]
        made = self._make_work(dict(zip((each.name for each in members.agents), agents, strict=True)))
        if self._problems:
            return None
        if has_items:
            values.pop("agents", None)
            by_name = {str(each.path[-1]): cast("Task", made[at]) for at, each in enumerate(members.work)}
            fields = {name: value for name, value in values.pop(_MAP_REDUCE).values().items() if name not in _SIDES}
            return self._make_map_reduce({**values, **fields}, by_name)
        work: dict[str, object] = {name: [made[at] for at in members.top.get(name, ())] for name in _WORK[:-1]}
        graph = next((made[at] for at in members.top.get("graph", ())), None)
        return self._make(Ensemble, {**values, **work, "graph": graph, "agents": agents or None}, ())

    def _make_map_reduce(
        self, values: dict[str, Any], tasks: Mapping[str, Task]
    ) -> MapReduceEnsemble | MapEnsemble | None:
        from ensemble_ray.map_reduce import MapEnsemble, MapReduceEnsemble

        kind: type[MapReduceEnsemble | MapEnsemble] = MapReduceEnsemble if "reduce" in tasks else MapEnsemble
        arguments = {**values, **tasks}
        inputs = frozenset[str](values.get("inputs", {}))
        source = values.pop("items", self._reading.items)
        if source is None:
            self._refuse_key((_MAP_REDUCE,), "the map-reduce needs the key 'items'")
            return None
        if kind is MapEnsemble:
            known = {"map", *(info.alias or name for name, info in kind.model_fields.items())}
            for name in arguments.keys() - known:
                text = "it is of use only with the section 'reduce', which says how outputs are brought together"
                self._refuse_key((_MAP_REDUCE, name), text)
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
            if not has_llm and not agent.is_refused(self._refused) and not has_own:
                text = "it has no llm: give it one, or one to the whole team (key 'llm' at the top), or use --llm"
                self._refuse_key(agent.path, text)
        self._members.look_up(self._refused)

    def _refuse_key(self, path: Loc, text: str) -> None:
        place = locate(self._root, path)
        self._problems.add(place.key_spot, place.path, text)

    def _make_work(self, agents: Mapping[str | None, Agent | None]) -> dict[int, Identified]:
        """Make tasks and units in topological order, by position."""
        made: dict[int, Identified] = {}
        work = self._members.work
        for position in self._members.sorter().static_order():
            member = work[position]
            if any(each not in made for each in member.waits_for):
                continue  # a dependency was refused
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
            case "agent":
                name = values.pop("name")
                values = {"role": name, **values}
                remote = cast("FileSection | None", values.pop(_REMOTE, None))
                if remote is None:
                    return self._make(Agent, values, member.path)
                return self._make(RemoteAgent, {**values, **remote.values()}, (*member.path, _REMOTE), member.path)
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

    def _make(self, kind: type[V], values: Mapping[str, object], *paths: Loc) -> V | None:
        """Make an object. If its class refuses the values, add the mistake at one of these paths."""
        try:
            return kind(**values)
        except ValidationError as error:
            place = locate(self._root, paths[0])
            self._problems.add(*self._place_of(str(error), paths) or (place.key_spot, place.path), str(error))
            return None

    def _place_of(self, message: str, paths: Sequence[Loc]) -> tuple[Position, str] | None:
        """Return the position of the first word of a message that is a key."""
        for path in paths:
            node = locate(self._root, path).value
            for word in re.findall(r"\w+", message):
                if isinstance(node, Entries) and word in node:
                    place = locate(self._root, (*path, word))
                    return place.value.spot, place.path
        return None


def _has_value(node: Entries, name: str) -> bool:
    return name in node and not is_null(node[name])


class TeamEntry(Struct, kw_only=True):
    kind: Literal["agent", "task", "loop", "phase", "graph"]
    name: str | None
    node: Entries
    path: Loc
    values: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    context: list[tuple[int, bool]] = msgspec.field(
        default_factory=list[tuple[int, bool]]
    )  # `Members.work`; is an output meant?
    parts: dict[str, list[int]] = msgspec.field(
        default_factory=dict[str, list[int]]
    )  # positions by key, such as body or states
    after: list[int] = msgspec.field(default_factory=list[int])  # positions of phases

    def is_refused(self, refused: set[Loc]) -> bool:
        return any(path[: len(self.path)] == self.path for path in refused)

    @property
    def waits_for(self) -> list[int]:
        """Positions of entries to build first."""
        inside = (position for positions in self.parts.values() for position in positions)
        return [*(position for position, _ in self.context), *inside, *self.after]


class Members:
    def __init__(self, root: Entries, problems: Problems) -> None:
        self.agents: list[TeamEntry] = []
        self.work: list[TeamEntry] = []
        self.top: dict[str, list[int]] = {}  # positions in `work`
        self._root = root
        self._problems = problems
        self._lines: dict[tuple[str, str], int] = {}

    def collect(self) -> None:
        self.agents = list(self._read("agent", ("agents",)))
        self.top["tasks"] = self._add_tasks(("tasks",))
        self.top["loops"] = [self._add_loop(member) for member in self._read("loop", ("loops",))]
        for member in self._read("phase", ("phases",)):
            member.parts["tasks"] = self._add_tasks((*member.path, "tasks"))
            member.parts["loops"] = [self._add_loop(each) for each in self._read("loop", (*member.path, "loops"))]
            reviewer = self._at((*member.path, "review", "task"))
            if isinstance(reviewer, Entries):
                path: Loc = (*member.path, "review", "task")
                review = TeamEntry(kind="task", name=text_in(reviewer.get("name")), node=reviewer, path=path)
                if review.name is not None:
                    self._note_twice("task", review.name, reviewer, path)
                member.parts["review"] = [self._add(review)]
            self.top.setdefault("phases", []).append(self._add(member))
        node = self._root.get("graph")
        if isinstance(node, Entries):
            graph = TeamEntry(kind="graph", name=text_in(node.get("name")), node=node, path=("graph",))
            states = self._read("state", ("graph", "states"))
            graph.parts["states"] = [
                self._add_loop(each) if "body" in each.node else self._add(each) for each in states
            ]
            self.top["graph"] = [self._add(graph)]

    def add_sides(self, section: str, sides: Sequence[str]) -> None:
        for side in sides:
            node = self._at((section, side))
            if isinstance(node, Entries):
                self._add(TeamEntry(kind="task", name=None, node=node, path=(section, side)))

    def look_up(self, refused: set[Loc]) -> None:
        agent_names = [each.name for each in self.agents if each.name]
        tasks = self._positions("task")
        outputs = {f"{name}{_OUTPUT}": at for kind in ("loop", "phase") for name, at in self._positions(kind).items()}
        phases = self._positions("phase")
        for member in self.work:
            if member.is_refused(refused):
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
        try:
            self.sorter().prepare()
        except CycleError as error:
            circle: list[int] = error.args[1][:0:-1]  # each depends on the next, and the last on the first
            first = circle.index(min(circle))
            circle = [*circle[first:], *circle[: first + 1]]
            shown = " -> ".join(self.work[position].name or "?" for position in circle)
            member = self.work[circle[0]]
            path = (*member.path, "after" if member.after else "context")
            spot = locate(self._root, (*path, 0)).value.spot
            what = "phases" if member.after else "tasks"
            self._problems.add(
                spot, locate(self._root, path).path, f"the {what} wait for each other in a circle: {shown}"
            )

    def sorter(self) -> TopologicalSorter[int]:
        return TopologicalSorter({index: each.waits_for for index, each in enumerate(self.work)})

    def _add(self, member: TeamEntry) -> int:
        self.work.append(member)
        return len(self.work) - 1

    def _add_tasks(self, path: Loc) -> list[int]:
        return [self._add(member) for member in self._read("task", path)]

    def _add_loop(self, member: TeamEntry) -> int:
        member.parts["body"] = self._add_tasks((*member.path, "body"))
        return self._add(member)

    def _read(self, section: Literal["agent", "task", "loop", "phase", "state"], path: Loc) -> Iterator[TeamEntry]:
        node = self._at(path)
        members = node.items() if isinstance(node, Entries) else enumerate(node) if isinstance(node, Items) else ()
        for step, member in members:
            if not isinstance(member, Entries):
                continue
            kind = section if section != "state" else "loop" if "body" in member else "task"
            name = step if isinstance(step, str) else text_in(member.get("name"))
            if name is not None:
                self._note_twice(kind, name, member, (*path, step))
            yield TeamEntry(kind=kind, name=name, node=member, path=(*path, step))

    def _note_twice(self, kind: str, name: str, member: Entries, path: Loc) -> None:
        if (kind, name) not in self._lines:
            self._lines[kind, name] = member.spot.line
            return
        where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
        text = f"two {kind}s are named '{name}'; the first is in line {self._lines[kind, name]}"
        self._problems.add(member.spot, where, text)

    def _at(self, path: Loc) -> Located | None:
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

    def _positions(self, kind: str) -> dict[str, int]:
        return {each.name: position for position, each in enumerate(self.work) if each.kind == kind and each.name}

    def _texts(self, node: Located | None) -> Iterator[tuple[int, str]]:
        for position, each in enumerate(node if isinstance(node, Items) else () if text_in(node) is None else (node,)):
            yield position, str(text_in(each))

    def _refuse_name(self, name: str, path: Loc, what: str, known: Sequence[str]) -> None:
        listed = list_known_names(known) if known else f"The file declares no {what}s by name"
        place = locate(self._root, path)
        self._problems.add(place.value.spot, place.path, f"unknown {what} '{name}'.{suggestion(name, known)} {listed}")


def _convert(part: Any, *, is_map: bool) -> Any:
    """Convert pydantic's schema to draft 7. `is_map`: its keys are no words of JSON Schema."""
    if isinstance(part, list):
        return [_convert(each, is_map=False) for each in part]
    if not isinstance(part, dict):
        return part
    found = {
        name: _convert(value, is_map=not is_map and name in {"properties", "definitions", "patternProperties"})
        for name, value in cast("dict[str, Any]", part).items()
        if is_map or name != "title" or "$schema" in part
    }
    if not is_map and "$ref" in found and len(found) > 1:  # draft 7 ignores all words beside a `$ref`
        found = {"allOf": [{"$ref": found.pop("$ref")}], **found}
    return found
