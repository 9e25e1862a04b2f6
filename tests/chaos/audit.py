"""Whether a run that was killed kept the promise, from three independent witnesses.

In: the record's facts, what the protocol server was asked, what tools left on the disk, when who was killed. Out: what
was broken, in words, and counts.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ensemble_ray.execute.agent.attempts import key_at
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact
from ensemble_ray.testing import ServedRequest
from ensemble_ray.values.ids import effect_name
from tests.chaos.audit_delegations import judge_delegations
from tests.chaos.audit_map_reduce import judge_map_reduce
from tests.chaos.audit_verdicts import judge_verdicts
from tests.chaos.kills import Kill, all_slipped
from tests.chaos.world import key_of

__all__ = ["Audit", "answers_in", "audit", "difference", "of_lines"]


@dataclass(slots=True, kw_only=True)
class Audit:
    """What was found."""

    violations: list[str] = field(default_factory=list[str])
    #: requests sent although their answer was recorded
    repeats_of_recorded: int = 0
    #: requests sent again whose first one was on its way in a kill
    repeats_in_flight: int = 0
    #: requests of processes that were replaced while they were frozen, sent when they woke and before they were stopped
    slipped: int = 0
    #: effects of unknown outcome that the record tells of
    unknown_outcomes: int = 0
    #: policies that were asked again about a delegation
    policies_asked_again: int = 0
    #: caps and stages that were overstepped
    rules_broken: int = 0


def audit(
    run_id: str,
    facts: Sequence[Fact],
    requests: Sequence[ServedRequest],
    lines: Sequence[Mapping[str, str]],
    kills: Sequence[Kill],
    *,
    asked: Sequence[Mapping[str, Any]] = (),
    rows: Sequence[Mapping[str, Any]] = (),
    letters: Sequence[Mapping[str, Any]] = (),
) -> Audit:
    """Judge a run that has ended; `lines` are of tools, `asked` of policies and predicates, `rows` and `letters` of items."""
    found = Audit()
    kills = [kill.lasting_until(facts) for kill in kills]
    found.violations += _of_the_record(facts)
    _judge_requests(found, run_id, facts, requests, kills)
    _judge_effects(found, run_id, facts, lines, kills)
    left, questions = _left_of(run_id, facts, requests, asked, kills)
    policies = [line for line in questions if "verdict" not in line]
    delegations = judge_delegations(run_id, facts, left, policies, kills)
    found.violations += delegations.violations
    found.violations += judge_verdicts(facts, [line for line in questions if "verdict" in line], kills)
    found.violations += judge_map_reduce(facts, rows, letters)
    found.policies_asked_again, found.rules_broken = delegations.policies_asked_again, delegations.rules_broken
    return found


def _left_of(
    run_id: str,
    facts: Sequence[Fact],
    requests: Sequence[ServedRequest],
    asked: Sequence[Mapping[str, Any]],
    kills: Sequence[Kill],
) -> tuple[Sequence[ServedRequest], Sequence[Mapping[str, Any]]]:
    """Requests and questions without those that belong to facts that were lost: what is recorded now came of later ones."""
    losses = [kill for kill in kills if kill.is_loss]
    if not losses:
        return requests, asked
    lost_at = losses[-1].until
    decided = {key_of(run_id, fact.name) for fact in facts if fact.kind == "delegation" and fact.at < lost_at}
    return (
        [each for each in requests if each.arrived_at > lost_at or each.key in losses[-1].settled],
        [each for each in asked if each["at"] > lost_at or each["key"] in decided],
    )


def _of_the_record(facts: Sequence[Fact]) -> Iterator[str]:
    if [fact.seq for fact in facts] != list(range(1, len(facts) + 1)):
        yield f"the facts' numbers have gaps: {[fact.seq for fact in facts]}"
    for kind in ("model", "tool_result", "delegation", "output", "task_failed", "review_decision"):
        names = Counter(fact.name for fact in facts if fact.kind == kind)
        for name, count in names.items():
            if count > 1:
                yield f"{kind} of '{name}' is recorded {count} times"
    epochs: dict[str, int] = {}
    owner = 0
    for fact in facts:
        owner = max(owner, fact.epoch if fact.kind == "resume" else 0)
        if fact.epoch < owner:
            yield f"fact {fact.seq} ({fact.kind} {fact.name}) is of epoch {fact.epoch}, and the run's owner of {owner}"
        elif fact.kind in {"model", "tool_intent", "tool_result", "delegation", "output", "decision"}:
            instance = fact.instance
            if fact.epoch < epochs.get(instance, 0):
                yield f"fact {fact.seq} ({fact.kind} {fact.name}) was taken under epoch {fact.epoch} after {epochs[instance]}"
            epochs[instance] = max(epochs.get(instance, 0), fact.epoch)


def _judge_requests(
    found: Audit, run_id: str, facts: Sequence[Fact], requests: Sequence[ServedRequest], kills: Sequence[Kill]
) -> None:
    recorded = answers_in(run_id, facts)
    asked: dict[str, list[ServedRequest]] = defaultdict(list)
    for request in requests:
        asked[request.key].append(request)
    if "" in asked:
        found.violations.append(f"{len(asked.pop(''))} requests carry no Idempotency-Key")
    for key, sent in asked.items():
        fact = recorded.get(key)
        if fact is None:
            found.violations.append(f"request '{key}' was sent {len(sent)} times, and no answer of it is recorded")
        else:
            _judge_recorded(found, fact, sent, kills)
        _judge_repeats(found, key if fact is None else fact.name, sent, kills)


def answers_in(run_id: str, facts: Sequence[Fact]) -> dict[str, Fact]:
    """By key of each request that is not to be sent again: what is recorded of it, an answer or a task's failure."""
    refused: dict[str, Fact] = {}
    for fact in facts:
        if fact.kind == "task_failed":
            # The call that failed is the one after the last that was answered.
            turns = sum(each.kind == "model" and each.instance == fact.name for each in facts)
            refused[key_of(run_id, effect_name(fact.name, turns))] = fact
    answers = [fact for fact in facts if isinstance(fact.data, ModelAnswered)]
    # The second model of a chain is asked under a key of its own.
    second = {key_at(key_of(run_id, fact.name), 1): fact for fact in answers if fact.data.model is not None}
    return refused | {key_of(run_id, fact.name): fact for fact in answers} | second


