"""A user's script without any framework: one question, one answer."""

import asyncio
import sys

from openai import AsyncOpenAI


async def main() -> None:
    """Ask and print."""
    client = AsyncOpenAI(base_url=sys.argv[1], api_key="benchmark")
    answer = await client.chat.completions.create(
        model="benchmark",
        messages=[{"role": "system", "content": "You are Writer."}, {"role": "user", "content": "Say something."}],
    )
    print(answer.choices[0].message.content, flush=True)


asyncio.run(main())
