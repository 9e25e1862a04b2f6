"""`module:attribute`: user code found by name. Package: loader.

In: a reference as a user writes it on a command line. Out: the object. What a team file may name is decided in
`provenance.py`. Importing runs the user's module; whatever that raises comes out
as a `ValidationError` with the original as its cause.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType

from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.loader.problems import list_known_names, suggestion

__all__ = ["attribute_of", "find_attribute", "import_module", "is_reference", "make_importable"]

_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_reference(text: str) -> bool:
    """Return whether it has the form `module:attribute`; dots are allowed on both sides."""
    return _REFERENCE.fullmatch(text) is not None


def make_importable(directory: Path) -> None:
    """Let modules of that directory be found, here and by processes that are started from here."""
    path = str(directory.resolve())
    if path not in sys.path:
        sys.path.insert(0, path)
    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if path not in inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join([path, *inherited])


def find_attribute(reference: str) -> object:
    """Return the object that `module:attribute` names.

    Raises:
        ValidationError: it has another form, the module is not found or fails, or has no such attribute.
    """
    if not is_reference(reference):
        raise ValidationError(f"'{reference}' is not of the form module:attribute")
    module_name, _, path = reference.partition(":")
    found: object = import_module(module_name)
    for step in path.split("."):
        found = attribute_of(found, step, reference)
    return found


def attribute_of(owner: object, step: str, reference: str) -> object:
    """Take one step of a dotted name.

    Raises:
        ValidationError: the owner has no such attribute.
    """
    try:
        return getattr(owner, step)
    except AttributeError:
        raise ValidationError(_explain_attribute(owner, step, reference)) from None


def import_module(name: str) -> ModuleType:
    """Import a module.

    Raises:
        ValidationError: it is not found, or fails.
    """
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
        text = f"Importing module '{name}' failed: {type(error).__name__}: {message_of(error)}{_line_of(error, name)}"
        raise ValidationError(text) from error


def _line_of(error: BaseException, name: str) -> str:
    """Say where in the user's module it happened."""
    module_file = name.rpartition(".")[2]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).stem in {module_file, "__init__"} and "importlib" not in frame.filename:
            return f" ({frame.filename}, line {frame.lineno})"
    return ""


def _explain_module(name: str, missing: str) -> str:
    parent, _, last = missing.rpartition(".")
    if parent:
        known = [found.name for found in pkgutil.iter_modules(getattr(importlib.import_module(parent), "__path__", []))]
        return f"Package '{parent}' has no module '{last}'.{suggestion(last, known)} {list_known_names(sorted(known))}"
    known = sorted({found.name for found in pkgutil.iter_modules([str(Path.cwd())])})
    where = (
        f"Modules of this directory: {list_known_names(known).removeprefix('Known: ')}"
        if known
        else "This directory has none"
    )
    return f"There is no module '{name}'.{suggestion(last, known)} {where}"


def _explain_attribute(owner: object, step: str, reference: str) -> str:
    names = sorted(name for name, value in getattr(owner, "__dict__", {}).items() if _is_own(name, value, owner))
    what = f"Module '{owner.__name__}'" if isinstance(owner, ModuleType) else f"'{reference}': {type(owner).__name__}"
    return f"{what} has no attribute '{step}'.{suggestion(step, names)} {list_known_names(names)}"


def _is_own(name: str, value: object, owner: object) -> bool:
    """Return whether the owner made it; what a module only imported is not what is looked for there."""
    if name.startswith("_") or inspect.ismodule(value):
        return False
    is_code = isinstance(value, type) or inspect.isroutine(value)
    return not (is_code and isinstance(owner, ModuleType) and value.__module__ != owner.__name__)
