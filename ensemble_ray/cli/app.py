"""The commands, put together; and what happens to errors that leave them. Package: cli.

Only the command line's own library is imported here, so that `--help` is quick; a command imports what it needs.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer

from ensemble_ray.cli.commands.actors import actors
from ensemble_ray.cli.commands.attach import attach
from ensemble_ray.cli.commands.cancel import cancel
from ensemble_ray.cli.commands.delete import delete, prune
from ensemble_ray.cli.commands.doctor import doctor
from ensemble_ray.cli.commands.fork import fork
from ensemble_ray.cli.commands.import_team import imports
from ensemble_ray.cli.commands.keys import keys
from ensemble_ray.cli.commands.map import map_items
from ensemble_ray.cli.commands.mcp import mcp
from ensemble_ray.cli.commands.memory import memory
from ensemble_ray.cli.commands.models import models
from ensemble_ray.cli.commands.plan import plan
from ensemble_ray.cli.commands.resume import resume
from ensemble_ray.cli.commands.reviews import review, reviews
from ensemble_ray.cli.commands.run import run
from ensemble_ray.cli.commands.runs import runs
from ensemble_ray.cli.commands.schema import schema
from ensemble_ray.cli.commands.serve import serve
from ensemble_ray.cli.commands.studio import studio
from ensemble_ray.cli.commands.submit import submit
from ensemble_ray.cli.commands.trace import trace
from ensemble_ray.cli.demo.command import demo
from ensemble_ray.cli.view.terminal import INTERRUPTED, USAGE, SafeFormatter, say, show

__all__ = ["app", "invoke"]


def _make_app() -> typer.Typer:
    return typer.Typer(
        name="ensemble-ray",
        help="Teams of LLM agents as actors on Ray.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


app = _make_app()

#: Root of the parser's own errors; the library does not export it, but all of them derive from it.
_ParserError: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")


def _version_wanted(is_wanted: bool) -> None:
    if is_wanted:
        version()
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and the library's log.")] = False,
    is_version: Annotated[
        bool, typer.Option("--version", callback=_version_wanted, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Teams of LLM agents as actors on Ray."""


def version() -> None:
    """Show the version."""
    from importlib.metadata import version as version_of

    show(f"ensemble-ray {version_of('ensemble-ray')}")


app.command("map")(map_items)
for command in (
    run, submit, attach, plan, runs, trace, actors, reviews, review, resume, fork, cancel, delete, prune, studio, serve, mcp, demo, doctor, schema, version
):  # fmt: skip
    app.command()(command)
app.add_typer(imports, name="import")
app.add_typer(keys, name="keys")
app.add_typer(memory, name="memory")
app.add_typer(models, name="models")


def _app_for(words: Sequence[str]) -> typer.Typer:
    """Return the application with the command that is called alone, where one is: parsers of all take a while to make."""
    alone = _make_app()
    alone.callback()(_root)
    alone.registered_commands = [each for each in app.registered_commands if _name_of(each) in words[:1]]
    alone.registered_groups = [each for each in app.registered_groups if each.name in words[:1]]
    return alone if alone.registered_commands or alone.registered_groups else app


def _name_of(command: typer.models.CommandInfo) -> str:
    return command.name or str(getattr(command.callback, "__name__", ""))


def invoke(arguments: Sequence[str]) -> int:
    """Run one command; gives the exit code. `--debug` counts wherever it stands."""
    is_debug = "--debug" in arguments
    if is_debug:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(SafeFormatter(logging.BASIC_FORMAT))
        logging.basicConfig(level=logging.INFO, handlers=[handler])
        logging.getLogger("ensemble_ray").setLevel(logging.DEBUG)
    words = [each for each in arguments if each != "--debug"]
    try:
        code = cast("Any", _app_for(words))(words, prog_name="ensemble-ray", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        say("Interrupted.")
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001  nobody stands above; it is told, or shown whole with --debug
        return _report(error, is_debug=is_debug)
    return code if isinstance(code, int) else 0


def _report(error: Exception, *, is_debug: bool) -> int:
    if isinstance(error, _ParserError):
        context = getattr(error, "ctx", None)
        path = "ensemble-ray" if context is None else context.command_path
        text = cast("Any", error).format_message()
        if type(error).__name__ == "NoArgsIsHelpError":
            say(text)  # the help
            return USAGE
        say(f"Error: {text}\nSee: {path} --help")
        return USAGE
    from ensemble_ray.cli.view.failures import advice_of, describe_error, exit_code_of

    if not is_debug:
        say(describe_error(error))
        return exit_code_of(error)
    say("".join(traceback.format_exception(error)).rstrip())  # it ends with the message
    advice = advice_of(error)
    if advice:
        say(f"What to do: {advice}")
    return exit_code_of(error)
