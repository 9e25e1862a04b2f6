"""The entries of a plan: keys, nodes of tasks, agents in the order of their first use. Package: plan. Pure.

In: resolved tasks with their agents. Out: nodes and agent entries; names are given out once each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.task import Task
from ensemble_ray.definition.team_model import TeamModels
from ensemble_ray.definition.unit_output import UnitOutput
from ensemble_ray.definition.validation import declared_agents
from ensemble_ray.plan.plan import MANAGER_KEY, AgentEntry, Node
from ensemble_ray.values.delegation import Peer

if TYPE_CHECKING:
    from ensemble_ray.ports import ChatModel

__all__ = ["DETERMINISTIC", "SYNTHESIZED", "Names", "NodeMaker", "Scope", "task_keys", "tool_names", "unit_key"]

#: Role that is shown for a handler task (S-ENG-18).
DETERMINISTIC = "(deterministic)"
#: Role that is shown for a task whose agent is not made yet.
SYNTHESIZED = "(synthesized)"


def task_keys(tasks: Iterable[Task]) -> tuple[str, ...]:
    """Return a key for each task: its name, else its position; the second of a name gets `~2`, and so on.

    `/` and `#` become `_`: they part the steps of an instance's path.
    """
    names = Names()
    return tuple(
        names.claim(_clean(task.name) if task.name else f"task-{index}") for index, task in enumerate(tasks, start=1)
    )


def unit_key(kind: str, name: str) -> str:
    """Return the key that a unit wants: `loop:refine`."""
    return f"{kind}:{_clean(name)}"


def _clean(name: str) -> str:
    return re.sub(r"[/#]", "_", name)


@dataclass(slots=True)
class Names:
    """Gives out names, each once."""

    _used: set[str] = field(default_factory=set[str])
    _next: dict[str, int] = field(default_factory=dict[str, int])

    def claim(self, wanted: str) -> str:
        """Return the name that is wanted, numbered where it is in use."""
        name = wanted
        while name in self._used:
            # The next number is kept per name, or a thousand researchers would take half a million look-ups.
            number = self._next.get(wanted, 2)
            self._next[wanted] = number + 1
            name = f"{wanted}~{number}"
        self._used.add(name)
        return name


@dataclass(frozen=True, slots=True)
class Scope:
    """What the context of a task or loop may name."""

    #: of tasks and units, by object id
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    #: of body tasks, by the object ids of their loop and of the task
    bodies: Mapping[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])

    def keys_of(self, context: Iterable[Task | UnitOutput]) -> tuple[str, ...]:
        """Return the keys of the entries that may be named, in order."""
        return tuple([self.keys[entry.object_id] for entry in context if entry.object_id in self.keys])

    def bodies_of(self, context: Iterable[Task | UnitOutput]) -> tuple[str, ...]:
        """Return in the place of each such entry the body task that alone is meant; nothing where none is."""
        found = tuple([self._body(entry) for entry in context if entry.object_id in self.keys])
        return found if any(found) else ()

    def _body(self, entry: Task | UnitOutput) -> str:
        if isinstance(entry, UnitOutput) and entry.task_id:
            return self.bodies[entry.object_id, entry.task_id]
        return ""


class NodeMaker:
    """Makes the nodes of tasks, and the entries of agents in the order of their first use (S-DOM-65)."""

    def __init__(
        self, definition: EnsembleDefinition, models: TeamModels, synthesized: Mapping[str, Agent] | None = None
    ) -> None:
        """Make one.

        Args:
            definition: The ensemble.
            models: Of agents that name none.
            synthesized: Agents by object id of the task they were made for.
        """
        self.entries: list[AgentEntry] = []
        self.agents: dict[str, Agent] = {}
        self._definition = definition
        self._models = models
        self._synthesized = synthesized or {}
        self._agent_keys: dict[str, str] = {}
        self._names = Names()

    def node(self, task: Task, key: str, *, index: int, total: int | None = None, scope: Scope) -> Node:
        """Return the node of a task.

        Args:
            task: Resolved. One without agent and handler is planned as `(synthesized)` before an agent is made for it.
            key: Of the plan.
            index: Its position among those that events count it with, 1-based.
            total: How many those are; None: all of the run.
            scope: What its context may name.
        """
        agent = task.agent if task.agent is not None else self._synthesized.get(task.object_id)
        role, agent_key = SYNTHESIZED, None
        if task.handler is not None:
            role = DETERMINISTIC
        elif agent is not None:
            role = agent.role
            is_synthesized = task.agent is None and key != MANAGER_KEY
            agent_key = self.agent_key(agent, is_synthesized=is_synthesized, task_model=task.llm)
        return Node(
            key=key,
            index=index,
            object_id=task.object_id,
            description=task.description,
            expected_output=task.expected_output,
            agent_role=role,
            agent_key=agent_key,
            context=scope.keys_of(task.context),
            context_tasks=scope.bodies_of(task.context),
            context_outside=tuple([entry.description for entry in task.context if entry.object_id not in scope.keys]),
            is_streaming=task.handler is None and _streams(agent, task, self._definition),
            total=total,
        )

    def peers(self, *, but: Agent | None = None) -> tuple[Peer, ...]:
        """Return the agents that work may be delegated to; none where no agent may delegate."""
        if but is None and not any(agent.allow_delegation for agent in self.agents.values()):
            return ()
        rank = {agent: position for position, agent in enumerate(declared_agents(self._definition))}
        order = sorted(self.agents.items(), key=lambda entry: rank.get(entry[1], len(rank)))
        return tuple(
            Peer(key=key, role=agent.role, is_streaming=_streams(agent, None, self._definition))
            for key, agent in order
            if agent is not but
        )

    def agent_key(self, agent: Agent, *, is_synthesized: bool = False, task_model: ChatModel | None = None) -> str:
        """Return the key of an agent, which takes part from now on."""
        key = self._agent_keys.get(agent.object_id)
        if key is not None:
            return key
        key = self._names.claim(re.sub(r"\W+", "-", agent.role.lower()).strip("-") or "agent")
        self._agent_keys[agent.object_id] = key
        self.agents[key] = self._models.resolve_agent(agent, task_model)
        self.entries.append(
            AgentEntry(
                key=key,
                role=agent.role,
                goal=agent.goal,
                background=agent.background,
                tool_names=tool_names(agent),
                is_synthesized=is_synthesized,
                allow_delegation=agent.allow_delegation,
            )
        )
        return key


def _streams(agent: Agent | None, task: Task | None, definition: EnsembleDefinition) -> bool:
    """Return the first of agent, task and ensemble that says anything (S-STR-1)."""
    for chosen in (None if agent is None else agent.is_streaming, None if task is None else task.stream):
        if chosen is not None:
            return chosen
    return definition.is_streaming


def tool_names(agent: Agent) -> tuple[str, ...]:
    """Return the names of an agent's tools as declared; what a provider offers is known when a task begins."""
    if not agent.tools:
        return ()
    from ensemble_ray.tools.decorator import marked_functions, tool_mark  # only agents with tools pay
    from ensemble_ray.tools.tool import AgentTool  # same

    names: list[str] = []
    for entry in agent.tools:
        if isinstance(entry, AgentTool):
            names.append(entry.name)
            continue
        methods = marked_functions(type(entry)) if tool_mark(entry) is None else ()
        marks = (tool_mark(getattr(entry, method)) for method in methods) if methods else (tool_mark(entry),)
        names.extend(mark.name for mark in marks if mark is not None)
    return tuple(names)
