"""Inputs of a run from the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ensemble_ray.cli.view.terminal import screen_line
from ensemble_ray.errors import PromptTemplateError, ValidationError
from ensemble_ray.teamfile.document import suggestion

if TYPE_CHECKING:
    from ensemble_ray.definition.ensemble import EnsembleDefinition
    from ensemble_ray.teamfile import Runnable

_SHOWN_TASKS = 3
_SHOWN_VALUE = 60


def read_inputs(pairs: Sequence[str], file: Path | None) -> dict[str, object]:
    """Pairs override the file."""
    values = {} if file is None else _from_file(file)
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise ValidationError(f"--input '{pair}' is not of the form name=value")
        values[name.strip()] = _read_value(name.strip(), value)
    return values


def _read_value(name: str, value: str) -> object:
    """`@PATH` and `@URL` attach a file; `@@` begins a text with `@`."""
    if not value.startswith("@"):
        return value
    if value.startswith("@@"):
        return value[1:]
    from ensemble_ray.values.attachments import attachment_of  # few runs have attachments

    found = attachment_of(value[1:])
    if not found.is_url and not found.is_read and not Path(found.source).expanduser().is_file():
        raise ValidationError(
            f"--input {name}: there is no file '{value[1:]}'. A text that begins with @ is written with @@: {name}=@{value}"
        )
    return found


def _from_file(file: Path) -> dict[str, object]:
    try:
        found: object = json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ValidationError(f"--inputs-file: there is no file '{file}'") from None
    except json.JSONDecodeError as error:
        raise ValidationError(f"{file}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise ValidationError(f"--inputs-file: '{file}' is not UTF-8 text") from None
    except (OSError, ValueError, RecursionError) as error:  # a number may have too many digits
        reason = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "strerror", None) or error
        raise ValidationError(f"--inputs-file: cannot read '{file}': {reason}") from None
    if not isinstance(found, dict):
        raise ValidationError(f"--inputs-file: '{file}' must hold a JSON object of names and values")
    return cast("dict[str, object]", found)


def check_inputs(ensemble: EnsembleDefinition, inputs: Mapping[str, object]) -> None:
    """The error lists all missing inputs."""
    from ensemble_ray.plan.planner import needed_inputs

    values = {**ensemble.inputs, **inputs}
    needed = needed_inputs(ensemble.all_tasks)
    missing = {name: users for name, users in needed.items() if name not in values}
    if not missing:
        return
    spare = [name for name in inputs if name not in needed]
    lines = [f"{len(missing)} {'input is' if len(missing) == 1 else 'inputs are'} missing:"]
    for name, users in missing.items():
        more = f" and {len(users) - _SHOWN_TASKS} more" if len(users) > _SHOWN_TASKS else ""
        lines.append(f"  {name} (used by {', '.join(users[:_SHOWN_TASKS])}{more})")
    lines += [f"  '{name}' was given and no task uses it.{suggestion(name, missing)}" for name in spare]
    lines.append(f"  What to do: {' '.join(f'--input {name}=...' for name in missing)}")
    raise PromptTemplateError("\n".join(lines), tuple(missing))


def check_keys_here(definition: Runnable, runtime: str | None) -> None:
    """On a cluster, its processes have the keys."""
    from ensemble_ray.definition.validation import check_model_keys
    from ensemble_ray.teamfile import find_planned_form

    if _asks_from_here(runtime):
        check_model_keys(find_planned_form(definition) or definition)


def check_team_keys_here(teams: Mapping[str, Runnable], runtime: str | None) -> None:
    from ensemble_ray.definition.validation import check_team_keys
    from ensemble_ray.teamfile import find_planned_form

    if _asks_from_here(runtime):
        check_team_keys({name: find_planned_form(team) or team for name, team in teams.items()})


def _asks_from_here(runtime: str | None) -> bool:
    from ensemble_ray.process.config import Settings

    settings = Settings.from_environment()
    return (runtime or settings.runtime) == "inline" or not settings.ray_address


def input_warnings(
    pairs: Sequence[str], ensemble: EnsembleDefinition | None, inputs: Mapping[str, object]
) -> list[str]:
    """Warn about pairs that a later pair overrides, and names that no task uses."""
    values: dict[str, list[str]] = {}
    for name, _, value in (pair.partition("=") for pair in pairs):
        values.setdefault(name.strip(), []).append(value)
    lines = [
        f"Input '{name}' occurs {len(repeated)} times: the last value counts, '{screen_line(repeated[-1], _SHOWN_VALUE)}'"
        for name, repeated in values.items()
        if len(repeated) > 1
    ]
    if ensemble is not None:
        from ensemble_ray.plan.planner import needed_inputs

        needed = needed_inputs(ensemble.all_tasks)
        spare = [name for name in inputs if name not in needed]
        lines += [f"Input '{name}' was given and no task uses it.{suggestion(name, needed)}" for name in spare]
    return lines
