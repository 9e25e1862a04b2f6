"""Options and arguments that several commands have."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ensemble_ray.errors import ValidationError

if TYPE_CHECKING:
    from ensemble_ray.definition.run_options import RunOptions


class RuntimeName(StrEnum):
    ray = "ray"
    inline = "inline"


class WorkflowName(StrEnum):
    sequential = "sequential"
    parallel = "parallel"
    hierarchical = "hierarchical"


RunName = Annotated[str, Argument(metavar="RUN", help="A run's id, its start, or 'latest'.", show_default=False)]
Target = Annotated[str, Argument(metavar="TARGET", help="A YAML file, or module:attribute.")]
Targets = Annotated[list[str], Argument(metavar="TARGET...", help="YAML files, or module:attribute.")]
Inputs = Annotated[
    list[str] | None,
    Option("--input", "-i", metavar="NAME=VALUE", help="A value for {NAME}, or @FILE to attach it; repeatable."),
]
InputsFile = Annotated[
    Path | None, Option("--inputs-file", metavar="FILE", help="JSON object of inputs; --input wins over it.")
]
Llm = Annotated[
    str | None,
    Option(
        "--llm",
        metavar="MODEL",
        help="A model in place of every other: openai:NAME, openai-responses:NAME, local, local:PATH.gguf.",
    ),
]
Workflow = Annotated[WorkflowName | None, Option("--workflow", help="In place of the team's own workflow.")]
RuntimeChoice = Annotated[RuntimeName | None, Option("--runtime", help="Default: ENSEMBLE_RAY_RUNTIME, else ray.")]
RunId = Annotated[
    str | None,
    Option("--run-id", metavar="ID", help="Name of the record; a finished run of that name is not run again."),
]
MaxTokens = Annotated[
    int | None, Option("--max-tokens", metavar="N", help="Tokens that the run may spend, input and output together.")
]
MaxCost = Annotated[
    float | None,
    Option("--max-cost", metavar="C", help="Money that the run may spend; the team says what tokens cost."),
]
MaxIterations = Annotated[
    int | None,
    Option("--max-iterations", metavar="N", help="Tool requests of an agent per task; lowers the team's own limits."),
]
Context = Annotated[
    str | None,
    Option("--context", metavar="TEXT", help="Text for the prompts of all tasks, in a section of its own."),
]
Tags = Annotated[
    list[str] | None,
    Option("--tag", metavar="NAME[=VALUE]", help="A word about the run, to find it again with runs --tag; repeatable."),
]
User = Annotated[
    str | None, Option("--user", metavar="NAME", help="For whom the run is: tools read it, and lists of runs show it.")
]
AsJson = Annotated[bool, Option("--json", help="Print the whole output as JSON.")]
ItAsJson = Annotated[bool, Option("--json", help="Print it as JSON.")]
ThemAsJson = Annotated[bool, Option("--json", help="Print them as JSON.")]
KEY_VARIABLE, URL_VARIABLE = "ENSEMBLE_RAY_KEY", "ENSEMBLE_RAY_URL"
DEFAULT_URL = "http://127.0.0.1:8000"
EndpointUrl = Annotated[
    str | None,
    Option(
        "--url",
        metavar="URL",
        help=f"Address of the endpoint. Default: {URL_VARIABLE}, {DEFAULT_URL}.",
        show_default=False,
    ),
]
EndpointKey = Annotated[
    str | None,
    Option("--key", metavar="KEY", help=f"Key of the endpoint. Default: {KEY_VARIABLE}.", show_default=False),
]
AdminKey = Annotated[
    str | None,
    Option("--key", metavar="KEY", help=f"Key with the right admin. Default: {KEY_VARIABLE}.", show_default=False),
]
TraceFile = Annotated[Path | None, Option("--trace", metavar="FILE", help="Write the trace there as JSON.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="No progress, no notes; errors only.")]
JobAddress = Annotated[
    str | None,
    Option(
        "--address",
        metavar="URL",
        help="The cluster's job server: http://HOST:8265. Default: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, this machine.",
    ),
]


def runtime_name(choice: RuntimeName | None, recorded: object = None) -> str:
    from ensemble_ray.process.config import Settings

    return choice.value if choice else str(recorded or Settings.from_environment().runtime)


def run_options(
    max_tokens: int | None,
    max_cost: float | None,
    tags: Sequence[str] | None = None,
    user: str | None = None,
    *,
    max_iterations: int | None = None,
    context: str | None = None,
) -> RunOptions | None:
    chosen = _read_tags(tags or ())
    if not chosen and all(each is None for each in (max_tokens, max_cost, user, max_iterations, context)):
        return None
    from ensemble_ray.definition.run_options import RunOptions

    return RunOptions(
        max_tokens=max_tokens,
        max_cost=max_cost,
        tags=chosen or None,
        user=user,
        max_iterations=max_iterations,
        additional_context=context,
    )


def _read_tags(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, _, value = word.partition("=")
        if not name:
            raise ValidationError(f"--tag: '{word}' has no name. Write --tag NAME, or --tag NAME=VALUE")
        if name in found:
            raise ValidationError(f"--tag: '{name}' occurs twice")
        found[name] = value
    return found
