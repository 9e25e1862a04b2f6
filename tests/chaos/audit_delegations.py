"""Whether delegations of a run that was killed kept their promises: decided once, within caps and stages, carried out once.

In: the record's facts, what the protocol server was asked, what policies left on the disk, when who was killed. Out:
what was broken, in words, and counts. The rules are read from the plan and counted anew here, not by the machine that
is judged.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

from ensemble_ray.facts.fact import Fact
from ensemble_ray.testing import ServedRequest
from tests.chaos.kills import Kill, all_slipped
from tests.chaos.world import key_of

__all__ = ["DelegationAudit", "decisions_in", "judge_delegations"]

#: The manager's task, of which there is one.
_MANAGER = "manager#0"
#: What facts of a worker's run end with, whatever came of it.
_ENDS = ("output", "task_failed", "task_exited")
_Data = Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class DelegationAudit:
    """What was found."""

    violations: list[str] = field(default_factory=list[str])
    #: policies that were asked again about a call
    policies_asked_again: int = 0
    #: caps and stages that were overstepped
    rules_broken: int = 0


@dataclass(frozen=True, slots=True)
class _Delegation:
    """A call that was decided, and what the record has of it."""

    decision: Fact
    #: everything of the worker's run, oldest first, its own delegations included
    facts: Sequence[Fact]
    #: what the asking model was told
    told: Fact | None

    @property
    def name(self) -> str:
        return self.decision.name

    @property
    def instance(self) -> str:
        """The worker's run."""
        return f"{self.name}/delegate#0"

    @property
    def charged(self) -> str | None:
        """The role whose cap it counts for."""
        return cast("str | None", self.decision.data.to_data()["charged"])

    @property
    def is_managers(self) -> bool:
        return self.name.rsplit("/", 2)[0] == _MANAGER

    def end(self, *kinds: str) -> Fact | None:
        """The fact of one of these kinds with which the worker's run ended."""
        return next((each for each in self.facts if each.name == self.instance and each.kind in kinds), None)


def decisions_in(facts: Sequence[Fact]) -> dict[str, object]:
    """What was decided, by the call's name; times and ids, which differ from run to run, are left out."""
    return {
        fact.name: {
            **{name: fact.data.to_data().get(name) for name in ("worker", "charged", "refusal", "is_error")},
            **{
                name: cast("_Data", fact.data.to_data()["request"])[name] for name in ("agent_role", "task_description")
            },
        }
        for fact in facts
        if fact.kind == "delegation"
    }


def judge_delegations(
    run_id: str,
    facts: Sequence[Fact],
    requests: Sequence[ServedRequest],
    asked: Sequence[Mapping[str, Any]],
    kills: Sequence[Kill],
) -> DelegationAudit:
    """Judge a run that has ended."""
    found = DelegationAudit()
    delegations = list(_delegations(facts))
    arrivals: dict[str, list[float]] = defaultdict(list)
    for request in requests:
        arrivals[request.key].append(request.arrived_at)
    broken = [*_caps(facts, delegations), *_stages(run_id, facts, delegations, arrivals)]
    found.rules_broken = len(broken)
    found.violations += broken
    found.violations += _carried_out(facts, delegations)
    found.violations += _asked_late(run_id, delegations, arrivals, kills)
    _judge_questions(found, run_id, delegations, asked, kills)
    return found


def _delegations(facts: Sequence[Fact]) -> Iterator[_Delegation]:
    results = {fact.name: fact for fact in facts if fact.kind == "tool_result"}
    for fact in facts:
        if fact.kind == "delegation":
            work = f"{fact.name}/delegate#0"
            theirs = [each for each in facts if each.name == work or each.name.startswith(f"{work}/")]
            yield _Delegation(fact, theirs, results.get(fact.name))


# Caps and stages.


def _rules(facts: Sequence[Fact]) -> _Data:
    plan = next((cast("_Data", fact.data.to_data()["plan"]) for fact in facts if fact.kind == "plan"), {})
    return cast("_Data", plan.get("hierarchy") or {})


def _caps(facts: Sequence[Fact], delegations: Sequence[_Delegation]) -> Iterator[str]:
    rules = _rules(facts)
    charged = Counter(each.charged for each in delegations if each.is_managers and each.charged is not None)
    for role, cap in rules.get("max_calls_per_worker", {}).items():
        if charged[role] > cap:
            yield f"'{role}' was charged {charged[role]} times, and its cap is {cap}"
    most = rules.get("global_max_delegations", 0)
    if 0 < most < charged.total():
        yield f"{charged.total()} delegations were approved, and the global cap is {most}"


