"""The public face: what `from ensemble_ray import` gives, and that each of it is documented."""

import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

import ensemble_ray
import ensemble_ray.testing
from tests.architecture.face import STUB, stub_text
from tests.architecture.project import ROOT, module_names

FACE = "ensemble_ray"


def _public_objects() -> Iterator[tuple[str, object]]:
    for module in (ensemble_ray, ensemble_ray.testing):
        yield from ((f"{module.__name__}.{name}", getattr(module, name)) for name in module.__all__)


def test_type_checkers_see_what_the_table_says() -> None:
    """The stub is that of today's table: a name that is added, moved or removed is so for type checkers too."""
    assert STUB.read_text(encoding="utf-8") == stub_text(), "write it anew: python -m tests.architecture.face"
    assert list(ensemble_ray.__all__) == sorted(set(ensemble_ray.__all__)) == dir(ensemble_ray)


def test_names_come_from_modules_that_export_them() -> None:
    """`ensemble_ray.errors`, `.events` and `.tools` document their names: each name of the face is public where it stands."""
    for name, module in ensemble_ray.MODULE_OF.items():
        assert name in vars(importlib.import_module(module)) or name in importlib.import_module(module).__all__, (
            f"{module} has no {name}"
        )


@pytest.mark.program
def test_modules_are_loaded_where_they_are_used() -> None:
    """S-CONV-1: a program that imports the package alone reaches them, and nothing else is loaded for the package itself.

    What has a cost and most processes do not need is loaded there neither: Ray's job client where runs are driven, a web framework in
    the process that drives an endpoint's runs, studio in its replicas.
    """
    code = (
        "import sys, ensemble_ray\n"
        "assert not [name for name in sys.modules if name.startswith(('ensemble_ray.', 'pydantic', 'ray'))]\n"
        "assert ensemble_ray.errors.EnsembleError is ensemble_ray.EnsembleError\n"
        "assert ensemble_ray.events.TokenEvent is ensemble_ray.TokenEvent\n"
        "assert ensemble_ray.tools.tool is ensemble_ray.tool\n"
        "from ensemble_ray import Ensemble\n"
        "assert not {'ray', 'openai', 'httpx'} & set(sys.modules)\n"
        "import ensemble_ray.serve.driving.driver\n"
        "costly = {'ray.job_submission', 'ray.serve', 'ray.data', 'aiohttp', 'fastapi', 'openai', 'httpx', 'pandas', 'numpy'}\n"
        "assert not costly & set(sys.modules)\n"
        "import ensemble_ray.serve.api\n"
        "assert not {'ensemble_ray.studio.app', 'ensemble_ray.serve.studio'} & set(sys.modules)\n"
        "assert not (costly - {'fastapi'}) & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)})  # noqa: S603


def test_every_export_is_there() -> None:
    """S-CONV-1: each name can be imported from the root, the ones that load late too; others cannot."""
    missing = [name for name in ensemble_ray.__all__ if getattr(ensemble_ray, name, None) is None]
    assert missing == []
    with pytest.raises(AttributeError, match="no attribute 'Ensembel'"):
        importlib.import_module(FACE).Ensembel  # noqa: B018  asking is the point


def test_names_of_the_specification_are_exported() -> None:
    """S-CONV-1: the tables of public names."""
    page = (ROOT / "docs/spec/00-conventions.md").read_text(encoding="utf-8")
    table = page.partition("## Public names")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    # Behind a semicolon or in brackets stands what is said of a name, not a name of the face.
    cells = [re.sub(r" \(.*?\)", "", row.split("|")[1].partition(";")[0]) for row in rows]
    named = {name for cell in cells for name in re.findall(r"`@?([A-Za-z_]+)[^`]*`", cell)}
    assert {"Agent", "tool", "run", "resolve_template", "ToolCallEvent"} <= named
    assert named - set(ensemble_ray.__all__) == set()


def test_built_in_tools_are_exported_by_the_room_too() -> None:
    """S-CONV-1: built-in tools also from `ensemble_ray.tools`, and they are the same classes."""
    tools = importlib.import_module("ensemble_ray.tools")
    builtin = importlib.import_module("ensemble_ray.tools.builtin")
    for name in builtin.__all__:
        assert getattr(tools, name) is getattr(ensemble_ray, name)


def test_every_public_name_is_documented() -> None:
    """Classes, functions and their public methods say what they do; a generated signature is no documentation."""
    silent = [name for name, each in _public_objects() if _needs_words(each) and not _has_words(each)]
    for name, each in _public_objects():
        if inspect.isclass(each):
            silent += [f"{name}.{method}" for method in _silent_methods(each)]
    assert silent == []


def _needs_words(each: object) -> bool:
    return inspect.isclass(each) or inspect.isroutine(each)


def _has_words(each: object) -> bool:
    doc = vars(each).get("__doc__") if inspect.isclass(each) else inspect.getdoc(each)
    if not isinstance(doc, str) or not doc.strip():
        return False
    # A dataclass without a docstring is given its signature as one.
    return not (dataclasses.is_dataclass(each) and doc.startswith(f"{getattr(each, '__name__', '')}("))


def _silent_methods(kind: type[object]) -> Iterator[str]:
    for name, member in vars(kind).items():
        if name.startswith("_") or not (inspect.isfunction(member) or isinstance(member, classmethod | property)):
            continue
        if not inspect.getdoc(getattr(kind, name)):
            yield name


def test_all_of_a_module_names_what_it_has() -> None:
    """Every module says what others may use of it, and has it."""
    for name in (name for name in module_names("ensemble_ray") if ".cli" not in name):
        module = importlib.import_module(name)
        assert (module.__doc__ or "").strip(), name
        exported = getattr(module, "__all__", ())
        assert len(set(exported)) == len(exported), name
        assert [each for each in exported if not hasattr(module, each)] == [], name


def test_names_have_the_form_of_their_kind() -> None:
    """S-CONV-2: classes are CamelCase, functions and methods are snake_case, errors end in `Error`."""
    for where, found in _public_objects():
        name = where.rpartition(".")[2]
        if not inspect.isclass(found):
            assert not inspect.isfunction(found) or name == name.lower(), where
            continue
        assert "_" not in name, where
        assert name[0].isupper(), where
        if issubclass(found, BaseException):
            assert name.endswith("Error") or name == "TryAgain", where
        for method, each in vars(found).items():
            # `ReviewDecision.Edit` is a class; what the standard library or pydantic brings keeps its name.
            if inspect.isfunction(each) and not method.startswith("_"):
                assert method == method.lower(), f"{where}.{method}"
