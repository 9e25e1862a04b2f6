"""What outlasts a task: stores of entries, embeddings and entities, and how a run reaches them."""
