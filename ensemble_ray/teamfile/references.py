"""Find user code by `module:attribute`, and decide which code a team file may name."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType, UnionType
from typing import Annotated, Literal, NewType, Union, get_args, get_origin

from msgspec import Struct
from typing_extensions import TypeAliasType

from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.teamfile.document import list_known_names, suggestion

_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_reference(text: str) -> bool:
    return _REFERENCE.fullmatch(text) is not None


def make_importable(directory: Path) -> None:
    """Add a directory to the import path of this process and its children."""
    path = str(directory.resolve())
    if path not in sys.path:
        sys.path.insert(0, path)
    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if path not in inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join([path, *inherited])


def find_attribute(reference: str) -> object:
    if not is_reference(reference):
        raise ValidationError(f"'{reference}' is not of the form module:attribute")
    module_name, _, path = reference.partition(":")
    found: object = import_module(module_name)
    for step in path.split("."):
        found = attribute_of(found, step, reference)
    return found


def attribute_of(owner: object, step: str, reference: str) -> object:
    try:
        return getattr(owner, step)
    except AttributeError:
        names: list[str] = []
        for name, value in getattr(owner, "__dict__", {}).items():
            is_code = isinstance(value, type) or inspect.isroutine(value)
            is_imported = is_code and isinstance(owner, ModuleType) and value.__module__ != owner.__name__
            if not name.startswith("_") and not inspect.ismodule(value) and not is_imported:
                names.append(name)
        what = f"'{reference}': {type(owner).__name__}"
        if isinstance(owner, ModuleType):
            what = f"Module '{owner.__name__}'"
        hint = f"{suggestion(step, sorted(names))} {list_known_names(sorted(names))}"
        raise ValidationError(f"{what} has no attribute '{step}'.{hint}") from None


def import_module(name: str) -> ModuleType:
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ValidationError(_explain_module(name, error.name)) from None
        raise ValidationError(f"Module '{name}' needs the module '{error.name}', which is not installed") from error
    except SyntaxError as error:
        raise ValidationError(f"Module '{name}': {error.msg} ({error.filename}, line {error.lineno})") from error
    except (Exception, SystemExit) as error:
        line, stems = "", {name.rpartition(".")[2], "__init__"}
        for frame in traceback.extract_tb(error.__traceback__):
            if Path(frame.filename).stem in stems and "importlib" not in frame.filename:
                line = f" ({frame.filename}, line {frame.lineno})"
        text = f"Importing module '{name}' failed: {type(error).__name__}: {message_of(error)}{line}"
        raise ValidationError(text) from error


def _explain_module(name: str, missing: str) -> str:
    parent, _, last = missing.rpartition(".")
    if parent:
        known = [found.name for found in pkgutil.iter_modules(getattr(importlib.import_module(parent), "__path__", []))]
        return f"Package '{parent}' has no module '{last}'.{suggestion(last, known)} {list_known_names(sorted(known))}"
    known = sorted({found.name for found in pkgutil.iter_modules([str(Path.cwd())])})
    shown = list_known_names(known).removeprefix("Known: ")
    where = f"Modules of this directory: {shown}" if known else "This directory has none"
    return f"There is no module '{name}'.{suggestion(last, known)} {where}"


_INSTALLED_FOLDERS = {"site-packages", "dist-packages"}
_IN_THE_INTERPRETER = {"built-in", "frozen"}
_PRODUCT = "ensemble_ray"


class Provenance(Enum):
    OWN = "a module of your own"
    INSTALLED = "an installed package"
    STANDARD = "the standard library"


class Expected(Struct, frozen=True, kw_only=True):
    what: str  # in messages, such as `a listener`
    accepts: Callable[[object], bool] = callable  # checks an object that is not a class
    #: whether it is made for this place; installed packages may provide only that
    is_intended: Callable[[object], bool] = lambda _: False
    standard: frozenset[str] = frozenset()  # harmless references to the standard library


def module_provenance(name: str, own_folders: Sequence[Path] = ()) -> Provenance | None:
    """Return where a module comes from, without an import of it, or None if there is none.

    A module outside the library and the folders of installed packages, or below `own_folders`, is the user's own.
    """
    top = name.partition(".")[0]
    if top == _PRODUCT:
        return Provenance.INSTALLED
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # a loaded module without a spec
        return _place_of(getattr(sys.modules.get(top), "__file__", None), own_folders)
    if spec is None:
        return None
    if spec.origin in _IN_THE_INTERPRETER:
        return Provenance.STANDARD
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    found = {_place_of(place, own_folders) for place in places}
    return next((each for each in (Provenance.STANDARD, Provenance.INSTALLED) if each in found), Provenance.OWN)


def definer_of(found: object) -> str:
    """Return the name of the module that defines an object or its class, or an empty text."""
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
    if not is_reference(reference):
        raise ValidationError(f"'{reference}' is not of the form module:attribute")
    module_name, _, path = reference.partition(":")
    steps = path.split(".")
    if any(step.startswith("__") for step in module_name.split(".")) or any(step.startswith("_") for step in steps):
        text = "a name that begins with '_' is private and cannot be named in a team file"
        raise ValidationError(f"'{reference}': {text}")
    if module_provenance(module_name, own_folders) is Provenance.STANDARD:
        return _find_standard(reference, expected)
    found: object = import_module(module_name)
    for position, step in enumerate(steps):
        if position:  # a dotted name continues in the user's own code, and in modules and classes of packages
            provenance = _provenance_of(found, own_folders)
            is_code = isinstance(found, ModuleType | type) and provenance is Provenance.INSTALLED
            if provenance is not Provenance.OWN and not is_code:
                raise ValidationError(_explain_refusal(reference, found, expected, own_folders))
        found = attribute_of(found, step, reference)
    if not isinstance(found, type) and not expected.accepts(found):
        raise ValidationError(f"'{reference}' is a {type(found).__name__}, and not {expected.what}")
    if _is_permitted(found, expected, own_folders):
        return found
    raise ValidationError(_explain_refusal(reference, found, expected, own_folders))


def _is_permitted(found: object, expected: Expected, own_folders: Sequence[Path]) -> bool:
    parts = _parts_of(found)
    if not parts:
        return expected.is_intended(found) or _provenance_of(found, own_folders) is Provenance.OWN
    for part in parts:  # a type such as `list[Report]` is permitted if its parts are
        definer = definer_of(part)
        is_plain = definer in {"builtins", "collections.abc"}  # a data type, or a value of a `Literal`
        is_standard = f"{definer}:{getattr(part, '__name__', '')}" in expected.standard
        if not is_plain and not is_standard and not _is_permitted(part, expected, own_folders):
            return False
    return True


def _parts_of(found: object) -> list[object]:
    """Return the parts of a composed type, none for others."""
    if isinstance(found, NewType | TypeAliasType):
        return [found.__supertype__ if isinstance(found, NewType) else found.__value__]
    parts, origin = get_args(found), get_origin(found)
    if origin is Annotated:
        return [parts[0]]
    left_out = (Union, UnionType, Literal)  # no set: a part may be a list, which has no hash
    return [part for part in (*parts, origin) if parts and part not in left_out]


def _find_standard(reference: str, expected: Expected) -> object:
    """Return a permitted object of the standard library; refuse other references without an import."""
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
        return Provenance.OWN  # made by the running program
    resolved = Path(path).resolve()
    for folder in own_folders:
        # A virtual environment in the user's folder is not the user's own code.
        if resolved.is_relative_to(folder) and not _is_installed(resolved.relative_to(folder)):
            return Provenance.OWN
    if _is_installed(Path(path)) or any(map(resolved.is_relative_to, _library_folders("purelib", "platlib"))):
        return Provenance.INSTALLED
    is_standard = any(map(resolved.is_relative_to, _library_folders("stdlib", "platstdlib")))
    return Provenance.STANDARD if is_standard else Provenance.OWN


def _is_installed(path: Path) -> bool:
    return not _INSTALLED_FOLDERS.isdisjoint(path.parts)


@functools.cache
def _library_folders(*names: str) -> tuple[Path, ...]:
    return tuple(Path(sysconfig.get_path(name)).resolve() for name in names)


def _provenance_of(found: object, own_folders: Sequence[Path]) -> Provenance | None:
    definer = definer_of(found)
    return module_provenance(definer, own_folders) if definer else None


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
