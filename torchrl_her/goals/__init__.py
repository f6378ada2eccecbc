"""Strategies and the goal table: which goal a relabelled transition gets."""
