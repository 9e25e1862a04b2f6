"""The report of a cluster's nodes as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ensemble_ray.cli.view.terminal import count_noun, screen_line

if TYPE_CHECKING:
    from ensemble_ray.values.descriptions import NodeReport, NodesReport

_TEXT = 200
_ID = 8
#: Packages with a separate column.
_COLUMNS = ("ray", "ensemble-ray")


def node_lines(found: NodesReport) -> Sequence[str]:
    """Return a row for each node, and below it its problems with advice."""
    rows: list[tuple[str, ...]] = [("", "node", "Python", *_COLUMNS, "code", "endpoints")]
    rows += [_row(found, node) for node in found.nodes]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    table = [lines[0]]
    for node, line in zip(found.nodes, lines[1:], strict=True):
        table.append(line)
        for problem, advice in found.problems(node):
            table += [f"      {screen_line(problem, _TEXT)}", f"      -> {advice}"]
    wrong = sum(bool(found.problems(node)) for node in found.nodes)
    count = count_noun(len(found.nodes), "node")
    verdict = f"{wrong} of {count} cannot run it" if wrong else f"{count} can run it"
    return (*table, f"{verdict}; asked in {found.duration_s:.1f} s")


def node_data(found: NodesReport) -> dict[str, object]:
    nodes = [
        {**node.to_dict(), "problems": [{"problem": what, "advice": advice} for what, advice in found.problems(node)]}
        for node in found.nodes
    ]
    return {"is_fine": found.is_fine, "here": found.here.to_dict(), "nodes": nodes}


def _row(found: NodesReport, node: NodeReport) -> tuple[str, ...]:
    mark = "FAIL" if found.problems(node) else "ok"
    name = f"{screen_line(node.address, _TEXT)} {node.node_id[:_ID]}".rstrip()
    if node.refusal:
        return (mark, name, *("?" for _ in range(len(_COLUMNS) + 3)))
    versions = (screen_line(node.packages.get(each, "") or "missing", _TEXT) for each in _COLUMNS)
    code = f"{len(node.unloadable)} fail" if node.unloadable else "ok"
    out_of_reach = sum(map(bool, node.endpoints.values()))
    endpoints = f"{out_of_reach} of {len(node.endpoints)} fail" if out_of_reach else f"{len(node.endpoints)} ok"
    return (mark, name, screen_line(node.python, _TEXT), *versions, code, endpoints if node.endpoints else "-")
