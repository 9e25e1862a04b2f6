"""Items of a map-reduce on their way in, and what came of them on its way out. Package: items. Knows no plan and no runtime."""
