"""Builds the generated pages of the site. A hook of MkDocs: see mkdocs.yml.

It adds README.md, the API reference, examples, decisions and the specification to the navigation, draws Mermaid blocks, and writes
`llms.txt` and `llms-full.txt` (https://llmstxt.org). Neither the script nor its pages use the network.
"""

from __future__ import annotations

import ast
import re
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple, cast

import mermaidx
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel

import ensemble_ray
from ensemble_ray import MODULE_OF

ROOT = Path(__file__).resolve().parent.parent
#: Text files of the repository that pages link to are shown as pages of these languages.
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".md": "markdown", ".service": "ini"}

#: All files of these folders are shown.
_FOLDERS = ("deploy", "examples")


class Topic(NamedTuple):
    """A page of the API reference."""

    slug: str
    title: str
    about: str
    #: modules or names with their modules, also prefixes of these
    modules: tuple[str, ...]
    #: names that come before all others
    first: frozenset[str] = frozenset()


#: In the order of the navigation. The longest matching prefix counts.
TOPICS = (
    Topic(
        "teams",
        "Agents, tasks, teams",
        "Definitions of teams, and the classes that run them.",
        ("ensemble", "map_reduce", "definition"),
        first=frozenset({"Agent", "Task", "Ensemble", "MapReduceEnsemble", "RunOptions"}),
    ),
    Topic(
        "runs",
        "Runs",
        "Handles of runs, runtimes, and resuming runs.",
        ("runs", "actors", "recovery", "plan", "items", "process", "serve"),
    ),
    Topic(
        "results",
        "Results",
        "Results of a run: outputs, metrics, traces.",
        ("values", "record.view"),
        first=frozenset({"EnsembleOutput", "TaskOutput", "AgentOutput"}),
    ),
    Topic("events", "Events", "Events for listeners, streams and pages.", ("events",)),
    Topic("tools", "Tools", "What agents can do.", ("tools", "execute.tools")),
    Topic(
        "models",
        "Models",
        "Whom agents ask, how prompts are made, and how answers are checked.",
        ("llm", "ports", "prompts", "values.messages", "values.value.RateLimit", "execute"),
    ),
    Topic(
        "memory",
        "Memory and reflection",
        "What agents remember from task to task and from run to run.",
        (
            "memory",
            *(f"ports.{name}" for name in ("EmbeddingModel", "EmbeddingStore", "EntityMemory", "LongTermMemory")),
            "ports.MemoryOperationListener",
            "ports.ReflectionStore",
            "values.memory",
            "definition.task.ReflectionConfig",
            "definition.task.ReflectionInput",
        ),
    ),
    Topic(
        "reviews",
        "Reviews",
        "Where people decide.",
        ("execute.review", "values.reviews", "recovery.deciding", "definition.phase.PhaseReviewDecision"),
    ),
    Topic(
        "evaluation",
        "Evaluation",
        "Cases and scorers, and the results of evaluations.",
        ("evaluation",),
        first=frozenset({"Evaluation", "Case", "EvaluationResult"}),
    ),
    Topic("graphs", "Graphs", "Teams and runs as graphs of tasks.", ("visualization",)),
    Topic(
        "pages",
        "Dashboard, studio, pictures",
        "Runs in a browser, and graphs of teams as data and pictures.",
        ("studio", "visualization", "serve"),
    ),
    Topic("errors", "Errors", "Errors by class.", ("errors",)),
)


def topic_of(public: str) -> Topic:
    """Return the page that has a public name.

    Args:
        public: The name with its module: `ensemble_ray.values.trace.TaskTrace`.

    Raises:
        LookupError: no page has it.
    """
    name = public.removeprefix("ensemble_ray.") + "."
    fitting = [(len(start), topic) for topic in TOPICS for start in topic.modules if name.startswith(f"{start}.")]
    if not fitting:
        raise LookupError(f"no page of the API reference has {public}: name it in TOPICS of docs/make_site.py")
    return max(fitting, key=lambda found: found[0])[1]


