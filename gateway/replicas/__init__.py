"""Several gateways as one: replicas through Redis, workers of one machine through a hub."""
