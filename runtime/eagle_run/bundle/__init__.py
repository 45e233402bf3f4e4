"""A bundle on disk: its manifest, its files and their hashes."""
