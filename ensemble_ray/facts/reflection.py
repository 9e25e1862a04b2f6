"""What tasks were told of earlier executions, and what was learned of their outputs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from ensemble_ray.facts.fact import FactData, Key
from ensemble_ray.facts.shapes import FLAG, NUMBER, TEXT, list_of, object_of, optional
from ensemble_ray.values.memory import TaskReflection

_REFLECTION = object_of(
    refined_description=TEXT,
    refined_expected_output=TEXT,
    observations=list_of(TEXT),
    suggestions=list_of(TEXT),
    reflected_at=TEXT,
    run_count=NUMBER,
)


def _value_of(data: Mapping[str, object]) -> TaskReflection:
    return TaskReflection(**cast("dict[str, Any]", data))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReflectionRecalled(FactData):
    """A task was told what earlier runs learned of it, or that they learned nothing."""

    KIND: ClassVar = "reflection_recalled"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {"key": Key(TEXT, ""), "reflection": Key(optional(_REFLECTION), is_optional=True)}

    #: of the task in the store
    key: str
    #: as data; None: there was none
    reflection: Mapping[str, object] | None = None

    @classmethod
    def of(cls, key: str, reflection: TaskReflection | None) -> ReflectionRecalled:
        """Return what is recorded of it."""
        return cls(key=key, reflection=None if reflection is None else reflection.to_data())

    @property
    def recalled(self) -> TaskReflection | None:
        """What the task was told."""
        return None if self.reflection is None else _value_of(self.reflection)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReflectionRecorded(FactData):
    """An output was reflected on; nobody is asked again."""

    KIND: ClassVar = "reflection_made"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {
        "key": Key(TEXT, ""),
        "reflection": Key(_REFLECTION, is_needed=True),
        "input_tokens": Key(NUMBER, 0, is_optional=True),
        "output_tokens": Key(NUMBER, 0, is_optional=True),
        "is_first": Key(FLAG, default=False, is_optional=True),
    }

    #: of the task in the store
    key: str
    #: as data
    reflection: Mapping[str, object] = field(default_factory=dict[str, object])
    #: as the model counted, or estimated where it counted nothing; 0: no model was asked
    input_tokens: int = 0
    output_tokens: int = 0
    #: whether nothing was known of the task before
    is_first: bool = False

    @property
    def reflection_value(self) -> TaskReflection:
        """What was made of the output."""
        return _value_of(self.reflection)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReflectionStored(FactData):
    """The store has what was made; it is not stored again."""

    KIND: ClassVar = "reflection_stored"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {"key": Key(TEXT, "")}

    #: of the task in the store
    key: str
