"""A build as a list of steps: what to build, what it takes, writing it, going on where it stopped."""
