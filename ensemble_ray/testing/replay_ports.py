"""The journal, model and memory of a replayed task: they return recorded effects and report unrecorded requests.

A replay writes no fact and calls no model.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeVar

from ensemble_ray.errors import AgentExecutionError
from ensemble_ray.facts.effects import DelegationDecided, ModelAnswered, ToolIntended, ToolReturned, is_making_agent
from ensemble_ray.facts.fact import Fact, FactData, as_text, find_fact, kinds_of
from ensemble_ray.facts.runs import ExitRecorded, FailureRecorded, OutputRecorded, StimulusRecorded
from ensemble_ray.ports import Persistence
from ensemble_ray.values.ids import RUN
from ensemble_ray.values.memory import RememberedNote
from ensemble_ray.values.messages import ChatMessage, ChatResponse, ToolSpec

if TYPE_CHECKING:
    from ensemble_ray.values.memory import MemoryNote, MemoryQuery, RecalledMemory
    from ensemble_ray.values.trace import TaskTrace

D = TypeVar("D", bound=FactData)

#: Kinds that end a task: the runner would reuse them and execute no step.
_ENDS = (OutputRecorded, FailureRecorded, ExitRecorded)
#: Kinds of recorded effects that a task reuses instead of repeating the effect.
_ANSWERS = frozenset(kinds_of(ModelAnswered, ToolReturned))
#: The running instance; a context variable, because several run at the same time when work is delegated.
_AT_WORK: ContextVar[str] = ContextVar("ensemble_ray_replayed", default="")
#: Characters shown of a text, and before the first difference of two texts.
_SHOWN, _BEFORE = 80, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A place where today's code differs from the record."""

    #: `the plan`, or the task with turn and call
    where: str
    #: the part that differs
    what: str
    #: the recorded value; cut
    recorded: str
    #: today's value; cut
    current: str

    def __str__(self) -> str:
        return f"  where:    {self.where}\n  what:     {self.what}\n  recorded: {self.recorded}\n  today:    {self.current}"


def cut_to_difference(recorded: object, current: object) -> tuple[str, str]:
    """Return two different values, cut to the first difference."""
    old, new = (each if isinstance(each, str) else repr(each) for each in (recorded, current))
    same = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    start = max(0, same - _BEFORE)
    return _window(old, start), _window(new, start)


def _window(text: str, start: int) -> str:
    part = text[start : start + _SHOWN]
    return f"{'...' if start else ''}{part!r}{'...' if start + _SHOWN < len(text) else ''}"


class _Recorded(Mapping[tuple[str, str], Fact]):
    """The recorded facts of a task; `used` contains the keys that were looked up."""

    def __init__(self, facts: Mapping[tuple[str, str], Fact]) -> None:
        self._facts = facts
        self.used: set[tuple[str, str]] = set()

    def __getitem__(self, key: tuple[str, str]) -> Fact:
        fact = self._facts[key]
        self.used.add(key)
        return fact

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)

    def find_unused(self) -> Fact | None:
        """Return the first recorded answer or result that was not looked up."""
        left = (fact for key, fact in self._facts.items() if key not in self.used)
        return next((fact for fact in left if fact.kind in _ANSWERS), None)


@dataclass(frozen=True, slots=True)
class _Note:
    """The first difference of a task."""

    difference: Difference
    #: whether the task requested an effect at the end of its record
    is_at_end: bool


