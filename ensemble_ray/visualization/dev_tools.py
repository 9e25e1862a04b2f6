"""Graphs of teams and traces of runs as files for a viewer. No export overwrites a file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from xml.sax.saxutils import escape, quoteattr

import pydantic
from msgspec.structs import replace

from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.fields import Workflow
from ensemble_ray.definition.graph import Graph
from ensemble_ray.definition.map_reduce import MapDefinition
from ensemble_ray.errors import IllegalStateError, ValidationError
from ensemble_ray.plan.plan import MANAGER_ROLE, Plan
from ensemble_ray.plan.unit_plans import DETERMINISTIC
from ensemble_ray.values.ids import delegated_instance, effect_name, instance_of
from ensemble_ray.values.outputs import EnsembleOutput
from ensemble_ray.values.trace import ExecutionTrace, TaskTrace
from ensemble_ray.values.value import Value, explain, utc_now
from ensemble_ray.visualization.dag_model import DagExporter, DagModel
from ensemble_ray.visualization.declared import dag_flow, map_reduce_flow
from ensemble_ray.visualization.flow import (
    LABEL_LINE,
    SMALL_LETTER,
    SMALL_LINE,
    TITLE_LINE,
    Flow,
    FlowEdge,
    FlowNode,
    Layout,
    Point,
    Rect,
    Route,
    agent_lines,
    label_lines,
    place_flow,
    title_lines,
    wrap_text,
)
from ensemble_ray.visualization.ran import ran_flow

_ROLES = 12  # role colours, as in Studio
_INSET, _RADIUS, _BEND = 14.0, 8.0, 7.0
_STACK = 4.0

_STYLE = """
svg{--paper:#fff;--card:#fff;--line:#c9ced6;--ink:#1c2430;--soft:#5b6675;--edge:#7b8694;--frame:#f5f7fa;--hot:#c2255c;
--r0:#421c8d;--r1:#c66f39;--r2:#2892cf;--r3:#374300;--r4:#601a5d;--r5:#9c8a04;--r6:#0e3f6a;
--r7:#0fa44d;--r8:#d15697;--r9:#763638;--r10:#667900;--r11:#965876;
--running:#2f6fdb;--completed:#0e8a6a;--failed:#c62f3a;--other:#5b6675}
@media (prefers-color-scheme:dark){svg{--paper:#12161c;--card:#1b212a;--line:#3a4452;--ink:#e8edf4;--soft:#a3afbe;
--edge:#8793a3;--frame:#171c24;--hot:#ff86ac;
--r0:#765dcf;--r1:#b35713;--r2:#9bd2fa;--r3:#6c7e2a;--r4:#985b93;--r5:#fce343;--r6:#2378c2;
--r7:#9afcaf;--r8:#d15697;--r9:#b57575;--r10:#94ab39;--r11:#e5becf;
--running:#7aa9ff;--completed:#4fd0a7;--failed:#ff7b82;--other:#a3afbe}}
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;fill:var(--ink)}
.paper{fill:var(--paper)}
.card{fill:var(--card);stroke:var(--line)}
.critical .card{stroke:var(--hot);stroke-width:2.4}
.t{font-size:12.5px;font-weight:600}.s{font-size:10.5px;fill:var(--soft)}.b{font-size:9.5px;fill:var(--soft);font-weight:600}
.frame{fill:var(--frame);stroke:var(--line)}
.e{fill:none;stroke:var(--edge);stroke-width:1.4}.hot{stroke:var(--hot);stroke-width:2.4}
.unconditional{stroke-dasharray:5 4}.conditional{stroke-dasharray:9 3 2 3}.delegation{stroke-dasharray:1.5 4;stroke-linecap:round}.loop{stroke-dasharray:14 4}
.off{opacity:.35}.l{font-size:10.5px;fill:var(--soft);paint-order:stroke;stroke:var(--paper);stroke-width:4px}
.tip{fill:var(--edge)}.tip.hot{fill:var(--hot);stroke:none}
.r0{fill:var(--r0)}.r1{fill:var(--r1)}.r2{fill:var(--r2)}.r3{fill:var(--r3)}.r4{fill:var(--r4)}.r5{fill:var(--r5)}.r6{fill:var(--r6)}
.r7{fill:var(--r7)}.r8{fill:var(--r8)}.r9{fill:var(--r9)}.r10{fill:var(--r10)}.r11{fill:var(--r11)}
.running{fill:var(--running)}.completed{fill:var(--completed)}.failed{fill:var(--failed)}.other{fill:var(--other)}
"""
_TIPS = "".join(
    f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
    f'<path class="{classes}" d="M0 .8 7.4 4 0 7.2z"/></marker>'
    for name, classes in (("tip", "tip"), ("hot-tip", "tip hot"))
)
_LINE = 60
_ARROWS = {"dependency": "-->", "conditional": "-->", "unconditional": "-.->", "delegation": "==>", "loop": "-.->"}
_SAFE = frozenset(" .,:!?+*/()=≤→…-_")


def render_svg(flow: Flow, layout: Layout, *, title: str) -> str:
    width, height = (_number(max(1.0, each)) for each in (layout.width, layout.height))
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label={quoteattr(title)}>',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f"<defs>{_TIPS}</defs>",
        '<rect class="paper" width="100%" height="100%"/>',
    ]
    for group in flow.groups:
        place = layout.places[group.id]
        shown = wrap_text(group.title, place.width - 2 * _INSET, SMALL_LETTER, 1)
        lines.append(
            f"<g><title>{escape(group.title)}</title>{_rect('frame', place, _RADIUS)}"
            f'<text class="b" x="{_number(place.x + _INSET)}" y="{_number(place.y + 18)}">{escape("".join(shown))}</text></g>'
        )
    lines += [_edge(edge, route) for edge, route in zip(flow.edges, layout.routes, strict=True)]
    agents = dict.fromkeys(node.agent for node in flow.nodes if node.agent)
    roles = {role: position % _ROLES for position, role in enumerate(agents)}
    for node in flow.nodes:
        lines += _node(node, layout.places[node.id], roles.get(node.agent))
    for edge, route in zip(flow.edges, layout.routes, strict=True):
        if edge.label and route.label_at is not None:
            x, off = _number(route.label_at[0]), " off" if edge.fired is False else ""
            shown = label_lines(edge.label)
            for line, text in enumerate(shown):
                y = _number(route.label_at[1] + 3.5 + LABEL_LINE * (line - (len(shown) - 1) / 2))
                lines.append(
                    f'<text class="l{off}" x="{x}" y="{y}" text-anchor="middle">'
                    f"<title>{escape(edge.label)}</title>{escape(text)}</text>"
                )
    return "\n".join([*lines, "</svg>", ""])


def render_mermaid(flow: Flow) -> str:
    names = {each.id: f"n{position}" for position, each in enumerate(flow.nodes)}
    names |= {each.id: f"g{position}" for position, each in enumerate(flow.groups)}
    lines = ["flowchart TB", *_members(flow, names, None, 1)]
    for edge in flow.edges:
        arrow = _ARROWS[edge.kind]
        arrow = f'{arrow}|"{_text(edge.label)}"|' if edge.label else arrow
        lines.append(f"  {names[edge.source]} {arrow} {names[edge.target]}")
    critical = [names[node.id] for node in flow.nodes if node.is_critical]
    if critical:
        lines.append("  classDef critical stroke:#d33,stroke-width:2px")
        lines.append(f"  class {','.join(critical)} critical")
    return "\n".join([*lines, ""])


def _edge(edge: FlowEdge, route: Route) -> str:
    classes = ["e", edge.kind]
    if edge.is_critical:
        classes.append("hot")
    if edge.fired is False:
        classes.append("off")
    tip = "hot-tip" if edge.is_critical else "tip"
    points = route.points
    parts = [f"M{_pair(points[0])}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        parts.append(f"L{_pair(_towards(corner, before))}Q{_pair(corner)} {_pair(_towards(corner, after))}")
    path = "".join([*parts, f"L{_pair(points[-1])}"])
    return f'<path class="{" ".join(classes)}" marker-end="url(#{tip})" d="{path}"/>'


def _towards(corner: Point, other: Point) -> Point:
    """Return the point at which the bend of a corner begins."""
    (x, y), (other_x, other_y) = corner, other
    length = abs(other_x - x) + abs(other_y - y)
    share = min(_BEND, length / 2) / length if length else 0.0
    return x + (other_x - x) * share, y + (other_y - y) * share


def _node(node: FlowNode, place: Rect, role: int | None) -> Iterator[str]:
    critical = ' class="critical"' if node.is_critical else ""
    about = [node.title, node.agent, " ".join(node.badges), node.status or ""]
    about += [f"{count} {status}" for status, count in node.counts.items()]
    if node.shown_count is not None:
        about.append(f"{node.shown_count:,} tasks")
    tooltip = "\n".join(filter(None, about))
    yield f"<g{critical}><title>{escape(tooltip)}</title>"
    if node.kind == "end":
        yield _rect("card", place, place.height / 2)
        middle = f'x="{_number(place.x + place.width / 2)}" y="{_number(place.y + place.height / 2 + 4)}"'
        yield f'<text class="t" text-anchor="middle" {middle}>END</text></g>'
        return
    if node.shown_count is not None:
        for distance in (2 * _STACK, _STACK):
            yield _rect("card", replace(place, x=place.x + distance, y=place.y + distance), _RADIUS)
    yield _rect("card", place, _RADIUS)
    if role is not None:
        x, y = _number(place.x + 5), _number(place.y + 10)
        yield f'<rect class="r{role}" x="{x}" y="{y}" width="4" height="{_number(place.height - 20)}" rx="2"/>'
    yield from _texts(node, place)
    yield "</g>"


def _texts(node: FlowNode, place: Rect) -> Iterator[str]:
    left, agents = place.x + _INSET + 4, agent_lines(node)
    for line, text in enumerate(title_lines(node)):
        yield f'<text class="t" x="{_number(left)}" y="{_number(place.y + 22 + TITLE_LINE * line)}">{escape(text)}</text>'
    bottom = place.y + place.height - 12
    for line, text in enumerate(agents or filter(None, [node.agent])):
        y = _number(bottom - SMALL_LINE * (len(agents) - line))
        yield f'<text class="s" x="{_number(left)}" y="{y}">{escape(text)}</text>'
    count = node.shown_count
    badge = " ".join((*node.badges, *(() if count is None else (f"x{count:,}",))))
    right = place.x + place.width - _INSET
    if node.status is not None or node.counts:
        status = node.status or ("failed" if node.counts.get("failed") else "completed")
        known = status if status in {"running", "completed", "failed"} else "other"
        yield f'<circle class="{known}" cx="{_number(right - 1)}" cy="{_number(place.y + 14)}" r="4"/>'
    if badge:
        yield f'<text class="b" text-anchor="end" x="{_number(right)}" y="{_number(bottom)}">{escape(badge)}</text>'


def _rect(name: str, place: Rect, radius: float) -> str:
    x, y, width, height = (_number(each) for each in (place.x, place.y, place.width, place.height))
    return f'<rect class="{name}" x="{x}" y="{y}" width="{width}" height="{height}" rx="{_number(radius)}"/>'


def _pair(point: Point) -> str:
    return f"{_number(point[0])} {_number(point[1])}"


def _number(value: float) -> str:
    return f"{round(value, 1):g}"


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


def _text(text: str) -> str:
    """Shorten a text and replace special characters by Mermaid's entities, such as `#34;`."""
    shown = text if len(text) <= _LINE else f"{text[: _LINE - 1]}…"
    return "".join(char if char.isalnum() or char in _SAFE else f"#{ord(char)};" for char in shown)


V = TypeVar("V", bound=Value)

#: Their open tasks are in progress; in other states they were interrupted.
_IN_PROGRESS = frozenset({"running", "waiting"})
_PICTURES = frozenset({".svg", ".mmd"})


def parse_file(kind: type[V], text: str | bytes, *, name: str) -> V:
    """`name` is the file's name in errors (S-VIZ-70)."""
    try:
        return kind.model_validate_json(text)
    except pydantic.ValidationError as error:
        raise ValidationError(f"{name}: {explain(error, kind.__name__)}") from error


def trace_steps(trace: ExecutionTrace, plan: Plan | None = None) -> list[FlowNode]:
    """Return the steps of a run in the order of their start, for `ran_flow`.

    A trace may lack the names of tasks outside of units: they come from the plan, or are numbered.
    """
    failed = {(error.agent_role, error.task_description) for error in trace.errors}
    keys: dict[tuple[str, str], deque[str]] = {}
    for node in () if plan is None else plan.nodes:
        keys.setdefault((node.agent_role, node.description), deque()).append(node.key)
    unnamed = 0
    found: list[FlowNode] = []
    tasks = trace.task_traces
    if trace.workflow == Workflow.HIERARCHICAL:  # a manager's workers are its delegations
        tasks = tuple(task for task in tasks if task.agent_role == MANAGER_ROLE) or tasks
    for task in sorted(tasks, key=lambda each: each.started_at):
        name = task.metadata.get("instance")
        if name is None:
            unnamed += 1
            planned = keys.get((task.agent_role, task.task_description))
            name = instance_of(planned.popleft() if planned else f"task-{unnamed}")
        is_failed = (task.agent_role, task.task_description) in failed
        found += [_step(str(name), task, is_failed=is_failed), *_delegated_steps(str(name), task)]
    return found


def _step(name: str, task: TaskTrace, *, is_failed: bool) -> FlowNode:
    state = str(task.metadata.get("state", ""))
    status = "completed" if not state else state if state in _IN_PROGRESS else "cancelled"
    kind = "manager" if task.agent_role == MANAGER_ROLE else "handler" if task.agent_role == DETERMINISTIC else "task"
    return FlowNode(
        id=name,
        kind=task.node_type or kind,
        title=task.task_description,
        agent=task.agent_role,
        status="failed" if is_failed else status,
        level=task.map_reduce_level,
        started_at=task.started_at.timestamp(),
        ended_at=task.completed_at.timestamp(),
    )


def _delegated_steps(delegating: str, task: TaskTrace) -> Iterator[FlowNode]:
    for number, each in enumerate(task.delegations):
        name = delegated_instance(effect_name(delegating, 0, number))
        yield FlowNode(
            id=name,
            kind="delegation",
            title=each.task_description,
            agent=each.worker_role,
            status="completed" if each.succeeded else "failed",
            started_at=each.started_at.timestamp(),
            ended_at=each.completed_at.timestamp(),
        )
        if each.worker_trace is not None:
            yield from _delegated_steps(name, each.worker_trace)


class DevToolsExport(Value):
    """The files that `EnsembleDevTools.export` wrote."""

    dag_path: Path
    trace_path: Path

    def describe(self) -> str:
        """Return the paths in two lines of text."""
        return f"Graph: {self.dag_path}\nTrace: {self.trace_path}"


class EnsembleDevTools:
    """Writes files for a viewer, and pictures."""

    @staticmethod
    def build_dag(ensemble: EnsembleDefinition | MapDefinition | Graph) -> DagModel:
        """Return the graph of a team; see `DagExporter.build`."""
        return DagExporter.build(ensemble)

    @staticmethod
    def export_dag(ensemble: EnsembleDefinition | MapDefinition | Graph, output_dir: str | Path) -> Path:
        """Write the graph of a team into a folder, which is created if missing, and return the file.

        Raises:
            ValueError: The team is empty, or there is no folder.
            NotImplementedError: The map-reduce creates its tasks during the run.
            OSError: The file cannot be written.
        """
        dag = DagExporter.build(ensemble)
        return _write(output_dir, "ensemble-dag", "dag.json", dag.to_json)

    @staticmethod
    def export_trace(output: EnsembleOutput, output_dir: str | Path) -> Path:
        """Write the trace of a run into a folder, which is created if missing, and return the file.

        Raises:
            ValueError: There is no output, or no folder.
            IllegalStateError: The output has no trace.
            OSError: The file cannot be written.
        """
        trace = _trace_of(output)
        return _write(output_dir, "ensemble-trace", "trace.json", trace.to_json)

    @classmethod
    def export(
        cls, ensemble: EnsembleDefinition | MapDefinition | Graph, output: EnsembleOutput, output_dir: str | Path
    ) -> DevToolsExport:
        """Write both files. If an argument is invalid, neither is written.

        Raises:
            ValueError, IllegalStateError, NotImplementedError, OSError: See `export_dag` and `export_trace`.
        """
        DagExporter.build(ensemble)
        _trace_of(output)
        dag_path = cls.export_dag(ensemble, output_dir)
        return DevToolsExport(dag_path=dag_path, trace_path=cls.export_trace(output, output_dir))

    @staticmethod
    def draw(
        source: EnsembleDefinition | MapDefinition | Graph | ExecutionTrace,
        path: str | Path,
        *,
        plan: Plan | None = None,
    ) -> Path:
        """Draw a team or a run into a file, which is replaced, and return the file.

        Args:
            source: A team, a graph, or `output.trace`.
            path: The file: `.svg` is a picture, `.mmd` a Mermaid flowchart. Its folders are created.
            plan: Plan of the run in the trace, `team.plan(inputs)`, which contains the dependencies of tasks.

        Raises:
            ValueError: The extension is unknown, or the source is empty.
            IllegalStateError: The layout package is not installed.
            OSError: The file cannot be written.
        """
        target = Path(path)
        if target.suffix not in _PICTURES:
            raise ValueError(f"path must end in .svg or .mmd, got: {path}")
        if isinstance(source, ExecutionTrace):
            flow = ran_flow(trace_steps(source, plan), plan, workflow=source.workflow)
        elif isinstance(source, MapDefinition) and not getattr(source, "is_planned", False):
            flow = map_reduce_flow(source)
        else:
            flow = dag_flow(DagExporter.build(source))
        is_text = target.suffix == ".mmd"
        text = render_mermaid(flow) if is_text else render_svg(flow, place_flow(flow), title=target.stem)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        return target


def _trace_of(output: EnsembleOutput | None) -> ExecutionTrace:
    if output is None:
        raise ValueError("output must not be None")
    if output.trace == ExecutionTrace.EMPTY:
        raise IllegalStateError("output has no execution trace attached: it is not the output of a run")
    return output.trace


def _write(output_dir: str | Path | None, name: str, ending: str, make_text: Callable[[], str]) -> Path:
    """Write a new file. A second one in the same second gets a number."""
    if output_dir is None:
        raise ValueError("output_dir must not be None")
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    stem, text = f"{name}-{utc_now():%Y%m%d-%H%M%S}", make_text()
    path, number = folder / f"{stem}.{ending}", 1
    while True:
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            number += 1
            path = folder / f"{stem}-{number}.{ending}"
        else:
            return path
