"""How long `import ensemble_ray` takes in a fresh interpreter; prints the seconds."""

import importlib
import time

began = time.perf_counter()
importlib.import_module("ensemble_ray")
print(time.perf_counter() - began, flush=True)
