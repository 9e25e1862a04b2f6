"""Links between the pages of the project lead somewhere."""

import re
from pathlib import Path

from tests.architecture.project import ROOT, project_files

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get: lower case, no punctuation, dashes for spaces."""
    headings = re.findall(r"^#+ +(.+)$", _FENCED.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere() -> None:
    """Files and headings that a page names are there."""
    pages = [path for path in project_files() if path.suffix == ".md"]
    broken: list[str] = []
    for page in pages:
        for link in _LINK.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))):
            if link.startswith(("http://", "https://")):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and anchor not in _anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert pages
    assert broken == []
