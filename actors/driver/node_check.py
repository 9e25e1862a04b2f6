"""Checks whether all nodes of a cluster fit a team before any model is called (S-CLU-1 to S-CLU-6)."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import re
import site
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import ray
import ray.cloudpickle
import ray.exceptions

from ensemble_ray.actors import spawn
from ensemble_ray.actors.driver.cluster import is_started_here
from ensemble_ray.actors.driver.packing import dump_all
from ensemble_ray.actors.link.reach import last_line, living_nodes
from ensemble_ray.actors.worker import node_report
from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.map_reduce import MapDefinition
from ensemble_ray.definition.run_rules import RunRules
from ensemble_ray.process.concurrency import threads
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.metrics import EndpointQuestion, NodeQuestion, NodeReport, NodesReport

_log = bounded_logger(__name__)
#: A short text in a pickle: opcode, length, text.
_SHORT_TEXT = re.compile(rb"\x8c([\x01-\xff])", re.DOTALL)
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
    "__main__",  # sent by value
    "__mp_main__",
}
#: Their objects are sent between processes, so that their versions matter.
_PACKAGES = ("ensemble-ray", "ray", "cloudpickle", "pydantic", "pydantic-core", "openai")
#: Less than the node's own limit.
_ENDPOINT_S = 10.0


def question_about(definition: object | None) -> NodeQuestion:
    payloads: dict[str, bytes] = {}
    modules: set[str] = set()
    endpoints: list[EndpointQuestion] = []
    for name, value in _sent_parts(definition):
        found = dump_all(value, name)
        if needed := {module for module in found.modules if not is_everywhere(module)}:
            payloads[name] = found.body
            modules |= needed
        for model in found.models:
            url = model.declared_url
            if url:
                netloc = urlsplit(url).netloc
                url = url.replace(netloc, netloc.rpartition("@")[2], 1)
            endpoints.append(EndpointQuestion(url=url, has_key=model.has_own_key))
    known = importlib.metadata.packages_distributions()
    needed_by = {name for module in modules for name in known.get(module.partition(".")[0], ())}
    packages = (*_PACKAGES, *sorted(needed_by - {*_PACKAGES}))
    return NodeQuestion(packages=packages, payloads=payloads, endpoints=tuple(dict.fromkeys(endpoints)))


def _sent_parts(definition: object | None) -> Iterator[tuple[str, object]]:
    if isinstance(definition, RunRules) and definition.deps_place == "worker":
        yield "deps", definition.deps
    if isinstance(definition, EnsembleDefinition):
        agents = (*(definition.agents or ()), *(task.agent for task in definition.all_tasks if task.agent is not None))
        for agent in dict.fromkeys(agents):
            yield f"Agent '{agent.role}'", agent
        for number, task in enumerate(definition.all_tasks, start=1):
            yield f"Task '{task.name or number}'", task.model_copy(update={"agent": None, "context": ()})
        yield "llm", (definition.llm, definition.manager_llm)
    elif isinstance(definition, MapDefinition):
        # Factories stay in the caller's process, and their products are not known yet.
        yield "llm", definition.llm


async def ask_nodes(question: NodeQuestion, *, timeout_s: float) -> NodesReport:
    """Nodes that do not answer in time are in the report, too."""
    arguments = (
        tuple(question.packages),
        dict(question.payloads),
        tuple((each.url, each.has_key) for each in question.endpoints),
        min(_ENDPOINT_S, timeout_s / 2),
    )
    began = time.monotonic()
    # By value: a node may have another version of this package, or none.
    pickling = cast("Any", ray.cloudpickle)
    pickling.register_pickle_by_value(node_report)
    try:
        # Nodes of one machine share an address.
        nodes = {str(each["NodeID"]): str(each["NodeManagerAddress"]) for each in await threads.run(living_nodes)}
        asked = {node_id: spawn.on_node(node_report.describe_node, node_id).remote(*arguments) for node_id in nodes}
        here = threads.run(lambda: node_report.describe_node(arguments[0], {}, (), 0))
        answers = await asyncio.gather(*(_answer(asked[node], nodes[node], node, timeout_s) for node in nodes))
    finally:
        pickling.unregister_pickle_by_value(node_report)
    return NodesReport(here=_report("this process", "", await here), nodes=answers, duration_s=time.monotonic() - began)


async def _answer(reference: Any, address: str, node_id: str, timeout_s: float) -> NodeReport:
    try:
        data = cast("Mapping[str, object]", await asyncio.wait_for(reference, timeout_s))
    except TimeoutError:
        ray.cancel(reference, force=True)
        return NodeReport(address=address, node_id=node_id, refusal=f"did not answer within {timeout_s:.0f} s")
    except ray.exceptions.RayError as error:
        return NodeReport(address=address, node_id=node_id, refusal=f"cannot be asked: {last_line(error)}")
    return _report(address, node_id, data)


def _report(address: str, node_id: str, data: Mapping[str, object]) -> NodeReport:
    return NodeReport(address=address, node_id=node_id, **cast("dict[str, Any]", dict(data)))


async def check_loading(scheduler: Any, payloads: Mapping[str, bytes]) -> None:
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
        _log.info("The scheduler is restarting; the run's payloads are not loaded in advance")


def modules_in(body: bytes) -> set[str]:
    """Return the modules of this process that a pickle may name, except those on every node.

    A text that happens to be a module's name only causes a needless check.
    """
    found: set[str] = set()
    for match in _SHORT_TEXT.finditer(body):
        begin = match.end()
        text = body[begin : begin + match[1][0]]
        if text.isascii() and (name := text.decode()) in sys.modules and not is_everywhere(name):
            found.add(name)
    return found


def is_everywhere(module: str) -> bool:
    return module.partition(".")[0] in _EVERYWHERE


def _are_on_path(modules: Iterable[str]) -> bool:
    """Whether workers of an instance that this process started can find these modules."""
    paths = {Path(path).resolve() for path in _worker_path()}
    for name in modules:
        file = getattr(sys.modules[name], "__file__", None)
        if not file:
            return False
        path = Path(file).resolve()
        if path.parents[len(name.split(".")) - (path.stem != "__init__")] not in paths:
            return False
    return True


def _worker_path() -> Iterable[str]:
    yield from filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    script = str(Path(sys.argv[0]).resolve().parent) if sys.argv and sys.argv[0] else ""
    if script in sys.path:
        yield script
    yield _STARTED_IN
    yield from (site.getusersitepackages(), *site.getsitepackages())
    yield from (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


#: A program may change the current directory later.
_STARTED_IN = str(Path.cwd())
