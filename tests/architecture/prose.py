"""Count constructions that are hard to read, in docstrings, comments, messages and pages; `make check` runs it.

python -m tests.architecture.prose                   fail when a folder has more than the limit of prose.toml
python -m tests.architecture.prose --diff main       print the hard lines that a change adds
python -m tests.architecture.prose --show 20 PATH    print the hardest lines of files or folders
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.project import PACKAGES, ROOT, project_files

_WORD = re.compile(r"[A-Za-z][A-Za-z'-]+")
_CODE = re.compile(r"`[^`]*`|\(https?:[^)]*\)|<!--.*?-->")
#: Shorter texts are names and formats.
_FEWEST_SPACES = 3


@dataclass(frozen=True, slots=True)
class Prose:
    """A piece of prose and where it begins."""

    path: Path
    line: int
    text: str

    @property
    def words(self) -> int:
        """Count its words."""
        return len(_WORD.findall(self.text))


@dataclass(frozen=True, slots=True)
class Rules:
    """What is counted, and how much of it a folder may have, per 1,000 words."""

    patterns: Mapping[str, re.Pattern[str]]
    limit: float
    #: of folders that are still to be rewritten
    limits: Mapping[str, float]

    @classmethod
    def read(cls) -> Rules:
        """Read prose.toml."""
        data = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
        flags = re.IGNORECASE | re.MULTILINE
        patterns = {name: re.compile(text, flags) for name, text in data["patterns"].items()}
        return cls(patterns, data["limit"], data.get("limits", {}))

    def markers(self, text: str) -> list[str]:
        """Return the names of the hard constructions in a text."""
        return [name for name, pattern in self.patterns.items() for _ in pattern.finditer(text)]


def prose_of(path: Path, text: str) -> Iterator[Prose]:
    """Yield the prose of a Python file or of a page."""
    if path.suffix == ".md":
        yield from _of_page(path, text)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") >= _FEWEST_SPACES:
            yield Prose(path, node.lineno, node.value)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_prose = token.string.count(" ") >= _FEWEST_SPACES and not re.search(r"noqa|type:|pyright:", token.string)
        if token.type == tokenize.COMMENT and is_prose:
            yield Prose(path, token.start[0], token.string.lstrip("#: "))


def _of_page(path: Path, text: str) -> Iterator[Prose]:
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            is_code = not is_code
        elif not is_code:
            yield Prose(path, number, _CODE.sub(" X ", line))


def folder_of(path: Path) -> str:
    """Return the folder that a file counts for, such as `ensemble_ray/record`."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[: 2 if parts[0] in {"ensemble_ray", "docs"} and len(parts) > 2 else 1])


def _files(paths: Sequence[str]) -> Iterator[Path]:
    wanted = [ROOT / each for each in paths or (*PACKAGES, "docs", "README.md", "CHANGELOG.md")]
    for path in project_files():
        if path.suffix in {".py", ".md"} and any(path == each or each in path.parents for each in wanted):
            yield path


def check(rules: Rules) -> int:
    """Print the folders above their limit; return how many there are."""
    words: dict[str, int] = {}
    hits: dict[str, int] = {}
    for path in _files(()):
        folder = folder_of(path)
        for prose in prose_of(path, path.read_text(encoding="utf-8")):
            words[folder] = words.get(folder, 0) + prose.words
            hits[folder] = hits.get(folder, 0) + len(rules.markers(prose.text))
    failed = 0
    for folder, count in sorted(words.items()):
        rate = 1000 * hits[folder] / max(1, count)
        limit = rules.limits.get(folder, rules.limit)
        if rate > limit:
            failed += 1
            advice = f"See the hardest lines: python -m tests.architecture.prose --show 20 {folder}"
            print(f"{folder}: {rate:.1f} hard constructions per 1,000 words, at most {limit:g}. {advice}")  # noqa: T201
    return failed


def show(rules: Rules, found: Sequence[Prose], most: int) -> None:
    """Print the hardest pieces of prose with their markers."""
    marked = [(rules.markers(each.text), each) for each in found]
    marked = [(markers, each) for markers, each in marked if markers]
    for markers, each in sorted(marked, key=lambda pair: -len(pair[0]) / max(8, pair[1].words))[:most]:
        place = f"{each.path.relative_to(ROOT)}:{each.line}"
        print(f"{place}: {', '.join(sorted(set(markers)))}: {' '.join(each.text.split())[:160]}")  # noqa: T201


def _added_since(base: str) -> set[tuple[Path, int]]:
    """Return the lines that the working tree adds to a commit."""
    command = ["git", "diff", "--unified=0", base, "--", "*.py", "*.md"]
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout  # noqa: S603
    added: set[tuple[Path, int]] = set()
    path = ROOT
    for line in text.splitlines():
        if line.startswith("+++ b/"):
            path = ROOT / line.removeprefix("+++ b/")
        elif match := re.match(r"@@ .* \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(match[1]), int(match[2] or 1)
            added |= {(path, number) for number in range(first, first + count)}
    return added


def main() -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files or folders for --show")
    parser.add_argument("--show", type=int, metavar="N", help="print the N hardest pieces of prose")
    parser.add_argument(
        "--diff", metavar="COMMIT", help="print the hard pieces of prose that were added since a commit"
    )
    options = parser.parse_args()
    rules = Rules.read()
    if options.diff:
        added = _added_since(options.diff)
        changed = {path for path, _ in added if path.is_file()}
        found = [each for path in sorted(changed) for each in prose_of(path, path.read_text(encoding="utf-8"))]
        show(rules, [each for each in found if (each.path, each.line) in added], options.show or 50)
        return 0
    if options.show:
        found = [each for path in _files(options.paths) for each in prose_of(path, path.read_text(encoding="utf-8"))]
        show(rules, found, options.show)
        return 0
    return 1 if check(rules) else 0


if __name__ == "__main__":
    sys.exit(main())
