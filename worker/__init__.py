"""The worker: holds the model, takes jobs from the queue and turns them into output rows."""
