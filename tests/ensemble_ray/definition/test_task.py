"""What a task accepts, refuses, and stays."""

from __future__ import annotations

import enum
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NewType, TypedDict

import pydantic
import pytest
from typing_extensions import TypeAliasType

from ensemble_ray import Agent, AgentTool, RateLimit, RateLimitedChatModel, Task, ToolResult, ValidationError, tool
from ensemble_ray.testing import ScriptedModel

MODEL = ScriptedModel()
WRITER = Agent(role="Writer", goal="Write", llm=MODEL)
GIVEN: dict[str, object] = {"description": "Write on {topic}", "expected_output": "Prose"}


class City(pydantic.BaseModel):
    name: str


class Cities(pydantic.RootModel[list[City]]):
    pass


@dataclass
class Town:
    name: str


class Village(TypedDict):
    name: str


class Colour(enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


class Echo(AgentTool):
    name = "echo"
    description = "Repeats."

    def execute(self, text: str, /) -> ToolResult:
        return ToolResult.success(text)


@tool
def count(text: str) -> int:
    """Count words."""
    return len(text.split())


def handle(context: Any) -> str:
    """A handler."""
    return "done"


def test_defaults_hold_when_only_the_required_is_given() -> None:
    """The table of fields of file 01."""
    task = Task(**GIVEN)
    assert (task.name, task.agent, task.context, task.output_type, task.max_output_retries) == (None, None, (), None, 3)
    assert (task.input_guardrails, task.output_guardrails, task.llm, task.stream) == ((), (), None, None)
    assert (task.tools, task.max_iterations, task.rate_limit, task.handler) == ((), None, None, None)
    assert (task.revision_feedback, task.prior_attempt_output, task.attempt_number) == (None, None, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": " "}, "Task name must not be blank when set"),
        ({"name": ""}, "Task name must not be blank when set"),
        ({"description": None}, "Task description must not be blank"),
        ({"description": "\n"}, "Task description must not be blank"),
        ({"expected_output": None}, "Task expected_output must not be blank"),
        ({"expected_output": ""}, "Task expected_output must not be blank"),
        ({"tools": [count, None]}, "Task tool at index 1 must not be None"),
        ({"tools": [1]}, "Task tool at index 0 (int) is neither an AgentTool nor has @tool methods"),
        ({"max_iterations": 0}, "Task max_iterations must be > 0 when set, got: 0"),
        ({"max_iterations": -1}, "Task max_iterations must be > 0 when set, got: -1"),
        ({"context": [Task(**GIVEN), None]}, "Task context element at index 1 must not be None"),
        ({"output_type": type(None)}, "Task output_type must not be Void"),
        ({"max_output_retries": -1}, "Task max_output_retries must be >= 0, got: -1"),
    ],
)
def test_task_is_refused_with_the_exact_text_when_a_check_fails(changes: dict[str, object], message: str) -> None:
    """S-DOM-20 to S-DOM-25, S-DOM-28, S-DOM-30, S-CONV-13."""
    with pytest.raises(ValidationError) as caught:
        Task(**{**GIVEN, **changes})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "kind",
    [
        *(City, Cities, Town, Village, Colour, Number, str, int, float, bool, bytes, dict, dict[str, int], list),
        *(list[City], tuple[int, ...], set[str], City | None, int | str, Literal["a"]),
        *(Annotated[int, "a"], NewType("Id", int), TypeAliasType("Ids", list[int])),
    ],
    ids=str,
)
def test_output_type_is_kept_when_an_answer_can_be_parsed_into_it(kind: type[object]) -> None:
    """S-DOM-32: whatever a Python user writes as a type."""
    assert Task(**GIVEN, output_type=kind).output_type is kind


@pytest.mark.parametrize("kind", ["City", 5, City(name="Bern"), Literal, len])
def test_task_is_refused_when_its_output_type_is_no_type(kind: object) -> None:
    """S-DOM-27, S-CONV-12: at construction, not at the first answer."""
    with pytest.raises(ValidationError, match="Task output_type must be a type, such as a pydantic model, str or list"):
        Task(**GIVEN, output_type=kind)


