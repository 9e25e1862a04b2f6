"""Plan: a frozen order of work, made from one definition and its inputs. Pure; no clock, no randomness."""
