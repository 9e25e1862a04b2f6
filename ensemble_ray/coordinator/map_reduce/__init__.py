"""The tasks of a map-reduce: their items, factories, orders, outputs, token counts and the readers of their results."""
