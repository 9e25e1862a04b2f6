"""Fields of a dashboard, and the texts that refuse them."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest

from ensemble_ray import (
    Ensemble,
    EnsembleListener,
    OnTimeoutAction,
    ReviewHandler,
    Task,
    ValidationError,
    WebDashboard,
    WebReviewHandler,
    WebSocketStreamingListener,
)

_PORT = "port must be in the range 0-65535 (0 = OS-assigned ephemeral port); got: "


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, f"{_PORT}None"),
        ({"port": -1}, f"{_PORT}-1"),
        ({"port": 65536}, f"{_PORT}65536"),
        ({"port": None, "host": ""}, f"{_PORT}None"),
        ({"port": 1, "host": None}, "host must not be None or blank; got: None"),
        ({"port": 1, "host": " "}, "host must not be None or blank; got:  "),
        ({"port": 1, "review_timeout": None}, "review_timeout must not be None"),
        ({"port": 1, "review_timeout": -1}, "review_timeout must not be negative; got: -1"),
        (
            {"port": 1, "review_timeout": timedelta(seconds=-1)},
            "review_timeout must not be negative; got: -1 day, 23:59:59",
        ),
        ({"port": 1, "max_retained_runs": 0}, "max_retained_runs must be >= 1; got: 0"),
        (
            {"port": 1, "max_snapshot_iterations": -1},
            "max_snapshot_iterations must be >= 0 (0 disables iteration snapshots); got: -1",
        ),
    ],
)
def test_fields_that_are_refused(fields: dict[str, object], text: str) -> None:
    """S-WEB-2: in the order of the fields, the first mistake alone."""
    with pytest.raises(ValidationError) as refused:
        WebDashboard(**fields)  # type: ignore[arg-type]
    assert str(refused.value) == text


@pytest.mark.parametrize("port", [0, 7329, 65535])
def test_a_dashboard_on_a_port(port: int) -> None:
    """S-WEB-1: all else as usual; nothing is started."""
    dashboard = WebDashboard.on_port(port)
    assert (dashboard.port, dashboard.host) == (port, "localhost")
    assert (dashboard.is_running, dashboard.actual_port) == (False, -1)
    assert dashboard.review_handler.default_review.timeout == timedelta(minutes=5)
    assert dashboard.review_handler.default_review.on_timeout is OnTimeoutAction.CONTINUE
    assert dashboard.trace_exporter is None


def test_the_parts_of_a_dashboard() -> None:
    """S-WEB-4: for wiring by hand; the same objects on every access, before it is started."""
    dashboard = WebDashboard.on_port(0)
    assert isinstance(dashboard.streaming_listener, WebSocketStreamingListener)
    assert isinstance(dashboard.streaming_listener, EnsembleListener)
    assert isinstance(dashboard.review_handler, WebReviewHandler)
    assert dashboard.streaming_listener is dashboard.streaming_listener
    assert dashboard.review_handler is dashboard.review_handler
    dashboard.stop()  # no effect


def test_what_an_ensemble_takes_from_its_dashboard(tmp_path: Path) -> None:
    """S-WEB-10: the listener behind its own, and the parts that it has none of."""
    dashboard = WebDashboard(port=0, trace_export_dir=tmp_path)
    mine, handler = EnsembleListener(), ReviewHandler.auto_approve()
    task = Task.of("Write")
    bare = Ensemble(tasks=[task], listeners=[mine], dashboard=dashboard).with_dashboard_parts()
    assert list(bare.listeners) == [mine, dashboard.streaming_listener]
    assert bare.review_handler is dashboard.review_handler
    assert bare.trace_exporter is dashboard.trace_exporter
    assert list(bare.with_dashboard_parts().listeners) == [mine, dashboard.streaming_listener]

    def keep(_trace: object) -> None:
        """Take a trace."""

    own = Ensemble(tasks=[task], dashboard=dashboard, review_handler=handler, trace_exporter=keep)
    assert own.with_dashboard_parts().review_handler is handler
    assert own.with_dashboard_parts().trace_exporter is keep
    assert list(own.listeners) == []


def test_what_is_no_dashboard() -> None:
    """S-WEB-10."""
    with pytest.raises(ValidationError) as refused:
        Ensemble(tasks=[Task.of("Write")], dashboard=7329)  # type: ignore[arg-type]
    assert str(refused.value) == "Ensemble dashboard must be a WebDashboard, got: int"


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-WEB-18: it says which, and what installs them; nothing was started."""
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    dashboard = WebDashboard.on_port(0)
    with pytest.raises(ValidationError) as refused:
        dashboard.start()
    assert str(refused.value) == (
        "The dashboard needs packages that are not installed (uvicorn): pip install 'ensemble-ray[studio]'"
    )
    assert not dashboard.is_running
