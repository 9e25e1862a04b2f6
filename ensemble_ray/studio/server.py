"""The server behind `ensemble-ray studio`: the page over all recorded runs of a home or a database.

It listens on loopback by default. On any other host every request needs a key.
"""

from __future__ import annotations

from pathlib import Path

from starlette.types import ASGIApp

from ensemble_ray.access.admission import is_loopback
from ensemble_ray.errors import ValidationError
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.process.config import Settings
from ensemble_ray.process.context import notify
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.studio.app import Studio, studio_app
from ensemble_ray.studio.documents import FilesFolder
from ensemble_ray.studio.http_server import BodyLimit, HttpServer, KeyGuard, LocalGuard, LoopbackCheck
from ensemble_ray.studio.local_actions import LocalActions
from ensemble_ray.studio.processes import LocalClusters, RunProcesses
from ensemble_ray.studio.reading import StudioReader

PORT = 7328
_HIGHEST_PORT = 65535


class StudioServer:
    """A page over recorded runs. Can be restarted after a stop."""

    def __init__(
        self,
        address: StoreAddress,
        *,
        host: str = "127.0.0.1",
        port: int = PORT,
        has_actions: bool = True,
        cluster: str | None = None,
        files: Path | None = None,
    ) -> None:
        """Configure the page and its address.

        Args:
            address: Location of the records.
            host: Beyond loopback every request needs a key of the home.
            port: 0: any free port.
            has_actions: Whether the page can cancel, resume and fork runs, and decide reviews.
            cluster: Address of the cluster to show; default `RAY_ADDRESS`, else the clusters of runs of this machine.
            files: A folder with graphs and traces.
        """
        if not 0 <= port <= _HIGHEST_PORT:
            raise ValidationError(f"port must be in the range 0-{_HIGHEST_PORT}, got: {port}")
        if not host.strip():
            raise ValidationError("host must not be blank")
        self._host = host.strip()
        store = store_at(address)
        is_local = is_loopback(self._host)
        reader = StudioReader(store, can_decide=has_actions)
        self._clusters = LocalClusters((cluster or Settings.from_environment().ray_address).strip())
        location = address.url.partition("://")[2].partition("?")[0]  # with the password
        studio = Studio(
            reader=reader,
            processes=RunProcesses(store, reader, self._clusters),
            title=f"the database {location.rpartition('@')[2]}" if address.url else address.home,
            guard=LocalGuard() if is_local else KeyGuard(Path(address.home)),
            actions=LocalActions(address) if has_actions else None,
            files=None if files is None else FilesFolder(files),
            read_only_reason=None if has_actions else "Studio was started with --no-actions",
        )
        app: ASGIApp = BodyLimit(studio_app(studio))
        if is_local:
            app = LoopbackCheck(app)
        else:
            notify(f"Studio listens on {self._host}: every client with a key can see the runs")
        self._server = HttpServer(app, host=self._host, port=port, name="studio")

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def url(self) -> str:
        host = self._host.removeprefix("[").removesuffix("]")
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop()
        run_blocking(self._clusters.close())
