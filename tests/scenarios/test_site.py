"""The documentation as a site: built as `make docs` and `mike` build it, without a network."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path

import pytest

import ensemble_ray
from tests.architecture.project import ROOT

pytestmark = [pytest.mark.program, pytest.mark.extended]
#: A port where nobody listens: what would be fetched through it fails.
_NOWHERE = "http://127.0.0.1:9"
_AUTHOR = {
    f"GIT_{role}_{what}": value
    for role in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "A writer"), ("EMAIL", "writer@localhost"))
}
_MERMAID = re.compile(r"^```mermaid$", re.MULTILINE)


class _Loaded(HTMLParser):
    """Collects what a page has its browser load, and the ids of its elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.diagrams = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found: Mapping[str, str] = {name: value or "" for name, value in attrs}
        self.ids.add(found.get("id", ""))
        self.diagrams += found.get("class") == "diagram"
        is_loading = tag != "a" and (tag != "link" or found.get("rel") not in {"canonical", "next", "prev"})
        self.loaded += [found[name] for name in ("src", "href", "srcset") if is_loading and name in found]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a version of the site, strictly: a link that leads nowhere or a page that no menu has fails it."""
    base = tmp_path_factory.mktemp("site")
    environment = {
        **os.environ,
        **_AUTHOR,
        # mike starts mkdocs by its name
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "SITE_DIR": str(base / "built"),
        "NO_MKDOCS_2_WARNING": "1",
        "http_proxy": _NOWHERE,
        "https_proxy": _NOWHERE,
        "GIT_CONFIG_GLOBAL": os.devnull,
    }
    repository = base / "repository"
    repository.mkdir()
    mike = [sys.executable, "-c", "from mike.driver import main; main()"]
    git = shutil.which("git") or "git"
    for command in (
        [git, "init", "--quiet"],
        [git, "commit", "--quiet", "--allow-empty", "--message", "begin"],
        [*mike, "deploy", "--config-file", str(ROOT / "mkdocs.yml"), "0.1", "latest"],
        [git, "clone", "--quiet", "--branch", "gh-pages", str(repository), str(base / "site")],
    ):
        done = subprocess.run(  # noqa: S603  our own programs
            command, cwd=repository, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    return base / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> Mapping[str, _Loaded]:
    """The pages of the version by their paths."""
    version = site / "0.1"
    return {
        path.relative_to(version).as_posix(): _Loaded(path.read_text(encoding="utf-8"))
        for path in version.rglob("*.html")
    }


def test_versions_lie_beside_each_other(site: Path) -> None:
    """A version has its folder, and the newest one a name."""
    assert json.loads((site / "versions.json").read_text()) == [
        {"version": "0.1", "title": "0.1", "aliases": ["latest"]}
    ]
    assert (site / "latest" / "index.html").is_file()


def test_no_page_loads_anything_from_elsewhere(pages: Mapping[str, _Loaded]) -> None:
    """Scripts, styles, fonts and pictures are the site's own."""
    elsewhere = {
        (path, link) for path, page in pages.items() for link in page.loaded if re.match(r"(?:[a-z]+:)?//", link)
    }
    assert len(pages) > 50
    assert elsewhere == set()


def test_every_diagram_is_drawn(pages: Mapping[str, _Loaded]) -> None:
    """Diagrams are pictures in their pages, which the theme need not fetch a library for."""
    written = sum(len(_MERMAID.findall(page.read_text(encoding="utf-8"))) for page in (ROOT / "docs").rglob("*.md"))
    assert written > 5
    assert sum(page.diagrams for page in pages.values()) == written


def test_every_public_name_is_in_the_reference(pages: Mapping[str, _Loaded]) -> None:
    """Each name has one place in the API reference, with its docstring."""
    ids = set().union(*(page.ids for path, page in pages.items() if path.startswith("reference/")))
    assert {name for name, module in ensemble_ray.MODULE_OF.items() if f"{module}.{name}" not in ids} == set()


def test_what_is_searched_is_there(site: Path) -> None:
    """The search knows the pages, the reference and the specification."""
    index = json.loads((site / "0.1/search/search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].split("#")[0] for entry in index["docs"] if "on_unknown" in entry["text"]}
    assert {"durability.html", "reference/runs.html", "spec/30-durability.html"} <= found


def test_language_models_get_the_pages_as_text(site: Path) -> None:
    """`llms.txt` lists the pages as Markdown, and `llms-full.txt` has them all."""
    version = site / "0.1"
    listed = re.findall(r"^- \[.+\]\((.+)\)$", (version / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE)
    whole = (version / "llms-full.txt").read_text(encoding="utf-8")
    assert {"index.md", "durability.md", "cli.md"} <= set(listed)
    assert all((version / path).read_text(encoding="utf-8") in whole for path in listed)
    assert "invisible-code" not in whole
