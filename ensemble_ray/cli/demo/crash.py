"""`ensemble-ray demo --crash`: the demo is killed half-way and resumed; its record shows what was asked when.

The demo runs as a program of its own, in a session of its own, and all of that session is killed at once. What is
shown of it comes from the record alone, and from commands that anybody can give.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ensemble_ray.cli.demo.sessions import kill_session, our_program
from ensemble_ray.cli.view.terminal import FAILED, FINE, own_command, say, show
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact
from ensemble_ray.values.ids import new_run_id

_WATCH_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Model answers in the record when the run was killed, and in the end."""

    #: in order of the record
    before: Sequence[Fact[ModelAnswered]]
    after: Sequence[Fact[ModelAnswered]]
    #: model calls at a time
    slots: int

    @property
    def asked_after(self) -> Sequence[Fact[ModelAnswered]]:
        """Answers of calls that were made after the kill."""
        kept = {fact.seq for fact in self.before}
        return [fact for fact in self.after if fact.seq not in kept]

    @property
    def asked_again(self) -> Sequence[Fact[ModelAnswered]]:
        """Calls of these whose answer had been recorded before; the promise is that there are none."""
        answered = {fact.name for fact in self.before}
        return [fact for fact in self.asked_after if fact.name in answered]

    @property
    def most_in_flight(self) -> int:
        """How many notes can have been on their way; which ones they were only the endpoint knows."""
        return min(self.slots, sum(_is_note(fact) for fact in self.asked_after))

    @property
    def is_kept(self) -> bool:
        """Whether what was recorded before stands as it stood, and nothing of it was asked again."""
        return not self.asked_again and [fact for fact in self.after if fact not in self.asked_after] == list(
            self.before
        )

    def table(self) -> str:
        """Return a line for each model call, and the sums."""
        answered = {fact.name for fact in self.before}
        rows = [("model call", "before the kill", "after it")]
        rows += [(_call_of(fact), _latency_of(fact), "-") for fact in self.before]
        for fact in self.asked_after:
            before = "answered" if fact.name in answered else "-"
            rows += [(_call_of(fact), before, _latency_of(fact))]
        rows.append(("answered", str(len(self.before)), str(len(self.asked_after))))
        rows.append(("on their way in the kill, so asked twice", "", f"at most {self.most_in_flight}"))
        rows.append(("asked again though answered", "", str(len(self.asked_again))))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}".rstrip() for row in rows
        )


def _is_note(fact: Fact) -> bool:
    return fact.name.startswith("map-")


def _call_of(fact: Fact) -> str:
    return fact.name.partition("#")[0]


def _latency_of(fact: Fact[ModelAnswered]) -> str:
    return f"{fact.data.latency_s:.1f} s"


def crash_and_resume(options: Sequence[str], *, run_id: str | None, passages: int, slots: int) -> int:
    """Run the demo, kill it when half of its notes are answered, resume it, show its record; gives the exit code.

    Args:
        options: Of the demo, as on the command line.
        run_id: Name of the record; None: one is made.
        passages: How many notes there will be.
        slots: How many model calls it makes at a time.
    """
    run_id = run_id or f"demo-{new_run_id()[:8]}"
    half = max(1, passages // 2)
    answers = _kill_at(half, options, run_id)
    if answers is None:
        return FAILED
    say(f"\nKilled with SIGKILL: the demo and all that it started, when {len(answers)} model calls were answered.")
    for command in (["runs"], ["resume", run_id]):
        say(f"\n$ {own_command()} {' '.join(command)}")
        code = _call(command)
        if code != FINE:
            return code
    compared = Comparison(before=answers, after=_answers(run_id), slots=slots)
    say("\nWhat the record says:\n")
    show(compared.table())
    say(
        f"\nThe {len(answers)} answers that were recorded before the kill were used and not asked for again. The "
        f"{len(compared.asked_after)} calls after it are those that had not been made, or had no answer yet."
    )
    return FINE if compared.is_kept else FAILED


def _kill_at(half: int, options: Sequence[str], run_id: str) -> Sequence[Fact[ModelAnswered]] | None:
    """Kill the demo and return the answers that are recorded; None when it ended before half of its notes were there."""
    # A display that redraws itself would leave the terminal without its cursor.
    environment = {**os.environ, "TERM": "dumb"}
    process = subprocess.Popen(  # noqa: S603  our own command
        [*our_program(), "demo", *options, "--run-id", run_id], env=environment, start_new_session=True
    )
    try:
        while process.poll() is None:
            time.sleep(_WATCH_S)
            if sum(map(_is_note, _answers(run_id))) >= half:
                kill_session(process)
                return _answers(run_id)
    finally:
        # Ctrl-C reaches this process only.
        if process.poll() is None:
            kill_session(process)
    say(f"The demo ended with exit code {process.returncode} before it could be killed.")
    return None


def _answers(run_id: str) -> list[Fact[ModelAnswered]]:
    """Return the recorded answers of the model, in order; none while there is no record."""
    from ensemble_ray.record.history import ModelReplied, RunHistory  # the help does not need them
    from ensemble_ray.record.opening import store_at
    from ensemble_ray.runtime import connect

    facts, history = asyncio.run(store_at(connect("inline").store_address).facts(run_id)), RunHistory()
    return [each.fact for fact in facts for each in history.apply(fact) if isinstance(each, ModelReplied)]


def _call(arguments: Sequence[str]) -> int:
    """Give one of our commands, as a user would."""
    sys.stdout.flush()
    return subprocess.run([*our_program(), *arguments], check=False).returncode  # noqa: S603  our own command
