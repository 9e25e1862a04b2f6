"""Old names of merged modules, for imports and pickled submissions until 1.0."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGES = {"limits": "llm.limits", "llm.local_engine": "llm", "loader": "teamfile", "tools.process": "tools.builtin"}
#: Old names by new one; names without a package were in the same package.
_MERGED = {
    "access.admission": "keys",
    "actors.link.events": "actors.shared.event_hub",
    "cli.commands.doctor": "checks",
    "cli.commands.submit": "cli.jobs",
    "definition.agent": "own_runner process_fields questions remote_agent",
    "definition.ensemble": "hierarchy levels",
    "definition.fields": "durability identity model_placeholder origin templates workflow",
    "definition.graph": "graph_edges",
    "definition.loop": "until",
    "definition.map_reduce": "map_reduce_checks output_types",
    "definition.phase": "phase_decision",
    "definition.run_options": "budget retry_policy run_tags",
    "definition.task": "history memory reflection reflection_input unit_output",
    "definition.validation": "model_keys team_model unit_checks",
    "errors": "errors.root errors.units",
    "errors.bodies": "tls",
    "errors.travel": "provider",
    "events": "events.tracing",
    "events.telemetry.listener": "active flushing",
    "execute.agent.attempts": "incomplete recorded_model",
    "execute.agent.context_window": "context_report execute.request_size",
    "execute.agent.react": "steps",
    "execute.agent.structured": "type_adapters",
    "execute.callables": "checks handler_context",
    "execute.delegation.decisions": "calls gates",
    "execute.effects": "execute.tools.unknown_effect memory_use recorded",
    "execute.local_executor": "agent_templates",
    "execute.memory": "directives reflection",
    "execute.orders": "execute.delegation.peers outcomes questions run_models",
    "execute.review.elicitation": "client_forms",
    "execute.review.gates": "asking rules tool_reviews tracing waiting",
    "execute.review.handlers": "console reviewer",
    "execute.runner": "announcements changes",
    "execute.scope": "exits ports slots spending",
    "execute.tools.calls": "sampling",
    "facts.effects": "memory reflection sampling",
    "facts.fact": "lenient shapes",
    "facts.runs": "directives ends items reviews",
    "items.line_file": "spool",
    "items.pulling": "index_set number_set",
    "items.results": "dead_letters",
    "items.sources": "screening",
    "items.tables": "parquet",
    "llm.failures": "endpoint_urls faults llm.protocol.arrival llm.protocol.errors retry",
    "llm.limits.accounts": "limits.account limits.budget_service limits.remote_account",
    "llm.limits.breaker": "budget limits.adaptive limits.breaker limits.budget",
    "llm.limits.bucket": "limits.bucket limits.steps machines",
    "llm.limits.endpoints": "limits.endpoints",
    "llm.limits.limiter": """
        limits.lease limits.limiter_service limits.local_limiter limits.waiting llm.rate_limited
    """,
    "llm.local": "llm.local_engine.registry llm.local_engine.server llm.local_engine.weights",
    "llm.local_process": "llm.local_engine.process",
    "llm.protocol.request": "message_roles request_options schema_offers",
    "llm.protocol.transport": "event_loop_resources redirects",
    "llm.protocol.wire": "answer_limits stream",
    "memory.embeddings": "embedding_meter",
    "memory.lasting": "tables vectors",
    "memory.openai_embeddings": "embedding_batches",
    "memory.postgres": """
        memory.postgres.database memory.postgres.memory memory.postgres.reflections memory.postgres.schema
        memory.postgres.tables
    """,
    "memory.sqlite": "memory.sqlite.file memory.sqlite.memory memory.sqlite.reflections",
    "memory.store": "ensemble_memory in_memory reflections",
    "memory.tools": "held run_memory",
    "plan.map_reduce_factories": "map_reduce_dag map_reduce_tokens",
    "plan.placement": "redispatch requirements shards sharing",
    "plan.plan": "units",
    "plan.planner": "dependencies manager synthesis templates",
    "plan.unit_plans": "nodes",
    "process.concurrency": "clock forks loop terminal threads",
    "process.config": "pickling",
    "process.context": "bounded_log collector notices",
    "process.private_files": "cluster_finding ray_files",
    "prompts.task": "manager",
    "record.history.executions": "execution",
    "record.identity.definition": "map_reduce",
    "record.result": "failures",
    "record.resume.reading": "record.rerun",
    "record.sqlite.file": "reading",
    "record.units": "levels",
    "record.view.exporters": "spans",
    "runs.ports": "ownership submission",
    "schedule.machine": "workflows",
    "serve.app": "starting",
    "serve.blocking_run": "asked_run",
    "serve.callers": "failures",
    "serve.catalog": "team",
    "serve.driving.driver": "driver_actor remote_runs",
    "serve.driving.run_driver": "active",
    "serve.middleware": "answers",
    "serve.openai_api": "serve.openai_api.asking serve.openai_api.chat serve.openai_api.responses",
    "serve.run_service": "metrics",
    "studio.app": "service",
    "studio.dashboard.dashboard": "listener",
    "studio.dashboard.hub": "reviews snapshot",
    "studio.http_server": "event_answer",
    "studio.processes": "cluster_process",
    "studio.reading": "run_list",
    "studio.views.run_view": "totals",
    "studio.views.steps": "step_detail",
    "teamfile.document": "loader.document loader.environment loader.problems",
    "teamfile.fields": """
        loader.databases loader.item_prompts loader.memory loader.models loader.reflection loader.reviews
        loader.value_sections
    """,
    "teamfile.references": "loader.provenance loader.references",
    "teamfile.section": "loader.field_types loader.reading loader.secret_values loader.section",
    "teamfile.sections": """
        loader.member_sections loader.sections loader.unit_sections loader.user_code user_code
    """,
    "teamfile.targets": "loader.targets",
    "teamfile.team": "loader.json_schema loader.members loader.team",
    "teamfile.tools": "loader.tools",
    "testing.model_server.server": "embeddings sending",
    "testing.replaying": "replay_ports replay_units replay_workers",
    "testing.scripted": "clock sink",
    "tools.a2a.client": "address answers asking connecting plain_values tool",
    "tools.builtin.files": "file_read file_write sandbox",
    "tools.builtin.offline": "calculator date_time human_input json_parse plain",
    "tools.builtin.process": "tools.process.run",
    "tools.builtin.supervisor": "tools.process.supervisor",
    "tools.builtin.web": "http web_scrape web_search",
    "tools.call": "batch",
    "tools.mcp.address": "delivery",
    "tools.mcp.provider": "remote_tools texts",
    "tools.mcp.questions": "forms sampled",
    "tools.mcp.session": "connection http_client listing opening",
    "tools.registry": "pipeline",
    "tools.schema": "repair",
    "tools.tool": "decorator outcome typed",
    "tools.user_code": "metrics rendering sampling time_limit waiting",
    "tools.web.net": "addresses tools.charsets",
    "values.delegation": "task_request",
    "values.ids": "epochs",
    "values.memory": "reflection",
    "values.metrics": "amounts descriptions node_reports",
    "values.outputs": "agent_output",
    "values.reviews": "directives phase_review_text",
    "values.task_output": "iterations joined shown unit_outputs",
    "values.trace": "tracing unit_traces",
    "values.value": "foreign_names rate_limit",
    "visualization.dev_tools": "rendering",
    "visualization.flow": "layout",
}

#: Of modules and packages.
NEW_NAMES = {f"ensemble_ray.{old}": f"ensemble_ray.{new}" for old, new in _PACKAGES.items()} | {
    f"ensemble_ray.{old if '.' in old else '.'.join([*new.split('.')[:-1], old])}": f"ensemble_ray.{new}"
    for new, merged in _MERGED.items()
    for old in merged.split()
}


def find_spec(name: str) -> ModuleSpec | None:
    new = NEW_NAMES.get(name)
    if new is None:
        return None
    return ModuleSpec(name, _Alias(new), is_package=name.removeprefix("ensemble_ray.") in _PACKAGES)


class _Alias(Loader):
    def __init__(self, new: str) -> None:
        self._new = new

    def create_module(self, spec: ModuleSpec) -> None:
        """Let the import system create a module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """A removed package keeps its module, because Python looks up submodules in it."""
        new = importlib.import_module(self._new)
        if hasattr(module, "__path__"):
            module.__getattr__ = lambda name: getattr(new, name)  # type: ignore[method-assign]
        else:
            sys.modules[module.__name__] = new
