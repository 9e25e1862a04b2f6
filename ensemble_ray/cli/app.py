"""The command line's parser, and the reports of errors that leave a command.

Only the called command's module is imported, and heavy modules are imported by functions: the help should be fast.
"""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NoReturn, cast

import typer

from ensemble_ray.cli.view.terminal import INTERRUPTED, USAGE, SafeFormatter, show, write_note

_PLACES = {
    "map": "commands.map:map_items", "run": "commands.run:run", "eval": "commands.eval:evaluate", "submit": "commands.submit:submit",
    "attach": "commands.submit:attach", "plan": "commands.plan:plan", "runs": "commands.runs:runs",
    "trace": "commands.runs:trace", "actors": "commands.studio:actors", "reviews": "commands.reviews:reviews",
    "review": "commands.reviews:review", "resume": "commands.run:resume", "fork": "commands.run:fork",
    "cancel": "commands.runs:cancel", "delete": "commands.runs:delete", "prune": "commands.runs:prune",
    "studio": "commands.studio:studio", "serve": "commands.serve:serve",
    "drain": "commands.endpoint:drain", "reload": "commands.endpoint:reload", "versions": "commands.endpoint:versions",
    "deliveries": "commands.endpoint:deliveries", "mcp": "commands.serve:mcp",
    "demo": "commands.demo:demo", "doctor": "commands.doctor:doctor", "schema": "commands.schema:schema",
    "version": "app:version",
}  # fmt: skip
# Module and function of a command, in the order of the help.
COMMANDS: Mapping[str, str] = {name: f"ensemble_ray.cli.{place}" for name, place in _PLACES.items()}
# Commands with subcommands.
GROUPS: Mapping[str, str] = {
    "import": "ensemble_ray.cli.commands.schema:imports", "keys": "ensemble_ray.cli.commands.serve:keys",
    "memory": "ensemble_ray.cli.commands.memory:memory", "models": "ensemble_ray.cli.commands.doctor:models",
    "schedules": "ensemble_ray.cli.commands.schedules:schedules",
}  # fmt: skip

# Base class of the parser's errors, which the library does not export.
_ParserError: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")


def version() -> NoReturn:
    """Show the version."""
    from importlib.metadata import version as version_of

    show(f"ensemble-ray {version_of('ensemble-ray')}")
    raise typer.Exit


def _on_version(is_set: bool) -> None:
    if is_set:
        version()


def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and the library's log.")] = False,
    is_version: Annotated[
        bool,
        typer.Option("--version", callback=_on_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Teams of LLM agents as actors on Ray."""


def make_app(arguments: Sequence[str] = ()) -> typer.Typer:
    """Return the parser of the called command, or of all commands."""
    app = typer.Typer(
        name="ensemble-ray",
        help="Teams of LLM agents as actors on Ray.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    called = next((each for each in arguments if not each.startswith("-")), "")
    if "--version" in arguments[:1]:
        called = "version"
    for name in [called] if called in COMMANDS or called in GROUPS else [*COMMANDS, *GROUPS]:
        if name in COMMANDS:
            app.command(name)(_import(COMMANDS[name]))
        else:
            app.add_typer(_import(GROUPS[name]), name=name)
    return app


def _import(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def invoke(arguments: Sequence[str]) -> int:
    """`--debug` may be at any position."""
    is_debug = "--debug" in arguments
    if is_debug:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(SafeFormatter(logging.BASIC_FORMAT))
        logging.basicConfig(level=logging.INFO, handlers=[handler])
        logging.getLogger("ensemble_ray").setLevel(logging.DEBUG)
    try:
        words = [each for each in arguments if each != "--debug"]
        code = cast("Any", make_app(words))(words, prog_name="ensemble-ray", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        write_note("Interrupted.")
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001  the last frame: it is reported, with --debug as a traceback
        return _report(error, is_debug=is_debug)
    return code if isinstance(code, int) else 0


def _report(error: Exception, *, is_debug: bool) -> int:
    if isinstance(error, _ParserError):
        context = getattr(error, "ctx", None)
        path = "ensemble-ray" if context is None else context.command_path
        text = cast("Any", error).format_message()
        if type(error).__name__ == "NoArgsIsHelpError":
            write_note(text)  # the help
        else:
            write_note(f"Error: {text}\nSee: {path} --help")
        return USAGE
    from ensemble_ray.cli.view.failures import advice_of, describe_error, exit_code_of

    if not is_debug:
        write_note(describe_error(error))
        return exit_code_of(error)
    write_note("".join(traceback.format_exception(error)).rstrip())
    if advice := advice_of(error):
        write_note(f"What to do: {advice}")
    return exit_code_of(error)
