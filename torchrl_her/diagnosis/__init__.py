"""What tells a user that hindsight does not work."""
