"""EnsembleMemory: memory that all tasks of an ensemble use. Package: memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

from pydantic import SkipValidation, Strict, model_validator

from ensemble_ray.errors import ValidationError
from ensemble_ray.ports.memory import EntityMemory, LongTermMemory
from ensemble_ray.values.value import Value

if TYPE_CHECKING:
    from ensemble_ray.values.task_output import TaskOutput

    _Extractor: TypeAlias = Callable[[TaskOutput], str | None] | None
else:
    _Extractor = Annotated[Any, SkipValidation]

__all__ = ["EnsembleMemory"]

_LONG_TERM, _ENTITIES = ("store", "retrieve"), ("put", "get", "get_all", "is_empty")


class EnsembleMemory(Value):
    """Memory that all tasks of an ensemble use: their prompts show it, and their outputs go into it.

    Attributes:
        short_term: Whether each task sees all that was done before it in the same run.
        long_term: Keeps outputs across runs; a task sees those that have to do with it. None: nothing does.
        entity_memory: Facts that each task sees; only you write them. None: there are none.
        long_term_max_results: How many entries of `long_term` a task sees; > 0.
        extractor: Returns what `long_term` stores of a `TaskOutput`; None: nothing. Default: its text.
    """

    short_term: Annotated[bool, Strict()] = False
    long_term: Annotated[LongTermMemory | None, SkipValidation] = None
    entity_memory: Annotated[EntityMemory | None, SkipValidation] = None
    long_term_max_results: Annotated[int, Strict()] = 5
    extractor: _Extractor = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        arguments = cast("Mapping[str, Any]", data)
        long_term, entities = arguments.get("long_term"), arguments.get("entity_memory")
        if arguments.get("short_term") in (None, False) and long_term is None and entities is None:
            raise ValidationError(
                "EnsembleMemory must have at least one memory type enabled: short_term=true, long_term, or entity_memory"
            )
        if long_term is not None:
            _check_long_term(long_term, arguments.get("long_term_max_results"))
        _check_shape("entity_memory", entities, _ENTITIES)
        extractor = arguments.get("extractor")
        if extractor is not None and not callable(extractor):
            raise ValidationError(f"EnsembleMemory extractor must be callable, got: {type(extractor).__name__}")
        return arguments


def _check_long_term(memory: object, most: object) -> None:
    if hasattr(memory, "search") and not hasattr(memory, "retrieve"):
        raise ValidationError(
            f"EnsembleMemory long_term must be a long-term memory, got the embedding store {type(memory).__name__}, which "
            "needs a model: EmbeddingStoreLongTermMemory(embedding_store=..., embedding_model=...)"
        )
    _check_shape("long_term", memory, _LONG_TERM)
    if isinstance(most, int) and most <= 0:
        raise ValidationError(f"EnsembleMemory long_term_max_results must be > 0, got: {most}")


def _check_shape(field: str, memory: object, methods: tuple[str, ...]) -> None:
    if memory is None:
        return
    missing = [name for name in methods if not callable(getattr(memory, name, None))]
    if missing:
        raise ValidationError(
            f"EnsembleMemory {field} ({type(memory).__name__}) has no method {' and no method '.join(map(repr, missing))}"
        )
