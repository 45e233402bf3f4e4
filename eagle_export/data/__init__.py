"""Training conversations from a target itself: prompts, its answers, shards that the trainer reads."""
