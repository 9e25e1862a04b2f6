"""Values that cross ports: outputs, traces, metrics, messages, names."""
