"""A map-reduce of up to a million items on a cluster of three hosts, two of which are lost on the way."""
