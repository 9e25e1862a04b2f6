"""Following a run: its events as messages, of its record and of what happens just now.

A reader that comes late, comes back, or looks at a run that ended or was killed has the same messages in the same order.
"""

from ensemble_ray.record.following.follower import LiveEvents, RunFollower, SharedEnds

__all__ = ["LiveEvents", "RunFollower", "SharedEnds"]
