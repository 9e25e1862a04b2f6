"""What a map-reduce declares: items, factories of tasks, and how outputs are grouped. Package: definition.

Running it is added above (`ensemble_ray.map_reduce`). Here everything is checked that can be told without calling a
factory. Never: a factory called, an item pulled.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, TypeAlias, cast, overload

from pydantic import BeforeValidator, Field, PrivateAttr, SkipValidation, model_validator

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.fields import Accepts, StrictInt, StrictText, initially
from ensemble_ray.definition.loop import Loop
from ensemble_ray.definition.map_reduce_checks import (
    check_items,
    check_outcomes,
    check_processes,
    check_reduction,
    check_side,
)
from ensemble_ray.definition.reflection import Reflects
from ensemble_ray.definition.run_rules import Watched
from ensemble_ray.definition.task import Task
from ensemble_ray.definition.unit_output import UnitOutput
from ensemble_ray.definition.workflow import ParallelErrorStrategy
from ensemble_ray.errors import ValidationError
from ensemble_ray.items.dead_letters import DeadLetters
from ensemble_ray.items.sources import ItemSource, source_of
from ensemble_ray.items.text_files import CsvFile

__all__ = ["DEFAULT_CHUNK_SIZE", "MapDefinition", "MapReduceDefinition"]

#: Size of a group where nobody chose one (static mode).
DEFAULT_CHUNK_SIZE = 5

ItemPolicy: TypeAlias = Literal["fail", "skip", "collect"]

if TYPE_CHECKING:
    #: a sequence, an iterable, an async iterable, a file, a table, or an object with `iter_rows`
    Items: TypeAlias = Iterable[Any] | AsyncIterable[Any] | Path | CsvFile | DeadLetters | Any
    _Task: TypeAlias = Task | Awaitable[Task]
    _Agent: TypeAlias = Agent | Awaitable[Agent]
    _Made: TypeAlias = Task | Loop | UnitOutput
    _Map: TypeAlias = _Made | Awaitable[_Made]
    MapTask: TypeAlias = Callable[[Any], _Map] | Callable[[Any, Agent], _Map]
    MapAgent: TypeAlias = Callable[[Any], _Agent]

    class _OldAgent(Agent): ...

    class _AgentFirst(Protocol):
        """Deprecated (S-MR-227). It has overloads because pyright infers no parameters of lambdas from these."""

        @overload
        def __call__(self, agent: _OldAgent, many: list[Any], /) -> _Task: ...
        @overload
        def __call__(self, agent: Agent, many: list[Any], /) -> _Task: ...

    ReduceTask: TypeAlias = Callable[[list[Task]], _Task] | Callable[[list[Task], Agent], _Task] | _AgentFirst
    DirectTask: TypeAlias = Callable[[list[Any]], _Task] | Callable[[list[Any], Agent], _Task] | _AgentFirst
    GroupAgent: TypeAlias = Callable[[], _Agent]
    TokenEstimator: TypeAlias = Callable[[str], int | None]
    InputEstimator: TypeAlias = Accepts[Callable[[Any], str], Callable[[Any], str] | None]
    FilePath: TypeAlias = Accepts[Path | None, str | Path | None]
    Columns: TypeAlias = Accepts[tuple[str, ...] | None, Sequence[str] | None]
else:
    # Checked by the definition itself, in their place among the other checks.
    Items = Annotated[Any, SkipValidation]
    MapTask = MapAgent = ReduceTask = DirectTask = GroupAgent = Annotated[Any, SkipValidation]
    TokenEstimator = InputEstimator = Annotated[Any, SkipValidation]
    FilePath = Path | None
    Columns = Annotated[
        tuple[str, ...] | None, BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
    ]


class MapDefinition(Watched, Reflects):
    """Items, and the task that each of them is made into.

    Attributes:
        items: What is mapped: a list, any iterable or async iterable, the path of a `.jsonl`, `.csv` or `.parquet` file,
            `CsvFile(path)`, a DataFrame or an Arrow table, a Ray Dataset, or `DeadLetters(path)`. Anything but a sequence is pulled while the run goes on.
        map_task: Makes the task of an item: `callable(item)`, or with `map_agent` `callable(item, agent)`. It may
            return a `Loop`, which is run for the item, or `loop.output_of(task)`.
        map_agent: Makes the agent of an item: `callable(item)`; None: the task names its own, or one is made for it.
        on_item_error: What a failed item means: `"fail"`: the run fails; `"skip"`: it is left out; `"collect"`: it is left
            out and listed in `output.failed_items`. None: `"fail"` or `"collect"`, as `parallel_error_strategy` says.
        dead_letters: Path of a `.jsonl` file that takes the items that failed.
        results: Path of a `.jsonl` or `.parquet` file that takes the outputs of the items as they come.
        columns: What its rows have behind `index`: parts of a row such as `raw`, fields of the parsed answer, fields of the item. None:
            all parts of a row.
        key: Field of the item that its rows have first, in place of the whole item.
        replicas: Processes that each kind of agent gets on Ray; None: as the agents say.
        max_concurrency: Tasks that one process works on at the same time; None: as the agents say.
    """

    _called: ClassVar[str] = "MapEnsemble"
    _source: ItemSource = PrivateAttr()

    items: Items = Field(repr=False, kw_only=False)
    map_task: MapTask = Field(kw_only=False)
    map_agent: MapAgent | None = None
    on_item_error: ItemPolicy | None = None
    dead_letters: FilePath = initially(None)
    results: FilePath = initially(None)
    columns: Columns = initially(None)
    key: StrictText | None = None
    replicas: StrictInt | None = None
    max_concurrency: StrictInt | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_map(cls, data: Any) -> Any:
        """Check the fields in the table's order (S-MR-10 to S-MR-23, S-MR-110, S-MR-150); a missing argument counts as None."""
        if not isinstance(data, Mapping):
            return data
        arguments = dict(cast("Mapping[str, Any]", data))
        check_items(arguments)
        check_side(arguments, "map")
        cls._check_reduction(arguments)
        check_outcomes(arguments)
        check_processes(arguments)
        if "parallel_error_strategy" in arguments and arguments["parallel_error_strategy"] is None:
            raise ValidationError(f"{cls._called} parallel_error_strategy must not be None")
        if isinstance(arguments["items"], list):
            arguments["items"] = tuple(cast("list[object]", arguments["items"]))  # the caller's list may change later
        return arguments

    @classmethod
    def _check_reduction(cls, arguments: dict[str, Any]) -> None:
        """Check what a definition that also reduces adds, in its place among the other checks."""

    @model_validator(mode="after")
    def _find_source(self) -> MapDefinition:
        """Make the source, which says where there is none (S-MR-120)."""
        self._source = source_of(self.items)
        return self

    @property
    def item_source(self) -> ItemSource:
        """Where the items come from; of all runs of this instance, so that an iterator is known to be used up."""
        return self._source

    @property
    def has_list(self) -> bool:
        """Whether all items are there already, as a list or another sequence."""
        return self._source.is_list

    @property
    def item_policy(self) -> ItemPolicy:
        """What a failed item means."""
        if self.on_item_error is not None:
            return self.on_item_error
        return "collect" if self.parallel_error_strategy is ParallelErrorStrategy.CONTINUE_ON_ERROR else "fail"

    @property
    def shown_workflow(self) -> str:
        """What a trace calls a run of it."""
        return "map"


