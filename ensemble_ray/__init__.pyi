# Written by `python -m tests.architecture.face` from the table in `__init__.py`.
from ensemble_ray import errors as errors
from ensemble_ray import events as events
from ensemble_ray import tools as tools
from ensemble_ray.actors.driver.runtime import RayRuntime as RayRuntime
from ensemble_ray.definition.agent import Agent as Agent
from ensemble_ray.definition.agent import RemoteAgent as RemoteAgent
from ensemble_ray.definition.delivery import BatchDelivery as BatchDelivery
from ensemble_ray.definition.ensemble import HierarchicalConstraints as HierarchicalConstraints
from ensemble_ray.definition.ensemble import ManagerPromptContext as ManagerPromptContext
from ensemble_ray.definition.ensemble import ManagerPromptStrategy as ManagerPromptStrategy
from ensemble_ray.definition.fields import Durability as Durability
from ensemble_ray.definition.fields import OnUnknown as OnUnknown
from ensemble_ray.definition.fields import ParallelErrorStrategy as ParallelErrorStrategy
from ensemble_ray.definition.fields import Workflow as Workflow
from ensemble_ray.definition.graph import Graph as Graph
from ensemble_ray.definition.graph import GraphEdge as GraphEdge
from ensemble_ray.definition.graph import GraphFork as GraphFork
from ensemble_ray.definition.graph import GraphJoin as GraphJoin
from ensemble_ray.definition.graph import MaxStepsAction as MaxStepsAction
from ensemble_ray.definition.loop import Loop as Loop
from ensemble_ray.definition.loop import LoopMemoryMode as LoopMemoryMode
from ensemble_ray.definition.loop import LoopOutputMode as LoopOutputMode
from ensemble_ray.definition.loop import MaxIterationsAction as MaxIterationsAction
from ensemble_ray.definition.loop import Until as Until
from ensemble_ray.definition.phase import Phase as Phase
from ensemble_ray.definition.phase import PhaseReview as PhaseReview
from ensemble_ray.definition.phase import PhaseReviewDecision as PhaseReviewDecision
from ensemble_ray.definition.redactor import Redactor as Redactor
from ensemble_ray.definition.run_options import RetryPolicy as RetryPolicy
from ensemble_ray.definition.run_options import RunOptions as RunOptions
from ensemble_ray.definition.schedule import Schedule as Schedule
from ensemble_ray.definition.task import ReflectionConfig as ReflectionConfig
from ensemble_ray.definition.task import ReflectionInput as ReflectionInput
from ensemble_ray.definition.task import Task as Task
from ensemble_ray.definition.task import UnitOutput as UnitOutput
from ensemble_ray.ensemble import Ensemble as Ensemble
from ensemble_ray.ensemble import run as run
from ensemble_ray.errors import AgentExecutionError as AgentExecutionError
from ensemble_ray.errors import AllModelsFailedError as AllModelsFailedError
from ensemble_ray.errors import BatchError as BatchError
from ensemble_ray.errors import CircuitOpenError as CircuitOpenError
from ensemble_ray.errors import ConstraintViolationError as ConstraintViolationError
from ensemble_ray.errors import EnsembleError as EnsembleError
from ensemble_ray.errors import ExitEarlyError as ExitEarlyError
from ensemble_ray.errors import GraphNoEdgeMatchedError as GraphNoEdgeMatchedError
from ensemble_ray.errors import GuardrailViolationError as GuardrailViolationError
from ensemble_ray.errors import IllegalStateError as IllegalStateError
from ensemble_ray.errors import ManagerStalledError as ManagerStalledError
from ensemble_ray.errors import MaxGraphStepsExceededError as MaxGraphStepsExceededError
from ensemble_ray.errors import MaxIterationsExceededError as MaxIterationsExceededError
from ensemble_ray.errors import MaxLoopIterationsExceededError as MaxLoopIterationsExceededError
from ensemble_ray.errors import OutputParsingError as OutputParsingError
from ensemble_ray.errors import ParallelExecutionError as ParallelExecutionError
from ensemble_ray.errors import PromptTemplateError as PromptTemplateError
from ensemble_ray.errors import RateLimitInterruptedError as RateLimitInterruptedError
from ensemble_ray.errors import RateLimitTimeoutError as RateLimitTimeoutError
from ensemble_ray.errors import RecordError as RecordError
from ensemble_ray.errors import ReviewDecidedError as ReviewDecidedError
from ensemble_ray.errors import ReviewRoleError as ReviewRoleError
from ensemble_ray.errors import ReviewTimeoutError as ReviewTimeoutError
from ensemble_ray.errors import RunExistsError as RunExistsError
from ensemble_ray.errors import StaleEpochError as StaleEpochError
from ensemble_ray.errors import TaskExecutionError as TaskExecutionError
from ensemble_ray.errors import ToolConfigurationError as ToolConfigurationError
from ensemble_ray.errors import ToolExecutionError as ToolExecutionError
from ensemble_ray.errors import TryAgain as TryAgain
from ensemble_ray.errors import UnknownOutcomeError as UnknownOutcomeError
from ensemble_ray.errors import UnreadableAttachmentError as UnreadableAttachmentError
from ensemble_ray.errors import ValidationError as ValidationError
from ensemble_ray.evaluation.cases import Case as Case
from ensemble_ray.evaluation.evaluation import Evaluation as Evaluation
from ensemble_ray.evaluation.judging import Judge as Judge
from ensemble_ray.evaluation.results import CaseResult as CaseResult
from ensemble_ray.evaluation.results import CaseRun as CaseRun
from ensemble_ray.evaluation.results import EvaluationComparison as EvaluationComparison
from ensemble_ray.evaluation.results import EvaluationResult as EvaluationResult
from ensemble_ray.evaluation.results import RunScore as RunScore
from ensemble_ray.evaluation.running import CaseProgress as CaseProgress
from ensemble_ray.evaluation.scorers import Contains as Contains
from ensemble_ray.evaluation.scorers import ExactMatch as ExactMatch
from ensemble_ray.evaluation.scorers import FunctionScorer as FunctionScorer
from ensemble_ray.evaluation.scorers import JsonFields as JsonFields
from ensemble_ray.evaluation.scorers import NumericMatch as NumericMatch
from ensemble_ray.evaluation.scorers import RegexMatch as RegexMatch
from ensemble_ray.evaluation.scorers import Score as Score
from ensemble_ray.evaluation.scorers import Scorer as Scorer
from ensemble_ray.evaluation.scorers import Similarity as Similarity
from ensemble_ray.events import BatchProgressEvent as BatchProgressEvent
from ensemble_ray.events import DelegationCompletedEvent as DelegationCompletedEvent
from ensemble_ray.events import DelegationFailedEvent as DelegationFailedEvent
from ensemble_ray.events import DelegationStartedEvent as DelegationStartedEvent
from ensemble_ray.events import EnsembleCompletedEvent as EnsembleCompletedEvent
from ensemble_ray.events import EnsembleStartedEvent as EnsembleStartedEvent
from ensemble_ray.events import Event as Event
from ensemble_ray.events import FileChangedEvent as FileChangedEvent
from ensemble_ray.events import GraphStateCompletedEvent as GraphStateCompletedEvent
from ensemble_ray.events import LlmIterationCompletedEvent as LlmIterationCompletedEvent
from ensemble_ray.events import LlmIterationStartedEvent as LlmIterationStartedEvent
from ensemble_ray.events import LoopIterationCompletedEvent as LoopIterationCompletedEvent
from ensemble_ray.events import TaskCompleteEvent as TaskCompleteEvent
from ensemble_ray.events import TaskFailedEvent as TaskFailedEvent
from ensemble_ray.events import TaskInputEvent as TaskInputEvent
from ensemble_ray.events import TaskReflectedEvent as TaskReflectedEvent
from ensemble_ray.events import TaskStartEvent as TaskStartEvent
from ensemble_ray.events import TokenEvent as TokenEvent
from ensemble_ray.events import ToolCallEvent as ToolCallEvent
from ensemble_ray.events import ToolCallRequest as ToolCallRequest
from ensemble_ray.events.delivery import EnsembleListener as EnsembleListener
from ensemble_ray.events.delivery import EventStream as EventStream
from ensemble_ray.events.telemetry.listener import OpenTelemetryListener as OpenTelemetryListener
from ensemble_ray.execute.agent.structured import ParseResult as ParseResult
from ensemble_ray.execute.agent.structured import extract_json as extract_json
from ensemble_ray.execute.agent.structured import parse_output as parse_output
from ensemble_ray.execute.callables import TaskHandlerContext as TaskHandlerContext
from ensemble_ray.execute.effects import UnknownEffect as UnknownEffect
from ensemble_ray.execute.guardrails import GuardrailInput as GuardrailInput
from ensemble_ray.execute.guardrails import GuardrailOutput as GuardrailOutput
from ensemble_ray.execute.guardrails import GuardrailResult as GuardrailResult
from ensemble_ray.execute.guardrails import GuardrailType as GuardrailType
from ensemble_ray.execute.review.handlers import ReviewHandler as ReviewHandler
from ensemble_ray.execute.review.notifiers import ReviewNotifier as ReviewNotifier
from ensemble_ray.items.folders import Files as Files
from ensemble_ray.items.results import DeadLetters as DeadLetters
from ensemble_ray.items.text_files import CsvFile as CsvFile
from ensemble_ray.llm.fallback import Fallback as Fallback
from ensemble_ray.llm.fallback import When as When
from ensemble_ray.llm.limits.limiter import RateLimitedChatModel as RateLimitedChatModel
from ensemble_ray.llm.local import LocalChatModel as LocalChatModel
from ensemble_ray.llm.openai import OpenAIChatModel as OpenAIChatModel
from ensemble_ray.llm.openai_responses import OpenAIResponsesModel as OpenAIResponsesModel
from ensemble_ray.map_reduce import MapEnsemble as MapEnsemble
from ensemble_ray.map_reduce import MapReduceEnsemble as MapReduceEnsemble
from ensemble_ray.memory.embedding_models import LocalEmbeddingModel as LocalEmbeddingModel
from ensemble_ray.memory.embeddings import EmbeddingStoreLongTermMemory as EmbeddingStoreLongTermMemory
from ensemble_ray.memory.openai_embeddings import OpenAIEmbeddingModel as OpenAIEmbeddingModel
from ensemble_ray.memory.postgres import PostgresMemory as PostgresMemory
from ensemble_ray.memory.postgres import PostgresReflectionStore as PostgresReflectionStore
from ensemble_ray.memory.sqlite import SqliteMemory as SqliteMemory
from ensemble_ray.memory.sqlite import SqliteReflectionStore as SqliteReflectionStore
from ensemble_ray.memory.store import EnsembleMemory as EnsembleMemory
from ensemble_ray.memory.store import InMemoryEmbeddingStore as InMemoryEmbeddingStore
from ensemble_ray.memory.store import InMemoryEntityMemory as InMemoryEntityMemory
from ensemble_ray.memory.store import InMemoryReflectionStore as InMemoryReflectionStore
from ensemble_ray.memory.store import MemoryStore as MemoryStore
from ensemble_ray.memory.tools import EntityMemoryTool as EntityMemoryTool
from ensemble_ray.memory.tools import MemoryTool as MemoryTool
from ensemble_ray.plan.plan import AgentEntry as AgentEntry
from ensemble_ray.plan.plan import Node as Node
from ensemble_ray.plan.plan import Plan as Plan
from ensemble_ray.plan.planner import AgentSynthesizer as AgentSynthesizer
from ensemble_ray.plan.planner import SynthesisContext as SynthesisContext
from ensemble_ray.plan.planner import TaskDependencyGraph as TaskDependencyGraph
from ensemble_ray.plan.planner import resolve_template as resolve_template
from ensemble_ray.ports import ChatModel as ChatModel
from ensemble_ray.ports import CustomToolMetrics as CustomToolMetrics
from ensemble_ray.ports import EmbeddingModel as EmbeddingModel
from ensemble_ray.ports import EmbeddingStore as EmbeddingStore
from ensemble_ray.ports import EntityMemory as EntityMemory
from ensemble_ray.ports import LongTermMemory as LongTermMemory
from ensemble_ray.ports import MemoryOperationListener as MemoryOperationListener
from ensemble_ray.ports import ReflectionStore as ReflectionStore
from ensemble_ray.ports import RunsTask as RunsTask
from ensemble_ray.ports import StreamingChatModel as StreamingChatModel
from ensemble_ray.ports import StructuredChatModel as StructuredChatModel
from ensemble_ray.ports import ToolMetrics as ToolMetrics
from ensemble_ray.process.context import LogContextFilter as LogContextFilter
from ensemble_ray.process.run_context import CurrentRun as CurrentRun
from ensemble_ray.process.run_context import current_run_context as current_run_context
from ensemble_ray.process.run_context import provide as provide
from ensemble_ray.prompts.output_format import describe_schema as describe_schema
from ensemble_ray.prompts.task import DefaultManagerPromptStrategy as DefaultManagerPromptStrategy
from ensemble_ray.prompts.task import build_system_prompt as build_system_prompt
from ensemble_ray.prompts.task import build_user_prompt as build_user_prompt
from ensemble_ray.record.view.exporters import JsonTraceExporter as JsonTraceExporter
from ensemble_ray.recovery.deciding import adecide as adecide
from ensemble_ray.recovery.deciding import apending_reviews as apending_reviews
from ensemble_ray.recovery.deciding import decide as decide
from ensemble_ray.recovery.deciding import pending_reviews as pending_reviews
from ensemble_ray.recovery.forking import afork as afork
from ensemble_ray.recovery.forking import fork as fork
from ensemble_ray.recovery.resuming import aresume as aresume
from ensemble_ray.recovery.resuming import resume as resume
from ensemble_ray.recovery.revealing import areveal as areveal
from ensemble_ray.recovery.revealing import reveal as reveal
from ensemble_ray.runs.handle import Run as Run
from ensemble_ray.runs.inline import InlineRuntime as InlineRuntime
from ensemble_ray.runs.map_reduce.items import ItemStream as ItemStream
from ensemble_ray.runs.map_reduce.launcher import MapReduceRun as MapReduceRun
from ensemble_ray.runs.ports import Runtime as Runtime
from ensemble_ray.serve.process_control import ProcessControl as ProcessControl
from ensemble_ray.studio.dashboard.dashboard import WebDashboard as WebDashboard
from ensemble_ray.studio.dashboard.dashboard import WebSocketStreamingListener as WebSocketStreamingListener
from ensemble_ray.studio.dashboard.hub import WebReviewHandler as WebReviewHandler
from ensemble_ray.tools import AbstractAgentTool as AbstractAgentTool
from ensemble_ray.tools import AbstractTypedAgentTool as AbstractTypedAgentTool
from ensemble_ray.tools import AgentTool as AgentTool
from ensemble_ray.tools import CustomSchemaAgentTool as CustomSchemaAgentTool
from ensemble_ray.tools import DynamicToolProvider as DynamicToolProvider
from ensemble_ray.tools import NoOpToolMetrics as NoOpToolMetrics
from ensemble_ray.tools import PipelineErrorStrategy as PipelineErrorStrategy
from ensemble_ray.tools import ToolContext as ToolContext
from ensemble_ray.tools import ToolPipeline as ToolPipeline
from ensemble_ray.tools import ToolResult as ToolResult
from ensemble_ray.tools import TypedAgentTool as TypedAgentTool
from ensemble_ray.tools import current_tool_context as current_tool_context
from ensemble_ray.tools import tool as tool
from ensemble_ray.tools.builtin import CalculatorTool as CalculatorTool
from ensemble_ray.tools.builtin import DateTimeTool as DateTimeTool
from ensemble_ray.tools.builtin import FileReadTool as FileReadTool
from ensemble_ray.tools.builtin import FileWriteTool as FileWriteTool
from ensemble_ray.tools.builtin import HttpAgentTool as HttpAgentTool
from ensemble_ray.tools.builtin import HumanInputTool as HumanInputTool
from ensemble_ray.tools.builtin import JsonParserTool as JsonParserTool
from ensemble_ray.tools.builtin import ProcessAgentTool as ProcessAgentTool
from ensemble_ray.tools.builtin import WebScraperTool as WebScraperTool
from ensemble_ray.tools.builtin import WebSearchProvider as WebSearchProvider
from ensemble_ray.tools.builtin import WebSearchTool as WebSearchTool
from ensemble_ray.tools.mcp import MCP as MCP
from ensemble_ray.values.attachments import Attachment as Attachment
from ensemble_ray.values.attachments import Audio as Audio
from ensemble_ray.values.attachments import File as File
from ensemble_ray.values.attachments import Image as Image
from ensemble_ray.values.delegation import DelegationContext as DelegationContext
from ensemble_ray.values.delegation import DelegationPolicy as DelegationPolicy
from ensemble_ray.values.delegation import DelegationPolicyContext as DelegationPolicyContext
from ensemble_ray.values.delegation import DelegationPolicyResult as DelegationPolicyResult
from ensemble_ray.values.delegation import DelegationPriority as DelegationPriority
from ensemble_ray.values.delegation import DelegationRequest as DelegationRequest
from ensemble_ray.values.delegation import DelegationResponse as DelegationResponse
from ensemble_ray.values.delegation import DelegationStatus as DelegationStatus
from ensemble_ray.values.delegation import TaskAnswer as TaskAnswer
from ensemble_ray.values.delegation import TaskRequest as TaskRequest
from ensemble_ray.values.memory import EmbeddingMatch as EmbeddingMatch
from ensemble_ray.values.memory import EvictionPolicy as EvictionPolicy
from ensemble_ray.values.memory import MemoryEntry as MemoryEntry
from ensemble_ray.values.memory import MemoryScope as MemoryScope
from ensemble_ray.values.memory import TaskReflection as TaskReflection
from ensemble_ray.values.messages import ChatMessage as ChatMessage
from ensemble_ray.values.messages import ChatResponse as ChatResponse
from ensemble_ray.values.messages import Effect as Effect
from ensemble_ray.values.messages import JsonSchema as JsonSchema
from ensemble_ray.values.messages import ProviderFields as ProviderFields
from ensemble_ray.values.messages import Reasoning as Reasoning
from ensemble_ray.values.messages import TokenUsage as TokenUsage
from ensemble_ray.values.messages import ToolCall as ToolCall
from ensemble_ray.values.messages import ToolSpec as ToolSpec
from ensemble_ray.values.metrics import CostConfiguration as CostConfiguration
from ensemble_ray.values.metrics import CostEstimate as CostEstimate
from ensemble_ray.values.metrics import ExecutionMetrics as ExecutionMetrics
from ensemble_ray.values.metrics import MemoryOperationCounts as MemoryOperationCounts
from ensemble_ray.values.metrics import TaskMetrics as TaskMetrics
from ensemble_ray.values.outputs import AgentOutput as AgentOutput
from ensemble_ray.values.outputs import EnsembleOutput as EnsembleOutput
from ensemble_ray.values.outputs import ExitReason as ExitReason
from ensemble_ray.values.outputs import FailedItem as FailedItem
from ensemble_ray.values.outputs import ItemResult as ItemResult
from ensemble_ray.values.outputs import RunState as RunState
from ensemble_ray.values.prices import ModelPrice as ModelPrice
from ensemble_ray.values.reviews import OnTimeoutAction as OnTimeoutAction
from ensemble_ray.values.reviews import OpenReview as OpenReview
from ensemble_ray.values.reviews import Review as Review
from ensemble_ray.values.reviews import ReviewDecision as ReviewDecision
from ensemble_ray.values.reviews import ReviewPolicy as ReviewPolicy
from ensemble_ray.values.reviews import ReviewRequest as ReviewRequest
from ensemble_ray.values.reviews import ReviewTiming as ReviewTiming
from ensemble_ray.values.reviews import ReviewWait as ReviewWait
from ensemble_ray.values.task_output import GraphRoutingContext as GraphRoutingContext
from ensemble_ray.values.task_output import GraphStep as GraphStep
from ensemble_ray.values.task_output import LoopIterationContext as LoopIterationContext
from ensemble_ray.values.task_output import TaskOutput as TaskOutput
from ensemble_ray.values.trace import AgentSummary as AgentSummary
from ensemble_ray.values.trace import CapturedMessage as CapturedMessage
from ensemble_ray.values.trace import CaptureMode as CaptureMode
from ensemble_ray.values.trace import DelegationTrace as DelegationTrace
from ensemble_ray.values.trace import ErrorTrace as ErrorTrace
from ensemble_ray.values.trace import ExecutionTrace as ExecutionTrace
from ensemble_ray.values.trace import ExecutionTraceExporter as ExecutionTraceExporter
from ensemble_ray.values.trace import GraphTrace as GraphTrace
from ensemble_ray.values.trace import GraphTraceStep as GraphTraceStep
from ensemble_ray.values.trace import LlmInteraction as LlmInteraction
from ensemble_ray.values.trace import LoopTrace as LoopTrace
from ensemble_ray.values.trace import MapReduceLevelSummary as MapReduceLevelSummary
from ensemble_ray.values.trace import PhaseStatus as PhaseStatus
from ensemble_ray.values.trace import PhaseTrace as PhaseTrace
from ensemble_ray.values.trace import TaskPrompts as TaskPrompts
from ensemble_ray.values.trace import TaskTrace as TaskTrace
from ensemble_ray.values.trace import ToolCallTrace as ToolCallTrace
from ensemble_ray.values.value import RateLimit as RateLimit
from ensemble_ray.visualization.dag_model import DagAgentNode as DagAgentNode
from ensemble_ray.visualization.dag_model import DagExporter as DagExporter
from ensemble_ray.visualization.dag_model import DagGraphEdge as DagGraphEdge
from ensemble_ray.visualization.dag_model import DagModel as DagModel
from ensemble_ray.visualization.dag_model import DagPhase as DagPhase
from ensemble_ray.visualization.dag_model import DagTaskNode as DagTaskNode
from ensemble_ray.visualization.dev_tools import DevToolsExport as DevToolsExport
from ensemble_ray.visualization.dev_tools import EnsembleDevTools as EnsembleDevTools

