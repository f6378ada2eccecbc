"""Rewards of relabelled transitions."""
