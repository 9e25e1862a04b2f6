"""Definition of a map-reduce: items, factories of tasks, and the grouping of outputs.

Construction checks the arguments. It calls no factory and pulls no item.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import re
import sys
import typing
import warnings
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Protocol,
    TypeAlias,
    Union,
    cast,
    get_args,
    overload,
)

from pydantic import BeforeValidator, Field, PrivateAttr, SkipValidation, model_validator
from typing_extensions import TypeAliasType

from ensemble_ray.definition import fields
from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.delivery import BatchDelivery, delivery_of
from ensemble_ray.definition.loop import Loop
from ensemble_ray.definition.run_rules import RunListeners
from ensemble_ray.definition.task import Task, UnitOutput, WithReflection
from ensemble_ray.errors import ValidationError
from ensemble_ray.items.folders import Files
from ensemble_ray.items.results import DeadLetters
from ensemble_ray.items.sources import ItemSource, source_of
from ensemble_ray.items.text_files import CsvFile
from ensemble_ray.values.task_output import OutputType, full_name
from ensemble_ray.values.value import Accepts

_Arguments = Mapping[str, object]
DEFAULT_CHUNK_SIZE = 5  # outputs per group in static mode
#: By side, without and with an agent factory.
_FACTORY_ARGUMENTS = {"map": ("item", "item, agent"), "reduce": ("chunk_tasks", "chunk_tasks, agent")}
#: Names of the first argument; in the old order they name the second.
_GROUP_NAMES = frozenset({"group", "chunk", "chunk_tasks", "tasks", "items", "outputs"})
_AGENT = re.compile(r"([\w.]*Optional\[)?[\w.]*Agent\]?")
_CALLER_LEVEL = 3  # frames up to the caller of the constructor
_POLICIES = ("fail", "skip", "collect")
_MODES = ("levels", "pipelined")

ItemPolicy: TypeAlias = Literal["fail", "skip", "collect"]

if TYPE_CHECKING:
    #: a sequence, an iterable, a file, a table, or an object with `iter_rows`
    Items: TypeAlias = Iterable[Any] | AsyncIterable[Any] | Path | CsvFile | Files | DeadLetters | Any
    _Task: TypeAlias = Task | Awaitable[Task]
    _Agent: TypeAlias = Agent | Awaitable[Agent]
    _Made: TypeAlias = Task | Loop | UnitOutput
    _Map: TypeAlias = _Made | Awaitable[_Made]
    MapTask: TypeAlias = Callable[[Any], _Map] | Callable[[Any, Agent], _Map]
    MapAgent: TypeAlias = Callable[[Any], _Agent]

    class _OldAgent(Agent): ...

    class _AgentFirst(Protocol):
        """Deprecated (S-MR-227). Without overloads, pyright would infer parameters of lambdas from it."""

        @overload
        def __call__(self, agent: _OldAgent, many: list[Any], /) -> _Task: ...
        @overload
        def __call__(self, agent: Agent, many: list[Any], /) -> _Task: ...

    ReduceTask: TypeAlias = Callable[[list[Task]], _Task] | Callable[[list[Task], Agent], _Task] | _AgentFirst
    DirectTask: TypeAlias = Callable[[list[Any]], _Task] | Callable[[list[Any], Agent], _Task] | _AgentFirst
    GroupAgent: TypeAlias = Callable[[], _Agent]
    TokenEstimator: TypeAlias = Callable[[str], int | None]
    Delivery: TypeAlias = Accepts[BatchDelivery | None, Literal["calls", "batch"] | BatchDelivery | None]
    InputEstimator: TypeAlias = Accepts[Callable[[Any], str], Callable[[Any], str] | None]
    FilePath: TypeAlias = Accepts[Path | None, str | Path | None]
    Columns: TypeAlias = Accepts[tuple[str, ...] | None, Sequence[str] | None]
else:
    # Definitions check these fields in the order of the specification.
    Items = Annotated[Any, SkipValidation]
    MapTask = MapAgent = ReduceTask = DirectTask = GroupAgent = Annotated[Any, SkipValidation]
    TokenEstimator = InputEstimator = Annotated[Any, SkipValidation]
    FilePath = Path | None
    Delivery = Annotated[BatchDelivery | None, BeforeValidator(delivery_of)]
    Columns = Annotated[
        tuple[str, ...] | None, BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
    ]


class MapDefinition(RunListeners, WithReflection):
    """Items and their tasks.

    Attributes:
        items: A list, any iterable or async iterable, the path of a `.jsonl`, `.csv` or `.parquet` file, `CsvFile(path)`, a
            folder of files or a pattern such as `photos/*.jpg`, `Files(path)`, a DataFrame or an Arrow table, a Ray Dataset,
            or `DeadLetters(path)`. All but sequences are read during the run.
        map_task: Makes the task of an item: `callable(item)`, or with `map_agent` `callable(item, agent)`. It may return a
            `Loop`, which runs for the item, or `loop.output_of(task)`.
        map_agent: Makes the agent of an item: `callable(item)`; None: the task names an agent, or the run makes one.
        on_item_error: Effect of a failed item. `"fail"`: the run fails; `"skip"`: the output does not contain it; `"collect"`:
            the output lists it in `failed_items`. None: `"fail"` or `"collect"`, as `parallel_error_strategy` says.
        dead_letters: Path of a `.jsonl` file for failed items.
        results: Path of a `.jsonl` or `.parquet` file for the outputs of the items, written as they arrive.
        columns: Columns of its rows after `index`: parts of a row such as `raw`, fields of the parsed answer, fields of the
            item. None: all parts of a row.
        key: Field of the item that is the first column, in place of the whole item.
        delivery: `"batch"`, or a `BatchDelivery`: the first model calls of the maps go through the provider's Batch API, at half
            the price and within a day. None or `"calls"`: each task calls the model itself.
        replicas: Processes per kind of agent on Ray; None: as the agents declare.
        max_concurrency: Tasks that one process does at the same time; None: as the agents declare.
    """

    _called: ClassVar[str] = "MapEnsemble"
    _source: ItemSource = PrivateAttr()

    items: Items = Field(repr=False, kw_only=False)
    map_task: MapTask = Field(kw_only=False)
    map_agent: MapAgent | None = None
    on_item_error: ItemPolicy | None = None
    dead_letters: FilePath = fields.initially(None)
    results: FilePath = fields.initially(None)
    columns: Columns = fields.initially(None)
    key: fields.StrictText | None = None
    delivery: Delivery = fields.initially(None)
    replicas: fields.StrictInt | None = None
    max_concurrency: fields.StrictInt | None = None

    @fields.checks_arguments
    @classmethod
    def _check_map(cls, arguments: dict[str, Any]) -> None:
        """In the order of S-MR-10 to S-MR-23, S-MR-110, S-MR-150; a missing argument counts as None."""
        items = arguments.get("items")
        if items is None or (isinstance(items, Sequence | AbstractSet | Mapping) and not items):
            raise ValidationError("items must not be None or empty")
        _check_side(arguments, "map")
        cls._check_reduction(arguments)
        _check_outcomes(arguments)
        for name in ("replicas", "max_concurrency"):
            fields.check_positive(arguments.get(name), f"{name} must be > 0 when set")
        if "parallel_error_strategy" in arguments and arguments["parallel_error_strategy"] is None:
            raise ValidationError(f"{cls._called} parallel_error_strategy must not be None")
        if isinstance(items, list):
            arguments["items"] = tuple(cast("list[object]", items))  # the caller's list may change later

    @classmethod
    def _check_reduction(cls, arguments: dict[str, Any]) -> None:
        """Do nothing; a map-reduce checks its own fields here."""

    @model_validator(mode="after")
    def _find_source(self) -> MapDefinition:
        """S-MR-120."""
        self._source = source_of(self.items)
        return self

    @property
    def item_source(self) -> ItemSource:
        """Source of the items. All runs of this instance share it, so that a used-up iterator is noticed."""
        return self._source

    @property
    def has_list(self) -> bool:
        """Whether the items are a list or another sequence, so that all are known."""
        return self._source.is_list

    @property
    def item_policy(self) -> ItemPolicy:
        """Effect of a failed item."""
        if self.on_item_error is not None:
            return self.on_item_error
        return "collect" if self.parallel_error_strategy is fields.ParallelErrorStrategy.CONTINUE_ON_ERROR else "fail"

    @property
    def shown_workflow(self) -> str:
        """Workflow in the trace of a run."""
        return "map"


class MapReduceDefinition(MapDefinition):
    """Items, their tasks, and the tasks that combine their outputs.

    Attributes:
        reduce_task: Makes the task over a group: `callable(chunk_tasks)`, or with `reduce_agent`
            `callable(chunk_tasks, agent)`; its `context` must contain all of them.
        reduce_agent: Makes the agent of a group: `callable()`; None: the task names an agent, or the run makes one.
        direct_task: Makes one task over all items, for an input that fits the budget as it is: `callable(items)`, or with
            `direct_agent` `callable(items, agent)`.
        direct_agent: Makes its agent: `callable()`.
        chunk_size: Outputs per group; None: 5, without a budget.
        target_token_budget: Tokens that the outputs of a group may have together.
        context_window_size: Tokens that the reducing model can read; with `budget_ratio` another way to set the budget.
        budget_ratio: Share of that window that a group may fill; above 0.0, at most 1.0.
        max_reduce_levels: Levels of reduce tasks before the final one; with a budget only.
        token_estimator: Tokens of an output without a provider's count: `callable(text)`; None: no estimate.
        input_estimator: Text of an item, to estimate whether the input fits the budget.
        mode: `"levels"`: a level begins after the end of the level before; `"pipelined"`: a reduce begins as soon as a group
            is full.
        ordered: Pipelined only: groups follow the order of the items instead of the order of completion.
    """

    _called: ClassVar[str] = "MapReduceEnsemble"

    reduce_task: ReduceTask
    reduce_agent: GroupAgent | None = None
    direct_task: DirectTask | None = None
    direct_agent: GroupAgent | None = None
    chunk_size: fields.StrictInt | None = None
    target_token_budget: fields.StrictInt | None = None
    context_window_size: fields.StrictInt | None = None
    budget_ratio: float | None = None
    max_reduce_levels: fields.StrictInt = 10
    token_estimator: TokenEstimator | None = None
    input_estimator: InputEstimator = fields.initially(str)
    mode: Literal["levels", "pipelined"] = "levels"
    ordered: bool = False

    @classmethod
    def _check_reduction(cls, arguments: dict[str, Any]) -> None:
        _check_reduction(arguments)
        if arguments.get("input_estimator") is None:
            arguments["input_estimator"] = str

    @property
    def is_adaptive(self) -> bool:
        """Whether groups fit a budget of tokens; otherwise they have a fixed size."""
        return self.budget is not None

    @property
    def budget(self) -> int | None:
        """Tokens that the outputs of a group may have together; None: groups have a fixed size."""
        if self.context_window_size is not None and self.budget_ratio is not None:
            return int(self.context_window_size * self.budget_ratio)
        return self.target_token_budget

    @property
    def effective_chunk_size(self) -> int:
        """Outputs per group of a fixed size."""
        return self.chunk_size if self.chunk_size is not None else DEFAULT_CHUNK_SIZE

    @property
    def capacity(self) -> int:
        """Size of a full group: in tokens with a budget, otherwise in outputs."""
        return self.effective_chunk_size if self.budget is None else self.budget

    @property
    def is_pipelined(self) -> bool:
        """Whether a reduce begins as soon as a group is full."""
        return self.mode == "pipelined"

    @property
    def is_planned(self) -> bool:
        """Whether all its tasks are made at construction, so that it runs, and handles failed tasks, as an ordinary ensemble.

        This is so in static mode over a list, level by level, without settings for single items.
        """
        item_settings = (self.on_item_error, self.dead_letters, self.results, self.delivery)
        is_by_levels = not self.is_adaptive and not self.is_pipelined
        return is_by_levels and self.has_list and all(each is None for each in item_settings)

    @property
    def shown_workflow(self) -> str:
        """Workflow in the trace of a run."""
        return "map_reduce_adaptive" if self.is_adaptive else "map_reduce_static"


def takes_agent_first(factory: object) -> bool:
    """Return whether a factory of two arguments has the old order, by annotations, else by names (S-MR-227)."""
    parameters: Iterable[inspect.Parameter] = ()
    for is_resolved in (False, True):  # texts remain if a name exists only for type checkers
        with suppress(NameError, AttributeError, SyntaxError, TypeError, ValueError):
            signature = inspect.signature(cast("Callable[..., object]", factory), eval_str=is_resolved)
            parameters = signature.parameters.values()
    places = [each for each in parameters if each.kind in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD}]
    if len(places) < 2:  # noqa: PLR2004  the group and the agent
        return False
    first, second = places[:2]
    if _is_agent(first.annotation) or _is_agent(second.annotation):
        return _is_agent(first.annotation)
    is_first, is_second = (f"_{each.name}".endswith("_agent") for each in (first, second))
    return not is_second and (is_first or second.name in _GROUP_NAMES - {first.name})


def warn_of_old_order(arguments: _Arguments) -> None:
    """Warn in a constructor of factories with the agent first (S-MR-227), unless the library makes a copy."""
    caller = sys._getframe(_CALLER_LEVEL - 1)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    if str(caller.f_globals.get("__name__")).startswith("ensemble_ray."):
        return
    for side, many in (("reduce", "chunk_tasks"), ("direct", "items")):
        factory = arguments.get(f"{side}_task")
        if arguments.get(f"{side}_agent") is not None and takes_agent_first(factory):
            warnings.warn(
                f"{side}_task takes (agent, {many}), which is deprecated: write it as callable({many}, agent), as map_task",
                DeprecationWarning,
                stacklevel=_CALLER_LEVEL,
            )


def output_types_of(factories: Iterable[object]) -> Mapping[str, OutputType]:
    """Return the types that factories refer to, directly or by functions and values of their modules."""
    found: dict[str, OutputType] = {}
    seen: set[int] = set()
    waiting: list[object] = [each for each in factories if each is not None]
    while waiting and len(seen) < _MOST_OBJECTS:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, type):
            root = each.__module__.partition(".")[0]
            # No class of the library, and of the built-in types those of JSON data.
            if each in _PLAIN if root == "builtins" else root != "ensemble_ray":
                found.setdefault(full_name(each), each)
        elif isinstance(each, typing.NewType | TypeAliasType):
            found.setdefault(full_name(each), cast("OutputType", each))
        elif parts := get_args(each):  # `list[Report]`
            found.setdefault(full_name(each), cast("OutputType", each))
            waiting.extend(parts)
        else:
            waiting.extend(_references(each))
    return found


def find_output_type(name: str, known: Mapping[str, OutputType]) -> OutputType | None:
    """Return the type of `output_types_of` with that full name, also a composed one such as `list[module.Report]`."""
    if name in known:
        return known[name]
    try:
        return cast("OutputType", _built(ast.parse(name, mode="eval").body, known))
    except (SyntaxError, LookupError, TypeError, ValueError, RecursionError):  # it names an unknown class
        return None


def _check_side(arguments: _Arguments, side: str) -> None:
    """S-MR-11, S-MR-12."""
    task, agent = f"{side}_task", f"{side}_agent"
    plain, with_agent = _FACTORY_ARGUMENTS[side]
    if arguments.get(task) is None:
        raise ValidationError(
            f"{task} must be set. Give a callable({plain}) -> Task, or together with {agent} a "
            f"callable({with_agent}) -> Task"
        )
    for name in (task, agent):
        _check_callable(arguments, name)


def _check_reduction(arguments: _Arguments) -> None:
    """S-MR-12 to S-MR-23, S-MR-110."""
    _check_side(arguments, "reduce")
    is_adaptive = _check_budget(arguments)
    _check_grouping(arguments, is_adaptive=is_adaptive)
    for name in ("direct_task", "direct_agent", "token_estimator", "input_estimator"):
        _check_callable(arguments, name)
    mode = arguments.get("mode", "levels")
    if mode not in _MODES:
        raise ValidationError(f"mode must be 'levels' or 'pipelined', got: {mode}")
    if arguments.get("ordered") is True and mode != "pipelined":
        msg = "ordered needs mode='pipelined': level by level, groups follow the order of the items anyway"
        raise ValidationError(msg)


def _check_budget(arguments: _Arguments) -> bool:
    """S-MR-13 to S-MR-17. Return whether there is a budget."""
    window, ratio = _number(arguments, "context_window_size"), _number(arguments, "budget_ratio")
    has_window, has_ratio = (arguments.get(name) is not None for name in ("context_window_size", "budget_ratio"))
    if has_window and not has_ratio:
        raise ValidationError(
            "budget_ratio must be set when context_window_size is specified. "
            "It is the share of the window that a group may fill, such as 0.5"
        )
    if ratio is not None and not 0.0 < ratio <= 1.0:
        raise ValidationError(f"budget_ratio must be in range (0.0, 1.0], got: {ratio}")
    if has_ratio and not has_window:
        raise ValidationError(
            "context_window_size must be set when budget_ratio is specified. "
            "It is the number of tokens that the reducing model can read"
        )
    if window is not None and ratio is not None and (derived := int(window * ratio)) <= 0:
        raise ValidationError(
            "target_token_budget derived from context_window_size * budget_ratio must be > 0, "
            f"got: {window} * {ratio} = {derived}"
        )
    target = _number(arguments, "target_token_budget")
    if target is not None and target <= 0:
        raise ValidationError(f"target_token_budget must be > 0, got: {target}")
    return has_window or arguments.get("target_token_budget") is not None


def _check_grouping(arguments: _Arguments, *, is_adaptive: bool) -> None:
    """S-MR-18 to S-MR-23."""
    if arguments.get("chunk_size") is not None and is_adaptive:
        raise ValidationError(
            "chunk_size and target_token_budget (also as context_window_size with budget_ratio) are mutually exclusive: "
            "groups have a fixed size, or fit a budget"
        )
    if arguments.get("target_token_budget") is not None and arguments.get("context_window_size") is not None:
        raise ValidationError(
            "target_token_budget and context_window_size with budget_ratio are mutually exclusive: both define the budget"
        )
    levels, chunk = _number(arguments, "max_reduce_levels"), _number(arguments, "chunk_size")
    if is_adaptive and levels is not None and levels < 1:
        raise ValidationError(f"max_reduce_levels must be >= 1, got: {levels}")
    has_direct = arguments.get("direct_task") is not None
    if arguments.get("direct_agent") is not None and not has_direct:
        raise ValidationError(
            "direct_agent requires direct_task: give a callable(items, agent) -> Task, which is called with that agent"
        )
    if has_direct and not is_adaptive:
        raise ValidationError(
            "direct_agent/direct_task are not supported in static (chunk_size) mode. "
            "They need a budget to compare the input with: set target_token_budget, or leave them out"
        )
    if not is_adaptive and chunk is not None and chunk < 2:  # noqa: PLR2004  S-MR-23: groups of one would never end
        raise ValidationError(f"chunk_size must be >= 2, got: {chunk}")


def _check_outcomes(arguments: _Arguments) -> None:
    """S-MR-150, and the formats of files."""
    policy = arguments.get("on_item_error")
    if policy is not None and policy not in _POLICIES:
        raise ValidationError(f"on_item_error must be 'fail', 'skip' or 'collect', got: {policy}")
    for name, endings in (("dead_letters", (".jsonl",)), ("results", (".jsonl", ".parquet"))):
        path = arguments.get(name)
        if isinstance(path, str | Path) and Path(path).suffix.lower() not in endings:
            raise ValidationError(f"{name} must be the path of a {' or '.join(endings)} file, got: '{path}'")
    _check_columns(arguments)


def _check_columns(arguments: _Arguments) -> None:
    """S-MR-216, S-MR-218."""
    for name in ("columns", "key"):
        if arguments.get(name) is not None and arguments.get("results") is None:
            raise ValidationError(f"{name} says what the rows of results have: give results, the path of a file, too")
    columns, key = arguments.get("columns"), arguments.get("key")
    names = [columns] if isinstance(columns, str) else columns
    if key is not None and (not isinstance(key, str) or not key.strip()):
        raise ValidationError(f"key must be the name of a field, got: {key!r}")
    if key == "index":  # a resumed run finds finished items by this column
        msg = "key must not be 'index': rows have the position of the item there. Choose columns=['item.index'] in its place"
        raise ValidationError(msg)
    if names is None:
        return
    if not isinstance(names, list | tuple) or not names:
        raise ValidationError(f"columns must be a list of names, got: {columns!r}")
    for each in cast("Sequence[object]", names):
        if not isinstance(each, str) or not each.strip():
            raise ValidationError(f"columns must be a list of names, got: {each!r}")


def _check_callable(arguments: _Arguments, name: str) -> None:
    value = arguments.get(name)
    if value is not None and not callable(value):
        raise ValidationError(f"{name} must be callable, got: {type(value).__name__}")


def _number(arguments: _Arguments, name: str) -> int | float | None:
    value = arguments.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _is_agent(annotation: object) -> bool:
    if typing.get_origin(annotation) in {Union, UnionType}:
        return any(map(_is_agent, get_args(annotation)))
    text = getattr(annotation, "__forward_arg__", annotation)
    if isinstance(text, str):
        return any(map(_AGENT.fullmatch, re.sub("['\" ]", "", text).split("|")))
    return str(getattr(annotation, "__name__", "")).endswith("Agent")


_MOST_OBJECTS = 10_000  # limit of a search. An output of an unknown type stays JSON data.
_PLAIN = frozenset({bool, dict, float, frozenset, int, list, set, str, tuple})  # types of JSON data
_FORMS: Mapping[str, object] = {
    **{each.__name__: each for each in _PLAIN},
    **{f"typing.{each}": getattr(typing, each) for each in ("Any", "Dict", "List", "Literal", "Optional", "Union")},
    **{f"collections.abc.{each.__name__}": each for each in (Iterable, Mapping, Sequence)},
}


def _built(node: ast.expr, known: Mapping[str, OutputType]) -> Any:
    match node:
        case ast.Constant():  # `None`, or a value of a `Literal`
            return node.value
        case ast.Tuple():
            return tuple(_built(each, known) for each in node.elts)
        case ast.BinOp(op=ast.BitOr()):
            return _built(node.left, known) | _built(node.right, known)
        case ast.Subscript():
            return _built(node.value, known)[_built(node.slice, known)]
        case _:
            name = ast.unparse(node)
            return _FORMS[name] if name in _FORMS else known[name]


def _references(value: object) -> Iterator[object]:
    """Yield the objects that a value refers to and that may lead to a class."""
    match value:
        case FunctionType():
            yield from _names_in(value.__code__, value.__globals__)
            yield from (value.__defaults__ or ())
            yield from (value.__kwdefaults__ or {}).values()
            for cell in value.__closure__ or ():
                with suppress(ValueError):  # an empty cell
                    yield cell.cell_contents
        case MethodType():
            yield value.__func__
            yield value.__self__
        case functools.partial():
            partial = cast("functools.partial[object]", value)
            yield from (partial.func, *partial.args, *partial.keywords.values())
        case Task():
            yield value.output_type
        case list() | tuple() | set() | frozenset():
            yield from cast("Iterable[object]", value)
        case dict():
            yield from cast("dict[object, object]", value).values()
        case _ if callable(value) and not isinstance(value, CodeType):
            yield getattr(type(value), "__call__", None)  # noqa: B004  for the function itself
            yield from getattr(value, "__dict__", {}).values()
        case _:
            pass


def _names_in(code: CodeType, names: Mapping[str, object]) -> Iterator[object]:
    """Yield the values of the names in a function's code, also of names inside modules."""
    modules: list[ModuleType] = []
    for name in code.co_names:
        value = names.get(name, vars(builtins).get(name))
        if isinstance(value, ModuleType):
            modules.append(value)
        else:
            yield value
    for module in modules:  # `models.Report` is two names of the code
        yield from (vars(module)[name] for name in code.co_names if name in vars(module))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant, names)
