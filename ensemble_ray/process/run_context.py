"""The context of a run for the user's code, and the deps of a run, which each process opens once."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast, final, overload

from typing_extensions import TypeVar as TypeVarWithDefault

from ensemble_ray.errors import EnsembleError, IllegalStateError, ValidationError, message_of
from ensemble_ray.errors.texts import format_with_class
from ensemble_ray.process.concurrency import USER_ERRORS, call_user, threads
from ensemble_ray.process.context import ScopedVariable, bounded_logger

DepsPlace: TypeAlias = Literal["worker", "driver"]
DepsT_co = TypeVarWithDefault("DepsT_co", covariant=True, default=object)
T = TypeVar("T")

_log = bounded_logger(__name__)
_ABSENT: Any = object()
_CLOSE_S = 10.0  # deps may take so long to close at the end of a run
_IN_DRIVER = (
    "The deps of this run stay in the process that started it (deps_place='driver'), and this code runs in another "
    "process. Declare the context as the first parameter of the tool, such as `context: ToolContext[Shop]`: then it is "
    "called in that process, as handlers, guardrails and delegation policies are"
)


@final
class Provided:
    """Deps that each process opens for itself. `provide` makes it."""

    __slots__ = ("deps_type", "factory", "takes_run")

    def __init__(self, factory: Callable[..., object], deps_type: type[object] | None = None) -> None:
        self.factory = factory
        self.deps_type = deps_type  # checked when it is open
        self.takes_run = _takes_run(factory)

    def __repr__(self) -> str:
        return f"provide({_name_of(self.factory)})"

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Provided, (self.factory, self.deps_type)

    async def enter(self, run: CurrentRun, stack: AsyncExitStack) -> object:
        """Open the deps. `stack` closes them."""
        value = await call_user(self.factory, *((run,) if self.takes_run else ()))
        if isinstance(value, AbstractAsyncContextManager):
            value = await stack.enter_async_context(cast("AbstractAsyncContextManager[object]", value))
        elif isinstance(value, AbstractContextManager):
            opened = cast("AbstractContextManager[object]", value)
            value = await threads.run(opened.__enter__)
            stack.push_async_callback(threads.run, opened.__exit__, None, None, None)
        if self.deps_type is not None and not isinstance(value, self.deps_type):
            raise ValidationError(
                f"{self!r} opened a {type(value).__name__}, and deps_type is {self.deps_type.__name__}"
            )
        return value


def provide(factory: Callable[..., object], /) -> Provided:
    """Return deps that each process opens once for a run, and closes at the end of the run: `deps=provide(open_shop)`.

    Use it for values that cannot be pickled, such as pools of database connections.

    Args:
        factory: A function without arguments, or of the run (`CurrentRun`), sync or async. It returns the deps, or a
            context manager of them, sync or async, such as a function with `@asynccontextmanager`.

    Raises:
        ValidationError: it is not callable, or needs more than one argument.
    """
    return Provided(factory)


def _takes_run(factory: object) -> bool:
    if not callable(factory):
        raise ValidationError(f"provide() needs a function that opens the deps, got: {type(factory).__name__}")
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # some builtin classes have no signature
        return False
    needed = [
        each
        for each in parameters
        if each.default is each.empty and each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}
    ]
    if len(needed) > 1 or any(each.kind is each.KEYWORD_ONLY for each in needed):
        names = ", ".join(each.name for each in needed)
        raise ValidationError(
            f"provide({_name_of(factory)}): it must need no argument, or only the run, and needs: {names}"
        )
    return bool(needed)


def _name_of(factory: object) -> str:
    return str(getattr(factory, "__qualname__", type(factory).__name__))


class RunDeps:
    """The deps of one run in one process. They are pickled only in packed form, and a repr does not show them."""

    __slots__ = ("_body", "_closing", "_keeper", "_ready", "_source", "_value", "place")

    def __init__(self, source: object = _ABSENT, *, body: bytes | None = None, place: DepsPlace = "worker") -> None:
        self.place: DepsPlace = place
        self._source = source  # a value or `Provided`
        self._body = body
        self._value = _ABSENT if isinstance(source, Provided) else source
        self._keeper: asyncio.Task[None] | None = None  # opens and closes them in one asyncio task
        self._ready: asyncio.Future[None] | None = None
        self._closing: asyncio.Event | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether the process that started the run has them, and this is another one."""
        return self._source is _ABSENT and self._body is None

    @property
    def is_open(self) -> bool:
        return self._value is not _ABSENT or self.is_elsewhere

    @property
    def body(self) -> bytes | None:
        return self._body

    def read(self) -> object:
        """Return them.

        Raises:
            IllegalStateError: they are in another process, or not open yet.
        """
        if self._value is _ABSENT:
            raise IllegalStateError(_IN_DRIVER if self.is_elsewhere else "The deps of the run are not open here")
        return self._value

    async def open(self, run: CurrentRun) -> None:
        """Open them, unless they are open. On one event loop.

        Raises:
            ValidationError: they cannot be loaded in this process, or are of another type than `deps_type`.
            EnsembleError: their factory raised an error.
        """
        if self.is_open:
            return
        if self._keeper is None:
            if self._source is _ABSENT:
                self._source = self._load()
            if not isinstance(self._source, Provided):
                self._value = self._source
                return
            loop = asyncio.get_running_loop()
            self._ready, self._closing = loop.create_future(), asyncio.Event()
            self._keeper = loop.create_task(self._keep(self._source, run, self._ready, self._closing))
        assert self._ready is not None, "there is a keeper"  # noqa: S101  for the type
        await asyncio.shield(self._ready)

    async def close(self) -> None:
        """Close what their factory opened. Errors are logged."""
        if self._keeper is None or self._closing is None:
            return
        keeper, self._keeper, self._value = self._keeper, None, _ABSENT
        self._closing.set()
        await asyncio.wait([keeper], timeout=_CLOSE_S)
        if not keeper.done():
            _log.warning("The deps of a run did not close within %.0f s", _CLOSE_S)
            keeper.cancel()

    def pack(self, dump: Callable[[object], bytes]) -> RunDeps:
        """Return them as bytes, or without a value if they stay in this process."""
        if self.place == "driver":
            return RunDeps(place=self.place)
        return RunDeps(body=dump(self._source) if self._body is None else self._body, place=self.place)

    def _load(self) -> object:
        try:
            return cast("object", pickle.loads(cast("bytes", self._body)))  # noqa: S301  bytes of our own driver
        except Exception as error:
            raise ValidationError(
                f"The deps of the run cannot be loaded in a worker process: {message_of(error)}. Install the module they "
                "come from on every node, or keep them in the program that starts the run (deps_place='driver')"
            ) from error

    async def _keep(
        self, source: Provided, run: CurrentRun, ready: asyncio.Future[None], closing: asyncio.Event
    ) -> None:
        try:
            async with AsyncExitStack() as stack:
                self._value = await source.enter(run, stack)
                ready.set_result(None)
                await closing.wait()
        except USER_ERRORS as error:
            if ready.done():
                _log.warning("The deps of a run could not be closed: %s", format_with_class(error))
                return
            self._keeper = None  # the next task opens them again
            failure = error
            if not isinstance(error, ValidationError):
                failure = EnsembleError(
                    f"The deps of the run cannot be opened: {source!r} raised {format_with_class(error)}"
                )
                failure.__cause__ = error
            ready.set_exception(failure)
            ready.exception()  # marks it as retrieved: all tasks that wait may be stopped
        finally:
            if not ready.done():
                ready.cancel()

    def __repr__(self) -> str:
        return f"RunDeps(place={self.place!r})"

    def __reduce__(self) -> tuple[Callable[..., RunDeps], tuple[object, ...]]:
        if self._source is not _ABSENT and self._body is None:
            raise TypeError("deps must be packed before they are pickled")
        return _packed_deps, (self._body, self.place)


