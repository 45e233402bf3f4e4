"""Heads: checkpoint dialects in, one HeadSpec and one set of tensor names out."""
