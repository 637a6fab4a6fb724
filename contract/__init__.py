"""What producer and worker agree on.

This package knows neither of them: it holds the shape of a job, the durable truth about batches (the
ledger), queue names, folders, settings, logs and errors. It never imports torch.
"""
