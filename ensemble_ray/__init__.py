"""ensemble_ray: teams of LLM agents as actors on Ray. The face: users import from here alone.

Importing it loads neither Ray nor a model's SDK; both come with the first run that needs them.
"""

import importlib
from typing import TYPE_CHECKING

from ensemble_ray.context import LogContextFilter
from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.durability import Durability, OnUnknown
from ensemble_ray.definition.ensemble import RunOptions
from ensemble_ray.definition.hierarchy import HierarchicalConstraints, ManagerPromptContext, ManagerPromptStrategy
from ensemble_ray.definition.retry_policy import RetryPolicy
from ensemble_ray.definition.task import Task
from ensemble_ray.definition.workflow import ParallelErrorStrategy, Workflow
from ensemble_ray.delegation import (
    DelegationContext,
    DelegationPolicy,
    DelegationPolicyContext,
    DelegationPolicyResult,
    DelegationPriority,
    DelegationRequest,
    DelegationResponse,
    DelegationStatus,
)
from ensemble_ray.ensemble import Ensemble, run
from ensemble_ray.errors import (
    AgentExecutionError,
    CircuitOpenError,
    ConstraintViolationError,
    EnsembleError,
    ExitEarlyError,
    GuardrailViolationError,
    IllegalStateError,
    ManagerStalledError,
    MaxIterationsExceededError,
    OutputParsingError,
    ParallelExecutionError,
    PromptTemplateError,
    RateLimitInterruptedError,
    RateLimitTimeoutError,
    RecordError,
    RunExistsError,
    StaleEpochError,
    TaskExecutionError,
    ToolConfigurationError,
    ToolExecutionError,
    TryAgain,
    UnknownOutcomeError,
    ValidationError,
)
from ensemble_ray.event_log import EventStream
from ensemble_ray.events import (
    DelegationCompletedEvent,
    DelegationFailedEvent,
    DelegationStartedEvent,
    EnsembleCompletedEvent,
    EnsembleStartedEvent,
    Event,
    FileChangedEvent,
    LlmIterationCompletedEvent,
    LlmIterationStartedEvent,
    TaskCompleteEvent,
    TaskFailedEvent,
    TaskInputEvent,
    TaskStartEvent,
    TokenEvent,
    ToolCallEvent,
    ToolCallRequest,
)
from ensemble_ray.execute.guardrails import GuardrailInput, GuardrailOutput, GuardrailResult, GuardrailType
from ensemble_ray.execute.handler import TaskHandlerContext
from ensemble_ray.execute.structured import ParseResult, describe_schema, extract_json, parse_output
from ensemble_ray.execute.unknown import UnknownEffect
from ensemble_ray.inline import InlineRuntime
from ensemble_ray.limits.rate_limit import RateLimit
from ensemble_ray.listeners import EnsembleListener
from ensemble_ray.llm.local import LocalChatModel
from ensemble_ray.llm.openai import OpenAIChatModel
from ensemble_ray.llm.rate_limited import RateLimitedChatModel
from ensemble_ray.messages import ChatMessage, ChatResponse, Effect, JsonSchema, TokenUsage, ToolCall, ToolSpec
from ensemble_ray.metrics import CostConfiguration, CostEstimate, ExecutionMetrics, MemoryOperationCounts, TaskMetrics
from ensemble_ray.outputs import EnsembleOutput, ExitReason, FailedItem, ItemResult, RunState, TaskOutput
from ensemble_ray.plan.dependencies import TaskDependencyGraph
from ensemble_ray.plan.plan import AgentEntry, Node, Plan
from ensemble_ray.plan.synthesis import AgentSynthesizer, SynthesisContext
from ensemble_ray.plan.templates import resolve_template
from ensemble_ray.ports import ChatModel, StreamingChatModel, StructuredChatModel, ToolMetrics
from ensemble_ray.prompts.agent import build_system_prompt
from ensemble_ray.prompts.manager import DefaultManagerPromptStrategy
from ensemble_ray.prompts.task import build_user_prompt
from ensemble_ray.record.view.exporters import JsonTraceExporter
from ensemble_ray.run_handle import Run
from ensemble_ray.runtime import Runtime
from ensemble_ray.tools import (
    AbstractAgentTool,
    AbstractTypedAgentTool,
    AgentTool,
    CustomSchemaAgentTool,
    DynamicToolProvider,
    NoOpToolMetrics,
    PipelineErrorStrategy,
    ToolContext,
    ToolPipeline,
    ToolResult,
    TypedAgentTool,
    current_tool_context,
    tool,
)
from ensemble_ray.trace import (
    AgentSummary,
    CapturedMessage,
    CaptureMode,
    DelegationTrace,
    ErrorTrace,
    ExecutionTrace,
    ExecutionTraceExporter,
    LlmInteraction,
    MapReduceLevelSummary,
    TaskPrompts,
    TaskTrace,
    ToolCallTrace,
)

if TYPE_CHECKING:
    from actors.runtime import RayRuntime
    from ensemble_ray.fed.item_log import ItemStream
    from ensemble_ray.fed.run import MapReduceRun
    from ensemble_ray.forking import afork, fork
    from ensemble_ray.items.dead_letters import DeadLetters
    from ensemble_ray.map_reduce import MapEnsemble, MapReduceEnsemble
    from ensemble_ray.resuming import aresume, resume
    from ensemble_ray.tools.builtin import (
        CalculatorTool,
        DateTimeTool,
        FileReadTool,
        FileWriteTool,
        HttpAgentTool,
        JsonParserTool,
        ProcessAgentTool,
        WebScraperTool,
        WebSearchProvider,
        WebSearchTool,
    )

