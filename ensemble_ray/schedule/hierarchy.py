"""The rules of a manager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from ensemble_ray.plan.plan import HierarchyRules


class DelegationEnforcer:
    """Decides the delegations of one manager in one run (S-HIER-47). Roles are spelled as the workers spell them (S-HIER-45)."""

    def __init__(self, rules: HierarchyRules, workers: Sequence[str]) -> None:
        self._rules = rules
        self._workers = tuple(workers)
        self._stage_of = {role: index for index, stage in enumerate(rules.required_stages) for role in stage}
        #: by role, failed attempts included; the global cap counts their sum
        self._approved: Counter[str] = Counter()
        #: attempts from the record, which were not checked again
        self._reapplied: Counter[str] = Counter()
        self._done: Counter[tuple[str, str]] = Counter()
        #: of the current turn; their order is random, so none of them repeats another
        self._new: Counter[tuple[str, str]] = Counter()
        self._completed: set[str] = set()
        self._is_reminded = False
        self._has_progress = False
        self._idle_turns = 0

    def approve(self, role: str) -> str | None:
        """Count an attempt to delegate and return None, or return why it is rejected (S-HIER-71 to S-HIER-74).

        One step, so that parallel calls of a turn cannot pass a cap together (S-HIER-26, S-HIER-41).
        """
        reason = self._refusal(role)
        if reason is None:
            self._approved[role] += 1
        return reason

    def move(self, charged: str, role: str) -> str | None:
        """Count an approved attempt for the worker that a policy chose instead, or return why not (S-HIER-46)."""
        if not self._approved[charged]:
            raise ValueError(f"No attempt is charged to '{charged}'")
        if role == charged:
            return None
        reason = self._refusal(role, is_counted=True)
        if reason is None:
            self._approved[charged] -= 1
            self._approved[role] += 1
        return reason

    def reapply_recorded(self, role: str) -> None:
        """Count an attempt that the record contains as approved, without another decision."""
        self._approved[role] += 1
        self._reapplied[role] += 1

    def record_success(self, role: str, description: str) -> None:
        key = (role, _normalise(description))
        self._has_progress = self._has_progress or key not in self._done
        self._done[key] += 1
        self._new[key] += 1
        self._completed.add(role)

    def turn_ended(self) -> bool:
        """Return True if the manager has stalled: too many turns with tool calls in a row without a new success."""
        self._new.clear()
        self._idle_turns = 0 if self._has_progress else self._idle_turns + 1
        self._has_progress = False
        return 0 < self._rules.stall_turns <= self._idle_turns

    def violations(self) -> tuple[str, ...]:
        return violations_of(self._rules, self._completed)

    def check_repetition(self, role: str, description: str) -> str | None:
        """Return a notice if the worker did the same task in an earlier turn."""
        key = (role, _normalise(description))
        times = self._done[key] - self._new[key]
        if not times:
            return None
        return (
            f"Notice: '{role}' was given this same task before and has completed it {_times(times)}. "
            "Use the result that you have, or ask for something else."
        )

    def hint(self) -> str:
        """Return the possible delegations, for a model after a rejection; "" without rules."""
        if not rules_text(self._rules):
            return ""
        possible: list[str] = []
        for role in self._workers:
            if self._refusal(role) is None:
                left = self._calls_left(role)
                possible.append(f"'{role}'" if left is None else f"'{role}' ({left} left)")
        if not possible:
            # Workers of the same turn may still run, and complete a stage.
            return (
                "Nothing can be delegated right now: work with the results that you have, and with those still to come."
            )
        cap = self._rules.global_max_delegations
        all_left = f" Delegations left in all: {cap - self._approved.total()}." if cap > 0 else ""
        parts = [f"You may delegate now to: {', '.join(possible)}.{all_left}"]
        if lacking := self._lacking():
            parts.append(f"Still required: {_quote(lacking)}.")
        blocking = self._open_stage(before=len(self._rules.required_stages) - 1)  # the last stage blocks no other
        if blocking is not None:
            parts.append(self._describe_open_stage(blocking))
        return " ".join(parts)

    def reminder(self) -> str | None:
        """Return a text, once, for a manager that finishes although required workers are missing and reachable."""
        if self._rules.enforce_required != "remind" or self._is_reminded:
            return None
        reachable = [role for role in self._lacking() if self._is_reachable(role)]
        if not reachable:
            return None
        self._is_reminded = True
        stages = range(max(self._stage_of.get(role, 0) for role in reachable))
        parts = [
            f"You cannot finish yet: required, but not delegated to with success so far: {_quote(reachable)}.",
            *(self._describe_open_stage(stage) for stage in stages if self._open_roles(stage)),
            "Delegate to each of them with delegate_task now, and give your final answer after their results.",
        ]
        return " ".join(parts)

    def _refusal(self, role: str, *, is_counted: bool = False) -> str | None:
        """Return the first failed check, in the order of S-HIER-40; `is_counted`: the global cap includes the attempt."""
        rules = self._rules
        if rules.allowed_workers and role not in rules.allowed_workers:
            return f"Agent '{role}' is not in the allowed_workers list"
        cap = rules.global_max_delegations
        if not is_counted and 0 < cap <= self._approved.total():
            return f"Global delegation cap of {cap} has been reached"
        own = rules.max_calls_per_worker.get(role)
        if own is not None and self._approved[role] >= own:
            return f"Agent '{role}' has reached its delegation cap of {own}"
        open_stage = self._open_stage(before=self._stage_of.get(role, 0))
        if open_stage is not None:
            return f"Cannot delegate to '{role}': stage {open_stage + 1} is not yet complete"
        return None

    def _open_stage(self, *, before: int) -> int | None:
        for index, stage in enumerate(self._rules.required_stages[: max(0, before)]):
            if not self._completed.issuperset(stage):
                return index
        return None

    def _describe_open_stage(self, stage: int) -> str:
        return f"Stage {stage + 1} is not complete: {_quote(self._open_roles(stage))} must succeed before later stages."

    def _open_roles(self, stage: int) -> list[str]:
        return [role for role in self._rules.required_stages[stage] if role not in self._completed]

    def _lacking(self) -> list[str]:
        return [role for role in self._rules.required_workers if role not in self._completed]

    def _is_reachable(self, role: str) -> bool:
        """Whether the caps allow a worker and all workers of the stages before it."""
        needed = {role}
        for index in range(self._stage_of.get(role, 0)):
            needed.update(self._open_roles(index))
        cap = self._rules.global_max_delegations
        if 0 < cap < self._approved.total() + len(needed):
            return False
        allowed = self._rules.allowed_workers
        return all((not allowed or each in allowed) and self._calls_left(each) != 0 for each in needed)

    def _calls_left(self, role: str) -> int | None:
        cap = self._rules.max_calls_per_worker.get(role)
        return None if cap is None else max(0, cap - self._approved[role])


def violations_of(rules: HierarchyRules, completed_roles: Collection[str]) -> tuple[str, ...]:
    """Return a sentence per required worker that never succeeded (S-HIER-50)."""
    return tuple(
        f"Required worker '{role}' was not delegated to during this run."
        for role in rules.required_workers
        if role not in completed_roles
    )


def rules_text(rules: HierarchyRules) -> str:
    """Return the rules for the manager's prompt; "" without rules."""
    parts: list[str] = []
    if rules.allowed_workers:
        parts.append(f"Only these agents may be used: {_quote(rules.allowed_workers)}.")
    parts += [f"'{role}' may be used at most {_times(cap)}." for role, cap in rules.max_calls_per_worker.items()]
    if rules.global_max_delegations > 0:
        parts.append(f"You may delegate at most {_times(rules.global_max_delegations)} in all.")
    stages = [f"stage {n}: {_quote(stage)}" for n, stage in enumerate(rules.required_stages, start=1) if stage]
    if len(stages) > 1:
        parts.append(
            f"Agents work in stages ({'; '.join(stages)}): "
            "every agent of a stage must have succeeded before one of a later stage is used."
        )
    if rules.required_workers:
        parts.append(f"Each of these must succeed at least once before you finish: {_quote(rules.required_workers)}.")
    return " ".join(parts)


def _normalise(text: str) -> str:
    return " ".join(text.split())


def _quote(roles: Iterable[str]) -> str:
    return ", ".join(f"'{role}'" for role in roles)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
