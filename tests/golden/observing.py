"""What the library says of a golden record, and what it does with it. In: a case. Out: JSON, without this machine's times.

By the face and by the commands only.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import re
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any
from unittest import mock

import typer.main

from ensemble_ray import EnsembleError, EnsembleListener, EnsembleOutput, RunOptions, Runtime, ToolCallEvent, resume
from ensemble_ray.cli.app import invoke
from tests.golden import model
from tests.golden.cases import Case
from tests.golden.facts import plain
from tests.golden.records import Record, read_sqlite, restore_sqlite
from tests.golden.running import answering_server
from tests.golden.store import PROJECT, ROOT, load

__all__ = [
    "Heard",
    "added_facts",
    "goes_on",
    "observe",
    "observe_reading",
    "observe_resumption",
    "read_in_store",
    "restore_files",
    "restored",
    "resumption",
]

#: Characters of a text that is shown whole.
_SHOWN = 160
#: Making the parser takes three times as long as a command; it is the same each time.
_command_of = functools.cache(typer.main.get_command)
_AGE = re.compile(r"\b\d+ (?:s|min|h|d)(?=\s)")


class Heard(EnsembleListener):
    """Keeps the tools that were called in whatever process."""

    def __init__(self) -> None:
        self.tools: list[str] = []

    def on_tool_call(self, event: ToolCallEvent) -> None:
        """Keep its name."""
        self.tools.append(event.tool_name)


@contextlib.contextmanager
def restored(case: Case) -> Generator[Path]:
    """Restore a case in a home of its own, which is the one of this process meanwhile; its files are in the folder."""
    record = load(case)
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        home = Path(name) / "home"
        with mock.patch.dict(
            os.environ, {"ENSEMBLE_RAY_HOME": str(home), "COLUMNS": "120", "NO_COLOR": "1", "OPENAI_API_KEY": "none"}
        ):
            os.environ.pop("ENSEMBLE_RAY_STORE", None)
            restore_sqlite(record, home)
            restore_files(record)
            yield home


def restore_files(record: Record) -> None:
    """Write the run's own files to the current folder."""
    for name, text in record.files.items():
        Path(name).write_text(text, encoding="utf-8")


def observe(case: Case) -> dict[str, Any]:
    """Return all that is said of a case."""
    said: dict[str, Any] = {"reading": observe_reading(case)}
    if goes_on(case):
        said["resumption"] = observe_resumption(case)
    return said


def goes_on(case: Case) -> bool:
    """Return whether a resume of that case does anything."""
    is_failed_map = case.end == "failed" and case.team in {"strict_mapping", "adaptive"}
    return case.how in {"killed", "cancelled"} or case.team == "budget" or is_failed_map


# Reading.


def observe_reading(case: Case) -> dict[str, Any]:
    """Return what the commands say of a case, what a fork from each task would do, and what running it again gives."""
    record, run_id = load(case), case.run_id
    header = record.facts[0][6]
    with restored(case) as home:
        said: dict[str, Any] = {
            "runs": _AGE.sub("AGE", _called(home, "runs")),
            "runs --json": _as_json(_called(home, "runs", "--json")),
            **_traced(case, home),
        }
        if "nodes" in header["plan"]:
            target = () if case.is_of_file else ("--target", f"{case.module}:{case.team}")
            for name in (*(node["key"] for node in header["plan"]["nodes"]), *_executions(record)):
                said[f"fork {name}"] = _called(home, "fork", run_id, "--from", name, "--dry-run", *target)
        else:
            for task in sorted({fact[3].partition("#")[0] for fact in record.facts} - {"run", "loss"}):
                said[f"trace --task {task}"] = _called(home, "trace", run_id, "--task", task)
        if not goes_on(case):
            said["resume"] = _shortened(_resumed(case, "inline"))
    return said


def read_in_store(case: Case, url: str) -> dict[str, Any]:
    """Return what the commands say of a run in a database that do not name its place."""
    with mock.patch.dict(os.environ, {"ENSEMBLE_RAY_STORE": url}):
        return _traced(case, Path("none"))


def _traced(case: Case, home: Path) -> dict[str, Any]:
    data = _called(home, "trace", case.run_id, "--json")
    return {
        "trace": _called(home, "trace", case.run_id),
        # Those of the others are much the same.
        "trace --json": _as_json(data) if case.runtime == "inline" and case.how in {"ended", "killed"} else _hash(data),
    }


