"""Which team is served, found before anything is deployed."""

from __future__ import annotations

from pathlib import Path

import pydantic
import pytest

from ensemble_ray import ValidationError
from ensemble_ray.serve.app import EndpointOptions, app
from ensemble_ray.serve.catalog import ENSEMBLES_VARIABLE, load_teams, team_names

TEAM = """
agents:
  - name: writer
    role: Writer
    goal: Write
    llm: {model: "openai:any", api_key_env: KEY_OF_THE_TEAM}
tasks:
  - {name: draft, description: "Write about {topic}", expected_output: A text, agent: writer}
"""


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A team file in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KEY_OF_THE_TEAM", raising=False)
    path = tmp_path / "team.yaml"
    path.write_text(TEAM, encoding="utf-8")
    return path


def test_no_team_is_refused_with_what_to_do() -> None:
    """Before anything is started."""
    with pytest.raises(ValidationError, match=f"set {ENSEMBLES_VARIABLE}, or pass ensembles="):
        app(EndpointOptions())


def test_the_argument_wins_over_the_environment(team: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two applications of one cluster can so serve two teams."""
    monkeypatch.setenv(ENSEMBLES_VARIABLE, "team.yaml")
    assert [each.name for each in team_names()] == ["team.yaml"]
    assert [each.name for each in team_names(["teams:pair"])] == ["teams:pair"]
    assert [each.name for each in team_names(["  "])] == ["team.yaml"]
    monkeypatch.setenv(ENSEMBLES_VARIABLE, "team.yaml, teams:pair")
    assert [each.shown for each in team_names()] == ["team", "pair"]


def test_older_names_are_aliases(team: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SRV-1: of the argument, where one text may stand for several, and of the variable, which gives way to the new one."""
    for name in ("team", "teams", "ensembles"):
        assert EndpointOptions.model_validate({name: "a.yaml, b:c"}).ensembles == ("a.yaml", "b:c")
    joined = EndpointOptions.model_validate({"ensembles": "a.yaml", "teams": ["b:c"], "team": None})
    assert joined.ensembles == ("a.yaml", "b:c")
    with pytest.raises(pydantic.ValidationError, match="ensembles"):
        EndpointOptions.model_validate({"teams": 3})
    monkeypatch.setenv("ENSEMBLE_RAY_TEAM", "team.yaml")
    assert [each.name for each in team_names()] == ["team.yaml"]
    monkeypatch.setenv(ENSEMBLES_VARIABLE, "teams:pair")
    assert [each.name for each in team_names()] == ["teams:pair"]


def test_two_teams_of_one_name_are_refused(team: Path) -> None:
    """S-SRV-1: clients could not tell them apart."""
    team.rename(team.with_name("summaries.yaml"))
    with pytest.raises(ValidationError, match="Two teams are called 'summaries'"):
        app(EndpointOptions(ensembles=("summaries.yaml", "tests.serve.teams:summaries")))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("taem.yaml", "team.yaml"),
        ("nowhere:team", "nowhere"),
        ("tests.serve.teams:pear", "pear"),
        ("tests.serve.teams:INPUTS", "Ensemble"),
        ("team", "team.yaml"),
    ],
)
def test_a_wrong_team_is_refused_where_it_is_deployed(team: Path, name: str, message: str) -> None:
    """The message names what was meant, or what is wrong with it."""
    with pytest.raises(ValidationError, match=message):
        app(EndpointOptions(ensembles=(name,)))


def test_a_team_that_cannot_run_is_refused_where_it_is_deployed(team: Path) -> None:
    """Not by the first request; what only inputs can tell is left to them."""
    team.write_text(TEAM + "  - {name: draft, description: Again, expected_output: A text, agent: writer}\n")
    with pytest.raises(ValidationError, match="draft"):
        app(EndpointOptions(ensembles=("team.yaml",)))


MAP_REDUCE = """
llm: {model: "openai:any", api_key_env: KEY_OF_THE_TEAM}
map_reduce:
  items: [tides, kelp, salt]
  map: {description: "Write about {item}", expected_output: A text}
  reduce: {description: Join the texts, expected_output: A text}
"""


def test_a_map_reduce_is_served(team: Path) -> None:
    """S-MR-165, S-SRV-16: as its tree where that is made at once, else over items that requests may bring."""
    app(EndpointOptions(ensembles=("tests.serve.teams:summaries",)))
    (tree,) = load_teams(team_names(["tests.serve.teams:summaries"])).values()
    assert (tree.info.tasks, tree.info.inputs, tree.info.takes_items) == (6, ["topic"], True)
    team.write_text(f"{MAP_REDUCE}  chunk_size: 2\n")
    (made,) = load_teams(team_names(["team.yaml"]), needs_keys=False).values()
    assert (made.info.tasks, made.info.workflow, made.info.takes_items) == (None, "map-reduce", True)


@pytest.mark.parametrize("more", ["", "  columns: [raw]\n  key: id\n"])
def test_files_of_results_are_left_out(more: str, team: Path, caplog: pytest.LogCaptureFixture) -> None:
    """S-SRV-18: runs of several clients would write into one file; so its columns are left out, too."""
    team.write_text(f"{MAP_REDUCE}  results: rows.jsonl\n{more}")
    (served,) = load_teams(team_names(["team.yaml"]), needs_keys=False).values()
    assert getattr(served.definition, "results", "none") is None
    assert "without its files" in caplog.text


def test_a_file_is_found_from_another_directory(team: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica does not start where it was deployed from."""
    (name,) = team_names(["team.yaml"])
    monkeypatch.chdir("/")
    assert name.load(needs_keys=False).definition.origin == str(team.resolve())


def test_a_copy_of_the_working_directory_is_used_where_the_file_is_not(
    team: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that has only what was sent along."""
    (name,) = team_names(["team.yaml"])
    copy = tmp_path / "copy"
    copy.mkdir()
    team.rename(copy / "team.yaml")
    monkeypatch.chdir(copy)
    assert name.load(needs_keys=False).definition.origin == str((copy / "team.yaml").resolve())


def test_keys_are_needed_by_replicas_alone(team: Path) -> None:
    """The deployer's shell may be without; a replica without says which variable it misses."""
    app(EndpointOptions(ensembles=("team.yaml",)))
    with pytest.raises(ValidationError, match="KEY_OF_THE_TEAM"):
        load_teams(team_names(["team.yaml"]))


def test_an_unknown_argument_is_refused() -> None:
    """A misspelt one is not taken for none."""
    with pytest.raises(ValueError, match="teem"):
        EndpointOptions.model_validate({"teem": "team.yaml"})
