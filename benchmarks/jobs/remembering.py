"""The chain of calls by a team that remembers, and by one whose work is approved: what both cost beside the chain alone."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.jobs.chain import make_chain
from benchmarks.setting import Round, Setting, team_rounds

if TYPE_CHECKING:
    from ensemble_ray import Ensemble

__all__ = ["approved", "team"]


@contextmanager
def team(setting: Setting) -> Generator[Round]:
    """Let each task read the newest entries of a scope in a file, and add one."""
    with tempfile.TemporaryDirectory(prefix="ensemble-ray-bench-") as folder:

        def make() -> Ensemble:
            from ensemble_ray import Ensemble, SqliteMemory

            memory = SqliteMemory(Path(folder) / "memory.db")
            return Ensemble(tasks=make_chain(setting, memory_scopes=["notes"]), memory_store=memory)

        with team_rounds(setting, make) as rounds:
            yield rounds


def approved(setting: Setting) -> AbstractContextManager[Round]:
    """Let a handler of this process approve of each task's output."""

    def make() -> Ensemble:
        from ensemble_ray import Ensemble, ReviewHandler

        return Ensemble(
            tasks=make_chain(setting), review_handler=ReviewHandler.auto_approve(), review_policy="after_every_task"
        )

    return team_rounds(setting, make)
