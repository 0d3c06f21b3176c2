"""The paper's experiments, as `vprop reproduce` runs them."""