__all__ = [
    "AbstractAgentTool",
    "AbstractTypedAgentTool",
    "Agent",
    "AgentEntry",
    "AgentExecutionError",
    "AgentSummary",
    "AgentSynthesizer",
    "AgentTool",
    "CalculatorTool",
    "CaptureMode",
    "CapturedMessage",
    "ChatMessage",
    "ChatModel",
    "ChatResponse",
    "CircuitOpenError",
    "ConstraintViolationError",
    "CostConfiguration",
    "CostEstimate",
    "CustomSchemaAgentTool",
    "DateTimeTool",
    "DeadLetters",
    "DefaultManagerPromptStrategy",
    "DelegationCompletedEvent",
    "DelegationContext",
    "DelegationFailedEvent",
    "DelegationPolicy",
    "DelegationPolicyContext",
    "DelegationPolicyResult",
    "DelegationPriority",
    "DelegationRequest",
    "DelegationResponse",
    "DelegationStartedEvent",
    "DelegationStatus",
    "DelegationTrace",
    "Durability",
    "DynamicToolProvider",
    "Effect",
    "Ensemble",
    "EnsembleCompletedEvent",
    "EnsembleError",
    "EnsembleListener",
    "EnsembleOutput",
    "EnsembleStartedEvent",
    "ErrorTrace",
    "Event",
    "EventStream",
    "ExecutionMetrics",
    "ExecutionTrace",
    "ExecutionTraceExporter",
    "ExitEarlyError",
    "ExitReason",
    "FailedItem",
    "FileChangedEvent",
    "FileReadTool",
    "FileWriteTool",
    "GuardrailInput",
    "GuardrailOutput",
    "GuardrailResult",
    "GuardrailType",
    "GuardrailViolationError",
    "HierarchicalConstraints",
    "HttpAgentTool",
    "IllegalStateError",
    "InlineRuntime",
    "ItemResult",
    "ItemStream",
    "JsonParserTool",
    "JsonSchema",
    "JsonTraceExporter",
    "LlmInteraction",
    "LlmIterationCompletedEvent",
    "LlmIterationStartedEvent",
    "LocalChatModel",
    "LogContextFilter",
    "ManagerPromptContext",
    "ManagerPromptStrategy",
    "ManagerStalledError",
    "MapEnsemble",
    "MapReduceEnsemble",
    "MapReduceLevelSummary",
    "MapReduceRun",
    "MaxIterationsExceededError",
    "MemoryOperationCounts",
    "NoOpToolMetrics",
    "Node",
    "OnUnknown",
    "OpenAIChatModel",
    "OutputParsingError",
    "ParallelErrorStrategy",
    "ParallelExecutionError",
    "ParseResult",
    "PipelineErrorStrategy",
    "Plan",
    "ProcessAgentTool",
    "PromptTemplateError",
    "RateLimit",
    "RateLimitInterruptedError",
    "RateLimitTimeoutError",
    "RateLimitedChatModel",
    "RayRuntime",
    "RecordError",
    "RetryPolicy",
    "Run",
    "RunExistsError",
    "RunOptions",
    "RunState",
    "Runtime",
    "StaleEpochError",
    "StreamingChatModel",
    "StructuredChatModel",
    "SynthesisContext",
    "Task",
    "TaskCompleteEvent",
    "TaskDependencyGraph",
    "TaskExecutionError",
    "TaskFailedEvent",
    "TaskHandlerContext",
    "TaskInputEvent",
    "TaskMetrics",
    "TaskOutput",
    "TaskPrompts",
    "TaskStartEvent",
    "TaskTrace",
    "TokenEvent",
    "TokenUsage",
    "ToolCall",
    "ToolCallEvent",
    "ToolCallRequest",
    "ToolCallTrace",
    "ToolConfigurationError",
    "ToolContext",
    "ToolExecutionError",
    "ToolMetrics",
    "ToolPipeline",
    "ToolResult",
    "ToolSpec",
    "TryAgain",
    "TypedAgentTool",
    "UnknownEffect",
    "UnknownOutcomeError",
    "ValidationError",
    "WebScraperTool",
    "WebSearchProvider",
    "WebSearchTool",
    "Workflow",
    "afork",
    "aresume",
    "build_system_prompt",
    "build_user_prompt",
    "current_tool_context",
    "describe_schema",
    "extract_json",
    "fork",
    "parse_output",
    "resolve_template",
    "resume",
    "run",
    "tool",
]


#: Where names stand that not every program needs: what works over many items, and what goes on with recorded runs.
_LATE = {
    "DeadLetters": "items.dead_letters",
    "ItemStream": "fed.item_log",
    "MapEnsemble": "map_reduce",
    "MapReduceEnsemble": "map_reduce",
    "MapReduceRun": "fed.run",
    "afork": "forking",
    "aresume": "resuming",
    "fork": "forking",
    "resume": "resuming",
}


def __getattr__(name: str) -> object:
    """Load what costs time only when it is asked for: built-in tools, what `_LATE` names, and Ray with its runtime."""
    if name == "RayRuntime":
        from ensemble_ray.runtime import ray_runtime_class

        return ray_runtime_class()
    if name in _LATE:
        return getattr(importlib.import_module(f"ensemble_ray.{_LATE[name]}"), name)
    builtin = importlib.import_module("ensemble_ray.tools.builtin")
    if name in builtin.__all__:
        return getattr(builtin, name)
    raise AttributeError(f"module 'ensemble_ray' has no attribute '{name}'")


def __dir__() -> list[str]:
    """What editors without type information complete."""
    return __all__
