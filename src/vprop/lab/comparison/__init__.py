"""All methods of the library side by side, on a few tasks, under one protocol: what `vprop compare` does."""
