"""Which types the factories of a definition can declare for outputs. Package: definition.

In: factories. Out: the classes that they refer to, by full name. A recorded output names its type; on a resume, whose factories
are not called for what is recorded (S-MR-161), that name only chooses among these. Rules: nothing is imported, and no user code
runs; what is not reached from a factory is not there, whatever the program has loaded.
"""

from __future__ import annotations

import ast
import builtins
import functools
import typing
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast, get_args

from ensemble_ray.definition.task import Task
from ensemble_ray.values.task_output import OutputType, full_name

__all__ = ["find_output_type", "output_types_of"]

#: Objects that are looked at: a factory's module may refer to much, and an output whose type is not found stays JSON data.
_MOST = 10_000
#: Built-in types that JSON data can be.
_PLAIN = frozenset({bool, dict, float, int, list, set, str, tuple})
#: What types are made with, as their texts name it.
_FORMS: Mapping[str, object] = {
    **{each.__name__: each for each in _PLAIN},
    **{f"typing.{each}": getattr(typing, each) for each in ("Any", "Dict", "List", "Literal", "Optional", "Union")},
}


def output_types_of(factories: Iterable[object]) -> Mapping[str, OutputType]:
    """Return the classes and aliases that these factories refer to, also by way of functions and values of their modules."""
    found: dict[str, OutputType] = {}
    seen: set[int] = set()
    waiting: list[object] = [each for each in factories if each is not None]
    while waiting and len(seen) < _MOST:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, type):
            if _can_be_output(each):
                found.setdefault(full_name(each), each)
        elif parts := get_args(each):  # `list[Report]`
            found.setdefault(full_name(each), cast("OutputType", each))
            waiting.extend(parts)
        else:
            waiting.extend(_references(each))
    return found


def find_output_type(name: str, known: Mapping[str, OutputType]) -> OutputType | None:
    """Return the type of that full name, also one such as `list[module.Report]` that is made of known classes.

    Args:
        name: As `full_name` writes it.
        known: Of `output_types_of`.
    """
    if name in known:
        return known[name]
    try:
        return cast("OutputType", _built(ast.parse(name, mode="eval").body, known))
    except (SyntaxError, LookupError, TypeError, ValueError, RecursionError):  # it has classes that are not known
        return None


def _built(node: ast.expr, known: Mapping[str, OutputType]) -> Any:
    match node:
        case ast.Constant():  # `None`, or a value of a `Literal`
            return node.value
        case ast.Tuple():
            return tuple(_built(each, known) for each in node.elts)
        case ast.BinOp(op=ast.BitOr()):
            return _built(node.left, known) | _built(node.right, known)
        case ast.Subscript():
            return _built(node.value, known)[_built(node.slice, known)]
        case _:
            name = ast.unparse(node)
            return _FORMS[name] if name in _FORMS else known[name]


def _can_be_output(output_type: type[object]) -> bool:
    """Return whether a task may declare it: a user's class, or what JSON data is; never one of the library's."""
    if output_type.__module__ == builtins.__name__:
        return output_type in _PLAIN
    return output_type.__module__.partition(".")[0] != "ensemble_ray"


def _references(value: object) -> Iterator[object]:
    """Give what a value refers to, as far as it can lead to a class."""
    match value:
        case FunctionType():
            yield from _names_in(value.__code__, value.__globals__)
            yield from (value.__defaults__ or ())
            yield from (value.__kwdefaults__ or {}).values()
            yield from _contents(value)
        case MethodType():
            yield value.__func__
            yield value.__self__
        case functools.partial():
            partial = cast("functools.partial[object]", value)
            yield from (partial.func, *partial.args, *partial.keywords.values())
        case Task():
            yield value.output_type
        case list() | tuple() | set() | frozenset():
            yield from cast("Iterable[object]", value)
        case dict():
            yield from cast("dict[object, object]", value).values()
        case _ if callable(value) and not isinstance(value, CodeType):
            yield getattr(type(value), "__call__", None)  # noqa: B004  the function itself is wanted, not whether there is one
            yield from getattr(value, "__dict__", {}).values()
        case _:
            pass


def _names_in(code: CodeType, names: Mapping[str, object]) -> Iterator[object]:
    """Give what the names of a function's code stand for; modules are looked into for the names beside theirs."""
    modules: list[ModuleType] = []
    for name in code.co_names:
        value = names.get(name, vars(builtins).get(name))
        if isinstance(value, ModuleType):
            modules.append(value)
        else:
            yield value
    for module in modules:  # `models.Report` is two names of the code
        yield from (vars(module)[name] for name in code.co_names if name in vars(module))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant, names)


def _contents(function: FunctionType) -> Iterator[object]:
    """Give what a function has closed over."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            continue
