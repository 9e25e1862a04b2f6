"""A run's graph with places for its nodes. Pure. Lengths are pixels at scale 1."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ensemble_ray.studio.schemas.wire import StudioSchema, Text

EdgeKind = Literal["dependency", "conditional", "unconditional", "delegation", "loop"]
GroupKind = Literal["phase", "loop", "graph", "map-level", "manager"]


class FlowNodeSchema(StudioSchema):
    """What is declared, or what ran.

    Attributes:
        kind: That of its steps.
        group: Group that it lies in.
        steps: Steps that it stands for; null where it is folded, and `count` says how many.
        counts: Of a folded node: how many steps there are of each status.
        badges: Short words on it, such as `CP`, `L0`, `MAP`.
    """

    id: str
    x: float
    y: float
    w: float
    h: float
    kind: str
    title: Text
    agent: Text = ""
    level: int | None = None
    critical: bool = False
    group: str | None = None
    steps: list[str] | None = None
    count: int | None = None
    counts: dict[str, int] | None = None
    badges: list[str] = Field(default_factory=list)


class FlowEdgeSchema(StudioSchema):
    """What leads to what.

    Attributes:
        points: The line from one to the other, by x and y.
        label_at: Middle of the label.
        fired: Of a graph's edge: whether the run took it; null: not run, or no such edge.
    """

    from_: str = Field(validation_alias="from", serialization_alias="from")
    to: str
    points: list[tuple[float, float]]
    kind: EdgeKind
    label: Text | None = None
    label_at: tuple[float, float] | None = None
    critical: bool = False
    fired: bool | None = None


class FlowGroupSchema(StudioSchema):
    """A frame around nodes."""

    id: str
    title: Text
    kind: GroupKind
    x: float
    y: float
    w: float
    h: float


class FlowSchema(StudioSchema):
    """Answer to `GET api/studio/runs/ID/flow`."""

    width: float
    height: float
    nodes: list[FlowNodeSchema]
    edges: list[FlowEdgeSchema]
    groups: list[FlowGroupSchema] = Field(default_factory=list[FlowGroupSchema])
    mode: Literal["dag", "graph"] = "dag"
    critical_path: list[str] = Field(default_factory=list)
