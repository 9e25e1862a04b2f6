"""Facts of runs as rows of the page. Pure: no clock, no file, no network."""
