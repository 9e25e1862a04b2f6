"""What a replayed task touches in place of journal and model. Room: testing.

In: the facts of a run. Out: its recorded answers and results to whoever asks for them; the first thing that is asked
for and not recorded, as a difference.
Never: a fact that is kept, a model that is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ensemble_ray.errors import AgentExecutionError, ValidationError
from ensemble_ray.messages import ChatMessage, ChatResponse, Fact, ToolSpec
from ensemble_ray.ports import Until
from ensemble_ray.record.journal import RUN, instance_of_fact
from ensemble_ray.record.task_fold import as_mapping, as_sequence, as_text

if TYPE_CHECKING:
    from ensemble_ray.record.recovery import Recovered

__all__ = ["Difference", "RecordedAnswer", "ReplayJournal", "UnaskedModel", "request_difference", "shown"]

#: Kinds that say how a task ended: the runner would take them as they are and do nothing.
_ENDS = frozenset({"output", "task_failed", "task_exited"})
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


def shown(recorded: object, current: object) -> tuple[str, str]:
    """Two values that differ, cut to where they do."""
    old, new = (each if isinstance(each, str) else repr(each) for each in (recorded, current))
    same = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    start = max(0, same - _BEFORE)
    return _window(old, start), _window(new, start)


def _window(text: str, start: int) -> str:
    part = text[start : start + _SHOWN]
    return f"{'...' if start else ''}{part!r}{'...' if start + _SHOWN < len(text) else ''}"


class _Known(Mapping[tuple[str, str], Fact]):
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

    def unused(self) -> Fact | None:
        """The first recorded answer or result that nobody asked for."""
        left = (fact for key, fact in self._facts.items() if key not in self.used)
        return next((fact for fact in left if fact.kind in {"model", "tool_result"}), None)


class ReplayJournal:
    """Gives what is recorded, keeps nothing, and notes the first thing that is not recorded."""

    def __init__(self, facts: Sequence[Fact]) -> None:
        self._of: dict[str, dict[tuple[str, str], Fact]] = {}
        for fact in facts:
            instance = instance_of_fact(fact)
            is_effect = fact.kind not in _ENDS and fact.kind != "stimulus" and not fact.name.endswith("/synthesis")
            if instance != RUN and is_effect:
                self._of.setdefault(instance, {})[fact.name, fact.kind] = fact
        self._at = _Known({})
        #: recorded answers and results that were used, of all tasks
        self.used = 0
        #: the first difference of the task
        self.found: Difference | None = None
        #: whether that difference is that the record ends where something is asked for
        self.is_at_end = False

    def begin(self, instance: str) -> None:
        """Turn to the next task."""
        facts = self._of.get(instance, {})
        # A call that never came back, as when it ended the run: the record ends there.
        lost = [key for key in facts if key[1] == "tool_intent" and (key[0], "tool_result") not in facts]
        self._at = _Known({key: fact for key, fact in facts.items() if key not in lost})
        self.found, self.is_at_end = None, False

    def tell(self, difference: Difference, *, is_at_end: bool = False) -> None:
        """Note a difference, if it is the task's first, and stop the task.

        Raises:
            AgentExecutionError: always.
        """
        if self.found is None:
            self.found, self.is_at_end = difference, is_at_end
        raise AgentExecutionError(f"Replay: {difference.what}")

    def unused(self) -> str | None:
        """Where something is recorded that the task did not ask for; None when there is no such thing."""
        left = self._at.unused()
        self.used += sum(kind in {"model", "tool_result"} for _, kind in self._at.used)
        return None if left is None else place_of(left.name)

    def recorded(self, name: str, kind: str) -> Fact | None:
        """What is recorded under that name of the task that is done now."""
        return self._at.get((name, kind))

    # The journal, as the runner sees it.

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Until = Until.TAKEN) -> None:
        """Keep nothing; the beginning of a call means that its result is not recorded.

        Raises:
            AgentExecutionError: it is; the task must stop before the call.
        """
        del epoch, until
        for fact in facts:
            if fact.kind == "tool_intent":
                call = f"{fact.data.get('tool_name')}({as_text(fact.data.get('arguments'))})"
                difference = Difference(
                    where=place_of(fact.name),
                    what="a call whose result is not recorded",
                    recorded="nothing",
                    current=_window(call, 0),
                )
                self.tell(difference, is_at_end=True)

    async def known(self, instance: str) -> Mapping[tuple[str, str], Fact]:
        """What is recorded of the task, its end left out."""
        del instance
        return self._at

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
        self._journal.tell(
            Difference(
                where="a model call",
                what="a request whose answer is not recorded",
                recorded="nothing",
                current=_window(last, 0),
            ),
            is_at_end=True,
        )
        raise AssertionError  # `tell` raises


class RecordedAnswer:
    """Stands for a model that made an agent: it gives its recorded answers in their order."""

    def __init__(self, name: str, facts: Sequence[Fact]) -> None:
        self._name = name
        self._facts = iter(facts)

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """The next recorded answer.

        Raises:
            ValidationError: there is none.
        """
        del messages, tools
        fact = next(self._facts, None)
        if fact is None:
            raise ValidationError(f"Replay: no answer is recorded for the call that makes an agent, '{self._name}'")
        return ChatResponse(text=cast("str | None", fact.data.get("text")))


def place_of(effect: str) -> str:
    """`facts#0/2/call-1` as people read it."""
    _, turn, call = effect.rsplit("/", 2)
    return f"turn {turn}, {'model call' if call == 'model' else call.replace('-', ' ')}"


def request_difference(
    journal: ReplayJournal, name: str, messages: Sequence[ChatMessage], recovered: Recovered, key: str
) -> Difference:
    """How a request differs from the recorded one, as far as the record has its texts: which message, and where."""
    where = place_of(name)
    turn = int(name.rsplit("/", 2)[1])
    recorded = _captured(recovered, key, turn) or _rebuilt(journal, name, turn, recovered, key)
    for position, message in enumerate(messages):
        if position >= len(recorded):
            break
        role, content = recorded[position]
        if (role, content or "") != (message.role, message.content or ""):
            old, new = shown(content or "", message.content or "")
            return Difference(
                where=where, what=f"message {position + 1} ({message.role}) of the request", recorded=old, current=new
            )
    return Difference(
        where=where,
        what="the request",
        recorded="of another digest; its texts are not recorded (capture_mode keeps them)",
        current=_window(messages[-1].content or "" if messages else "", 0),
    )


def _trace(recovered: Recovered, key: str) -> Mapping[str, object]:
    """The task's recorded trace as data."""
    fold = recovered.tasks[key]
    output = recovered.output_data(key)
    if output is not None:
        return as_mapping(output.get("trace"))
    return as_mapping(None if fold.failure is None else fold.failure.data.get("trace"))


