"""Fed runs: their tasks are made while they run, by factories in the caller's process.

`conductor` carries out what the machine in `schedule.map_reduce` decides; `tasks` makes what factories give ready to be
done; `bodies` keeps what was done; `run` is one such run, seen from its caller.
"""
