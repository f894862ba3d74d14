"""Sandboxes alive, and what of them is on disk."""
