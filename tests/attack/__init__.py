"""What hostile pages, answers, inputs, files, team files and users of the machine try. `make attack` runs it alone.

Every attack is bounded: its size is fixed, and what it costs is asserted in bytes, processor time or exit codes, never
in time that passes.
"""
