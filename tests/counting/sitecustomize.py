"""Notes each start of a Python interpreter for `tests.accounting`, which puts this directory on PYTHONPATH."""

import contextlib
import os
import sys
import time

#: What the command line of a process contains -> what it counts as; the first that fits. Empty: part of what started it.
_KINDS = (
    ("worker_client.py", "workers"),
    ("default_worker.py", "workers"),
    ("setup_worker.py", "workers"),
    ("runtime_env/agent/main.py", "instances"),
    ("/ray/dashboard/", ""),
    ("/ray/_private/", ""),
    ("worker_template.py", ""),
    ("exec(eval(sys.stdin.readline()))", ""),  # a worker of pytest
)


def _note_start() -> None:
    line = " ".join(sys.orig_argv)
    kind = next((kind for part, kind in _KINDS if part in line), "programs")
    if kind:
        test = os.environ.get("PYTEST_CURRENT_TEST", "-").partition(" ")[0]
        worker = os.environ.get("PYTEST_XDIST_WORKER", "-")
        entry = f"start {time.time_ns()} {worker} {kind} {os.getpid()} {test}\n"
        with open(os.environ["TEST_ACCOUNTS"], "a", encoding="utf-8") as file:  # noqa: PTH123  pathlib takes longer to import
            file.write(entry)


if "TEST_ACCOUNTS" in os.environ:
    with contextlib.suppress(OSError):  # a program that may not write there still runs
        _note_start()
