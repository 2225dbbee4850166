"""What is told of what happened: metrics, receipts, traces, logs."""
