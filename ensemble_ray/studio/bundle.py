"""The page as one file that opens offline, with a run in it.

In: a title. Out: HTML before and behind the run's JSON. Rules: nothing in it is asked for from anywhere; its policy allows the one script and the
one style that are in it, by their hashes, and nothing else. A module is a function of its own, so that names of one are not seen
in another; modules may import names from each other and nothing more.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from html import escape
from pathlib import Path, PurePosixPath

_FOLDER = Path(__file__).parent / "page"
_IMPORT = re.compile(r"^import \{([^}]*)\} from \"(\.[^\"]*)\";\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?:async )?(?:function\*?|class|const|let) ([A-Za-z_]\w*)", re.MULTILINE)
_NO_EXPORT = re.compile(r"^export \{\};\n", re.MULTILINE)
_STYLE = re.compile(r"<link rel=\"stylesheet\" href=\"([^\"]+)\">")
_SCRIPT = re.compile(r"<script type=\"module\" src=\"([^\"]+)\">")


def single_file(title: str) -> tuple[str, str]:
    """Return the page in two parts, between which the run stands: JSON as `js/source/file.js` reads it, through `in_script`.

    Args:
        title: What the window is called.
    """
    index = (_FOLDER / "index.html").read_text(encoding="utf-8")
    style = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in _STYLE.findall(index))
    (entry,) = _SCRIPT.findall(index)
    script = "\n".join(_modules(PurePosixPath(entry), []))
    icon = b64encode((_FOLDER / "icon.svg").read_bytes()).decode("ascii")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{escape(title)}</title>
<link rel="icon" href="data:image/svg+xml;base64,{icon}">
<style>{style}</style>
</head>
<body>
<noscript>This page needs JavaScript.</noscript>
<script type="application/json" id="run-data">"""
    return (
        head,
        f"""</script>
<script type="module">{script}</script>
</body>
</html>
""",
    )


def _modules(name: PurePosixPath, done: list[PurePosixPath]) -> Iterator[str]:
    """Yield a module behind those that it imports, each once, as a function that returns what it exports."""
    if name in done:
        return
    done.append(name)
    text = (_FOLDER / name).read_text(encoding="utf-8")
    for _, target in _IMPORT.findall(text):
        yield from _modules(_resolve(name, target), done)
    exports = ", ".join(_EXPORT.findall(text))

    def bind(match: re.Match[str]) -> str:
        return f"const {{{match[1]}}} = {_variable(_resolve(name, match[2]))};\n"

    body = _NO_EXPORT.sub("", _IMPORT.sub(bind, text))
    body = re.sub(r"^export ", "", body, flags=re.MULTILINE)
    yield f"const {_variable(name)} = (() => {{\n{body}\nreturn {{{exports}}};\n}})();"


def _resolve(name: PurePosixPath, target: str) -> PurePosixPath:
    parts: list[str] = list(name.parent.parts)
    for part in PurePosixPath(target).parts:
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return PurePosixPath(*parts)


def _variable(name: PurePosixPath) -> str:
    return "module_" + re.sub(r"\W", "_", name.as_posix())


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode('ascii')}'"


def in_script(data: str) -> str:
    """Return JSON that no HTML parser takes for the end of its script, or for a comment."""
    return data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
