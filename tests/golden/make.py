"""Makes the golden records with the library as it is: `python -m tests.golden.make [--store postgres] [CASE...]`.

Records that are there are facts of an earlier version and stay: `--overwrite` replaces those of the named cases, and
`--observe` only what the library says of them. With `--store postgres` nothing is written: the same runs are recorded in a
database, and their facts compared with those that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.golden.cases import RUNTIMES, Case, cases_of
from tests.golden.facts import difference
from tests.golden.model import HOLD, MARKS
from tests.golden.observing import observe
from tests.golden.records import Record, read_postgres, read_sqlite
from tests.golden.running import mark_of
from tests.golden.store import PROJECT, ROOT, load, path_of, write_observed
from tests.processes import own_directory, own_environment, program

#: How long what was written last takes to be committed, s; the library says 0.2.
_COMMITTED_S = 1.0

#: Teams that come by a point, where there are several.
_PASSED_BY: Mapping[str, Sequence[str]] = {
    "pay": ("hierarchical", "nested", "tools", "strict_tools"),
    "stamp": ("tools", "strict_tools"),
    "Payer|pay|1": ("hierarchical", "nested"),
    "Mapper|map 4|0": ("mapping", "chunked", "adaptive", "pipelined"),
    "Mapper|map 7|0": ("chunked", "adaptive", "pipelined"),
}
#: What stands in the place of stack traces.
_SHORT = "Traceback (most recent call last):\n  ...\n"
#: Reads the record of a case as it stands.
_Reader = Callable[[Case], Record]


def _rounds(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Give cases that are killed or cancelled, so that no two of a round are of one team or pass each other's points."""
    left = list(cases)
    while left:
        chosen: list[Case] = []
        for case in left:
            if case.team not in {each.team for each in chosen} and not _is_passed(case, chosen):
                chosen.append(case)
        yield chosen
        left = [case for case in left if case not in chosen]


def _is_passed(case: Case, chosen: Sequence[Case]) -> bool:
    """Return whether one of them would stay at another one's point."""
    return any(
        case.team in _PASSED_BY.get(each.point, ()) or each.team in _PASSED_BY.get(case.point, ()) for each in chosen
    )


def _record(
    runtime: str, cases: Sequence[Case], directory: Path, environment: dict[str, str], read: _Reader
) -> Iterator[tuple[Case, Record]]:
    """Make the runs of the cases, and give their records as soon as they are whole."""

    def run(step: str, chosen: Sequence[Case], until: str = "", **variables: str) -> None:
        command = [sys.executable, "-m", "tests.golden.running", step, runtime, *(each.name for each in chosen)]
        log = directory / f"{step}-{chosen[0].name}.log"
        with program(command, log=log, env={**environment, **variables}, cwd=ROOT) as running:
            if until:
                running.until((Path(until) / "all").exists, "all points")
                time.sleep(_COMMITTED_S)
            elif running.process.wait(timeout=600):
                raise RuntimeError(running.text)

    ended = [case for case in cases if case.how == "ended"]
    if ended:
        run("complete", ended)
    stopped = [case for case in cases if case.how in {"killed", "cancelled"}]
    for chosen in _rounds(stopped):
        marks = directory / f"marks-{chosen[0].name}"
        marks.mkdir()
        points = ";".join(case.point for case in chosen)
        run("begin", chosen, str(marks), **{HOLD: points, MARKS: str(marks)})
        assert all((marks / mark_of(case.point)).exists() for case in chosen)
        yield from ((case, read(case)) for case in chosen)
    yield from ((case, read(case)) for case in ended)
    again = [case for case in cases if case.how in {"resumed", "forked"}]
    if again:
        run("complete", again)
        yield from ((case, read(case)) for case in again)


def _without_places(record: Record) -> Record:
    """Return it with short stack traces: they name the folders of this machine, and are long.

    Raises:
        ValueError: something else names one.
    """
    bodies = dict(record.bodies)

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: _SHORT if name == "stack_trace" and each else short(each) for name, each in value.items()}
        return [short(each) for each in value] if isinstance(value, list) else value

    facts = [(*fact[:6], short(fact[6])) for fact in record.facts]
    text = json.dumps(facts)
    found = replace(record, facts=facts, bodies={digest: body for digest, body in bodies.items() if digest in text})
    found = Record.of_text(found.to_text().replace(str(ROOT), PROJECT))
    for place in (str(ROOT), sys.prefix, sys.base_prefix, tempfile.gettempdir(), socket.gethostname()):
        if len(place) > 1 and place in found.to_text().replace(str(Path("/usr/bin")), ""):
            raise ValueError(f"{record.run_id} names {place}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Make, or compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.make", description=__doc__)
    parser.add_argument("cases", nargs="*", help="names of cases, such as tools-killed; default: all")
    parser.add_argument("--runtime", choices=RUNTIMES)
    parser.add_argument("--store", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--observe", action="store_true", help="only what the library says of the records")
    given = parser.parse_args(arguments)
    for runtime in (given.runtime,) if given.runtime else RUNTIMES:
        cases = [case for case in cases_of(runtime) if not given.cases or case.name in given.cases]
        if given.observe:
            for case in cases:
                write_observed(case, observe(case))
            continue
        there = [case.name for case in cases if path_of(case).exists()]
        if there and not given.overwrite and given.store == "sqlite":
            parser.error(f"there are records already of {', '.join(there)}; --overwrite makes them anew")
        needed = {f"{case.team}-{case.of}" for case in cases if case.of}
        made = [case for case in cases_of(runtime) if case in cases or case.name in needed]
        (_compare if given.store == "postgres" else _make)(runtime, made, cases)


def _make(runtime: str, made: Sequence[Case], kept: Sequence[Case]) -> None:
    with own_directory() as directory:
        home = directory / "records"
        environment = own_environment(directory, PYTHONPATH=str(ROOT))
        for case, record in _record(
            runtime,
            made,
            directory,
            environment,
            lambda case: read_sqlite(home, case.run_id, home / "files" / case.run_id),
        ):
            if case not in kept:
                continue
            path = path_of(case)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_without_places(record).to_text(), encoding="utf-8")
            print(f"{runtime}/{case.name}: {len(record.facts)} facts", flush=True)  # noqa: T201  a program of its own
    for case in kept:
        write_observed(case, observe(case))


def _compare(runtime: str, made: Sequence[Case], kept: Sequence[Case]) -> None:
    """Record the same runs in a database, and print where their facts are others."""
    from tests.postgres_server import PostgresServer

    server = PostgresServer()
    url = server.new_database()
    try:
        with own_directory() as directory, server.connection(url) as connection:
            environment = own_environment(directory, PYTHONPATH=str(ROOT), ENSEMBLE_RAY_STORE=url)
            for case, record in _record(
                runtime, made, directory, environment, lambda case: read_postgres(connection, case.run_id)
            ):
                found = difference(load(case), record) if case in kept else ""
                print(f"{runtime}/{case.name}: {found or 'the same facts'}", flush=True)  # noqa: T201  as above
    finally:
        server.close()


if __name__ == "__main__":
    os.environ["TMPDIR"] = tempfile.gettempdir()
    main()
