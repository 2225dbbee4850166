"""Moongate: an OpenAI-compatible gateway and cache-aware request router for vLLM x Mooncake."""

__version__ = "0.1.0"
