"""What all experiments stand on: jobs and their cache, methods, problems, training runs and how settings are chosen."""
