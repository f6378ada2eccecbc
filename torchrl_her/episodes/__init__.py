"""Lanes and episodes: which transitions belong together."""