# Pages that are made.


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that no file of this folder is."""
    pages = {
        "index.md": _move_links((ROOT / "README.md").read_text(), "docs/"),
        "changelog.md": _move_links((ROOT / "CHANGELOG.md").read_text(), "docs/"),
        "reference/index.md": _reference_index(),
        **{f"reference/{topic.slug}.md": _reference_page(topic) for topic in TOPICS},
        **dict(_source_pages(files)),
    }
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    nav = cast("list[object]", config.nav)
    nav += [
        {"API reference": ["reference/index.md", *({t.title: f"reference/{t.slug}.md"} for t in TOPICS)]},
        {"Examples": [{Path(path).name.removesuffix(".md"): path} for path in sorted(pages) if "examples/" in path]},
        {"Decisions": sorted(_pages_in(files, "decisions"))},
        {"Specification": ["spec/README.md", *sorted(set(_pages_in(files, "spec")) - {"spec/README.md"})]},
        "changelog.md",
    ]
    return files


def _pages_in(files: Files, folder: str) -> Iterator[str]:
    return (file.src_uri for file in files.documentation_pages() if file.src_uri.startswith(f"{folder}/"))


def _reference_index() -> str:
    lines = ["# API reference", "", "All of these are imported from `ensemble_ray`.", ""]
    for topic in TOPICS:
        links = [f"[`{name}`]({topic.slug}.md#{MODULE_OF[name]}.{name})" for name in _names_of(topic)]
        lines += [f"## [{topic.title}]({topic.slug}.md)", "", topic.about, "", ", ".join(links), ""]
    return "\n".join(lines)


def _reference_page(topic: Topic) -> str:
    parts = [f"# {topic.title}\n\n{topic.about}\n"]
    return "\n".join([*parts, *map(_reference_of, _names_of(topic))])


def _reference_of(name: str) -> str:
    found: object = getattr(ensemble_ray, name)
    # Its table of attributes lists its fields; a signature would be `**data`.
    is_model = isinstance(found, type) and issubclass(found, BaseModel)
    return f"::: {MODULE_OF[name]}.{name}\n" + ("    options: {show_signature: false}\n" if is_model else "")


def _names_of(topic: Topic) -> list[str]:
    names = [name for name, module in MODULE_OF.items() if topic_of(f"{module}.{name}") is topic]
    return sorted(names, key=lambda name: (name not in topic.first, name.casefold()))


def _source_pages(files: Files) -> Iterator[tuple[str, str]]:
    """Return pages that show files of the repository: all examples, and what pages link to."""
    shown = [path for folder in _FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in _LANGUAGES]
    wanted = {path.relative_to(ROOT) for path in shown}
    texts = [(ROOT, (ROOT / "README.md").read_text())]
    texts += [(ROOT / "docs" / file.src_uri, file.content_string) for file in files.documentation_pages()]
    for place, text in texts:
        base = place if place.is_dir() else place.parent
        for target in _LINK.findall(text):
            found = (base / target.split("#")[0]).resolve()
            if found.suffix in _LANGUAGES and found.is_file() and _is_shown_as_source(found):
                wanted.add(found.relative_to(ROOT))
    for folder in _FOLDERS:
        inside = [path.as_posix() for path in sorted(wanted) if path.is_relative_to(folder)]
        yield f"files/{folder}.md", "\n".join([f"# {folder}", "", *(f"- [{path}]({path}.md)" for path in inside)])
    for path in sorted(wanted):
        content = (ROOT / path).read_text()
        yield (
            f"files/{path.as_posix()}.md",
            f"# {path.as_posix()}\n\n{_about(path, content)}````{_LANGUAGES[path.suffix]}\n{content}````\n",
        )


def _is_shown_as_source(path: Path) -> bool:
    return path.is_relative_to(ROOT) and path.name not in {"README.md", "CHANGELOG.md"} and path.suffix != ".md"


def _about(path: Path, content: str) -> str:
    told = ast.get_docstring(ast.parse(content)) if path.suffix == ".py" else None
    return f"{told.splitlines()[0]}\n\n" if told else ""


# Pages without changes.

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s]+)(?=\))")
_HIDDEN = re.compile(r"<!---? .*?-->\n?", re.DOTALL)
#: Words after a block's language are options of the tests; the theme takes such a block for text.
_FENCE_WORDS = re.compile(r"^( *```[a-z]+) .*$", re.MULTILINE)
#: How wide a drawing is, in its style, px.
_SIZE = re.compile(r"max-width: (\d+)")
_LINE_END = re.compile(r"\s*\n\s*")
_MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def _move_links(text: str, folder: str) -> str:
    """Return a page of the repository's top as one of this folder."""
    return _LINK.sub(
        lambda found: found[1].removeprefix(folder) if found[1].startswith(folder) else f"../{found[1]}", text
    )


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leave out what only tests read, draw diagrams, and point links to where things are on the site."""
    del config
    here = PurePosixPath(page.file.src_uri)
    if here.parts[0] == "files":
        return markdown
    if here.parts[0] == "spec":
        markdown = markdown.replace("] [", "] \\[")  # groups of numbers, which are no references
    shown = _MERMAID.sub(lambda found: _draw(found[1]), _strip_test_notes(markdown))
    return _LINK.sub(lambda found: _target(found[1], here, files), shown)


def _strip_test_notes(text: str) -> str:
    """Return a page without what only tests read."""
    return _FENCE_WORDS.sub(r"\1", _HIDDEN.sub("", text))


def _draw(source: str) -> str:
    """Return a diagram as a picture in the page, in its own size: the theme would fetch a library to draw it."""
    svg = mermaidx.render(source).svg()
    named = svg[svg.index("<svg") :].replace("my-svg", f"diagram-{zlib.crc32(source.encode()):x}")
    size = _SIZE.search(named)
    sized = named.replace('width="100%"', f'width="{size[1]}"', 1) if size else named
    return f'<div class="diagram">{_LINE_END.sub(" ", sized)}</div>'


def _target(link: str, here: PurePosixPath, files: Files) -> str:
    path, _, anchor = link.partition("#")
    if not path:
        return link
    parts: list[str] = ["docs", *here.parent.parts]
    for part in PurePosixPath(path).parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    place = "/".join(parts)
    depth = "../" * len(here.parent.parts)
    renamed = {
        "README.md": "index.md",
        "CHANGELOG.md": "changelog.md",
        "docs/spec": "spec/README.md",
        "docs/decisions": "decisions/0001-layers.md",
        **{folder: f"files/{folder}.md" for folder in _FOLDERS},
    }
    if place in renamed:
        return f"{depth}{renamed[place]}{'#' + anchor if anchor else ''}"
    if place.startswith("docs/"):
        return link
    shown = f"files/{place}.md"
    return f"{depth}{shown}" if files.get_file_from_path(shown) else link


# What programs read.


def on_post_build(*, config: MkDocsConfig) -> None:
    """Write `llms.txt`, an index for language models, and `llms-full.txt`, all pages in one."""
    title = f"# {config.site_name}\n\n> {config.site_description}\n"
    pages = dict(_texts())
    site = Path(config.site_dir)
    listed = [f"- [{_title(text)}]({path})" for path, text in pages.items()]
    for path, text in pages.items():
        (site / path).write_text(text)
    (site / "llms.txt").write_text(f"{title}\n## Docs\n\n" + "\n".join(listed) + "\n")
    (site / "llms-full.txt").write_text("\n\n".join([title, *pages.values()]))


def _texts() -> Iterator[tuple[str, str]]:
    yield "index.md", _strip_test_notes(_move_links((ROOT / "README.md").read_text(), "docs/"))
    for path in sorted((ROOT / "docs").glob("*.md")):
        yield path.name, _strip_test_notes(path.read_text())


def _title(text: str) -> str:
    return next(line[2:] for line in text.splitlines() if line.startswith("# "))


__all__: list[str] = ["TOPICS", "Topic", "on_files", "on_page_markdown", "on_post_build", "topic_of"]
