"""Data sets that exist already: they are adopted without a copy, or read from files."""
