"""Test doubles for agent teams, and `replay`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ensemble_ray.testing.model_server import (
        BatchScript,
        Fault,
        ModelServer,
        RawAnswer,
        Reply,
        ServedBatch,
        ServedRequest,
        tool_loop,
    )
    from ensemble_ray.testing.replaying import Difference, Replay, replay
    from ensemble_ray.testing.scripted import ManualClock, RecordingSink, ScriptedCall, ScriptedModel, assert_attached

__all__ = [
    "BatchScript", "Difference", "Fault", "ManualClock", "ModelServer", "RawAnswer", "RecordingSink", "Replay", "Reply",
    "ScriptedCall", "ScriptedModel", "ServedBatch", "ServedRequest", "assert_attached", "replay", "tool_loop",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import lazily: the server needs an HTTP library, `replay` runs tasks, and pytest imports this package with its plugin."""
    if name in {"Difference", "Replay", "replay"}:
        from ensemble_ray.testing import replaying

        return getattr(replaying, name)
    if name in {"ManualClock", "RecordingSink", "ScriptedCall", "ScriptedModel", "assert_attached"}:
        from ensemble_ray.testing import scripted

        return getattr(scripted, name)
    if name in __all__:
        from ensemble_ray.testing import model_server

        return getattr(model_server, name)
    raise AttributeError(f"module 'ensemble_ray.testing' has no attribute '{name}'")
