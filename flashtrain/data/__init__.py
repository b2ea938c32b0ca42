"""Documents, their tokens on disk, and the order in which training sees them."""
