"""The engines: who they are, how they are, what their KV caches hold."""
