"""Tests of the producer: what is read from files, what reaches the queue, and what the command line says."""
