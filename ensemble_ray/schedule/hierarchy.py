"""What a manager may delegate, and when it may stop: the rules behind `delegate_task`.

Rules:
1. An attempt is refused by the first check that fails: not allowed, global cap, own cap, stage (S-HIER-71 to S-HIER-74).
2. Caps count attempts that passed all four; check and count are one step, so that none of a turn's many slips through
   (S-HIER-26, S-HIER-41). What becomes of an attempt later gives nothing back.
3. Stages and required workers count successes alone (S-HIER-42). A stage is complete when all of it succeeded once.
4. An attempt that a policy sends elsewhere is charged to where it goes, if it may go there (S-HIER-46).
5. A manager that wants to finish too early is reminded once, and only of what can still be done.
6. Turns that bring nothing new are counted; enough of them end the manager.

Roles are canonical here, as the workers have them (S-HIER-45). The same calls give the same answers; a manager's
enforcer belongs to one run (S-HIER-47).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from ensemble_ray.plan.plan import HierarchyRules


class DelegationEnforcer:
    """Decides the delegations of one manager, and keeps what the decisions depend on."""

    def __init__(self, rules: HierarchyRules, workers: Sequence[str]) -> None:
        self._rules = rules
        self._workers = tuple(workers)
        self._stage_of = {role: index for index, stage in enumerate(rules.required_stages) for role in stage}
        #: approved attempts by role; their sum is what the global cap counts
        self._approved: Counter[str] = Counter()
        #: those among them that nobody checked
        self._reapplied: Counter[str] = Counter()
        #: successes by role and text
        self._done: Counter[tuple[str, str]] = Counter()
        #: those of the turn; which of them is first is chance, so that they are no repetitions of each other
        self._new: Counter[tuple[str, str]] = Counter()
        self._completed: set[str] = set()
        self._is_reminded = False
        self._has_progress = False
        self._idle_turns = 0

    # Deciding.

    def approve(self, role: str) -> str | None:
        """Decide an attempt; one that passes is counted in the same step.

        Args:
            role: The worker that was asked for.

        Returns:
            Why it is refused (S-HIER-71 to S-HIER-74); None: it is approved.
        """
        reason = self._refusal(role)
        if reason is None:
            self._approved[role] += 1
        return reason

    def move(self, charged: str, role: str) -> str | None:
        """Decide about another worker for an approved attempt (S-HIER-46).

        Args:
            charged: The worker that the attempt was approved for.
            role: The one that a policy wants.

        Returns:
            Why it may not go there, in which case it stays charged where it was; None: it is charged to `role` now.

        Raises:
            ValueError: no attempt is charged to that worker.
        """
        if not self._approved[charged]:
            raise ValueError(f"No attempt is charged to '{charged}'")
        if role == charged:
            return None  # its own place under the cap is no other's
        # The attempt has its place under the global cap already.
        reason = self._refusal(role, is_counted=True)
        if reason is None:
            self._approved[charged] -= 1
            self._approved[role] += 1
        return reason

    def reapply_recorded(self, role: str) -> None:
        """Count an attempt that the record says was approved; what was decided is not decided again."""
        self._approved[role] += 1
        self._reapplied[role] += 1

    def record_success(self, role: str, description: str) -> None:
        """Count a worker that succeeded with that text (S-HIER-42)."""
        key = (role, _normalise(description))
        self._has_progress = self._has_progress or key not in self._done
        self._done[key] += 1
        self._new[key] += 1
        self._completed.add(role)

    def turn_ended(self) -> bool:
        """End a turn with tool calls, all its workers included.

        Returns:
            Whether so many turns in a row brought no success, or none but of what had been done already, that the
            manager should be ended.
        """
        self._new.clear()
        self._idle_turns = 0 if self._has_progress else self._idle_turns + 1
        self._has_progress = False
        return 0 < self._rules.stall_turns <= self._idle_turns

    def _refusal(self, role: str, *, is_counted: bool = False) -> str | None:
        """Return the first check that fails, in the order of the specification (S-HIER-40)."""
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
        """Return the first of so many stages that is not complete (S-HIER-43, S-HIER-44)."""
        for index, stage in enumerate(self._rules.required_stages[: max(0, before)]):
            if not self._completed.issuperset(stage):
                return index
        return None

    # Telling.

    def violations(self) -> tuple[str, ...]:
        """Return what is broken if the manager ends here (S-HIER-50)."""
        return violations_of(self._rules, self._completed)

    def check_repetition(self, role: str, description: str) -> str | None:
        """Return a notice when that worker did the same thing in an earlier turn; white space makes no difference.

        The attempt itself is neither refused nor counted.
        """
        key = (role, _normalise(description))
        times = self._done[key] - self._new[key]
        if not times:
            return None
        often = "once" if times == 1 else f"{times} times"
        return (
            f"Notice: '{role}' was given this same task before and has completed it {often}. "
            "Use the result that you have, or ask for something else."
        )

    def hint(self) -> str:
        """Return what can be done now, for a model that was refused; "" when no rule is set."""
        if not rules_text(self._rules):
            return ""
        possible = [self._with_calls_left(role) for role in self._workers if self._refusal(role) is None]
        cap = self._rules.global_max_delegations
        if possible:
            left = f" Delegations left in all: {cap - self._approved.total()}." if cap > 0 else ""
            text = f"You may delegate now to: {', '.join(possible)}.{left}"
        else:
            # Workers of the same turn may still be at it, and complete a stage.
            text = (
                "Nothing can be delegated right now: work with the results that you have, and with those still to come."
            )
        missing = self._missing() if possible else ""
        return f"{text} {missing}" if missing else text

    def reminder(self) -> str | None:
        """Return what a manager is told that wants to finish while required workers are missing; given at most once.

        Returns:
            None when nothing is missing, nothing of what is missing can be done under the caps, it was said before, or
            the rules want the run to fail without it.
        """
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

    def _missing(self) -> str:
        """Return what is required and not done, and the stage that others wait for; "" when nothing is."""
        parts = [f"Still required: {_quote(lacking)}."] if (lacking := self._lacking()) else []
        first = self._open_stage(before=len(self._rules.required_stages) - 1)  # nobody waits for the last one
        return " ".join([*parts, *([] if first is None else [self._describe_open_stage(first)])])

    def _describe_open_stage(self, stage: int) -> str:
        return f"Stage {stage + 1} is not complete: {_quote(self._open_roles(stage))} must succeed before later stages."

    def _open_roles(self, stage: int) -> list[str]:
        return [role for role in self._rules.required_stages[stage] if role not in self._completed]

    def _lacking(self) -> list[str]:
        return [role for role in self._rules.required_workers if role not in self._completed]

    def _is_reachable(self, role: str) -> bool:
        """Whether that worker, after all that its stage waits for, still fits under the caps."""
        needed = {role}
        for index in range(self._stage_of.get(role, 0)):
            needed.update(self._open_roles(index))
        cap = self._rules.global_max_delegations
        if 0 < cap < self._approved.total() + len(needed):
            return False
        allowed = self._rules.allowed_workers
        return all((not allowed or each in allowed) and self._calls_left(each) != 0 for each in needed)

    def _calls_left(self, role: str) -> int | None:
        """Under the worker's own cap; None: it has none."""
        cap = self._rules.max_calls_per_worker.get(role)
        return None if cap is None else max(0, cap - self._approved[role])

    def _with_calls_left(self, role: str) -> str:
        left = self._calls_left(role)
        return f"'{role}'" if left is None else f"'{role}' ({left} left)"

    # Invariants, for tests and for hunting defects.

    def validate(self) -> None:
        """Check what holds between any two calls.

        Raises:
            AssertionError: something does not hold.
        """
        rules, reapplied = self._rules, self._reapplied
        assert all(count >= 0 for count in self._approved.values()), "charges"
        for role, cap in rules.max_calls_per_worker.items():
            assert self._approved[role] <= cap + reapplied[role], f"cap of '{role}'"
        if rules.global_max_delegations > 0:
            most = rules.global_max_delegations + reapplied.total()
            assert self._approved.total() <= most, "global cap"
        assert self._completed == {role for role, _ in self._done}, "completed roles"


def violations_of(rules: HierarchyRules, completed_roles: Collection[str]) -> tuple[str, ...]:
    """Return a sentence per required worker that never succeeded, in the order of the rules (S-HIER-50)."""
    return tuple(
        f"Required worker '{role}' was not delegated to during this run."
        for role in rules.required_workers
        if role not in completed_roles
    )


def rules_text(rules: HierarchyRules) -> str:
    """Return the rules as a model is told them before it asks for anything; "" when none is set."""
    parts: list[str] = []
    if rules.allowed_workers:
        parts.append(f"Only these agents may be used: {_quote(rules.allowed_workers)}.")
    parts += [f"'{role}' may be used at most {_times(cap)}." for role, cap in rules.max_calls_per_worker.items()]
    if rules.global_max_delegations > 0:
        parts.append(f"You may delegate at most {_times(rules.global_max_delegations)} in all.")
    stages = [f"stage {n}: {_quote(stage)}" for n, stage in enumerate(rules.required_stages, start=1) if stage]
    if len(stages) > 1:  # a single one waits for nobody
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
