"""ensemble_ray: teams of LLM agents as actors on Ray. Users import only from this package.

Names are imported on first use, so that Ray and models' SDKs are loaded only when a run needs them.
`_EXPORTS` lists all names; `python -m tests.architecture.face` generates `__init__.pyi` from it.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec

#: Public names by module.
_EXPORTS = {
    "ensemble_ray.actors.driver.runtime": "RayRuntime",
    "ensemble_ray.process.context": "LogContextFilter",
    "ensemble_ray.studio.dashboard.dashboard": "WebDashboard WebSocketStreamingListener",
    "ensemble_ray.studio.dashboard.hub": "WebReviewHandler",
    "ensemble_ray.definition.agent": "Agent RemoteAgent",
    "ensemble_ray.definition.fields": "Durability OnUnknown ParallelErrorStrategy Workflow",
    "ensemble_ray.definition.redactor": "Redactor",
    "ensemble_ray.recovery.revealing": "areveal reveal",
    "ensemble_ray.definition.run_options": "RunOptions RetryPolicy",
    "ensemble_ray.definition.schedule": "Schedule",
    "ensemble_ray.definition.delivery": "BatchDelivery",
    "ensemble_ray.definition.graph": "Graph MaxStepsAction GraphEdge GraphFork GraphJoin",
    "ensemble_ray.definition.loop": "Loop LoopMemoryMode LoopOutputMode MaxIterationsAction Until",
    "ensemble_ray.definition.phase": "Phase PhaseReview PhaseReviewDecision",
    "ensemble_ray.definition.task": "UnitOutput Task ReflectionConfig ReflectionInput",
    "ensemble_ray.definition.ensemble": "HierarchicalConstraints ManagerPromptContext ManagerPromptStrategy",
    "ensemble_ray.serve.process_control": "ProcessControl",
    "ensemble_ray.values.outputs": "AgentOutput EnsembleOutput ExitReason FailedItem ItemResult RunState",
    "ensemble_ray.values.delegation": """
        DelegationContext DelegationPolicy DelegationPolicyContext DelegationPolicyResult DelegationPriority
        DelegationRequest DelegationResponse DelegationStatus TaskAnswer TaskRequest
    """,
    "ensemble_ray.ensemble": "Ensemble run",
    "ensemble_ray.errors": """
        AgentExecutionError AllModelsFailedError BatchError CircuitOpenError ConstraintViolationError ExitEarlyError GuardrailViolationError
        IllegalStateError ManagerStalledError MaxIterationsExceededError OutputParsingError ParallelExecutionError
        PromptTemplateError RateLimitInterruptedError RateLimitTimeoutError RecordError ReviewDecidedError ReviewRoleError
        ReviewTimeoutError RunExistsError StaleEpochError TaskExecutionError ToolConfigurationError ToolExecutionError
        TryAgain UnknownOutcomeError ValidationError EnsembleError GraphNoEdgeMatchedError MaxGraphStepsExceededError
        MaxLoopIterationsExceededError UnreadableAttachmentError
    """,
    "ensemble_ray.evaluation.cases": "Case",
    "ensemble_ray.evaluation.evaluation": "Evaluation",
    "ensemble_ray.evaluation.judging": "Judge",
    "ensemble_ray.evaluation.results": "CaseResult CaseRun EvaluationComparison EvaluationResult RunScore",
    "ensemble_ray.evaluation.running": "CaseProgress",
    "ensemble_ray.evaluation.scorers": """
        Contains ExactMatch FunctionScorer JsonFields NumericMatch RegexMatch Score Scorer Similarity
    """,
    "ensemble_ray.events.delivery": "EventStream EnsembleListener",
    "ensemble_ray.events": """
        BatchProgressEvent DelegationCompletedEvent DelegationFailedEvent DelegationStartedEvent EnsembleCompletedEvent
        EnsembleStartedEvent Event FileChangedEvent GraphStateCompletedEvent LlmIterationCompletedEvent
        LlmIterationStartedEvent LoopIterationCompletedEvent TaskCompleteEvent TaskFailedEvent TaskInputEvent
        TaskReflectedEvent TaskStartEvent TokenEvent ToolCallEvent ToolCallRequest
    """,
    "ensemble_ray.execute.guardrails": "GuardrailInput GuardrailOutput GuardrailResult GuardrailType",
    "ensemble_ray.execute.callables": "TaskHandlerContext",
    "ensemble_ray.execute.agent.structured": "ParseResult extract_json parse_output",
    "ensemble_ray.prompts.output_format": "describe_schema",
    "ensemble_ray.execute.effects": "UnknownEffect",
    "ensemble_ray.runs.map_reduce.items": "ItemStream",
    "ensemble_ray.memory.embeddings": "EmbeddingStoreLongTermMemory",
    "ensemble_ray.memory.embedding_models": "LocalEmbeddingModel",
    "ensemble_ray.memory.store": """
        EnsembleMemory InMemoryEmbeddingStore InMemoryEntityMemory InMemoryReflectionStore MemoryStore
    """,
    "ensemble_ray.memory.openai_embeddings": "OpenAIEmbeddingModel",
    "ensemble_ray.memory.postgres": "PostgresMemory PostgresReflectionStore",
    "ensemble_ray.memory.sqlite": "SqliteMemory SqliteReflectionStore",
    "ensemble_ray.memory.tools": "EntityMemoryTool MemoryTool",
    "ensemble_ray.runs.map_reduce.launcher": "MapReduceRun",
    "ensemble_ray.recovery.forking": "afork fork",
    "ensemble_ray.runs.inline": "InlineRuntime",
    "ensemble_ray.items.results": "DeadLetters",
    "ensemble_ray.items.folders": "Files",
    "ensemble_ray.items.text_files": "CsvFile",
    "ensemble_ray.ports": """
        ReflectionStore ChatModel CustomToolMetrics StreamingChatModel StructuredChatModel ToolMetrics RunsTask
        EmbeddingModel EmbeddingStore EntityMemory LongTermMemory MemoryOperationListener
    """,
    "ensemble_ray.values.memory": "TaskReflection EmbeddingMatch EvictionPolicy MemoryEntry MemoryScope",
    "ensemble_ray.values.value": "RateLimit",
    "ensemble_ray.events.telemetry.listener": "OpenTelemetryListener",
    "ensemble_ray.llm.fallback": "Fallback When",
    "ensemble_ray.llm.local": "LocalChatModel",
    "ensemble_ray.llm.openai": "OpenAIChatModel",
    "ensemble_ray.llm.openai_responses": "OpenAIResponsesModel",
    "ensemble_ray.llm.limits.limiter": "RateLimitedChatModel",
    "ensemble_ray.map_reduce": "MapEnsemble MapReduceEnsemble",
    "ensemble_ray.values.attachments": "Attachment Audio File Image",
    "ensemble_ray.values.messages": """
        ChatMessage ChatResponse Effect JsonSchema ProviderFields Reasoning TokenUsage ToolCall ToolSpec
    """,
    "ensemble_ray.values.metrics": "CostConfiguration CostEstimate ExecutionMetrics MemoryOperationCounts TaskMetrics",
    "ensemble_ray.values.prices": "ModelPrice",
    "ensemble_ray.values.task_output": "TaskOutput GraphRoutingContext LoopIterationContext GraphStep",
    "ensemble_ray.process.run_context": "CurrentRun current_run_context provide",
    "ensemble_ray.plan.planner": "AgentSynthesizer resolve_template SynthesisContext TaskDependencyGraph",
    "ensemble_ray.plan.plan": "AgentEntry Node Plan",
    "ensemble_ray.prompts.task": "build_system_prompt build_user_prompt DefaultManagerPromptStrategy",
    "ensemble_ray.record.view.exporters": "JsonTraceExporter",
    "ensemble_ray.recovery.deciding": "adecide apending_reviews decide pending_reviews",
    "ensemble_ray.recovery.resuming": "aresume resume",
    "ensemble_ray.execute.review.handlers": "ReviewHandler",
    "ensemble_ray.execute.review.notifiers": "ReviewNotifier",
    "ensemble_ray.runs.handle": "Run",
    "ensemble_ray.runs.ports": "Runtime",
    "ensemble_ray.tools": """
        AbstractAgentTool AbstractTypedAgentTool AgentTool CustomSchemaAgentTool DynamicToolProvider NoOpToolMetrics
        PipelineErrorStrategy ToolContext ToolPipeline ToolResult TypedAgentTool current_tool_context tool
    """,
    "ensemble_ray.tools.mcp": "MCP",
    "ensemble_ray.tools.builtin": """
        CalculatorTool DateTimeTool FileReadTool FileWriteTool HttpAgentTool HumanInputTool JsonParserTool
        ProcessAgentTool WebScraperTool WebSearchProvider WebSearchTool
    """,
    "ensemble_ray.values.reviews": """
        OnTimeoutAction OpenReview Review ReviewDecision ReviewPolicy ReviewRequest ReviewTiming ReviewWait
    """,
    "ensemble_ray.values.trace": """
        AgentSummary CaptureMode CapturedMessage DelegationTrace ErrorTrace ExecutionTrace ExecutionTraceExporter
        LlmInteraction MapReduceLevelSummary PhaseTrace TaskPrompts TaskTrace ToolCallTrace GraphTrace GraphTraceStep
        LoopTrace PhaseStatus
    """,
    "ensemble_ray.visualization.dag_model": "DagAgentNode DagGraphEdge DagModel DagPhase DagTaskNode DagExporter",
    "ensemble_ray.visualization.dev_tools": "DevToolsExport EnsembleDevTools",
}
#: Modules that are attributes of the package without an import statement.
MODULES = ("errors", "events", "tools")

MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names.split()}

_names = [name for names in _EXPORTS.values() for name in names.split()]
__all__ = sorted(_names)  # noqa: PLE0605  # pyright: ignore[reportUnsupportedDunderAll]  checkers read the stub


class _MovedModules:  # without `importlib.abc`, which loads a dozen modules
    """Finds modules of the package under their old names."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        """Return the import spec of a module that was merged into another, or None."""
        if not fullname.startswith("ensemble_ray."):
            return None
        return importlib.import_module("ensemble_ray.process.moved").find_spec(fullname)


sys.meta_path.append(_MovedModules())


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name in MODULES:
        return importlib.import_module(f"ensemble_ray.{name}")
    if name not in MODULE_OF:
        raise AttributeError(f"module 'ensemble_ray' has no attribute '{name}'")
    found = globals()[name] = getattr(importlib.import_module(MODULE_OF[name]), name)
    return found


def __dir__() -> list[str]:
    """Return the public names, for editors without type information."""
    return __all__
