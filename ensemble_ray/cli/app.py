"""The command line's parser, and the reports of errors that leave a command.

Only the called command's module is imported: building the parser of all commands takes longer than many commands run.
"""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import typer

from ensemble_ray.cli.view.terminal import INTERRUPTED, USAGE, SafeFormatter, say, show

_COMMANDS = "ensemble_ray.cli.commands"
#: The function of each command, in the order of the help.
COMMANDS: Mapping[str, str] = {
    "map": f"{_COMMANDS}.map:map_items",
    "run": f"{_COMMANDS}.run:run",
    "submit": f"{_COMMANDS}.submit:submit",
    "attach": f"{_COMMANDS}.submit:attach",
    "plan": f"{_COMMANDS}.plan:plan",
    "runs": f"{_COMMANDS}.runs:runs",
    "trace": f"{_COMMANDS}.runs:trace",
    "actors": f"{_COMMANDS}.studio:actors",
    "reviews": f"{_COMMANDS}.reviews:reviews",
    "review": f"{_COMMANDS}.reviews:review",
    "resume": f"{_COMMANDS}.run:resume",
    "fork": f"{_COMMANDS}.run:fork",
    "cancel": f"{_COMMANDS}.runs:cancel",
    "delete": f"{_COMMANDS}.runs:delete",
    "prune": f"{_COMMANDS}.runs:prune",
    "studio": f"{_COMMANDS}.studio:studio",
    "serve": f"{_COMMANDS}.serve:serve",
    "mcp": f"{_COMMANDS}.serve:mcp",
    "demo": f"{_COMMANDS}.demo:demo",
    "doctor": f"{_COMMANDS}.doctor:doctor",
    "schema": f"{_COMMANDS}.schema:schema",
    "version": "ensemble_ray.cli.app:version",
}
#: Commands with subcommands.
GROUPS: Mapping[str, str] = {
    "import": f"{_COMMANDS}.schema:imports",
    "keys": f"{_COMMANDS}.serve:keys",
    "memory": f"{_COMMANDS}.memory:memory",
    "models": f"{_COMMANDS}.doctor:models",
}

#: Base class of the parser's errors, which the library does not export.
_ParserError: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")


def _version_wanted(is_wanted: bool) -> None:
    if is_wanted:
        version()
        raise typer.Exit


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


def make_app(arguments: Sequence[str] = ()) -> typer.Typer:
    """Return the parser of the called command, or of all commands if `arguments` call none."""
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
        called = "version"  # any command will do: the option ends the program
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
    """Run one command and return the exit code. `--debug` may be at any position."""
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
        say("Interrupted.")
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
            say(text)  # the help
        else:
            say(f"Error: {text}\nSee: {path} --help")
        return USAGE
    from ensemble_ray.cli.view.failures import advice_of, describe_error, exit_code_of

    if not is_debug:
        say(describe_error(error))
        return exit_code_of(error)
    say("".join(traceback.format_exception(error)).rstrip())  # it ends with the message
    if advice := advice_of(error):
        say(f"What to do: {advice}")
    return exit_code_of(error)
