"""A run whose process ends in its second task. As a program: `python -c "from tests.browser.killed import die; die(HOME, ID)"`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ensemble_ray import Ensemble, InlineRuntime, TaskHandlerContext, tool
from ensemble_ray.definition.fields import Origin
from ensemble_ray.teamfile import load_source
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, answer, call, task
from tests.processes import own_environment
from tests.template import run_forked

__all__ = ["die", "kill_run"]

#: Exit status of the process that dies.
_DIED = 9


@tool
def transfer(amount: str) -> str:
    """Transfer money; the process ends before anybody knows whether it was done."""
    os._exit(_DIED)


def _close(context: TaskHandlerContext) -> str:
    return " + ".join(output.raw for output in context.context_outputs)


def team() -> Ensemble:
    """Reads an invoice, and dies while it pays."""
    read = task("Read the invoice", agent(ScriptedModel(otherwise=answer("12.00 to the baker", 40, 9)), "Reader"))
    pay = task(
        "Pay the invoice",
        agent(ScriptedModel(call("transfer", '{"amount": "12.00"}')), "Clerk", tools=[transfer]),
        context=[read],
    )
    return Ensemble(tasks=[read, pay, task("Close the books", handler=_close, context=[pay])], workflow="sequential")


def die(home: str, run_id: str) -> None:
    """Run until the process ends. Another process finds the team by its place."""
    load_source(Origin(place=f"{__name__}:team")).run(runtime=InlineRuntime(home=Path(home)), run_id=run_id)


def kill_run(home: Path, run_id: str) -> None:
    """Leave a run behind whose process is gone."""
    program = f"from tests.browser.killed import die; die({str(home)!r}, {run_id!r})"
    command = [sys.executable, "-c", program]
    ended = run_forked(command, env=own_environment(home), timeout=60)
    assert ended.returncode == _DIED
