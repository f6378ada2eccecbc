"""Where transitions are stored: as rows of one matrix."""
