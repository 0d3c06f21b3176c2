"""What a step costs, in time and memory, beside what others cost: what `vprop bench` does."""
