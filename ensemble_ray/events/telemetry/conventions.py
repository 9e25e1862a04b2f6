"""Names of OpenTelemetry's conventions for generative AI, copied because the SDK is optional."""

from __future__ import annotations

OPERATION = "gen_ai.operation.name"
CHAT, EXECUTE_TOOL, INVOKE_AGENT, INVOKE_WORKFLOW = "chat", "execute_tool", "invoke_agent", "invoke_workflow"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
CACHE_CREATION_TOKENS = "gen_ai.usage.cache_creation.input_tokens"
AGENT_NAME = "gen_ai.agent.name"
AGENT_DESCRIPTION = "gen_ai.agent.description"
WORKFLOW_NAME = "gen_ai.workflow.name"
TOOL_NAME = "gen_ai.tool.name"
TOOL_TYPE = "gen_ai.tool.type"
TOOL_CALL_ID = "gen_ai.tool.call.id"
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
SYSTEM_INSTRUCTIONS = "gen_ai.system_instructions"
ERROR_TYPE = "error.type"
CONTENT_EVENT = "gen_ai.client.inference.operation.details"
TOKEN_USAGE = "gen_ai.client.token.usage"  # noqa: S105  no secret
TOKEN_TYPE = "gen_ai.token.type"  # noqa: S105  same
OPERATION_DURATION = "gen_ai.client.operation.duration"
#: Boundaries that the conventions require, in tokens and in seconds.
TOKEN_BUCKETS = tuple(4**power for power in range(14))
DURATION_BUCKETS = tuple(0.01 * 2**power for power in range(14))
