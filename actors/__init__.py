"""Actors on Ray: thin hands around the pure core. They know no rules; `ensemble_ray` decides.

`spawn` alone makes actors of plain classes; whoever wants one brings the class.
"""
