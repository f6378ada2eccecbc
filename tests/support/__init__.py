"""Shared parts of the tests: goals, streams of transitions, oracles, the tape environment, and factories."""
