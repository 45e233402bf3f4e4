"""Is a bundle what its source weights are? Parity, equal tokens, accuracy, acceptance."""
