"""The way of one proxied request: read, route, forward, relay."""
