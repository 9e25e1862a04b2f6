"""What an agent's process asks of a cluster: checks of these fields, and their types. Package: definition.

The texts are those of the specification (S-CLU-41). Ray checks the same once more, when a process is to be started and a run
has begun.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

from pydantic import AfterValidator, BeforeValidator

from ensemble_ray.definition.fields import Accepts, StrictAmount, StrictText
from ensemble_ray.errors import ValidationError

__all__ = ["AmountsField", "LabelsField", "check_process_fields"]

_Value = TypeVar("_Value")
#: Ray counts in steps of this.
_STEP = 0.0001
#: Resources of Ray's own, which have fields or are not for agents.
_FIELD_OF = {"CPU": "num_cpus", "GPU": "num_gpus"}
_RESERVED = frozenset({"memory", "object_store_memory"})
#: As Ray takes them: names and values of Kubernetes' form, operators in front.
_WORD = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_NAME = re.compile(rf"(?:{_WORD}/)?{_WORD}")
_SELECTOR = re.compile(rf"!?{_WORD}|!?in\({_WORD}(?:, ?{_WORD})*\)")


def _or_empty(value: object) -> object:
    return {} if value is None else value


def _copy(value: Mapping[str, _Value]) -> Mapping[str, _Value]:
    return dict(value)


if TYPE_CHECKING:
    AmountsField = Accepts[Mapping[str, float], Mapping[str, float] | None]
    LabelsField = Accepts[Mapping[str, str], Mapping[str, str] | None]
else:
    AmountsField = Annotated[Mapping[StrictText, StrictAmount], BeforeValidator(_or_empty), AfterValidator(_copy)]
    LabelsField = Annotated[Mapping[StrictText, StrictText], BeforeValidator(_or_empty), AfterValidator(_copy)]


def check_process_fields(arguments: Mapping[str, object]) -> None:
    """Refuse what no cluster can give; what has the wrong type is left to pydantic.

    Raises:
        ValidationError: S-CLU-41; the first bad entry is reported.
    """
    for name in ("num_cpus", "num_gpus"):
        _check_amount(arguments.get(name), f"Agent {name}", is_zero_fine=True)
    gpus = arguments.get("num_gpus")
    if isinstance(gpus, float) and gpus > 1 and not gpus.is_integer():
        raise ValidationError(f"Agent num_gpus must be whole where it is above 1, got: {gpus}")
    for name, amount in _entries(arguments.get("resources")):
        if name in _FIELD_OF:
            raise ValidationError(f"Agent resources must not name '{name}': use {_FIELD_OF[name]}")
        if not name.strip() or name in _RESERVED:
            raise ValidationError(f"Agent resources must name resources that nodes were started with, got: '{name}'")
        _check_amount(amount, f"Agent resources['{name}']", is_zero_fine=False)
    for name, selector in _entries(arguments.get("labels")):
        if not _NAME.fullmatch(name):
            raise ValidationError(f"Agent labels must name labels of nodes, got: '{name}'")
        if isinstance(selector, str) and not _SELECTOR.fullmatch(selector):
            raise ValidationError(
                f"Agent labels['{name}'] must be a value, '!value', 'in(a, b)' or '!in(a, b)', got: '{selector}'"
            )


def _check_amount(value: object, subject: str, *, is_zero_fine: bool) -> None:
    if not isinstance(value, int | float) or (value == 0 and is_zero_fine):
        return
    if not math.isfinite(value) or value < _STEP:
        least = f"0 or at least {_STEP}" if is_zero_fine else f"at least {_STEP}"
        raise ValidationError(f"{subject} must be {least}, got: {value}")


def _entries(value: object) -> list[tuple[str, object]]:
    """Return the entries of a mapping whose names are texts."""
    if not isinstance(value, Mapping):
        return []
    return [(name, each) for name, each in cast("Mapping[object, object]", value).items() if isinstance(name, str)]
