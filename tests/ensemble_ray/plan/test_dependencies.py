"""The graph of tasks."""

from __future__ import annotations

import pytest

from ensemble_ray import TaskDependencyGraph
from tests.builders import task_after as task


def test_lookalikes_are_two_nodes_when_they_are_two_tasks() -> None:
    """S-PAR-1, S-CONV-30."""
    first, second = task("a"), task("a")
    graph = TaskDependencyGraph([first, second])
    assert graph.size == 2
    assert graph.get_ready_tasks([first]) == [second]


def test_one_node_is_found_by_a_copy_when_the_copy_is_an_internal_rewrite() -> None:
    """S-PAR-1, S-CONV-30."""
    first = task("a")
    graph = TaskDependencyGraph([first, task("b", first.rewritten(description="A"))])
    assert graph.is_in_graph(first.rewritten(description="A"))
    assert graph.roots == [first]


def test_roots_keep_list_order_when_the_list_is_in_any_order() -> None:
    """S-PAR-2: context outside the graph does not count."""
    outside = task("outside")
    root, other = task("root", outside), task("other")
    join = task("join", root, other)
    graph = TaskDependencyGraph([join, other, root])
    assert graph.roots == [other, root]
    assert graph.all_tasks == [join, other, root]
    assert not graph.is_in_graph(outside)


def test_task_is_ready_when_all_its_dependencies_in_the_graph_are_completed() -> None:
    """S-PAR-3."""
    top = task("top", task("outside"))
    left, right = task("left", top), task("right", top)
    join = task("join", left, right, left)
    graph = TaskDependencyGraph([join, right, left, top])
    assert graph.get_ready_tasks([]) == [top]
    assert graph.get_ready_tasks([top]) == [right, left]
    assert graph.get_ready_tasks([top, left]) == [right]
    assert graph.get_ready_tasks({top, left, right}) == [join]
    assert graph.get_ready_tasks([top, left, right, join]) == []
    assert graph.get_dependents(top) == [right, left]
    assert graph.get_dependents(left) == [join]
    assert graph.get_dependents(join) == []
    assert graph.get_dependents(task("unknown")) == []
    assert TaskDependencyGraph([]).size == 0


def test_none_is_refused_when_given_as_an_argument() -> None:
    """S-PAR-3, S-CONV-11."""
    graph = TaskDependencyGraph([task("a")])
    calls = (
        lambda: TaskDependencyGraph(None),
        lambda: TaskDependencyGraph([None]),
        lambda: graph.get_ready_tasks(None),
        lambda: graph.get_dependents(None),
        lambda: graph.is_in_graph(None),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"must not be None$"):
            call()  # type: ignore[no-untyped-call]  wrong arguments are what is tested


def test_dependencies_come_first_when_tasks_are_ordered() -> None:
    """S-TPL-11 leans on it: whatever the list's order, a task follows its context."""
    top = task("top")
    left, right = task("left", top), task("right", top)
    join = task("join", right, left)
    assert TaskDependencyGraph([join, left, right, top]).in_dependency_order() == [top, left, right, join]
