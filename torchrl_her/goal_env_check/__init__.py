"""Checks of goal environments before training."""
