"""Pickles a planned run, or the orders of a dynamic run.

Shared parts are sent once under a name, which never refers to another object later.
"""

from __future__ import annotations

import asyncio
import contextlib
import dis
import functools
import hashlib
import inspect
import io
import itertools
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, cast

from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.actors.link.packing import pack_output
from ensemble_ray.actors.link.wire import (
    AgentTemplate,
    CallableRef,
    CallablesUpdate,
    Keep,
    Submission,
    TaskCallables,
    WireOrder,
)
from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.graph import Graph
from ensemble_ray.definition.loop import Loop
from ensemble_ray.definition.phase import Phase
from ensemble_ray.definition.task import Task
from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.execute.local_executor import RefCountedCache, overrides_of, requirements_of
from ensemble_ray.execute.orders import RunContext, TaskOrder
from ensemble_ray.llm.openai import OpenAIChatModel
from ensemble_ray.process.config import UserPickler
from ensemble_ray.runs.ports import PlannedWork, RunRequest
from ensemble_ray.runs.unit_evaluations import list_predicates
from ensemble_ray.values.ids import REDISPATCH_STEP

_SILENTLY_WRONG = (
    asyncio.Lock,
    asyncio.Event,
    asyncio.Condition,
    asyncio.Semaphore,
    asyncio.Queue,
    asyncio.Future,
    io.IOBase,
)
_MAX_DEPTH = 8
_WAY_OUT = "Make it in a factory or a module-level function that runs in the worker, or use runtime='inline'"
_DEPS_WAY_OUT = (
    "Open the deps in each process, with deps=provide(open_deps), or keep them in this one, with deps_place='driver', or use "
    "runtime='inline'"
)
_BUNDLE, _CALLABLES = "declared", "Handlers, guardrails, predicates and delegation policies"
_NO_UNITS: Mapping[str, Loop | Phase | Graph] = {}


def pack_submission(
    request: RunRequest, work: PlannedWork, *, keep: Keep, is_connected: bool, goes_on_alone: bool, program: str = ""
) -> Submission:
    planned = work.planned
    tasks: dict[str, bytes] = {}
    for key, task in planned.tasks.items():
        effect = None if task.handler is None else task.handler_effect
        bare = {"handler": None, "effect": effect, "input_guardrails": (), "output_guardrails": ()}
        sent = task.model_copy(update=bare) if _has_callables(task) else task
        tasks[key] = dump(sent, f"Task '{key}'")
    return Submission(
        run_id=request.run_id,
        plan=planned.plan,
        context=pack_context(request.context),
        header=work.header,
        preamble=work.preliminary,
        contents=work.contents,
        tasks=tasks,
        templates=[_planned_template(key, agent) for key, agent in planned.agents.items()],
        callables=pack_callables(planned.tasks, work.delegation_policies, planned.units),
        store=request.store,
        reason=work.submission,
        is_connected=is_connected,
        goes_on_alone=goes_on_alone,
        keep=keep,
        program=program,
    )


def list_payloads(submission: Submission) -> dict[str, bytes]:
    roles = {node.agent_key: node.agent_role for node in submission.plan.nodes}
    payloads = {f"Agent '{roles.get(each.key, each.key)}'": each.body for each in submission.templates}
    payloads.update((f"Task '{key}'", body) for key, body in submission.tasks.items())
    payloads.update((f"Model '{name}'", body) for name, body in submission.context.models.bodies.items())
    if submission.context.deps is not None and submission.context.deps.body is not None:
        payloads["The deps of the run"] = submission.context.deps.body
    if submission.callables is not None:
        payloads[_CALLABLES] = submission.callables.bundles[_BUNDLE]
    return payloads


def pack_context(context: RunContext) -> RunContext:
    deps = None if context.deps is None else context.deps.pack(lambda value: dump(value, "deps", _DEPS_WAY_OUT))
    return replace(context, models=context.models.pack(dump), deps=deps)


