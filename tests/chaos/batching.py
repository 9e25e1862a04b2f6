"""Kills of a map while it talks to the Batch API: around the upload of a file, the creation of a batch, and its answers.

In: a seed, and how many kills. Out: a report with what the run promised and did not hold.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.testing import BatchScript, Fault, ModelServer, Reply, ServedRequest
from tests.chaos.report import Report
from tests.chaos.victims import kill_all
from tests.command_line import COMMAND, PATIENCE_S, environment_of
from tests.processes import own_directory, program

__all__ = ["killed_around_batches"]

_RUN = "batches"
_ITEMS = 40
#: Lines that fail, and become calls.
_FAILING = 3
_Call = Literal["upload", "create", "list", "get", "download"]
_LATEST_S = 0.3

TEAM = """
llm: openai:m
map_reduce:
  items: items.jsonl
  map: {description: "Read item {item}."}
  results: rows.jsonl
  delivery: {max_requests: 15, poll_interval: 0.05}
"""


def _answer(request: ServedRequest) -> Reply | Fault:
    number = _item_of(request)
    is_line = not request.headers
    return Fault(status=429) if is_line and number < _FAILING else Reply(text=f"<{number}>")


def _item_of(request: ServedRequest) -> int:
    return int(request.text.partition("Read item ")[2].partition(".")[0])


def killed_around_batches(seed: int, kills: int) -> Report:
    """Run a map; kill its process at calls of the Batch API, and resume it after each kill."""
    rng = random.Random(f"batches {seed}")  # noqa: S311  repeatable, keeps no secret
    report = Report(scenario=_RUN, victims="process", seed=seed, fault="batch")
    begun = time.monotonic()
    with own_directory() as place, ModelServer(_answer, batches=BatchScript(polls=2, is_shuffled=True)) as server:
        (place / "items.jsonl").write_text("\n".join(map(str, range(_ITEMS))), encoding="utf-8")
        (place / "team.yaml").write_text(TEAM, encoding="utf-8")
        # In the order in which a run comes by them; the list is read only after a death around a creation.
        drawn = sorted(rng.choices(get_args(_Call), k=kills), key=get_args(_Call).index)
        for number, call in enumerate(drawn):
            if call == "list" and (number == 0 or drawn[number - 1] != "create"):
                drawn[number] = "create"
        for call in drawn:
            when: Literal["before", "after"] = rng.choice(("before", "after"))
            _work(place, server, report, BatchScript(polls=2, is_shuffled=True, holds=(call, when)), rng)
        _work(place, server, report, BatchScript(polls=1, is_shuffled=True), rng)
        report.requests, report.repeats_in_flight = len(server.requests), server.repeated
        report.violations += _judge(place, server)
    report.seconds = time.monotonic() - begun
    return report


def _work(place: Path, server: ModelServer, report: Report, script: BatchScript, rng: random.Random) -> None:
    """Begin or resume the run; kill it when the server holds a call, or at its end if none comes."""
    environment = environment_of(place, server, ENSEMBLE_RAY_RUNTIME="inline")
    words = ["run", "team.yaml", "--run-id", _RUN] if not report.runs else ["resume", _RUN]
    server.batch_script, held = script, server.held_batch_calls
    report.runs += 1
    with program([*COMMAND, *words], log=place / f"log-{report.runs}", env=environment, cwd=place) as running:
        running.until(
            lambda: running.process.poll() is not None or server.held_batch_calls > held,
            "a held call or the end",
            timeout_s=PATIENCE_S,
        )
        if running.process.poll() is None:
            time.sleep(rng.choice((0.0, rng.uniform(0, _LATEST_S))))
            kill_all([running.process.pid])
            running.process.wait(timeout=PATIENCE_S)
            report.strikes += 1
            report.story.append(f"killed {script.holds}")
        elif running.process.returncode != 0:
            report.violations.append(f"program {report.runs} ended with {running.process.returncode}: {running.text}")


def _judge(place: Path, server: ModelServer) -> Sequence[str]:
    """Each item has one row, one recorded answer and one request in a batch; only failed lines are asked again."""
    found: list[str] = []
    rows = [json.loads(line) for line in (place / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    if (written := {row["index"]: row["raw"] for row in rows}) != {n: f"<{n}>" for n in range(_ITEMS)}:
        found.append(f"the rows are {written}")
    if len(rows) != _ITEMS:
        found.append(f"{len(rows)} rows for {_ITEMS} items")
    lines = Counter(each.partition("/")[0] for batch in server.batches for each in batch.custom_ids)
    found += [f"{name} was part of {count} batches" for name, count in lines.items() if count > 1]
    asked = Counter(map(_item_of, server.requests))
    found += [
        f"item {number} was asked {count} times"
        for number, count in asked.items()
        if count != (2 if number < _FAILING else 1)
    ]
    facts = RunDirectory(place / "records", _RUN).facts()
    answers = Counter(fact.name for fact in facts if isinstance(fact.data, ModelAnswered))
    return [*found, *(f"{name} has {count} answers" for name, count in answers.items() if count > 1)]
