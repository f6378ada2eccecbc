"""Which transitions belong together: lanes and episodes."""
