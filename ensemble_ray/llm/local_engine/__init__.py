"""The engine that serves a model file of this machine."""