def test_task_is_refused_when_its_output_type_cannot_be_hashed() -> None:
    """S-DOM-27: each process makes one parser of a type, and finds it by the type."""
    with pytest.raises(
        ValidationError, match=r"Task output_type must be hashable, and .*Annotated.* is not: unhashable"
    ):
        Task(**GIVEN, output_type=Annotated[int, ["a"]])


def test_only_the_first_failure_is_told_when_several_checks_fail() -> None:
    """S-CONV-14: the order of the table, and the handler's check last."""
    wrong: dict[str, object] = {
        "name": " ",
        "description": "",
        "expected_output": " ",
        "tools": [None],
        "max_iterations": 0,
        "context": [None],
        "output_type": 5,
        "max_output_retries": -1,
        "handler": handle,
    }
    for fix, message in (
        ({}, "Task name must not be blank when set"),
        ({"name": None}, "Task description must not be blank"),
        ({"description": "d"}, "Task expected_output must not be blank"),
        ({"expected_output": "e"}, "Task tool at index 0 must not be None"),
        ({"tools": ()}, "Task max_iterations must be > 0 when set, got: 0"),
        ({"max_iterations": 1}, "Task context element at index 0 must not be None"),
        ({"context": None}, "Task output_type must be a type, such as a pydantic model, str or list[int], got: 5"),
        ({"output_type": City}, "Task max_output_retries must be >= 0, got: -1"),
        ({"max_output_retries": 0}, "Task cannot have both a handler and max_iterations."),
    ):
        wrong |= fix
        with pytest.raises(ValidationError) as caught:
            Task(**wrong)
        assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_scopes": 5},
        {"review": True},
        {"streaming_llm": MODEL},
        {"reflection_config": "yes"},
        {"agent": "Writer"},
        {"context": ["facts"]},
        {"context": "facts"},
        {"input_guardrails": [1]},
        {"handler": 5},
        {"llm": 5},
        {"tools": 5},
        {"attempt_number": "1"},
    ],
)
def test_our_error_is_raised_when_a_field_is_unknown_or_of_a_wrong_type(changes: dict[str, object]) -> None:
    """S-CONV-4, S-CONV-12; fields of later versions are unknown (S-SET-41)."""
    with pytest.raises(ValidationError) as caught:
        Task(**{**GIVEN, **changes})
    assert type(caught.value) is ValidationError


def test_task_is_refused_when_a_context_task_looks_like_itself() -> None:
    """S-DOM-26, S-DOM-33: same texts and the same agent object."""
    first = Task(**GIVEN, agent=WRITER)
    with pytest.raises(ValidationError) as caught:
        Task(**GIVEN, agent=WRITER, context=[first])
    assert str(caught.value) == "Task cannot reference itself in context"


def test_lookalike_in_context_is_accepted_when_the_agent_is_missing_or_another() -> None:
    """S-DOM-33: checked only when an agent is set, and by identity."""
    twin = Agent(role="Writer", goal="Write", llm=MODEL)
    assert Task(**GIVEN, context=[Task(**GIVEN)]).context
    assert Task(**GIVEN, agent=WRITER, context=[Task(**GIVEN, agent=twin)]).context
    assert Task(**GIVEN, agent=WRITER, context=[Task(description="Other", expected_output="Prose", agent=WRITER)])


def test_lookalike_in_context_is_accepted_when_it_has_a_context_of_its_own() -> None:
    """S-DOM-33: one agent joins texts, and then joins what it joined, by the same words."""
    joined = Task(**GIVEN, agent=WRITER, context=[Task.of("Find facts")])
    assert Task(**GIVEN, agent=WRITER, context=[joined]).context == (joined,)


def test_short_form_fills_in_the_expected_output_when_none_is_given() -> None:
    """S-DOM-34."""
    task = Task.of("Find facts")
    assert (task.description, task.agent) == ("Find facts", None)
    assert task.expected_output == "Produce a complete and accurate response to the task."
    assert Task.of("Find facts", "A list").expected_output == "A list"
    assert Task.of("Find facts", "A list").agent is None


