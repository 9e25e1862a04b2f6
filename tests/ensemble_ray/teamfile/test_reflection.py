"""Reflection in a team file."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import InMemoryReflectionStore, PostgresReflectionStore, SqliteReflectionStore
from ensemble_ray.teamfile import load_runnable
from ensemble_ray.testing import ScriptedModel
from tests.ensemble_ray.teamfile.conftest import Load, Refused
from tests.ensemble_ray.teamfile.test_json_schema import schema_errors

CODE = """
from ensemble_ray import TaskReflection

class Store:
    def store(self, key, reflection): ...
    def retrieve(self, key): ...

def learn(asked):
    return TaskReflection(refined_description="a", refined_expected_output="b")
"""
FILED = """
llm: local
reflection_store:
  sqlite: {path: data/notes.db}
tasks:
  a: {description: do a, reflection_config: true}
  b: {description: do b, reflection_config: false}
  c: {description: do c, reflection_config: {model: local}}
  d: {description: do d, reflection_config: {strategy: own:learn}}
"""
IN_DATABASE = """
llm: local
reflection_store:
  postgres: {url_env: TEAM_NOTES}
tasks: {t: {description: d, reflection_config: true}}
"""
MAPPED = """
llm: local
reflection_store: in_memory
map_reduce:
  items: [a, b]
  map: {description: "read {item}", reflection_config: true}
"""
REST = "llm: local\ntasks: {t: {description: d}}\n"


@pytest.fixture(autouse=True)
def code(folder: Path) -> None:
    """The user's own."""
    (folder / "own.py").write_text(CODE, encoding="utf-8")


def test_reflection_in_a_file(load: Load, folder: Path) -> None:
    """S-REFL-37, S-REFL-1: the path is seen from the team file; nothing is made yet."""
    team = load(FILED)
    store = team.reflection_store
    assert isinstance(store, SqliteReflectionStore)
    assert store.path == folder / "data" / "notes.db"
    assert not store.path.exists()
    plain, off, with_model, with_strategy = (each.reflection_config for each in team.tasks)
    assert plain is not None
    assert (plain.model, plain.strategy, off) == (None, None, None)
    assert with_model is not None
    assert with_model.model is not None
    assert with_strategy is not None
    assert with_strategy.strategy is not None


def test_reflection_in_a_database(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-REFL-43: a URL with a password comes from the environment; nothing is connected yet."""
    monkeypatch.setenv("TEAM_NOTES", "postgresql://me:secret@elsewhere:5433/team")
    store = load(IN_DATABASE).reflection_store
    assert isinstance(store, PostgresReflectionStore)
    assert store.location == "postgresql://elsewhere:5433/team"
    store = load(f"{REST}reflection_store: {{postgres: {{url: postgresql://db/team}}}}\n").reflection_store
    assert isinstance(store, PostgresReflectionStore)


def test_stores_by_word_and_by_name(load: Load) -> None:
    """S-REFL-37."""
    assert isinstance(load(f"{REST}reflection_store: in_memory\n").reflection_store, InMemoryReflectionStore)
    assert type(load(f"{REST}reflection_store: own:Store\n").reflection_store).__name__ == "Store"


def test_another_model_reflects_too_where_it_is_chosen(folder: Path) -> None:
    """S-REFL-37: a model that takes the place of all others takes that of reflections as well."""
    (folder / "team.yaml").write_text(FILED, encoding="utf-8")
    (folder / "team.py").write_text(
        "from ensemble_ray import Ensemble, ReflectionConfig, Task\n"
        "config = ReflectionConfig(model='local')\n"
        "team = Ensemble(tasks=[Task(description='d', expected_output='e', llm='local', reflection_config=config)])\n",
        encoding="utf-8",
    )
    chosen = ScriptedModel("x")
    for target in ("team.yaml", "team:team"):
        team = load_runnable(target, llm=chosen)
        models = [
            each.reflection_config.model
            for each in team.tasks  # type: ignore[union-attr]  both are ensembles
            if each.reflection_config is not None and each.reflection_config.model is not None
        ]
        assert models == [chosen]


@pytest.mark.parametrize("text", [FILED, IN_DATABASE, MAPPED, f"{REST}reflection_store: own:Store\n"])
def test_the_schema_knows_reflection(load: Load, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-REFL-37, S-REFL-43: editors accept what the loader takes."""
    monkeypatch.setenv("TEAM_NOTES", "postgresql://elsewhere/team")
    assert schema_errors(text) == []
    load_runnable_text(load, text)


def load_runnable_text(load: Load, text: str) -> None:
    """Load it, whatever kind it is of."""
    if "map_reduce" not in text:
        load(text)
    else:
        Path("team.yaml").write_text(text, encoding="utf-8")
        assert load_runnable("team.yaml").reflection_store is not None


def test_mistakes_are_told(refused: Refused) -> None:
    """S-REFL-37, S-REFL-43: each with its place."""
    (line,) = [each for each in refused(f"{REST}reflection_store: sqlite\n") if "reflection_store" in each]
    assert "must be `in_memory`, {sqlite: {path: FILE}}, {postgres: {url: URL}}, or module:attribute" in line
    for text, words in (
        ("{sqlite: {path: a}, postgres: {url: postgresql:///a}}", "must have one of the keys 'sqlite' and 'postgres'"),
        ("{}", "must have one of the keys 'sqlite' and 'postgres'"),
        ("{postgres: {}}", "must have one of the keys 'url' and 'url_env'"),
        ("{postgres: {url: 'postgresql://me:pw@db/a'}}", "a password does not belong in a file"),
    ):
        lines = refused(f"{REST}reflection_store: {text}\n")
        assert any(words in each for each in lines), lines
    (line,) = [
        each
        for each in refused("llm: local\ntasks: {t: {description: d, reflection_config: often}}\n")
        if "reflection_config" in each
    ]
    assert "must be true, false, or a mapping with keys such as 'model'" in line
