"""Guards of peers and of managers, without anybody at work."""

from __future__ import annotations

import pytest

from ensemble_ray import DelegationContext
from ensemble_ray.execute.delegation.decisions import DelegationRefusal, ManagerGate, PeerGate
from ensemble_ray.plan.plan import HierarchyRules
from ensemble_ray.schedule.hierarchy import DelegationEnforcer
from ensemble_ray.values.delegation import Peer

CONTEXT = DelegationContext(
    peers=[Peer(key=role.lower(), role=role) for role in ("Writer", "Digger", "Painter")], max_depth=2
)
WRITER, DIGGER, PAINTER = CONTEXT.peers


def manager_gate(**rules: object) -> ManagerGate:
    """A manager under these rules."""
    return ManagerGate(CONTEXT, DelegationEnforcer(HierarchyRules(**rules), CONTEXT.roles))  # type: ignore[arg-type]


def reason(found: object) -> str:
    """Why not."""
    assert isinstance(found, DelegationRefusal)
    return found.reason


@pytest.mark.parametrize(
    ("depth", "role", "text"),
    [
        (
            2,
            "Nobody",
            "Delegation depth limit reached (max: 2, current: 2). Complete this task yourself without further delegation.",
        ),
        (
            3,
            "Writer",
            "Delegation depth limit reached (max: 2, current: 3). Complete this task yourself without further delegation.",
        ),
        (1, "\twriter", "Cannot delegate to yourself (role: 'Writer'). Choose a different agent."),
        (0, "Nobody", "Agent not found with role 'Nobody'. Available roles: [Writer, Digger, Painter]"),
    ],
)
def test_peer_is_refused_by_the_first_guard(depth: int, role: str, text: str) -> None:
    """S-DEL-73, S-DEL-74, S-DEL-75, S-DEL-11: depth, then self, then unknown."""
    assert reason(PeerGate(CONTEXT, role="Writer", depth=depth).find(role)) == text


def test_peer_finds_and_changes() -> None:
    """S-DEL-2, S-DEL-77, S-DEL-78."""
    gate = PeerGate(CONTEXT, role="Writer", depth=1)
    assert gate.find(" digger") is DIGGER
    assert gate.change(DIGGER, "PAINTER") is PAINTER
    assert reason(gate.change(DIGGER, "Ghost")).startswith(
        "A policy modified agent_role to 'Ghost' but no agent found with that role."
    )
    assert reason(gate.change(DIGGER, "writer ")).startswith(
        "A policy modified agent_role to 'writer ' which results in self-delegation."
    )
    assert (gate.approve(DIGGER), gate.record_success("Digger", "dig"), gate.reminder(), gate.turn_ended()) == (
        None,
        "",
        None,
        False,
    )


def test_manager_is_refused_with_a_hint_behind_the_reason() -> None:
    """S-HIER-25, S-HIER-81, S-HIER-73: only a refusal of the constraints has one."""
    gate = manager_gate(max_calls_per_worker={"Writer": 1})
    assert gate.find("writer") is WRITER
    assert gate.approve(WRITER) is None
    refused = gate.approve(WRITER)
    assert refused is not None
    assert refused.reason == "Delegation rejected by policy: Agent 'Writer' has reached its delegation cap of 1"
    first, _, hint = refused.text.partition("\n")
    assert first == refused.reason
    assert "'Digger', 'Painter'" in hint
    unknown = gate.find("Nobody")
    assert isinstance(unknown, DelegationRefusal)
    assert (
        unknown.text
        == unknown.reason
        == "No agent found with role 'Nobody'. Available roles: [Writer, Digger, Painter]"
    )


def test_manager_is_charged_for_the_changed_target() -> None:
    """S-HIER-46: a target that is another spelling of the same is no change."""
    gate = manager_gate(max_calls_per_worker={"Writer": 1, "Digger": 1})
    assert gate.approve(WRITER) is None
    assert gate.change(WRITER, " WRITER") is WRITER
    assert gate.change(WRITER, "digger") is DIGGER
    assert gate.approve(WRITER) is None  # its place is free again
    assert reason(gate.change(WRITER, "Digger")) == (
        "Delegation rejected by policy: Agent 'Digger' has reached its delegation cap of 1"
    )
    assert reason(gate.change(WRITER, "Ghost")).startswith("A policy modified agent_role to 'Ghost' but no agent found")


def test_recalled_attempts_count() -> None:
    """S-HIER-41, S-DEL-62: what the record says was approved uses up the cap."""
    gate = manager_gate(global_max_delegations=1)
    gate.reapply_recorded("Writer")
    assert reason(gate.approve(DIGGER)) == "Delegation rejected by policy: Global delegation cap of 1 has been reached"


def test_notice_stands_behind_a_repetition_alone() -> None:
    """S-HIER-83, S-HIER-84: asked of successes; a repetition is no progress."""
    gate = manager_gate(stall_turns=1)
    assert gate.record_success("Writer", "write it") == ""
    assert not gate.turn_ended()
    assert gate.record_success("Writer", "write  it ").startswith("Notice: ")
    assert gate.turn_ended()
    assert gate.depth == 0