class MapReduceDefinition(MapDefinition):
    """Items, the task that each of them is made into, and the tasks that bring their outputs together.

    Attributes:
        reduce_task: Makes the task over a group: `callable(chunk_tasks)`, or with `reduce_agent`
            `callable(chunk_tasks, agent)`; its `context` must hold all of them.
        reduce_agent: Makes the agent of a group: `callable()`; None: the task names its own, or one is made for it.
        direct_task: Makes the one task over all items that is done where the input fits the budget anyway:
            `callable(items)`, or with `direct_agent` `callable(items, agent)`.
        direct_agent: Makes its agent: `callable()`.
        chunk_size: Outputs per group; None: 5 where there is no budget.
        target_token_budget: Tokens that the outputs of a group may have together.
        context_window_size: Tokens that the reducing model can read; with `budget_ratio` another way to give the budget.
        budget_ratio: Share of that window that a group may fill; above 0.0, at most 1.0.
        max_reduce_levels: Levels of reduce tasks before the final one; with a budget only.
        token_estimator: Tokens of an output whose provider counted none: `callable(text)`, None where it cannot tell.
        input_estimator: The text of an item, to tell whether the input fits the budget.
        mode: `"levels"`: a level begins when the one before has ended; `"pipelined"`: a reduce begins as soon as a group is
            full.
        ordered: Pipelined only: groups follow the order of the items, not that of completion.
    """

    _called: ClassVar[str] = "MapReduceEnsemble"

    reduce_task: ReduceTask
    reduce_agent: GroupAgent | None = None
    direct_task: DirectTask | None = None
    direct_agent: GroupAgent | None = None
    chunk_size: StrictInt | None = None
    target_token_budget: StrictInt | None = None
    context_window_size: StrictInt | None = None
    budget_ratio: float | None = None
    max_reduce_levels: StrictInt = 10
    token_estimator: TokenEstimator | None = None
    input_estimator: InputEstimator = initially(str)
    mode: Literal["levels", "pipelined"] = "levels"
    ordered: bool = False

    @classmethod
    def _check_reduction(cls, arguments: dict[str, Any]) -> None:
        check_reduction(arguments)
        if arguments.get("input_estimator") is None:
            arguments["input_estimator"] = str

    @property
    def is_adaptive(self) -> bool:
        """Whether groups fit a budget of tokens; else they have a fixed size."""
        return self.budget is not None

    @property
    def budget(self) -> int | None:
        """Tokens that the outputs of a group may have together; None where groups have a fixed size."""
        if self.context_window_size is not None and self.budget_ratio is not None:
            return int(self.context_window_size * self.budget_ratio)
        return self.target_token_budget

    @property
    def effective_chunk_size(self) -> int:
        """Outputs per group where groups have a fixed size."""
        return self.chunk_size if self.chunk_size is not None else DEFAULT_CHUNK_SIZE

    @property
    def capacity(self) -> int:
        """What a group may weigh: tokens, or outputs that weigh 1 each."""
        return self.effective_chunk_size if self.budget is None else self.budget

    @property
    def is_pipelined(self) -> bool:
        """Whether a reduce begins as soon as a group is full."""
        return self.mode == "pipelined"

    @property
    def is_planned(self) -> bool:
        """Whether all its tasks are made at construction, so that a run of it is that of an ordinary ensemble.

        So it is in static mode over a list, level by level; a failed task is then dealt with as the ensemble does.
        """
        asks_per_item = (self.on_item_error, self.dead_letters, self.results)
        is_by_levels = not self.is_adaptive and not self.is_pipelined
        return is_by_levels and self.has_list and all(each is None for each in asks_per_item)

    @property
    def shown_workflow(self) -> str:
        """What a trace calls a run of it."""
        return "map_reduce_adaptive" if self.is_adaptive else "map_reduce_static"
