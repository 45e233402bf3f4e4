"""What a bundle holds, and what this machine can do with one."""
