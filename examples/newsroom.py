"""A newsroom: a manager delegates to a researcher, an analyst and a writer, under rules that bind every model.

python examples/newsroom.py                           a model behind OPENAI_API_KEY, or behind OPENAI_BASE_URL
python examples/newsroom.py local                     the embedded model: no key, no network

The same team as a file: examples/teams/newsroom.yaml
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence

from ensemble_ray import (
    Agent,
    ChatMessage,
    ChatModel,
    ChatResponse,
    DelegationCompletedEvent,
    DelegationFailedEvent,
    DelegationPolicyContext,
    DelegationPolicyResult,
    DelegationRequest,
    DelegationStartedEvent,
    Ensemble,
    EnsembleOutput,
    HierarchicalConstraints,
    LocalChatModel,
    Task,
    TokenUsage,
    ToolCall,
    ToolSpec,
    tool,
)

ARCHIVE = {
    "Harbour log": "On Monday night the water stood 2.4 metres above the mark, the highest level in forty years.",
    "Council minutes": "A sea wall of 12 million was put off in 2019. A lower one of 3 million was built in 2021.",
    "Fishers' union": "Eleven boats were damaged. The lower wall turned the water into the harbour, the fishers say.",
    "Weather office": "The storm met a spring tide. The two come together once in fifty years.",
    "Theatre": "The new season opens in May with a comedy.",
}


@tool(effect="none")
def search_archive(words: str) -> str:
    """Search the newspaper's archive for words; gives the notes that have the most of them."""
    wanted = set(re.findall(r"[a-z]{4,}", words.lower()))
    found = {name: wanted & set(re.findall(r"[a-z]{4,}", f"{name} {note}".lower())) for name, note in ARCHIVE.items()}
    best = sorted((name for name in ARCHIVE if found[name]), key=lambda name: -len(found[name]))
    if not best:
        return f"Nothing on that. The archive has notes of: {', '.join(ARCHIVE)}"
    return "\n".join(f"{name}: {ARCHIVE[name]}" for name in best[:3])


def no_rumours(request: DelegationRequest, _: DelegationPolicyContext) -> DelegationPolicyResult:
    """Check each delegation after the constraints."""
    if "rumour" in request.task_description.lower():
        return DelegationPolicyResult.reject("this paper prints no rumours; ask for what can be checked")
    return DelegationPolicyResult.allow()


#: The manager must follow these, whatever its model answers.
RULES = HierarchicalConstraints(
    required_stages=[["Researcher"], ["Analyst"], ["Writer"]],
    required_workers=["Writer"],
    allowed_workers=["Researcher", "Analyst", "Writer"],
    max_calls_per_worker={"Researcher": 2, "Analyst": 2},
    global_max_delegations=6,
)


def newsroom(
    manager: ChatModel | str, researcher: ChatModel | str, analyst: ChatModel | str, writer: ChatModel | str
) -> Ensemble:
    # The columnist is not needed for this story.
    columnist = Agent(role="Columnist", goal="Have an opinion", llm=writer)
    finder = Agent(role="Researcher", goal="Find what is on record", tools=[search_archive], llm=researcher)
    thinker = Agent(role="Analyst", goal="Say in two sentences what facts mean", llm=analyst)
    author = Agent(role="Writer", goal="Write short, plain news", llm=writer)
    # In no useful order: the stages define the order.
    article = Task(
        description="Write the article about {topic}: 60 words, from the facts and the analysis",
        expected_output="Prose without headings",
        agent=author,
    )
    analysis = Task(
        description="Say how it came to {topic}, from the facts", expected_output="Two sentences", agent=thinker
    )
    facts = Task(
        description="Find what the archive has on {topic}", expected_output="Facts with their sources", agent=finder
    )
    return Ensemble(
        agents=[author, thinker, finder, columnist],
        tasks=[article, analysis, facts],
        workflow="hierarchical",
        manager_llm=manager,
        hierarchical_constraints=RULES,
        delegation_policies=[no_rumours],
        delegation_timeout=600,
        on_delegation_started=show,
        on_delegation_completed=show,
        on_delegation_failed=show,
    )


def show(event: DelegationStartedEvent | DelegationCompletedEvent | DelegationFailedEvent) -> None:
    """Print the outcome of delegations."""
    match event:
        case DelegationStartedEvent():
            print(f"-> {event.worker_role}: {_short(event.task_description)}")
        case DelegationCompletedEvent():
            print(f"<- {event.worker_role}: {_short(event.response.raw_output or '')}")
        case DelegationFailedEvent():
            what = "refused" if event.cause is None else "failed"
            print(f"!! {event.worker_role} {what}: {event.failure_reason}")


def _short(text: str, most: int = 120) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


#: For an answer without a model.
NO_TOKENS = TokenUsage(input_tokens=0, output_tokens=0)


class ToolFirst:
    """Calls each tool once with the task's text, for a model that cannot call tools itself."""

    def __init__(self, model: ChatModel) -> None:
        self._model = model

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Return a call of the next tool; after the last one, the model's answer with all results before it."""
        brief = messages[1].content or ""
        results = [message.content or "" for message in messages if message.role == "tool"]
        if len(results) < len(tools):
            name = tools[len(results)].name
            call = ToolCall(f"call_{name}", name, json.dumps({"words": brief}))
            return ChatResponse(tool_calls=[call], usage=NO_TOKENS)
        answer = self._model.chat([messages[0], ChatMessage("user", "\n".join([brief, *results]))])
        return answer if isinstance(answer, ChatResponse) else await answer


class Impatient:
    """Leads without a model: delegates to each agent that has returned no result, in any order.

    The embedded model is too small to lead. The rules correct this one.
    """

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),  # noqa: ARG002  it knows its only tool
    ) -> ChatResponse:
        """Return the next delegation, or the last result when all agents have returned one."""
        tasks = re.findall(r"^Task \d+: (.+)\n.*\nSuggested agent: (.+)$", messages[1].content or "", re.MULTILINE)
        asked = [str(json.loads(call.arguments)["agent_role"]) for message in messages for call in message.tool_calls]
        told = [message.content or "" for message in messages if message.role == "tool"]
        failures = ("Delegation rejected", "Error:")
        given = {role: text for role, text in zip(asked, told, strict=True) if not text.startswith(failures)}
        waiting = [(role, text) for text, role in tasks if role not in given]
        if not waiting:
            return ChatResponse(text=told[-1], usage=NO_TOKENS)
        role, text = min(waiting, key=lambda each: asked.count(each[0]))
        arguments = {"agent_role": role, "task_description": "\n".join([text, *given.values()])}
        call = ToolCall(f"call_{len(asked)}", "delegate_task", json.dumps(arguments))
        return ChatResponse(tool_calls=[call], usage=NO_TOKENS)


def team(llm: str = "openai:gpt-4o-mini") -> Ensemble:
    if llm != "local":
        return newsroom(llm, llm, llm, llm)
    small = LocalChatModel(max_tokens=120, temperature=0, repeat_penalty=1.1)
    return newsroom(Impatient(), ToolFirst(small), small, small)


def main(llm: str = "openai:gpt-4o-mini") -> EnsembleOutput:
    output = team(llm).run({"topic": "the flood in the harbour"})
    print(f"\n{output.raw}\n")
    delegated = [each.agent_role for each in output.task_outputs[:-1]]  # the last one is the manager's
    print(f"Worked, in this order: {', '.join(delegated)}. All of it: ensemble-ray trace {output.run_id}")
    return output


if __name__ == "__main__":
    main(*sys.argv[1:2])