def _has_callables(task: Task) -> bool:
    return task.handler is not None or bool(task.input_guardrails or task.output_guardrails)


def _add_callables(task: Task, where: str, add: Callable[[object, str], CallableRef]) -> TaskCallables:
    def add_all(field: str, things: Sequence[object]) -> tuple[CallableRef, ...]:
        return tuple(add(each, f"{where} -> {field} -> [{number}]") for number, each in enumerate(things))

    return TaskCallables(
        handler=None if task.handler is None else add(task.handler, f"{where} -> handler"),
        input_guardrails=add_all("input_guardrails", task.input_guardrails),
        output_guardrails=add_all("output_guardrails", task.output_guardrails),
    )


def _planned_template(key: str, agent: Agent) -> AgentTemplate:
    """Agents without tools, or with the same tools and model, are of one category. An agent with a runner or requirements is apart."""
    requirements = requirements_of(agent)
    is_plain = not agent.tools and agent.runner is None and not requirements
    # More processes have more copies of its tools, and do more tasks at the same time than `max_concurrency` allows one.
    is_open = is_plain and agent.max_concurrency is None and "replicas" not in agent.model_fields_set
    replicas = None if is_open else agent.replicas
    is_apart = agent.isolation != "shared" and (agent.runner is not None or bool(requirements))
    kind = key if is_apart else (replicas, None if is_plain else (agent.llm, agent.tools, agent.runner))
    template = _make_template(agent, key, "", replicas)  # first, since it names what cannot travel
    return replace(template, category=hashlib.sha256(_dumps(kind)).hexdigest())


def _make_template(agent: Agent, key: str, category: str, replicas: int | None) -> AgentTemplate:
    return AgentTemplate(
        key=key,
        body=dump(agent, f"Agent '{agent.role}'"),
        category=category,
        isolation=agent.isolation,
        replicas=replicas,
        role=agent.role,
        requirements=requirements_of(agent),
    )


def pack_callables(
    tasks: Mapping[str, Task], policies: Sequence[object], units: Mapping[str, Loop | Phase | Graph] = _NO_UNITS
) -> CallablesUpdate | None:
    """Use one bundle, which preserves objects that callables share."""
    things: list[object] = []

    def add(thing: object, where: str) -> CallableRef:
        dump(thing, where)  # its error names the failing part
        things.append(thing)
        return CallableRef(_BUNDLE, len(things) - 1)

    found = {key: _add_callables(task, f"Task '{key}'", add) for key, task in tasks.items() if _has_callables(task)}
    asked = [add(policy, f"Ensemble -> delegation_policies[{number}]") for number, policy in enumerate(policies)]
    predicates: dict[str, CallableRef] = {}
    for path, predicate in list_predicates(units).items():
        key, kind, position = path.rsplit("/", 2)
        where = "until" if kind == "until" else f"edges[{position}] -> condition"
        predicates[path] = add(predicate, f"{'Loop' if kind == 'until' else 'Graph'} '{units[key].name}' -> {where}")
    if not things:
        return None
    body = dump(tuple(things), _CALLABLES)
    return CallablesUpdate(
        bundles={_BUNDLE: body}, tasks=found, policies=asked, predicates=predicates, is_complete=True
    )


class _Template(Struct, frozen=True):
    agent: Agent
    wire: AgentTemplate


class _Callable(Struct, frozen=True):
    #: its id is the key
    thing: object
    ref: CallableRef
    body: bytes


class PackedOrder(Struct, frozen=True):
    order: WireOrder
    names: TaskCallables | None
    template: str | None
    callables: tuple[str, ...]

    @property
    def instance(self) -> str:
        return self.order.instance

    @property
    def size(self) -> int:
        """Approximate size, bytes."""
        order = self.order
        return 500 + len(order.task) + len(order.agent or b"") + sum(map(len, order.context))

    def renew(self, steps: int) -> PackedOrder:
        return replace(self, order=replace(self.order, epoch=self.order.epoch + steps * REDISPATCH_STEP))


