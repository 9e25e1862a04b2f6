"""The error tree: its shape, its texts, and how it travels between processes."""

import json
import pickle
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pydantic
import pytest

from ensemble_ray import (
    AgentExecutionError,
    ConstraintViolationError,
    EnsembleError,
    ExecutionTrace,
    ExitEarlyError,
    GuardrailViolationError,
    IllegalStateError,
    ManagerStalledError,
    MaxIterationsExceededError,
    OutputParsingError,
    ParallelExecutionError,
    RunExistsError,
    StaleEpochError,
    TaskExecutionError,
    ToolConfigurationError,
    TryAgain,
    ValidationError,
    errors,
)
from ensemble_ray.errors import BudgetExhaustedError, message_of, portable
from ensemble_ray.errors.travel import ErrorChain
from ensemble_ray.facts.runs import RecordedError
from ensemble_ray.values.value import utc_of
from tests.ensemble_ray.errors.every_error import DONE, EVERY, LIMIT


class UnpicklableError(Exception):
    """What a provider's error may look like: it holds a connection."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class NeedsMoreError(Exception):
    """Pickles, and cannot be unpickled: its constructor takes what pickle does not keep."""

    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(text)
        self.code = code


def _trip(error: BaseException) -> BaseException:
    return pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes


def _fields(error: BaseException) -> dict[str, object]:
    return {name: repr(value) for name, value in vars(error).items()}


def test_tree_is_complete() -> None:
    """S-ERR-1: every class of the module stands in the list above, so that the tests here cover all."""
    public = {getattr(errors, name) for name in errors.__all__}
    assert {each for each in public if isinstance(each, type)} == {type(error) for error in EVERY}


@pytest.mark.parametrize(
    ("kind", "parents"),
    [
        (ValidationError, {EnsembleError, ValueError}),
        (OutputParsingError, {TaskExecutionError, EnsembleError}),
        (IllegalStateError, {RuntimeError}),
        (ToolConfigurationError, {IllegalStateError, RuntimeError}),
        (ManagerStalledError, {AgentExecutionError, EnsembleError}),
        (RunExistsError, {EnsembleError}),
    ],
)
def test_class_is_caught_as_its_parents(kind: type[Exception], parents: set[type[Exception]]) -> None:
    """S-ERR-1, S-ERR-18, S-SET-39: who inherits from whom."""
    assert all(issubclass(kind, parent) for parent in parents)


def test_all_but_control_flow_and_misuse_is_an_ensemble_error() -> None:
    """S-ERR-37, S-ERR-22, S-ERR-23: `except EnsembleError` catches the rest of the tree."""
    others = {type(error) for error in EVERY if not isinstance(error, EnsembleError)}
    assert others == {IllegalStateError, ToolConfigurationError, TryAgain, ExitEarlyError, BudgetExhaustedError}


def test_validation_error_is_unrelated_to_pydantics() -> None:
    """S-ERR-38, S-ERR-10: same name, nothing in common."""
    assert not issubclass(ValidationError, pydantic.ValidationError)
    assert not issubclass(pydantic.ValidationError, ValidationError)


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
def test_error_arrives_unchanged_when_pickled(error: BaseException) -> None:
    """S-ERR-33, S-CONV-32: class, text and fields."""
    copy = _trip(error)
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert _fields(copy) == _fields(error)


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
def test_causes_arrive_when_pickled(error: BaseException) -> None:
    """S-ERR-33, S-ERR-31: the chain ends at the provider's own error, through foreign links too."""
    provider = ConnectionError("refused")
    provider.__cause__ = KeyError("host")
    error.__cause__ = AgentExecutionError("LLM failed", "Writer", "Write")
    error.__cause__.__cause__ = provider
    try:
        copy = _trip(error)
    finally:
        error.__cause__ = None
    agent = copy.__cause__
    assert isinstance(agent, AgentExecutionError)
    assert agent.agent_role == "Writer"
    assert type(agent.__cause__) is ConnectionError
    assert repr(agent.__cause__.__cause__) == "KeyError('host')"


@pytest.mark.parametrize("cause", [UnpicklableError("503 busy"), NeedsMoreError("503 busy", code=503)])
def test_cause_keeps_class_name_and_text_when_it_cannot_travel(cause: Exception) -> None:
    """S-ERR-31: an equivalent stands for it, and travels on."""
    error = AgentExecutionError("LLM failed")
    error.__cause__ = cause
    copy = _trip(_trip(error)).__cause__
    assert (type(copy).__name__, str(copy)) == (type(cause).__name__, "503 busy")


def test_cause_of_a_script_is_caught_by_its_class_when_it_travelled() -> None:
    """S-ERR-31: a class that no other process can import goes by value and comes back as the same class."""

    class LocalError(Exception):
        pass

    error = AgentExecutionError("handler")
    error.__cause__ = LocalError("mine")
    copy = _trip(error).__cause__
    assert isinstance(copy, LocalError)
    assert str(copy) == "mine"


