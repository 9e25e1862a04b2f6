"""What one would write by hand: a handler that asks the model and answers in the form of the OpenAI API. Prints its URL."""

import json
import socket
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from openai import AsyncOpenAI

client = AsyncOpenAI(base_url=sys.argv[1], api_key="benchmark", timeout=600.0)
api = FastAPI()


@api.post("/v1/chat/completions")
async def post_chat(request: Request) -> Response:
    """Ask the model with the user's last message."""
    body: dict[str, Any] = await request.json()
    system = "You are Writer. Answer the question as well as you can."
    messages: Any = [
        {"role": "system", "content": system},
        {"role": "user", "content": body["messages"][-1]["content"]},
    ]
    if body.get("stream"):
        return StreamingResponse(_stream(messages), media_type="text/event-stream")
    answer = await client.chat.completions.create(model="benchmark", messages=messages)
    return JSONResponse(answer.model_dump(mode="json"))


async def _stream(messages: Any) -> AsyncIterator[str]:
    async for chunk in await client.chat.completions.create(model="benchmark", messages=messages, stream=True):
        yield f"data: {json.dumps(chunk.model_dump(mode='json'))}\n\n"
    yield "data: [DONE]\n\n"


with socket.socket() as listening:
    listening.bind(("127.0.0.1", 0))
    listening.listen(2048)  # who is told the URL may connect at once, and waits until the server has started
    server = uvicorn.Server(uvicorn.Config(api, log_level="warning", access_log=False))

    def stop() -> None:
        """End with the harness."""
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=stop, daemon=True).start()
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    server.run([listening])
