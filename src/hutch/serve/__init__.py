"""The daemon that keeps sandboxes for all doors of one user, and the way to it."""
