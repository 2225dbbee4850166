"""What the gateway asks of the shared KV pool, and what it lets be put there."""
