"""Dashboards as servers: who starts and stops them, ports, pages that vanish, what fails beside a run."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from ensemble_ray import Ensemble, EnsembleError, EnsembleListener, TaskStartEvent, WebDashboard
from ensemble_ray.ports import DashboardRun
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, task
from tests.scenarios.pages import kinds, opened, url_of
from tests.scenarios.teams import until


class PortKeeper(EnsembleListener):
    """Notes where the dashboard is while a run goes on."""

    def __init__(self, dashboard: WebDashboard) -> None:
        self._dashboard = dashboard
        self.ports: list[int] = []

    def on_task_start(self, event: TaskStartEvent) -> None:
        self.ports.append(self._dashboard.actual_port)


def test_a_dashboard_that_is_there_for_a_run() -> None:
    """S-WEB-11, S-WEB-12, S-WEB-13: started when `run()` begins, stopped when it ends; one for several ensembles."""
    dashboard = WebDashboard.on_port(0)
    keeper = PortKeeper(dashboard)
    ensembles = [
        Ensemble(tasks=[task(name, agent(ScriptedModel("done")))], listeners=[keeper], dashboard=dashboard)
        for name in "ab"
    ]
    assert not dashboard.is_running
    for each in ensembles:
        each.run(runtime="inline")
        assert not dashboard.is_running
    assert len(keeper.ports) == 2
    assert -1 not in keeper.ports


def test_a_dashboard_of_runs_at_the_same_time() -> None:
    """S-WEB-12, S-WEB-13: it is started once, and stopped behind the last of them; pages can tell the runs apart."""
    dashboard = WebDashboard.on_port(0)
    keeper = PortKeeper(dashboard)

    def run(number: int) -> str:
        ensemble = Ensemble(
            tasks=[task(str(number), agent(ScriptedModel("done")))], listeners=[keeper], dashboard=dashboard
        )
        return ensemble.run(runtime="inline", run_id=f"run-{number}").raw

    dashboard.enter_run(DashboardRun(run_id="long"))  # of a run that goes on all the while
    with opened(dashboard) as page, ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(4))) == ["done"] * 4
        told = [each for _ in range(4) for each in page.until_end()]
    assert len(set(keeper.ports)) == 1
    for number in range(4):
        mine = kinds([each for each in told if each["run_id"] == f"run-{number}"])
        assert (mine[0], mine[1], mine[-1]) == ("ensemble_started", "task_started", "ensemble_completed")
    assert dashboard.is_running
    dashboard.leave_run()
    assert not dashboard.is_running


def test_a_dashboard_that_was_there_before() -> None:
    """S-WEB-3, S-WEB-12: it is left running; starting and stopping again has no effect; it can be started anew."""
    dashboard = WebDashboard.on_port(0)
    dashboard.start()
    port = dashboard.actual_port
    dashboard.start()
    assert dashboard.actual_port == port > 0
    Ensemble(tasks=[task("a", agent(ScriptedModel("done")))], dashboard=dashboard).run(runtime="inline")
    assert dashboard.is_running
    dashboard.stop()
    dashboard.stop()
    assert (dashboard.is_running, dashboard.actual_port) == (False, -1)
    with dashboard:
        assert httpx.get(f"{url_of(dashboard)}/api/status").json()["clients"] == 0
    assert not dashboard.is_running


def test_a_start_by_hand_while_a_run_goes_on() -> None:
    """S-WEB-12: then it is the program's, and the run's end does not stop it."""
    dashboard = WebDashboard.on_port(0)
    with dashboard:
        pass
    dashboard.enter_run(DashboardRun(run_id="long"))
    dashboard.start()
    dashboard.leave_run()
    assert dashboard.is_running
    dashboard.stop()


def test_a_port_that_is_taken() -> None:
    """S-WEB-17: `start()` says which port of which host; a run says it before anything is asked."""
    model = ScriptedModel("never")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        dashboard = WebDashboard.on_port(port)
        expected = f"The dashboard cannot listen on localhost:{port}: "
        with pytest.raises(EnsembleError, match=expected):
            dashboard.start()
        with pytest.raises(EnsembleError, match=expected):
            Ensemble(tasks=[task("a", agent(model))], dashboard=dashboard).run(runtime="inline")
    assert not model.calls
    assert not dashboard.is_running


def test_a_dashboard_that_stops_while_pages_are_there() -> None:
    """S-WEB-3, S-WEB-12: they get what was sent, then the end."""
    dashboard = WebDashboard.on_port(0)
    dashboard.start()
    with opened(dashboard) as page:
        Ensemble(tasks=[task("a", agent(ScriptedModel("done")))], dashboard=dashboard).run(runtime="inline")
        dashboard.stop()
        assert page.closed() == (1001, "The dashboard stops")
    assert page.heard[-1]["type"] == "ensemble_completed"


class Broken:
    """A value that nothing can be made of."""

    def __str__(self) -> str:
        raise ValueError("no text")


def test_failures_of_the_dashboard_concern_no_run(caplog: pytest.LogCaptureFixture) -> None:
    """S-WEB-16, S-WEB-46: a page that vanished, a message that cannot be made, a server that was stopped meanwhile."""
    dashboard = WebDashboard.on_port(0)
    keeper = PortKeeper(dashboard)

    def stop(_event: TaskStartEvent) -> None:
        """Stop it behind the run's back."""
        dashboard.stop()

    ensemble = Ensemble(
        tasks=[task("a", agent(ScriptedModel(otherwise="done")))],
        listeners=[keeper],
        on_task_start=stop,
        dashboard=dashboard,
    )
    assert ensemble.run(runtime="inline").raw == "done"
    with dashboard:
        with opened(dashboard) as page:
            page._connection.socket.close()
            ensemble.replace(on_task_start=None).run(runtime="inline")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ensemble_ray.studio.dashboard.hub.encode", json.loads)  # which takes no messages
            assert ensemble.replace(on_task_start=None).run(runtime="inline").raw == "done"
    assert "could not be sent to the dashboard" in caplog.text


def test_pages_that_are_gone_are_forgotten() -> None:
    """S-WEB-46: who comes next is the only one."""
    with WebDashboard.on_port(0) as dashboard:
        for _ in range(3):
            with opened(dashboard):
                pass
        status = f"{url_of(dashboard)}/api/status"
        until(lambda: httpx.get(status).json()["clients"] == 0, "the pages to be forgotten")
