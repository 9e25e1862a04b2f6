"""The teams, tools, models and Datasets that an operator serves. Clients cannot call other tools of the teams."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from typing import cast

from msgspec import Struct
from msgspec.structs import replace
from pydantic import JsonValue

from ensemble_ray import ChatModel, Ensemble, ExitEarlyError, IllegalStateError, PromptTemplateError, ValidationError
from ensemble_ray.plan.plan import Plan
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.serve.schemas import ChatInfo, EnsembleInfo, Refusal, TaskInfo, ToolInfo, ToolReply
from ensemble_ray.teamfile import Runnable, find_planned_form, is_team_file, load_runnable
from ensemble_ray.teamfile.fields import load_model
from ensemble_ray.teamfile.references import find_attribute, make_importable
from ensemble_ray.tools.call import call_tool
from ensemble_ray.tools.registry import BoundAgentTool, resolve_tools
from ensemble_ray.tools.tool import ToolContext
from ensemble_ray.values.ids import new_object_id
from ensemble_ray.values.value import to_tuple

_log = bounded_logger(__name__)
_CALL_S = 30.0
#: A call that timed out may still occupy a thread.
_MOST_CALLS = 10
_RETRY_S = 5


class ToolCatalog:
    def __init__(self, entries: object = (), *, time_limit_s: float = _CALL_S) -> None:
        tools = to_tuple(entries)
        self._tools = resolve_tools(tools)
        bound = [self._tools.get(name) for name in self._tools.names]
        asking = [each.name for each in bound if isinstance(each, BoundAgentTool) and each.asks_first]
        if asking:
            raise ValidationError(f"Tools that ask a person before each call cannot be offered over HTTP: {asking}")
        #: by tool name; an entry may contain several tools
        self.entries: Mapping[str, object] = {name: each for each in tools for name in resolve_tools([each]).names}
        self._time_limit_s = time_limit_s
        self._running = 0

    @property
    def infos(self) -> list[ToolInfo]:
        return [
            ToolInfo(name=each.name, description=each.description, parameters=cast("JsonValue", each.parameters))
            for each in self._tools.specs
        ]

    async def invoke(self, name: str, arguments: Mapping[str, JsonValue]) -> ToolReply:
        bound = self._tools.get(name)
        if bound is None:
            shown = ", ".join(self._tools.names)
            text = f"There is no tool '{name[:200]}'. There are: [{shown}]"
            raise Refusal(HTTPStatus.BAD_REQUEST, "TOOL_NOT_FOUND", text)
        if self._running >= _MOST_CALLS:
            text = f"{self._running} tool calls are running: try again later"
            raise Refusal(HTTPStatus.TOO_MANY_REQUESTS, "QUEUE_FULL", text, retry_after_s=_RETRY_S)
        context = ToolContext(tool_name=name, agent_role="endpoint", idempotency_key=new_object_id())
        started_s = time.perf_counter()
        self._running += 1
        try:
            async with asyncio.timeout(self._time_limit_s):
                outcome = await call_tool(bound, json.dumps(arguments), context=context)
        except TimeoutError:
            text = f"The tool '{name}' did not answer within {self._time_limit_s:g} s"
            raise Refusal(HTTPStatus.GATEWAY_TIMEOUT, "TOOL_TIMEOUT", text) from None
        except ExitEarlyError as error:
            text = f"The tool '{name}' ends the calling run, and this call has none: {error}"
            raise Refusal(HTTPStatus.BAD_REQUEST, "TOOL_ENDS_RUN", text) from error
        except IllegalStateError as error:
            _log.error("Tool '%s' is misconfigured: %s", name, error)
            text = f"The tool '{name}' is misconfigured. See the log of the endpoint"
            raise Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "TOOL_CONFIGURATION_ERROR", text) from error
        finally:
            self._running -= 1
        return ToolReply(
            name=name, outcome=outcome.outcome, output=outcome.text, duration_s=time.perf_counter() - started_s
        )


def load_catalog(references: Sequence[str]) -> ToolCatalog:
    """Return the tools of these references. Each names a tool or a list of tools."""
    entries: list[object] = []
    if references:
        make_importable(Path.cwd())
    for reference in references:
        found = find_attribute(reference)
        entries += cast("Sequence[object]", found) if isinstance(found, list | tuple) else [found]
    return ToolCatalog(entries)


def load_models(references: Mapping[str, object], *, needs_keys: bool = True) -> Mapping[str, ChatModel]:
    """Return models by name. The process that deploys does not need their keys."""
    found: dict[str, ChatModel] = {}
    for name, given in references.items():
        try:
            found[name] = load_model(given, needs_keys=needs_keys)
        except ValidationError as error:
            raise ValidationError(f"Model '{name}': {error}") from error
    return found


def named_models(given: Iterable[str]) -> dict[str, str]:
    """Parse texts of the form `NAME=MODEL`, or `module:attribute` with the attribute as the name."""
    found: dict[str, str] = {}
    for text in filter(None, map(str.strip, given)):
        name, equals, reference = (part.strip() for part in text.partition("="))
        if not equals:
            name, reference = text.rpartition(":")[2], text
        if not name or not reference:
            raise ValidationError(f"'{text}' is not a model with a name: write NAME=MODEL")
        if name in found:
            raise ValidationError(f"Two models are called '{name}': {found[name]} and {reference}. Rename one of them")
        found[name] = reference
    return found


class DatasetCatalog:
    """The Datasets of an endpoint, or functions that return them. `references` name them in messages."""

    def __init__(
        self, sources: Mapping[str, object] | None = None, references: Mapping[str, str] | None = None
    ) -> None:
        self._sources = dict(sources or {})
        self._references = dict(references or {})

    def check(self, name: str) -> None:
        if name not in self._sources:
            known = ", ".join(sorted(self._sources))
            text = f"There is no Dataset '{name[:200]}'. There are: [{known}]"
            raise Refusal(HTTPStatus.BAD_REQUEST, "ITEMS_DATASET_NOT_FOUND", text)

    def open(self, name: str) -> object:
        """Return a Dataset with rows in a fixed order, which a resumed run reads again. Blocks."""
        self.check(name)
        source = self._sources[name]
        found = source if _is_dataset(source) else cast("Callable[[], object]", source)()
        if not _is_dataset(found):
            text = (
                f"The Dataset '{name}' ({self._references.get(name, name)}) is of type {type(found).__name__}: return a "
                "ray.data.Dataset"
            )
            raise Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "INTERNAL_ERROR", text)
        options = getattr(getattr(found, "context", None), "execution_options", None)
        if options is not None:
            options.preserve_order = True
        return found


def parse_datasets(texts: str) -> dict[str, str]:
    """Parse a text such as `orders=shop:orders,people=shop:people`.
    Example:
        >>> parse_datasets("orders=shop:orders, people=shop:read_people")
        {'orders': 'shop:orders', 'people': 'shop:read_people'}
    """
    found: dict[str, str] = {}
    for text in (each.strip() for each in texts.split(",")):
        name, equals, reference = text.partition("=")
        if text and not (name.strip() and equals and reference.strip()):
            raise ValidationError(f"A Dataset is NAME=module:attribute, got: '{text}'")
        if text:
            found[name.strip()] = reference.strip()
    return found


def load_datasets(references: Mapping[str, str]) -> DatasetCatalog:
    if references:
        make_importable(Path.cwd())
    sources = {name: find_attribute(reference) for name, reference in references.items()}
    for name, source in sources.items():
        if not _is_dataset(source) and not callable(source):
            raise ValidationError(
                f"The Dataset '{name}' ({references[name]}) is of type {type(source).__name__}: name a ray.data.Dataset, or a "
                "function without arguments that returns one"
            )
    return DatasetCatalog(sources, references)


def _is_dataset(value: object) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "iter_rows", None))


#: Names of teams, separated by commas. Serve's arguments have priority.
ENSEMBLES_VARIABLE = "ENSEMBLE_RAY_ENSEMBLES"
#: Its deprecated name.
_TEAM_VARIABLE = "ENSEMBLE_RAY_TEAM"
#: Variable for the earlier messages of a conversation.
HISTORY_INPUT = "history"
#: Each round finds the variables of at least one more text.
_MOST_ROUNDS = 1000


def find_streamed_task(ensemble: Ensemble, plan: Plan) -> str | None:
    """Return the task instance to stream as the answer (S-SRV-121)."""
    if plan.units or plan.hierarchy is not None or not plan.nodes:
        return None
    last = plan.nodes[-1]
    if not last.is_streaming or not _waits_for_all_others(plan):
        return None
    task = next((each for each in ensemble.tasks if each.object_id == last.object_id), None)
    if task is None or task.output_type is not None or task.output_guardrails:
        return None
    is_reviewed = ensemble.has_reviews and (task.review is not None or ensemble.review_policy != "never")
    return None if is_reviewed else f"{last.key}#0"


def _waits_for_all_others(plan: Plan) -> bool:
    if plan.workflow == "sequential":
        return True
    context = {node.key: node.context for node in plan.nodes}
    waited_for: set[str] = set()
    left = [plan.nodes[-1].key]
    while left:
        key = left.pop()
        if key not in waited_for:
            waited_for.add(key)
            left += context.get(key, ())
    return len(waited_for) == len(plan.nodes)


class TeamName(Struct, frozen=True, kw_only=True):
    #: YAML path or `module:attribute`
    name: str
    #: absolute path of an existing file; else empty
    path: str

    @property
    def shown(self) -> str:
        """Name for clients if the team declares none: the stem of its file, or the attribute (S-SRV-1)."""
        return Path(self.name).stem if self.path or ":" not in self.name else self.name.rpartition(":")[2]

    @property
    def target(self) -> str:
        # Only nodes that share the deployer's files know the path. Others have a copy of the working directory.
        return self.path if self.path and Path(self.path).is_file() else self.name

    def read(self) -> str | None:
        """Return the text of the team's file; None: it has no file."""
        if not is_team_file(self.target):
            return None
        from ensemble_ray.teamfile.team import read_team_file  # loads the parser

        return read_team_file(self.target)

    def load(self, *, needs_keys: bool = True) -> ServedTeam:
        return self.load_version(self.read(), needs_keys=needs_keys)

    def load_version(self, text: str | None, *, needs_keys: bool = True) -> ServedTeam:
        """Load the team with this text of its file."""
        loaded = load_runnable(self.target, needs_keys=needs_keys, text=text)
        team = served_team(loaded.name or self.shown, loaded)
        if text is None:
            return team
        info = team.info.model_copy(update={"version": version_of(text)})
        return replace(team, info=info, place=self, text=text)


