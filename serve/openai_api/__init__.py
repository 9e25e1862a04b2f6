"""The OpenAI API of an endpoint, where each team is a model. It only uses `RunService`."""
