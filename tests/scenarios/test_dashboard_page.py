"""The page on a dashboard's port: which runs it shows, and what may be done with them there."""

from __future__ import annotations

from typing import Any

import httpx

from ensemble_ray import Ensemble, Review, Runtime, WebDashboard
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, task
from tests.scenarios.pages import Background, opened, url_of


def asked(dashboard: WebDashboard, path: str) -> Any:
    """Return what the page is told."""
    answer = httpx.get(f"{url_of(dashboard)}/api/studio/{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def done(dashboard: WebDashboard, path: str, **data: object) -> httpx.Response:
    """Ask for something to be done, as the page does."""
    return httpx.post(f"{url_of(dashboard)}/api/studio/{path}", json=data, headers={"origin": url_of(dashboard)})


def test_the_page_of_a_dashboard() -> None:
    """S-WEB-20, S-WEB-75: static files, with a policy that lets nothing else in; beside the dashboard's own routes."""
    with WebDashboard.on_port(0) as dashboard:
        page = httpx.get(f"{url_of(dashboard)}/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert httpx.get(f"{url_of(dashboard)}/nothing.js").status_code == 404
        assert asked(dashboard, "info")["actions"] == ["cancel", "resume", "fork", "decide", "delete"]
        assert asked(dashboard, "runs")["runs"] == []


def test_runs_that_a_dashboard_has_seen(runtime: Runtime) -> None:
    """S-WEB-64: these alone, from their records; also after they ended, and none that is recorded nowhere."""
    dashboard = WebDashboard.on_port(0)

    def run(run_id: str, **fields: Any) -> None:
        tasks = [task("a", agent(ScriptedModel("done")))]
        Ensemble(tasks=tasks, **fields).run(runtime=runtime, run_id=run_id)

    with dashboard:
        run("stranger")
        run("mine", dashboard=dashboard)
        run("passing", dashboard=dashboard, durability="off")
        (row,) = asked(dashboard, "runs")["runs"]
        assert (row["run_id"], row["status"]) == ("mine", "completed")
        (step,) = asked(dashboard, "runs/mine/steps")["steps"]
        assert (step["title"], step["status"]) == ("a", "completed")
        for unseen in ("stranger", "passing"):
            assert httpx.get(f"{url_of(dashboard)}/api/studio/runs/{unseen}").status_code == 404
            assert done(dashboard, f"runs/{unseen}/cancel").status_code == 404
        with opened(dashboard) as page:
            assert {each["run_id"] for each in page.hello["snapshot_trace"]} == {"mine", "passing"}


def test_reviews_on_the_page(inline_runtime: Runtime) -> None:
    """S-WEB-65: gates at which this process asks may be decided there, as on the WebSocket; the first decision counts."""
    tasks = [task(name, agent(ScriptedModel("done")), review=Review(prompt=f"{name}?", timeout=0)) for name in "ab"]
    dashboard = WebDashboard.on_port(0)
    ensemble = Ensemble(tasks=tasks, dashboard=dashboard)
    with dashboard, opened(dashboard) as page:
        running = Background(lambda: ensemble.run(runtime=inline_runtime, run_id="reviewed"))
        gate = page.until("review_requested")["review_id"]
        (review,) = asked(dashboard, "reviews")["reviews"]
        assert (review["gate_id"], review["prompt"], review["decidable"]) == (gate, "a?", True)
        others = {"origin": "https://evil.example"}
        refused = httpx.post(
            f"{url_of(dashboard)}/api/studio/reviews/reviewed/{gate}", json={"decision": "exit"}, headers=others
        )
        assert refused.status_code == 403
        decided = done(dashboard, f"reviews/reviewed/{gate}", decision="edit", text="edited")
        assert decided.status_code == 200
        assert (decided.json()["decision"], decided.json()["text"]) == ("edit", "edited")
        assert page.until("review_decided")["decision"] == "edit"
        page.until("review_requested")
        assert done(dashboard, f"reviews/reviewed/{gate}", decision="exit").status_code == 409
        (second,) = [each for each in asked(dashboard, "runs/reviewed")["reviews"] if each["decision"] is None]
        assert done(dashboard, f"reviews/reviewed/{second['gate_id']}", decision="approve").status_code == 200
        assert [each.raw for each in running.result().task_outputs] == ["edited", "done"]


def test_a_run_is_cancelled_on_the_page() -> None:
    """S-WEB-65: as from anywhere else, by its record."""
    dashboard = WebDashboard(port=0, review_timeout=0)
    tasks = [task("a", agent(ScriptedModel("done")))]
    ensemble = Ensemble(tasks=tasks, dashboard=dashboard, review_policy="after_every_task")
    with dashboard, opened(dashboard) as page:
        running = Background(lambda: ensemble.run(runtime="inline", run_id="cancelled"))
        page.until("review_requested")
        assert done(dashboard, "runs/cancelled/cancel").status_code == 202
        assert running.result().exit_reason == "cancelled"
        assert page.until_end()[-1]["exit_reason"] == "cancelled"