def version_of(text: str) -> str:
    """Return the version of a team with this text of its file (S-VER-20)."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class ServedTeam(Struct, frozen=True, kw_only=True):
    definition: Runnable
    info: EnsembleInfo
    #: empty if a run creates its tasks
    tasks: tuple[TaskInfo, ...] = ()
    is_streaming: bool = False
    #: as above
    inputs: frozenset[str] | None = None
    #: None: the team has no file, and so no versions
    place: TeamName | None = None
    text: str | None = None

    @property
    def version(self) -> str:
        """Version of the team; empty if it has no file."""
        return self.info.version or ""

    def with_models(self, models: Mapping[str, ChatModel]) -> ServedTeam:
        """Return the team with more models. The team's own have priority."""
        known = {**models, **self.definition.models}
        return replace(self, definition=self.definition.model_copy(update={"models": known}))


def served_team(name: str, definition: Runnable) -> ServedTeam:
    planned = find_planned_form(definition)
    if planned is None:
        if not isinstance(definition, Ensemble) and (definition.results, definition.dead_letters) != (None, None):
            # Runs of different clients would write to the same files.
            _log.warning("Team '%s' is served without its files of results and dead letters", name)
            definition = definition.replace(results=None, columns=None, key=None, dead_letters=None)
        return ServedTeam(
            definition=definition,
            info=EnsembleInfo(
                name=name,
                description=definition.description,
                tags=dict(definition.tags),
                inputs=[],
                workflow="map-reduce",
                tasks=None,
                takes_items=True,
                chat=ChatInfo(input=definition.chat_input),
            ),
            is_streaming=definition.is_streaming,
        )
    inputs = _variables(planned)
    plan = planned.plan(dict.fromkeys(inputs, "x"))
    info = EnsembleInfo(
        name=name,
        description=definition.description,
        tags=dict(definition.tags),
        inputs=inputs,
        workflow=plan.shown_workflow,
        tasks=len(plan.nodes),
        takes_items=not isinstance(definition, Ensemble),
        chat=_chat(name, planned, inputs, streamed_task=find_streamed_task(planned, plan)),
    )
    return ServedTeam(
        definition=definition,
        info=info,
        tasks=tuple(TaskInfo(ensemble=name, name=node.key, agent_role=node.agent_role) for node in plan.nodes),
        is_streaming=any(node.is_streaming for node in plan.nodes),
        inputs=known_inputs(planned),
    )


