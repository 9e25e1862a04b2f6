"""A command as a job: what is sent along, what is shown, how it ends."""

from __future__ import annotations

import io
import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from ensemble_ray import EnsembleError, ValidationError
from ensemble_ray.cli.commands.submit import ClusterCommand, confirm_leaving, ships, wanted_environment
from ensemble_ray.ports import JobEnd


class Server:
    """A job server whose jobs have ended before they are looked at."""

    address = "http://head:8265"

    def __init__(self, *log: str, result: str | None = None, end: JobEnd) -> None:
        self._log = log
        self._result = result
        self._end = end
        self.entrypoint = ""
        self.stopped: list[str] = []

    def submit(
        self,
        entrypoint: str,
        *,
        job_id: str,
        working_dir: Path | None = None,
        pip: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Take a job."""
        self.entrypoint = entrypoint

    def follow(self, job_id: str, show: Callable[[str], None]) -> JobEnd:
        """Show its log."""
        for text in self._log:
            show(text)
        if self._result is not None:
            mark = re.match(r"ENSEMBLE_RAY_RESULT_MARK=(\S+) ", self.entrypoint)
            assert mark is not None
            show(f"{mark[1]}{json.dumps(self._result)}\n")
        return self._end

    def stop(self, job_id: str) -> None:
        """End it."""
        self.stopped.append(job_id)


class Interrupted(Server):
    """One whose job goes on until it is stopped, in front of somebody who types Ctrl-C."""

    def __init__(self) -> None:
        super().__init__(end=ended(None, is_stopped=True))
        self._is_stopped = threading.Event()

    def follow(self, job_id: str, show: Callable[[str], None]) -> JobEnd:
        """Have the main thread interrupted, as a terminal does."""
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        self._is_stopped.wait(60)
        return self._end

    def stop(self, job_id: str) -> None:
        """End it."""
        super().stop(job_id)
        self._is_stopped.set()


def ended(exit_code: int | None = 0, *, is_stopped: bool = False) -> JobEnd:
    """An end."""
    return JobEnd(exit_code=exit_code, is_stopped=is_stopped, message="its node is gone")


def command(*words: str) -> ClusterCommand:
    """A command that nobody interrupts."""
    return ClusterCommand(words=words, job_id="j", on_interrupt=lambda: False)


def test_the_result_is_printed_and_all_else_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """S-CLU-13, S-CLU-14: with the exit code of the command there; words travel as they are."""
    server = Server("0.1 s  sta", "rted\n", result="two\r\nlines", end=ended(3))
    assert command("run", "a team.yaml", "--input", "x=$HOME").carry_out(server) == 3
    printed, said = capsys.readouterr()
    assert (printed, said) == ("two\r\nlines\n", "0.1 s  started\n")
    assert server.entrypoint.endswith(" exec python -m ensemble_ray.cli run 'a team.yaml' --input 'x=$HOME'")


@pytest.mark.parametrize(("end", "code"), [(ended(0), 0), (ended(-9), 1), (ended(None, is_stopped=True), 130)])
def test_the_exit_code_is_that_of_the_command(end: JobEnd, code: int) -> None:
    """S-CLU-15: a signal is a failure, a job that was stopped an interruption."""
    assert command("run").carry_out(Server(end=end)) == code


def test_a_job_that_did_not_run_is_an_error_with_the_clusters_words() -> None:
    """S-CLU-15."""
    with pytest.raises(EnsembleError, match="Job j did not run to its end: its node is gone"):
        command("run").carry_out(Server(end=ended(None)))


def test_a_cluster_without_the_package_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    """S-CLU-15."""
    text = "python: No module named ensemble_ray.cli; 'ensemble_ray' is missing\n"
    assert command("run").carry_out(Server(text, end=ended(1))) == 1
    assert "What to do: install ensemble-ray on the cluster's nodes" in capsys.readouterr().err


@pytest.mark.parametrize(("is_to_stop", "stopped"), [(True, ["j"]), (False, [])])
def test_ctrl_c_stops_the_job_or_leaves_it(*, is_to_stop: bool, stopped: list[str]) -> None:
    """S-CLU-16, S-CLU-17: as the one says who is asked; a job that is stopped is watched to its end."""
    server = Interrupted()
    asked = ClusterCommand(words=("run",), job_id="j", on_interrupt=lambda: is_to_stop)
    assert (asked.carry_out(server), server.stopped) == (130, stopped)


@pytest.mark.parametrize(
    ("typed", "is_stopped"), [("\n", False), ("y\n", False), ("n\n", True), ("", False), (None, True)]
)
def test_leaving_the_run_is_the_default(
    typed: str | None,
    is_stopped: bool,  # noqa: FBT001  a parameter of the test
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """S-CLU-16, S-CLU-17: also where the terminal is closed; None: Ctrl-C again."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def readline(self, _size: int | None = -1, /) -> str:
            if typed is None:
                raise KeyboardInterrupt
            return typed

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert confirm_leaving("Watch it: attach r") is is_stopped
    said = capsys.readouterr().err
    assert "Leave the run going on the cluster? [Y/n]" in said
    assert ("Watch it: attach r" in said) is not is_stopped


def test_without_a_terminal_nobody_is_asked_and_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """S-CLU-16."""
    assert not confirm_leaving("Watch it: attach r")
    assert capsys.readouterr().err == "Watch it: attach r\n"


def test_the_directory_of_the_file_is_sent_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-CLU-11: or the one that is named, or the current one for a module."""
    (tmp_path / "teams").mkdir()
    file = tmp_path / "teams" / "team.yaml"
    file.touch()
    monkeypatch.chdir(tmp_path)
    assert ships("teams/team.yaml", None) == (file.parent, "team.yaml")
    assert ships(str(file), tmp_path) == (tmp_path, "teams/team.yaml")
    assert ships("shop:team", None) == (tmp_path, "shop:team")
    for wrong in (("none.yaml", None), (str(file), tmp_path / "none"), (str(tmp_path / "a.yaml"), file.parent)):
        (tmp_path / "a.yaml").touch()
        with pytest.raises(ValidationError):
            ships(*wrong)


def test_variables_are_given_or_taken_from_here() -> None:
    """S-CLU-12: one that is not set here is an error."""
    assert wanted_environment(["A=1=2", "B", "C="], {"B": "b"}) == {"A": "1=2", "B": "b", "C": ""}
    with pytest.raises(ValidationError, match="--env D: it is not set here"):
        wanted_environment(["D"], {})