def test_chain_is_cut_when_it_has_a_cycle() -> None:
    """S-ERR-33: pickling ends."""
    error, other = AgentExecutionError("a"), ValueError("b")
    error.__cause__, other.__cause__ = other, error
    assert repr(_trip(error).__cause__) == "ValueError('b')"


def test_failed_tasks_keep_their_own_causes_when_pickled() -> None:
    """S-ERR-13, S-PAR-27: each of them with its chain."""
    failed = AgentExecutionError("LLM failed")
    failed.__cause__ = UnpicklableError("503")
    copy = _trip(ParallelExecutionError("1 of 1 tasks failed", [], {"Write": failed}))
    assert isinstance(copy, ParallelExecutionError)
    assert isinstance(copy.failed_task_causes["Write"], AgentExecutionError)
    assert type(copy.failed_task_causes["Write"].__cause__).__name__ == "UnpicklableError"
    assert (copy.failed_count, copy.completed_count) == (1, 0)


def test_portable_error_is_itself_when_it_travels() -> None:
    """S-ERR-31: nothing is replaced without need."""
    error = ValueError("x")
    assert portable(error) is error


def test_portable_error_is_a_stand_in_when_it_does_not_travel() -> None:
    """S-ERR-31: same name, same text, same causes."""
    error = UnpicklableError("busy")
    error.__cause__ = KeyError("k")
    stand_in = portable(error)
    assert (type(stand_in).__name__, str(stand_in), repr(stand_in.__cause__)) == (
        "UnpicklableError",
        "busy",
        "KeyError('k')",
    )


def test_foreign_error_keeps_class_and_fields_when_its_constructor_wants_more() -> None:
    """S-ERR-44: no constructor runs again."""
    error = AgentExecutionError("Agent 'Writer': busy")
    error.__cause__ = NeedsMoreError("busy", code=7)
    chained = pickle.loads(pickle.dumps(ErrorChain(error.__cause__)))  # noqa: S301  our own bytes
    for each in (_trip(error).__cause__, chained):
        assert isinstance(each, NeedsMoreError)
        assert (str(each), each.code) == ("busy", 7)
    assert str(_trip(portable(error.__cause__))) == "busy"  # alone it pickles as a stand-in


def test_traceback_of_another_process_is_a_note_once() -> None:
    """S-ERR-42: made where it was raised, kept however often it crosses; other notes stay; the original is unchanged."""
    try:
        try:
            raise KeyError("zzz")  # noqa: TRY301  the traceback is what is tested
        except KeyError as inner:
            inner.add_note("of the user")
            raise AgentExecutionError("it broke") from inner
    except AgentExecutionError as raised:
        caught = error = raised
    for _ in range(3):
        copy = _trip(error)
        assert copy.__cause__ is not None
        own, remote = copy.__cause__.__notes__
        assert own == "of the user"
        assert remote.startswith("Raised in another process (most recent call last):\n  File ")
        assert "test_traceback_of_another_process_is_a_note_once" in remote
        error = copy
    assert caught_notes(caught) == ["of the user"]


def caught_notes(error: BaseException) -> list[str]:
    """The notes of its cause."""
    return list(getattr(error.__cause__, "__notes__", ()))


def test_causes_of_a_foreign_error_cross_too() -> None:
    """S-ERR-44: pickling alone drops them."""
    error = ValueError("outer")
    error.__cause__ = NeedsMoreError("inner", code=3)
    copy = pickle.loads(pickle.dumps(ErrorChain(error)))  # noqa: S301  our own bytes
    assert (str(copy), repr(copy.__cause__)) == ("outer", "NeedsMoreError('inner')")


def test_derived_texts_cut_what_users_wrote() -> None:
    """S-ERR-45, S-ERR-30: in the message alone."""
    long = "x" * 5000
    for error in (
        GuardrailViolationError("input", long, long, long),
        MaxIterationsExceededError(long, long, 5, 8),
        ManagerStalledError(3, [long], long),
    ):
        assert len(str(error)) < 1000
        assert long in vars(error).values() or (long,) in vars(error).values()


@pytest.mark.program
def test_error_arrives_in_another_process() -> None:
    """S-ERR-33, S-CONV-32: nothing of this process is needed to read it."""
    error = TaskExecutionError("Task failed: Write", "Write", "Writer")
    error.__cause__ = UnpicklableError("503")
    code = (
        "import pickle, sys, json; e = pickle.loads(sys.stdin.buffer.read());"
        "print(json.dumps([type(e).__name__, str(e), e.agent_role, type(e.__cause__).__name__, str(e.__cause__)]))"
    )
    home = Path(errors.__file__).parents[2]
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=pickle.dumps(error), capture_output=True, check=True, cwd=home)  # noqa: S603  our own code
    assert json.loads(done.stdout) == ["TaskExecutionError", "Task failed: Write", "Writer", "UnpicklableError", "503"]


def test_trace_and_run_id_travel_with_the_error() -> None:
    """S-SET-26: both are None before the run began, and survive pickling."""
    error = TaskExecutionError("Task failed: Write")
    assert (error.trace, error.run_id) == (None, None)
    error.run_id = "run-1"
    error.trace = ExecutionTrace(
        ensemble_id="run-1",
        workflow="sequential",
        started_at=utc_of(1),
        completed_at=utc_of(2),
        total_duration=timedelta(seconds=1),
    )
    copy = _trip(error)
    assert isinstance(copy, TaskExecutionError)
    assert (copy.trace, copy.run_id) == (error.trace, "run-1")


