"""From requests to outputs: scheduler, sequences, prefill, the round, the model runner, CUDA graphs."""
