"""A team that remembers its customer's preferences between runs.

python examples/remembering.py "Please keep it short."      the run stores it
python examples/remembering.py "How do tides work?"         another run uses it
ensemble-ray memory show customer                           shows the entries, in memory.db of this directory

Set LLM=local for the embedded model: no key, no network.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from ensemble_ray import Agent, Ensemble, EnsembleOutput, MemoryScope, SqliteMemory, Task


def main(message: str = "How do tides work?", llm: str = os.environ.get("LLM", "openai:gpt-4o-mini")) -> EnsembleOutput:
    """Store what a message tells about its writer, then answer it with all entries."""
    # With the extra `memory`, a scope returns entries that fit the task; without it, the most recent ones.
    has_model = importlib.util.find_spec("wordllama") is not None
    memory = SqliteMemory("memory.db", embedding_model="local" if has_model else None)
    clerk = Agent(role="Clerk", goal="Serve customers as they like it", llm=llm)
    customer = MemoryScope(name="customer", keep_last_entries=20)
    note = Task(
        description="Say in one line how the customer who writes this likes to be answered: {message}",
        expected_output="One line, such as: The customer likes short answers",
        agent=clerk,
        memory_scopes=customer,
    )
    answer = Task(
        description="Answer the customer as the customer likes it: {message}",
        expected_output="The answer",
        agent=clerk,
        context=[note],
    )
    output = Ensemble(tasks=[note, answer], memory_store=memory).run({"message": message})
    print(output.raw)
    return output


if __name__ == "__main__":
    main(*sys.argv[1:3])
