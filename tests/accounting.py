"""What a run of the tests costs, by directory: `pytest -p tests.accounting`, as `make test` does.

Counts the Ray workers, Ray instances and Python programs that tests start, and samples the processor time of all of them. The counts
do not depend on the machine: the run fails when one has grown by more than 5 % above `tests/starts.json`. `TEST_TIER` names the run there;
`TEST_ACCOUNTS_UPDATE=1` writes the counts of this run to the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_BASELINE = _ROOT / "tests" / "starts.json"
_FILE, _TIER, _UPDATE = "TEST_ACCOUNTS", "TEST_TIER", "TEST_ACCOUNTS_UPDATE"
_KINDS = ("workers", "instances", "programs")
#: Growth of a count that is an error, as a factor, and what a small count may grow by.
_GROWTH, _SLACK = 1.05, 3
#: Processor time of a whole run above which a warning is printed, s.
_MOST_PROCESSOR_S = 900.0
_SAMPLE_S = 0.5
#: Exit status of a run that failed for its counts alone: there are no tests to run again.
_HAS_GROWN = 20
_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessorTime(threading.Thread):
    """Samples the processor time of everything below this process, by the child of it that all of a group descend from."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="processor-time")
        #: when, the child's process id, seconds spent since the last sample
        self.samples: list[tuple[int, int, float]] = []
        self._seen: dict[int, float] = {}
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self._sample()

    def stop(self) -> None:
        """Sample once more, and end."""
        self._ended.set()
        self.join()
        self._sample()

    def _sample(self) -> None:
        now, spent = time.time_ns(), Counter[int]()
        found = list(_descendants())
        for pid, child, seconds in found:
            spent[child] += seconds - self._seen.get(pid, 0.0)
        self._seen = {pid: seconds for pid, _, seconds in found}
        self.samples += [(now, child, seconds) for child, seconds in spent.items()]


