"""The command line: generate, chat and bench parse their options and make one call of the Python API."""
