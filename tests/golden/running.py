"""The program that makes runs of golden cases. In: a step, a runtime and names of cases. Out: their records.

`python -m tests.golden.running STEP RUNTIME CASE...` in a home of its own, where `ENSEMBLE_RAY_STORE` may name a database.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any
from unittest import mock

from ensemble_ray import EnsembleError, fork, resume
from ensemble_ray.testing import ModelServer
from tests.golden import model
from tests.golden.cases import Case, cases_of

#: Longest wait for a run to reach its point, s.
_PATIENCE_S = 60.0


def mark_of(point: str) -> str:
    """Return the name of the file that says that a run is at its point."""
    return point.replace("/", "_")


@contextlib.contextmanager
def answering_server() -> Generator[None]:
    """Start what the team `provider` and those of files ask, and say where it is."""
    with ModelServer(model.serve_answer) as server:
        url = server.base_url
        with mock.patch.dict(os.environ, {model.SERVER: url, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none"}):
            yield


def main(step: str, runtime: str, *names: str) -> None:
    """Make the runs of these cases."""
    chosen = [case for case in cases_of(runtime) if case.name in names]
    with answering_server():
        if step == "begin":
            _begin(chosen, runtime)
            return
        for case in chosen:
            with contextlib.suppress(EnsembleError), model.other_answers(case.answers):  # some are to fail
                _complete(case, runtime)


def _folder(case: Case) -> Path:
    """Return where a run's own files lie; a run that goes on finds those of before."""
    folder = Path(os.environ["ENSEMBLE_RAY_HOME"]) / "files" / case.run_id
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _complete(case: Case, runtime: str) -> None:
    team = case.make
    os.chdir(_folder(case))
    if case.how == "resumed":
        resume(case.run_id, None if case.is_of_file else team(), runtime=runtime)
    elif case.how == "forked":
        fork(f"{case.team}-{case.of}", case.from_task, team(), runtime=runtime, new_run_id=case.name)
    else:
        team().run(case.inputs, runtime=runtime, run_id=case.run_id)


def _begin(chosen: list[Case], runtime: str) -> None:
    """Begin runs that stay at their points, and cancel some of them; whoever kills this process ends the others."""
    begun: list[tuple[Case, Any]] = []
    for case in chosen:
        os.chdir(_folder(case))
        begun.append((case, case.make().start(case.inputs, runtime=runtime, run_id=case.run_id)))
        _wait_for(case, begun[-1][1])
    for case, run in begun:
        if case.how == "cancelled":
            run.cancel()
            run.result(_PATIENCE_S)
    (Path(os.environ[model.MARKS]) / "all").touch()
    time.sleep(10 * _PATIENCE_S)


def _wait_for(case: Case, run: Any) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not (Path(os.environ[model.MARKS]) / mark_of(case.point)).exists():
        if run.state.is_final or time.monotonic() > deadline:
            raise AssertionError(f"{case.name} is {run.state}, and not at {case.point}; asked: {model.ASKED}")
        time.sleep(0.02)


if __name__ == "__main__":
    main(*sys.argv[1:])