def _stages(
    run_id: str, facts: Sequence[Fact], delegations: Sequence[_Delegation], arrivals: Mapping[str, Sequence[float]]
) -> Iterator[str]:
    """Who is of a later stage begins after a success of each of the earlier ones, on record and for the server."""
    stages: Sequence[Sequence[str]] = _rules(facts).get("required_stages", ())
    stage_of = {role: number for number, stage in enumerate(stages) for role in stage}
    ours = [each for each in delegations if each.is_managers]
    for each in ours:
        if not each.facts:
            continue
        for role in [role for stage in stages[: stage_of.get(each.charged or "", 0)] for role in stage]:
            ends = [end for other in ours if other.charged == role and (end := other.end("output")) is not None]
            first = min(ends, key=lambda fact: fact.seq, default=None)
            if first is None or first.seq > each.facts[0].seq:
                yield f"'{each.name}' was carried out by '{each.charged}' before '{role}' had succeeded"
            elif (came := min(arrivals.get(key_of(run_id, f"{each.instance}/0/model"), [first.at]))) < first.at:
                yield f"'{each.charged}' asked its model {first.at - came:.4f} s before '{role}' had succeeded"


# Carrying out.


def _carried_out(facts: Sequence[Fact], delegations: Sequence[_Delegation]) -> Iterator[str]:
    """Whom the decisions let work has worked, and nobody else; what was told of it is the end of it."""
    decided = {each.instance for each in delegations if each.decision.data.to_data()["worker"] is not None}
    for instance in sorted({_worker_of(fact.name) for fact in facts} - {""} - decided):
        yield f"'{instance}' worked without a decision that it may"
    for each in delegations:
        if each.told is None:
            yield f"what came of '{each.name}' is not on record"
        elif each.instance in decided:
            if each.end(*_ENDS) is None:
                yield f"'{each.name}' has a result, and its worker's run no end"
            late = [fact for fact in each.facts if fact.seq > each.told.seq]
            if late:
                yield f"'{each.name}' was worked on after its result was recorded: {late[0].kind} {late[0].name}"
    named = {each.name for each in delegations}
    intended = {fact.name for fact in facts if fact.kind == "tool_intent"}
    # A call that may have been made in a lost part of the record has a result of unknown outcome, and no intent.
    fine = {"failure", "unknown"} if any(fact.kind == "loss" for fact in facts) else {"failure"}
    for fact in facts:
        if (
            fact.kind == "tool_result"
            and fact.name not in named | intended
            and fact.data.to_data()["outcome"] not in fine
        ):
            yield f"'{fact.name}' has a result, and neither a decision nor an intent"


def _worker_of(name: str) -> str:
    """The innermost worker's run that a fact is of; "" for facts of the plan's own tasks."""
    before, found, _ = name.rpartition("/delegate#0")
    return f"{before}{found}"


def _asked_late(
    run_id: str, delegations: Sequence[_Delegation], arrivals: Mapping[str, Sequence[float]], kills: Sequence[Kill]
) -> Iterator[str]:
    """A worker whose result is recorded asks nothing any more; how much a woken one lets slip is judged with its answers."""
    for each in delegations:
        for fact in each.facts:
            times = arrivals.get(key_of(run_id, fact.name), ()) if fact.kind == "model" else ()
            came = max((at for at in times if not all_slipped([at], kills)), default=0.0)
            if each.told is not None and came > each.told.at:
                yield f"'{fact.name}' was asked {came - each.told.at:.4f} s after its delegation's result was recorded"


# Policies.


def _judge_questions(
    found: DelegationAudit,
    run_id: str,
    delegations: Sequence[_Delegation],
    asked: Sequence[Mapping[str, Any]],
    kills: Sequence[Kill],
) -> None:
    """Each policy is asked once about each call, and again only where a kill came before the decision was on record."""
    decided = {key_of(run_id, each.name): each for each in delegations}
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    slipped: dict[str, set[str]] = defaultdict(set)
    for line in asked:
        times[line["policy"], line["key"]].append(line["at"])
    for (policy, key), at in times.items():
        each = decided.get(key)
        if each is None:
            found.violations.append(f"{policy} was asked about '{key}', of which no decision is recorded")
            continue
        found.policies_asked_again += len(at) - 1
        late = [asked_at for asked_at in at if asked_at > each.decision.at]
        if late and all_slipped(late, kills):
            slipped[each.name.rsplit("/", 2)[0]].add(each.name)
        elif late:
            found.violations.append(f"{policy} was asked about '{each.name}' after that was decided")
        for earlier, later in pairwise(at):
            if not any(kill.explains(earlier, later) for kill in kills):
                found.violations.append(
                    f"{policy} was asked about '{each.name}' twice, and no kill between explains it"
                )
    found.violations += _of_zombies(slipped, kills)
    about = {key for _, key in times}
    for key, each in decided.items():
        if asked and (each.charged is not None) != (key in about):
            found.violations.append(f"no policy was asked about '{each.name}', or one was that it did not come to")


def _of_zombies(slipped: Mapping[str, set[str]], kills: Sequence[Kill]) -> Iterator[str]:
    """What a process was deciding when it was frozen it decides to the end, and is refused then: one call of each task."""
    for instance, names in slipped.items():
        if len(names) > sum(kill.is_zombie for kill in kills):
            yield f"'{instance}' went on deciding when it had been replaced: {sorted(names)}"
