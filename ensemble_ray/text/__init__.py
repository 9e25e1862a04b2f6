"""Foreign text: invalid characters, control characters, compressed bodies, and the answers of models."""
