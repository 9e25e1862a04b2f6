"""Public doubles for tests of agent teams: a scripted model, a protocol server, a clock, a sink."""

from ensemble_ray.testing.clock import ManualClock
from ensemble_ray.testing.model_server import Fault, ModelServer, Reply, ServedRequest, tool_loop
from ensemble_ray.testing.scripted import ScriptedCall, ScriptedModel
from ensemble_ray.testing.sink import RecordingSink

__all__ = [
    "Fault",
    "ManualClock",
    "ModelServer",
    "RecordingSink",
    "Reply",
    "ScriptedCall",
    "ScriptedModel",
    "ServedRequest",
    "tool_loop",
]
