"""The numbers of the specification: each defined once in docs/spec, and nothing cites one that is not.

In: every .py, .md and .toml file of the project's folders as it lies on the disk. Out: a list of file:line complaints.
Never: an opinion on whether a number's behaviour is tested; this reads names only.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = (
    *("ensemble_ray", "actors", "serve", "tests", "docs", "examples", "benchmarks"),
    *("README.md", "CHANGELOG.md"),
)
SUFFIXES = {".py", ".md", ".toml"}
DEFINITION = re.compile(r"^\s*(?:-|\|)\s*(S-[A-Z]+-\d+(?:\.\d+)?)")
#: One number, or a range of which both ends count: `..` or `to` between them, the second end with or without its area.
CITATION = re.compile(r"\b(S-[A-Z]+-)(\d+(?:\.\d+)?)(?:(?:\.\.| to )(?:\1)?(\d+(?:\.\d+)?)\b)?")


def _files() -> Iterator[Path]:
    for place in (ROOT / name for name in PLACES):
        found = sorted(place.rglob("*")) if place.is_dir() else [place]
        yield from (path for path in found if path.suffix in SUFFIXES and path.is_file())


def _lines(paths: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for path in paths:
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            yield f"{name}:{number}", line


def _definitions() -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for place, line in _lines(sorted((ROOT / "docs/spec").glob("*.md"))):
        if match := DEFINITION.match(line):
            places.setdefault(match[1], []).append(place)
    return places


def _undefined(paths: Iterable[Path]) -> list[str]:
    defined = _definitions()
    return [
        f"{place}: {area}{number} is not defined in docs/spec"
        for place, line in _lines(paths)
        for area, *ends in CITATION.findall(line)
        for number in ends
        if number and area + number not in defined
    ]


def test_every_cited_number_is_defined() -> None:
    """Every number and both ends of every range that the project cites are defined in docs/spec."""
    complaints = _undefined(_files())
    assert not complaints, "\n" + "\n".join(complaints)


def test_no_number_is_defined_twice() -> None:
    """A number has one definition line; there are definitions at all."""
    definitions = _definitions()
    twice = [f"{number} is defined at {', '.join(places)}" for number, places in definitions.items() if len(places) > 1]
    assert definitions
    assert not twice, "\n" + "\n".join(twice)


def test_undefined_numbers_are_reported_with_file_and_line(tmp_path: Path) -> None:
    """The check itself: unknown numbers, and unknown second ends of ranges, are found; known ones pass."""
    text = "see {0}ENG-40..48, {0}ENG-40 to 48\n{0}ENG-40..{0}ENG-999\n{0}NONE-1.2, {0}ENG-40 to 998".format("S-")
    cited = tmp_path / "cited.md"
    cited.write_text(text, encoding="utf-8")
    assert _undefined([cited]) == [
        f"{cited}:{line}: S-{number} is not defined in docs/spec"
        for line, number in ((2, "ENG-999"), (3, "NONE-1.2"), (3, "ENG-998"))
    ]
