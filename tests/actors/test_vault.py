"""Vault on a real cluster: packages of running runs lie in the cluster, and nowhere else."""

from __future__ import annotations

from actors.preflight import dump
from actors.vault import Vault
from actors.wire import AgentCargo, RunPackage
from ensemble_ray import Agent
from ensemble_ray.execute.orders import RunFrame
from ensemble_ray.plan.plan import Node, Plan
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.testing import ScriptedModel


def package_of(run_id: str) -> RunPackage:
    """A run's package, with bytes of user objects in it."""
    node = Node(key="a", index=1, description="Do a", expected_output="text", agent_role="W", agent_key="w")
    body = dump(Agent(role="W", goal="write", llm=ScriptedModel()), "Agent 'W'")
    return RunPackage(
        run_id=run_id,
        plan=Plan(workflow="sequential", nodes=(node,)),
        frame=RunFrame(run_id=run_id, workflow="sequential", total_tasks=1),
        header={"plan": {}, "inputs": {"topic": "Ray"}},
        agents=(AgentCargo(key="w", body=body, kind="k"),),
        tasks={"a": b"task"},
        store=StoreAddress(home="/records", url="postgresql://user:secret@host/db"),
        is_attended=True,
    )


async def kept(*run_ids: str) -> list[RunPackage]:
    """Those of these runs that the vault knows, in order of their ids."""
    return sorted((each for each in await Vault().kept() if each.run_id in run_ids), key=lambda each: each.run_id)


async def test_package_is_found_as_it_was_until_it_is_dropped(ray_cluster: str) -> None:
    """S-DUR-32: by another vault, as that of a scheduler that was started again."""
    del ray_cluster
    one, two = package_of("vault-1"), package_of("vault-2")
    vault = Vault()
    await vault.keep(one)
    await vault.keep(two)
    assert await kept("vault-1", "vault-2") == [one, two]
    await vault.drop("vault-1")
    assert await kept("vault-1", "vault-2") == [two]
    await vault.drop("vault-2")
    await vault.drop("vault-2")
    assert await kept("vault-1", "vault-2") == []


async def test_newer_package_of_a_run_takes_the_place_of_the_older(ray_cluster: str) -> None:
    """S-DUR-32, S-DUR-35: a run that was resumed on the same cluster is one run."""
    del ray_cluster
    vault, again = Vault(), package_of("vault-3")
    await vault.keep(RunPackage(run_id="vault-3", plan=again.plan, frame=again.frame, header={}, agents=(), tasks={}))
    await vault.keep(again)
    assert await kept("vault-3") == [again]
    await vault.drop("vault-3")
