"""What is wrong with nodes, and what to do about it."""

from __future__ import annotations

from dataclasses import replace

from ensemble_ray.cli.commands.submit import node_data, node_lines
from ensemble_ray.values.metrics import NodeReport, NodesReport

HERE = NodeReport(address="here", python="3.12.1", packages={"ray": "2.60.0", "ensemble-ray": "1.0", "openai": "3"})
SAME = replace(HERE, address="10.0.0.1", node_id="a1", endpoints={"https://e/v1": ""})


def _problems(**changes: object) -> list[str]:
    node = replace(SAME, **changes)
    return [what for what, advice in NodesReport(here=HERE, nodes=(node,)).problems(node) if advice]


def test_a_node_that_is_as_this_process_has_no_problems() -> None:
    """S-CLU-3."""
    assert NodesReport(here=HERE, nodes=(SAME,)).is_fine
    assert _problems() == []


def test_every_difference_is_a_problem_with_advice() -> None:
    """S-CLU-3: Python, versions, packages that are missing."""
    assert _problems(python="3.11.9") == ["Python 3.11.9, here 3.12.1"]
    assert _problems(packages={**HERE.packages, "openai": "2"}) == ["openai 2, here 3"]
    assert _problems(packages={**HERE.packages, "openai": ""}) == ["openai is missing, here 3"]


def test_modules_and_endpoints_that_fail_are_problems() -> None:
    """S-CLU-4, S-CLU-5."""
    found = _problems(
        unloadable={"Agent 'A'": "no"}, endpoints={"https://e/v1": "cannot be reached: no", "http://f": ""}
    )
    assert found == ["Agent 'A' cannot be loaded: no", "https://e/v1: cannot be reached: no"]


def test_a_node_that_did_not_answer_is_named_and_nothing_else_is_said_of_it() -> None:
    """S-CLU-2."""
    assert _problems(refusal="did not answer within 25 s", python="", packages={}) == ["did not answer within 25 s"]


def test_the_table_has_a_row_for_each_node_and_what_to_do_below_it() -> None:
    """S-CLU-6: as text and as data, and how long it took."""
    silent = NodeReport(address="10.0.0.2", node_id="b2", refusal="did not answer within 25 s")
    found = NodesReport(here=HERE, nodes=(SAME, silent), duration_s=25.04)
    head, first, second, problem, advice, verdict = node_lines(found)
    assert head.split() == ["node", "Python", "ray", "ensemble-ray", "code", "endpoints"]
    assert first.split() == ["ok", "10.0.0.1", "a1", "3.12.1", "2.60.0", "1.0", "ok", "1", "ok"]
    assert second.startswith("FAIL  10.0.0.2 b2")
    assert problem.strip() == "did not answer within 25 s"
    assert advice.strip().startswith("-> Look at the node")
    assert verdict == "1 of 2 nodes cannot run it; asked in 25.0 s"
    data = node_data(found)
    assert data["is_fine"] is False
