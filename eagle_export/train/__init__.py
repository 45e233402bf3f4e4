"""Training a head for a target: `eagle-export train`. docs/training.md tells how and why."""
