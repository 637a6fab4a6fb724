"""`worker bench`: what the engine reaches on this machine, and what others reach with the same weights and prompts."""
