"""Map-reduces as their callers see them: `handle` is one of them, `recovery` what its record gives, `result` what it gave."""
