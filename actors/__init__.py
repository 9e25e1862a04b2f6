"""Actors on Ray. They carry out what `ensemble_ray` decides and contain no rules.

Classes are plain; only `spawn` turns them into actors.
"""
