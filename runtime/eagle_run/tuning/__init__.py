"""The tree "auto": how long forwards take here, which tree should be fastest by that, and which one is."""
