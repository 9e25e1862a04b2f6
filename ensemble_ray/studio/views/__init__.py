"""Facts of runs as rows of the page. Package: studio. Pure: no clock, no file, no network."""
