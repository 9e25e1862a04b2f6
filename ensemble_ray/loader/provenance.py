"""What a team file may name as `module:attribute`, decided before anything is called (S-SEC-70 to S-SEC-74).

Package: loader. In: a reference of a team file, and what is expected at its place. Out: the object, or the reason why it
is refused. What the user's own modules define may be named. Of an installed package only what is made for that place:
a tool, an object with the methods of a listener, a policy, and so on. Of the standard library nothing but plain types of
data; it is not even imported. Never: a call of what was found.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType, UnionType
from typing import Literal, Union, get_args, get_origin

from ensemble_ray.errors import ValidationError
from ensemble_ray.loader.references import attribute_of, import_module, is_reference

__all__ = ["Expected", "Provenance", "definer_of", "find_permitted", "module_provenance"]

_INSTALLED_FOLDERS = {"site-packages", "dist-packages"}
#: Origins that the import system gives to what lies inside the interpreter.
_IN_THE_INTERPRETER = {"built-in", "frozen"}
_PRODUCT = "ensemble_ray"


class Provenance(Enum):
    """Where a module comes from."""

    OWN = "a module of your own"
    INSTALLED = "an installed package"
    STANDARD = "the standard library"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What may stand at a place of a team file.

    Attributes:
        what: Its name in messages: `a listener`.
        accepts: Whether an object that is no class will do.
        is_intended: Whether an object or a class is made for this place, so that any installed package may bring it.
        standard: References to the standard library that are harmless here.
    """

    what: str
    accepts: Callable[[object], bool] = callable
    is_intended: Callable[[object], bool] = lambda _: False
    standard: frozenset[str] = frozenset()


def module_provenance(name: str, own_folders: Sequence[Path] = ()) -> Provenance | None:
    """Say where a module comes from, without importing it; None: there is none of that name.

    Own are modules that lie below one of these folders, and those of all other places but the interpreter's library and
    the folders of installed packages: the current directory, PYTHONPATH, editable installs.
    """
    top = name.partition(".")[0]
    if top == _PRODUCT:
        return Provenance.INSTALLED
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # it is loaded and does not say from where
        return _place_of(getattr(sys.modules.get(top), "__file__", None), own_folders)
    if spec is None:
        return None
    if spec.origin in _IN_THE_INTERPRETER:
        return Provenance.STANDARD
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    found = {_place_of(place, own_folders) for place in places}
    return next((each for each in (Provenance.STANDARD, Provenance.INSTALLED) if each in found), Provenance.OWN)


def definer_of(found: object) -> str:
    """Return the name of the module that defines a function or a class, or the class of any other object; empty: none is known."""
    if isinstance(found, ModuleType):
        return found.__name__
    if isinstance(found, functools.partial):
        return definer_of(found.func)
    if inspect.ismethod(found):
        return definer_of(found.__func__)
    if callable(found) and hasattr(found, "__wrapped__"):
        return definer_of(inspect.unwrap(found))
    if isinstance(found, type) or inspect.isroutine(found):
        return str(getattr(found, "__module__", None) or "")
    return type(found).__module__


def find_permitted(reference: str, expected: Expected, own_folders: Sequence[Path] = ()) -> object:
    """Return the object that a reference of a team file names.

    Args:
        reference: `module:attribute`.
        expected: What may stand there.
        own_folders: Modules below them are the user's own, wherever they are.

    Raises:
        ValidationError: it has another form, there is no such thing, or a team file must not name it.
    """
    if not is_reference(reference):
        raise ValidationError(f"'{reference}' is not of the form module:attribute")
    module_name, _, path = reference.partition(":")
    steps = path.split(".")
    if any(step.startswith("__") for step in module_name.split(".")) or any(step.startswith("_") for step in steps):
        raise ValidationError(
            f"'{reference}': a name that begins with '_' is private and cannot be named in a team file"
        )
    if module_provenance(module_name, own_folders) is Provenance.STANDARD:
        return _find_standard(reference, expected)
    found: object = import_module(module_name)
    for position, step in enumerate(steps):
        if position and not _may_be_walked_through(found, own_folders):
            raise ValidationError(_explain_refusal(reference, found, expected, own_folders))
        found = attribute_of(found, step, reference)
    if not isinstance(found, type) and not expected.accepts(found):
        raise ValidationError(f"'{reference}' is a {type(found).__name__}, and not {expected.what}")
    if _is_permitted(found, expected, own_folders):
        return found
    raise ValidationError(_explain_refusal(reference, found, expected, own_folders))


