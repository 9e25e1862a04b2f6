"""The runtime of this process, without Ray: asyncio tasks, threads for synchronous code, a process pool for heavy tools."""
