"""Commands of ours that run on a cluster, as jobs: the line that starts them, their log, Ctrl-C. Package: cli."""
