"""Teams whose runs a browser is shown: what each of them records. Pace is how long a second of their models lasts."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal

from ensemble_ray import (
    Agent,
    CostConfiguration,
    Ensemble,
    Graph,
    GraphEdge,
    GraphRoutingContext,
    Loop,
    MapEnsemble,
    MapReduceEnsemble,
    Review,
    RunOptions,
    Task,
    Until,
    tool,
)
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import answer, call

__all__ = [
    "HOSTILE",
    "Reading",
    "blocked_team",
    "doubtful_team",
    "drafting_loop",
    "failing_team",
    "hostile_team",
    "letters",
    "mapped",
    "report_team",
    "reviewed_team",
    "routing_graph",
]

#: A text that tries what texts try: to be HTML, to colour a terminal, to turn the direction, to be in the way.
HOSTILE = (
    "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>\n"
    "\x1b[31mred\x1b[0m \x07bell \u202egnp.exe\u202c [link](javascript:window.pwned=1)\n"
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd\n" + "x" * 1_048_576
)
_FACTS = {
    "demand": "Orders for home batteries rose 38 % in a year; two thirds of them come with a new roof array.",
    "prices": "Cells cost 61 USD per kWh, down from 89. Inverters have not become cheaper since 2024.",
    "rules": "From March on a feed-in limit of 60 % applies to arrays without storage in four states.",
}
_DRAFT = (
    "Home storage is growing out of its niche. Orders rose 38 % in a year, two thirds of them together with a new roof "
    "array. Cells have become a third cheaper, while inverters have not.\n\nFrom March on, a feed-in limit of 60 % for "
    "arrays without storage will push the rest of the market in the same direction. We expect prices of whole systems "
    "to fall by another tenth, and waiting times of installers to become the bottleneck."
)


@tool(effect="none")
def search_reports(words: str) -> str:
    """Search the market reports."""
    return next((fact for key, fact in _FACTS.items() if key in words), "Nothing on that.")


@tool
def send_newsletter(text: str) -> str:
    """Send the newsletter to its readers."""
    return f"Sent to 1,204 readers: {text[:40]}…"


def _slow(pace_s: float, seconds: float, *replies: object) -> Callable[[ScriptedCall], object]:
    """Answer with each reply in turn, the last one again and again, each after a while."""
    left = itertools.chain(replies, itertools.repeat(replies[-1]))

    async def reply(_: ScriptedCall) -> object:
        await asyncio.sleep(seconds * pace_s)
        return next(left)

    return reply


def _person(role: str, goal: str, model: ScriptedModel, **fields: object) -> Agent:
    return Agent(role=role, goal=goal, llm=model, **fields)  # type: ignore[arg-type]


def report_team(pace_s: float = 0.0, *, mood: str = "") -> Ensemble:
    """Three researchers with a tool side by side, an analyst, a writer, an editor."""

    def finder(topic: str, seconds: float) -> Task:
        request = answer("", 412, 38, calls=[call("search_reports", f'{{"words": "{topic} of home batteries"}}')])
        model = ScriptedModel(
            otherwise=_slow(pace_s, seconds, request, answer(_FACTS[topic], 640, 96)),
        )
        return Task(
            name=f"find-{topic}",
            description=f"Find what is known about {topic} of home batteries",
            expected_output="Facts with figures",
            agent=_person(
                "Researcher", "Find what is on record", model, tools=[search_reports, send_newsletter], max_iterations=5
            ),
        )

    found = [finder("demand", 1.0), finder("prices", 1.6), finder("rules", 0.7)]
    analyst = ScriptedModel(
        otherwise=_slow(
            pace_s, 1.3, answer("Demand is driven by rules more than by prices; installers are the limit.", 1210, 164)
        )
    )
    writer = ScriptedModel(otherwise=_slow(pace_s, 2.2, answer(_DRAFT, 1680, 402)))
    editor = ScriptedModel(
        otherwise=_slow(pace_s, 0.8, answer(f"{_DRAFT.replace('its niche', 'the niche')} {mood}".strip(), 1104, 388))
    )
    analysis = Task(
        name="analyse",
        description="Say in two sentences what drives the market",
        expected_output="Two sentences",
        agent=_person("Analyst", "Say what facts mean", analyst),
        context=found,
    )
    article = Task(
        name="write",
        description="Write the market letter on {topic}, 150 words, for readers who install them",
        expected_output="Prose without headings",
        agent=_person("Writer", "Write plainly", writer),
        context=[*found, analysis],
    )
    edit = Task(
        name="edit",
        description="Correct the letter, and change nothing that is right",
        expected_output="The letter",
        agent=_person("Editor", "Let nothing wrong be printed", editor),
        context=[article],
    )
    prices = CostConfiguration(
        input_token_rate=Decimal("0.0000025"), output_token_rate=Decimal("0.00001"), currency="USD"
    )
    return Ensemble(
        tasks=[*found, analysis, article, edit],
        workflow="parallel",
        cost_configuration=prices,
        max_tokens=20_000,
        inputs={"topic": "home batteries"},
    )


def failing_team(pace_s: float = 0.0) -> Ensemble:
    """A team whose second task fails: its endpoint refuses the key."""
    good = ScriptedModel(otherwise=_slow(pace_s, 0.6, answer("Eleven boats were damaged.", 300, 40)))
    bad = ScriptedModel(otherwise=_slow(pace_s, 0.3, ValueError("the endpoint refused the key (401)")))
    facts = Task(
        name="facts",
        description="Find what is known of the storm",
        expected_output="Facts",
        agent=_person("Researcher", "Find", good),
    )
    story = Task(
        name="story",
        description="Write the story of the storm",
        expected_output="Prose",
        agent=_person("Writer", "Write", bad),
        context=[facts],
    )
    return Ensemble(tasks=[facts, story], workflow="sequential")


def reviewed_team(*, timeout: timedelta | None = timedelta(hours=4), role: str | None = None) -> Ensemble:
    """A team that waits in its record until somebody decides about its letter."""
    writer = ScriptedModel(otherwise=answer(_DRAFT, 900, 380))
    letter = Task(
        name="letter",
        description="Write the letter to the customers",
        expected_output="A letter",
        agent=_person("Writer", "Write plainly", writer),
        review=Review(
            prompt="Does it promise anything that we cannot keep?",
            timeout=timeout or timedelta(0),
            on_timeout="exit_early",
            required_role=role,
        ),
    )
    send = Task(
        name="send",
        description="Say that it was sent",
        expected_output="One line",
        agent=_person("Clerk", "Send what was approved", ScriptedModel(otherwise=answer("It was sent.", 420, 12))),
        context=[letter],
    )
    return Ensemble(tasks=[letter, send], workflow="sequential", review_wait="detach")


def drafting_loop(pace_s: float = 0.0) -> Ensemble:
    """A writer and a critic who go round three times."""
    drafts = [answer(f"Draft {number}: the tide is the moon's doing.", 200 + 90 * number, 60) for number in (1, 2, 3)]
    verdicts = [answer(text, 300, 20) for text in ("Too short.", "Better; name the sun.", "APPROVED")]
    draft = Task(
        name="draft",
        description="Write three sentences on tides",
        expected_output="Three sentences",
        agent=_person("Writer", "Write plainly", ScriptedModel(otherwise=_slow(pace_s, 0.5, *drafts))),
    )
    review = Task(
        name="critique",
        description="Criticise the draft, or say APPROVED",
        expected_output="One sentence",
        agent=_person("Critic", "Find what is weak", ScriptedModel(otherwise=_slow(pace_s, 0.4, *verdicts))),
        context=[draft],
    )
    refine = Loop(name="refine", body=[draft, review], until=Until.text_contains("APPROVED"), max_iterations=5)
    return Ensemble(loops=[refine])


def _is_billing(context: GraphRoutingContext) -> bool:
    return "BILLING" in context.last_output.raw


def routing_graph() -> Ensemble:
    """A ticket that is triaged and answered; one way is not taken."""

    def state(name: str, role: str, text: str) -> Task:
        return Task(
            name=name,
            description=text,
            expected_output="One line",
            agent=_person(role, "Help", ScriptedModel(otherwise=answer(f"{name}: BILLING", 180, 24))),
        )

    states = {
        "triage": state("triage", "Triage", "Say what the ticket is about"),
        "billing": state("billing", "Billing", "Look the invoice up"),
        "technical": state("technical", "Engineer", "Find the defect"),
        "reply": state("reply", "Writer", "Answer the customer"),
    }
    edges = [
        GraphEdge(from_state="triage", to_state="billing", condition=_is_billing, label="about money"),
        GraphEdge(from_state="triage", to_state="technical", label="anything else"),
        GraphEdge(from_state="billing", to_state="reply"),
        GraphEdge(from_state="technical", to_state="reply"),
        GraphEdge(from_state="reply", to_state=Graph.END),
    ]
    return Ensemble(graph=Graph(name="desk", states=states, edges=edges, start="triage"))


def hostile_team() -> Ensemble:
    """A task whose answer, name and tool are made to do harm."""
    model = ScriptedModel(call("search_reports", '{"words": "<b>\x1b[2J\u202e"}'), otherwise=answer(HOSTILE, 10, 10))
    agent = _person("<img src=x onerror=alert(1)>", "Do harm", model, tools=[search_reports])
    first = Task(name="attack", description="<script>alert(1)</script> \x1b[31m", expected_output="x", agent=agent)
    return Ensemble(tasks=[first])


def blocked_team(gate: Callable[[ScriptedCall], object]) -> Ensemble:
    """Two tasks, of which the second answers when the test lets it."""
    first = Task(
        name="first",
        description="Say what is at hand",
        expected_output="x",
        agent=_person("Researcher", "Find", ScriptedModel(otherwise=answer("It is at hand.", 20, 5))),
    )
    second = Task(
        name="second",
        description="Wait for the test",
        expected_output="x",
        agent=_person("Writer", "Wait", ScriptedModel(otherwise=gate)),
        context=[first],
    )
    third = Task(
        name="third",
        description="Come to an end",
        expected_output="x",
        agent=_person("Editor", "End", ScriptedModel(otherwise=answer("The end.", 20, 5))),
        context=[second],
    )
    return Ensemble(tasks=[first, second, third], workflow="sequential")


def doubtful_team() -> Ensemble:
    """A task whose tool fails once before it works."""
    tries = itertools.count()

    @tool
    def pay(amount: str) -> str:
        """Pay an invoice."""
        if next(tries) == 0:
            raise ConnectionError("the bank does not answer")
        return f"paid {amount}"

    model = ScriptedModel(
        call("pay", '{"amount": "12.00"}'),
        call("pay", '{"amount": "12.00"}', number=1),
        otherwise=answer("Paid.", 9, 3),
    )
    clerk = _person("Clerk", "Pay", model, tools=[pay])
    return Ensemble(name="Clerks", tasks=[Task(name="pay", description="Pay it", expected_output="x", agent=clerk)])


def mapped(items: int, pace_s: float = 0.0, *, at_once: int | None = None) -> MapReduceEnsemble:
    """A map-reduce over numbers: as many maps as items, joined by fives."""

    async def read_review(asked: ScriptedCall) -> object:
        await asyncio.sleep(pace_s * (0.2 + 0.1 * (asked.number * 7 % 11)))
        return answer("Praises the lid.", 80, 9)

    reader = _person("Reader", "Read reviews", ScriptedModel(otherwise=read_review))
    joined = answer("Lid: 5 of 5.", 210, 30)
    joiner = _person("Editor", "Join notes", ScriptedModel(otherwise=_slow(pace_s, 0.3, joined)))

    def read(item: int) -> Task:
        return Task(description=f"Name what review {item} praises", expected_output="Two lines", agent=reader)

    def join(notes: list[Task]) -> Task:
        return Task(description="Join the notes", expected_output="A list", agent=joiner, context=notes)

    return MapReduceEnsemble(
        items=list(range(items)), map_task=read, reduce_task=join, chunk_size=5, max_concurrency=at_once
    )


#: What a caller says of a run that is looked at.
TAGS = RunOptions(tags={"team": "energy", "issue": "2026-11"})


class Reading:
    """Item 7 takes longest, items 20, 40 and 60 time out, and later items need more tokens."""

    def __init__(self, count: int, pace_s: float = 0.0) -> None:
        self._pace_s = pace_s
        self._others = count - 1
        self._done = asyncio.Event()

    async def __call__(self, call: ScriptedCall) -> object:
        """Answer; item 7 after all others."""
        number = int(re.findall(r"letter (\d+)", call.text)[0])
        if number == 7:
            await self._done.wait()
            await asyncio.sleep(0.4)
            return answer("A complaint.", 107, 5)
        await asyncio.sleep(0.002 * (number % 5) + self._pace_s * (0.4 + number * 37 % 101 / 101) ** 4)
        self._others -= 1
        if not self._others:
            self._done.set()
        if number and number % 20 == 0:
            raise TimeoutError("the endpoint did not answer")
        return answer("A complaint.", 100 + number, 5)


def letters(count: int, pace_s: float = 0.0) -> MapEnsemble:
    """A map over letters, of which each 20th fails and is left out."""
    reader = Agent(role="Reader", goal="Read letters", llm=ScriptedModel(otherwise=Reading(count, pace_s)))

    def read(item: int) -> Task:
        return Task(description=f"Say what letter {item} is about", expected_output="A line", agent=reader)

    return MapEnsemble(items=list(range(count)), map_task=read, on_item_error="collect", retry=None)
