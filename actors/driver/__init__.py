"""The process that submits runs: joins or starts a cluster, pickles, waits, answers what only it can."""
