"""Which goal a relabelled transition gets."""
