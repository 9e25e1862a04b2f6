"""One conversation for each of many roles with one client; stays until its input closes."""

import asyncio
import sys

from openai import AsyncOpenAI


async def main(url: str, size: int) -> None:
    """Ask for all at once."""
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

    answers = await asyncio.gather(*(ask(number) for number in range(size)))
    print(len(answers), flush=True)


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
sys.stdin.read()