class ReplayJournal:
    """Returns recorded facts, stores none, and notes the first difference per task.

    Delegated work is replayed, too, on its own record: the delegation is decided again and the worker executed again.
    Decision and result are compared when the task would record them.
    """

    def __init__(self, facts: Sequence[Fact]) -> None:
        self._of: dict[str, dict[tuple[str, str], Fact]] = {}
        self._ends: dict[str, Fact] = {}
        for fact in facts:
            instance = fact.instance
            if instance == RUN or isinstance(fact.data, StimulusRecorded) or is_making_agent(fact):
                continue
            if isinstance(fact.data, _ENDS):
                if not self.has_output(instance):  # an exit after the output happened at a gate
                    self._ends[instance] = fact
            else:
                self._of.setdefault(instance, {})[fact.name, fact.kind] = fact
        self._at: dict[str, _Recorded] = {}
        self._notes: dict[str, _Note] = {}
        self._compared: set[tuple[str, str]] = set()

    @property
    def used(self) -> int:
        """Number of recorded answers and results that all tasks used."""
        answered = sum(kind in _ANSWERS for recorded in self._at.values() for _, kind in recorded.used)
        return answered + sum(kind in _ANSWERS for _, kind in self._compared)

    @contextmanager
    def at(self, instance: str) -> Generator[None]:
        """Attribute all requests of the block to that task."""
        token = _AT_WORK.set(instance)
        try:
            yield
        finally:
            _AT_WORK.reset(token)

    def report(self, difference: Difference, *, instance: str | None = None, is_at_end: bool = False) -> NoReturn:
        """Note a task's first difference and stop the task; default: the running task.

        Raises:
            AgentExecutionError: always.
        """
        self._notes.setdefault(instance or _AT_WORK.get(), _Note(difference, is_at_end))
        raise AgentExecutionError(f"Replay: {difference.what}")

    def find_difference(self, instance: str) -> Difference | None:
        """Return the first difference of a task: a deviating step, else a recorded effect that it did not request."""
        note, unused = self._notes.get(instance), self._find_unused(instance)
        if note is not None or unused is None:
            return None if note is None else note.difference
        return Difference(where=unused, what="a call", recorded="made", current="not made")

    def is_at_end(self, instance: str) -> bool:
        """Return whether a task requested an effect at the end of its record."""
        note = self._notes.get(instance)
        return note is not None and note.is_at_end

    def _find_unused(self, instance: str) -> str | None:
        recorded = self._at.get(instance)
        left = None if recorded is None else recorded.find_unused()
        if left is None:
            decided = (fact for key, fact in self._of.get(instance, {}).items() if key[1] == DelegationDecided.KIND)
            left = next((fact for fact in decided if (fact.name, fact.kind) not in self._compared), None)
        return None if left is None else place_of(left.name)

    def find_recorded(self, name: str, wanted: type[D]) -> D | None:
        """Return the recorded fact of that name and kind, or None."""
        fact = find_fact(self._of.get(name.rsplit("/", 2)[0], {}), name, wanted)
        return None if fact is None else fact.data

    def end_of(self, instance: str) -> Fact | None:
        """Return the fact that ended a task, or None."""
        return self._ends.get(instance)

    def has_output(self, instance: str) -> bool:
        """Return whether a task has a recorded output."""
        end = self._ends.get(instance)
        return end is not None and isinstance(end.data, OutputRecorded)

    # The runner's interface of the journal.

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED) -> None:
        """Store no fact. The start of a call means that its result is not recorded.

        Raises:
            AgentExecutionError: a call starts or a delegation differs; the task must stop before the call.
        """
        del epoch, until
        for fact in facts:
            if isinstance(fact.data, DelegationDecided):
                self._compare_decision(fact, fact.data)
            elif isinstance(fact.data, ToolReturned) and self._is_performed(fact.name):
                self._compare_result(fact, fact.data)
            elif isinstance(fact.data, ToolIntended):
                call = f"{fact.data.tool_name}({fact.data.arguments})"
                difference = Difference(
                    where=place_of(fact.name),
                    what="a call whose result is not recorded",
                    recorded="nothing",
                    current=_window(call, 0),
                )
                self.report(difference, instance=fact.instance, is_at_end=True)

    async def lookup_recorded(self, instance: str) -> Mapping[tuple[str, str], Fact]:
        """Return the recorded facts of a task, without its end and the results of its delegations."""
        facts = self._of.get(instance, {})

        def is_shown(name: str, kind: str) -> bool:
            if (
                kind == ToolIntended.KIND
            ):  # the call never returned, for example because it ended the run: the record ends there
                return (name, ToolReturned.KIND) in facts
            return kind != DelegationDecided.KIND and not (kind == ToolReturned.KIND and self._is_performed(name))

        self._at[instance] = _Recorded({key: fact for key, fact in facts.items() if is_shown(*key)})
        return self._at[instance]

    def _is_performed(self, name: str) -> bool:
        """Return whether a call delegated work to a worker."""
        decided = self.find_recorded(name, DelegationDecided)
        return decided is not None and decided.worker is not None

    def _compare_decision(self, fact: Fact, decision: DelegationDecided) -> None:
        recorded = self.find_recorded(fact.name, DelegationDecided)
        instance, where = fact.instance, place_of(fact.name)
        current = _describe_decision(decision)
        if recorded is None:
            nothing = Difference(
                where=where, what="a delegation that is not recorded", recorded="nothing", current=_window(current, 0)
            )
            self.report(nothing, instance=instance, is_at_end=True)
        self._compared.add((fact.name, fact.kind))
        if _describe_decision(recorded) != current:
            old, new = cut_to_difference(_describe_decision(recorded), current)
            self.report(Difference(where=where, what="the delegation", recorded=old, current=new), instance=instance)

    def _compare_result(self, fact: Fact, result: ToolReturned) -> None:
        recorded = self.find_recorded(fact.name, ToolReturned)
        if recorded is None:
            return  # the run died before it was recorded
        self._compared.add((fact.name, fact.kind))
        compared = (
            ("the result of the delegation", recorded.text, result.text),
            ("the outcome of the delegation", recorded.outcome, result.outcome),
        )
        for what, before, now in compared:
            if before != now:
                old, new = cut_to_difference(before, now)
                found = Difference(where=place_of(fact.name), what=what, recorded=old, current=new)
                self.report(found, instance=fact.instance)

    async def flush(self) -> None:
        """Return immediately: no fact is stored."""

    async def close(self) -> None:
        """Return immediately: no resource is open."""


