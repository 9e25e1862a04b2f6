"""What a map-reduce declares: items, factories of tasks, and how outputs are grouped.

Running it is added above (`ensemble_ray.map_reduce`). Here everything is checked that can be told without calling a
factory. Never: a factory called, an item pulled.
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
from collections.abc import (
    AsyncIterable,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from collections.abc import (
    Set as AbstractSet,
)
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
    get_origin,
    overload,
)

from pydantic import BeforeValidator, Field, PrivateAttr, SkipValidation, model_validator
from typing_extensions import TypeAliasType

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.fields import ParallelErrorStrategy, StrictInt, StrictText, check_positive, initially
from ensemble_ray.definition.loop import Loop
from ensemble_ray.definition.run_rules import Watched
from ensemble_ray.definition.task import Reflects, Task, UnitOutput
from ensemble_ray.errors import ValidationError
from ensemble_ray.items.results import DeadLetters
from ensemble_ray.items.sources import ItemSource, source_of
from ensemble_ray.items.text_files import CsvFile
from ensemble_ray.values.task_output import OutputType, full_name
from ensemble_ray.values.value import Accepts

_Arguments = Mapping[str, object]

#: Of each side: what its task factory is called with, without and with an agent factory.
_ARGUMENTS = {"map": ("item", "item, agent"), "reduce": ("chunk_tasks", "chunk_tasks, agent")}
#: How factories of the old order call what comes second now.
_GROUP_NAMES = frozenset({"group", "chunk", "chunk_tasks", "tasks", "items", "outputs"})
#: An annotation that could not be resolved.
_AGENT = re.compile(r"([\w.]*Optional\[)?[\w.]*Agent\]?")
#: From the warning to the line that makes the map-reduce: this module, and the constructor.
_CALLER_LEVEL = 3
_POLICIES = ("fail", "skip", "collect")
_MODES = ("levels", "pipelined")


def check_items(arguments: _Arguments) -> None:
    """Refuse nothing, and a collection that can be seen to be empty (S-MR-10)."""
    items = arguments.get("items")
    if items is None or (isinstance(items, Sequence | AbstractSet | Mapping) and not items):
        raise ValidationError("items must not be None or empty")


def check_side(arguments: _Arguments, side: str) -> None:
    """Refuse a side without its task factory (S-MR-11, S-MR-12), and factories that cannot be called."""
    task, agent = f"{side}_task", f"{side}_agent"
    plain, with_agent = _ARGUMENTS[side]
    if arguments.get(task) is None:
        raise ValidationError(
            f"{task} must be set. Give a callable({plain}) -> Task, or together with {agent} a "
            f"callable({with_agent}) -> Task"
        )
    for name in (task, agent):
        _check_callable(arguments, name)


def check_reduction(arguments: _Arguments) -> None:
    """Refuse what the parts of a reduction have to do with each other (S-MR-12 to S-MR-23, S-MR-110)."""
    check_side(arguments, "reduce")
    is_adaptive = _check_budget(arguments)
    _check_grouping(arguments, is_adaptive=is_adaptive)
    for name in ("direct_task", "direct_agent", "token_estimator", "input_estimator"):
        _check_callable(arguments, name)
    mode = arguments.get("mode", "levels")
    if mode not in _MODES:
        raise ValidationError(f"mode must be 'levels' or 'pipelined', got: {mode}")
    if arguments.get("ordered") is True and mode != "pipelined":
        raise ValidationError(
            "ordered needs mode='pipelined': level by level, groups follow the order of the items anyway"
        )


def check_outcomes(arguments: _Arguments) -> None:
    """Refuse what no failed item can be dealt with by (S-MR-150), and files of outcomes that cannot be written so."""
    policy = arguments.get("on_item_error")
    if policy is not None and policy not in _POLICIES:
        raise ValidationError(f"on_item_error must be 'fail', 'skip' or 'collect', got: {policy}")
    for name, endings in (("dead_letters", (".jsonl",)), ("results", (".jsonl", ".parquet"))):
        path = arguments.get(name)
        if isinstance(path, str | Path) and Path(path).suffix.lower() not in endings:
            raise ValidationError(f"{name} must be the path of a {' or '.join(endings)} file, got: '{path}'")
    _check_columns(arguments)


def _check_columns(arguments: _Arguments) -> None:
    """Refuse what names no columns of a file (S-MR-216, S-MR-218)."""
    for name in ("columns", "key"):
        if arguments.get(name) is not None and arguments.get("results") is None:
            raise ValidationError(f"{name} says what the rows of results have: give results, the path of a file, too")
    columns, key = arguments.get("columns"), arguments.get("key")
    names = [columns] if isinstance(columns, str) else columns
    if key is not None and (not isinstance(key, str) or not key.strip()):
        raise ValidationError(f"key must be the name of a field, got: {key!r}")
    if key == "index":  # a resumed run finds by it which items have their rows
        msg = "key must not be 'index': rows have the position of the item there. Choose columns=['item.index'] in its place"
        raise ValidationError(msg)
    if names is None:
        return
    if not isinstance(names, list | tuple) or not names:
        raise ValidationError(f"columns must be a list of names, got: {columns!r}")
    for each in cast("Sequence[object]", names):
        if not isinstance(each, str) or not each.strip():
            raise ValidationError(f"columns must be a list of names, got: {each!r}")


def check_processes(arguments: _Arguments) -> None:
    """Refuse numbers of processes and of tasks in one that no agent could have."""
    for name in ("replicas", "max_concurrency"):
        check_positive(arguments.get(name), f"{name} must be > 0 when set")


def warn_of_old_order(arguments: _Arguments) -> None:
    """Warn of factories that take the agent first, for a constructor (S-MR-227); not for a copy that the library makes."""
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


def takes_agent_first(factory: object) -> bool:
    """Return whether a factory of two arguments has the old order: by its annotations, else by its names (S-MR-227)."""
    if (signature := _signature_of(cast("Callable[..., object]", factory))) is None:
        return False
    places = [
        each
        for each in signature.parameters.values()
        if each.kind in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD}
    ]
    if len(places) < 2:  # noqa: PLR2004  as map_task has
        return False
    first, second = places[:2]
    if _is_agent(first.annotation) or _is_agent(second.annotation):
        return _is_agent(first.annotation)
    is_first, is_second = (f"_{each.name}".endswith("_agent") for each in (first, second))
    return not is_second and (is_first or second.name in _GROUP_NAMES - {first.name})


def _signature_of(factory: Callable[..., object]) -> inspect.Signature | None:
    """Return the signature with annotations as values; as texts where a name is imported for type checkers alone."""
    for is_resolved in (True, False):
        with suppress(NameError, AttributeError, SyntaxError, TypeError, ValueError):
            return inspect.signature(factory, eval_str=is_resolved)
    return None  # it is not callable, or shows no signature


def _is_agent(annotation: object) -> bool:
    """Return whether that is the type of an agent, or a union with it."""
    if get_origin(annotation) in {Union, UnionType}:
        return any(map(_is_agent, get_args(annotation)))
    text = getattr(annotation, "__forward_arg__", annotation)
    if isinstance(text, str):
        return any(map(_AGENT.fullmatch, re.sub("['\" ]", "", text).split("|")))
    return str(getattr(annotation, "__name__", "")).endswith("Agent")


def _check_budget(arguments: _Arguments) -> bool:
    """S-MR-13 to S-MR-17; whether there is a budget."""
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
            "target_token_budget and context_window_size with budget_ratio are mutually exclusive: both give the budget"
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


def _number(arguments: _Arguments, name: str) -> int | float | None:
    value = arguments.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _check_callable(arguments: _Arguments, name: str) -> None:
    value = arguments.get(name)
    if value is not None and not callable(value):
        raise ValidationError(f"{name} must be callable, got: {type(value).__name__}")


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


#: Objects that are looked at: a factory's module may refer to much, and an output whose type is not found stays JSON data.
_MOST = 10_000
#: Built-in types that JSON data can be.
_PLAIN = frozenset({bool, dict, float, frozenset, int, list, set, str, tuple})
#: What types are made with, as their texts name it.
_FORMS: Mapping[str, object] = {
    **{each.__name__: each for each in _PLAIN},
    **{f"typing.{each}": getattr(typing, each) for each in ("Any", "Dict", "List", "Literal", "Optional", "Union")},
    **{f"collections.abc.{each.__name__}": each for each in (Iterable, Mapping, Sequence)},
}


def output_types_of(factories: Iterable[object]) -> Mapping[str, OutputType]:
    """Return the classes and aliases that these factories refer to, also by way of functions and values of their modules."""
    found: dict[str, OutputType] = {}
    seen: set[int] = set()
    waiting: list[object] = [each for each in factories if each is not None]
    while waiting and len(seen) < _MOST:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, type):
            if _can_be_output(each):
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
    """Return the type of that full name, also one such as `list[module.Report]` that is made of known classes.

    Args:
        name: As `full_name` writes it.
        known: Of `output_types_of`.
    """
    if name in known:
        return known[name]
    try:
        return cast("OutputType", _built(ast.parse(name, mode="eval").body, known))
    except (SyntaxError, LookupError, TypeError, ValueError, RecursionError):  # it has classes that are not known
        return None


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


def _can_be_output(output_type: type[object]) -> bool:
    """Return whether a task may declare it: a user's class, or what JSON data is; never one of the library's."""
    if output_type.__module__ == builtins.__name__:
        return output_type in _PLAIN
    return output_type.__module__.partition(".")[0] != "ensemble_ray"


def _references(value: object) -> Iterator[object]:
    """Give what a value refers to, as far as it can lead to a class."""
    match value:
        case FunctionType():
            yield from _names_in(value.__code__, value.__globals__)
            yield from (value.__defaults__ or ())
            yield from (value.__kwdefaults__ or {}).values()
            yield from _contents(value)
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
            yield getattr(type(value), "__call__", None)  # noqa: B004  the function itself is wanted, not whether there is one
            yield from getattr(value, "__dict__", {}).values()
        case _:
            pass


def _names_in(code: CodeType, names: Mapping[str, object]) -> Iterator[object]:
    """Give what the names of a function's code stand for; modules are looked into for the names beside theirs."""
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


def _contents(function: FunctionType) -> Iterator[object]:
    """Give what a function has closed over."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            continue
