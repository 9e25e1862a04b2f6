"""Whether the nodes of a cluster can load what a run sends them, found out before anything is asked (S-SET-56).

In: the pickles of a run, by what people call them. Out: an error that says what cannot be loaded where, and what to do.
Which modules a pickle names is read from its bytes here, so that a run that needs none pays nothing; the scheduler has the
nodes load them (`scheduler.loading`).
"""

from __future__ import annotations

import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from ensemble_ray.actors.driver.local_instance import is_started_here
from ensemble_ray.process.bounded_log import bounded_logger

__all__ = ["check_loading", "is_everywhere", "modules_in"]

_log = bounded_logger(__name__)
#: A short text in a pickle, as the names of modules are: its opcode and its length stand before it.
_SHORT_TEXT = re.compile(rb"\x8c([\x01-\xff])", re.DOTALL)
#: What every node has that has this library.
_EVERYWHERE = sys.stdlib_module_names | {
    *(
        "ensemble_ray",
        "actors",
        "serve",
        "ray",
        "pydantic",
        "pydantic_core",
        "cloudpickle",
        "openai",
        "typing_extensions",
    ),
    "__main__",  # travels by value
    "__mp_main__",
}


def modules_in(body: bytes) -> set[str]:
    """Return the modules of this process that a pickle may name, without those that every node has.

    A text that happens to be the name of a module counts too: it leads to a check that was not needed.
    """
    found: set[str] = set()
    for match in _SHORT_TEXT.finditer(body):
        begin = match.end()
        text = body[begin : begin + match[1][0]]
        if text.isascii() and (name := text.decode()) in sys.modules and not is_everywhere(name):
            found.add(name)
    return found


def is_everywhere(module: str) -> bool:
    """Return whether every node has that module that has this library."""
    return module.partition(".")[0] in _EVERYWHERE


async def check_loading(scheduler: Any, payloads: Mapping[str, bytes]) -> None:
    """Have every node load what names modules that it may not have; at once where there is nothing of that kind.

    Args:
        scheduler: The cluster's.
        payloads: Pickles by what people call them: `Agent 'Writer'`.

    Raises:
        RayTaskError: something cannot be loaded on some node; its cause is the ValidationError that says so.
    """
    doubtful = {
        name: body
        for name, body in payloads.items()
        if (modules := modules_in(body)) and not (is_started_here() and _are_on_path(modules))
    }
    if not doubtful:
        return
    try:
        await scheduler.check_loading.remote(doubtful)
    except ray.exceptions.ActorUnavailableError:
        _log.info("The scheduler is being started again; what the run needs is not loaded in advance")


def _are_on_path(modules: Iterable[str]) -> bool:
    """Whether the workers of an instance that this process started find them, as far as that is known."""
    paths = {Path(path).resolve() for path in _worker_path()}
    return all(_root_of(name) in paths for name in modules)


def _worker_path() -> Iterable[str]:
    """Where these workers look: Ray hands on the script's directory and the current one, the environment the rest."""
    yield from filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    script = str(Path(sys.argv[0]).resolve().parent) if sys.argv and sys.argv[0] else ""
    if script in sys.path:
        yield script
    yield _STARTED_IN
    yield from (site.getusersitepackages(), *site.getsitepackages())
    yield from (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


#: The current directory, which a program may change later.
_STARTED_IN = str(Path.cwd())


def _root_of(name: str) -> Path | None:
    """Return the directory in which that module is found; None where it has no file."""
    file = getattr(sys.modules[name], "__file__", None)
    if not file:
        return None
    path = Path(file).resolve()
    steps = len(name.split(".")) - (path.stem != "__init__")
    return path.parents[steps]