def _captured(recovered: Recovered, key: str, turn: int) -> list[tuple[str, str | None]]:
    """The messages that were captured with that turn; none where the capture mode was off."""
    interactions = as_sequence(_trace(recovered, key).get("llm_interactions"))
    if turn >= len(interactions):
        return []
    messages = map(as_mapping, as_sequence(as_mapping(interactions[turn]).get("messages")))
    return [(as_text(each.get("role")), cast("str | None", each.get("content"))) for each in messages]


def _rebuilt(
    journal: ReplayJournal, name: str, turn: int, recovered: Recovered, key: str
) -> list[tuple[str, str | None]]:
    """The conversation of the agent's own loop, from its prompts, answers and results."""
    prompts = as_mapping(_trace(recovered, key).get("prompts"))
    if not prompts:
        return []
    told: list[tuple[str, str | None]] = [
        ("system", as_text(prompts.get("system_prompt"))),
        ("user", as_text(prompts.get("user_prompt"))),
    ]
    instance = name.rsplit("/", 2)[0]
    for earlier in range(turn):
        answer = journal.recorded(f"{instance}/{earlier}/model", "model")
        calls = as_sequence(None if answer is None else answer.data.get("tool_calls"))
        if answer is None or not calls:
            return told[:1]  # a correction: a conversation of its own, of which only the system prompt is known
        told.append(("assistant", cast("str | None", answer.data.get("text"))))
        for index in range(len(calls)):
            result = journal.recorded(f"{instance}/{earlier}/call-{index}", "tool_result")
            if result is None:
                return told
            told.append(("tool", as_text(result.data.get("text"))))
    return told
