"""Episodes: which transitions belong together."""
