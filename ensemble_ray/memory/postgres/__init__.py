"""Memory that lasts, in a PostgreSQL database."""
