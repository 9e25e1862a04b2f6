"""The parts that serve one page of studio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING

from ensemble_ray.studio.http_server import Guard, LocalGuard
from ensemble_ray.studio.schemas import Action, StudioInfo

if TYPE_CHECKING:
    from ensemble_ray.record.following import LiveEvents
    from ensemble_ray.studio.documents import FilesFolder
    from ensemble_ray.studio.http_server import Visitor
    from ensemble_ray.studio.local_actions import StudioActions
    from ensemble_ray.studio.processes import ProcessReader
    from ensemble_ray.studio.reading import StudioReader


#: Most exports and files that are written and sent at the same time (S-STU-175).
_MOST_DOCUMENTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Studio:
    """The parts that serve one page."""

    reader: StudioReader
    #: name of the place, for people
    title: str
    guard: Guard = field(default_factory=LocalGuard)
    #: None: the page only reads
    actions: StudioActions | None = None
    #: the actions that the page offers
    offers: tuple[Action, ...] = ("cancel", "resume", "fork", "decide")
    read_only_reason: str | None = None
    #: None: the page shows no processes
    processes: ProcessReader | None = None
    #: returns the live events of a run of this process; None: there are no live events
    live: Callable[[str], LiveEvents | None] | None = None
    #: a folder with graphs and traces; None: no folder
    files: FilesFolder | None = None
    #: held while studio writes and sends an export or a file
    documents: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MOST_DOCUMENTS))

    def info(self, visitor: Visitor) -> StudioInfo:
        """Return the features of the page for this visitor."""
        return StudioInfo(
            version=version("ensemble-ray"),
            actions=list(self.offers) if self.actions is not None else [],
            has_actors=self.processes is not None,
            has_files=self.files is not None and visitor.sees_all,
            title=self.title,
            read_only_reason=self.read_only_reason,
        )
