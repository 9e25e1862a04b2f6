"""SubmissionStore on a real cluster: submissions of running runs lie in the cluster, sealed, and nowhere else."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.experimental import internal_kv

from ensemble_ray import Agent, Node, Plan
from ensemble_ray.actors.driver.packing import dump
from ensemble_ray.actors.link.wire import AgentTemplate, Submission
from ensemble_ray.actors.scheduler.submission_store import SubmissionStore
from ensemble_ray.execute.orders import RunContext
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.testing import ScriptedModel


def submission_of(run_id: str) -> Submission:
    """A run's package, with bytes of user objects in it."""
    node = Node(key="a", index=1, description="Do a", expected_output="text", agent_role="W", agent_key="w")
    body = dump(Agent(role="W", goal="write", llm=ScriptedModel()), "Agent 'W'")
    return Submission(
        run_id=run_id,
        plan=Plan(workflow="sequential", nodes=(node,)),
        context=RunContext(run_id=run_id, workflow="sequential", total_tasks=1),
        header=PlanRecorded(plan={}, inputs={"topic": "Ray"}),
        templates=(AgentTemplate(key="w", body=body, category="k"),),
        tasks={"a": b"task"},
        store=StoreAddress(home="/records", url="postgresql://user:secret@host/db"),
        is_connected=True,
    )


class Planted:
    """A pickle that leaves a mark when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.mark,))


def in_store(name: str) -> bytes | None:
    """What lies in the cluster's store."""
    found: bytes | None = internal_kv._internal_kv_get(name, namespace=b"ensemble_ray")
    return found


def plant(name: str | bytes, body: bytes) -> None:
    """Put something there, as whoever has the token can."""
    internal_kv._internal_kv_put(name, body, overwrite=True, namespace=b"ensemble_ray")


@pytest.fixture
def store(ray_cluster: str, tmp_path: Path) -> Iterator[SubmissionStore]:
    """One with a key of its own; nothing of it stays."""
    del ray_cluster
    yield SubmissionStore(tmp_path / "package.key")
    for name in internal_kv._internal_kv_list("run:vault", namespace=b"ensemble_ray"):
        internal_kv._internal_kv_del(name, namespace=b"ensemble_ray")


async def kept(store: SubmissionStore) -> list[Submission]:
    """What it knows, in order of the runs' ids."""
    return sorted(await store.load_unfinished(), key=lambda each: each.run_id)


async def test_package_is_found_as_it_was_until_it_is_dropped(store: SubmissionStore, tmp_path: Path) -> None:
    """S-DUR-32: by another store, as that of a scheduler that was started again."""
    one, two = submission_of("vault-1"), submission_of("vault-2")
    await store.keep(one)
    await store.keep(two)
    assert await kept(SubmissionStore(tmp_path / "package.key")) == [one, two]
    await store.drop("vault-1")
    assert await kept(store) == [two]
    await store.drop("vault-2")
    await store.drop("vault-2")
    assert await kept(store) == []


async def test_newer_submission_of_a_run_takes_the_place_of_the_older(store: SubmissionStore) -> None:
    """S-DUR-32, S-DUR-35: a run that was resumed on the same cluster is one run."""
    again = submission_of("vault-3")
    await store.keep(
        Submission(
            run_id="vault-3", plan=again.plan, context=again.context, header=PlanRecorded(), templates=(), tasks={}
        )
    )
    await store.keep(again)
    assert await kept(store) == [again]


async def test_store_holds_nothing_of_a_package_that_can_be_read(store: SubmissionStore) -> None:
    """S-SEC-36: neither the password of its database nor the name of its class."""
    await store.keep(submission_of("vault-4"))
    sealed = in_store("run:vault-4") or b""
    assert len(sealed) > len(pickle.dumps(submission_of("vault-4"), protocol=5))
    assert not [part for part in (b"secret", b"postgresql", b"Submission", b"topic") if part in sealed]


async def test_package_is_refused_and_dropped_when_the_owner_did_not_seal_it(
    store: SubmissionStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S-SEC-37: planted, altered, or of another run: nothing of it is loaded, and the others are found."""
    mark, ours = tmp_path / "loaded", submission_of("vault-5")
    await store.keep(ours)
    sealed = in_store("run:vault-5") or b""
    bad = pickle.dumps(Planted(mark))
    plant("run:vault-planted", bad)
    plant("run:vault-altered", sealed[:99] + (b"A" if sealed[99:100] != b"A" else b"B") + sealed[100:])
    plant("run:vault-renamed", sealed)
    plant(b"run:vault-\xff\x1b[31m", bad)
    with caplog.at_level(logging.ERROR):
        assert await kept(store) == [ours]
    assert not mark.exists()
    assert len(caplog.messages) == 4
    assert all("its package in the cluster's store is refused" in said for said in caplog.messages)
    assert "\x1b" not in "".join(caplog.messages)
    names = internal_kv._internal_kv_list("run:vault", namespace=b"ensemble_ray")
    assert names == [b"run:vault-5"]
    pickle.loads(bad)  # noqa: S301  the mark would have been left
    assert mark.exists()


async def test_package_is_dropped_and_the_way_on_told_when_its_key_is_gone(
    store: SubmissionStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S-SEC-38: a later package gets a new key."""
    await store.keep(submission_of("vault-6"))
    (tmp_path / "package.key").unlink()
    with caplog.at_level(logging.ERROR):
        assert await kept(store) == []
    (said,) = caplog.messages
    assert f"the key that it was sealed with is gone: {tmp_path / 'package.key'}" in said
    assert "ensemble-ray resume vault-6, or ensemble_ray.resume('vault-6', ensemble)" in said
    assert in_store("run:vault-6") is None
    after = submission_of("vault-7")
    await store.keep(after)
    assert await kept(store) == [after]
