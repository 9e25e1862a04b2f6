"""What Ray itself takes: the same conversations by hand over two actors; stays until its input closes."""

import asyncio
import logging
import sys
from typing import Any

import ray


class Writers:
    """An actor with a client of its own."""

    async def write(self, url: str, numbers: list[int]) -> list[str]:
        """Ask for all at once."""
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=url, api_key="benchmark")

        async def ask(number: int) -> str:
            answer = await client.chat.completions.create(
                model="benchmark",
                messages=[
                    {"role": "system", "content": f"You are Writer {number}.\n\nYour personal goal is: Write"},
                    {"role": "user", "content": f"Write part {number} in one sentence."},
                ],
            )
            return answer.choices[0].message.content or ""

        return await asyncio.gather(*(ask(number) for number in numbers))


url, size = sys.argv[1], int(sys.argv[2])
ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
made: Any = ray.remote(Writers).options(num_cpus=0)  # noqa: TID251  bare Ray is what is measured here
actors = [made.remote(), made.remote()]
halves = [actor.write.remote(url, list(range(first, size, 2))) for first, actor in enumerate(actors)]
print(sum(len(half) for half in ray.get(halves)), flush=True)  # noqa: TID251  same
sys.stdin.read()
