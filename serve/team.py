"""Which teams are served, and where they are found.

In: names from Serve's arguments or the environment. Out: loaded teams, each under a name of its own. A team travels to the processes
that run it by name, never by value: what it holds, such as keys, is read where it is used and does not reach the cluster's store.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from ensemble_ray import ChatModel, Ensemble, PromptTemplateError, ValidationError
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.serve.schemas import ChatInfo, EnsembleInfo, TaskInfo
from ensemble_ray.teamfile import Runnable, find_planned_form, load_runnable

if TYPE_CHECKING:
    from ensemble_ray import Task
    from ensemble_ray.plan.plan import Plan


def find_streamed_task(ensemble: Ensemble, plan: Plan) -> str | None:
    """Return the instance of the task whose tokens are the answer; None: there is none (S-SRV-121).

    Args:
        ensemble: What was planned, in this process.
        plan: What will run.
    """
    if plan.units or plan.hierarchy is not None or not plan.nodes:
        return None
    last = plan.nodes[-1]
    if not last.is_streaming or not _is_last(plan):
        return None
    task = next((each for each in ensemble.tasks if each.object_id == last.object_id), None)
    return f"{last.key}#0" if task is not None and _is_said_as_is(task, ensemble) else None


def _is_last(plan: Plan) -> bool:
    """Return whether the last task of the plan waits for all others."""
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


def _is_said_as_is(task: Task, ensemble: Ensemble) -> bool:
    """Return whether what the model says is the task's output, whatever it says."""
    is_checked = task.output_type is not None or bool(task.output_guardrails)
    is_reviewed = ensemble.has_reviews and (task.review is not None or ensemble.review_policy != "never")
    return not is_checked and not is_reviewed


#: Environment variable that names the teams where Serve's arguments do not; several with commas between them.
ENSEMBLES_VARIABLE = "ENSEMBLE_RAY_ENSEMBLES"
#: Its deprecated name.
_TEAM_VARIABLE = "ENSEMBLE_RAY_TEAM"
#: Variable that takes what was said before the message, where a team's texts have it.
HISTORY_INPUT = "history"
#: Rounds in which a team's variables are found; each names those of one text more.
_MOST_ROUNDS = 1000
_log = bounded_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamName:
    """A YAML path or `module:attribute`."""

    #: as it was given
    name: str
    #: the file in full, where the name is one of a file; else empty
    path: str

    @property
    def shown(self) -> str:
        """The name that clients know it by where the team itself has none: the stem of its file, or the attribute (S-SRV-1)."""
        return Path(self.name).stem if self.path or ":" not in self.name else self.name.rpartition(":")[2]

    def load(self, *, needs_keys: bool = True) -> ServedTeam:
        """Return the team, checked as far as it can be without inputs.

        Args:
            needs_keys: False where it is deployed from: keys of models are needed where it runs alone.

        Raises:
            ValidationError: it cannot be found, read or run.
        """
        # A node that has the deployer's files finds them under their full path, also from another directory; one that
        # got a copy of the working directory finds them under the name as it was given.
        target = self.path if self.path and Path(self.path).is_file() else self.name
        loaded = load_runnable(target, needs_keys=needs_keys)
        return served_team(loaded.name or self.shown, loaded)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTeam:
    """A team as requests run it."""

    definition: Runnable
    info: EnsembleInfo
    #: those that are known before they run
    tasks: tuple[TaskInfo, ...] = ()
    #: whether answers of models come in fragments
    is_streaming: bool = False
    #: inputs that a run may give; None: not known before its tasks are made
    inputs: frozenset[str] | None = None

    def with_models(self, models: Mapping[str, ChatModel]) -> ServedTeam:
        """Return the team with more models that its runs can be told to ask; its own ones win."""
        known = {**models, **self.definition.models}
        return replace(self, definition=self.definition.model_copy(update={"models": known}))

    def with_items(self, items: object) -> Runnable:
        """Return the definition over other items."""
        return self.definition.replace(items=items)


def served_team(name: str, definition: Runnable) -> ServedTeam:
    """Return a team as it is served, checked as far as it can be without inputs.

    Raises:
        ValidationError: it cannot run.
    """
    planned = find_planned_form(definition)
    if planned is None:
        return ServedTeam(
            definition=_without_files(name, definition),
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
    """Return how a team is asked as a model (S-SRV-102, S-SRV-103).

    Args:
        name: The team's.
        ensemble: What it plans.
        inputs: Variables that a run has to give.
        streamed_task: Instance of the task whose tokens are the answer.

    Raises:
        ValidationError: its `chat_input` is no variable of its texts.
    """
    known = _variables(ensemble.replace(inputs={})) if ensemble.inputs else inputs
    chosen = ensemble.chat_input
    if chosen is not None and chosen not in known:
        raise ValidationError(
            f"Team '{name}': chat_input '{chosen}' is no variable of its texts. There are: [{', '.join(known)}]"
        )
    others = [each for each in inputs if each != HISTORY_INPUT]
    message = chosen or (others[0] if len(others) == 1 else None)
    takes_history = HISTORY_INPUT in known and message != HISTORY_INPUT
    return ChatInfo(input=message, takes_history=takes_history, streamed_task=streamed_task)


def _variables(ensemble: Ensemble) -> list[str]:
    """Return the inputs that a run has to give, in the order in which its texts name them."""
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
    """Return the inputs that a run may give: variables of its texts, and those that have a value."""
    return frozenset([*ensemble.inputs, *_variables(ensemble.replace(inputs={}))])


def _without_files(name: str, definition: Runnable) -> Runnable:
    """Return a map-reduce that writes no files: runs of several clients would write into the same ones."""
    if isinstance(definition, Ensemble) or (definition.results is None and definition.dead_letters is None):
        return definition
    _log.warning("Team '%s' is served without its files of results and dead letters", name)
    return definition.replace(results=None, columns=None, key=None, dead_letters=None)


def team_names(configured: Sequence[str] = ()) -> tuple[TeamName, ...]:
    """Return the teams to serve: those given, else the environment's.

    Raises:
        ValidationError: neither names one.
    """
    given = [each.strip() for each in configured if each.strip()]
    chosen = os.environ.get(ENSEMBLES_VARIABLE) or os.environ.get(_TEAM_VARIABLE, "")
    named = given or [each.strip() for each in chosen.split(",") if each.strip()]
    if not named:
        raise ValidationError(
            f"No team to serve: set {ENSEMBLES_VARIABLE}, or pass ensembles=... after ensemble_ray.serve.app:app, "
            "to a YAML path or module:attribute"
        )
    return tuple(_team_name(each) for each in named)


def _team_name(name: str) -> TeamName:
    file = Path(name).expanduser()
    return TeamName(name=name, path=str(file.resolve()) if file.is_file() else "")


def load_teams(names: Iterable[TeamName], *, needs_keys: bool = True) -> Mapping[str, ServedTeam]:
    """Return the teams by the names that clients know them by.

    Raises:
        ValidationError: one of them cannot be found, read or run, or two have the same name.
    """
    teams: dict[str, ServedTeam] = {}
    places: dict[str, str] = {}
    for each in names:
        team = each.load(needs_keys=needs_keys)
        name = team.info.name
        if name in teams:
            raise ValidationError(f"Two teams are called '{name}': {places[name]} and {each.name}. Rename one of them")
        teams[name], places[name] = team, each.name
    return MappingProxyType(teams)
