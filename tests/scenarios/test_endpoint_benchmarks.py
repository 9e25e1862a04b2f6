"""The measurements of an endpoint measure what they say, on endpoints without Ray. No figure is judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.endpoint import requests, soak
from benchmarks.endpoint.soak import Growth, growths_of

MB = 1_000_000


@pytest.mark.extended
def test_requests_by_hand_and_to_the_endpoint_are_told_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m benchmarks endpoint`: whole and streamed, each round; all have answers."""
    monkeypatch.setattr(requests, "_LEAST", 6)
    file = tmp_path / "endpoint.json"
    command = ["endpoint", "--only", "bare", "--only", "inline", "--clients", "3", "--rounds", "1", "--quiet"]
    assert main([*command, "--json", str(file)]) == 0
    assert "requests/s" in capsys.readouterr().out
    rounds = json.loads(file.read_text())["rounds"]
    assert [(each["place"], each["kind"], each["requests"]) for each in rounds] == [
        (place, kind, 6) for place in ("bare", "inline") for kind in ("chat", "stream")
    ]
    assert all(each["cpu_s"] > 0 and each["failed"] == 0 for each in rounds)
    assert [each["first_s"] is None for each in rounds] == [True, False, True, False]


@pytest.mark.extended
def test_every_process_is_told_with_its_memory_when_an_endpoint_is_soaked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m benchmarks soak`: completions, streams, runs and their events in turn, none of which fails."""
    monkeypatch.setattr(soak, "_LOOK_S", 0.05)
    file = tmp_path / "soak.json"
    main(["soak", "--place", "inline", "--minutes", "0.04", "--rate", "10", "--quiet", "--json", str(file)])
    assert "0 failed" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert len(found["growths"]) == 1
    assert sum(len(each["took_s"]) for each in found["parts"]) > 10


def looks(*sizes: dict[str, float]) -> list[Growth]:
    """What is told of processes that had these sizes, MB, one look after the other."""
    pids = {name: pid for pid, name in enumerate(dict.fromkeys(name for each in sizes for name in each))}
    return growths_of(
        [
            (float(at), {(pids[name], f"{name} {at}"): round(size * MB) for name, size in each.items()})
            for at, each in enumerate(sizes)
        ]
    )


def test_growth_of_the_last_third_is_told_and_warming_up_is_not() -> None:
    """A process that ended, or came late, is not judged."""
    first, *rest = looks(
        {"warms": 50, "grows": 100, "ended": 1},
        {"warms": 90, "grows": 102},
        {"warms": 100, "grows": 104},
        {"warms": 100, "grows": 106},
        {"warms": 100, "grows": 110},
        {"warms": 100, "grows": 112, "late": 1},
    )
    assert (first.name, first.before_bytes, first.after_bytes, first.is_flat) == ("grows 0", 105 * MB, 111 * MB, False)
    assert [(each.name, each.is_flat) for each in rest] == [("warms 0", True)]


@pytest.mark.parametrize(("before", "after", "is_flat"), [(10, 12, True), (10, 12.1, False), (200, 204, True)])
def test_what_counts_as_flat(before: float, after: float, is_flat: bool) -> None:  # noqa: FBT001  a parameter
    """Two megabytes, or two of a hundred."""
    growth = Growth(pid=1, name="a", before_bytes=before * MB, after_bytes=after * MB)
    assert growth.is_flat is is_flat
