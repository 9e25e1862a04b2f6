"""Counts, tokens, seconds and money of tasks and runs."""

from datetime import timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray import (
    ChatResponse,
    CostConfiguration,
    CostEstimate,
    ExecutionMetrics,
    MemoryOperationCounts,
    TaskMetrics,
    TaskOutput,
    TokenUsage,
    ToolCall,
    ValidationError,
)
from ensemble_ray.execute.effects import ModelEffect, TaskEffects, ToolEffect
from ensemble_ray.values.metrics import add_tokens, metrics_by_key
from ensemble_ray.values.value import utc_of

RATES = CostConfiguration(input_token_rate=Decimal("0.0000025"), output_token_rate=Decimal("0.00001"))


def _output(role: str = "Writer", **metrics: object) -> TaskOutput:
    return TaskOutput(
        raw="",
        task_description="Write",
        agent_role=role,
        completed_at=utc_of(1),
        duration=1,
        metrics=TaskMetrics(**metrics),
    )


def _effects(*usages: TokenUsage | None, tools: tuple[ToolEffect, ...] = (), **changes: object) -> TaskEffects:
    models = [
        ModelEffect(
            started_at=0,
            latency_s=0.5,
            response=ChatResponse(text="x", usage=usage),
            is_final=True,
            tools=list(tools) if number == 0 else [],
        )
        for number, usage in enumerate(usages)
    ]
    effects = TaskEffects(task_description="Write", expected_output="", agent_role="Writer", started_at=0)
    effects.models, effects.tool_call_count = models, len(tools)
    for name, value in changes.items():
        setattr(effects, name, value)
    return effects


def _tool(outcome: str = "success", duration_s: float = 1.0) -> ToolEffect:
    call = ToolCall(id="1", name="search")
    return ToolEffect(call=call, outcome=outcome, text="", started_at=0, duration_s=duration_s)  # type: ignore[arg-type]


def test_empty_metrics() -> None:
    """S-MET-4, S-MET-3: durations zero, tokens unknown, counts 0, no cost; defaults are the same."""
    assert TaskMetrics() == TaskMetrics.EMPTY
    assert ExecutionMetrics() == ExecutionMetrics.EMPTY
    task, run = TaskMetrics.EMPTY, ExecutionMetrics.EMPTY
    assert (task.input_tokens, task.output_tokens, task.total_tokens) == (-1, -1, -1)
    assert (run.total_input_tokens, run.total_output_tokens, run.total_tokens) == (-1, -1, -1)
    assert {task.llm_latency, task.tool_execution_time, task.memory_retrieval_time, task.prompt_build_time} == {
        timedelta()
    }
    assert (task.llm_call_count, task.tool_call_count, task.delegation_count) == (0, 0, 0)
    assert (task.cost_estimate, run.total_cost_estimate) == (None, None)
    assert task.memory_operations is MemoryOperationCounts.ZERO


@pytest.mark.parametrize("value", [TaskMetrics.EMPTY, ExecutionMetrics.EMPTY, RATES, RATES.estimate(1, 1)])
def test_value_refuses_assignment(value: object) -> None:
    """S-MET-3: all objects are frozen."""
    with pytest.raises(ValueError, match="frozen"):
        value.currency = "EUR"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("usages", "expected"),
    [
        ([TokenUsage(100, 20), TokenUsage(150, 30)], (250, 50, 300)),
        ([TokenUsage(100, 20), TokenUsage(-1, 30)], (-1, 50, -1)),
        ([TokenUsage(100, 20), None], (-1, -1, -1)),
        ([TokenUsage(0, 0), TokenUsage(0, 7)], (0, 7, 7)),
    ],
)
def test_tokens_of_a_task(usages: list[TokenUsage | None], expected: tuple[int, int, int]) -> None:
    """S-MET-10, S-MET-11, S-MET-12, S-MET-13: input and output apart, unknown spreads, 0 is known."""
    metrics = _effects(*usages).metrics(None)
    assert (metrics.input_tokens, metrics.output_tokens, metrics.total_tokens) == expected
    assert metrics.llm_call_count == len(usages)
    assert metrics.llm_latency == timedelta(seconds=0.5) * len(usages)


def test_handler_task_costs_no_tokens() -> None:
    """S-MET-14: 0, so that totals stay known."""
    metrics = _effects(is_handler=True).metrics(RATES)
    assert (metrics.llm_call_count, metrics.input_tokens, metrics.output_tokens, metrics.total_tokens) == (0, 0, 0, 0)


def test_tool_times_add_up_when_tools_run_together() -> None:
    """S-MET-15: three tools of a second within one second of wall time are three seconds."""
    metrics = _effects(TokenUsage(1, 1), tools=(_tool(), _tool(), _tool())).metrics(None)
    assert metrics.tool_execution_time == timedelta(seconds=3)


