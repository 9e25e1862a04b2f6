"""How a task's output is reflected on, and what earlier reflections tell the task. Package: execute."""
