"""The map of `mapping` through the Batch API of the model server, which answers a batch when it is asked for it."""

from __future__ import annotations

from contextlib import AbstractContextManager

from benchmarks.jobs.mapping import team_of
from benchmarks.setting import Round, Setting, team_rounds

__all__ = ["team"]


def team(setting: Setting) -> AbstractContextManager[Round]:
    """Run a reader for every item, with the requests of all items in one batch."""
    from ensemble_ray import BatchDelivery

    return team_rounds(setting, lambda: team_of(setting).replace(delivery=BatchDelivery(poll_interval=0.05)))