def test_context_task_is_shared_when_several_name_it() -> None:
    """S-DOM-35: the same object, in a tuple."""
    facts = Task(**GIVEN)
    first, second = Task.of("a").replace(context=[facts]), Task.of("b").replace(context=(facts,))
    assert first.context[0] is second.context[0] is facts


def test_collections_are_copied_when_a_task_is_built() -> None:
    """S-CONV-5, S-CONV-7."""
    context: list[Task] = [Task.of("a")]
    guardrails: list[Any] = [handle]
    tools: list[object] = [count]
    task = Task(**GIVEN, context=context, input_guardrails=guardrails, output_guardrails=guardrails, tools=tools)
    for collection in (context, guardrails, tools):
        collection.clear()
    assert (len(task.context), task.input_guardrails, task.output_guardrails) == (1, (handle,), (handle,))
    assert task.tools == (count,)
    empty = Task(**GIVEN, context=None, input_guardrails=None, tools=None, handler=None)
    assert (empty.context, empty.input_guardrails, empty.tools, empty.handler) == ((), (), (), None)


def test_revised_copy_is_the_same_task_when_feedback_is_given() -> None:
    """S-DOM-36: three fields change; the output of the attempt is found under the task."""
    task = Task(**GIVEN)
    revised = task.with_revision_feedback("Too long", "A long text", 2)
    assert (revised.revision_feedback, revised.prior_attempt_output, revised.attempt_number) == (
        "Too long",
        "A long text",
        2,
    )
    assert revised.description == task.description
    assert revised == task
    assert task.revision_feedback is None
    assert task.with_revision_feedback(None, None, 1).revision_feedback == ""


def test_retries_are_kept_when_there_is_no_output_type() -> None:
    """S-DOM-37: no error; the number simply has no effect."""
    assert Task(**GIVEN, max_output_retries=0).max_output_retries == 0


def test_variables_stay_when_a_task_is_built() -> None:
    """S-DOM-38."""
    assert Task(**GIVEN).description == "Write on {topic}"


def test_tasks_are_equal_only_to_themselves_when_built_alike() -> None:
    """S-CONV-30, S-CONV-31."""
    task = Task(**GIVEN)
    copy = pickle.loads(pickle.dumps(task))  # noqa: S301  our own bytes
    assert task != Task(**GIVEN)
    assert copy == task
    assert hash(copy) == hash(task)
    assert copy.object_id == task.object_id
    assert task.rewritten(description="resolved") == task
    assert task.replace(name="x") != task


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"agent": WRITER, "llm": MODEL, "stream": True}, "an explicit agent."),
        ({"llm": MODEL, "stream": True, "tools": [count]}, "a llm."),
        ({"stream": True, "tools": [count]}, "a streaming_llm."),
        ({"stream": False}, "a streaming_llm."),
        ({"tools": [count], "max_iterations": 3}, "tools."),
        ({"max_iterations": 3, "rate_limit": RateLimit.per_minute(1)}, "max_iterations."),
        ({"rate_limit": RateLimit.per_minute(1)}, "a rate_limit."),
    ],
)
def test_handler_task_is_refused_when_a_field_needs_a_model(changes: dict[str, object], what: str) -> None:
    """S-DET-3, S-DOM-31, S-RATE-21: in this order, with a remedy behind."""
    with pytest.raises(ValidationError) as caught:
        Task(**GIVEN, handler=handle, **changes)
    text = str(caught.value)
    assert text.startswith(f"Task cannot have both a handler and {what}")
    assert len(text) > len(f"Task cannot have both a handler and {what}")


def test_handler_is_kept_when_it_is_a_callable_or_a_tool() -> None:
    """S-DET-1, S-DET-2, S-DET-3: context, output type and guardrails are allowed beside it."""
    echo = Echo()
    allowed = {"context": [Task.of("a")], "output_type": City, "input_guardrails": [handle]}
    assert Task(**GIVEN, handler=handle, **allowed).handler is handle
    assert Task(**GIVEN, handler=echo).handler is echo
    with pytest.raises(ValidationError, match=r"^Task handler must be a callable or an AgentTool, got: int$"):
        Task(**GIVEN, handler=5)


