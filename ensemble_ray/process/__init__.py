"""What every process of ours has."""
