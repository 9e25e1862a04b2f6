"""The tree of a static map-reduce over a list, made before anything runs (S-MR-30 to S-MR-36). Package: plan.

In: a definition whose items are all there. Out: its tasks in the order of levels, each with its place. The only calls are
those of the factories: one per item, and one per group, from the first item to the final task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ensemble_ray.definition.map_reduce import MapReduceDefinition
from ensemble_ray.definition.task import Task
from ensemble_ray.definition.templates import braced_texts
from ensemble_ray.errors import ValidationError
from ensemble_ray.plan.map_reduce_factories import make_map, make_reduce

__all__ = ["DIRECT", "FINAL", "MAP", "REDUCE", "StaticTree", "chunks_of", "static_tree"]

#: Node types.
MAP, REDUCE, FINAL, DIRECT = "map", "reduce", "final-reduce", "direct"


@dataclass(frozen=True, slots=True)
class StaticTree:
    """All tasks of a static map-reduce."""

    #: level by level, within a level in the order of items or groups
    tasks: Sequence[Task]
    #: `map`, `reduce` or `final-reduce` of each
    node_types: Mapping[Task, str]
    #: from 0, the level of the items
    levels: Mapping[Task, int]
    #: texts with names in braces, of the items below each; tasks without such items are left out
    texts: Mapping[Task, Sequence[str]]


@dataclass(slots=True)
class _Growing:
    """A tree that is being made."""

    tasks: list[Task] = field(default_factory=list[Task])
    node_types: dict[Task, str] = field(default_factory=dict[Task, str])
    levels: dict[Task, int] = field(default_factory=dict[Task, int])
    texts: dict[Task, Sequence[str]] = field(default_factory=dict[Task, Sequence[str]])

    def add(self, task: Task, node_type: str, level: int, texts: Sequence[str]) -> Task:
        if task in self.levels:
            factory = "map_task" if node_type == MAP else "reduce_task"
            raise ValidationError(
                f"{factory} must make a new Task at each call, got the same one again: '{task.description}'"
            )
        self.tasks.append(task)
        self.node_types[task] = node_type
        self.levels[task] = level
        if texts:
            self.texts[task] = texts
        return task

    def below(self, group: Sequence[Task]) -> Sequence[str]:
        """Return the texts of a group: its descriptions show them, and so may the text of its reduce."""
        return tuple(text for task in group for text in self.texts.get(task, ()))


def static_tree(definition: MapReduceDefinition) -> StaticTree:
    """Call the factories and link what they give.

    Raises:
        ValidationError: a factory gave something else than it should (S-MR-24, S-SET-38). What factories raise goes on
            unchanged (S-MR-106).
    """
    tree, level = _Growing(), 0
    current = [
        tree.add(make_map(definition, item)[0], MAP, 0, braced_texts(item)) for item in definition.item_source.items
    ]
    while True:
        level += 1
        groups = list(chunks_of(current, definition.effective_chunk_size))
        node_type = FINAL if len(groups) == 1 else REDUCE
        current = [tree.add(make_reduce(definition, group)[0], node_type, level, tree.below(group)) for group in groups]
        if node_type == FINAL:
            return StaticTree(tree.tasks, tree.node_types, tree.levels, tree.texts)


def chunks_of(tasks: Sequence[Task], size: int) -> Iterator[Sequence[Task]]:
    """Return groups of that size, in order; the last one may be smaller (S-MR-32, S-MR-33)."""
    for begin in range(0, len(tasks), size):
        yield tasks[begin : begin + size]