def _packed_deps(body: bytes | None, place: DepsPlace) -> RunDeps:  # submissions contain its name
    return RunDeps(body=body, place=place)


_NO_TEXTS: Mapping[str, str] = MappingProxyType({})


@final
class CurrentRun(Generic[DepsT_co]):
    """The run that the calling code is part of. `current_run_context()` returns it.

    In tests, make one by hand: `ToolContext(run=CurrentRun(deps=shop))`.

    Attributes:
        run_id: Id of the run; empty outside a run.
        inputs: The run's inputs by name, as the texts that the templates receive.
        tags: Tags of the team and of the run.
        user: For whom the run is, from `run(user="ada")`; empty: unknown.
    """

    __slots__ = ("_deps", "inputs", "run_id", "tags", "user")

    def __init__(
        self,
        *,
        run_id: str = "",
        inputs: Mapping[str, str] = _NO_TEXTS,
        tags: Mapping[str, str] = _NO_TEXTS,
        user: str = "",
        deps: DepsT_co = _ABSENT,
    ) -> None:
        self.run_id = run_id
        self.inputs: Mapping[str, str] = MappingProxyType(dict(inputs))
        self.tags: Mapping[str, str] = MappingProxyType(dict(tags))
        self.user = user
        self._deps: DepsT_co | RunDeps = deps

    def with_deps(self, deps: RunDeps) -> CurrentRun:
        """Return the run with deps that its process opens."""
        run: CurrentRun = CurrentRun(run_id=self.run_id, inputs=self.inputs, tags=self.tags, user=self.user)
        run._deps = deps
        return run

    async def open_deps(self) -> None:
        """Open the deps in this process, unless they are open or stay elsewhere. Errors as in `RunDeps.open`."""
        if isinstance(self._deps, RunDeps):
            await self._deps.open(self)

    async def close_deps(self) -> None:
        """Close the deps that this process opened."""
        if isinstance(self._deps, RunDeps):
            await self._deps.close()

    @property
    def deps(self) -> DepsT_co:
        """The value that `run(deps=...)` received, or that `provide` opened in this process.

        Raises:
            IllegalStateError: the run has no deps, or they stay in another process.
        """
        held = self._deps
        if held is _ABSENT:
            raise IllegalStateError("The run has no deps. Pass them to the run: team.run(deps=...)")
        return cast("DepsT_co", held.read() if isinstance(held, RunDeps) else held)

    @property
    def has_deps_elsewhere(self) -> bool:
        """Whether the process that started the run keeps its deps, and this is another process."""
        return isinstance(self._deps, RunDeps) and self._deps.is_elsewhere

    def __repr__(self) -> str:
        return f"CurrentRun(run_id={self.run_id!r}, user={self.user!r})"

    def __reduce__(self) -> tuple[Callable[..., CurrentRun], tuple[object, ...]]:
        return _run_without_deps, (self.run_id, dict(self.inputs), dict(self.tags), self.user)


