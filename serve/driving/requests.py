"""Checks requests for runs before the ledger accepts them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

from ensemble_ray import Agent, Ensemble, PromptTemplateError, RunOptions, Task, ValidationError
from ensemble_ray.access.admission import KeyPolicy
from ensemble_ray.access.quotas import Allowance, Quantity, show_amount
from ensemble_ray.definition.fields import LONGEST_CONTEXT, Workflow
from ensemble_ray.definition.run_options import MOST_TAGS
from ensemble_ray.definition.validation import find_unpriced, infer_workflow
from ensemble_ray.plan.planner import TaskDependencyGraph, check_foreign_values
from ensemble_ray.process.concurrency import SystemClock
from ensemble_ray.record.runs import check_run_id
from ensemble_ray.serve import schemas
from ensemble_ray.serve.catalog import DatasetCatalog, ServedTeam, TeamName, known_inputs
from ensemble_ray.serve.driving.ledger import LedgerEntry
from ensemble_ray.serve.schemas import ItemsDataset, NewRun, NewTask, Refusal, TaskOverride, ToolChanges
from ensemble_ray.teamfile import Runnable
from ensemble_ray.tools.registry import tools_by_name
from ensemble_ray.tools.tool import DynamicToolProvider
from ensemble_ray.values.attachments import KINDS
from ensemble_ray.values.ids import new_run_id
from ensemble_ray.values.output_schema import output_type_of, schema_in

_SHORT = 50
#: Fields of `NewTask` that change a task as those of `TaskOverride` do.
_OF_TASK = ("model", "tools", "max_iterations", "additional_context", "output_schema")
N = TypeVar("N", int, float)
T = TypeVar("T")


def change_team(definition: Runnable, asked: NewRun, tools: Mapping[str, object]) -> Runnable:
    if not asked.changes_tasks:
        return definition
    if not isinstance(definition, Ensemble) or definition.levels is not None:
        raise _refuse("TASKS_NOT_TAKEN", "The tasks of this team are made of its items, so no request can change them")
    if asked.task_overrides is not None and asked.tasks is not None:
        raise _refuse("TASKS_INVALID", "A request has 'task_overrides' or 'tasks', not both")
    changes = _Changes(definition, tools)
    try:
        changed = changes.override(asked.task_overrides or {}) if asked.tasks is None else changes.choose(asked.tasks)
        if asked.output_schema is None:
            return changed
        return _Changes(changed, tools).override_last(TaskOverride(output_schema=asked.output_schema))
    except ValidationError as error:
        raise _refuse("TASKS_INVALID", str(error)) from error


def inputs_of(asked: NewRun) -> dict[str, object]:
    """Return the inputs; an object such as `{"image": "data:image/png;base64,..."}` is an attachment (S-ATT-15)."""
    return {name: _input_of(name, value, asked) for name, value in asked.inputs.items()}


def _input_of(name: str, value: JsonValue, asked: NewRun) -> object:
    if not isinstance(value, dict) or not value.keys() <= {*KINDS, "name"}:
        return value
    match [(kind, each) for kind, each in value.items() if kind in KINDS]:
        case [(kind, str(source))] if source[:5].lower() == "data:":
            called = value.get("name")
            try:
                return KINDS[kind](source, name=called if isinstance(called, str) else None)
            except ValidationError as error:
                text = f"inputs.{name}: {error}"
        case [(_, str(source))] if source[:8].lower().startswith(("http://", "https://", "file:")):
            text = f"inputs.{name}: the content of an attachment must be a data URL"
        case _:
            return value
    raise Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "INVALID_REQUEST", text, run_id=asked.run_id)


def _check_sources(definition: Runnable, asked: NewRun) -> None:
    """Refuse values that would choose a file of the server or a host (S-ATT-16)."""
    if isinstance(definition, Ensemble):
        tasks: Sequence[Task] = list(definition.all_tasks)
    else:
        templates = (getattr(definition, name, None) for name in ("map_task", "direct_task"))
        tasks = [task for each in templates if isinstance(task := getattr(each, "task", None), Task)]
    if not any(task.attachments for task in tasks):
        return
    rows = asked.items if isinstance(asked.items, list) else []
    try:
        check_foreign_values(tasks, asked.inputs)
        for row in rows:
            check_foreign_values(tasks, {"item": row, **row} if isinstance(row, dict) else {"item": row})
    except ValidationError as error:
        raise Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "INVALID_REQUEST", str(error), run_id=asked.run_id) from error


def count_tasks(definition: Runnable, asked: NewRun) -> int:
    assert isinstance(definition, Ensemble)  # noqa: S101  `change_team` returned it
    try:
        return len(definition.plan(inputs_of(asked)).nodes)
    except PromptTemplateError as error:
        raise _inputs_missing(str(error), tuple(error.missing_variables), asked) from error
    except ValidationError as error:
        raise _refuse("TASKS_INVALID", str(error)) from error


def _inputs_missing(text: str, missing: tuple[str, ...], asked: NewRun) -> Refusal:
    status, error = HTTPStatus.UNPROCESSABLE_ENTITY, "PromptTemplateError"
    return Refusal(status, "INPUTS_MISSING", text, missing=missing, run_id=asked.run_id, error=error)


class _Changes:
    def __init__(self, team: Ensemble, tools: Mapping[str, object]) -> None:
        self._team = team
        self._tools = tools
        self._new_agents: list[Agent] = []

    def override(self, overrides: Mapping[str, TaskOverride]) -> Ensemble:
        team = self._team
        names = _names_of(team.all_tasks)
        return self._rewrite(
            {_look_up("task", name, names, names).object_id: override for name, override in overrides.items()}
        )

    def override_last(self, override: TaskOverride) -> Ensemble:
        """Change the only task whose output ends the run."""
        team = self._team
        if team.loops or team.phases or team.graph is not None or not team.tasks:
            raise _refuse(
                "TASKS_INVALID", "output_schema: the last task of a team with loops, phases or a graph is not known. "
                "Name the task in task_overrides"
            )  # fmt: skip
        last = [team.tasks[-1]]
        if infer_workflow(team) is Workflow.PARALLEL:
            used = {entry.object_id for task in team.tasks for entry in task.context if isinstance(entry, Task)}
            last = [task for task in team.tasks if task.object_id not in used]
        if len(last) > 1:
            named = ", ".join(_names_of(last))
            raise _refuse(
                "TASKS_INVALID", f"output_schema: several tasks end this run: [{named}]. Name one in task_overrides"
            )
        if (name := next(iter(_names_of(last)))) and last[0].output_type is not None and schema_in(last[0].output_type):
            raise _refuse("TASKS_INVALID", f"output_schema: the task '{name}' has one of its own in this request")
        return self._rewrite({last[0].object_id: override})

    def _rewrite(self, wanted: Mapping[str, TaskOverride]) -> Ensemble:
        team = self._team
        tasks: dict[str, Task] = {}
        for task in TaskDependencyGraph(team.all_tasks).in_dependency_order():
            changed = self._override(task, wanted.get(task.object_id))
            context = tuple(tasks.get(each.object_id, each) for each in task.context)
            tasks[task.object_id] = changed.rewritten(context=context)
        return team.replace(
            tasks=[tasks[task.object_id] for task in team.tasks],
            loops=[loop.with_tasks_of(tasks) for loop in team.loops],
            phases=[phase.with_tasks_of(tasks) for phase in team.phases],
            graph=None if team.graph is None else team.graph.with_tasks_of(tasks),
            agents=self._agents(),
        )

    def choose(self, selection: Sequence[str | NewTask]) -> Ensemble:
        own, chosen = _names_of(self._team.tasks), dict[str, Task]()
        tasks: list[Task] = []
        for position, each in enumerate(selection):
            where = f"tasks[{position}]"
            if isinstance(each, str):
                task = _look_up("task", each, own, own)
                outside = [entry for entry in task.context if entry.object_id not in {one.object_id for one in tasks}]
                if outside:
                    text = f"{where}: the task '{each}' needs outputs of tasks that do not precede it in the list"
                    raise _refuse("TASKS_INVALID", text)
                chosen[each] = task
            else:
                task = self._make(each, where, chosen)
            for name in _names_of([task]):
                chosen.setdefault(name, task)
            if any(task.object_id == one.object_id for one in tasks):
                raise _refuse("TASKS_INVALID", f"{where}: the task '{each}' occurs twice in the list")
            tasks.append(task)
        return self._team.replace(tasks=tasks, loops=(), phases=(), graph=None, agents=self._agents())

    def _override(self, task: Task, override: TaskOverride | None) -> Task:
        if override is None:
            return task
        name = task.name or task.description[:_SHORT]
        of_model = (override.model, override.tools, override.max_iterations, override.additional_context)
        if task.handler is not None and of_model != (None,) * len(of_model):
            raise _refuse("TASKS_INVALID", f"The task '{name}' is done by a handler, which has no model and no tools")
        changes = {**self._texts(override, name), **self._assignment(task.agent, override, task.tools)}
        checked = task.replace(**changes)
        return task.rewritten(**{field: getattr(checked, field) for field in changes})

    def _make(self, new: NewTask, where: str, chosen: Mapping[str, Task]) -> Task:
        for name in new.context:
            if name not in chosen:
                text = f"{where}: no task '{name}' precedes it in the list. There are: [{', '.join(chosen)}]"
                raise _refuse("TASKS_INVALID", text)
        if new.name is not None and new.name in chosen:
            raise _refuse("TASKS_INVALID", f"{where}: two tasks are called '{new.name}'")
        expected = {} if new.expected_output is None else {"expected_output": new.expected_output}
        task = Task.of(new.description, **expected)
        listed = self._team.agents or [each.agent for each in self._team.all_tasks if each.agent is not None]
        agents = {each.role: each for each in reversed(listed)}
        agent = None if new.agent is None else _look_up("agent", new.agent, agents, sorted(agents))
        wanted = TaskOverride.model_validate({field: getattr(new, field) for field in _OF_TASK})
        assignment = {**self._texts(wanted, where), "agent": agent, **self._assignment(agent, wanted)}
        return task.replace(name=new.name, context=[chosen[name] for name in new.context], **assignment)

    def _texts(self, wanted: TaskOverride, where: str) -> dict[str, object]:
        """Return the changed fields of a task that no agent has."""
        fields = ("description", "expected_output", "additional_context")
        changes: dict[str, object] = {field: value for field in fields if (value := getattr(wanted, field)) is not None}
        is_led = infer_workflow(self._team) is Workflow.HIERARCHICAL
        if is_led and (wanted.additional_context is not None or wanted.output_schema is not None):
            field = "output_schema" if wanted.additional_context is None else "additional_context"
            text = f"{where}: {field} has no effect, because the manager of the team makes the tasks of its agents"
            raise _refuse("TASKS_INVALID", text)
        if wanted.output_schema is not None:
            try:
                changes["output_type"] = output_type_of(wanted.output_schema)
            except ValidationError as error:
                raise _refuse("OUTPUT_SCHEMA_INVALID", f"{where}: {error}") from error
        return changes

    def _assignment(self, agent: Agent | None, wanted: TaskOverride, own: Sequence[object] = ()) -> dict[str, object]:
        """Return the changed fields `agent`, `llm`, `tools` and `max_iterations` of a task with its `own` tools."""
        changes: dict[str, object] = {}
        if wanted.max_iterations is not None:
            changes["max_iterations"] = wanted.max_iterations
        if wanted.model is not None:
            changes["llm"] = _look_up("model", wanted.model, self._team.models, sorted(self._team.models))
        if isinstance(wanted.tools, ToolChanges):
            changes["tools"] = self._change_tools(own if agent is None else agent.tools, wanted.tools)
        elif wanted.tools is not None:
            changes["tools"] = self._offered(wanted.tools)
        if agent is None or not changes:
            return changes
        changed = agent.replace(**changes)
        self._new_agents.append(changed)
        # A model of the task would override the new model of its agent.
        return {"agent": changed} if wanted.model is None else {"agent": changed, "llm": None}

    def _offered(self, names: Iterable[str]) -> list[object]:
        """Return tools that the operator offers."""
        known = sorted(self._tools)
        return [_look_up("tool", name, self._tools, known) for name in dict.fromkeys(names)]

    def _change_tools(self, own: Sequence[object], wanted: ToolChanges) -> list[object]:
        has: dict[str, object] = {}
        kept: list[object] = []
        for entry in own:
            named = tools_by_name(entry)
            has |= named
            if named.keys().isdisjoint(wanted.remove):
                kept.append(entry)
            else:
                kept += [tool for name, tool in named.items() if name not in wanted.remove]
        hint = ". Tools of servers are known only when the task starts, so no request removes one"
        hint = hint if any(isinstance(entry, DynamicToolProvider) for entry in own) else ""
        for name in wanted.remove:
            if name not in has:
                text = f"The task has no tool '{name}' to remove. There are: [{', '.join(sorted(has))}]{hint}"
                raise _refuse("TOOL_NOT_FOUND", text)
        added = self._offered(wanted.add)
        if twice := sorted(has.keys() & set(wanted.add) - set(wanted.remove)):
            raise _refuse("TASKS_INVALID", f"The task has a tool '{twice[0]}' already: remove it to replace it")
        return [*kept, *added]

    def _agents(self) -> Sequence[Agent] | None:
        listed = self._team.agents
        return None if listed is None else [*listed, *self._new_agents]


def _names_of(tasks: Sequence[Task]) -> dict[str, Task]:
    """Return tasks by name, else by the start of the description (S-CTL-21)."""
    found: dict[str, Task] = {}
    for task in tasks:
        found.setdefault(task.name or task.description[:_SHORT], task)
    return found


def _look_up(kind: str, name: str, known: Mapping[str, T], names: Iterable[str]) -> T:
    if name not in known:
        raise _refuse(f"{kind.upper()}_NOT_FOUND", f"There is no {kind} '{name}'. There are: [{', '.join(names)}]")
    return known[name]


def _refuse(code: str, text: str) -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, code, text)


class EndpointLimits(BaseModel):
    """Limits of an endpoint (S-SRV-50).

    Attributes:
        max_running: Simultaneous runs of one team.
        max_queued: Queued runs of one team; more are refused with 429.
        max_items: Items in one request.
        max_tokens: Tokens of one run; None: the team's limit.
        max_cost: Cost of one run; None: the team's limit.
        items_directory: Directory of items files that requests may name.
        kept_runs: Ended runs in lists. Older runs only have their records.
        priority_step_s: Waiting time, s, that a step of priority is worth in a team's queue.
        max_additional_context: Characters of `additional_context` of one run; 0 forbids it.
        quota_zone: Time zone of the days of quotas, such as `Europe/Berlin`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_running: int = Field(default=100, gt=0)
    max_queued: int = Field(default=1000, ge=0)
    max_items: int = Field(default=10_000, gt=0)
    max_tokens: int | None = Field(default=None, gt=0)
    max_cost: float | None = Field(default=None, gt=0)
    items_directory: Path | None = None
    kept_runs: int = Field(default=10_000, gt=0)
    priority_step_s: float = Field(default=1800.0, ge=0, allow_inf_nan=False)
    max_additional_context: int = Field(default=LONGEST_CONTEXT, ge=0, le=LONGEST_CONTEXT)
    quota_zone: str = "UTC"

    @field_validator("quota_zone")
    @classmethod
    def _check_zone(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(f"quota_zone: unknown time zone '{name}'. Say one such as UTC or Europe/Berlin") from None
        return name


def options_of(asked: NewRun, definition: Runnable, limits: EndpointLimits) -> RunOptions:
    wanted = asked.options
    tokens = _bound("max_tokens", wanted.max_tokens, (limits.max_tokens, definition.max_tokens))
    wanted_cost = None if wanted.max_cost is None else float(wanted.max_cost)
    cost = _bound("max_cost", wanted_cost, (limits.max_cost, definition.max_cost))
    if cost is not None and definition.max_cost is None and find_unpriced(definition) is not None:
        if wanted.max_cost is not None:
            raise _too_much("max_cost needs a team whose models have prices")
        cost = None
    parallel = _bound("max_parallel_tasks", wanted.max_parallel_tasks, (definition.max_parallel_tasks,))
    tags = dict(asked.tags)
    if asked.version is not None and "version" not in definition.tags and len(tags) < MOST_TAGS:
        tags.setdefault("version", asked.version)
    added, most = asked.additional_context, limits.max_additional_context
    if added is not None and not most:
        raise _too_much(
            "This endpoint accepts no additional_context. What to do: ask the operator to raise max_additional_context"
        )
    _bound("characters of additional_context", None if added is None else len(added), (most,))
    return RunOptions(
        max_tokens=tokens,
        max_cost=cost,
        max_parallel_tasks=parallel,
        tags=tags or None,
        user=asked.user,
        max_iterations=wanted.max_iterations,
        additional_context=added,
    )


def lowered(options: RunOptions, allowance: Allowance) -> RunOptions:
    """Return options with the limits of a key's quotas, if these are lower."""
    changes: dict[str, object] = {}
    if allowance.tokens is not None and allowance.tokens < (options.max_tokens or math.inf):
        changes["max_tokens"] = allowance.tokens
    if allowance.cost is not None:
        cost = float(show_amount(Quantity.COST, allowance.cost))
        if cost < (options.max_cost or math.inf):
            changes["max_cost"] = cost
    return options.replace(**changes) if changes else options


def _bound(name: str, wanted: N | None, bounds: tuple[N | None, ...]) -> N | None:
    """Return the requested value, else the smallest bound."""
    least = min((each for each in bounds if each is not None), default=None)
    if wanted is not None and least is not None and wanted > least:
        raise _too_much(f"{name} may be {least} at most, got: {wanted}")
    return least if wanted is None else wanted


def items_of(
    asked: NewRun, limits: EndpointLimits, datasets: DatasetCatalog
) -> list[object] | Path | ItemsDataset | None:
    """Return the items of the request; None: the team's own. A Dataset is not opened yet."""
    match asked.items:
        case None:
            return None
        case schemas.ItemsFile(file=file):
            return _file_of(file, limits)
        case ItemsDataset() as named:
            datasets.check(named.dataset)
            return named
        case items:
            if not items:
                raise Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "INVALID_REQUEST", "items must not be empty")
            if len(items) > limits.max_items:
                raise _too_much(f"items may be {limits.max_items} at most, got: {len(items)}")
            return list(items)


