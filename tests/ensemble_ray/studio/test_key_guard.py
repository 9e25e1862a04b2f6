"""Which runs a key of some teams sees."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from ensemble_ray import RunState
from ensemble_ray.access.admission import Right, new_key
from ensemble_ray.record.stores import RecordedRun
from ensemble_ray.studio.http_server import _KeyHolder

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("team", "origin", "is_seen"),
    [
        ("letters", "/srv/letters.yaml", True),
        ("letters.yaml", "/srv/letters.yaml", True),
        ("/srv/letters.yaml", "/srv/letters.yaml", True),
        ("shop:letters", "shop:letters", True),
        ("letters", "/srv/orders.yaml", False),
        ("letters", "", False),
    ],
)
def test_key_sees_runs_by_where_their_team_came_from(team: str, origin: str, *, is_seen: bool) -> None:
    """S-STU-187: a `name` of the team is no part of it: whoever runs a team chooses its name, and a program's run has no origin."""
    _, key = new_key("ann", rights=frozenset({Right.READ}), teams=[team], rate=None, created_at=NOW)
    run = RecordedRun(run_id="letters", created_at=NOW, origin=origin, state=RunState.COMPLETED, location="x")
    assert _KeyHolder(key).may_see(run) is is_seen
