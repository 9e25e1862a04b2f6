"""Items of a map-reduce: their sources, and the files of their results. Independent of plans and runtimes."""