def test_text_is_the_message() -> None:
    """S-ERR-30, S-SET-3: message first, then the fields in their order."""
    error = TaskExecutionError("Task failed: Write", "Write", "Writer", [DONE])
    assert (str(error), error.task_description, error.agent_role) == ("Task failed: Write", "Write", "Writer")
    assert str(IllegalStateError("closed")) == "closed"
    assert (str(ExitEarlyError("enough")), ExitEarlyError("enough").timed_out) == ("enough", False)
    assert ExitEarlyError("enough", True).timed_out is True  # noqa: FBT003  S-SET-3 allows it by position


def test_list_fields_are_copies_when_the_callers_list_changes() -> None:
    """S-ERR-30, S-ERR-36, S-ERR-12: outputs stay as they were, with their parsed output, and cannot be changed."""
    done = [DONE]
    error = TaskExecutionError("Task failed: Write", completed_task_outputs=done)
    done.clear()
    assert error.completed_task_outputs == (DONE,)
    assert error.completed_task_outputs[0].parsed_output == {"topics": ["Ray"]}


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (EVERY[2], {"missing_variables": ("a", "b"), "template": "{a} {b}"}),
        (EVERY[4], {"raw_output": "raw", "output_type": dict, "parse_errors": ("line 1",), "attempt_count": 4}),
        (EVERY[5], {"completed_task_outputs": (DONE,), "failed_count": 1, "completed_count": 1}),
        (EVERY[6], {"violations": ("too few", "too many"), "completed_task_outputs": (DONE,)}),
        (EVERY[7], {"agent_role": "Writer", "task_description": "Write"}),
        (EVERY[8], {"agent_role": "Writer", "task_description": "Write", "max_iterations": 5, "tool_calls_made": 8}),
        (EVERY[9], {"tool_name": "search", "tool_input": '{"q": 1}'}),
        (EVERY[10], {"guardrail_type": "input", "violation_message": "no secrets", "agent_role": "Writer"}),
        (EVERY[11], {"rate_limit": LIMIT, "wait_timeout": timedelta(seconds=1.5)}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_error_has_its_fields(error: Exception, fields: dict[str, object]) -> None:
    """S-ERR-11, S-ERR-13, S-ERR-14, S-ERR-15, S-ERR-16, S-ERR-17, S-ERR-18, S-ERR-19, S-ERR-20: the table."""
    assert {name: getattr(error, name) for name in fields} == fields


def test_tool_configuration_error_is_a_state_error() -> None:
    """S-ERR-21, S-ERR-23: misuse, told with its text."""
    error = ToolConfigurationError("approval without handler")
    assert isinstance(error, IllegalStateError)
    assert str(error) == "approval without handler"


def test_violations_make_the_text() -> None:
    """S-ERR-32, S-ERR-14: one, several."""
    assert str(ConstraintViolationError(["too few"])) == "Hierarchical constraint violated: too few"
    assert str(ConstraintViolationError(["a", "b"])) == "Hierarchical constraints violated (2): a; b"


def test_violations_are_refused_when_empty() -> None:
    """S-ERR-32: there is nothing to raise for."""
    with pytest.raises(ValueError, match=r"^violations must not be None or empty$"):
        ConstraintViolationError([])


def test_derived_texts() -> None:
    """S-SET-3, S-ERR-16, S-ERR-17, S-ERR-20: no message argument, the text is made of the fields."""
    assert str(EVERY[8]) == (
        "Agent 'Writer' exceeded maximum iterations (5). Tool calls made: 8. Task: 'Write'. "
        "Consider increasing max_iterations or simplifying the task."
    )
    assert str(EVERY[10]) == "INPUT guardrail violation on agent 'Writer' task 'Write': no secrets"
    assert str(EVERY[11]).startswith("Rate limit exceeded: waited 1500ms but no token became available.")


def test_stale_epoch_names_both_epochs() -> None:
    """A refused writer can tell who it is and who came after it."""
    error = StaleEpochError("r", "facts#0", 1, 2)
    assert (error.run, error.name, error.epoch, error.newest) == ("r", "facts#0", 1, 2)
    assert str(error) == "Run 'r' was taken over: 'facts#0' is written by epoch 2, epoch 1 must stop"


def test_message_is_the_class_name_when_the_text_is_empty() -> None:
    """S-ENG-61: an error without text still says something."""
    assert message_of(KeyError()) == "KeyError"
    assert message_of(ValueError("x")) == "x"


class _MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_without_a_text_is_recorded_as_a_cause() -> None:
    """S-ENG-61, S-ERR-67."""
    error = ValueError("outer")
    error.__cause__ = _MuteError()
    recorded = RecordedError.of(error)
    assert (recorded.message, recorded.causes[0][:2]) == ("outer", ("_MuteError", "_MuteError"))
