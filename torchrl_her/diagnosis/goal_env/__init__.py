"""The checker of goal environments."""
