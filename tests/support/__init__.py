"""Shared parts of the tests: environments, the oracle, buffers that are checked, and factories."""
