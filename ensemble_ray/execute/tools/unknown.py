"""Calls that started before a crash and have no result (S-DUR-23 to S-DUR-26); never repeated silently."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Literal, cast, get_args

from ensemble_ray.errors import ExitEarlyError, IllegalStateError, UnknownOutcomeError, message_of
from ensemble_ray.execute.effects import UnknownEffect
from ensemble_ray.execute.scope import TaskScope
from ensemble_ray.facts.effects import OutcomeDecided, ToolIntended
from ensemble_ray.facts.fact import Fact
from ensemble_ray.ports import Persistence
from ensemble_ray.process.concurrency import USER_ERRORS, call_user, is_terminal, terminal_lock, threads
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.text.foreign_text import escape_controls
from ensemble_ray.tools.tool import strongest_effect
from ensemble_ray.values.ids import uuid_of
from ensemble_ray.values.messages import Effect
from ensemble_ray.values.value import utc_of

_log = bounded_logger(__name__)

Answer = Literal["done", "repeat", "fail"]
HANDLER, RUNNER = "handler", "runner"  # tool names, and last parts of effect names
_SERVICE = "unknown_effect"  # service of the driver that decides
_SHOWN = 500


def key_of(scope: TaskScope, name: str) -> str:
    """Return the idempotency key of an effect, the same for each repetition."""
    return uuid_of(f"{scope.order.run_id}/{name}")


def is_unrepeatable(intent: ToolIntended, declared: Effect) -> bool:
    """Whether a call must not run twice, by its declaration then or now."""
    return strongest_effect(intent.effect, declared) == "once"


def lost_intent(
    scope: TaskScope, name: str, tool_name: str, arguments: str, effect: Effect
) -> Fact[ToolIntended] | None:
    """Return an intent for a call that a lost part of the record may have contained; else None."""
    loss = scope.loss
    if loss is None or effect != "once":
        return None
    data = ToolIntended(tool_name=tool_name, arguments=arguments, effect=effect, is_lost=True)
    return Fact(run=loss.run, name=name, at=loss.at, data=data, epoch=loss.epoch, seq=loss.seq)


async def resolve_unknown(scope: TaskScope, intent: Fact[ToolIntended]) -> str | None:
    """Return a text for a lost result; None: repeat the call. `UnknownOutcomeError` fails the task."""
    unknown = UnknownEffect(
        run_id=scope.order.run_id,
        task=scope.order.key,
        agent_role=scope.order.agent_role,
        tool_name=intent.data.tool_name,
        arguments=intent.data.arguments,
        effect=intent.name,
        idempotency_key=key_of(scope, intent.name),
        begun_at=utc_of(intent.at),
        is_lost=intent.data.is_lost,
    )
    decided = scope.find_recorded(intent.name, OutcomeDecided)
    if decided is not None and decided.seq > intent.seq:  # an earlier decision does not apply to a later repetition
        answer = _check(decided.data.answer, unknown)
        _log.info("%s, as was decided: %s", _describe_begun(unknown), answer)
    else:
        _log.warning("%s: its outcome is unknown", _describe_begun(unknown))
        policy = scope.context.on_unknown
        if policy != "ask":
            if policy == "fail" or _is_whole_task(unknown):  # without a model to inform
                raise _failure(unknown, "Its outcome is unknown")
            return _describe(unknown)
        answer = await _ask(scope, unknown)
        await scope.note(intent.name, OutcomeDecided(answer=answer), until=Persistence.SYNCED)
    match answer:
        case "repeat":
            return None
        case "done":
            return _describe_confirmed(unknown)
        case "fail":
            raise _failure(unknown, "The decision was to fail the task")


async def ask_unknown(effect: UnknownEffect, ask: Callable[[UnknownEffect], object] | None = None) -> Answer:
    """Call the user's callable about an unknown outcome; None: ask at this process's terminal."""
    if ask is None:
        return await threads.run(_ask_at_terminal, effect)
    try:
        answer = await call_user(ask, effect)
    except (asyncio.CancelledError, ExitEarlyError):
        raise
    except USER_ERRORS as error:
        raise _failure(effect, f"The callable given as on_unknown raised: {message_of(error)}") from error
    return _check(answer, effect)


async def _ask(scope: TaskScope, unknown: UnknownEffect) -> Answer:
    driver = scope.ports.services.driver
    if driver is None:
        return await ask_unknown(unknown, scope.ports.ask_unknown)
    try:
        return _check(await driver.ask(_SERVICE, unknown.to_dict()), unknown)
    except IllegalStateError as error:
        raise _failure(unknown, f"The process that started the run cannot answer: {message_of(error)}") from error


def _check(answer: object, unknown: UnknownEffect) -> Answer:
    for option in get_args(Answer):
        if answer == option:
            return cast("Answer", option)
    raise _failure(unknown, f"on_unknown must answer 'done', 'repeat' or 'fail', got: {answer!r}")


def _ask_at_terminal(unknown: UnknownEffect) -> Answer:
    """Ask in a daemon thread, which does not delay the process's exit."""
    if not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
        raise _failure(unknown, "There is no terminal to ask about its outcome")
    question = (
        f"\n{_describe_begun(unknown)}.\n"
        f"Arguments: {unknown.arguments[:_SHOWN]!r}\n"
        f"Idempotency key: {unknown.idempotency_key}\n"
        "Its outcome is unknown. Was it [d]one, [r]epeat it, or [f]ail the task? "
    )
    with terminal_lock:
        while True:
            sys.stderr.write(escape_controls(question))
            sys.stderr.flush()
            line = sys.stdin.readline()
            if not line:
                raise _failure(unknown, "The terminal returned no answer about its outcome")
            word = line.strip().lower()
            for answer in get_args(Answer):
                if word and str(answer).startswith(word):
                    return cast("Answer", answer)
            question = "Answer d, r or f: "