def _judge_recorded(found: Audit, fact: Fact, sent: Sequence[ServedRequest], kills: Sequence[Kill]) -> None:
    """What is recorded is not asked again: not after its answer was taken, and not after a kill that left it recorded."""
    late = [request.arrived_at for request in sent if request.arrived_at > fact.at]
    # One call is let through by each: what it was about to ask when it was frozen.
    if late and all_slipped(late, kills) and len(late) <= sum(kill.is_zombie for kill in kills):
        found.slipped += len(late)
    elif late:
        found.repeats_of_recorded += len(late)
        found.violations.append(
            f"request '{fact.name}' was sent again {late[0] - fact.at:.4f} s after its answer was taken"
        )
    for kill in kills:
        if len(sent) > kill.settled.get(sent[0].key, len(sent)):
            found.violations.append(f"request '{fact.name}' was recorded when {kill.victim} died, and was sent again")


def _judge_repeats(found: Audit, name: str, sent: Sequence[ServedRequest], kills: Sequence[Kill]) -> None:
    """What is asked again was on its way in a kill, and is the same."""
    # After a loss the model is told that outcomes are unknown which it had been told before.
    if len({request.digest for request in sent}) > 1 and not any(kill.is_loss for kill in kills):
        found.violations.append(f"request '{name}' was not the same each time")
    for earlier, later in pairwise(sent):
        if any(kill.explains(earlier.arrived_at, later.arrived_at) for kill in kills):
            found.repeats_in_flight += 1
        else:
            found.violations.append(f"request '{name}' was sent twice, and no kill between explains it")


