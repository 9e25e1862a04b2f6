"""Memory across tasks and runs: stores of entries, embeddings, facts and reflections, and the access of a run to them."""
