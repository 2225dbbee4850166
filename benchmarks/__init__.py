"""What the gateway costs: measurements that are run by hand and never decide whether a build passes."""
