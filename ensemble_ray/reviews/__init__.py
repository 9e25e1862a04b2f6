"""Who decides at review gates: ready-made handlers, notifiers, and the one place that asks a run's handler."""
