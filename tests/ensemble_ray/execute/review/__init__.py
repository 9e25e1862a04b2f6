"""Tests of review gates of tasks."""
