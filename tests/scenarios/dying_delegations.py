"""Teams that hand work on and whose process dies in the middle of it, and the program that runs them.

`python -c "from tests.scenarios.dying_delegations import main; main(...)"`: by name, so that the team is the same in the
process that goes on with the run. Where its model is and where it leaves marks stands in the environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from ensemble_ray import (
    DelegationPolicyContext,
    DelegationPolicyResult,
    DelegationRequest,
    DynamicToolProvider,
    Ensemble,
    EnsembleListener,
    HierarchicalConstraints,
    OpenAIChatModel,
    TaskCompleteEvent,
    ToolCall,
    tool,
)
from ensemble_ray.runs.coordinator import Coordinator
from tests.builders import agent, call, task
from tests.scenarios.teams import Marks

RUN_ID = "dying"
#: Environment variables: the model's address, the file for marks, the mark that is the process's last.
MODEL, MARKS, LAST = "DYING_MODEL", "DYING_MARKS", "DYING_LAST"
#: Exit status of the process that dies.
DIED = 9


def mark(line: str) -> None:
    """Leave a mark; the first time that it is the last one, the process ends."""
    marks = Marks(Path(os.environ[MARKS]))
    marks.add(line)
    if line == os.environ.get(LAST) and marks.lines.count(line) == 1:
        os._exit(DIED)


@tool(effect="once")
def pay(amount: str) -> str:
    """Pay something."""
    mark(f"pay {amount}")
    return f"paid {amount}"


class Desk(DynamicToolProvider):
    """Tools of the Writer: none, but somebody asks for them when its task begins."""

    def resolve(self) -> Sequence[object]:
        """Nothing."""
        mark("writer begins")
        return ()


def judge(request: DelegationRequest, context: DelegationPolicyContext) -> DelegationPolicyResult:
    """A policy that lets everything pass."""
    mark(f"judge {context.delegating_agent_role} {request.task_description}")
    return DelegationPolicyResult.allow()


def team(*, is_managed: bool = True, cap: int = 1) -> Ensemble:
    """A digger that asks a payer, and a writer; a manager in front of them, or a peer."""
    model = OpenAIChatModel("m", base_url=os.environ[MODEL], api_key="none")
    agents = [
        agent(model, "Digger", allow_delegation=True),
        agent(model, "Payer", tools=[pay]),
        agent(model, "Writer", tools=[Desk()]),
    ]
    if not is_managed:
        asker = agent(model, "Asker", allow_delegation=True)
        return Ensemble(tasks=[task("Ask", asker)], agents=[asker, *agents], delegation_policies=[judge])
    return Ensemble(
        tasks=[task("Get it done", agents[0])],
        agents=agents,
        workflow="hierarchical",
        manager_llm=model,
        delegation_policies=[judge],
        hierarchical_constraints=HierarchicalConstraints(
            required_workers=["Writer"],
            required_stages=[["Digger"], ["Writer"]],
            max_calls_per_worker={"Digger": cap},
        ),
    )


def _ask(*pairs: tuple[str, str], is_managed: bool) -> list[ToolCall]:
    name, text = ("delegate_task", "task_description") if is_managed else ("delegate", "task")
    given = [json.dumps({"agent_role": role, text: what}) for role, what in pairs]
    return [call(name, each, number=number) for number, each in enumerate(given)]


def answers(*, is_managed: bool = True) -> list[object]:
    """What the model says, in the order in which it is asked."""
    return [
        _ask(("Writer", "too early"), ("Digger", "dig"), is_managed=is_managed) if is_managed
        else _ask(("Digger", "dig"), is_managed=False),
        _ask(("Payer", "pay"), is_managed=False),
        call("pay", '{"amount": "5"}'),
        "done",
        "gold",
        _ask(("Writer", "write"), ("Digger", "dig again"), is_managed=is_managed) if is_managed
        else _ask(("Writer", "write"), is_managed=False),
        "a text",
        "all done",
    ]  # fmt: skip


class _Hearing(EnsembleListener):
    def on_task_complete(self, event: TaskCompleteEvent) -> None:
        """Do nothing."""


def _dying(*_: object) -> None:
    os._exit(DIED)


def main(*, is_managed: bool = True, is_reporting: bool = False) -> None:
    """Run it until it dies; `is_reporting`: when the task has recorded its output, before the run hears of it."""
    if is_reporting:
        setattr(Coordinator, "deliver", _dying)  # noqa: B010  an assignment to a method is none for type checkers
    listeners = [_Hearing()] if is_reporting else []  # an output is committed before listeners hear of it
    team(is_managed=is_managed).replace(listeners=listeners).run(runtime="inline", run_id=RUN_ID)
