"""Warnings, reports and checks that show whether hindsight works."""
