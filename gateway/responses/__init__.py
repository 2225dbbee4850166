"""Stored, continued and background responses."""
