"""What must travel is pickled here, before the run starts; what cannot is named with its path (S-CONV-34, S-SET-38).

Also refused: what pickles in silence and is wrong on the other side, such as asyncio locks and open files.
"""

from __future__ import annotations

import asyncio
import dis
import functools
import inspect
import io
import pickle
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, cast

from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.llm.openai import OpenAIChatModel
from ensemble_ray.process.pickling import UserPickler

__all__ = ["Dumped", "dump", "dump_all"]

#: Things that pickle but do not work in another process.
_SILENTLY_WRONG = (
    asyncio.Lock,
    asyncio.Event,
    asyncio.Condition,
    asyncio.Semaphore,
    asyncio.Queue,
    asyncio.Future,
    io.IOBase,
)
#: How deep the search for a culprit goes.
_MAX_DEPTH = 8
_WAY_OUT = "Make it in a factory or a module-level function that runs in the worker, or use runtime='inline'"


class _StrictPickler(UserPickler):
    """Refuses what would arrive broken."""

    def reducer_override(self, obj: object) -> Any:
        if _is_silently_wrong(obj):
            raise pickle.PicklingError(f"{type(obj).__name__} would not work in another process")
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple):
            _forget_surroundings(obj, cast("tuple[object, ...]", reduced))
        return reduced


def _forget_surroundings(kind: type, reduced: tuple[object, ...]) -> None:
    """Drop the variables of the function that a pydantic class was made in, which it remembers, whatever they are.

    It needs them only as long as it has annotations to resolve; then they would travel with it for nothing.
    """
    if getattr(kind, "__pydantic_complete__", False):
        members, *_ = cast("tuple[dict[str, object]]", reduced[2])
        members.pop("__pydantic_parent_namespace__", None)


def _is_silently_wrong(value: object) -> bool:
    """Files in memory travel with what they hold; the standard streams are found anew in each process."""
    if isinstance(value, io.StringIO | io.BytesIO) or value is sys.stdout or value is sys.stderr:
        return False
    return isinstance(value, _SILENTLY_WRONG)


def dump(value: object, path: str) -> bytes:
    """Return the value as bytes.

    Args:
        value: What travels: an agent, a task with its callables.
        path: How the user calls it: `Agent 'Writer'`.

    Raises:
        ValidationError: it cannot travel; the path to the culprit and the way out are named.
    """
    try:
        return _dumps(value)
    except Exception as error:
        culprit, reason = _culprit(value, path, error)
        raise ValidationError(f"{culprit} cannot travel to a worker process: {reason}. {_WAY_OUT}") from error


class Dumped(NamedTuple):
    """What travels, and what it needs where it is loaded."""

    body: bytes
    models: Sequence[OpenAIChatModel]
    #: modules that it names
    modules: AbstractSet[str]


def dump_all(value: object, path: str) -> Dumped:
    """Return the value as bytes, with the models of endpoints that are in it, however deep, and the modules (S-CLU-4).

    Args:
        value: As for `dump`.
        path: As for `dump`.

    Raises:
        ValidationError: as for `dump`.
    """
    body = dump(value, path)
    finder = _Finder(io.BytesIO(), protocol=5)
    finder.dump(value)
    return Dumped(body, finder.models, finder.modules)


class _Finder(_StrictPickler):
    """Notes models and modules that it comes by."""

    def __init__(self, file: io.BytesIO, *, protocol: int) -> None:
        super().__init__(file, protocol=protocol)
        self.models: list[OpenAIChatModel] = []
        self.modules: set[str] = set()

    def persistent_id(self, obj: object) -> None:
        """Note an object; it is pickled like all else."""
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


def _failure(value: object) -> str | None:
    try:
        _dumps(value)
    except Exception as error:  # noqa: BLE001  any failure to pickle is the answer here
        return message_of(error)
    return None


def _culprit(value: object, path: str, error: Exception) -> tuple[str, str]:
    """Go down into whatever part fails, as long as a part fails."""
    reason = message_of(error)
    seen: set[int] = set()
    for _ in range(_MAX_DEPTH):
        if _is_silently_wrong(value):
            break
        seen.add(id(value))
        for name, part in _parts(value):
            if id(part) in seen:
                continue
            failure = _failure(part)
            if failure is not None:
                value, path, reason = part, f"{path} -> {name}", failure
                break
        else:
            break
    return path, reason


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """Yield the named parts of a value that pickling goes into."""
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
        # `__dict__` and `__weakref__` of a class seem to fail whenever the class does.
        if not isinstance(item, types.GetSetDescriptorType):
            yield (f"class attribute '{name}'" if isinstance(value, type) else name), item


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Yield what a function carries with it: its closure, the globals it names, its defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"closure variable '{name}'", cell.cell_contents
        except ValueError:
            continue  # a variable that has no value yet
    for name in sorted(_global_names(function.__code__) & function.__globals__.keys()):
        if not inspect.ismodule(function.__globals__[name]):
            yield f"global '{name}'", function.__globals__[name]
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            yield f"default of '{name}'", parameter.default


def _global_names(code: types.CodeType) -> set[str]:
    """Names of globals that a function or one inside it may use."""
    names = {str(step.argval) for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names
