"""Narrower numbers: how scales are found, how a graph is rewritten with them. A folder for each family."""
