"""Who may import whom: the contracts of pyproject.toml, and what importing the package loads."""

import ast
import subprocess
import sys
import tomllib

import grimp
import pytest

from ensemble_ray import MODULE_OF, MODULES
from tests.architecture.project import ROOT

#: Loaded by the first run, command or tool that needs them, and never by the import of the package.
LATE = (
    *("ray", "openai", "aiohttp", "httpx", "selectolax", "xllamacpp", "opentelemetry", "mcp", "a2a"),
    *("yaml", "typer", "rich", "loky", "docstring_parser", "ensemble_ray.actors", "ensemble_ray.serve"),
)
#: What imports upwards, by who and what: see the reasons in pyproject.toml. Without these there is no circle.
_SEAMS = (
    ("ensemble_ray.definition.agent", "ensemble_ray.ensemble"),
    ("ensemble_ray.definition.agent", "ensemble_ray.runs.ports"),
    ("ensemble_ray.errors", "ensemble_ray.values.value"),
    ("ensemble_ray.errors", "ensemble_ray.values.task_output"),
    ("ensemble_ray.errors", "ensemble_ray.values.trace"),
)


@pytest.mark.program
def test_every_contract_is_kept() -> None:
    """One way between packages, no Ray in the core, pure machines; see decision 0001."""
    # A process of its own: the linter silences every logger of the process that it runs in.
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603  our own code
    assert done.returncode == 0, done.stdout


def test_contracts_are_the_ones_that_the_design_names() -> None:
    """A contract that is dropped is a decision, not an accident."""
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {each["id"]: each for each in configured["tool"]["importlinter"]["contracts"]}
    assert set(contracts) == {"layers", "actors-layers", "core-without-ray", "pure-machines"}
    assert contracts["layers"]["exhaustive"] is True
    seams = {line for each in contracts.values() for line in each.get("ignore_imports", ())}
    assert seams == {
        *(f"{importer} -> {imported}" for importer, imported in _SEAMS),
        "ensemble_ray.runtime -> ensemble_ray.actors.driver.runtime",
        "ensemble_ray.cli.commands.studio -> ensemble_ray.studio.server",
        "ensemble_ray.cli.commands.studio -> ensemble_ray.studio.processes",
    }


@pytest.fixture(scope="module")
def loaded() -> tuple[list[str], list[str]]:
    """Which of the late modules a fresh process has loaded: after it imported the package, and after it made a plan."""
    tell = f"print(*sorted({set(LATE)!r} & sys.modules.keys()))"
    agent = "agent = Agent(role='r', goal='g', llm='openai:m')"
    team = "Ensemble(tasks=[Task(description='{x}', expected_output='e', agent=agent)]).plan({'x': '1'})"
    code = f"import sys, ensemble_ray; {tell}; from ensemble_ray import Agent, Ensemble, Task; {agent}; {team}; {tell}"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)  # noqa: S603  our own code
    imported, planned = ended.stdout.splitlines()
    return imported.split(), planned.split()


@pytest.mark.program
def test_import_of_the_package_loads_neither_ray_nor_a_models_sdk(loaded: tuple[list[str], list[str]]) -> None:
    """The face is light: what costs time comes with the first use of it."""
    assert loaded[0] == []


@pytest.mark.program
def test_definitions_are_made_without_ray_or_a_models_sdk(loaded: tuple[list[str], list[str]]) -> None:
    """A team is declared, and its plan made, before anything heavy is loaded."""
    assert loaded[1] == []


def test_ray_and_web_frameworks_are_known_to_few_packages_alone() -> None:
    """A package that is new must be named by the contract, too."""
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {each["id"]: each for each in configured["tool"]["importlinter"]["contracts"]}
    named = {name.removeprefix("ensemble_ray.") for name in contracts["core-without-ray"]["source_modules"]}
    layers = {name.strip() for line in contracts["layers"]["layers"] for name in line.split("|")}
    assert named == layers - {"__main__", "actors", "serve", "studio"}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for type checkers count as well: what names each other is one thing in two files.

    A name that is imported from the face counts as an import of the module that has it.
    """
    graph = grimp.build_graph("ensemble_ray", cache_dir=None)
    waiting = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    waiting["ensemble_ray"] |= set(MODULE_OF.values())
    for module in graph.find_modules_that_directly_import("ensemble_ray"):
        waiting[module].remove("ensemble_ray")
        waiting[module] |= _modules_from_the_face(module)
    for importer, seam in _SEAMS:
        waiting[importer].remove(seam)
    while free := {module for module, imported in waiting.items() if not imported & waiting.keys()}:
        for module in free:
            del waiting[module]
    assert not waiting, f"These import each other, or what does: {sorted(waiting)}"


def _modules_from_the_face(module: str) -> set[str]:
    """Return the modules that have what a module imports from the face; all of them where it imports the face itself."""
    path = ROOT.joinpath(*module.split("."))
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "ensemble_ray":
            names = {each.name for each in node.names}
            found |= {MODULE_OF[name] for name in names & MODULE_OF.keys()}
            found |= {f"ensemble_ray.{name}" for name in names & set(MODULES)}
        elif isinstance(node, ast.Import) and any(each.name == "ensemble_ray" for each in node.names):
            found |= set(MODULE_OF.values())
    return found
