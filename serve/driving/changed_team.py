"""A team as one request changes it: other tasks, or other words, models and tools for them. Pure.

In: a team's definition, a request, and what the operator offers. Out: the definition that the run begins with, checked as far as it can be
without a run. Rules: names stand for what the team and the operator have, nothing comes from elsewhere; what is not understood is refused
before anything is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from ensemble_ray import Agent, Ensemble, PromptTemplateError, Task, ValidationError
from ensemble_ray.plan.planner import TaskDependencyGraph
from ensemble_ray.serve.refusals import Refusal
from ensemble_ray.serve.task_schemas import NewTask, TaskOverride

if TYPE_CHECKING:
    from ensemble_ray.ports import ChatModel
    from ensemble_ray.serve.run_schemas import NewRun
    from ensemble_ray.teamfile import Runnable

#: Characters of a description by which a task without a name is found.
_SHORT = 50


def change_team(definition: Runnable, asked: NewRun, tools: Mapping[str, object]) -> Runnable:
    """Return the team with the tasks of a request.

    Args:
        definition: The team; its `models` are those that can be named.
        asked: The request.
        tools: Those that can be named.

    Raises:
        Refusal: the team takes no other tasks, or something that is named is not there, or the tasks cannot be run.
    """
    if asked.task_overrides is None and asked.tasks is None:
        return definition
    if not isinstance(definition, Ensemble) or definition.levels is not None:
        raise _refuse("TASKS_NOT_TAKEN", "The tasks of this team are made of its items, so no request can change them")
    if asked.task_overrides is not None and asked.tasks is not None:
        raise _refuse("TASKS_INVALID", "A request has 'task_overrides' or 'tasks', not both")
    changes = _Changes(definition, tools)
    try:
        return changes.override(asked.task_overrides or {}) if asked.tasks is None else changes.choose(asked.tasks)
    except ValidationError as error:
        raise _refuse("TASKS_INVALID", str(error)) from error


def count_tasks(definition: Runnable, asked: NewRun) -> int:
    """Return how many tasks a changed team has.

    Raises:
        Refusal: its texts name inputs that are missing, or the tasks cannot be run together.
    """
    assert isinstance(definition, Ensemble)  # noqa: S101  `change_team` gave it
    try:
        return len(definition.plan(asked.inputs).nodes)
    except PromptTemplateError as error:
        missing = tuple(error.missing_variables)
        raise Refusal(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "INPUTS_MISSING",
            str(error),
            missing=missing,
            run_id=asked.run_id,
            error="PromptTemplateError",
        ) from error
    except ValidationError as error:
        raise _refuse("TASKS_INVALID", str(error)) from error


class _Changes:
    """Changes to the tasks of one team."""

    def __init__(self, team: Ensemble, tools: Mapping[str, object]) -> None:
        self._team = team
        self._tools = tools
        #: agents that are other ones in this run
        self._new_agents: list[Agent] = []

    def override(self, overrides: Mapping[str, TaskOverride]) -> Ensemble:
        """Return the team with other words, models and tools for some of its tasks."""
        team = self._team
        names = _names_of(team.all_tasks)
        wanted = {_get_task(name, names).object_id: override for name, override in overrides.items()}
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
        """Return the team with these tasks in place of all others."""
        own, chosen = _names_of(self._team.tasks), dict[str, Task]()
        tasks: list[Task] = []
        for position, each in enumerate(selection):
            where = f"tasks[{position}]"
            if isinstance(each, str):
                task = _get_task(each, own)
                outside = [entry for entry in task.context if entry.object_id not in {one.object_id for one in tasks}]
                if outside:
                    raise _refuse(
                        "TASKS_INVALID",
                        f"{where}: the task '{each}' is given outputs of tasks that do not stand before it in the list",
                    )
                chosen[each] = task
            else:
                task = self._make(each, where, chosen)
            for name in _names_of([task]):
                chosen.setdefault(name, task)
            if any(task.object_id == one.object_id for one in tasks):
                raise _refuse("TASKS_INVALID", f"{where}: the task '{each}' stands in the list twice")
            tasks.append(task)
        return self._team.replace(tasks=tasks, loops=(), phases=(), graph=None, agents=self._agents())

    def _override(self, task: Task, override: TaskOverride | None) -> Task:
        """Return the same task, changed."""
        if override is None:
            return task
        if task.handler is not None and (override.model is not None or override.tools is not None):
            name = task.name or task.description[:_SHORT]
            raise _refuse("TASKS_INVALID", f"The task '{name}' is done by a handler, which has no model and no tools")
        words = {
            field: value
            for field in ("description", "expected_output")
            if (value := getattr(override, field)) is not None
        }
        changes = {**words, **self._who(task.agent, override)}
        checked = task.replace(**changes)
        return task.rewritten(**{field: getattr(checked, field) for field in changes})

    def _make(self, new: NewTask, where: str, chosen: Mapping[str, Task]) -> Task:
        for name in new.context:
            if name not in chosen:
                text = f"{where}: no task '{name}' stands before it in the list. There are: [{', '.join(chosen)}]"
                raise _refuse("TASKS_INVALID", text)
        if new.name is not None and new.name in chosen:
            raise _refuse("TASKS_INVALID", f"{where}: two tasks are called '{new.name}'")
        expected = {} if new.expected_output is None else {"expected_output": new.expected_output}
        task = Task.of(new.description, **expected)
        context = [chosen[name] for name in new.context]
        return task.replace(name=new.name, context=context, **{"agent": self._agent(new.agent), **self._who_new(new)})

    def _who_new(self, new: NewTask) -> dict[str, object]:
        return self._who(self._agent(new.agent), TaskOverride(model=new.model, tools=new.tools))

    def _agent(self, role: str | None) -> Agent | None:
        """Return the agent of that role; None stays None."""
        if role is None:
            return None
        listed = self._team.agents or [task.agent for task in self._team.all_tasks if task.agent is not None]
        agents = {agent.role: agent for agent in reversed(listed)}
        if role not in agents:
            raise _refuse("AGENT_NOT_FOUND", f"There is no agent '{role}'. There are: [{', '.join(sorted(agents))}]")
        return agents[role]

    def _who(self, agent: Agent | None, wanted: TaskOverride) -> dict[str, object]:
        """Return the fields of a task that say who does it, where those are other ones."""
        changes: dict[str, object] = {}
        if wanted.model is not None:
            changes["llm"] = self._model(wanted.model)
        if wanted.tools is not None:
            changes["tools"] = [self._tool(name) for name in dict.fromkeys(wanted.tools)]
        if agent is None or not changes:
            return changes
        changed = agent.replace(**changes)
        self._new_agents.append(changed)
        # The model of the agent: one that the task names would hold in its place.
        return {"agent": changed} if wanted.model is None else {"agent": changed, "llm": None}

    def _agents(self) -> Sequence[Agent] | None:
        listed = self._team.agents
        return None if listed is None else [*listed, *self._new_agents]

    def _model(self, name: str) -> ChatModel:
        models = self._team.models
        if name not in models:
            raise _refuse("MODEL_NOT_FOUND", f"There is no model '{name}'. There are: [{', '.join(sorted(models))}]")
        return models[name]

    def _tool(self, name: str) -> object:
        if name not in self._tools:
            text = f"There is no tool '{name}'. There are: [{', '.join(sorted(self._tools))}]"
            raise _refuse("TOOL_NOT_FOUND", text)
        return self._tools[name]


def _names_of(tasks: Sequence[Task]) -> dict[str, Task]:
    """Return tasks by their names, or else by the beginning of what is to be done (S-CTL-21)."""
    found: dict[str, Task] = {}
    for task in tasks:
        found.setdefault(task.name or task.description[:_SHORT], task)
    return found


def _get_task(name: str, tasks: Mapping[str, Task]) -> Task:
    if name not in tasks:
        raise _refuse("TASK_NOT_FOUND", f"There is no task '{name}'. There are: [{', '.join(tasks)}]")
    return tasks[name]


def _refuse(code: str, text: str) -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, code, text)
