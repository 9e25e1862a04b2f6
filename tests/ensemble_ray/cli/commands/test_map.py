"""`ensemble-ray map`: what goes together, estimates, rows, exit codes, and that a run can be made again from its record."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ensemble_ray import MapEnsemble, MapReduceEnsemble, ValidationError
from ensemble_ray.cli.map_team import map_team, recorded_map
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.identity.definition import map_reduce_run_data
from ensemble_ray.teamfile import load_source
from ensemble_ray.teamfile.fields import GroupPrompt, ItemPrompt
from tests.command_line import Call

#: A team without a model: its tasks are functions.
TEAM = """
map_reduce:
  items: [unused]
  map: {description: "Shout {text}", handler: "shouting:shout"}
  reduce: {description: Join, handler: "shouting:join"}
  chunk_size: 2
"""
HANDLERS = """
def shout(context):
    if "bad" in context.description:
        raise OSError("too loud")
    return context.description.upper()

def join(context):
    return " + ".join(output.raw for output in context.context_outputs)
"""


@pytest.fixture
def items(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of items, beside a team that shouts them."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-a-test")
    monkeypatch.setenv("ENSEMBLE_RAY_HOME", str(folder / "home"))
    (folder / "shouting.py").write_text(HANDLERS, encoding="utf-8")
    (folder / "team.yaml").write_text(TEAM, encoding="utf-8")
    (folder / "map.yaml").write_text(TEAM.partition("  reduce")[0], encoding="utf-8")
    rows = [{"id": number, "text": f"t{number}"} for number in range(5)]
    (folder / "items.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return "items.jsonl"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["items.jsonl"], "name the prompt for each item: --prompt TEXT, or --ensemble FILE (one of them)"),
        (["items.jsonl", "-p", "x", "--ensemble", "team.yaml"], "(one of them)"),
        (["-p", "x", "-o", "o.jsonl"], "there are no items: name a file, - for standard input, or --retry-dead FILE"),
        (["items.jsonl", "--retry-dead", "d.jsonl", "-p", "x"], "--retry-dead replaces ITEMS"),
        (["items.jsonl", "-p", "x"], "name a file for the answers: --output FILE.jsonl, or bring them together"),
        (["items.jsonl", "--ensemble", "team.yaml", "--reduce", "x"], "--reduce needs --prompt"),
        (["items.jsonl", "-p", "x", "-o", "o.jsonl", "--chunk-size", "3"], "--chunk-size: of use only with --reduce"),
        (
            ["items.jsonl", "-p", "x", "-o", "o.jsonl", "--input-rate", "3"],
            "--input-rate and --output-rate are given both",
        ),
        (["items.jsonl", "-p", "x", "-o", "o.txt"], "results must be the path of a .jsonl or .parquet file"),
        (["items.jsonl", "-p", "x", "--reduce", "y", "--chunk-size", "1"], "chunk_size must be >= 2, got: 1"),
        (["items.jsonl", "-p", "x", "--reduce", "y", "--ordered"], "ordered needs mode='pipelined'"),
        (["nothing.jsonl", "-p", "x", "-o", "o.jsonl"], "cannot be read: No such file or directory"),
        (["team.yaml", "-p", "x", "-o", "o.jsonl"], "a path that ends in .jsonl, .csv or .parquet"),
        (["items.jsonl", "-p", "x", "-o", "o.jsonl", "--max-tokens", "0"], "max_tokens must be > 0"),
        (["empty.jsonl", "-p", "x", "-o", "o.jsonl"], "items must not be None or empty"),
        (["items.jsonl", "-p", "Sum {txt}", "-o", "o.jsonl"], "item 0: it has no field 'txt'"),
        (["items.jsonl", "-p", "x", "-o", "old.jsonl"], "exists and has 1 rows"),
        (["items.jsonl", "-p", "x", "-o", "o.jsonl", "--delimiter", ";"], "--delimiter: of use only with a .csv file"),
        (
            ["--retry-dead", "d.jsonl", "-p", "x", "-o", "o.jsonl", "--encoding", "utf-8"],
            "--encoding: of use only with",
        ),
        (
            ["old.txt", "-p", "x", "-o", "o.jsonl", "--encoding", "utf-8"],
            "the header cannot be read, column 2: not UTF-8",
        ),
        (["items.jsonl", "--ensemble", "plain.yaml"], "has no 'map_reduce': run it with ensemble-ray run"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_recorded(
    call: Call, folder: Path, items: str, arguments: list[str], told: str
) -> None:
    """S-MR-180, S-MR-181, S-MR-182: exit code 2, and no run."""
    (folder / "empty.jsonl").write_text("\n\n", encoding="utf-8")
    (folder / "old.jsonl").write_text('{"index": 0}\n', encoding="utf-8")
    (folder / "old.txt").write_bytes(b"a,\xe9\n1,2\n")
    (folder / "plain.yaml").write_text("llm: local\ntasks: {a: {description: d}}\n", encoding="utf-8")
    called = call("map", *arguments)
    assert told in called.said
    assert (called.code, called.printed) == (2, "")
    assert not (folder / "home" / "runs").exists()
    assert not (folder / "o.jsonl").exists()


def test_rows_and_the_text_of_the_reduce_are_given(call: Call, folder: Path, items: str) -> None:
    """S-MR-180, S-MR-187: rows in the file, the text on standard output, what happened on standard error."""
    called = call("map", items, "--ensemble", "team.yaml", "-o", "rows.jsonl", "--run-id", "all")
    assert (called.code, called.printed) == (0, "SHOUT T0 + SHOUT T1 + SHOUT T2 + SHOUT T3 + SHOUT T4\n")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert sorted((row["index"], row["item"]["id"], row["raw"]) for row in rows) == [
        (number, number, f"SHOUT T{number}") for number in range(5)
    ]
    assert "rows.jsonl has 5 rows" in called.said
    assert "5/5 items, 6 reduced in" in called.said
    assert "Show it: " in called.said


def test_rows_have_the_columns_that_the_command_names(call: Call, folder: Path, items: str) -> None:
    """S-MR-216, S-MR-218, S-MR-220: also where a team file names others; the record has them."""
    (folder / "map.yaml").write_text(
        (folder / "map.yaml").read_text(encoding="utf-8") + "  results: own.jsonl\n  columns: [id, raw]\n",
        encoding="utf-8",
    )
    called = call("map", items, "--ensemble", "map.yaml", "--limit", "1", "--runtime", "inline")
    assert called.code == 0, called.said
    assert json.loads((folder / "own.jsonl").read_text(encoding="utf-8")) == {"index": 0, "id": 0, "raw": "SHOUT T0"}
    options = ("--output", "other.jsonl", "--columns", "raw, agent_role", "--key", "id")
    call("map", items, "--ensemble", "map.yaml", "--limit", "1", "--runtime", "inline", *options, "--run-id", "named")
    row = json.loads((folder / "other.jsonl").read_text(encoding="utf-8"))
    assert list(row) == ["index", "id", "raw", "agent_role"]
    again = map_team({"items": items, "prompt": "x", "output": "o.jsonl", "columns": "raw,id", "key": "id"})
    made = recorded_map(**again.source.overrides)
    assert (made.columns, made.key) == (("raw", "id"), "id")


def test_failed_items_are_told_and_tried_again(call: Call, folder: Path, items: str) -> None:
    """S-MR-187, S-MR-180: exit code 3, the first failures, a file of dead letters, and a run over those alone."""
    (folder / items).write_text('{"text": "ok"}\n{"text": "bad"}\n{"txt": 1}\nnonsense\n', encoding="utf-8")
    command = ("map", items, "--ensemble", "map.yaml", "-o", "rows.jsonl", "--on-item-error", "collect")
    called = call(*command, "--dead-letters", "dead.jsonl", "--json")
    assert called.code == 3
    told = json.loads(called.printed)
    assert told["items"] == {"done": 1, "failed": 3}
    assert [each["index"] for each in told["failed_items"]] == [1, 2, 3]
    # Each reason once: as it failed, or in the end where no task did.
    assert (called.said.count("map-1: "), called.said.count("item 1 failed")) == (1, 0)
    assert (called.said.count("item 2 failed: "), called.said.count("item 3 failed: ")) == (1, 1)
    assert "dead.jsonl; again, and only those: ensemble-ray map --retry-dead" in called.said
    letters = [json.loads(line) for line in (folder / "dead.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {each["index"]: each["item"] for each in letters} == {1: {"text": "bad"}, 2: {"txt": 1}, 3: "nonsense"}
    (folder / "shouting.py").write_text(HANDLERS.replace('"bad"', '"worse"'), encoding="utf-8")
    del sys.modules["shouting"]
    again = call(
        "map", "--retry-dead", "dead.jsonl", "--ensemble", "map.yaml", "-o", "more.jsonl", "--on-item-error", "skip"
    )
    assert again.code == 3, "the others fail again"
    (row,) = (folder / "more.jsonl").read_text(encoding="utf-8").splitlines()
    assert (json.loads(row)["index"], json.loads(row)["raw"]) == (1, "SHOUT BAD")


def test_failed_items_are_named_only_when_there_are_some(call: Call, folder: Path, items: str) -> None:
    """S-MR-188: the file of dead letters is made in any case, and stays empty."""
    called = call("map", items, "--ensemble", "map.yaml", "-o", "rows.jsonl", "--dead-letters", "dead.jsonl")
    assert called.code == 0
    assert (folder / "dead.jsonl").read_bytes() == b""
    assert "Failed items" not in called.said


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_finished_run_gives_its_rows_and_text_again(call: Call, folder: Path, items: str, kind: str) -> None:
    """S-MR-189, S-SET-39: also into a file that was removed; nothing is done again, and nothing is written twice."""
    command = ("map", items, "--ensemble", "team.yaml", "-o", f"rows.{kind}", "--run-id", "all")
    first = call(*command)
    rows = _rows_of(folder / f"rows.{kind}")
    assert first.code == 0
    assert len(rows) == 5
    recorded = call("trace", "all", "--json").printed
    for is_removed in (False, True):
        if is_removed:
            (folder / f"rows.{kind}").unlink()
        again = call(*command)
        assert (again.code, again.printed) == (0, first.printed), again.said
        assert _rows_of(folder / f"rows.{kind}") == rows
        assert "11 tasks from the record" in again.said
        assert "5/5 items, 6 reduced in" in again.said
    assert call("trace", "all", "--json").printed == recorded


def test_a_finished_run_gives_its_failed_items_again(call: Call, folder: Path, items: str) -> None:
    """S-MR-189, S-MR-187: the same exit code, one letter for each."""
    (folder / items).write_text('{"text": "ok"}\n{"text": "bad"}\nnonsense\n', encoding="utf-8")
    command = ("map", items, "--ensemble", "map.yaml", "-o", "rows.jsonl", "--on-item-error", "collect")
    command = (*command, "--dead-letters", "dead.jsonl", "--run-id", "some")
    assert call(*command).code == 3
    again = call(*command)
    assert again.code == 3
    assert "1/3 items, 2 failed" in again.said
    assert len((folder / "dead.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    assert len((folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()) == 1


def test_rows_of_another_run_are_not_mixed_with_those_of_a_finished_one(call: Call, folder: Path, items: str) -> None:
    """S-MR-189, S-MR-130: under the same id with another file, which has rows."""
    command = ("map", items, "--ensemble", "map.yaml", "--run-id", "all", "-o")
    assert call(*command, "rows.jsonl").code == 0
    (folder / "old.jsonl").write_text('{"index": 0}\n', encoding="utf-8")
    called = call(*command, "old.jsonl")
    assert called.code == 2
    assert "exists and has 1 rows" in called.said


def _rows_of(path: Path) -> list[tuple[int, str]]:
    """Index and output of each row, in item order."""
    if path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        rows = parquet.read_table(path).to_pylist()
    else:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted((row["index"], row["raw"]) for row in rows)


def test_the_run_fails_when_a_failed_item_means_so(call: Call, folder: Path, items: str) -> None:
    """S-MR-187, S-MR-181: exit code 1, and how it goes on."""
    (folder / items).write_text('{"text": "ok"}\n{"text": "bad"}\n', encoding="utf-8")
    called = call(
        "map", items, "--ensemble", "map.yaml", "-o", "rows.jsonl", "--on-item-error", "fail", "--run-id", "f"
    )
    assert called.code == 1
    assert "too loud" in called.said
    assert "resume f" in called.said
    called = call("resume", "f", "--json")
    data = json.loads(called.printed)
    assert (called.code, data["run_id"], data["state"]) == (1, "f", "failed")  # S-DUR-155
    assert "too loud" in data["error"]["message"]


def test_only_the_first_items_are_mapped_when_there_is_a_limit(call: Call, folder: Path, items: str) -> None:
    """S-MR-181: to try what a prompt gives."""
    called = call("map", items, "--ensemble", "map.yaml", "-o", "rows.jsonl", "--limit", "2")
    assert called.code == 0
    assert "2/2 items in" in called.said
    assert len((folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()) == 2


def test_a_recorded_command_is_made_again_from_any_directory(
    folder: Path, items: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-MR-184, S-MR-173: the same definition, paths from the root on; numbers and flags as they were."""
    options: dict[str, object] = {
        "items": items, "prompt": "Sum {text}", "reduce": "Join", "token_budget": 90, "mode": "pipelined",
        "ordered": True, "concurrency": 3, "replicas": 2, "on_item_error": "skip", "output": "o.jsonl",
        "dead_letters": "d.jsonl", "model": "openai:m", "input_rate": 0.15, "output_rate": 0.6, "limit": 4,
    }  # fmt: skip
    made = map_team(options)
    monkeypatch.chdir("/")
    again = load_source(made.source)
    assert isinstance(made, MapReduceEnsemble)
    assert isinstance(again, MapReduceEnsemble)
    assert isinstance(again.map_task, ItemPrompt)
    assert isinstance(again.reduce_task, GroupPrompt)
    assert (again.budget, again.mode, again.ordered, again.max_concurrency, again.replicas) == (
        90,
        "pipelined",
        True,
        3,
        2,
    )
    assert (again.results, again.dead_letters) == (folder / "o.jsonl", folder / "d.jsonl")
    costs = again.cost_configuration
    assert costs is not None
    assert [float(rate) for rate in (costs.input_token_rate, costs.output_token_rate)] == [1.5e-07, 6e-07]
    first, second = (
        map_reduce_run_data(each, workflow="w", inputs={}, items=each.item_source.identity) for each in (made, again)
    )
    assert first == second
    assert again.source == made.source
    other = map_team({**options, "items": folder / items, "prompt": "Sum up {text}", "output": folder / "o.jsonl"})
    assert map_reduce_run_data(other, workflow="w", inputs={}, items={}).digest != first.digest


