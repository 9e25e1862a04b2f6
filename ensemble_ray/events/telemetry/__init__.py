"""OpenTelemetry export of runs: spans and metrics by the conventions for generative AI, live or from a record."""
