"""`ensemble-ray demo --crash` as a user calls it, with a protocol server in place of the embedded model."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ensemble_ray.testing import ModelServer, Reply
from tests.processes import own_directory, own_environment

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]
#: Generous: four processes start on two cores while other things run.
PATIENCE_S = 180.0
#: Longer than the test.
_FOR_EVER_S = 3600.0


def test_the_demo_is_killed_half_way_and_asks_nothing_again() -> None:
    """S-DUR-3, S-DUR-35, S-DUR-37, S-DUR-50, S-DUR-51: the endpoint's own count is what the record says."""
    with own_directory() as place, ModelServer(lambda asked: _note(asked.number)) as server:
        (place / "tides.md").write_text(
            "\n\n".join(f"Passage {n}. {'Words. ' * 200}" for n in range(8)), encoding="utf-8"
        )
        ended = subprocess.run(  # noqa: S603  our own command
            [
                *(sys.executable, "-m", "ensemble_ray.cli", "demo", "--crash", "--run-id", "crashed"),
                *("--runtime", "inline", "--llm", "openai:m", "--chunks", "8", "tides.md"),
            ],
            env=own_environment(place, PYTHONPATH=str(ROOT), OPENAI_BASE_URL=server.base_url, OPENAI_API_KEY="sk-1"),
            cwd=place,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        counts = Counter(server.requests_by_key().values())
    assert ended.returncode == 0, ended.stderr
    told = ended.stdout + ended.stderr
    assert "Killed with SIGKILL" in told
    assert "interrupted" in next(line for line in told.splitlines() if line.startswith("crashed "))
    rows = [line.split() for line in ended.stdout.splitlines()]
    before, after = next((int(row[1]), int(row[2])) for row in rows if row[:1] == ["answered"])
    assert (before, after) == (4, 5), "eight notes and their digest"
    assert ["asked", "again", "though", "answered", "0"] in rows
    # Nine different requests; what was answered before the kill came once, what was on its way then came twice.
    assert sorted(counts.elements()) == [1, 1, 1, 1, 1, 2, 2, 2, 2]


def _note(number: int) -> Reply:
    """All eight are asked before one is answered, and the first four are still on their way when the demo is killed."""
    return Reply(text="It says a thing.", latency_s=_FOR_EVER_S if number < 4 else 0.0)
