"""The demo for real: the embedded model reads real text, on Ray. No network, no key."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ensemble_ray.llm.local import find_weights
from ensemble_ray.record.runs import read_facts
from tests.command_line import ROOT, call_command, environment_of, run_command
from tests.processes import own_directory, own_environment

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(
        find_weights() is None or importlib.util.find_spec("xllamacpp") is None,
        reason="the embedded model is not installed: ensemble-ray models install",
    ),
]

#: Generous: two cores read while other tests run.
PATIENCE_S = 900.0


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for one test: records, texts, Ray's files."""
    with own_directory() as directory:
        yield directory


def _call(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Proxies are none of a demo's business: whatever went out would fail here.
    nowhere = "http://127.0.0.1:9"
    environment = own_environment(
        place, PYTHONPATH=str(ROOT), HTTP_PROXY=nowhere, HTTPS_PROXY=nowhere, NO_PROXY="127.0.0.1"
    )
    return run_command(place, environment, *arguments, timeout_s=PATIENCE_S)


def test_files_are_read_on_ray(place: Path) -> None:
    """What `make demo FILES=...` runs: progress, a digest, and a record that a command shows.

    Any text, one that is hard on the model's window among them; nothing of it is refused. The topics that are read without files:
    `tests/ensemble_ray/cli/demo/test_passages.py`.
    """
    (place / "tides.md").write_text("Tides are the rise and fall of the sea, pulled by the moon.\n", encoding="utf-8")
    (place / "digits.txt").write_text("0123456789 " * 400 + "\u6f6e\u6c50" * 800, encoding="utf-8")
    ended = _call(place, "demo", "tides.md", "digits.txt", "--chunks", "2")
    assert ended.returncode == 0, ended.stderr
    digest, _, rest = ended.stdout.partition("\nNotes\n")
    notes, _, tree = rest.partition("\nTree\n")
    assert digest.startswith("Digest\n\n")
    assert len(digest.split()) > 10
    shown_notes = [line.partition(":")[0] for line in notes.split("\n") if line.startswith("- ")]
    assert shown_notes == ["- tides.md", "- digits.txt, part 1"]
    assert "on the ray runtime" in ended.stderr
    assert "3/3  final-reduce (Editor)" in ended.stderr
    assert [" ".join(line.split()[:4]) for line in tree.split("\n") if line] == [
        "level 0 2 maps",
        "level 1 1 final-reduce",
    ]
    assert "3 model calls" in ended.stderr
    run_id = ended.stderr.split()[-1]
    # Every prompt fits a slot of the embedded model with room for its answer.
    asked = [fact for fact in read_facts(run_id, place / "records") if fact.kind == "model"]
    assert sorted(fact.name.partition("#")[0] for fact in asked) == ["final-reduce", "map-0", "map-1"]
    assert all(0 < int(str(fact.data.to_data()["input_tokens"])) < 1800 for fact in asked)
    shown = call_command(place, environment_of(place), "trace", run_id, "--task", "final-reduce", "--json")
    (task,) = json.loads(shown.stdout)["task_traces"]
    assert task["agent_role"] == "Editor"
    assert len(task["llm_interactions"]) == 1