class Packer:
    def __init__(self) -> None:
        self._templates: RefCountedCache[_Template] = RefCountedCache()
        self._callables: RefCountedCache[_Callable] = RefCountedCache()
        self._numbers = itertools.count(1)

    def pack(self, order: TaskOrder) -> PackedOrder:
        """Shared parts stay until `release`."""
        task = order.task
        where = f"Task '{order.key}'"
        body = _task_body(task, where)
        template, overrides = None, None
        if order.agent is not None:
            template = self._template(order.agent_key or "", order.agent)
            overrides = pickle.dumps(overrides_of(order.agent, template.agent), protocol=5)
        names, keys = self._locate_callables(task, where)
        agent_key = None if template is None else template.wire.key
        wire = order.convert(body, overrides, pack_output, agent_key=agent_key, description=task.description)
        # No step fails from here on, so each `use` has its `release`.
        if template is not None:
            self._templates.use(order.agent_key or "")
        for key in keys:
            self._callables.use(key)
        self._templates.trim()
        self._callables.trim()
        return PackedOrder(wire, names, None if template is None else order.agent_key or "", keys)

    def release(self, packed: PackedOrder) -> None:
        if packed.template is not None:
            self._templates.release(packed.template)
        for key in packed.callables:
            self._callables.release(key)

    def template_of(self, packed: PackedOrder) -> AgentTemplate | None:
        template = None if packed.template is None else self._templates.get(packed.template)
        return None if template is None else template.wire

    def bundles_of(self, packed: PackedOrder) -> dict[str, bytes]:
        found = (self._callables.get(key) for key in packed.callables)
        return {held.ref.bundle: held.body for held in found if held is not None}

    def _template(self, category: str, agent: Agent) -> _Template:
        """The template of a category is its first agent. One that is made again gets a new name."""
        template = self._templates.get(category)
        if template is None:
            replicas = agent.replicas if "replicas" in agent.model_fields_set else None
            name = f"{category}.{next(self._numbers)}"
            template = _Template(agent, _make_template(agent, name, name, replicas))
            self._templates.put(category, template)
        return template

    def _locate_callables(self, task: Task, where: str) -> tuple[TaskCallables | None, tuple[str, ...]]:
        keys: list[str] = []

        def add(thing: object, name: str) -> CallableRef:
            key = f"{id(thing):x}"
            keys.append(key)
            held = self._callables.get(key)  # tasks that share an object share its only copy (S-SET-31)
            if held is None:
                held = _Callable(thing, CallableRef(f"callable-{next(self._numbers)}"), dump(thing, name))
                self._callables.put(key, held)
            return held.ref

        names = _add_callables(task, where, add) if _has_callables(task) else None
        return names, tuple(keys)


def _task_body(task: Task, where: str) -> bytes:
    """Pickle the task without its agent, tools, context and callables."""
    effect = task.effect if task.handler is None else task.handler_effect
    bare = task.rewritten(
        agent=None,
        context=(),
        tools=(),
        rate_limit=None,
        handler=None,
        effect=effect,
        input_guardrails=(),
        output_guardrails=(),
    )
    # A plain task contains only texts and numbers, which always pickle.
    has_objects = task.output_type is not None or task.llm is not None or task.reflection_config is not None
    is_plain = type(task).__module__.startswith("ensemble_ray.") and not has_objects
    return pickle.dumps(bare, protocol=5) if is_plain else dump(bare, where)


def dump(value: object, path: str, way_out: str = _WAY_OUT) -> bytes:
    try:
        return _dumps(value)
    except Exception as error:
        culprit, reason = _culprit(value, path, error)
        raise ValidationError(f"{culprit} cannot travel to a worker process: {reason}. {way_out}") from error


class Dumped(NamedTuple):
    body: bytes
    models: Sequence[OpenAIChatModel]
    modules: AbstractSet[str]


