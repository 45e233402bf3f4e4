"""The source weights as torch modules behind the Graph protocol: what all is compared with."""