def _file_of(name: str, limits: EndpointLimits) -> Path:
    directory = limits.items_directory
    if directory is None:
        what_to_do = "What to do: send the items, or ask the operator to set items_directory"
        raise _refuse("ITEMS_FILE_NOT_FOUND", f"This endpoint has no directory of items files. {what_to_do}")
    root = directory.expanduser().resolve()
    found = (root / name).resolve()
    if not found.is_relative_to(root) or not found.is_file():
        raise _refuse("ITEMS_FILE_NOT_FOUND", f"There is no items file '{name}'")
    return found


def _too_much(text: str) -> Refusal:
    return _refuse("LIMIT_EXCEEDED", text)


def team_of(name: str | None, teams: Mapping[str, ServedTeam]) -> ServedTeam:
    if not teams:
        text = "This endpoint does not serve an ensemble yet"
        raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NO_ENSEMBLE", text)
    known = ", ".join(sorted(teams))
    if name is None and len(teams) > 1:
        text = f"This endpoint serves several teams. Name one with 'ensemble'. There are: [{known}]"
        raise _refuse("ENSEMBLE_REQUIRED", text)
    found = next(iter(teams.values())) if name is None else teams.get(name)
    if found is None:
        raise Refusal(HTTPStatus.NOT_FOUND, "ENSEMBLE_NOT_FOUND", f"There is no team '{name}'. There are: [{known}]")
    return found


