"""A chat-completions server on loopback: in a thread, or as a process with `python -m`."""

from ensemble_ray.testing.model_server.batches import BatchScript, ServedBatch
from ensemble_ray.testing.model_server.script import Answer, Fault, RawAnswer, Reply, ServedRequest
from ensemble_ray.testing.model_server.server import ModelServer, tool_loop

__all__ = [
    "Answer", "BatchScript", "Fault", "ModelServer", "RawAnswer", "Reply", "ServedBatch", "ServedRequest", "tool_loop",
]  # fmt: skip
