"""A team of many agents with one task each; stays until its input closes."""

import sys

from ensemble_ray import Agent, Ensemble, OpenAIChatModel, Task

url, size, runtime = sys.argv[1], int(sys.argv[2]), sys.argv[3]
model = OpenAIChatModel("benchmark", base_url=url, api_key="benchmark")
tasks = [
    Task(
        name=f"part-{number}",
        description=f"Write part {number}",
        expected_output="One sentence",
        agent=Agent(role=f"Writer {number}", goal="Write", llm=model),
    )
    for number in range(size)
]
output = Ensemble(tasks=tasks, workflow="parallel").run(runtime=runtime)
print(len(output.task_outputs), flush=True)
sys.stdin.read()
