"""How a task says that it is reflected on, and an ensemble where that is kept. Package: definition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

from pydantic import InstanceOf, PrivateAttr, SkipValidation, model_validator

from ensemble_ray.definition.fields import Accepts, OptionalModelField, initially, resolve_model
from ensemble_ray.errors import ValidationError
from ensemble_ray.memory.held import HeldObject
from ensemble_ray.memory.reflections import REFLECTION_METHODS, InMemoryReflectionStore
from ensemble_ray.ports import ChatModel
from ensemble_ray.ports.reflection import ReflectionStore
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.process.forks import new_lock
from ensemble_ray.values.value import Value

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from ensemble_ray.values.reflection import TaskReflection

    #: Takes a `ReflectionInput`, returns a `TaskReflection`; sync or async.
    Strategy: TypeAlias = Callable[[Any], TaskReflection | Awaitable[TaskReflection]]
    _Strategy: TypeAlias = Strategy | None
else:
    Strategy = Any
    _Strategy = Annotated[Any, SkipValidation]

__all__ = ["ReflectionConfig", "ReflectionField", "Reflects", "Strategy", "check_reflection_config"]

_log = bounded_logger(__name__)


class ReflectionConfig(Value):
    """How the outputs of a task are reflected on.

    Attributes:
        model: Who reflects: a model or a string; None: the task's `llm`, else its agent's model.
        strategy: Reflects in place of a model: a callable of a `ReflectionInput` that returns a `TaskReflection`, sync or
            async. It is called in the process that began the run, wherever the task was done.
    """

    model: OptionalModelField = initially(None)
    strategy: _Strategy = None
    #: the way to the strategy from other processes
    _held: HeldObject | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        arguments = dict(cast("Mapping[str, Any]", data))
        arguments["model"] = resolve_model(arguments.get("model"))
        strategy = arguments.get("strategy")
        if strategy is not None and not callable(strategy):
            raise ValidationError(f"ReflectionConfig strategy must be callable, got: {type(strategy).__name__}")
        return arguments

    def __reduce__(self) -> tuple[Any, ...]:
        if self.strategy is None:
            return (ReflectionConfig._rebuilt, (self.model, None))
        if self._held is None:
            self._held = HeldObject(self.strategy)
        return (ReflectionConfig._rebuilt, (self.model, self._held))

    @classmethod
    def _rebuilt(cls, model: ChatModel | None, held: HeldObject | None) -> ReflectionConfig:
        """Return what a pickle stands for: at home with the strategy itself, elsewhere with the way to it."""
        strategy = None if held is None else held.thing if held.is_here else _away
        config = cls(model=model, strategy=strategy)
        config._held = held
        return config

    @property
    def is_strategy_here(self) -> bool:
        """Whether the strategy, where there is one, can be called in this process."""
        return self._held is None or self._held.is_here

    @property
    def needs_this_process(self) -> bool:
        """Whether other processes come back to this one for its strategy."""
        return self.strategy is not None and self.is_strategy_here


def _away(_asked: object) -> TaskReflection:
    """Stand for a strategy of another process.

    Raises:
        ValidationError: always.
    """
    raise ValidationError("The strategy of a reflection is called in the process that began the run")


if TYPE_CHECKING:
    ReflectionField = Accepts[ReflectionConfig | None, ReflectionConfig | bool | None]
else:
    ReflectionField = Annotated[InstanceOf[ReflectionConfig] | None, SkipValidation]


def check_reflection_config(value: object) -> ReflectionConfig | None:
    """Return how a task is reflected on; None: not at all (S-REFL-1).

    Raises:
        ValidationError: it is neither a config nor a flag.
    """
    if value is None or value is False:
        return None
    if value is True:
        return ReflectionConfig()
    if not isinstance(value, ReflectionConfig):
        raise ValidationError(
            f"Task reflection_config must be a ReflectionConfig, True or False, got: {type(value).__name__}"
        )
    return value


class _OwnStore:
    """The store of an ensemble that was given none; one for all copies of the ensemble, made when it is first needed."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._store: InMemoryReflectionStore | None = None

    def get(self) -> InMemoryReflectionStore:
        """Return it; the first caller makes it, and a WARN line says what that means (S-REFL-6)."""
        with self._lock:
            if self._store is None:
                self._store = InMemoryReflectionStore()
                _log.warning(
                    "Tasks are reflected on and the ensemble has no reflection_store: their notes are kept in memory, and "
                    "nothing of them outlives this process. SqliteReflectionStore(path) keeps them"
                )
            return self._store

    def __reduce__(self) -> tuple[Any, ...]:
        return (_OwnStore, ())


class Reflects(Value):
    """Where an ensemble keeps what was learned of its tasks.

    Attributes:
        reflection_store: Keeps the reflections of tasks with a `reflection_config`, from run to run; None: an
            `InMemoryReflectionStore` of this ensemble's own.
    """

    reflection_store: Annotated[ReflectionStore | None, SkipValidation] = None
    _own_reflections: _OwnStore = PrivateAttr(default_factory=_OwnStore)

    @model_validator(mode="before")
    @classmethod
    def _check_reflections(cls, data: Any) -> Any:
        store = cast("Mapping[str, Any]", data).get("reflection_store") if isinstance(data, Mapping) else None
        if store is None:
            return data
        missing = [name for name in REFLECTION_METHODS if not callable(getattr(store, name, None))]
        if missing:
            raise ValidationError(
                f"Ensemble reflection_store ({type(store).__name__}) has no method "
                f"{' and no method '.join(map(repr, missing))}"
            )
        return data

    def find_reflection_store(self, configs: Iterable[ReflectionConfig | None]) -> ReflectionStore | None:
        """Return where reflections are kept; None: nothing is given, and none of the tasks with these configs needs one."""
        if self.reflection_store is not None or all(config is None for config in configs):
            return self.reflection_store
        return self._own_reflections.get()

    def share_reflections(self, other: Reflects) -> None:
        """Keep them where that ensemble does which this one is made of."""
        self._own_reflections = other._own_reflections
