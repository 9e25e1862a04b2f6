"""Documents of studio: the page as one offline file, the files of a folder, and the graphs of runs."""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import stat
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import sha256
from html import escape
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Literal, cast

import pydantic_core

from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.process.concurrency import new_lock
from ensemble_ray.record.source import recorded_plan
from ensemble_ray.studio.http_server import StudioRefusal, not_found
from ensemble_ray.studio.schemas import FileEntry, FileKind, FileList, FlowSchema, StepSchema
from ensemble_ray.values.trace import ExecutionTrace, GraphTrace
from ensemble_ray.visualization.dag_model import DagModel
from ensemble_ray.visualization.declared import declared_flow, worker_id
from ensemble_ray.visualization.dev_tools import parse_file
from ensemble_ray.visualization.flow import Flow, FlowNode, Layout, flow_data, layout_key, mark_path, place_flow
from ensemble_ray.visualization.ran import critical_path, ran_flow

FOLDER = Path(__file__).parent / "page"
_IMPORT = re.compile(r"^import \{([^}]*)\} from \"(\.[^\"]*)\";\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?:async )?(?:function\*?|class|const|let) ([A-Za-z_]\w*)", re.MULTILINE)
_NO_EXPORT = re.compile(r"^export \{\};\n", re.MULTILINE)
_STYLE = re.compile(r"<link rel=\"stylesheet\" href=\"([^\"]+)\">")
_SCRIPT = re.compile(r"<script type=\"module\" src=\"([^\"]+)\">")


def single_file(title: str) -> tuple[str, str]:
    """Return the HTML before and after the JSON of the run. The file loads no other resource.

    `js/source/file.js` reads the JSON, which must pass through `in_script`. The policy allows one script and one style by
    their hashes.
    """
    index = (FOLDER / "index.html").read_text(encoding="utf-8")
    style = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in _STYLE.findall(index))
    (entry,) = _SCRIPT.findall(index)
    script = "\n".join(_modules(PurePosixPath(entry), []))
    icon = b64encode((FOLDER / "icon.svg").read_bytes()).decode("ascii")
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
    """Yield each module once, after its imports, as a function that returns its exports and hides its other names."""
    if name in done:
        return
    done.append(name)
    text = (FOLDER / name).read_text(encoding="utf-8")
    for _, target in _IMPORT.findall(text):
        yield from _modules(_resolve(name, target), done)
    exports = ", ".join(_EXPORT.findall(text))

    def bind(match: re.Match[str]) -> str:
        return f"const {{{match[1]}}} = {_variable(_resolve(name, match[2]))};\n"

    body = _NO_EXPORT.sub("", _IMPORT.sub(bind, text))
    body = re.sub(r"^export ", "", body, flags=re.MULTILINE)
    yield f"const {_variable(name)} = (() => {{\n{body}\nreturn {{{exports}}};\n}})();"


def _resolve(name: PurePosixPath, target: str) -> PurePosixPath:
    return PurePosixPath(posixpath.normpath(name.parent / target))


def _variable(name: PurePosixPath) -> str:
    return "module_" + re.sub(r"\W", "_", name.as_posix())


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode('ascii')}'"


def in_script(data: str) -> str:
    """Escape JSON, so that an HTML parser finds no end of the script and no comment."""
    return data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


_MOST_FILES = 1000  # the newest changes win
_LARGEST_BYTES = 268_435_456
_MIB = 1_048_576
_WHAT_TO_DO = "What to do: put here what 'plan --dag', 'export_dag', 'export_trace' or 'Export' wrote"

_Stamp = tuple[int, int, int]  # modification time, size, inode


