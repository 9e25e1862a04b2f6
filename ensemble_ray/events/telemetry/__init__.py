"""Runs for OpenTelemetry: their spans and figures by the conventions for generative AI, sent as they happen or from a record."""
