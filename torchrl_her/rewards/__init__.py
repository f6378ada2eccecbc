"""Which reward a relabelled transition gets."""
