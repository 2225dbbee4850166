"""The shared KV pool: what it holds, what a fetch costs, who may rely on it."""
