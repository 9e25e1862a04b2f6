"""A live page for the runs of this process. Implements the port `Dashboard`.

The listener and the review handler work before the server starts. If a run started the server, the last run stops it.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from pydantic import model_validator

from ensemble_ray import events
from ensemble_ray.access.admission import is_loopback
from ensemble_ray.errors import ValidationError
from ensemble_ray.events.delivery import EnsembleListener
from ensemble_ray.events.messages import RunMessages
from ensemble_ray.process.concurrency import SystemClock, new_lock, track
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.following import LiveEvents
from ensemble_ray.record.view.exporters import JsonTraceExporter
from ensemble_ray.studio import check_installed
from ensemble_ray.studio.dashboard.hub import MessageHub, ShownRuns, Snapshot, WebReviewHandler
from ensemble_ray.values.outputs import ExitReason
from ensemble_ray.values.reviews import OnTimeoutAction
from ensemble_ray.values.value import DurationField, Value

if TYPE_CHECKING:
    from types import TracebackType

    from ensemble_ray.ports import DashboardRun
    from ensemble_ray.studio.dashboard.hub import Control
    from ensemble_ray.studio.http_server import HttpServer


class WebSocketStreamingListener(EnsembleListener):
    """Sends every event to the pages of a dashboard. `WebDashboard.streaming_listener` is the instance of a dashboard."""

    def __init__(self, hub: MessageHub) -> None:
        self._hub = hub
        self._clock = SystemClock()
        self._lock = new_lock()
        self._runs: dict[str, RunMessages] = {}
        self._latest = ""  # the run of events without a run id
        self._live: dict[str, LiveEvents] = {}  # of active runs

    def live_of(self, run_id: str) -> LiveEvents | None:
        """Return the live events of a run; None: it is not active here. Thread-safe."""
        return self._live.get(run_id)

    def on_ensemble_started(self, ensemble_id: str, workflow: str, total_tasks: int) -> None:
        """Report the start of a run."""
        with self._lock:
            self._latest = ensemble_id
            self._live[ensemble_id] = LiveEvents()
        ids = {"run_id": ensemble_id, "ensemble_id": ensemble_id}
        self._send(events.EnsembleStartedEvent(**ids, workflow=workflow, total_tasks=total_tasks))

    def on_ensemble_completed(self, ensemble_id: str, total_duration: object, exit_reason: object) -> None:
        """Report the end of a run."""
        ids = {"run_id": ensemble_id, "ensemble_id": ensemble_id}
        took, reason = cast("timedelta", total_duration), ExitReason(str(exit_reason))
        self._send(events.EnsembleCompletedEvent(**ids, total_duration=took, exit_reason=reason))

    def on_run_ended(self, run_id: str, exit_reason: ExitReason) -> None:
        """Report the end of a run if no event did, since the run failed, and remove the run."""
        with self._lock:
            run, live = self._runs.pop(run_id, None), self._live.pop(run_id, None)
        if live is not None:
            live.close()
        if run is not None and (message := run.end(exit_reason.value, self._clock.now())) is not None:
            self._hub.publish(run_id, message)

    def on_llm_iteration_started(self, event: events.LlmIterationStartedEvent) -> None:
        """Send an event to the pages, and to the followers of its run."""
        if (live := self._live.get(event.run_id)) is not None:
            live.begin_answer(event)
        self._send(event)

    def on_token(self, event: events.TokenEvent) -> None:
        """Send an event to the pages, and to the followers of its run."""
        if (live := self._live.get(event.run_id)) is not None:
            live.on_token(event)
        self._send(event)

    def _send(self, event: events.Event) -> None:
        """Send an event to the pages."""
        with self._lock:
            run_id = event.run_id or self._latest
            run = self._runs.setdefault(run_id, RunMessages(run_id))
        if (message := run.apply(event, self._clock.now())) is not None:
            self._hub.publish(run_id, message)

    on_task_start = on_task_input = on_task_complete = on_task_failed = on_tool_call = _send
    on_llm_iteration_completed = on_loop_iteration_completed = on_graph_state_completed = _send
    on_delegation_started = on_delegation_completed = on_delegation_failed = _send


_HIGHEST_PORT = 65535


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class DashboardSettings(Value):
    port: int
    host: str = "localhost"
    review_timeout: DurationField = cast("Any", timedelta(minutes=5))
    on_timeout: OnTimeoutAction = OnTimeoutAction.CONTINUE
    max_retained_runs: int = 10
    max_snapshot_iterations: int = 5
    trace_export_dir: Path | None = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        """S-WEB-2: the error reports the first invalid field."""
        given = cast("Mapping[str, object]", data)
        port, host, timeout = given.get("port"), given.get("host"), given.get("review_timeout")
        runs, iterations = given.get("max_retained_runs"), given.get("max_snapshot_iterations")
        number = _number(port)
        if number is None or not 0 <= number <= _HIGHEST_PORT:
            msg = f"port must be in the range 0-{_HIGHEST_PORT} (0 = OS-assigned ephemeral port); got: {port}"
            raise ValidationError(msg)
        if not isinstance(host, str) or not host.strip():
            raise ValidationError(f"host must not be None or blank; got: {host}")
        if timeout is None:
            raise ValidationError("review_timeout must not be None")
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if isinstance(seconds, int | float) and seconds < 0:
            raise ValidationError(f"review_timeout must not be negative; got: {timeout}")
        if (kept := _number(runs)) is None or kept < 1:
            raise ValidationError(f"max_retained_runs must be >= 1; got: {runs}")
        if (pairs := _number(iterations)) is None or pairs < 0:
            msg = f"max_snapshot_iterations must be >= 0 (0 disables iteration snapshots); got: {iterations}"
            raise ValidationError(msg)
        return data


_log = bounded_logger(__name__)


class WebDashboard:
    """Shows runs in a browser as they happen, and asks at their review gates: `Ensemble(dashboard=WebDashboard.on_port(7329))`.

    An ensemble with a dashboard starts it when a run begins, and stops it after the last run. A dashboard that was started before
    keeps running. It can serve several ensembles. Every client that can reach its port can see all runs and decide reviews, so it
    listens on loopback by default.

    Attributes:
        streaming_listener: Sends events to the pages; an `EnsembleListener`.
        review_handler: Asks at gates, and waits for the decision of a page.
        trace_exporter: Writes traces to `trace_export_dir`; None: no folder is set.

    Example:
        >>> dashboard = WebDashboard(port=0, on_timeout="exit_early")
        >>> dashboard.is_running, dashboard.actual_port
        (False, -1)
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        host: str | None = "localhost",
        review_timeout: timedelta | float | None = timedelta(minutes=5),
        on_timeout: OnTimeoutAction | str = OnTimeoutAction.CONTINUE,
        max_retained_runs: int = 10,
        max_snapshot_iterations: int = 5,
        trace_export_dir: str | Path | None = None,
        control: Control | None = None,
    ) -> None:
        """Configure the dashboard, without a start.

        Args:
            port: Port to listen on; 0: any free port. Required.
            host: A name or an address of this machine.
            review_timeout: Timeout of the gates of a review policy, a `timedelta` or seconds; 0: no limit.
            on_timeout: Effect of this timeout: `"continue"`, `"exit_early"` or `"fail"`.
            max_retained_runs: Runs whose messages are stored for pages that connect later.
            max_snapshot_iterations: Model requests to store per task.
            trace_export_dir: Folder for the traces of ensembles without an exporter.
            control: Starts and controls runs for pages and programs.

        Raises:
            ValidationError: a value is invalid.
        """
        self._settings = settings = DashboardSettings(
            port=cast("Any", port),
            host=cast("Any", host),
            review_timeout=cast("Any", review_timeout),
            on_timeout=cast("Any", on_timeout),
            max_retained_runs=max_retained_runs,
            max_snapshot_iterations=max_snapshot_iterations,
            trace_export_dir=cast("Any", trace_export_dir),
        )
        self._control = control
        snapshot = Snapshot(most_runs=settings.max_retained_runs, most_iterations=settings.max_snapshot_iterations)
        self._hub = MessageHub(snapshot)
        self.streaming_listener = WebSocketStreamingListener(self._hub)
        self.review_handler = WebReviewHandler(
            self._hub, timeout=settings.review_timeout, on_timeout=settings.on_timeout
        )
        folder = settings.trace_export_dir
        self.trace_exporter = None if folder is None else JsonTraceExporter(folder)
        self._shown = ShownRuns()
        self._serving = new_lock()
        self._lock = new_lock()
        self._server: HttpServer | None = None
        self._runs = 0  # active runs, and whether a run started the server
        self._is_for_runs = False
        track(self)

    def after_fork(self) -> None:
        """Forget the server and the runs: they belong to the parent."""
        if self._server is not None:
            atexit.unregister(self.stop)
        self._server, self._runs, self._is_for_runs = None, 0, False

    @classmethod
    def on_port(cls, port: int) -> Self:
        """Return a dashboard on that port, with default settings.

        Raises:
            ValidationError: the port is invalid.
        """
        return cls(port=port)

    @property
    def port(self) -> int:
        """The configured port; 0: any."""
        return self._settings.port

    @property
    def host(self) -> str:
        """The configured host."""
        return self._settings.host

    @property
    def is_running(self) -> bool:
        """Whether the server runs."""
        return self._server is not None

    @property
    def actual_port(self) -> int:
        """The port at which it listens; -1 while it does not."""
        server = self._server
        return -1 if server is None else server.port

    def start(self) -> None:
        """Serve until `stop()`. If a run started the server, it now stays after the last run.

        Raises:
            ValidationError: the packages that it needs are not installed.
            EnsembleError: the server cannot listen there, such as when the port is in use.
        """
        with self._serving:
            self._is_for_runs = False
            self._start()

    def stop(self) -> None:
        """Close all connections and stop serving. No effect if the server does not run. Open gates wait for their timeouts."""
        with self._serving:
            self._stop()

    def enter_run(self, run: DashboardRun) -> None:
        """Count a new run, and start the server if needed; see `Dashboard`."""
        self._shown.add(run)
        with self._lock:
            self._runs += 1
        try:
            with self._serving:
                if self._server is None:
                    self._start()
                    self._is_for_runs = True
        except BaseException:
            with self._lock:
                self._runs -= 1
            raise

    def leave_run(self) -> None:
        """Count the end of a run, and stop the server after the last run; see `Dashboard`."""
        with self._lock:
            self._runs -= 1
        # A stopping server may wait for its own runs, so these lock only to stop it.
        if self._is_left():
            with self._serving:
                if self._is_left():  # no other run began meanwhile
                    self._stop()

    def _is_left(self) -> bool:
        return self._runs == 0 and self._is_for_runs

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = f"port {self.actual_port}" if self.is_running else "not running"
        return f"WebDashboard(port={self.port}, host={self.host!r}): {state}"

    def _start(self) -> None:
        if self._server is not None:
            return
        check_installed("The dashboard")
        from ensemble_ray.studio.dashboard.app import dashboard_app
        from ensemble_ray.studio.http_server import HttpServer

        if not is_loopback(self.host):
            _log.warning(
                "The dashboard listens on %s: every client that reaches it can see all runs and decide reviews, without a key",
                self.host,
            )
        app = dashboard_app(
            self._hub,
            self.review_handler,
            self._shown,
            host=self.host,
            port=lambda: self.actual_port,
            live=self.streaming_listener.live_of,
            control=self._control,
        )
        server = HttpServer(app, host=self.host, port=self.port, name="dashboard", on_stop=self._hub.close)
        server.start()
        self._server = server
        atexit.register(self.stop)
        _log.info("The dashboard is at http://%s:%d", self.host, server.port)

    def _stop(self) -> None:
        server, self._server = self._server, None
        self._is_for_runs = False
        if server is not None:
            atexit.unregister(self.stop)
            server.stop()
