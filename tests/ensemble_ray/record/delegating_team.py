"""Teams that hand work on, whose models and policies are counted; for the tests of records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from ensemble_ray import (
    Agent,
    ChatMessage,
    ChatResponse,
    DelegationPolicyContext,
    DelegationPolicyResult,
    DelegationRequest,
    Ensemble,
    HierarchicalConstraints,
    Task,
    TokenUsage,
    ToolCall,
    ToolSpec,
    tool,
)

USAGE = TokenUsage(10, 5)


def handing(*pairs: tuple[str, str], tool_name: str = "delegate_task") -> ChatResponse:
    """An answer that hands these texts to these roles."""
    text = "task_description" if tool_name == "delegate_task" else "task"
    calls = [
        ToolCall(str(number), tool_name, json.dumps({"agent_role": role, text: what}))
        for number, (role, what) in enumerate(pairs)
    ]
    return ChatResponse(tool_calls=calls, usage=USAGE)


#: What each role's model says to a text, turn by turn; an error is raised.
SAYS: dict[tuple[str, str], list[ChatResponse | str | Exception]] = {
    ("Researcher", "dig"): [handing(("Checker", "check the site"), tool_name="delegate"), "gold"],
    ("Researcher", "dig more"): [ChatResponse(tool_calls=[ToolCall("1", "look_up", '{"word": "ore"}')], usage=USAGE), "ore"],
    ("Checker", "check the site"): [handing(("Writer", "note it"), tool_name="delegate"), "checked"],
    ("Writer", "note it"): ["noted"],
    ("Writer", "write"): ["a text"],
    ("Breaker", "break"): [ValueError("it broke")],
    ("Manager", ""): [
        handing(("Researcher", "dig"), ("Writer", "write"), ("Nobody", "x"), (" ", "y")),
        handing(("writer ", "write"), ("Researcher", "dig more"), ("Researcher", "dig too much"), ("Checker", "forbidden")),
        handing(("Breaker", "break")),
        "all done",
    ],
    ("Asker", "Ask around"): [
        handing(("Researcher", "dig"), ("Breaker", "break"), ("Asker", "me"), tool_name="delegate"),
        "asked",
    ],
}  # fmt: skip


@dataclass
class Counted:
    """What was done, and the teams that do it."""

    asked: list[str] = field(default_factory=list[str])
    called: list[str] = field(default_factory=list[str])
    judged: list[str] = field(default_factory=list[str])

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """The same to the same conversation."""
        del tools
        prompt = messages[1].content or ""
        role = (messages[0].content or "").partition("You are ")[2].partition(".")[0]
        text = "" if role == "Manager" else prompt.partition("## Task\n")[2].partition("\n")[0]
        turn = sum(message.role == "assistant" for message in messages)
        self.asked.append(f"{role}/{text}/{turn}")
        given = SAYS[role, text][turn]
        if isinstance(given, Exception):
            raise given
        return ChatResponse(given, usage=USAGE, finish_reason="length") if isinstance(given, str) else given

    def judge(self, request: DelegationRequest, context: DelegationPolicyContext) -> DelegationPolicyResult:
        """A policy, which refuses one of them."""
        self.judged.append(f"{context.delegating_agent_role}>{request.agent_role}: {request.task_description}")
        if request.task_description == "forbidden":
            return DelegationPolicyResult.reject("not that")
        return DelegationPolicyResult.allow()

    def agents(self) -> list[Agent]:
        """Those who are asked."""

        @tool(effect="none")
        def look_up(word: str) -> str:
            """Look it up."""
            self.called.append(word)
            return f"{word}: a thing"

        return [
            Agent(role="Researcher", goal="Dig", llm=self, tools=[look_up], allow_delegation=True),
            Agent(role="Writer", goal="Write", llm=self),
            Agent(role="Checker", goal="Check", llm=self, allow_delegation=True),
            Agent(role="Breaker", goal="Break", llm=self),
        ]

    def hierarchy(self, **changes: object) -> Ensemble:
        """A manager with constraints, workers that ask each other, and one that fails."""
        agents = self.agents()
        tasks = [
            Task(name=f"t{n}", description=f"Do {n}", expected_output="x", agent=each) for n, each in enumerate(agents)
        ]
        rules = HierarchicalConstraints(
            required_workers=["Writer"],
            required_stages=[["Researcher"], ["Writer"]],
            max_calls_per_worker={"Researcher": 2},
        )
        given = {"hierarchical_constraints": rules, "delegation_policies": [self.judge], **changes}
        return Ensemble(tasks=tasks, agents=agents, workflow="hierarchical", manager_llm=self).replace(**given)

    def peers(self, **changes: object) -> Ensemble:
        """An agent that asks others, which ask others."""
        asker = Agent(role="Asker", goal="Ask", llm=self, allow_delegation=True)
        ask = Task(name="ask", description="Ask around", expected_output="x", agent=asker)
        given = {"delegation_policies": [self.judge], **changes}
        return Ensemble(tasks=[ask], agents=[asker, *self.agents()]).replace(**given)