def _called(home: Path, *arguments: str) -> str:
    """Run a command in this process; return what it printed and said, and how it ended."""
    printed, said = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(said),
        mock.patch.object(typer.main, "get_command", _command_of),
    ):
        code = invoke(arguments)
    texts = [
        each.buffer.getvalue().decode().replace(str(home), "HOME").replace(str(ROOT), PROJECT)
        for each in (printed, said)
    ]  # type: ignore[attr-defined]
    return f"{texts[0]}{f'said: {texts[1]}' if texts[1] else ''}{f'code: {code}' if code else ''}"


def _as_json(text: str) -> Any:
    return _shortened(json.loads(text)) if text[:1] in "[{" else text


def _shortened(value: Any) -> Any:
    """Return it with the hash of each long text in its place, but for messages, so that golden files stay small."""
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{value[:40]}... ({len(value)} characters, sha256 {_hash(value)})"
    if isinstance(value, dict):
        return {name: each if name in {"message", "cause"} else _shortened(each) for name, each in value.items()}
    return [_shortened(each) for each in value] if isinstance(value, list) else value


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Going on.


def _executions(record: Record) -> list[str]:
    """Return the iterations, attempts and steps that are recorded."""
    outermost = (fact[3].partition("/")[0] for fact in record.facts)
    return sorted({name for name in outermost if name.startswith(("loop:", "phase:", "graph:"))})


def observe_resumption(case: Case, runtime: Runtime | str = "inline") -> dict[str, Any]:
    """Return what a resume of a case does and gives, on files."""
    with restored(case) as home:
        said = resumption(case, runtime)
        after = read_sqlite(home, case.run_id, Path.cwd())
        return {
            **said,
            "added": added_facts(load(case), after),
            "trace": plain(_called(home, "trace", case.run_id)),
            "files": {name: _rows(text) for name, text in after.files.items()},
        }


def resumption(case: Case, runtime: Runtime | str) -> dict[str, Any]:
    """Return what models and tools are asked in a resume, and what it gives."""
    model.ASKED.clear()
    heard = Heard()
    with answering_server():
        result = _resumed(case, runtime, heard)
    return {"result": _shortened(result), "asked": sorted(model.ASKED), "tools": sorted(heard.tools)}


def added_facts(before: Record, after: Record) -> list[str]:
    """Return kinds and names of the facts that a resume added, and how its effects came out."""
    assert [fact[:3] for fact in before.facts] == [fact[:3] for fact in after.facts[: len(before.facts)]]
    found = after.facts[len(before.facts) :]
    return sorted(" ".join(filter(None, [fact[1], fact[2], _outcome(fact[6])])) for fact in found)


def _outcome(data: Any) -> str:
    return str(data.get("outcome") or data.get("type") or data.get("state") or "")


def _resumed(case: Case, runtime: Runtime | str, *listeners: object) -> dict[str, Any]:
    team = None if case.is_of_file else case.make().replace(listeners=list(listeners))
    options = RunOptions(max_tokens=100_000) if case.team == "budget" else None
    try:
        return _output_data(resume(case.run_id, team, runtime=runtime, options=options))
    except EnsembleError as error:
        message = plain(str(error)).replace(os.environ["ENSEMBLE_RAY_HOME"], "HOME")
        data = {"error": type(error).__name__, "message": message}
        cause = error.__cause__
        return {**data, "cause": f"{type(cause).__name__}: {plain(str(cause))}"} if cause is not None else data


def _output_data(output: EnsembleOutput) -> dict[str, Any]:
    return {
        "exit_reason": output.exit_reason.value,
        "raw": output.raw,
        "tasks": sorted(
            [each.task_description, each.agent_role, each.raw, repr(each.parsed_output)] for each in output.task_outputs
        ),
        "failed_items": [[each.index, repr(each.item), each.error_type, each.message] for each in output.failed_items],
        "tokens": repr(output.metrics.total_tokens) if output.metrics else None,
    }


def _rows(text: str) -> list[str]:
    return sorted(plain(re.sub(r'"duration": ?[\d.]+', '"duration": 0', line)) for line in text.splitlines())
