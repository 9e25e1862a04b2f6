"""The benchmarks measure what they say: the same calls on all sides, counted by the server. No figure is judged here."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.cached_prompts import fan_out, manager, map_items, sent_in, share_of, tool_loop
from benchmarks.counts import BASELINE, compare, versions
from benchmarks.harness import Conditions, Measured, WrongCountError, chosen_variants, measure
from benchmarks.jobs import chain
from benchmarks.jobs import scale as scale_jobs
from benchmarks.million.model import REDUCE, ItemCounter
from benchmarks.process_tree import memory_of
from benchmarks.report import lines_of, overheads_of
from benchmarks.rows import OVERHEADS, ROWS, Overhead, Row, Target
from benchmarks.scale import KINDS, line_of
from benchmarks.scenarios import SCENARIOS, Scenario
from benchmarks.setting import Setting
from ensemble_ray import ChatMessage
from ensemble_ray.testing import ModelServer, ServedRequest
from tests.processes import own_directory, own_environment

ROOT = Path(__file__).resolve().parents[2]
#: Measured rounds, and the one before them that is not.
ROUNDS = 1
#: Environment variable by which all processes of a measurement are known.
MARK = f"MEASURED_BY_{os.getpid()}"


def scenario_named(name: str) -> Scenario:
    """One of the scenarios."""
    return next(scenario for scenario in SCENARIOS if scenario.name == name)


def marked_processes(value: str) -> list[str]:
    """Ids of the processes that inherited that mark, whoever their parent is by now.

    Not those below this process: where other tests have a cluster, it starts workers at any time.
    """
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it is somebody else's, or gone
            if entry.name.isdigit() and f"{MARK}={value}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(entry.name)
    return found


def silent(_text: str) -> None:
    """No progress."""


@pytest.mark.extended
def test_a_table_and_a_file_are_written_when_it_runs_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m benchmarks --only chain` prints both tables and keeps the figures, round by round.

    Each round of each variant makes exactly the calls that the work needs, gives one figure, and leaves nothing: in one process for
    all rounds, and in one for each, whose start or memory is measured.
    """
    requests = {"chain": 10, "cold-start": 1, "memory": 10}
    variants = {"chain": {"floor", "inline", "inline-recorded"}}
    monkeypatch.setenv(MARK, "command")
    file = tmp_path / "results" / "latest.json"
    command = ["--rounds", str(ROUNDS), "--size", "10", "--no-ray", "--quiet", "--json", str(file)]

    assert main([*command, *(word for name in requests for word in ("--only", name))]) == 0

    assert not marked_processes("command")
    printed = capsys.readouterr().out
    assert "inline/floor" in printed
    assert "What recording costs" in printed
    written = json.loads(file.read_text())
    for name, requests_of_a_round in requests.items():
        results = [each for each in written["measured"] if each["scenario"] == name]
        assert {each["variant"] for each in results} == variants.get(name, {"floor", "inline"})
        for each in results:
            assert each["requests"] == (1 + ROUNDS) * requests_of_a_round
            assert len(each["values"]) == ROUNDS
            assert all(value > 0 for value in each["values"])
    assert {line["scenario"] for line in written["lines"]} == set(requests)
    assert {(cost["scenario"], cost["runtime"]) for cost in written["overheads"]} == {("chain", "inline")}
    assert {"python", "ray", "openai", "cpus", "load before", "rounds"} <= written["environment"].keys()


@pytest.mark.parametrize("name", ["fan-out-0ms", "remembering", "approved", "reuse-1k"])
def test_jobs_make_the_calls_that_the_work_needs_when_they_run_in_one_process(name: str) -> None:
    """As `measure` counts them, which starts a process for each variant."""
    scenario = scenario_named(name).resize(10)
    for variant in chosen_variants(scenario, Conditions(with_ray=False)):
        module, _, job = scenario.variants[variant].partition(":")
        make = getattr(importlib.import_module(f"benchmarks.jobs.{module}"), job)
        durability = "effects" if variant in scenario.recorded else "off"
        with ModelServer() as server:
            setting = Setting(
                url=server.base_url, runtime="inline", size=10, durability=durability, extra=dict(scenario.extra)
            )
            with make(setting) as one_round:
                before = len(server.requests)  # an earlier run may be a part of the job
                assert one_round() > 0
            assert (variant, len(server.requests) - before) == (variant, scenario.requests_of(variant))


