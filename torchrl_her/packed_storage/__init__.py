"""A storage that keeps each transition in one row of a matrix."""
