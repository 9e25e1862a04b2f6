"""Two runs side by side: which steps gave the same. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.studio.schemas.runs import ComparedRuns, ComparedSide, ComparedStep

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ensemble_ray.studio.schemas.runs import RunRow
    from ensemble_ray.studio.views.steps import StepsView


def compare_steps(a: tuple[RunRow, StepsView], b: tuple[RunRow, StepsView]) -> ComparedRuns:
    """Return the steps of two runs by name, those of the first one first; units are left out."""
    sides = (_sides(a[1]), _sides(b[1]))
    titles = {state.id: view.show(state).title for view in (b[1], a[1]) for state in view.states.values()}
    steps = [
        ComparedStep(
            id=name,
            title=titles[name],
            a=sides[0].get(name),
            b=sides[1].get(name),
            same=_is_same(sides[0].get(name), sides[1].get(name)),
        )
        for name in dict.fromkeys((*sides[0], *sides[1]))
    ]
    return ComparedRuns(a=a[0], b=b[0], steps=steps)


def _sides(view: StepsView) -> Mapping[str, ComparedSide]:
    return {
        state.id: ComparedSide(
            status=state.status,
            tokens=shown.total_tokens if shown.model_calls else None,
            duration_ms=None
            if state.started_at is None or state.ended_at is None
            else max(0, round((state.ended_at - state.started_at) * 1000)),
            output_digest=shown.output_digest,
        )
        for state in view.states.values()
        if not state.is_unit
        for shown in (view.show(state),)
    }


def _is_same(a: ComparedSide | None, b: ComparedSide | None) -> bool:
    return a is not None and b is not None and a.status == b.status and a.output_digest == b.output_digest
