"""CrewAI's `agents.yaml` and `tasks.yaml`, converted to a team file. Python code of the project is never executed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from ensemble_ray.errors import ValidationError
from ensemble_ray.teamfile.document import Entries, Items, Located, Problems, Scalar, read_document

_AGENTS, _TASKS = "agents.yaml", "tasks.yaml"
_VARIABLE = re.compile(r"\{([A-Za-z_][\w-]*)\}")
# Providers with the chat-completions protocol, and their default URLs.
_ENDPOINTS: Mapping[str, str | None] = {
    "openai": None,
    "ollama": "http://localhost:11434/v1",
    "hosted_vllm": "http://localhost:8000/v1",
}
_IGNORED_KEYS = frozenset({"cache", "respect_context_window", "verbose_level", "name", "markdown"})


@dataclass(frozen=True, kw_only=True)
class ImportedTeam:
    text: str
    notes: tuple[str, ...]  # the place in the crew, and what to do


class _Notes(list[str]):
    def add(self, place: str, text: str) -> None:
        # The notes become comments of the file.
        self.append(" ".join(f"{place}: {text}".split()))


def find_project(folder: Path) -> Path:
    """Return `folder`, or the only one below it that has both files."""
    if not folder.is_dir():
        raise ValidationError(f"'{folder}' is not a folder. Name the folder with {_AGENTS} and {_TASKS}")
    hidden = (".venv", "node_modules", ".git")
    found = sorted(
        path.parent
        for path in folder.rglob(_AGENTS)
        if path.with_name(_TASKS).is_file() and not any(part in hidden for part in path.parts)
    )
    if folder in found:
        return folder
    if len(found) != 1:
        which = f"several: {', '.join(map(str, found))}" if found else "none"
        raise ValidationError(f"Of folders with {_AGENTS} and {_TASKS} there are in '{folder}' {which}. Name one")
    return found[0]


def import_crew(folder: Path, *, llm: str) -> ImportedTeam:
    """`llm` is the model of agents that name none."""
    notes = _Notes()
    crew, tasks = dict(_entries(folder / _AGENTS)), _entries(folder / _TASKS)
    agents = {name: _agent(f"{_AGENTS}: {name}", value, notes) for name, value in crew.items()}
    made: dict[str, dict[str, object]] = {}
    for name, value in tasks:
        made[name] = _task(f"{_TASKS}: {name}", value, agents=crew, before=list(made), notes=notes)
    team: dict[str, object] = {"llm": llm, "workflow": "sequential", "agents": agents, "tasks": made}
    if any("review" in task for task in made.values()):
        team["review_handler"] = "console"
    notes.add("crew.py", "is not read: a crew with Process.hierarchical is 'workflow: hierarchical' here")
    body = yaml.dump(team, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    header = "".join(f"#   {line}\n" for line in notes)
    return ImportedTeam(text=f"# Imported from a crew. By hand:\n{header}{body}", notes=tuple(notes))


def _entries(path: Path) -> list[tuple[str, Mapping[str, object]]]:
    problems = Problems(str(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValidationError(f"{path}: it cannot be read as a text in UTF-8: {error}") from error
    document = read_document(text, problems)
    problems.check()
    if not isinstance(document, Entries):
        raise ValidationError(f"{path}:1:1: it must be a mapping of names to agents or tasks")
    found: list[tuple[str, Mapping[str, object]]] = []
    for name, value in document.items():
        if not isinstance(value, Entries):
            problems.add(value.spot, name, "it must be a mapping, with keys such as 'role' or 'description'")
            continue
        plain = {key: _plain(each) for key, each in value.items()}
        found.append((name, {key: each for key, each in plain.items() if each not in (None, "")}))
    problems.check()
    return found


def _plain(located: Located) -> object:
    match located:
        case Entries():
            return {name: _plain(value) for name, value in located.items()}
        case Items():
            return [_plain(value) for value in located]
        case Scalar():
            return located.value


def _agent(place: str, crew_agent: Mapping[str, object], notes: _Notes) -> dict[str, object]:
    agent: dict[str, object] = {}
    for key, value in crew_agent.items():
        match key:
            case "role" | "goal":
                agent[key] = _text(value)
            case "backstory":
                agent["background"] = _text(value)
            case "llm":
                agent |= _model(place, _text(value), notes)
            case "max_iter":
                agent["max_iterations"] = value
            case "max_rpm":
                agent["rate_limit"] = {"requests": value, "period": 60}
            case "verbose" | "allow_delegation":
                agent[key] = value
            case _:
                _note_key(place, key, value, notes)
    for key in ("role", "goal", "background"):
        if found := _VARIABLE.findall(str(agent.get(key, ""))):
            names = ", ".join(f"{{{name}}}" for name in found)
            notes.add(place, f"{key} has {names}: inputs are filled into tasks alone; say it in the tasks")
    return agent


def _task(
    place: str, crew_task: Mapping[str, object], *, agents: Mapping[str, object], before: list[str], notes: _Notes
) -> dict[str, object]:
    task: dict[str, object] = {}
    for key, value in crew_task.items():
        match key:
            case "description" | "expected_output":
                task[key] = _text(value)
            case "agent":
                if (name := _text(value)) not in agents:
                    raise ValidationError(f"{place}: there is no agent '{name}' in {_AGENTS}")
                task[key] = name
            case "context":
                task[key] = value
            case "human_input":
                if value:
                    task["review"] = "required"
            case "guardrail_max_retries" | "max_retries":
                task["max_output_retries"] = value
            case _:
                _note_key(place, key, value, notes)
    # A sequential crew passes the outputs of all earlier tasks; an empty list stays empty.
    if not task.setdefault("context", before):
        del task["context"]
    return task


def _note_key(place: str, key: str, value: object, notes: _Notes) -> None:
    if key in _IGNORED_KEYS or value in (None, False, [], ""):
        return
    advice = {
        "async_execution": "ran beside others: with 'workflow: parallel' all tasks do that need no other's output",
        "tools": f"tools {_format(value)} are Python there: write 'tools: [module:attribute]' for each",
        "output_pydantic": f"answer of type {_format(value)}: write 'output_type: module:Class'",
        "output_json": f"answer of type {_format(value)}: write 'output_type: module:Class'",
        "output_file": f"wrote {_format(value)}: 'ensemble-ray run' prints the output, and '> FILE' keeps it",
        "guardrail": "its guardrail: write 'output_guardrails: [module:function]'",
        "callback": "its callback: write 'on_task_complete: module:function' for the team",
        "max_execution_time": "its time limit has no key here: models and tools have timeouts",
    }
    notes.add(place, advice.get(key, f"'{key}: {_format(value)}' has no key here and is left out"))


def _format(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _model(place: str, name: str, notes: _Notes) -> dict[str, object]:
    """In team files, `openai/gpt-4o` is `openai:gpt-4o`."""
    provider, slash, model = name.partition("/")
    if not slash:
        return {"llm": f"openai:{name}"}
    if provider not in _ENDPOINTS:
        advice = "give its endpoint for chat completions, 'llm: {model: NAME, base_url: URL}'"
        notes.add(place, f"model '{name}': {advice}")
        return {}
    url = _ENDPOINTS[provider]
    return {"llm": f"openai:{model}" if url is None else {"model": model, "base_url": url}}


def _text(value: object) -> str:
    return str(value).strip()


class _Dumper(yaml.SafeDumper): ...


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
