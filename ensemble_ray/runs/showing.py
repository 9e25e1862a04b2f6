"""How a run is shown: by which name, and on which dashboard.

A dashboard that cannot be started is told of before anything of the run is done; nothing else of it concerns the run (S-WEB-16).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble_ray.errors import message_of
from ensemble_ray.errors.texts import is_library_file
from ensemble_ray.ports import EnteredRun
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import threads
from ensemble_ray.values.outputs import ExitReason, RunState

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from ensemble_ray.definition.fields import Origin
    from ensemble_ray.definition.run_rules import RunRules
    from ensemble_ray.ports import Dashboard
    from ensemble_ray.record.stores import StoreAddress

_log = bounded_logger(__name__)


def name_of(definition: RunRules, origin: Origin) -> str:
    """Return what runs of a team are called: its name, else the file or variable that it was loaded from (S-DOM-84).

    A team that a program made is called as the program's file. Empty where there is none, as in a notebook.
    """
    main = sys.modules["__main__"]
    program = "" if getattr(main, "__spec__", None) else str(getattr(main, "__file__", None) or "")
    is_own = program.endswith(".py") and not is_library_file(program)  # Ray's, in its tasks and actors
    return definition.name or origin.name or (Path(program).stem if is_own else "")


async def show_run(
    dashboard: Dashboard | None, run_id: str, store: StoreAddress | None, leaving: AsyncExitStack
) -> None:
    """Have a run shown until a stack is left (S-WEB-11, S-WEB-12).

    Args:
        dashboard: What shows it; None: nothing does.
        run_id: The run's id.
        store: Where it is recorded; None: nowhere.
        leaving: The stack.

    Raises:
        EnsembleError: the dashboard cannot be started.
    """
    if dashboard is not None:
        entered = EnteredRun(run_id=run_id)
        if store is not None:
            entered = EnteredRun(run_id=run_id, is_recorded=True, home=store.home, url=store.url)
        await threads.run(dashboard.enter_run, entered)
        leaving.push_async_callback(_leave, dashboard)


async def _leave(dashboard: Dashboard) -> None:
    try:
        await threads.run(dashboard.leave_run)
    except Exception as error:  # noqa: BLE001  the run is done, whatever becomes of its dashboard
        _log.warning("The dashboard could not be stopped: %s", message_of(error))


def exit_reason_of(state: RunState) -> ExitReason:
    """Return why a run in that state gives no more events, as listeners hear it that take its end (S-EVT-23)."""
    match state:
        case RunState.COMPLETED | RunState.CANCELLED | RunState.BUDGET_EXHAUSTED | RunState.WAITING:
            return ExitReason(state.value)
        case _:
            return ExitReason.ERROR
