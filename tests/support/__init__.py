"""What the tests share: goals, streams of transitions, oracles, the tape environment, and factories."""
