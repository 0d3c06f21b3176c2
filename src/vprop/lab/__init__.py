"""Experiments, plots and the command line: the only place that needs the extras."""