class UnaskedModel:
    """Replaces a model: a call means that the answer is not recorded."""

    def __init__(self, journal: ReplayJournal) -> None:
        self._journal = journal

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Report an unrecorded request.

        Raises:
            AgentExecutionError: always.
        """
        del tools
        last = "" if not messages else messages[-1].content or ""
        self._journal.report(
            Difference(
                where="a model call",
                what="a request whose answer is not recorded",
                recorded="nothing",
                current=_window(last, 0),
            ),
            is_at_end=True,
        )


class UnaskedMemory:
    """Implements `RunMemory`: a recall means that the recalled memory is not recorded."""

    def __init__(self, journal: ReplayJournal) -> None:
        self._journal = journal

    async def recall(self, query: MemoryQuery) -> RecalledMemory:
        """Report an unrecorded request.

        Raises:
            AgentExecutionError: always.
        """
        nothing, current = cut_to_difference("", query.text)
        what = "memory that was read and is not recorded"
        difference = Difference(where="its memory", what=what, recorded=nothing, current=current)
        self._journal.report(difference, is_at_end=True)

    async def remember(self, note: MemoryNote) -> RememberedNote:
        """Store no note."""
        del note
        return RememberedNote()


def _describe_decision(decision: DelegationDecided) -> str:
    """Describe a delegation for people."""
    request, refusal = decision.request, decision.refusal
    asked = f"{as_text(request.get('agent_role'))}: {as_text(request.get('task_description'))}"
    reason = "refused" if refusal is None else refusal.reason
    return f"{asked} -> {reason if decision.worker is None else decision.worker}"


def place_of(effect: str) -> str:
    """Return a readable form of an effect's name such as `facts#0/2/call-1`."""
    _, turn, call = effect.rsplit("/", 2)
    return f"turn {turn}, {'model call' if call == 'model' else call.replace('-', ' ')}"


def request_difference(
    journal: ReplayJournal, name: str, messages: Sequence[ChatMessage], trace: TaskTrace | None
) -> Difference:
    """Return the first difference of a request from the recorded one, as far as the record contains its texts."""
    where = place_of(name)
    recorded = [] if trace is None else _recorded_messages(journal, name, trace)
    for position, (message, (role, content)) in enumerate(zip(messages, recorded, strict=False), start=1):
        if (role, content or "") != (message.role, message.content or ""):
            old, new = cut_to_difference(content or "", message.content or "")
            return Difference(
                where=where, what=f"message {position} ({message.role}) of the request", recorded=old, current=new
            )
    return Difference(
        where=where,
        what="the request",
        recorded="of another digest; its texts are not recorded (capture_mode keeps them)",
        current=_window(messages[-1].content or "" if messages else "", 0),
    )


def _recorded_messages(journal: ReplayJournal, name: str, trace: TaskTrace) -> list[tuple[str, str | None]]:
    """Return a recorded request: the captured one, else rebuilt from the task's prompts, answers and results."""
    instance, number, _ = name.rsplit("/", 2)
    turn, prompts = int(number), trace.prompts
    if captured := [each for calls in trace.llm_interactions[turn : turn + 1] for each in calls.messages]:
        return [(each.role, each.content) for each in captured]
    if prompts is None:
        return []
    conversation: list[tuple[str, str | None]] = [
        ("system", prompts.system_prompt),
        *((each.role, each.content) for each in prompts.history),
        ("user", prompts.user_prompt),
    ]
    for previous in range(turn):
        answer = journal.find_recorded(f"{instance}/{previous}/model", ModelAnswered)
        if answer is None or not answer.tool_calls:
            return conversation[:1]  # a correction: a separate conversation; only its system prompt is known
        conversation.append(("assistant", answer.text))
        for index in range(len(answer.tool_calls)):
            result = journal.find_recorded(f"{instance}/{previous}/call-{index}", ToolReturned)
            if result is None:
                return conversation
            conversation.append(("tool", result.text))
    return conversation
