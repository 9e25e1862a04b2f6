"""What a replayed task touches in place of journal, model and memory.

In: the facts of a run. Out: its recorded answers and results on request; the first thing that is asked
for and not recorded, as a difference.
Never: a fact that is kept, a model that is asked.
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

#: Kinds that say how a task ended: the runner would take them as they are and do nothing.
_ENDS = (OutputRecorded, FailureRecorded, ExitRecorded)
#: Kinds that a task asks for, and does nothing again where they are there.
_ANSWERS = frozenset(kinds_of(ModelAnswered, ToolReturned))
#: The instance that is at work; several are at the same time where one hands on work to others.
_AT_WORK: ContextVar[str] = ContextVar("ensemble_ray_replayed", default="")
#: Characters shown of a text, and before the place where two differ.
_SHOWN, _BEFORE = 80, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where today's code does something else than what is recorded."""

    #: `the plan`, or the task with turn and call
    where: str
    #: what differs there
    what: str
    #: as it is recorded; cut
    recorded: str
    #: as it is today; cut
    current: str

    def __str__(self) -> str:
        return f"  where:    {self.where}\n  what:     {self.what}\n  recorded: {self.recorded}\n  today:    {self.current}"


def cut_to_difference(recorded: object, current: object) -> tuple[str, str]:
    """Return two values that differ, cut to where they do."""
    old, new = (each if isinstance(each, str) else repr(each) for each in (recorded, current))
    same = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    start = max(0, same - _BEFORE)
    return _window(old, start), _window(new, start)


def _window(text: str, start: int) -> str:
    part = text[start : start + _SHOWN]
    return f"{'...' if start else ''}{part!r}{'...' if start + _SHOWN < len(text) else ''}"


class _Recorded(Mapping[tuple[str, str], Fact]):
    """What is recorded of a task; knows what of it was asked for."""

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
        """Return the first recorded answer or result that was not asked for."""
        left = (fact for key, fact in self._facts.items() if key not in self.used)
        return next((fact for fact in left if fact.kind in _ANSWERS), None)


@dataclass(frozen=True, slots=True)
class _Note:
    """The first difference of a task."""

    difference: Difference
    #: whether it is that the record ends where something is asked for
    is_at_end: bool


class ReplayJournal:
    """Gives what is recorded, keeps nothing, and notes the first thing that is not recorded.

    Work that a task hands on is done again too, on its own record: what was decided of it is decided again, and what
    came of it is asked of the worker again; both are compared when the task would record them.
    """

    def __init__(self, facts: Sequence[Fact]) -> None:
        self._of: dict[str, dict[tuple[str, str], Fact]] = {}
        self._ends: dict[str, Fact] = {}
        for fact in facts:
            instance = fact.instance
            if instance == RUN or isinstance(fact.data, StimulusRecorded) or is_making_agent(fact):
                continue
            if isinstance(fact.data, _ENDS):
                if not self.has_output(instance):  # an exit behind it is at a gate
                    self._ends[instance] = fact
            else:
                self._of.setdefault(instance, {})[fact.name, fact.kind] = fact
        self._at: dict[str, _Recorded] = {}
        self._notes: dict[str, _Note] = {}
        self._compared: set[tuple[str, str]] = set()

    @property
    def used(self) -> int:
        """Recorded answers and results that were used, of all tasks."""
        answered = sum(kind in _ANSWERS for recorded in self._at.values() for _, kind in recorded.used)
        return answered + sum(kind in _ANSWERS for _, kind in self._compared)

    @contextmanager
    def at(self, instance: str) -> Generator[None]:
        """In the block, what is asked for is asked for by that task."""
        token = _AT_WORK.set(instance)
        try:
            yield
        finally:
            _AT_WORK.reset(token)

    def report(self, difference: Difference, *, instance: str | None = None, is_at_end: bool = False) -> NoReturn:
        """Note a difference, if it is the task's first, and stop the task; default: the one at work.

        Raises:
            AgentExecutionError: always.
        """
        self._notes.setdefault(instance or _AT_WORK.get(), _Note(difference, is_at_end))
        raise AgentExecutionError(f"Replay: {difference.what}")

    def find_difference(self, instance: str) -> Difference | None:
        """Return the first difference of a task: what it did otherwise, else what is recorded and it did not ask for."""
        note, unused = self._notes.get(instance), self._find_unused(instance)
        if note is not None or unused is None:
            return None if note is None else note.difference
        return Difference(where=unused, what="a call", recorded="made", current="not made")

    def is_at_end(self, instance: str) -> bool:
        """Whether a task asked for something where its record ends."""
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
        """Return what is recorded under that name."""
        fact = find_fact(self._of.get(name.rsplit("/", 2)[0], {}), name, wanted)
        return None if fact is None else fact.data

    def end_of(self, instance: str) -> Fact | None:
        """How a task ended, as far as its own facts tell."""
        return self._ends.get(instance)

    def has_output(self, instance: str) -> bool:
        """Whether a task has a recorded output."""
        end = self._ends.get(instance)
        return end is not None and isinstance(end.data, OutputRecorded)

    # The journal, as the runner sees it.

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED) -> None:
        """Keep nothing; the beginning of a call means that its result is not recorded.

        Raises:
            AgentExecutionError: it is, or a delegation is another one; the task must stop before the call.
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
        """Return what is recorded of a task; its end, and what comes of its delegations, are left out."""
        facts = self._of.get(instance, {})

        def is_shown(name: str, kind: str) -> bool:
            if (
                kind == ToolIntended.KIND
            ):  # a call that never came back, as when it ended the run: the record ends there
                return (name, ToolReturned.KIND) in facts
            return kind != DelegationDecided.KIND and not (kind == ToolReturned.KIND and self._is_performed(name))

        self._at[instance] = _Recorded({key: fact for key, fact in facts.items() if is_shown(*key)})
        return self._at[instance]

    def _is_performed(self, name: str) -> bool:
        """Whether a call handed work to somebody."""
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
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is held."""