def test_skipped_calls_count() -> None:
    """S-MET-16: the counter rises before the check."""
    tools = (_tool(), _tool("skipped_max_iterations", 0))
    assert _effects(TokenUsage(1, 1), tools=tools).metrics(None).tool_call_count == 2


def test_run_totals() -> None:
    """S-MET-20, S-MET-24: sums over the tasks."""
    counts = MemoryOperationCounts(long_term_stores=1)
    each = {
        "input_tokens": 10,
        "output_tokens": 5,
        "total_tokens": 15,
        "llm_latency": timedelta(seconds=1),
        "tool_execution_time": timedelta(seconds=2),
        "memory_retrieval_time": timedelta(seconds=3),
        "prompt_build_time": timedelta(seconds=4),
        "llm_call_count": 2,
        "tool_call_count": 3,
        "delegation_count": 1,
        "memory_operations": counts,
    }
    metrics = ExecutionMetrics.from_outputs([_output("A", **each), _output("B", **each)])
    assert metrics == ExecutionMetrics(
        total_input_tokens=20,
        total_output_tokens=10,
        total_tokens=30,
        total_llm_latency=timedelta(seconds=2),
        total_tool_execution_time=timedelta(seconds=4),
        total_memory_retrieval_time=timedelta(seconds=6),
        total_prompt_build_time=timedelta(seconds=8),
        total_llm_call_count=4,
        total_tool_calls=6,
        total_delegations=2,
        memory_operations=MemoryOperationCounts(long_term_stores=2),
        task_metrics={"A": TaskMetrics(**each), "B": TaskMetrics(**each)},
    )


@pytest.mark.parametrize("outputs", [None, []])
def test_run_totals_are_empty_when_there_are_no_outputs(outputs: list[TaskOutput] | None) -> None:
    """S-MET-21: None or nothing."""
    assert ExecutionMetrics.from_outputs(outputs) is ExecutionMetrics.EMPTY


def test_run_tokens_are_unknown_when_one_tasks_are() -> None:
    """S-MET-22: durations and counts are summed all the same."""
    metrics = ExecutionMetrics.from_outputs(
        [_output(input_tokens=10, output_tokens=1, total_tokens=11, llm_call_count=1), _output(llm_call_count=2)]
    )
    assert (metrics.total_input_tokens, metrics.total_output_tokens, metrics.total_tokens) == (-1, -1, -1)
    assert metrics.total_llm_call_count == 3


def test_last_task_of_a_role_wins() -> None:
    """S-MET-23: the mapping has one entry per role."""
    metrics = ExecutionMetrics.from_outputs([_output(llm_call_count=1), _output(llm_call_count=2)])
    assert {role: task.llm_call_count for role, task in metrics.task_metrics.items()} == {"Writer": 2}


def test_every_task_is_found_by_its_key_when_an_agent_has_several() -> None:
    """S-MET-27: what `task_metrics` loses; a run without tasks stays EMPTY."""
    outputs = [_output(llm_call_count=1), _output(llm_call_count=2)]
    metrics = ExecutionMetrics.from_outputs(
        outputs, by_task={"first": outputs[0].metrics, "second": outputs[1].metrics}
    )
    assert {key: task.llm_call_count for key, task in metrics.metrics_by_task.items()} == {"first": 1, "second": 2}
    assert metrics.total_llm_call_count == 3
    assert ExecutionMetrics.from_outputs([], by_task={}) is ExecutionMetrics.EMPTY


def test_run_cost_is_the_sum_of_known_costs() -> None:
    """S-MET-25, S-MET-34: tasks without one are passed over; None when none has one."""
    cost = RATES.estimate(1000, 500)
    assert cost is not None
    metrics = ExecutionMetrics.from_outputs([_output(), _output(cost_estimate=cost), _output(cost_estimate=cost)])
    assert metrics.total_cost_estimate == cost.add(cost)
    assert ExecutionMetrics.from_outputs([_output()]).total_cost_estimate is None


def test_memory_counts_add() -> None:
    """S-MET-26: field by field; ZERO changes nothing."""
    counts = MemoryOperationCounts(
        short_term_entries_written=1, long_term_stores=2, long_term_retrievals=3, entity_lookups=4
    )
    assert counts.add(counts) == MemoryOperationCounts(
        short_term_entries_written=2, long_term_stores=4, long_term_retrievals=6, entity_lookups=8
    )
    assert counts.add(MemoryOperationCounts.ZERO) == counts


@pytest.mark.parametrize("rate", [0.1, "0.1", Decimal("0.1")])
def test_rate_is_exact_when_given_as_float_or_text(rate: object) -> None:
    """S-MET-30: by its text, so 0.1 is 0.1."""
    assert CostConfiguration(input_token_rate=rate, output_token_rate=1).input_token_rate == Decimal("0.1")


