"""Ranks: where the shards of a parameter lie, noise per rank, averages over ranks, FSDP's copies of the weights."""
