"""The demo with a page beside it: `ensemble-ray demo --studio`.

The page is a dashboard's, since that shows what models are just saying; it stays until Ctrl-C, so that what was done can be looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ensemble_ray import Ensemble, MapReduceEnsemble, WebDashboard
from ensemble_ray.cli.view.terminal import INTERRUPTED, say
from ensemble_ray.errors import EnsembleError, ValidationError

T = TypeVar("T", Ensemble, MapReduceEnsemble)

#: Where studio listens; what has that port already is left alone.
_PORT = 7328


def show_in_studio(team: T, run: Callable[[T], int], wait: Callable[[], object] | None = None) -> int:
    """Run a team with a page beside it, which stays until Ctrl-C; return the exit code of the run.

    Args:
        team: The team.
        run: Runs it.
        wait: Returns, or raises `KeyboardInterrupt`, when nobody looks at the page any more; None: at Ctrl-C.

    Raises:
        ValidationError: packages are missing.
        EnsembleError: nobody can listen, or the run failed.
    """
    dashboard = _start_dashboard()
    try:
        say(f"Studio: http://127.0.0.1:{dashboard.actual_port}/")
        code = run(team.model_copy(update={"dashboard": dashboard}))
        if code != INTERRUPTED:
            say(f"The run stays at http://127.0.0.1:{dashboard.actual_port}/ until Ctrl-C.")
            _wait(wait or threading.Event().wait)
    finally:
        dashboard.stop()
    return code


def _wait(wait: Callable[[], object]) -> None:
    try:
        wait()
    except KeyboardInterrupt:
        say("Stopped.")


def _start_dashboard() -> WebDashboard:
    """Return a dashboard that serves, at the usual port or at any that is free."""
    dashboard = WebDashboard(port=_PORT, host="127.0.0.1")
    try:
        dashboard.start()
    except ValidationError:  # packages are missing: another port does not help
        raise
    except EnsembleError:
        dashboard = WebDashboard(port=0, host="127.0.0.1")
        dashboard.start()
    return dashboard
