"""Warnings about configurations in which hindsight does not work."""