def checked_entry(
    asked: NewRun,
    team: ServedTeam,
    limits: EndpointLimits,
    key: str | None,
    *,
    tools: Mapping[str, object],
    datasets: DatasetCatalog,
) -> tuple[LedgerEntry, Refusal | None]:
    """Return the ledger entry of a request, and the refusal of its unknown inputs.

    The refusal only applies to new requests: an earlier release ignored such inputs.
    """
    changed = change_team(team.definition, asked, tools)
    unknown = _refuse_unknown_inputs(asked, team, changed)
    missing = tuple(name for name in team.info.inputs if name not in asked.inputs)
    inputs_of(asked)
    _check_sources(changed, asked)
    if changed is not team.definition:
        tasks: int | None = count_tasks(changed, asked)
    elif missing:
        # The refusal of unknown inputs explains more.
        raise unknown or _inputs_missing(f"Inputs are missing: [{', '.join(missing)}]", missing, asked)
    else:
        tasks = team.info.tasks if asked.items is None else None
    options_of(asked, team.definition, limits)
    if items_of(asked, limits, datasets) is not None and not team.info.takes_items:
        text = f"The team '{team.info.name}' has no map-reduce, so it accepts no items"
        raise _refuse("ITEMS_NOT_TAKEN", text)
    run_id = asked.run_id or new_run_id()
    try:
        check_run_id(run_id)
    except ValidationError as error:
        status, kind = HTTPStatus.BAD_REQUEST, "ValidationError"
        raise Refusal(status, "INVALID_RUN_ID", str(error), run_id=run_id, error=kind) from None
    entry = LedgerEntry(
        run_id=run_id,
        key=key,
        digest=digest_of(asked, team.info.name),
        ensemble=team.info.name,
        request=asked.model_copy(update={"version": team.info.version}),
        tags=_tags_of(asked, team, run_id),
        tasks=tasks,
        workflow=team.info.workflow,
        status=schemas.RunStatus.ACCEPTED,
        created_at=datetime.fromtimestamp(SystemClock().now(), UTC),
    )
    return entry, unknown