def _chat(name: str, ensemble: Ensemble, inputs: Sequence[str], *, streamed_task: str | None) -> ChatInfo:
    """Return how a team answers as a model (S-SRV-102, S-SRV-103)."""
    known = _variables(ensemble.replace(inputs={})) if ensemble.inputs else inputs
    chosen = ensemble.chat_input
    if chosen is not None and chosen not in known:
        there = f"There are: [{', '.join(known)}]"
        raise ValidationError(f"Team '{name}': chat_input '{chosen}' is no variable of its texts. {there}")
    others = [each for each in inputs if each != HISTORY_INPUT]
    message = chosen or (others[0] if len(others) == 1 else None)
    takes_history = HISTORY_INPUT in known and message != HISTORY_INPUT
    return ChatInfo(input=message, takes_history=takes_history, streamed_task=streamed_task)


def _variables(ensemble: Ensemble) -> list[str]:
    """Return the inputs that a run must set, in the order of the texts."""
    found: dict[str, str] = {}
    for _ in range(_MOST_ROUNDS):
        try:
            ensemble.plan(found)
        except PromptTemplateError as error:
            found |= dict.fromkeys(error.missing_variables, "x")
        else:
            break
    return list(found)


def known_inputs(ensemble: Ensemble) -> frozenset[str]:
    """Return the inputs that a run may set."""
    return frozenset([*ensemble.inputs, *_variables(ensemble.replace(inputs={}))])


def team_names(configured: Sequence[str] = ()) -> tuple[TeamName, ...]:
    given = [each.strip() for each in configured if each.strip()]
    chosen = os.environ.get(ENSEMBLES_VARIABLE) or os.environ.get(_TEAM_VARIABLE, "")
    named = given or [each.strip() for each in chosen.split(",") if each.strip()]
    if not named:
        raise ValidationError(
            f"No team to serve: set {ENSEMBLES_VARIABLE}, or pass ensembles=... after ensemble_ray.serve.app:app, "
            "to a YAML path or module:attribute"
        )
    files = [(each, Path(each).expanduser()) for each in named]
    return tuple(TeamName(name=name, path=str(file.resolve()) if file.is_file() else "") for name, file in files)


def load_teams(names: Iterable[TeamName], *, needs_keys: bool = True) -> Mapping[str, ServedTeam]:
    teams: dict[str, ServedTeam] = {}
    places: dict[str, str] = {}
    for each in names:
        team = each.load(needs_keys=needs_keys)
        name = team.info.name
        if name in teams:
            raise ValidationError(f"Two teams are called '{name}': {places[name]} and {each.name}. Rename one of them")
        teams[name], places[name] = team, each.name
    return MappingProxyType(teams)
