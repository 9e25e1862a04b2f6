"""Items of a map-reduce on their way in, and what came of them on its way out. Knows no plan and no runtime."""