def _tags_of(asked: NewRun, team: ServedTeam, run_id: str) -> dict[str, str]:
    """Return the tags of a run, which lists show also after its end: with the placeholders that its record has (S-RED-22)."""
    user = {} if asked.user is None else {"user": asked.user}
    tags = {**version_tag(team), **team.info.tags, **asked.tags, **user}
    if team.definition.redactor is None:
        return tags
    try:
        redaction = team.definition.redactor.begin(run_id)
    except ValidationError as error:
        raise _refuse("INVALID_RUN", str(error)) from None
    return {name: redaction.clean(value) for name, value in tags.items()}


def digest_of(asked: NewRun, ensemble: str) -> str:
    """Return the digest of a request. Run id, trace context and user do not determine the run.

    Fields that earlier releases lacked have `exclude_if`, so that they change no digest while they are null.
    """
    data = asked.model_dump(mode="json", exclude={"run_id", "ensemble", "traceparent", "user"})
    text = json.dumps([ensemble, data], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def version_tag(team: ServedTeam) -> dict[str, str]:
    """Return the tag by which lists find the runs of a version. A tag of the team or the request replaces it (S-VER-23)."""
    return {"version": team.version} if team.version else {}


def _refuse_unknown_inputs(asked: NewRun, team: ServedTeam, changed: Runnable) -> Refusal | None:
    known = team.inputs
    if known is None or asked.items is not None:
        return None
    if asked.inputs.keys() - known and isinstance(changed, Ensemble):
        known |= known_inputs(changed)
    unknown = sorted(name[:200] for name in asked.inputs.keys() - known)
    if not unknown:
        return None
    text = f"Unknown inputs: [{', '.join(unknown[:10])}]. Known: [{', '.join(sorted(known))}]"
    return Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "INPUTS_UNKNOWN", text, run_id=asked.run_id)