def _run_without_deps(run_id: str, inputs: Mapping[str, str], tags: Mapping[str, str], user: str) -> CurrentRun:
    return CurrentRun(run_id=run_id, inputs=inputs, tags=tags, user=user)


#: A task sets it by the variable itself, without a block.
CURRENT_RUN: ContextVar[CurrentRun] = ContextVar("ensemble_ray_run")
OUTSIDE_RUN = CurrentRun()


@overload
def current_run_context() -> CurrentRun: ...
@overload
def current_run_context(deps_type: type[T]) -> CurrentRun[T]: ...
def current_run_context(deps_type: type[object] | None = None) -> CurrentRun:
    """Return the run of the calling code: a tool, handler, guardrail, predicate, policy, review handler, model or runner.

    Outside a run, it returns a context without id and deps.

    Args:
        deps_type: Class of the deps, for type checkers; it is also checked.

    Raises:
        IllegalStateError: the deps are of another class, or there are none.
    """
    run = CURRENT_RUN.get(OUTSIDE_RUN)
    if deps_type is not None and not isinstance(run.deps, deps_type):
        raise IllegalStateError(f"The deps of the run are a {type(run.deps).__name__}, and not a {deps_type.__name__}")
    return run


def use_run(run: CurrentRun) -> AbstractContextManager[None]:
    """Make a run the current one inside the block."""
    return ScopedVariable(CURRENT_RUN, run)


def check_deps(deps: object, deps_type: type[object] | None, owner: str) -> None:
    """Refuse missing deps, and deps of another class than the declared one.

    Raises:
        ValidationError: the message names both classes, and not the value.
    """
    if deps_type is None or isinstance(deps, Provided):
        return
    wanted = deps_type.__name__
    if deps is None:
        raise ValidationError(
            f"{owner} declares deps_type={wanted}, and the run has no deps. Pass them: run(deps={wanted}(...))"
        )
    if not isinstance(deps, deps_type):
        raise ValidationError(
            f"{owner} declares deps_type={wanted}, and the deps of the run are a {type(deps).__name__}"
        )
