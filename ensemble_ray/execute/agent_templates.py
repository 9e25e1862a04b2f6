"""Kinds of agents: agents that only data can tell apart are one kind and share processes. Package: execute. Pure.

In: agents that factories made, by the thousand. Out: a name for the kind of each, a template, and the data by which an
agent differs from it. Must never happen: a name that comes to stand for other tools or another model, or kinds that
pile up with the agents that are made.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from ensemble_ray.definition.agent import Agent
from ensemble_ray.plan.requirements import ResourceRequirements

__all__ = [
    "MOST_TEMPLATES",
    "OVERRIDE_FIELDS",
    "AgentTemplates",
    "RefCountedCache",
    "apply_overrides",
    "overrides_of",
    "requirements_of",
]

#: Kinds that are kept beside those in use (S-MR-142).
MOST_TEMPLATES = 64
#: What may differ between agents of one kind: data, and never an object.
OVERRIDE_FIELDS = (
    "role",
    "goal",
    "background",
    "is_streaming",
    "verbose",
    "max_iterations",
    "response_format",
    "on_incomplete",
    "keep_reasoning",
    "allow_delegation",
)
#: What agents of one kind have equal; tools, model and runner are compared as objects.
_EQUAL_FIELDS = ("isolation", "replicas", "max_concurrency", "rate_limit", "runner_effect")
_PROCESS_FIELDS = ("num_cpus", "num_gpus", "resources", "labels")
_STANDARD_FIELDS = frozenset((*OVERRIDE_FIELDS, *_EQUAL_FIELDS, *_PROCESS_FIELDS, "tools", "llm", "runner"))

Kept = TypeVar("Kept")


class RefCountedCache(Generic[Kept]):
    """Things by name: all that are in use, and of the others those that were used last."""

    def __init__(self, most: int = MOST_TEMPLATES, on_drop: Callable[[str, Kept], None] | None = None) -> None:
        """Make an empty one.

        Args:
            most: How many things that are not in use are kept.
            on_drop: Told of each thing that is kept no longer.
        """
        self._most = most
        self._on_drop = on_drop
        self._things: dict[str, Kept] = {}
        self._uses: dict[str, int] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._things

    def __len__(self) -> int:
        return len(self._things)

    def put(self, name: str, thing: Kept) -> None:
        """Keep a thing at least until the next `trim` or `release`; one of that name that is here already stays instead."""
        if name not in self._things:
            self._things[name] = thing
            self._idle[name] = None

    def get(self, name: str) -> Kept | None:
        """Return the thing; None when it is not here."""
        return self._things.get(name)

    def use(self, name: str) -> Kept | None:
        """Return the thing, in use once more until `release`; None when it is not here."""
        if name not in self._things:
            return None
        self._idle.pop(name, None)
        self._uses[name] = self._uses.get(name, 0) + 1
        return self._things[name]

    def release(self, name: str) -> None:
        """One use of it is over."""
        left = self._uses[name] - 1
        if left:
            self._uses[name] = left
        else:
            del self._uses[name]
            self._idle[name] = None
            self.trim()

    def trim(self) -> None:
        """Drop what is neither in use nor among those that were used last."""
        while len(self._idle) > self._most:
            name, _ = self._idle.popitem(last=False)
            thing = self._things.pop(name)
            if self._on_drop is not None:
                self._on_drop(name, thing)


class AgentTemplates:
    """The kinds of the agents that a run's factories make; those that were used last are known again."""

    def __init__(self, most: int = MOST_TEMPLATES) -> None:
        """Make one; `most` kinds are remembered."""
        self._most = most
        #: what agents of a kind have in common -> its name; the template keeps alive what is compared by identity
        self._names: OrderedDict[tuple[object, ...], str] = OrderedDict()
        self._templates: dict[str, Agent] = {}
        self._numbers = itertools.count(1)

    def name_of(self, agent: Agent) -> str:
        """Name of the agent's kind; a kind that was forgotten and comes again has a new one."""
        features = _features(agent)
        name = self._names.get(features)
        if name is not None:
            self._names.move_to_end(features)
            return name
        name = self._names[features] = f"kind-{next(self._numbers)}"
        self._templates[name] = agent
        if len(self._names) > self._most:
            _, forgotten = self._names.popitem(last=False)
            del self._templates[forgotten]
        return name

    def template(self, name: str) -> Agent:
        """Return the agent that the others of its kind are told apart from.

        Raises:
            KeyError: the kind has been forgotten.
        """
        return self._templates[name]

    def overrides(self, agent: Agent, name: str) -> dict[str, object]:
        """Return the data in which an agent differs from its kind's template.

        Raises:
            KeyError: the kind has been forgotten.
        """
        return overrides_of(agent, self._templates[name])


def overrides_of(agent: Agent, template: Agent) -> dict[str, object]:
    """Return the data in which an agent differs from another of its kind."""
    if agent is template:
        return {}
    return {name: value for name in OVERRIDE_FIELDS if (value := getattr(agent, name)) != getattr(template, name)}


def apply_overrides(template: Agent, overrides: Mapping[str, object]) -> Agent:
    """Return the agent that differs from the template in that data; tools and model are the template's own objects."""
    return template.rewritten(**overrides) if overrides else template


def requirements_of(agent: Agent) -> ResourceRequirements:
    """Return what each process of an agent asks of its node."""
    return ResourceRequirements(
        num_cpus=agent.num_cpus,
        num_gpus=agent.num_gpus,
        resources=tuple(sorted(agent.resources.items())),
        labels=tuple(sorted(agent.labels.items())),
    )


def _features(agent: Agent) -> tuple[object, ...]:
    """Return what agents of one kind have in common."""
    return (
        type(agent),
        id(agent.llm),
        id(agent.runner),
        tuple(id(entry) for entry in agent.tools),
        # Who says nothing of replicas may be given more of them (S-MR-141).
        "replicas" in agent.model_fields_set,
        *(getattr(agent, name) for name in _EQUAL_FIELDS),
        requirements_of(agent),
        # Fields of the user's own classes may hold anything.
        *(id(getattr(agent, name)) for name in type(agent).model_fields if name not in _STANDARD_FIELDS),
    )