def test_own_model_is_limited_when_a_rate_limit_is_set() -> None:
    """S-RATE-31; without a model of its own the limit waits for the run (S-RATE-32)."""
    limit = RateLimit.per_second(2)
    task = Task(**GIVEN, llm=MODEL, rate_limit=limit)
    assert isinstance(task.llm, RateLimitedChatModel)
    assert (task.llm.delegate, task.llm.rate_limit) == (MODEL, limit)
    waiting = Task(**GIVEN, rate_limit=limit)
    assert (waiting.llm, waiting.rate_limit) == (None, limit)


def test_repr_stays_short_when_tasks_form_a_chain() -> None:
    """A chain shown in full would be shown once more with every link, and end in a RecursionError."""
    chain: Sequence[Task] = ()
    for number in range(3000):
        chain = [Task(name=f"t{number}", description=f"d{number}", expected_output="e", agent=WRITER, context=chain)]
    assert repr(chain[0]) == (
        "Task(name='t2999', description='d2999', expected_output='e', agent='Writer', context=['t2998'])"
    )


def test_a_function_that_asks_for_approval_is_no_handler() -> None:
    """S-TOOL-96: nobody would be asked; a method neither."""

    class Bank:
        @tool(approval=True)
        def pay(self, context: object) -> str:
            """Pay."""
            return f"{context}"

    with pytest.raises(ValidationError, match=r"^Task handler 'pay' is marked @tool\(approval=True\).*before_review="):
        Task(**GIVEN, handler=Bank().pay)


def test_effect_of_a_handler_is_once_unless_it_is_declared() -> None:
    """S-DUR-25: by the task, else by the tool given as handler."""

    @tool(effect="idempotent")
    def marked(context: Any) -> str:
        """A tool as well."""
        return str(context)

    echo = Echo()
    echo.effect = "none"
    assert Task(**GIVEN, handler=lambda _: "").handler_effect == "once"
    assert Task(**GIVEN, handler=lambda _: "", effect="none").handler_effect == "none"
    assert Task(**GIVEN, handler=echo).handler_effect == "none"
    assert Task(**GIVEN, handler=echo, effect="once").handler_effect == "once"
    assert Task(**GIVEN, handler=marked).handler_effect == "idempotent"
    assert Task(**GIVEN, handler=echo).replace(handler=lambda _: "").handler_effect == "once"


def test_effect_of_a_task_is_refused_when_it_has_no_handler() -> None:
    """S-DUR-25."""
    with pytest.raises(ValidationError, match=r"^Task effect is that of a handler, and this task has none"):
        Task(**GIVEN, effect="none")


def test_effect_of_a_task_is_refused_when_it_cannot_be() -> None:
    """S-DUR-20, S-DUR-25: the task's own, and that of a tool given as handler."""
    with pytest.raises(ValidationError, match=r"^Task effect must be one of \[none, idempotent, once\], got: 'twice'$"):
        Task(**GIVEN, handler=lambda _: "", effect="twice")
    wrong = Echo()
    wrong.effect = "twice"
    with pytest.raises(ValidationError, match=r"^Tool 'echo' effect must be one of"):
        Task(**GIVEN, handler=wrong)


def test_context_budget_is_a_positive_number_of_tokens() -> None:
    """S-MEM-131, S-DET-3: a handler has no prompt."""
    fields = {"description": "d", "expected_output": "e"}
    assert Task(**fields).context_budget is None
    assert Task(**fields, context_budget=8000).context_budget == 8000
    with pytest.raises(ValidationError, match=r"^Task context_budget must be > 0 when set, got: 0$"):
        Task(**fields, context_budget=0)
    with pytest.raises(ValidationError, match=r"^Task cannot have both a handler and a context_budget\."):
        Task(**fields, context_budget=1, handler=lambda _: "done")


def test_duplicate_is_another_task_with_fields_changed() -> None:
    """S-CONV-30, S-CONV-31: unlike a rewritten one it has an id of its own."""
    task = Task(description="Do it", expected_output="text")
    copy = task.duplicated(description="Do that")
    assert (copy.description, copy.expected_output) == ("Do that", "text")
    assert copy != task
    assert copy.object_id != task.object_id
    assert task.description == "Do it"