def answer_repetition(entry: LedgerEntry, wanted: LedgerEntry) -> schemas.AcceptedRun:
    """Answer a repeated request with the existing run (S-SRV-14, S-SRV-15)."""
    if entry.digest == wanted.digest:
        return answer_accepted(entry)
    if wanted.key is not None and entry.key == wanted.key:
        text = "The Idempotency-Key was used for another request: send the same one again, or choose another key"
        raise Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "IDEMPOTENCY_KEY_REUSED", text)
    text = f"Run '{entry.run_id}' belongs to another request: choose another run_id"
    raise Refusal(HTTPStatus.CONFLICT, "RUN_EXISTS", text, run_id=entry.run_id, error="RunExistsError")


def answer_accepted(entry: LedgerEntry) -> schemas.AcceptedRun:
    return schemas.AcceptedRun(
        run_id=entry.run_id, status=entry.status, ensemble=entry.ensemble, tasks=entry.tasks, workflow=entry.workflow
    )


class DriverConfig(Struct, frozen=True, kw_only=True):
    name: str
    teams: tuple[TeamName, ...]
    limits: EndpointLimits
    #: Unix time, s; a newer deployment replaces an older one
    deployed_at: float
    #: `module:attribute` references
    tools: tuple[str, ...] = ()
    #: by name: `module:attribute`, or a value of `llm`
    models: Mapping[str, JsonValue] = msgspec.field(default_factory=dict[str, "JsonValue"])
    #: empty: the default one
    namespace: str = ""
    #: `module:attribute` references by name
    datasets: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    keys: KeyPolicy = KeyPolicy.AUTO
    #: receivers of all runs of a team, by its name
    webhooks: Mapping[str, schemas.NewWebhook] = msgspec.field(default_factory=dict[str, schemas.NewWebhook])
    #: hosts that webhooks may reach besides public ones
    webhook_hosts: tuple[str, ...] = ()
    #: whether changed team files are loaded by themselves
    watch: bool = False
    #: of the operator, by team and name; with the fields of `Schedule`
    schedules: Mapping[str, Mapping[str, JsonValue]] = msgspec.field(
        default_factory=dict[str, "Mapping[str, JsonValue]"]
    )
