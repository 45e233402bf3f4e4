"""Heads: checkpoint dialects in, one HeadSpec and one set of tensor names out."""

from eagle_export.heads.load import LoadedHead, load_head
from eagle_export.heads.spec import HeadSpec

__all__ = ["HeadSpec", "LoadedHead", "load_head"]
