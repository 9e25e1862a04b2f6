"""Loads the served teams by name, so that keys inside a team do not reach the cluster's object store."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from ensemble_ray import ChatModel, Ensemble, PromptTemplateError, ValidationError
from ensemble_ray.plan.plan import Plan
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.serve.schemas import ChatInfo, EnsembleInfo, TaskInfo
from ensemble_ray.teamfile import Runnable, find_planned_form, load_runnable

#: Names of teams, separated by commas. Serve's arguments have priority.
ENSEMBLES_VARIABLE = "ENSEMBLE_RAY_ENSEMBLES"
#: Its deprecated name.
_TEAM_VARIABLE = "ENSEMBLE_RAY_TEAM"
#: Variable for the earlier messages of a conversation.
HISTORY_INPUT = "history"
#: Each round finds the variables of at least one more text.
_MOST_ROUNDS = 1000
_log = bounded_logger(__name__)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamName:
    #: YAML path or `module:attribute`
    name: str
    #: absolute path of an existing file; else empty
    path: str

    @property
    def shown(self) -> str:
        """Name for clients if the team declares none: the stem of its file, or the attribute (S-SRV-1)."""
        return Path(self.name).stem if self.path or ":" not in self.name else self.name.rpartition(":")[2]

    def load(self, *, needs_keys: bool = True) -> ServedTeam:
        # Only nodes that share the deployer's files know the path. Others have a copy of the working directory.
        target = self.path if self.path and Path(self.path).is_file() else self.name
        loaded = load_runnable(target, needs_keys=needs_keys)
        return served_team(loaded.name or self.shown, loaded)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTeam:
    definition: Runnable
    info: EnsembleInfo
    #: empty if a run creates its tasks
    tasks: tuple[TaskInfo, ...] = ()
    is_streaming: bool = False
    #: as above
    inputs: frozenset[str] | None = None

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
