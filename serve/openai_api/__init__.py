"""The OpenAI API over the runs of an endpoint: each team is a model. Nothing of a run lives here; its routes know `RunService` alone."""
