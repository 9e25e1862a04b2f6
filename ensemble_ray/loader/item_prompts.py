"""Factories of tasks that are made of texts: those of team files and of the command line (S-MR-170 to S-MR-173).

Package: loader. In: a task whose texts are templates, and items. Out: tasks. Frozen, and the same in every process: what they
are made of is part of what a resume compares. Never: the text of an item taken for a template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from ensemble_ray.errors import ValidationError
from ensemble_ray.loader.problems import list_known_names, suggestion
from ensemble_ray.record.identity.definition import task_data

if TYPE_CHECKING:
    from ensemble_ray.definition.task import Task

__all__ = ["AllItemsPrompt", "GroupPrompt", "ItemPrompt", "text_of_item"]

#: What stands for the whole item, and for all items.
_ITEM, _ITEMS = "item", "items"
_VARIABLE = re.compile(r"\{\{(?P<escaped>\w+)\}\}|\{(?P<name>\w+)\}")


def text_of_item(value: object) -> str:
    """Return a value as a prompt shows it: a text as it is, None as nothing, anything else as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _fields_of(item: object) -> dict[str, object]:
    """Return what texts can name of an item."""
    named = (
        {str(name): value for name, value in cast("Mapping[object, object]", item).items()} if _has_fields(item) else {}
    )
    return {_ITEM: item, **named}


def _has_fields(item: object) -> bool:
    """Return whether an item has fields."""
    return isinstance(item, Mapping)


def _fill(text: str, values: Mapping[str, object]) -> str:
    """Put these values into a text, each once; names without a value stay as they are."""

    def fill(found: re.Match[str]) -> str:
        escaped, name = found["escaped"], found["name"]
        if escaped is not None:
            return f"{{{escaped}}}"
        return text_of_item(values[name]) if name in values else found[0]

    return _VARIABLE.sub(fill, text) if "{" in text else text


@dataclass(frozen=True)
class _Prompt:
    """A task whose texts are templates."""

    task: Task
    #: names that the run's inputs give values to
    inputs: frozenset[str] = frozenset()

    def declared(self) -> Mapping[str, object]:
        """Return what it is made of, for the digest of a definition (S-MR-173)."""
        return task_data(self.task)

    def _build(self, values: Mapping[str, object], **changes: Any) -> Task:
        texts = {name: _fill(getattr(self.task, name), values) for name in ("description", "expected_output")}
        return self.task.replace(**{**texts, **changes})


@dataclass(frozen=True)
class ItemPrompt(_Prompt):
    """Makes the task of an item.

    Examples:
        >>> from ensemble_ray.definition.task import Task
        >>> prompt = ItemPrompt(Task.of("Summarise {title}: {item}"))
        >>> prompt({"title": "Tides"}).description
        'Summarise Tides: {"title": "Tides"}'
        >>> prompt.problem({"name": "Tides"})
        "it has no field 'title', which the prompt names. Known: [name, item]"
    """

    needed: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Find the names in its texts."""
        texts = (self.task.description, self.task.expected_output)
        names = [found["name"] for text in texts for found in _VARIABLE.finditer(text) if found["name"] is not None]
        object.__setattr__(self, "needed", tuple(dict.fromkeys(names)))  # a frozen class sets its fields so

    def __call__(self, item: object) -> Task:
        """Return the task.

        Raises:
            ValidationError: the item lacks a field that the texts name.
        """
        problem = self.problem(item)
        if problem is not None:
            raise ValidationError(f"The item '{text_of_item(item)[:80]}': {problem}")
        return self._build(_fields_of(item))

    def problem(self, item: object) -> str | None:
        """Say what is wrong with an item; None: nothing is (S-MR-171)."""
        known = _fields_of(item)
        missing = [name for name in self.needed if name not in known and name not in self.inputs]
        if not missing:
            return None
        listed = ", ".join(f"'{name}'" for name in missing)
        what = "field" if len(missing) == 1 else "fields"
        if not _has_fields(item):
            kind = type(item).__name__
            return f"it is a {kind} without fields, and the prompt names the {what} {listed}: write {{{_ITEM}}} for all of it"
        fields = [name for name in known if name != _ITEM]
        guess = suggestion(missing[0], fields) if len(missing) == 1 else ""
        return f"it has no {what} {listed}, which the prompt names.{guess} {list_known_names([*fields, _ITEM])}"


@dataclass(frozen=True)
class GroupPrompt(_Prompt):
    """Makes the task that brings a group together."""

    def __call__(self, chunk_tasks: Sequence[Task]) -> Task:
        """Return the task, with the group as its context."""
        return self._build({}, context=list(chunk_tasks))


@dataclass(frozen=True)
class AllItemsPrompt(_Prompt):
    """Makes the one task over all items, where they are few (S-MR-172)."""

    def __call__(self, items: Sequence[object]) -> Task:
        """Return the task, with the items where `{items}` stands, else behind the text."""
        listed = "\n".join(text_of_item(item) for item in items)
        task = self._build({_ITEMS: listed})
        if any(found["name"] == _ITEMS for found in _VARIABLE.finditer(self.task.description)):
            return task
        return task.replace(description=f"{task.description}\n\n{listed}")