def _descendants() -> Iterator[tuple[int, int, float]]:
    """Yield, of this process and each one below it: its id, the child of this process that it descends from, its processor seconds."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                line = (entry / "stat").read_text(encoding="utf-8", errors="replace")
                fields = line.rpartition(")")[2].split()  # behind the program's name
                pid = int(entry.name)
                parents[pid] = int(fields[1])
                seconds[pid] = (int(fields[11]) + int(fields[12])) / _TICKS
    here = os.getpid()
    children = {here: here}
    for pid in sorted(parents):  # parents have smaller ids, except after a wrap of ids
        parent = parents[pid]
        if parent in children:
            children[pid] = pid if parent == here else children[parent]
        if pid in children:
            yield pid, children[pid], seconds[pid]


def _machine_seconds() -> float:
    """Return the processor time that this machine has spent."""
    user, nice, system, _, _, interrupts, soft, *_ = (
        int(field) for field in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + interrupts + soft) / _TICKS


def _directory(path: Path) -> str:
    parts = path.relative_to(_ROOT).parts
    return "/".join(parts[:2]) if parts[0] == "tests" else parts[0]


class Accounts:
    """The plugin: the same in the process that controls the run and in each that runs tests."""

    def __init__(self, file: Path, *, is_worker: bool) -> None:
        self._file = file
        self._worker = os.environ.get("PYTEST_XDIST_WORKER", "-")
        self._directory = ""
        # A thread in a process that runs tests would disturb those that measure memory.
        self._time = None if is_worker else ProcessorTime()
        self._before = _machine_seconds()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        if self._time is not None:
            self._time.start()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        directory = _directory(item.path)
        if directory != self._directory:
            self._directory = directory
            with self._file.open("a", encoding="utf-8") as file:
                file.write(f"enter {time.time_ns()} {self._worker} {directory} {os.getpid()}\n")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._time is not None:
            self._time.stop()
            if os.environ.get(_TIER) and self._compare() and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = _HAS_GROWN

    @pytest.hookimpl(trylast=True)  # behind the slowest tests: logs of long runs are often cut before their end
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        spent, starts = self._read()
        terminalreporter.section("what the tests cost")
        terminalreporter.write_line(f"{'directory':28}{'processor s':>12}" + "".join(f"{kind:>11}" for kind in _KINDS))
        for directory in sorted({*spent, *starts}, key=lambda each: -spent[each]):
            counts = starts.get(directory, Counter())
            cells = "".join(f"{counts[kind]:>11}" for kind in _KINDS)
            terminalreporter.write_line(f"{directory:28}{spent[directory]:>12.1f}{cells}")
        cells = "".join(f"{sum(counts[kind] for counts in starts.values()):>11}" for kind in _KINDS)
        terminalreporter.write_line(f"{'in all':28}{sum(spent.values()):>12.1f}{cells}")
        machine = _machine_seconds() - self._before
        terminalreporter.write_line(f"{'this machine meanwhile':28}{machine:>12.1f}")
        if machine > _MOST_PROCESSOR_S:
            terminalreporter.write_line(f"WARNING: more than {_MOST_PROCESSOR_S:.0f} s of processor time", yellow=True)
        starting = Counter(line.split()[5] for line in self._lines() if " instances " in line)
        for test, count in sorted(starting.items()):
            terminalreporter.write_line(f"starts {count} instances of Ray: {test}")
        for line in self._compare() if os.environ.get(_TIER) else ():
            terminalreporter.write_line(line, red=True)

    def _lines(self) -> list[str]:
        return self._file.read_text(encoding="utf-8").splitlines()

    def _read(self) -> tuple[Counter[str], dict[str, Counter[str]]]:
        """Return processor seconds by directory, and starts by directory and kind."""
        spent: Counter[str] = Counter()
        starts: dict[str, Counter[str]] = {}
        entered: dict[str, str] = {}
        seen: set[tuple[str, str]] = set()
        entries = [line.split()[:5] for line in self._lines()]
        workers = {pid: worker for event, _, worker, _, pid in entries if event == "enter"}
        if self._time is not None:
            entries += [["spent", str(at), workers.get(str(pid), "-"), str(s), ""] for at, pid, s in self._time.samples]
        for event, _, worker, what, pid in sorted(entries, key=lambda entry: int(entry[1])):
            directory = entered.get(worker, "(collection)")
            if event == "enter":
                entered[worker] = what
            elif event == "spent":
                spent[directory] += float(what)
            elif (what, pid) not in seen:  # one process may run several interpreters in turn
                seen.add((what, pid))
                starts.setdefault(directory, Counter())[what] += 1
        return spent, starts

    def _compare(self) -> list[str]:
        """Return a line for each count that has grown; with `TEST_ACCOUNTS_UPDATE`, write the counts instead."""
        tier, (_, starts) = os.environ[_TIER], self._read()
        known = json.loads(_BASELINE.read_text(encoding="utf-8")) if _BASELINE.exists() else {}
        if os.environ.get(_UPDATE):
            known[tier] = {directory: dict(sorted(counts.items())) for directory, counts in sorted(starts.items())}
            _BASELINE.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
            return []
        if tier not in known:
            return []
        return [
            f"{directory} starts {counts[kind]} {kind}; tests/starts.json allows {allowed:.0f}. Start fewer, or raise the count there"
            for directory, counts in starts.items()
            for kind in _KINDS
            if counts[kind] > (allowed := _most(known.get(tier, {}).get(directory, {}).get(kind, 0)))
        ]


def _most(count: int) -> float:
    return max(count * _GROWTH, count + _SLACK)


def pytest_configure(config: pytest.Config) -> None:
    """Have everything that is started from now on be counted."""
    is_worker = hasattr(config, "workerinput")
    if not is_worker:
        handle, name = tempfile.mkstemp(prefix="accounts-")
        os.close(handle)
        os.environ[_FILE] = name
        path = [str(Path(__file__).parent / "counting"), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    config.pluginmanager.register(Accounts(Path(os.environ[_FILE]), is_worker=is_worker), "accounts")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the file of this run."""
    if not hasattr(config, "workerinput"):
        Path(os.environ.pop(_FILE)).unlink(missing_ok=True)
