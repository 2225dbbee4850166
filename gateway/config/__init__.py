"""The configuration file: its settings, and what a reload changes."""
