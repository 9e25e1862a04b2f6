"""Runs that are recorded in PostgreSQL, in one process and on Ray: chosen in one line, read from anywhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ensemble_ray import (
    AgentSynthesizer,
    Ensemble,
    InlineRuntime,
    PostgresMemory,
    PostgresReflectionStore,
    RecordError,
    RunState,
    Runtime,
    Task,
)
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.postgres.store import PostgresStore
from ensemble_ray.record.trace import fold_trace
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, task
from tests.contracts.web_server import closed_port
from tests.postgres_server import PostgresServer


@pytest.fixture(params=["inline", "ray"])
def recorded(request: pytest.FixtureRequest, postgres: PostgresServer) -> Iterator[tuple[Runtime, str]]:
    """A runtime of each kind that records in a database, and its URL."""
    url = postgres.new_database()
    if request.param == "inline":
        inline = InlineRuntime(store=url)
        yield inline, url
        run_blocking(inline.close())
        return
    request.getfixturevalue("ray_cluster")
    from ensemble_ray.actors.driver.runtime import RayRuntime  # only that one pays for Ray

    with RayRuntime(store=url) as runtime:
        yield runtime, url


def _team() -> Ensemble:
    writer = agent(ScriptedModel("a" * 2000, "done"))
    return Ensemble(tasks=[task("Collect facts", writer), task("Write", writer)])


def test_run_is_read_from_the_database_when_it_has_ended(recorded: tuple[Runtime, str]) -> None:
    """S-DUR-5, S-DUR-7: every process wrote its part; the output and the trace are those of any other record."""
    runtime, url = recorded
    output = _team().run(runtime=runtime)
    store = PostgresStore(url)
    found = run_blocking(store.find("latest"))
    assert (found.run_id, found.state) == (output.run_id, RunState.COMPLETED)
    facts = run_blocking(store.facts(found.run_id))
    assert [fact.seq for fact in facts] == list(range(1, len(facts) + 1))
    assert {"plan", "stimulus", "model", "output", "end"} <= {fact.kind for fact in facts}
    trace = fold_trace(facts)
    assert [each.raw for each in output.task_outputs] == ["a" * 2000, "done"]
    assert [each.final_output for each in trace.task_traces] == ["a" * 2000, "done"]


def test_one_database_has_records_memory_and_reflections(recorded: tuple[Runtime, str]) -> None:
    """S-MEM-140, S-REFL-42, S-REFL-8: the next run finds what the one before left; the stores stay in the caller's process."""
    runtime, url = recorded
    memory, learned = PostgresMemory(url), PostgresReflectionStore(url)
    learn = "REFINED_DESCRIPTION:\nExplain it with the sea"
    model = ScriptedModel("The moon pulls", learn, "The moon pulls the sea", learn)
    tides = task("Explain tides", agent(model), memory_scopes="sea", reflection_config=True)
    team = Ensemble(tasks=[tides], memory_store=memory, reflection_store=learned)
    for _ in range(2):
        output = team.run(runtime=runtime)
    (reflection,) = learned.reflections().values()
    assert (reflection.refined_description, reflection.run_count) == ("Explain it with the sea", 2)
    assert memory.scopes() == {"sea": 2}
    prompts = output.trace.task_traces[0].prompts
    assert prompts is not None
    assert "The moon pulls" in prompts.user_prompt
    assert "### Refined Instructions\nExplain it with the sea" in prompts.user_prompt
    assert {run.run_id for run in run_blocking(PostgresStore(url).runs())} >= {output.run_id}
    memory.close()
    learned.close()


def test_database_is_chosen_by_the_environment(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-DUR-5: `ENSEMBLE_RAY_STORE`."""
    url = postgres.new_database()
    monkeypatch.setenv("ENSEMBLE_RAY_STORE", url)
    output = _team().run(runtime=InlineRuntime())
    assert run_blocking(PostgresStore(url).find("latest")).run_id == output.run_id


def test_no_model_is_asked_when_the_database_is_not_there() -> None:
    """S-DUR-5: the error says which and what to do."""
    model = ScriptedModel("never")
    with_agent = Ensemble(tasks=[task("Write", agent(model))])
    synthesized = Ensemble(tasks=[Task.of("Write")], llm=model, agent_synthesizer=AgentSynthesizer.llm_based())
    with closed_port() as port:
        runtime = InlineRuntime(store=f"postgresql://me:secret@127.0.0.1:{port}/records")
        for team in (with_agent, synthesized):
            with pytest.raises(RecordError, match=rf"postgresql://127\.0\.0\.1:{port}/records.*Check that"):
                team.run(runtime=runtime)
    assert not model.calls