def _is_whole_task(unknown: UnknownEffect) -> bool:
    return unknown.effect.rpartition("/")[2] in {HANDLER, RUNNER}


def _when(unknown: UnknownEffect) -> str:
    return unknown.begun_at.isoformat(timespec="seconds")


def _describe_begun(unknown: UnknownEffect) -> str:
    called = f"its {unknown.tool_name}" if _is_whole_task(unknown) else f"tool '{unknown.tool_name}'"
    if unknown.is_lost:
        return f"Task '{unknown.task}': {called} may have been called in the part of the run's record that is lost"
    return f"Task '{unknown.task}': {called} was called at {_when(unknown)} and did not return"


def _failure(unknown: UnknownEffect, why: str) -> UnknownOutcomeError:
    option = "runner_effect" if _is_whole_task(unknown) and unknown.tool_name == RUNNER else "effect"
    text = (
        f"{_describe_begun(unknown)}. {why}. Check it under its idempotency key {unknown.idempotency_key}; a run with "
        f"on_unknown='ask' asks what to do, and calls declared as {option}='idempotent' are repeated"
    )
    return UnknownOutcomeError(text, unknown.effect, unknown.tool_name)


def _describe(unknown: UnknownEffect) -> str:
    if unknown.is_lost:
        return (
            f"Outcome unknown: a part of this run's record is lost, and this call of '{unknown.tool_name}' may have been "
            "made in it. It has not been made now. Find out whether it was done before you ask for it again: then it is "
            "made. If you cannot find out, do not ask for it, and say in your answer that its outcome is unknown."
        )
    return (
        f"Outcome unknown: this call of '{unknown.tool_name}' was begun at {_when(unknown)} and did not return: it was "
        "cancelled, or its process ended. It may have been done, partly done, or not done at all; it has not been "
        "repeated. Find out whether it was done before you call it again. If you cannot find out, do not repeat it, "
        "and say in your answer that its outcome is unknown."
    )


def _describe_confirmed(unknown: UnknownEffect) -> str:
    if unknown.is_lost:
        return (
            f"This call of '{unknown.tool_name}' was done before a part of the run's record was lost: that was confirmed. "
            "What it returned is lost. It must not be repeated."
        )
    return (
        f"The call of '{unknown.tool_name}' that was begun at {_when(unknown)} was done: that was confirmed later. "
        "What it returned is lost. It must not be repeated."
    )
