"""Benchmarks: what a run costs beside the bare calls it is made of. `python -m benchmarks --help`.

Every figure is a ratio to a floor measured in the same run on the same machine: the same calls, hand-written with
aiohttp and a semaphore, against the same protocol server on loopback.
"""