def dump_all(value: object, path: str) -> Dumped:
    """Pickle the value, and find all models and modules in it (S-CLU-4)."""
    body = dump(value, path)
    finder = _Finder(io.BytesIO(), protocol=5)
    finder.dump(value)
    return Dumped(body, finder.models, finder.modules)


class _StrictPickler(UserPickler):
    def reducer_override(self, obj: object) -> Any:
        if _is_silently_wrong(obj):
            raise pickle.PicklingError(f"{type(obj).__name__} would not work in another process")
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and getattr(obj, "__pydantic_complete__", False):
            # A pydantic class remembers the variables of the function that defined it. It needs them only until its
            # annotations are resolved, and they would be pickled with it.
            members, *_ = cast("tuple[dict[str, object]]", cast("tuple[object, ...]", reduced)[2])
            members.pop("__pydantic_parent_namespace__", None)
        return reduced


def _is_silently_wrong(value: object) -> bool:
    """Each process has its own standard streams."""
    if isinstance(value, io.StringIO | io.BytesIO) or value is sys.stdout or value is sys.stderr:
        return False
    return isinstance(value, _SILENTLY_WRONG)


class _Finder(_StrictPickler):
    def __init__(self, file: io.BytesIO, *, protocol: int) -> None:
        super().__init__(file, protocol=protocol)
        self.models: list[OpenAIChatModel] = []
        self.modules: set[str] = set()

    def persistent_id(self, obj: object) -> None:
        # None means that the object is pickled as usual.
        if isinstance(obj, OpenAIChatModel):
            self.models.append(obj)
        elif isinstance(obj, type | types.FunctionType | types.BuiltinFunctionType) and obj.__module__:
            self.modules.add(obj.__module__)
        elif isinstance(obj, types.ModuleType):
            self.modules.add(obj.__name__)


def _dumps(value: object) -> bytes:
    buffer = io.BytesIO()
    _StrictPickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def _culprit(value: object, path: str, error: Exception) -> tuple[str, str]:
    """Descend into the part that fails, as long as one fails."""
    reason = message_of(error)
    seen: set[int] = set()
    for _ in range(_MAX_DEPTH):
        if _is_silently_wrong(value):
            break
        seen.add(id(value))
        for name, part in _parts(value):
            if id(part) in seen:
                continue
            try:
                _dumps(part)
            except Exception as failure:  # noqa: BLE001  any failure to pickle is the answer here
                value, path, reason = part, f"{path} -> {name}", message_of(failure)
                break
        else:
            break
    return path, reason


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, types.MethodType):
        yield "its object", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, functools.partial):
        yield from (("its function", value.func), ("its arguments", value.args), ("its keywords", value.keywords))
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[object, object]", value).items():
            yield f"[{key!r}]", item
    elif isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(cast("tuple[object, ...]", value)):
            yield f"[{index}]", item
    else:
        yield from _parts_of_object(value)


def _parts_of_object(value: object) -> Iterator[tuple[str, object]]:
    for name, item in getattr(value, "__dict__", {}).items():
        # A class's `__dict__` and `__weakref__` fail whenever the class does.
        if not isinstance(item, types.GetSetDescriptorType):
            yield (f"class attribute '{name}'" if isinstance(value, type) else name), item
    for name in () if isinstance(value, type) else _slots_of(type(value)):
        with contextlib.suppress(AttributeError):  # it has no value
            yield name, getattr(value, name)


def _slots_of(kind: type[object]) -> Iterator[str]:
    for each in kind.__mro__:
        slots: str | Iterable[str] = getattr(each, "__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"closure variable '{name}'", cell.cell_contents
        except ValueError:
            continue  # a variable without a value
    for name in sorted(_global_names(function.__code__) & function.__globals__.keys()):
        if not inspect.ismodule(function.__globals__[name]):
            yield f"global '{name}'", function.__globals__[name]
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            yield f"default of '{name}'", parameter.default


def _global_names(code: types.CodeType) -> set[str]:
    names = {str(step.argval) for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names