@pytest.mark.parametrize(("written", "delimiter"), [(";", ";"), ("\\t", "\t"), ("tab", "\t")])
def test_rows_of_a_csv_file_are_mapped_as_the_command_says_it_is_written(
    call: Call, folder: Path, written: str, delimiter: str
) -> None:
    """S-MR-181, S-MR-196: delimiter and encoding; a recorded command has them."""
    rows = [["id", "text, long"], ["7", "a|bé"]]
    (folder / "rows.txt").write_bytes("".join(f"{delimiter.join(row)}\n" for row in rows).encode("cp1252"))
    options = ["--delimiter", written, "--encoding", "cp1252"]
    called = call("map", "rows.txt", "-p", "Say {id}", "-o", "o.jsonl", "--dry-run", "--json", *options)
    assert called.code == 0, called.said
    assert json.loads(called.printed)["items"] == 1
    made = map_team({"items": "rows.txt", "prompt": "Say {id}", "delimiter": written, "encoding": "cp1252"})
    for team in (made, load_source(made.source)):
        assert isinstance(team, MapEnsemble)
        reader = team.item_source.reader()
        pulled = run_blocking(reader.next(1))
        assert list(pulled.items) == [(0, dict(zip(*rows, strict=True)))]
        run_blocking(reader.close())


