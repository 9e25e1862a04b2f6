"""Chat models: any endpoint of the protocol, the embedded model, a model behind a limit; from a string to a model."""
