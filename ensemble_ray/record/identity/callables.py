"""Which code a callable is: module, qualified name, hash of its source text (S-DUR-36).

In: functions, methods, classes, objects. Out: JSON-able data that is the same in every process that has the same code.
Never: captured values, pickled bytes (they differ from process to process), an error: what has no source is known by
its bytecode, and what has none of that by its name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from hashlib import sha256
from types import CodeType, FunctionType
from typing import cast
from weakref import WeakKeyDictionary

from ensemble_ray.record.identity.names import recorded_name, stable_name

#: Digits of a hash that are kept: enough to tell versions of one function apart.
_DIGITS = 16
#: The library's own code is known by its name: another version of the library is no other definition.
_OWN = ("ensemble_ray", "actors")
#: Modules of classes that users' classes derive from and that are no part of what they wrote.
_FOREIGN = ("builtins", "abc", "typing", "pydantic", "enum", *_OWN)


def identity_of(target: object) -> dict[str, object]:
    """Which code a callable runs: a function, a method, a partial, a class, or an object with `__call__`."""
    while isinstance(target, functools.partial):
        target = cast("functools.partial[object]", target).func
    if isinstance(target, type):
        return class_identity(target)
    function = inspect.unwrap(cast("Callable[..., object]", getattr(target, "__func__", target)))
    if not isinstance(function, FunctionType):
        if inspect.isbuiltin(function):
            return _name_of(function.__module__ or "builtins", function.__qualname__)
        return class_identity(type(target))
    named = _name_of(function.__module__, function.__qualname__)
    return named if _is_of(function.__module__, _OWN) else {**named, "source": _source_hash(function.__code__)}


def class_identity(cls: type[object]) -> dict[str, object]:
    """Which class it is, and the hash over its methods, inherited ones of the user's own classes included."""
    named: dict[str, object] = {"callable": recorded_name(cls)}
    return named if _is_of(cls.__module__, _OWN) else {**named, "source": _class_hash(cls)}


def _name_of(module: str | None, name: str) -> dict[str, object]:
    return {"callable": stable_name(f"{module}.{name}")}


def _is_of(module: str | None, packages: tuple[str, ...]) -> bool:
    return (module or "").partition(".")[0] in packages


_hashes: WeakKeyDictionary[CodeType, str] = WeakKeyDictionary()
_class_hashes: WeakKeyDictionary[type[object], str] = WeakKeyDictionary()


def _source_hash(code: CodeType) -> str:
    cached = _hashes.get(code)
    if cached is None:
        try:
            text = inspect.getsource(code)
        except (OSError, TypeError, SyntaxError, IndexError):  # a prompt, `exec`, a file that is gone
            text = _bytecode(code)
        cached = _hashes[code] = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
    return cached


def _bytecode(code: CodeType) -> str:
    """Return what a function does where its text is not to be had; constants that are code are looked into."""
    constants = [_bytecode(each) if isinstance(each, CodeType) else _constant(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def _constant(value: object) -> str:
    """Its text; that of a set in an order that is the same in every process."""
    return str(sorted(map(repr, cast("frozenset[object]", value)))) if isinstance(value, frozenset) else repr(value)


def _class_hash(cls: type[object]) -> str:
    """Over the texts of its functions: asking for a class's whole text would parse its whole file."""
    cached = _class_hashes.get(cls)
    if cached is not None:
        return cached
    parts: list[str] = []
    for owner in cls.__mro__:
        if _is_of(owner.__module__, _FOREIGN):
            continue
        for name, attribute in sorted(vars(owner).items()):
            target = attribute.fget if isinstance(attribute, property) else getattr(attribute, "__func__", attribute)
            if isinstance(target, FunctionType) and target.__module__ == owner.__module__:
                function = inspect.unwrap(target)
                parts.append(f"{name}:{_source_hash(function.__code__)}")
    cached = _class_hashes[cls] = sha256("\n".join(parts).encode()).hexdigest()[:_DIGITS]
    return cached
