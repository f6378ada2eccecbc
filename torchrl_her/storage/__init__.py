"""A storage whose transitions are rows of one matrix."""
