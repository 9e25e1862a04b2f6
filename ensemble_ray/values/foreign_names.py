"""What other frameworks call our fields, for the error about an unknown name. Layer: above nothing."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["FOREIGN_NAMES", "find_own_name"]

_OUTPUT_TYPES = dict.fromkeys(
    ("output_pydantic", "output_json", "output_model", "output_schema", "response_model", "result_type"), "output_type"
)
_MODELS = dict.fromkeys(("model", "model_client", "llm_config", "chat_model", "language_model"), "llm")
_LIMITS = dict.fromkeys(("max_iter", "max_turns", "max_steps", "max_tool_iterations"), "max_iterations")
_ASKS_PEOPLE = dict.fromkeys(("human_input", "human_in_the_loop", "human_approval"), "review")
_TASK_TYPE = "The type of the answer is chosen by the task, Task(output_type=...), or the question, agent.run(..., output_type=...)"
_GUARDRAILS = "Guardrails are of the task: Task(input_guardrails=..., output_guardrails=...)"
_REQUEST_OPTION = (
    "It is an option of the model: OpenAIChatModel(model, {name}=...), or a key of the section 'llm' of a team file"
)
_WORKFLOW = "Tasks run at the same time in an ensemble whose workflow is 'parallel'"

#: By the name of our class and the name of another framework: our field, or a sentence where there is none.
FOREIGN_NAMES: Mapping[str, Mapping[str, str]] = {
    "Agent": {
        **_MODELS,
        **_LIMITS,
        **dict.fromkeys(_OUTPUT_TYPES, _TASK_TYPE),
        "output_type": _TASK_TYPE,
        **dict.fromkeys(("output_guardrails", "input_guardrails", "guardrails"), _GUARDRAILS),
        **dict.fromkeys(("temperature", "top_p", "max_tokens", "seed"), _REQUEST_OPTION),
        **dict.fromkeys(("instructions", "instruction", "system_prompt", "system_message", "prompt"), "goal"),
        **dict.fromkeys(("backstory", "persona", "description"), "background"),
        **dict.fromkeys(("handoffs", "sub_agents", "managed_agents"), "allow_delegation"),
        **dict.fromkeys(("functions", "toolkits", "toolsets", "mcp_servers", "mcps"), "tools"),
        "name": "role",
        "max_rpm": "rate_limit",
    },
    "Task": {
        **_MODELS,
        **_LIMITS,
        **_OUTPUT_TYPES,
        **_ASKS_PEOPLE,
        **dict.fromkeys(("depends_on", "dependencies", "after", "needs", "prerequisites"), "context"),
        **dict.fromkeys(("instructions", "instruction", "prompt", "goal", "task", "input"), "description"),
        **dict.fromkeys(("guardrail", "guardrails"), "output_guardrails"),
        **dict.fromkeys(("guardrail_max_retries", "max_retries", "retries"), "max_output_retries"),
        **dict.fromkeys(("assignee", "worker"), "agent"),
        **dict.fromkeys(("function", "func", "fn", "action", "callable"), "handler"),
        **dict.fromkeys(("async_execution", "parallel"), _WORKFLOW),
        "id": "name",
        "callback": "The ensemble has on_task_complete",
    },
    "RunRules": {
        **_MODELS,
        **dict.fromkeys(("max_concurrency", "max_workers", "concurrency"), "max_parallel_tasks"),
        **dict.fromkeys(("callbacks", "hooks", "handlers"), "listeners"),
        **dict.fromkeys(("human_input", "human_in_the_loop"), "review_handler"),
        "max_rpm": "rate_limit",
        "checkpointer": "durability",
    },
    "Watched": dict.fromkeys(("task_callback", "callback"), "on_task_complete"),
    "Leadership": dict.fromkeys(("manager", "manager_agent", "supervisor"), "manager_llm"),
    "Work": {
        **dict.fromkeys(("process", "mode", "strategy"), "workflow"),
        **dict.fromkeys(("participants", "members", "team"), "agents"),
        **dict.fromkeys(("steps", "jobs"), "tasks"),
        **dict.fromkeys(("nodes", "states", "edges"), "graph"),
    },
    "MapDefinition": {
        **dict.fromkeys(("data", "over", "dataset", "source"), "items"),
        **dict.fromkeys(("map_fn", "map_function", "mapper", "function", "fn", "task"), "map_task"),
        "on_error": "on_item_error",
        "output": "results",
    },
    "MapReduceDefinition": {
        **dict.fromkeys(("reduce_fn", "reduce_function", "reducer"), "reduce_task"),
        **dict.fromkeys(("batch_size", "group_size"), "chunk_size"),
    },
    "Loop": {
        **_LIMITS,
        **dict.fromkeys(("max_rounds", "max_loops", "limit"), "max_iterations"),
        **dict.fromkeys(("condition", "stop_condition", "exit_condition", "termination_condition", "stop"), "until"),
        **dict.fromkeys(("tasks", "steps", "agents", "sub_agents", "task"), "body"),
        **dict.fromkeys(("depends_on", "dependencies", "after", "needs"), "context"),
    },
    "Phase": {
        **_ASKS_PEOPLE,
        **dict.fromkeys(("depends_on", "dependencies", "context", "needs"), "after"),
        **dict.fromkeys(("steps", "task", "body"), "tasks"),
        "process": "workflow",
    },
    "Graph": {
        **dict.fromkeys(("nodes", "tasks", "steps"), "states"),
        **dict.fromkeys(("entry_point", "start_state", "initial_state", "initial", "entry"), "start"),
        **dict.fromkeys(("recursion_limit", "max_iterations", "max_turns"), "max_steps"),
        "transitions": "edges",
    },
    "GraphEdge": {
        **dict.fromkeys(("source", "src", "from", "start"), "from_state"),
        **dict.fromkeys(("target", "dst", "to", "end"), "to_state"),
        **dict.fromkeys(("when", "guard", "predicate"), "condition"),
        "name": "label",
    },
    "GraphFork": {
        **dict.fromkeys(("source", "src", "from", "start"), "from_state"),
        **dict.fromkeys(("targets", "branches", "to"), "to_states"),
    },
    "GraphJoin": {
        **dict.fromkeys(("sources", "branches", "from"), "from_states"),
        **dict.fromkeys(("target", "dst", "to", "end"), "to_state"),
    },
}  # fmt: skip


def find_own_name(kind: type[object], name: str) -> str:
    """Return the sentence about a name of another framework that a class does not have; "" where it is not known."""
    for each in kind.__mro__:
        own = FOREIGN_NAMES.get(each.__name__, {}).get(name)
        if own is not None:
            return f"Here it is called '{own}'" if own.isidentifier() else own.format(name=name)
    return ""
