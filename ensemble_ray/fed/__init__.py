"""Map-reduces as their callers see them: `run` is one of them, `recovery` what its record gives, `result` what it gave."""
