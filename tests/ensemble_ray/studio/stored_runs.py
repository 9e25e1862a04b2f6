"""Runs of real teams, recorded in a store of a test. In: a home. Out: the store, and the facts of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from ensemble_ray import InlineRuntime
from ensemble_ray.facts.fact import Fact
from ensemble_ray.record.sqlite.store import SqliteStore
from tests.ensemble_ray.record.unit_teams import TEAMS, World

__all__ = ["Anybody", "numbered", "recorded_team"]


class Anybody:
    """A visitor who sees all runs."""

    name = None
    sees_all = True
    sees_cluster = True
    roles = None

    def may_see(self, run: object) -> bool:
        return True


def numbered(facts: Sequence[Fact]) -> list[Fact]:
    """Facts with the positions that a store would give them."""
    return [replace(fact, seq=place) for place, fact in enumerate(facts, start=1)]


async def recorded_team(home: Path, team: str, run_id: str = "whole") -> tuple[SqliteStore, list[Fact]]:
    """Run a team of `unit_teams` inline; give its store and its facts."""
    await TEAMS[team](World()).arun(runtime=InlineRuntime(home=home), run_id=run_id)
    store = SqliteStore(home)
    return store, await store.facts(run_id)