class UnaskedModel:
    """Stands for a model: being asked means that the answer is not recorded."""

    def __init__(self, journal: ReplayJournal) -> None:
        self._journal = journal

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Tell that nothing is recorded.

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
    """Stands for a run's memory: being asked means that what a task was reminded of is not recorded. Fulfils `RunMemory`."""

    def __init__(self, journal: ReplayJournal) -> None:
        self._journal = journal

    async def recall(self, query: MemoryQuery) -> RecalledMemory:
        """Tell that nothing is recorded.

        Raises:
            AgentExecutionError: always.
        """
        nothing, current = cut_to_difference("", query.text)
        what = "memory that was read and is not recorded"
        difference = Difference(where="its memory", what=what, recorded=nothing, current=current)
        self._journal.report(difference, is_at_end=True)

    async def remember(self, note: MemoryNote) -> RememberedNote:
        """Keep nothing."""
        del note
        return RememberedNote()


def _describe_decision(decision: DelegationDecided) -> str:
    """Describe what was decided of a call, as people read it."""
    request, refusal = decision.request, decision.refusal
    asked = f"{as_text(request.get('agent_role'))}: {as_text(request.get('task_description'))}"
    reason = "refused" if refusal is None else refusal.reason
    return f"{asked} -> {reason if decision.worker is None else decision.worker}"


def place_of(effect: str) -> str:
    """`facts#0/2/call-1` as people read it."""
    _, turn, call = effect.rsplit("/", 2)
    return f"turn {turn}, {'model call' if call == 'model' else call.replace('-', ' ')}"


def request_difference(
    journal: ReplayJournal, name: str, messages: Sequence[ChatMessage], trace: TaskTrace | None
) -> Difference:
    """How a request differs from the recorded one, as far as the record has its texts: which message, and where."""
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
    """Return a request: as it was captured, else made of the task's prompts, answers and results."""
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
            return conversation[:1]  # a correction: a conversation of its own, of which only the system prompt is known
        conversation.append(("assistant", answer.text))
        for index in range(len(answer.tool_calls)):
            result = journal.find_recorded(f"{instance}/{previous}/call-{index}", ToolReturned)
            if result is None:
                return conversation
            conversation.append(("tool", result.text))
    return conversation
