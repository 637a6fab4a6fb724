"""The page for whoever looks after the system: how batches, workers and queues stand, what failed, and why."""
