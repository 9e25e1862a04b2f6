"""Traces on their way out."""

import logging
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from ensemble_ray import CaptureMode, ExecutionTrace, JsonTraceExporter
from ensemble_ray.record.view.exporters import effective_exporter, export_safely
from ensemble_ray.values.value import utc_of


def _trace(ensemble_id: str = "run-1") -> ExecutionTrace:
    return ExecutionTrace(
        ensemble_id=ensemble_id,
        workflow="sequential",
        started_at=utc_of(1),
        completed_at=utc_of(2),
        total_duration=timedelta(seconds=1),
    )


def test_each_run_gets_its_file_in_directory_mode(tmp_path: Path) -> None:
    """S-TRC-63: the folder is made."""
    exporter = JsonTraceExporter(tmp_path / "a" / "traces")
    exporter.export(_trace("run-1"))
    exporter.export(_trace("run-2"))
    assert sorted(path.name for path in (tmp_path / "a" / "traces").iterdir()) == ["run-1.json", "run-2.json"]
    text = (tmp_path / "a" / "traces" / "run-1.json").read_text(encoding="utf-8")
    assert ExecutionTrace.model_validate_json(text) == _trace("run-1")


def test_file_is_overwritten_in_file_mode(tmp_path: Path) -> None:
    """S-TRC-63: that very file."""
    exporter = JsonTraceExporter(str(tmp_path / "last.json"), directory_mode=False)
    exporter.export(_trace("run-1"))
    exporter.export(_trace("run-2"))
    assert [path.name for path in tmp_path.iterdir()] == ["last.json"]
    assert ExecutionTrace.model_validate_json((tmp_path / "last.json").read_text()).ensemble_id == "run-2"


def test_warning_is_logged_when_the_file_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """S-TRC-63: nothing is raised."""
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        JsonTraceExporter(tmp_path / "file").export(_trace())
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(tmp_path / "file" / "run-1.json") in record.getMessage()


@pytest.mark.parametrize("ensemble_id", ["../out", "/etc/passwd", "..", ".hidden", "a/b"])
def test_file_stays_in_its_folder_whatever_the_id(tmp_path: Path, ensemble_id: str) -> None:
    """S-TRC-63: ids may be chosen by hand."""
    JsonTraceExporter(tmp_path / "traces").export(_trace(ensemble_id))
    (path,) = tmp_path.rglob("*.json")
    assert path.parent == tmp_path / "traces"
    assert not path.name.startswith(".")


def test_full_mode_exports_to_traces_when_nothing_is_chosen() -> None:
    """S-CAP-15: only then, and only there."""
    exporter = effective_exporter(CaptureMode.FULL, None)
    assert isinstance(exporter, JsonTraceExporter)
    assert (exporter.path, exporter.directory_mode) == (Path("./traces/"), True)
    assert effective_exporter(CaptureMode.STANDARD, None) is None
    assert effective_exporter(CaptureMode.OFF, None) is None


@pytest.mark.parametrize("mode", CaptureMode)
def test_chosen_exporter_is_the_only_one(mode: CaptureMode) -> None:
    """S-CAP-15, S-CAP-17: whatever the mode."""
    chosen = print
    assert effective_exporter(mode, chosen) is chosen


async def test_exporters_of_both_kinds_are_called_once() -> None:
    """S-TRC-60, S-TRC-61: callables and objects, sync and async; sync ones beside the loop."""
    seen: list[tuple[str, ExecutionTrace, bool]] = []

    class Exporter:
        def export(self, trace: ExecutionTrace) -> None:
            seen.append(("object", trace, threading.current_thread() is threading.main_thread()))

    async def later(trace: ExecutionTrace) -> None:
        seen.append(("async", trace, threading.current_thread() is threading.main_thread()))

    for exporter in (Exporter(), later, lambda trace: seen.append(("callable", trace, False))):
        await export_safely(exporter, _trace())
    assert seen == [("object", _trace(), False), ("async", _trace(), True), ("callable", _trace(), False)]


async def test_warning_is_logged_when_an_exporter_raises(caplog: pytest.LogCaptureFixture) -> None:
    """S-TRC-62: the run's result stands."""

    class Exporter:
        def export(self, trace: ExecutionTrace) -> None:
            raise ValueError("no network")

    with caplog.at_level(logging.WARNING):
        await export_safely(Exporter(), _trace())
    assert [record.getMessage() for record in caplog.records] == ["Trace exporter Exporter failed: no network"]
    assert caplog.records[0].levelname == "WARNING"


async def test_interrupt_passes_through() -> None:
    """S-TRC-62: only errors are swallowed, never Ctrl-C."""

    async def stop(trace: ExecutionTrace) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        await export_safely(stop, _trace())
