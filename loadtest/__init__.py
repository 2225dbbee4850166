"""Load for a live gateway: agent sessions, recorded traces and bursts, measured from outside."""
