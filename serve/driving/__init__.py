"""Drives the runs of an endpoint: requests, ledger, queue and driver. It does not depend on HTTP."""
