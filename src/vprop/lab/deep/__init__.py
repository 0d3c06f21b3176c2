"""Networks of the usual sizes, and how they are trained on a device: for benchmarks and comparisons."""
