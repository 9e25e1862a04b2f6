"""The checker of hard constructions, and the table of packages."""

import re
from pathlib import Path

import pytest

from tests.architecture.project import ROOT
from tests.architecture.prose import Rules, check, folder_of, prose_of

RULES = Rules.read()


@pytest.mark.parametrize(
    ("text", "markers"),
    [
        ("The scheduler retries the call", []),
        ("What is asked again, nobody knows", ["nobody, somebody", "passive without a doer", "what as a subject"]),
        ("Whoever reads it is told", ["passive without a doer", "told, tells", "who as a subject"]),
        ("It goes on with the run at once", ["go on", "rare adverbs"]),
    ],
)
def test_hard_constructions_are_found_in_a_text(text: str, markers: list[str]) -> None:
    """Each pattern has a name; a plain sentence has none of them."""
    assert sorted(set(RULES.markers(text))) == markers


def test_prose_of_a_module_is_its_docstrings_comments_and_messages() -> None:
    """Names, short texts and directives of checkers are no prose."""
    code = '"""Return the words of a text."""\n# The limit of the server is eight\nx = f(1)  # noqa: S101  our own code runs\nraise ValueError("a is too long")\n'
    found = [(each.line, each.text) for each in prose_of(ROOT / "ensemble_ray/a.py", code)]
    assert found == [(1, "Return the words of a text."), (4, "a is too long"), (2, "The limit of the server is eight")]


def test_prose_of_a_page_has_no_code() -> None:
    """Blocks and spans of code are left out."""
    page = "A `name` here\n\n```python\nx = 1\n```\nThe end\n"
    assert [(each.line, each.text.split()) for each in prose_of(Path("p.md"), page)] == [
        (1, ["A", "X", "here"]),
        (2, []),
        (6, ["The", "end"]),
    ]


def test_folder_above_its_limit_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """The message has the folder, the rate and what to do."""
    strict = Rules(RULES.patterns, limit=0.0, limits={})
    assert check(strict) > 0
    assert re.search(
        r"^docs: \d+\.\d hard constructions per 1,000 words, at most 0\. See", capsys.readouterr().out, re.MULTILINE
    )
    assert folder_of(ROOT / "ensemble_ray/record/runs.py") == "ensemble_ray/record"


def test_every_package_has_a_place_in_the_table_of_the_architecture() -> None:
    """docs/architecture.md says what each package contains."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = page.partition("\n## Packages")[2].partition("\n## ")[0]
    named = set(
        re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `")))
    )
    children = (each for each in (ROOT / "ensemble_ray").iterdir() if not each.name.startswith("__"))
    packages = {each.stem for each in children if each.suffix == ".py" or (each / "__init__.py").exists()}
    assert packages - named == set()