def test_a_run_of_the_command_is_resumed(call: Call, folder: Path, items: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-MR-184: by its record alone; what was done is not done again."""
    assert call("map", items, "--ensemble", "team.yaml", "-o", "rows.jsonl", "--run-id", "done").code == 0
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    called = call("resume", "done")
    assert (called.code, called.printed.startswith("SHOUT T0 + ")) == (0, True), called.said


def test_options_of_a_file_are_replaced(folder: Path, items: str) -> None:
    """S-MR-180, S-MR-181: items, groups and files of the command win."""
    team = map_team(
        {"ensemble": "team.yaml", "items": items, "token_budget": 70, "concurrency": 2, "output": "o.jsonl"}
    )
    assert isinstance(team, MapReduceEnsemble)
    assert (team.budget, team.chunk_size, team.max_concurrency) == (70, None, 2)
    assert team.results == folder / "o.jsonl"
    assert team.item_source.identity["kind"] == "jsonl"
    plain = recorded_map(ensemble="map.yaml")
    assert isinstance(plain, MapEnsemble)
    assert plain.item_source.count == 1
    with pytest.raises(ValidationError, match="--mode: of use only with --reduce"):
        recorded_map(ensemble="map.yaml", mode="pipelined")


def test_a_dry_run_shows_the_prompt_and_what_it_would_cost(call: Call, folder: Path, items: str) -> None:
    """S-MR-183: no model, no record, no file."""
    command = ("map", items, "-p", "Sum {text}", "--dry-run", "--input-rate", "1000", "--output-rate", "1")
    called = call(*command)
    assert called.code == 0
    assert called.printed.startswith("5 items in the file '")
    assert "  Sum t0\n" in called.printed
    assert "USD of input" in called.printed
    assert called.printed.endswith("No model was called.\n")
    data = json.loads(call(*command, "--json", "--limit", "2").printed)
    assert (data["items"], data["refused"]) == (2, 0)
    assert data["input_tokens"] == round(2 * len(data["first_prompt"]) / 4)
    assert data["input_cost"] == pytest.approx(data["input_tokens"] / 1000)
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith("__")) == [
        "items.jsonl", "map.yaml", "shouting.py", "team.yaml",
    ]  # fmt: skip


def test_a_plan_shows_what_a_map_reduce_would_do(call: Call, items: str) -> None:
    """S-MR-177: texts and groups; no item is read, and nothing runs."""
    called = call("plan", "team.yaml")
    assert called.code == 0
    assert called.printed.splitlines()[0] == "team.yaml: map_reduce_static, 1 items"
    assert "  map      (synthesized): Shout {text}" in called.printed
    assert "  of 2 outputs, level by level" in called.printed
    data = json.loads(call("plan", "map.yaml", "--json").printed)
    assert data["tasks"] == {"map": {"description": "Shout {text}", "role": None, "model": None}}


def test_run_and_serve_know_what_a_map_reduce_is(call: Call, items: str) -> None:
    """S-MR-177: `run` runs it as it stands, `fork` says why not."""
    called = call("run", "team.yaml", "--run-id", "r")
    assert "it is a str without fields" in called.said
    assert called.code == 1
    text = Path("team.yaml").read_text(encoding="utf-8").replace("[unused]", "[{text: a}, {text: b}]")
    Path("team.yaml").write_text(text, encoding="utf-8")
    called = call("run", "team.yaml", "--run-id", "again")
    assert (called.code, called.printed) == (0, "SHOUT A + SHOUT B\n"), called.said
    forked = call("fork", "again", "--from", "map-0")
    assert forked.code == 2
