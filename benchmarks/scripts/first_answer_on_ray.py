"""A user's script with one agent on Ray; `RAY_ADDRESS` decides whether Ray is there or has to be started."""

import sys

from ensemble_ray import Agent, Ensemble, OpenAIChatModel, Task

writer = Agent(role="Writer", goal="Write", llm=OpenAIChatModel("benchmark", base_url=sys.argv[1], api_key="benchmark"))
task = Task(description="Say something", expected_output="A sentence", agent=writer)
print(Ensemble(tasks=[task]).run(runtime="ray").raw, flush=True)
