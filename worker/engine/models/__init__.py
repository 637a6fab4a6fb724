"""Model families: a declaration each, over one decoder."""
