"""Check the Python code of README and docs as a strict type checker of a user does: mypy without plugins, and pyright.

`make check` runs it: `python -m tests.typing.pages` (S-CONV-38). The blocks of a page, hidden ones included, are one module in the order of the page, as `conftest.py` runs them. A line of
the module is the same line of the page, so that a complaint names its place.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: A page with one mistake: whatever is wrong with the others, it is found, so that a checker that finds nothing fails too.
WRONG = """# A page

```python
number = 1
```
```console
number = ''
```
<!--- invisible-code: python
text: str = number + len(__printed__)
-->
"""
#: Names that `conftest.py` puts into a page's namespace; hidden blocks use them.
GIVEN = {"__printed__": "str", "model_server": "ModelServer"}
_BEGIN = re.compile(r"```python\s*|<!-{2,} ?invisible-code(-block)?: python\s*")
_END = re.compile(r"```\s*|-{2,}>\s*")


def module_of(page: str) -> str:
    """The blocks of a page as one module; every line has the number that it has on the page."""
    lines: list[str] = []
    is_inside = False
    for line in page.splitlines():
        is_end = is_inside and _END.fullmatch(line) is not None
        lines.append(line if is_inside and not is_end else "")
        is_inside = not is_end if is_inside else _BEGIN.fullmatch(line) is not None
    names = [name for name in GIVEN if name in "\n".join(lines)]
    if names and lines and not lines[0]:
        lines[0] = f"from given import {', '.join(f'{name} as {name}' for name in names)}"
    return "\n".join(lines) + "\n"


def written(pages: list[Path], folder: Path) -> dict[str, str]:
    """Write the module of each page that has code; returns the pages' paths by the modules' names."""
    found: dict[str, str] = {}
    for page in pages:
        code = module_of(page.read_text(encoding="utf-8"))
        if code.strip():
            name = f"page_{page.stem.lower().replace('-', '_')}.py"
            (folder / name).write_text(code, encoding="utf-8")
            found[name] = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    given = "\n".join(f"{name}: {kind}" for name, kind in GIVEN.items())
    (folder / "given.py").write_text(f"from ensemble_ray.testing import ModelServer\n{given}\n", encoding="utf-8")
    return found


def mypy_complaints(folder: Path, pages: dict[str, str]) -> list[str]:
    """What `mypy --strict` says of the modules, at the pages' lines; what it knows of the package it need not find out again."""
    ran = subprocess.run(  # noqa: S603  our own words
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--no-color-output", *(folder / page for page in pages)],
        cwd=ROOT, env={**os.environ, "MYPYPATH": str(folder)}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    if ran.returncode not in {0, 1}:
        sys.exit(ran.stdout + ran.stderr)
    parted = [line.partition(".py:") for line in ran.stdout.splitlines()]
    return [_at_page(f"{Path(module).name}.py", rest, pages) for module, _, rest in parted]


def pyright_complaints(folder: Path, pages: dict[str, str]) -> list[str]:
    """What pyright says of them in its strict mode."""
    config = {"include": list(pages), "typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "--project", "."],
        cwd=folder, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    if ran.returncode not in {0, 1}:
        sys.exit(ran.stdout + ran.stderr)
    report = json.loads(ran.stdout)
    if report["summary"]["filesAnalyzed"] != len(pages):
        sys.exit(f"pyright read {report['summary']['filesAnalyzed']} of {len(pages)} pages")
    return [
        _at_page(Path(each["file"]).name, f"{each['range']['start']['line'] + 1}: {each['message']}", pages)
        for each in report["generalDiagnostics"]
    ]


def _at_page(module: str, rest: str, pages: dict[str, str]) -> str:
    return f"{pages.get(module, module)}:{rest}"


def wrong_of(complaints: list[str], expected: str) -> list[str]:
    """What is wrong: each complaint about a page, and that the one about the wrong page is missing or another one."""
    others = [each for each in complaints if not each.startswith("wrong-page.md")]
    is_found = [each[: len(expected)] for each in complaints if each not in others] == [expected]
    return others if is_found else [*others, f"not found: {expected}"]


def main() -> None:
    """Check all pages, and a wrong one."""
    if "plugins" in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]:
        sys.exit("mypy has a plugin, which users do not have")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        wrong = folder / "wrong-page.md"
        wrong.write_text(WRONG, encoding="utf-8")
        pages = written([*PAGES, wrong], folder)
        found = [
            *wrong_of(mypy_complaints(folder, pages), "wrong-page.md:10: error: Incompatible types in assignment"),
            *wrong_of(pyright_complaints(folder, pages), 'wrong-page.md:10: Type "int" is not assignable'),
        ]
    print(*found, f"{len(pages) - 1} pages with code, {len(found)} errors", sep="\n")  # noqa: T201  that is its output
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
