"""Where the time of the inline fan-out goes: `cProfile` on the library's loop, against the same server."""

from __future__ import annotations

import cProfile
import pstats
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.children import ROOT, clean_environment, start_child
from benchmarks.jobs.fan_out import team_of
from benchmarks.setting import Setting

__all__ = ["print_profile"]


def print_profile(*, size: int = 1000, top: int = 15) -> None:
    """Profile one warm round of the inline fan-out at 0 ms: rooms first, then the functions that take most."""
    from ensemble_ray import InlineRuntime
    from ensemble_ray.process.concurrency import run_blocking

    profile = cProfile.Profile()

    async def switch(*, on: bool) -> None:  # a profile sees the thread that enables it, so the loop's does
        if on:
            profile.enable()
        else:
            profile.disable()

    with tempfile.TemporaryDirectory(prefix="ensemble-ray-bench-") as home:
        environment = clean_environment(Path(home))
        with (
            start_child(
                ["-m", "ensemble_ray.testing.model_server", "--until-stdin-closes", "--text", "A short answer."],
                environment,
            ) as server,
            InlineRuntime(home=Path(home)) as runtime,
        ):
            setting = Setting(
                url=server.line(), runtime="inline", size=size, durability="effects", extra={"slots": 200}
            )
            team_of(setting).run(runtime=runtime)
            ensemble = team_of(setting)
            run_blocking(switch(on=True))
            ensemble.run(runtime=runtime)
            run_blocking(switch(on=False))
    stats = pstats.Stats(profile, stream=sys.stdout)
    _print_rooms(stats)
    stats.sort_stats("tottime").print_stats(top)


def _print_rooms(stats: pstats.Stats) -> None:
    """Print own time by package, and for our own code by its packages; waiting for sockets is left out."""
    rooms: Counter[str] = Counter()
    for (file, _line, name), (_, _, own_s, _, _) in stats.stats.items():  # type: ignore[attr-defined]  # untyped there
        rooms["waiting for sockets" if "epoll" in name and "poll" in name else _room(file)] += own_s
    print("own time on the loop, s")
    for room, own_s in rooms.most_common(20):
        print(f"  {own_s:6.3f}  {room}")


def _room(file: str) -> str:
    if file.startswith(str(ROOT)):
        return "/".join(Path(file).relative_to(ROOT).with_suffix("").parts[:2])
    if "site-packages" in file:
        return file.partition("site-packages/")[2].partition("/")[0]
    return "built in C" if file == "~" else f"standard library {Path(file).parent.name}/{Path(file).name}"
