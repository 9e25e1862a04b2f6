"""Work that an agent hands to another."""
