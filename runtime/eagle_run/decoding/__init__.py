"""What a round computes, as arrays in and arrays out: trees, drafting, acceptance, sampling, coins."""
