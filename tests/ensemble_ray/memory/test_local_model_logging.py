"""The package of the local embedding model sets up logging when it is imported; the program's logging is its own."""

import subprocess
import sys

import pytest

SCRIPT = """
import logging
from ensemble_ray import LocalEmbeddingModel
root = logging.getLogger()
assert len(LocalEmbeddingModel().embed("tea")) == 256
print(root.handlers, root.level == logging.WARNING)
"""


@pytest.mark.program
def test_local_model_leaves_logging_as_it_was() -> None:
    """S-ERR-65."""
    ran = subprocess.run(  # noqa: S603  our own words
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ran.stdout, ran.stderr) == ("[] True\n", "")
