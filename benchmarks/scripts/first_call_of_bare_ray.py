"""What Ray itself costs: start it, make one actor, call it."""

import logging
from typing import Any

import ray

ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)


class Writer:
    """An actor that answers at once."""

    def write(self) -> str:
        """Answer."""
        return "An answer."


actor: Any = ray.remote(Writer).options(num_cpus=0).remote()  # noqa: TID251  bare Ray is what is measured here
print(ray.get(actor.write.remote()), flush=True)  # noqa: TID251  same
