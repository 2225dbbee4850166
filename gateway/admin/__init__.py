"""The operators' API and dashboard."""
