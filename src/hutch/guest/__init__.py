"""What runs inside the sandbox: each file stands alone, uses the standard library only and imports nothing of hutch."""
