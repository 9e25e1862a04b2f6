"""The driver: joins or starts a cluster, submits runs, and answers requests that only it can answer."""
