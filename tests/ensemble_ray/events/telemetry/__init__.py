"""Tests of what is told of runs to OpenTelemetry."""
