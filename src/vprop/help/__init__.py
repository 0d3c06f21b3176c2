"""Help with the arguments: a step size (``lr_find``), a prior that follows the posterior, and what looks wrong."""