@pytest.mark.parametrize(
    ("rates", "text"),
    [
        ({"input_token_rate": -1, "output_token_rate": 1}, "CostConfiguration input_token_rate must be >= 0, got: -1"),
        ({"input_token_rate": 1, "output_token_rate": "-0.5"}, "CostConfiguration output_token_rate must be >= 0, got: -0.5"),
        ({"input_token_rate": "cheap", "output_token_rate": 1}, "CostConfiguration rates must be numbers, got: cheap"),
        ({"input_token_rate": 1}, "CostConfiguration: 'output_token_rate': Field required"),
        ({"input_token_rate": float("nan"), "output_token_rate": 1}, "CostConfiguration: 'input_token_rate': Input should be a finite number"),
    ],
)  # fmt: skip
def test_rate_is_refused(rates: dict[str, object], text: str) -> None:
    """S-MET-30: negative, no number, missing."""
    with pytest.raises(ValidationError) as caught:
        CostConfiguration(**rates)
    assert str(caught.value) == text


def test_cost_of_the_specifications_example() -> None:
    """S-MET-31, S-MET-32: rate times tokens, to eight places."""
    cost = RATES.estimate(1000, 500)
    assert cost is not None
    assert (str(cost.input_cost), str(cost.output_cost), str(cost.total_cost)) == (
        "0.00250000",
        "0.00500000",
        "0.00750000",
    )
    assert cost.currency == "USD"


def test_each_part_of_a_cost_is_rounded_half_up() -> None:
    """S-MET-31: the total is the sum of the rounded parts, not the rounded sum."""
    rates = CostConfiguration(input_token_rate=5e-9, output_token_rate=5e-9)
    cost = rates.estimate(1, 1)
    assert cost is not None
    assert (cost.input_cost, cost.output_cost, cost.total_cost) == (Decimal("1E-8"), Decimal("1E-8"), Decimal("2E-8"))


@pytest.mark.parametrize("tokens", [(-1, 5), (5, -1), (-1, -1)])
def test_cost_is_unknown_when_tokens_are(tokens: tuple[int, int]) -> None:
    """S-MET-31: None, not 0."""
    assert RATES.estimate(*tokens) is None
    assert _effects(TokenUsage(*tokens)).metrics(RATES).cost_estimate is None


def test_task_has_a_cost_when_rates_are_configured() -> None:
    """S-MET-34: without rates there is none."""
    assert _effects(TokenUsage(1000, 500)).metrics(RATES).cost_estimate == RATES.estimate(1000, 500)
    assert _effects(TokenUsage(1000, 500)).metrics(None).cost_estimate is None


def test_costs_add_in_the_left_currency() -> None:
    """S-MET-33: adding None gives the left one."""
    left = CostEstimate(input_cost=1, output_cost=2, total_cost=3, currency="EUR")
    right = CostEstimate(input_cost=10, output_cost=20, total_cost=30)
    assert left.add(None) is left
    assert left.add(right) == CostEstimate(input_cost=11, output_cost=22, total_cost=33, currency="EUR")


@given(st.lists(st.integers(min_value=-1, max_value=10**9)))
def test_sum_is_unknown_exactly_when_a_part_is(counts: list[int]) -> None:
    """S-MET-10, S-MET-22: else it is the sum."""
    assert add_tokens(counts) == (-1 if -1 in counts else sum(counts))


def test_task_that_ran_several_times_has_the_sum_of_its_executions() -> None:
    """S-MET-28: in the order of first executions; unknown tokens stay unknown."""
    cost = CostEstimate(input_cost=1, output_cost=2, total_cost=3)
    once = TaskMetrics(
        input_tokens=7, output_tokens=3, total_tokens=10, llm_latency=timedelta(seconds=2), llm_call_count=1
    )
    again = TaskMetrics(
        input_tokens=-1,
        output_tokens=1,
        total_tokens=-1,
        llm_latency=timedelta(seconds=1),
        tool_call_count=2,
        memory_operations=MemoryOperationCounts(long_term_stores=1),
        cost_estimate=cost,
    )
    found = metrics_by_key([("write", once), ("facts", once), ("write", again), ("write", again)])
    assert list(found) == ["write", "facts"]
    assert found["facts"] is once
    assert found["write"] == TaskMetrics(
        input_tokens=-1,
        output_tokens=5,
        total_tokens=-1,
        llm_latency=timedelta(seconds=4),
        llm_call_count=1,
        tool_call_count=4,
        memory_operations=MemoryOperationCounts(long_term_stores=2),
        cost_estimate=cost.add(cost),
    )