def _judge_effects(
    found: Audit,
    run_id: str,
    facts: Sequence[Fact],
    lines: Sequence[Mapping[str, str]],
    kills: Sequence[Kill],
) -> None:
    intended = {fact.name for fact in facts if fact.kind == "tool_intent"}
    # A delegation has no intent; the decision is on record instead.
    tools = [fact for fact in facts if not fact.name.endswith("/handler") and fact.name in intended]
    intents = {key_of(run_id, fact.name): fact for fact in tools if fact.kind == "tool_intent"}
    results = {key_of(run_id, fact.name): fact for fact in tools if fact.kind == "tool_result"}
    found.violations += of_lines(lines)
    lost = [line for line in lines if line["key"] not in intents and _is_before_loss(line, kills)]
    found.violations += _of_lost_calls(run_id, facts, lost)
    found.unknown_outcomes += sum(_is_unknown(fact) and fact.name not in intended for fact in facts)
    done = {line["key"]: line["tool"] for line in lines if line not in lost}
    for key, tool in done.items():
        if tool != "look_up" and key not in intents:
            found.violations.append(f"{tool} was done under '{key}' without its intent being recorded")
    for key, fact in results.items():
        if fact.data.to_data()["outcome"] == "unknown":
            found.unknown_outcomes += 1
            if not any(kill.explains(intents[key].at, fact.at) for kill in kills):
                found.violations.append(f"the outcome of '{fact.name}' is said to be unknown, and no kill explains it")
        elif key not in done:
            found.violations.append(f"the result of '{fact.name}' is recorded, and it was never done")
    for key in intents.keys() - results.keys():
        found.violations.append(f"the intent of '{intents[key].name}' has no result")


def _is_unknown(fact: Fact) -> bool:
    return fact.kind == "tool_result" and fact.data.to_data()["outcome"] == "unknown"


def _is_before_loss(line: Mapping[str, Any], kills: Sequence[Kill]) -> bool:
    """Whether what is recorded of a call may have been lost."""
    return any(kill.is_loss and line["at"] < kill.until for kill in kills)


def _of_lost_calls(run_id: str, facts: Sequence[Fact], lost: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """A `once` effect whose intent was lost is flagged: its outcome is unknown to those who go on."""
    unknown = {key_of(run_id, fact.name) for fact in facts if _is_unknown(fact)}
    for line in lost:
        if line["tool"] == "append_line" and line["key"] not in unknown:
            yield f"append_line was done under '{line['key']}', its intent was lost, and nobody is told of it"


def of_lines(lines: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """A `once` effect stands there once; every repetition of another kind has the key of the first."""
    for what in ("key", "text"):
        for value, count in Counter(line[what] for line in lines if line["tool"] == "append_line").items():
            if count > 1:
                yield f"the effect of {what} '{value}' was done {count} times, and must be done once"
    for call, keys in _keys_by_text(lines).items():
        if len(keys) > 1 or "" in keys:
            yield f"{call} was called under the keys {sorted(keys)}"


def _keys_by_text(lines: Sequence[Mapping[str, str]]) -> Mapping[str, set[str]]:
    keys: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        keys[f"{line['tool']}({line['text']})"].add(line["key"])
    return keys


def difference(
    expected: Mapping[str, object], found: Mapping[str, object], *, has_own_shape: bool = False
) -> list[str]:
    """Where an output differs from that of the undisturbed run; times and ids are left out.

    Args:
        expected: Of the undisturbed run.
        found: Of the other.
        has_own_shape: Whether each run has a shape of its own: then only what does not hang on it is compared.
    """
    wanted, got = _comparable(expected), _comparable(found)
    if has_own_shape:
        wanted = {name: wanted[name] for name in ("raw", "exit_reason", "items", "total_tool_calls")}
    return [
        f"{name} is not that of the undisturbed run: {_short(got[name])} instead of {_short(value)}"
        for name, value in wanted.items()
        if got[name] != value
    ]


def _comparable(output: Mapping[str, object]) -> dict[str, object]:
    tasks = output.get("task_outputs", [])
    metrics = output["metrics"]
    assert isinstance(tasks, list)
    assert isinstance(metrics, dict)
    return {
        "raw": output["raw"],
        "exit_reason": output["exit_reason"],
        "items": output.get("items"),
        "task_outputs": sorted((each["task_description"], each["raw"]) for each in tasks),
        **{name: metrics[name] for name in _COUNTED},
    }


#: Metrics that a kill must not change.
_COUNTED = (
    "total_input_tokens",
    "total_output_tokens",
    "total_llm_call_count",
    "total_tool_calls",
    "total_delegations",
)


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 200 else f"{text[:200]}..."