class FilesFolder:
    """The files of one folder; thread-safe."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ValidationError(f"--files {folder}: there is no such folder. Name one that has graphs or traces")
        self._folder = folder.resolve()
        self._known: dict[str, tuple[_Stamp, FileEntry]] = {}

    def files(self) -> FileList:
        """The last changed first; blocking."""
        try:
            entries: list[tuple[str, os.stat_result]] = []
            with os.scandir(self._folder) as found:
                for each in found:
                    with contextlib.suppress(FileNotFoundError):  # deleted after the folder was listed
                        if _is_meant(each.name):
                            entries.append((each.name, each.stat(follow_symlinks=False)))
        except OSError as error:
            text = f"{self._folder}: {error.strerror or error}"
            raise StudioRefusal(HTTPStatus.CONFLICT, "FOLDER_UNREADABLE", text) from error
        entries = [(name, state) for name, state in entries if not stat.S_ISDIR(state.st_mode)]
        entries.sort(key=lambda each: (-each[1].st_mtime_ns, each[0]))
        kept, left_out = entries[:_MOST_FILES], len(entries[_MOST_FILES:])
        before = self._known
        self._known = {name: (_stamp(state), self._entry(name, state, before)) for name, state in kept}
        files = [entry for _, entry in self._known.values()]
        return FileList(folder=str(self._folder), files=files, left_out=left_out)

    def _entry(self, name: str, state: os.stat_result, known: dict[str, tuple[_Stamp, FileEntry]]) -> FileEntry:
        """An unchanged file keeps its entry."""
        found = known.get(name)
        if found is not None and found[0] == _stamp(state):
            return found[1]
        entry = FileEntry(name=name, kind=None, size_bytes=state.st_size, modified_at=state.st_mtime_ns // 1_000_000)
        if not stat.S_ISREG(state.st_mode):
            found_out: dict[str, object] = {"problem": "A link, or no file: only files of the folder itself are opened"}
            return entry.model_copy(update=found_out)
        try:
            found_out = _describe(name, self._read(name))
        except OSError as error:
            found_out = {"problem": error.strerror or str(error)}
        except ValidationError as error:
            found_out = {"problem": message_of(error)}
        return entry.model_copy(update=found_out)

    def content(self, name: str) -> bytes:
        """Blocking."""
        if not _is_meant(name) or "/" in name:
            raise not_found("file", name)
        try:
            content = self._read(name)
            _kind_of(name, content)
        except OSError as error:  # none, a link, a folder
            raise not_found("file", name) from error
        except ValidationError as error:
            raise StudioRefusal(HTTPStatus.CONFLICT, "NOT_SHOWN", message_of(error)) from error
        return content

    def _read(self, name: str) -> bytes:
        """An error reports a missing or too large file, a link, a folder or a pipe."""
        # A link leads out of the folder; a pipe without a writer blocks.
        opened = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(opened, "rb") as file:  # noqa: PTH123  a descriptor
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise OSError("it is no file")
            if state.st_size > _LARGEST_BYTES:
                raise ValidationError(f"{name} is larger than {_LARGEST_BYTES // _MIB} MiB")
            return file.read(_LARGEST_BYTES)


def _is_meant(name: str) -> bool:
    """A URL must be able to contain the name."""
    return name.endswith(".json") and name.isprintable()


def _stamp(state: os.stat_result) -> _Stamp:
    return state.st_mtime_ns, state.st_size, state.st_ino


def _kind_of(name: str, content: bytes) -> tuple[FileKind, dict[str, object]]:
    try:
        data = cast("object", pydantic_core.from_json(content))
    except ValueError as error:
        raise ValidationError(f"{name} is no JSON: {error}") from error
    fields = cast("dict[str, object]", data) if isinstance(data, dict) else {}
    if fields.get("type") == "dag":
        return "dag", fields
    if isinstance(fields.get("task_traces"), list):
        return "trace", fields
    if isinstance(fields.get("run"), dict) and "steps" in fields and "flows" in fields:
        return "run", fields
    raise ValidationError(f"{name} is neither a graph nor a trace nor an exported run. {_WHAT_TO_DO}")


def _describe(name: str, content: bytes) -> dict[str, object]:
    """Return fields of `FileEntry`."""
    kind, fields = _kind_of(name, content)
    told: dict[str, object] = {"kind": kind}
    try:  # an incomplete file is shown as far as possible, with its problem (S-VIZ-77)
        match kind:
            case "dag":
                graph = parse_file(DagModel, content, name=name)
                told |= {"workflow": graph.workflow, "tasks": len(graph.tasks)}
            case "trace":
                trace = parse_file(ExecutionTrace, content, name=name)
                told |= {"workflow": trace.workflow, "tasks": len(trace.task_traces)}
                told |= {"duration_ms": round(trace.total_duration.total_seconds() * 1000)}
            case "run":
                run, steps = cast("dict[str, object]", fields["run"]), fields["steps"]
                spent = run.get("duration_ms")
                told |= {
                    "workflow": str(run.get("workflow", "")),
                    "tasks": len(steps) if isinstance(steps, list) else 0,
                }
                told |= {"duration_ms": spent if isinstance(spent, int) else None}
    except ValidationError as error:
        told["problem"] = message_of(error)
    return told


FlowView = Literal["declared", "ran"]
_KEPT = 64


class FlowDrawer:
    """Draws the graphs of runs; thread-safe."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._layouts: OrderedDict[object, Layout] = OrderedDict()

    def draw(
        self, header: PlanRecorded, steps: Sequence[StepSchema], view: FlowView, trace: GraphTrace | None = None
    ) -> FlowSchema:
        """Return the graph of a run, as declared or as it ran; blocking. A run that creates its tasks has no declared graph.

        The trace marks the edges that the run followed.
        """
        plan = recorded_plan(header.plan) if header.plan and not header.is_dynamic else None
        shown = [
            FlowNode(
                id=step.id,
                kind=step.kind,
                title=step.title,
                agent=step.agent,
                status=step.status,
                level=step.level,
                started_at=step.started_at,
                ended_at=step.ended_at,
            )
            for step in sorted(steps, key=lambda each: each.started_at or 0)
        ]
        if view == "declared" and plan is not None:
            ran: dict[str, list[tuple[str, str]]] = {}
            nodes: dict[str, str] = {}
            for step in steps:
                node = worker_id(step.agent) if step.kind == "delegation" else step.node
                if node is not None:
                    nodes[step.id] = node
                    ran.setdefault(node, []).append((step.id, step.status))
            path = [
                ([nodes[each] for each in before if each in nodes], [nodes[each] for each in step if each in nodes])
                for before, step in critical_path(shown, plan, workflow=header.workflow or "")
            ]
            graph = mark_path(declared_flow(plan, trace), path)
            return FlowSchema.model_validate(flow_data(graph, self._place(graph), ran))
        count = (header.items or {}).get("count")
        graph = ran_flow(
            shown, plan, workflow=header.workflow or "", item_count=count if isinstance(count, int) else None
        )
        return FlowSchema.model_validate(flow_data(graph, self._place(graph)))

    def _place(self, graph: Flow) -> Layout:
        """Graphs with the same nodes and edges share a layout."""
        key = layout_key(graph)
        with self._lock:
            layout = self._layouts.get(key)
            if layout is not None:
                self._layouts.move_to_end(key)
        if layout is None:
            layout = place_flow(graph)
            with self._lock:
                self._layouts[key] = layout
                while len(self._layouts) > _KEPT:
                    self._layouts.popitem(last=False)
        return layout
