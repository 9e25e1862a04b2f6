"""`CurrentRun`, `provide` and the deps of one process."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import pytest

from ensemble_ray import (
    CurrentRun,
    Ensemble,
    EnsembleError,
    IllegalStateError,
    RunOptions,
    Task,
    TaskHandlerContext,
    ToolContext,
    ValidationError,
    current_run_context,
    provide,
)
from ensemble_ray.definition.run_options import tags_in
from ensemble_ray.process.config import dumps
from ensemble_ray.process.run_context import Provided, RunDeps, check_deps, use_run


@dataclass
class Shop:
    """Deps."""

    name: str = "s3cret"


RUN = CurrentRun(run_id="r", inputs={"a": "b"}, tags={"c": "d"}, user="ada", deps=Shop())


def test_contexts_of_tests_are_made_by_hand() -> None:
    """S-CTX-1, S-CTX-2, S-CTX-7."""
    tool, handler = ToolContext(run=RUN), TaskHandlerContext(description="d", expected_output="e", run=RUN)
    for each in (RUN, tool, handler):
        assert (each.deps, each.user) == (Shop(), "ada")
        assert (dict(each.inputs), dict(each.tags)) == ({"a": "b"}, {"c": "d"})
    assert handler.run_id == "r"


def test_the_current_run_is_checked_for_the_class_of_its_deps() -> None:
    """S-CTX-4, S-CTX-6."""
    assert current_run_context().run_id == ""
    with pytest.raises(IllegalStateError, match=r"The run has no deps. Pass them to the run: team.run\(deps=...\)"):
        _ = current_run_context().deps
    with use_run(RUN):
        assert current_run_context(Shop).deps.name == "s3cret"
        with pytest.raises(IllegalStateError, match="The deps of the run are a Shop, and not a int"):
            current_run_context(int)


def test_no_copy_and_no_text_of_a_run_has_its_deps() -> None:
    """S-CTX-25."""
    copied = pickle.loads(pickle.dumps(RUN))  # noqa: S301  own bytes
    assert (copied.run_id, dict(copied.inputs), dict(copied.tags), copied.user) == ("r", {"a": "b"}, {"c": "d"}, "ada")
    with pytest.raises(IllegalStateError):
        _ = copied.deps
    texts = [repr(RUN), repr(RunDeps(Shop())), repr(ToolContext(run=RUN)), repr(provide(Shop))]
    assert [text for text in texts if "s3cret" in text] == []


def test_deps_are_pickled_in_packed_form_alone() -> None:
    """S-CTX-22, S-CTX-30."""
    deps = RunDeps(Shop("x"))
    with pytest.raises(TypeError, match="packed"):
        pickle.dumps(deps)
    packed = deps.pack(dumps)
    assert packed.body is not None
    sent = pickle.loads(pickle.dumps(packed))  # noqa: S301  own bytes
    asyncio.run(sent.open(RUN))
    assert sent.read() == Shop("x")
    held = pickle.loads(pickle.dumps(RunDeps(Shop("x"), place="driver").pack(dumps)))  # noqa: S301  own bytes
    assert (held.is_elsewhere, held.body) == (True, None)
    with pytest.raises(IllegalStateError, match="deps_place='driver'"):
        held.read()


def test_deps_that_cannot_be_loaded_say_so() -> None:
    """S-CTX-22."""
    with pytest.raises(ValidationError, match=r"cannot be loaded in a worker process: .*Install the module"):
        asyncio.run(RunDeps(body=b"no pickle").open(RUN))


def two(_first: object, _second: object) -> Shop:
    """A factory with too many arguments."""
    return Shop()


def named(*, _name: str) -> Shop:
    """A factory with a needed keyword."""
    return Shop()


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (Shop(), r"provide\(\) needs a function that opens the deps, got: Shop"),
        (two, r"provide\(two\): it must need no argument, or only the run, and needs: _first, _second"),
        (named, "and needs: _name"),
    ],
)
def test_a_wrong_factory_is_refused_when_it_is_declared(factory: Callable[..., object], text: str) -> None:
    """S-CTX-40."""
    with pytest.raises(ValidationError, match=text):
        provide(factory)


def test_a_factory_is_called_once_by_tasks_that_begin_together() -> None:
    """S-CTX-40, S-CTX-41: and left in the task that entered it."""
    seen: list[object] = []

    @asynccontextmanager
    async def opened(run: CurrentRun) -> AsyncGenerator[Shop]:
        seen.append(asyncio.current_task())
        await asyncio.sleep(0)
        yield Shop(run.user)
        seen.append(asyncio.current_task())

    async def use() -> None:
        deps = RunDeps(provide(opened))
        await asyncio.gather(*(deps.open(RUN) for _ in range(3)))
        assert deps.read() == Shop("ada")
        await deps.close()
        await deps.close()

    asyncio.run(use())
    assert len(seen) == 2
    assert seen[0] is seen[1]


def test_a_factory_that_failed_is_called_again() -> None:
    """S-CTX-42."""
    answers: Iterator[object] = iter([ConnectionError("no"), Shop("x")])

    def opened() -> object:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    async def use() -> None:
        deps = RunDeps(Provided(opened, Shop))
        with pytest.raises(EnsembleError, match=r"cannot be opened: provide\(.*opened\) raised ConnectionError: no"):
            await deps.open(RUN)
        await deps.open(RUN)
        assert deps.read() == Shop("x")
        await deps.close()

    asyncio.run(use())


def test_an_error_at_the_end_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """S-CTX-41."""

    @contextmanager
    def opened() -> Generator[Shop]:
        yield Shop()
        raise OSError("lost")

    async def use() -> None:
        deps = RunDeps(provide(opened))
        await deps.open(RUN)
        await deps.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(use())
    assert "The deps of a run could not be closed: OSError: lost" in caplog.text


def test_a_type_of_deps_is_checked_without_their_value() -> None:
    """S-CTX-21."""
    check_deps(Shop(), Shop, "Ensemble")
    check_deps(provide(Shop), int, "Ensemble")  # checked when it is open
    check_deps(None, None, "Ensemble")
    with pytest.raises(ValidationError) as caught:
        check_deps("s3cret", Shop, "Ensemble")
    assert str(caught.value) == "Ensemble declares deps_type=Shop, and the deps of the run are a str"


def test_deps_survive_changes_of_options_and_definitions() -> None:
    """S-CTX-20, S-CTX-21, S-CTX-60: and options have no text of them."""
    options = RunOptions(deps=Shop()).replace(user="ada", max_tokens=5)
    assert options.deps == Shop()
    assert "s3cret" not in repr(options)
    assert options.model_dump(exclude_none=True) == {"user": "ada", "max_tokens": 5}
    team = Ensemble(tasks=[Task.of("x")], deps="own").with_options(RunOptions(tags={"a": "b"}))
    assert team.replace(verbose=True).deps == "own"
    assert team.with_options(options).deps == Shop()
    with pytest.raises(ValidationError, match="deps_type must be a class, got: str"):
        Ensemble(tasks=[Task.of("x")], deps_type="s3cret")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="RunOptions user must have 1 to 256 characters, got: 0"):
        RunOptions(user="")


def test_the_user_is_a_tag_in_records() -> None:
    """S-CTX-60: it wins over a tag of that name; damaged ones are left out."""
    assert tags_in({"user": "ada"}) == {"user": "ada"}
    assert tags_in({"tags": {"for": "x", "user": "eve"}, "user": "ada"}) == {"for": "x", "user": "ada"}
    assert tags_in({"tags": {"user": "eve"}}) == {"user": "eve"}
    assert tags_in({"user": 5}) == {}