def _is_permitted(found: object, expected: Expected, own_folders: Sequence[Path]) -> bool:
    parts = get_args(found)
    if not parts:
        return expected.is_intended(found) or _provenance_of(found, own_folders) is Provenance.OWN
    # A type such as `list[Report]` is what its parts are.
    origin = get_origin(found)
    return all(
        _is_permitted(part, expected, own_folders) or _is_plain(part, expected)
        for part in (*parts, origin)
        if part not in {Union, UnionType, Literal}
    )


def _is_plain(part: object, expected: Expected) -> bool:
    """Return whether a part of a type is a plain type of data, or a value of a `Literal`."""
    definer = definer_of(part)
    return (
        definer in {"builtins", "collections.abc"} or f"{definer}:{getattr(part, '__name__', '')}" in expected.standard
    )


def _find_standard(reference: str, expected: Expected) -> object:
    """Return a plain type of data; refuse anything else, without an import."""
    module_name, _, path = reference.partition(":")
    if reference in expected.standard:
        return attribute_of(import_module(module_name), path, reference)
    found: object = sys.modules.get(module_name)
    for step in path.split("."):
        found = vars(found).get(step) if isinstance(found, ModuleType | type) else None
    if found is not None and not isinstance(found, type) and not expected.accepts(found):
        raise ValidationError(f"'{reference}' is a {type(found).__name__}, and not {expected.what}")
    raise ValidationError(_format_refusal(reference, f"it belongs to {Provenance.STANDARD.value}", expected))


def _place_of(path: str | None, own_folders: Sequence[Path]) -> Provenance:
    if path is None:
        return Provenance.OWN  # made by the program that is running
    resolved = Path(path).resolve()
    for folder in own_folders:
        # an environment that lies in the user's own folder is not the user's own
        if resolved.is_relative_to(folder) and not _is_installed(resolved.relative_to(folder)):
            return Provenance.OWN
    if _is_installed(Path(path)) or any(resolved.is_relative_to(folder) for folder in _installed_folders()):
        return Provenance.INSTALLED
    return Provenance.STANDARD if any(resolved.is_relative_to(each) for each in _standard_folders()) else Provenance.OWN


def _is_installed(path: Path) -> bool:
    return not _INSTALLED_FOLDERS.isdisjoint(path.parts)


@functools.cache
def _installed_folders() -> tuple[Path, ...]:
    return tuple(Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib"))


@functools.cache
def _standard_folders() -> tuple[Path, ...]:
    return tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))


def _provenance_of(found: object, own_folders: Sequence[Path]) -> Provenance | None:
    definer = definer_of(found)
    return module_provenance(definer, own_folders) if definer else None


def _may_be_walked_through(found: object, own_folders: Sequence[Path]) -> bool:
    """Return whether a dotted name may go through it: a module or a class that is no standard one, an object of an own class."""
    provenance = _provenance_of(found, own_folders)
    if isinstance(found, ModuleType | type):
        return provenance in {Provenance.OWN, Provenance.INSTALLED}
    return provenance is Provenance.OWN


def _explain_refusal(reference: str, found: object, expected: Expected, own_folders: Sequence[Path]) -> str:
    definer = definer_of(found)
    provenance = _provenance_of(found, own_folders)
    what = "module" if isinstance(found, ModuleType) else "class" if isinstance(found, type) else type(found).__name__
    if provenance is None:
        why = f"it is a {what}, and no module says that it defines it"
    elif provenance is Provenance.STANDARD:
        why = f"it is a {what} of {provenance.value} ({definer})"
    else:
        why = f"it is a {what} of {provenance.value} ({definer}), and not {expected.what} made for teams"
    return _format_refusal(reference, why, expected)


def _format_refusal(reference: str, why: str, expected: Expected) -> str:
    return (
        f"'{reference}' cannot be named in a team file: {why}. What to do: write {expected.what} in a module of your own, "
        "beside the file, and name that"
    )
