"""What several of these processes use to reach each other: messages, retries, adapters of handles."""
