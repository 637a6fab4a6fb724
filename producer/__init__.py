"""The producer: files and command lines in, prompt jobs on the queue out. Knows the contract only."""
