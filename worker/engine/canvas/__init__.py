"""Models that denoise random tokens instead of masks: a canvas at a time, with an engine of their own."""
