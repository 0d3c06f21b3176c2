"""Settings for the whole suite: two workers on two cores, so one thread each; the same examples in every run."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")
