"""Names of files and folders, and text that files must not contain."""

import re

from tests.architecture.project import PACKAGES, ROOT, project_files, python_files

#: Names that say nothing about what a module does.
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "misc"}
#: Where packages come from and where somebody's files lie is decided by whoever installs, not by this project.
#: Each is written in two parts so that this file is not its own finding.
PLACES_OF_OTHERS = re.compile(
    "|".join(
        (
            r"pypi\." + r"org",
            "python" + "hosted",
            r"--(extra-)?index" + "-url",
            r"registry\." + "npmjs",
            r"proxy\.golang" + r"\.org",
            # /home/ray is inside Ray's own images, and clusters are described in their terms
            r"(?<![\w.~/-])/(root|Users|work|home(?!/ray\b))" + r"/\w",
        )
    )
)
_TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".cfg", ".ini", ".sh", ".j2", ".html", ".env", ""}


def test_no_module_or_folder_has_a_name_that_says_nothing() -> None:
    """The vocabulary of the field stands in names."""
    found = [
        str(path.relative_to(ROOT))
        for path in python_files(*PACKAGES, "tests", "examples", "benchmarks")
        if EMPTY_NAMES & {path.stem, *path.relative_to(ROOT).parts[:-1]}
    ]
    assert found == []


def test_no_file_names_a_registrys_host_or_a_path_of_one_machine() -> None:
    """A fresh clone works anywhere: installers know their index, people their folders."""
    found: list[str] = []
    for path in project_files():
        if path.suffix not in _TEXT or path.stat().st_size > 1_000_000:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if match := PLACES_OF_OTHERS.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert not found, "\n" + "\n".join(found)


def test_names_of_files_need_no_quotes() -> None:
    """A script that mistakes a text for a name writes files that nobody sees between the others."""
    strange = [
        str(path.relative_to(ROOT)) for path in project_files() if re.search(r"[^\w./@+-]", str(path.relative_to(ROOT)))
    ]
    assert strange == []


def test_every_test_folder_is_a_package() -> None:
    """Without `__init__.py` a folder `tests/actors` would hide the package `actors`."""
    folders = {path.parent for path in python_files("tests")}
    assert [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []
