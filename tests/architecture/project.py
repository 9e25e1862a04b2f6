"""The project's files as the architecture tests see them: what is tracked, which modules the packages hold.

In: nothing. Out: paths and module names. Never: an import of what is listed.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ensemble_ray", "actors", "serve")
#: Folders of a working copy that no project file lies in.
_FOREIGN = {".git", ".venv", "venv", "build", "dist", "node_modules", "traces", "__pycache__"}


def project_files() -> Iterator[Path]:
    """Every file of the project: what git tracks or would track; without git, what lies in the folder."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],  # noqa: S607  git as the user has it
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    else:
        paths = [path for path in ROOT.rglob("*") if not _FOREIGN & set(path.relative_to(ROOT).parts)]
    yield from (path for path in sorted(paths) if path.is_file())


def python_files(*folders: str) -> Iterator[Path]:
    """The Python files of these folders."""
    wanted = {ROOT / folder for folder in folders}
    yield from (path for path in project_files() if path.suffix == ".py" and wanted & set(path.parents))


def module_names(*packages: str) -> Iterator[str]:
    """Dotted names of the modules of these packages, without the ones that are run by `python -m`."""
    for path in python_files(*packages):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] != "__main__":
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
