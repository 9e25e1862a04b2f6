"""What a process has once: its loop, threads, configuration, private files, log."""
