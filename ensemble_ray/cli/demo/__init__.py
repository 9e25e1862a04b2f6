"""The demonstration: texts of this machine, read by a team."""
