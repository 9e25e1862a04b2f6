"""The routes of the endpoint, one router a topic. They know the port `RunService`, and nothing of a run lives in them."""
