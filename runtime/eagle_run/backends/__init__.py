"""What runs a graph: the Graph protocol, one module for each library, and wrappers around a graph."""
