"""Which examples to label next."""