MODULES: tuple[str, ...]
MODULE_OF: dict[str, str]

__all__ = [
    "MCP",
    "AbstractAgentTool",
    "AbstractTypedAgentTool",
    "Agent",
    "AgentEntry",
    "AgentExecutionError",
    "AgentOutput",
    "AgentSummary",
    "AgentSynthesizer",
    "AgentTool",
    "AllModelsFailedError",
    "Attachment",
    "Audio",
    "BatchDelivery",
    "BatchError",
    "BatchProgressEvent",
    "CalculatorTool",
    "CaptureMode",
    "CapturedMessage",
    "Case",
    "CaseProgress",
    "CaseResult",
    "CaseRun",
    "ChatMessage",
    "ChatModel",
    "ChatResponse",
    "CircuitOpenError",
    "ConstraintViolationError",
    "Contains",
    "CostConfiguration",
    "CostEstimate",
    "CsvFile",
    "CurrentRun",
    "CustomSchemaAgentTool",
    "CustomToolMetrics",
    "DagAgentNode",
    "DagExporter",
    "DagGraphEdge",
    "DagModel",
    "DagPhase",
    "DagTaskNode",
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
    "DevToolsExport",
    "Durability",
    "DynamicToolProvider",
    "Effect",
    "EmbeddingMatch",
    "EmbeddingModel",
    "EmbeddingStore",
    "EmbeddingStoreLongTermMemory",
    "Ensemble",
    "EnsembleCompletedEvent",
    "EnsembleDevTools",
    "EnsembleError",
    "EnsembleListener",
    "EnsembleMemory",
    "EnsembleOutput",
    "EnsembleStartedEvent",
    "EntityMemory",
    "EntityMemoryTool",
    "ErrorTrace",
    "Evaluation",
    "EvaluationComparison",
    "EvaluationResult",
    "Event",
    "EventStream",
    "EvictionPolicy",
    "ExactMatch",
    "ExecutionMetrics",
    "ExecutionTrace",
    "ExecutionTraceExporter",
    "ExitEarlyError",
    "ExitReason",
    "FailedItem",
    "Fallback",
    "File",
    "FileChangedEvent",
    "FileReadTool",
    "FileWriteTool",
    "Files",
    "FunctionScorer",
    "Graph",
    "GraphEdge",
    "GraphFork",
    "GraphJoin",
    "GraphNoEdgeMatchedError",
    "GraphRoutingContext",
    "GraphStateCompletedEvent",
    "GraphStep",
    "GraphTrace",
    "GraphTraceStep",
    "GuardrailInput",
    "GuardrailOutput",
    "GuardrailResult",
    "GuardrailType",
    "GuardrailViolationError",
    "HierarchicalConstraints",
    "HttpAgentTool",
    "HumanInputTool",
    "IllegalStateError",
    "Image",
    "InMemoryEmbeddingStore",
    "InMemoryEntityMemory",
    "InMemoryReflectionStore",
    "InlineRuntime",
    "ItemResult",
    "ItemStream",
    "JsonFields",
    "JsonParserTool",
    "JsonSchema",
    "JsonTraceExporter",
    "Judge",
    "LlmInteraction",
    "LlmIterationCompletedEvent",
    "LlmIterationStartedEvent",
    "LocalChatModel",
    "LocalEmbeddingModel",
    "LogContextFilter",
    "LongTermMemory",
    "Loop",
    "LoopIterationCompletedEvent",
    "LoopIterationContext",
    "LoopMemoryMode",
    "LoopOutputMode",
    "LoopTrace",
    "ManagerPromptContext",
    "ManagerPromptStrategy",
    "ManagerStalledError",
    "MapEnsemble",
    "MapReduceEnsemble",
    "MapReduceLevelSummary",
    "MapReduceRun",
    "MaxGraphStepsExceededError",
    "MaxIterationsAction",
    "MaxIterationsExceededError",
    "MaxLoopIterationsExceededError",
    "MaxStepsAction",
    "MemoryEntry",
    "MemoryOperationCounts",
    "MemoryOperationListener",
    "MemoryScope",
    "MemoryStore",
    "MemoryTool",
    "ModelPrice",
    "NoOpToolMetrics",
    "Node",
    "NumericMatch",
    "OnTimeoutAction",
    "OnUnknown",
    "OpenAIChatModel",
    "OpenAIEmbeddingModel",
    "OpenAIResponsesModel",
    "OpenReview",
    "OpenTelemetryListener",
    "OutputParsingError",
    "ParallelErrorStrategy",
    "ParallelExecutionError",
    "ParseResult",
    "Phase",
    "PhaseReview",
    "PhaseReviewDecision",
    "PhaseStatus",
    "PhaseTrace",
    "PipelineErrorStrategy",
    "Plan",
    "PostgresMemory",
    "PostgresReflectionStore",
    "ProcessAgentTool",
    "ProcessControl",
    "PromptTemplateError",
    "ProviderFields",
    "RateLimit",
    "RateLimitInterruptedError",
    "RateLimitTimeoutError",
    "RateLimitedChatModel",
    "RayRuntime",
    "Reasoning",
    "RecordError",
    "Redactor",
    "ReflectionConfig",
    "ReflectionInput",
    "ReflectionStore",
    "RegexMatch",
    "RemoteAgent",
    "RetryPolicy",
    "Review",
    "ReviewDecidedError",
    "ReviewDecision",
    "ReviewHandler",
    "ReviewNotifier",
    "ReviewPolicy",
    "ReviewRequest",
    "ReviewRoleError",
    "ReviewTimeoutError",
    "ReviewTiming",
    "ReviewWait",
    "Run",
    "RunExistsError",
    "RunOptions",
    "RunScore",
    "RunState",
    "RunsTask",
    "Runtime",
    "Schedule",
    "Score",
    "Scorer",
    "Similarity",
    "SqliteMemory",
    "SqliteReflectionStore",
    "StaleEpochError",
    "StreamingChatModel",
    "StructuredChatModel",
    "SynthesisContext",
    "Task",
    "TaskAnswer",
    "TaskCompleteEvent",
    "TaskDependencyGraph",
    "TaskExecutionError",
    "TaskFailedEvent",
    "TaskHandlerContext",
    "TaskInputEvent",
    "TaskMetrics",
    "TaskOutput",
    "TaskPrompts",
    "TaskReflectedEvent",
    "TaskReflection",
    "TaskRequest",
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
    "UnitOutput",
    "UnknownEffect",
    "UnknownOutcomeError",
    "UnreadableAttachmentError",
    "Until",
    "ValidationError",
    "WebDashboard",
    "WebReviewHandler",
    "WebScraperTool",
    "WebSearchProvider",
    "WebSearchTool",
    "WebSocketStreamingListener",
    "When",
    "Workflow",
    "adecide",
    "afork",
    "apending_reviews",
    "aresume",
    "areveal",
    "build_system_prompt",
    "build_user_prompt",
    "current_run_context",
    "current_tool_context",
    "decide",
    "describe_schema",
    "extract_json",
    "fork",
    "parse_output",
    "pending_reviews",
    "provide",
    "resolve_template",
    "resume",
    "reveal",
    "run",
    "tool",
]
