"""Speculative against plain decoding on a set of questions: interleaved, compared token by token."""
