"""A graph as Mermaid text, which pages such as those of GitHub draw. Package: visualization. Pure.

Rule: texts of others are quoted, and no character of theirs has a meaning to Mermaid or to HTML.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ensemble_ray.visualization.flow import Flow, FlowEdge, FlowNode

__all__ = ["render_mermaid"]

#: Longest line of a label.
_LINE = 60
_ARROWS = {"dependency": "-->", "conditional": "-->", "unconditional": "-.->", "delegation": "==>", "loop": "-.->"}
_SAFE = frozenset(" .,:!?+*/()=≤→…-_")


def render_mermaid(flow: Flow) -> str:
    """Return the graph as a Mermaid flowchart (S-VIZ-86)."""
    names = {each.id: f"n{position}" for position, each in enumerate(flow.nodes)}
    names |= {each.id: f"g{position}" for position, each in enumerate(flow.groups)}
    return "\n".join([*_lines(flow, names), ""])


def _lines(flow: Flow, names: dict[str, str]) -> Iterator[str]:
    yield "flowchart TB"
    yield from _members(flow, names, None, 1)
    for edge in flow.edges:
        yield f"  {names[edge.source]} {_arrow(edge)} {names[edge.target]}"
    critical = [names[node.id] for node in flow.nodes if node.is_critical]
    if critical:
        yield "  classDef critical stroke:#d33,stroke-width:2px"
        yield f"  class {','.join(critical)} critical"


def _members(flow: Flow, names: dict[str, str], group: str | None, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for node in flow.nodes:
        if node.group == group:
            yield f"{indent}{names[node.id]}{_shape(node)}"
    for each in flow.groups:
        if each.parent == group:
            yield f'{indent}subgraph {names[each.id]}["{_text(each.title)}"]'
            yield from _members(flow, names, each.id, depth + 1)
            yield f"{indent}end"


def _shape(node: FlowNode) -> str:
    if node.kind == "end":
        return '(["END"])'
    lines = [_text(node.title)]
    if node.agent:
        lines.append(f"<i>{_text(node.agent)}</i>")
    count = node.shown_count
    badges = " ".join((*node.badges, *(() if count is None else (f"{count} task{'' if count == 1 else 's'}",))))
    if badges:
        lines.append(f"<small>{_text(badges)}</small>")
    label = "<br/>".join(lines)
    return f'{{{{"{label}"}}}}' if node.kind == "manager" else f'["{label}"]'


def _arrow(edge: FlowEdge) -> str:
    arrow = _ARROWS[edge.kind]
    return f'{arrow}|"{_text(edge.label)}"|' if edge.label else arrow


def _text(text: str) -> str:
    """Return a text whose special characters are entities, as Mermaid writes them: `#34;`."""
    shown = text if len(text) <= _LINE else f"{text[: _LINE - 1]}…"
    return "".join(char if char.isalnum() or char in _SAFE else f"#{ord(char)};" for char in shown)
