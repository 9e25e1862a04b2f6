"""Gates of tasks: when somebody is asked, what is recorded of it, what follows from the decision; the handlers that decide."""
