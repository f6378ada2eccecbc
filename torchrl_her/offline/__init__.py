"""Existing data sets: loaders, and sampling from them with hindsight without a copy."""