def test_a_measurement_is_refused_when_a_variant_makes_other_calls_than_the_work_needs() -> None:
    """A figure of a variant that does less, or more, would be worth nothing."""
    wrong = replace(scenario_named("chain"), variants={"floor": "chain:floor"}, requests_more=1)

    with pytest.raises(WrongCountError, match="floor made 10 requests in a round, needed are 11"):
        measure(wrong, Conditions(rounds=ROUNDS, size=10, with_ray=False, durability="off", progress=silent))


@pytest.mark.extended
def test_costs_of_each_task_are_told_by_size_when_scale_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m benchmarks scale`: each kind at each of its sizes; what the smallest costs is what others are compared with."""
    file = tmp_path / "scale.json"
    kinds = ["source parallel", "run map-reduce by tokens"]
    only = [word for kind in kinds for word in ("--only", kind)]

    command = ["scale", "--tasks", "5", "20", "--items", "60", "--rounds", "1", "--quiet", "--json", str(file), *only]
    assert main(command) == 0

    told = capsys.readouterr().out
    assert "ratios to the smallest size" in told
    assert "<= 1.3" in told
    lines = json.loads(file.read_text())["lines"]
    assert [(line["kind"], line["size"]) for line in lines] == [
        ("source parallel", 5),
        ("source parallel", 20),
        ("run map-reduce by tokens", 60),
    ]
    assert all(line["cpu_us_each"] > 0 and line["bytes_each"] > 0 for line in lines)
    assert [line["cpu_ratio"] for line in lines if line["size"] in {5, 60}] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("cpu_ratio", "bytes_ratio", "is_flat"), [(1.2, 1.3, True), (1.4, 1.0, False), (0.9, 1.4, False)]
)
def test_verdict_is_told_when_a_size_is_compared_with_the_smallest(
    *, cpu_ratio: float, bytes_ratio: float, is_flat: bool
) -> None:
    """A cost is flat where neither time nor memory of a task grows by more than 1.3; the smallest size is what is compared with."""
    smallest = line_of({"size": 10, "cpu_s": [1.0, 2.0], "collector_s": 0.1, "peak_bytes": 100}, None)
    larger = {"size": 100, "cpu_s": [10 * cpu_ratio], "collector_s": 1.0, "peak_bytes": round(1000 * bytes_ratio)}
    assert smallest["holds"] is None
    assert line_of(larger, smallest)["holds"] is is_flat


@pytest.mark.extended
def test_every_kind_that_scale_offers_can_be_measured() -> None:
    """The command names them without importing what is measured; each is, with twenty tasks or items."""
    assert tuple(scale_jobs.KINDS) == KINDS
    for kind in KINDS:
        scale_jobs.KINDS[kind](20)()


@pytest.mark.parametrize(
    ("conditions", "variants"),
    [
        (Conditions(), ["floor", "inline", "ray", "inline-recorded", "ray-recorded", "hand"]),
        (Conditions(with_ray=False), ["floor", "inline", "inline-recorded"]),
        (Conditions(durability="off"), ["floor", "inline", "ray", "hand"]),
        (Conditions(durability="off", with_ray=False), ["floor", "inline"]),
    ],
)
def test_variants_are_left_out_when_they_are_not_wanted(conditions: Conditions, variants: list[str]) -> None:
    """Without the recorded ones the targets are left, which hold for runs that record nothing."""
    assert list(chosen_variants(scenario_named("chain"), conditions)) == variants


@pytest.mark.extended
@pytest.mark.parametrize(("durability", "records"), [("off", 0), ("run", 1), ("effects", 1)])
def test_a_round_leaves_a_record_when_its_durability_says_so(
    durability: str, records: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the table of what recording costs would compare a thing with itself."""
    monkeypatch.setenv("ENSEMBLE_RAY_HOME", str(tmp_path))
    with ModelServer() as server:
        setting = Setting(url=server.base_url, runtime="inline", size=2, durability=durability, extra={})
        with chain.team(setting) as one_round:
            one_round()

    assert len(list(tmp_path.glob("runs/*/record.sqlite"))) == records


@pytest.mark.parametrize(
    ("allowed", "figure", "holds"),
    [
        (Target(kind="ratio", value=1.25), 0.0024, True),
        (Target(kind="ratio", value=1.25), 0.0026, False),
        (Target(kind="more_s", value=0.001), 0.0029, True),
        (Target(kind="more_s", value=0.001), 0.0031, False),
        (None, 1.0, None),
    ],
)
def test_what_recording_costs_is_judged_by_the_runs_that_record_nothing(
    allowed: Target | None,
    figure: float,
    holds: bool | None,  # noqa: FBT001  a parameter
) -> None:
    """Round by round: the difference per step, or the ratio; what is only shown is not judged."""
    overhead = Overhead(
        scenario="some", title="Some", unit="ms", off="inline", recorded="inline-recorded", allowed=allowed
    )
    results = [
        Measured(scenario="some", variant="inline", values=[0.002, 0.002, 0.002]),
        Measured(scenario="some", variant="inline-recorded", values=[figure, figure, 40.0]),
    ]

    (cost,) = overheads_of([overhead], results)

    assert cost.recorded.holds is holds
    assert cost.more == pytest.approx((figure - 0.002) * 1e3)


@pytest.mark.parametrize(
    ("target", "figure", "holds"),
    [
        (Target(kind="ratio", value=0.5), 0.9, True),
        (Target(kind="ratio", value=0.5), 1.1, False),
        (Target(kind="more_s", value=0.7), 2.6, True),
        (Target(kind="more_s", value=0.7), 2.8, False),
        (Target(kind="at_most_s", value=0.25), 0.2, True),
        (Target(kind="at_most_s", value=0.25), 0.3, False),
    ],
)
def test_a_target_is_judged_by_its_kind_when_a_line_is_made(target: Target, figure: float, holds: bool) -> None:  # noqa: FBT001  a parameter
    """Ratios to the floor, seconds on top of it, seconds in all."""
    row = Row(scenario="some", title="Some", unit="s", ray=None, target_inline=target)
    results = [
        Measured(scenario="some", variant="floor", values=[2.0, 2.0, 2.0]),
        Measured(scenario="some", variant="inline", values=[figure, figure, 40.0]),
    ]

    (line,) = lines_of([row], results)

    assert line.inline is not None
    assert line.inline.holds is holds


def test_every_row_names_variants_that_are_measured_when_the_table_is_made() -> None:
    """A misspelt variant would leave its cell empty without a word."""
    for row in ROWS:
        known = set(scenario_named(row.scenario).variants)
        shown = {name for name in (row.floor, row.inline, row.ray, *(name for name, _ in row.references)) if name}
        assert shown <= known
    for overhead in OVERHEADS:
        assert {overhead.off, overhead.recorded} <= set(scenario_named(overhead.scenario).variants)
        assert overhead.recorded in scenario_named(overhead.scenario).recorded


def test_memory_of_a_living_process_is_found_when_it_is_asked_for() -> None:
    """This very process is there, and a shared page never counts more than once in its share."""
    memory = memory_of(os.getpid())

    assert memory.processes >= 1
    assert 0 < memory.pss_bytes <= memory.rss_bytes


@pytest.mark.extended
def test_each_step_has_its_figures_when_start_up_is_measured() -> None:
    """From the import to an endpoint, in one program: seconds, processor seconds, memory and processes."""
    with own_directory() as directory:
        command = [sys.executable, "-m", "benchmarks", "start-up", "--agents", "1", "--settle-s", "0"]
        done = subprocess.run(  # noqa: S603  our own program
            command, env=own_environment(directory), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
        )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if re.search(r"( +-?[\d.]+){4}$", line)]
    assert [re.split(r" {2,}", line)[0] for line in lines] == [
        "import ensemble_ray", "first run, inline", "first run, local Ray", "further run", "run with 1 more agents",
        "run with the same agents", "an endpoint: Ray Serve, one replica",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("found", "has_same_versions", "rows"),
    [
        ({"chain: own calls": 103.0}, False, {"chain: own calls": True}),
        ({"chain: own calls": 104.0}, False, {"chain: own calls": False}),
        ({"chain: calls": 104.0}, True, {}),
        ({"import: modules": 104.0}, True, {"import: modules": False}),
        ({"import: modules": 104.0}, False, {}),
        ({"new": 1.0}, True, {}),
    ],
)
def test_a_count_holds_when_it_is_at_most_three_percent_above_the_baseline(
    *, found: dict[str, float], has_same_versions: bool, rows: dict[str, bool]
) -> None:
    """Figures that depend on libraries, or on how many answers arrive together, are not judged."""
    baseline = {"chain: own calls": 100.0, "chain: calls": 100.0, "import: modules": 100.0}
    assert compare(found, baseline, has_same_versions=has_same_versions) == rows


@pytest.mark.extended
def test_counts_are_compared_with_the_baseline_when_they_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m benchmarks check`: it counts in fresh processes; every name that it prints has a baseline."""
    main(["check", "--only", "chain", "--only", "import"])
    told = capsys.readouterr().out
    assert "chain: own calls per task" in told
    assert "import: own modules" in told
    assert set(json.loads(BASELINE.read_text())["versions"]) == set(versions())


def test_stable_parts_of_prompts_come_first() -> None:
    """S-PRC-20, S-PRC-22, `python -m benchmarks cached-prompts`: by far the most of each run can come from a cache."""
    runs = [sent_in(make(size)) for make, size in ((map_items, 40), (fan_out, 40), (tool_loop, 20), (manager, 10))]
    shares = [[share_of(sent, cache, marks_results=True).part for cache in ("off", "breakpoints")] for sent in runs]
    least = ((0.85, 0.87), (0.93, 0.95), (0.88, 0.9), (0.83, 0.85))
    for found, expected in zip(shares, least, strict=True):
        assert found[0] >= expected[0]
        assert found[1] >= expected[1]


def test_share_is_that_of_equal_beginnings() -> None:
    """`python -m benchmarks cached-prompts`: from 1,024 tokens on, in steps of 128; with breakpoints where they are."""
    system, other = (ChatMessage("system", text * 6000) for text in "ab")
    ask = [([each, ChatMessage("user", text)], ()) for each, text in ((system, "x"), (system, "y"), (other, "x"))]
    assert share_of(ask[:2], "off").cached == 6000 // 4 // 128 * 128
    assert share_of(ask[:2], "breakpoints").cached == (6000 + len("[]") + len("\nsystem: ")) // 4
    assert [share_of(ask[1:], cache).cached for cache in ("off", "breakpoints")] == [0, 0]
    short = [([ChatMessage("system", "a" * 4000), ChatMessage("user", text)], ()) for text in "xy"]
    assert [share_of(short, cache).cached for cache in ("off", "breakpoints")] == [0, 0]


def test_repeated_requests_and_those_for_recorded_items_are_counted_apart(tmp_path: Path) -> None:
    """`python -m benchmarks million`: the endpoint counts by item, and leaves out the prompts of reduces."""
    recorded = tmp_path / "recorded"
    recorded.write_bytes(bytes(3))
    counter = ItemCounter()
    counter.begin(recorded, 3)
    texts = ("item 0 is", "item 1 is", "item 1 is", f"{REDUCE}: item 0 is")
    asked = [
        ServedRequest(
            "/v1/chat/completions", {}, json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
        )
        for text in texts
    ]
    for request in asked:
        counter.answer(request)
    with recorded.open("r+b") as file:
        file.write(b"\1")
    counter.answer(asked[0])
    assert counter.counts() == {"requests": 5, "items": 2, "repeated": 2, "after_record": 1}


def test_a_machine_without_network_namespaces_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m benchmarks million` measures nothing there, and says why."""
    monkeypatch.setattr("shutil.which", lambda _name: None)
    assert main(["million", "--items", "10", "--json", str(tmp_path / "million.json")]) == 1
    assert "Not measured. Network namespaces need Linux and the program 'ip'" in capsys.readouterr().err
    assert not (tmp_path / "million.json").exists()
