"""Settings for the whole suite: two workers on two cores, so one thread each."""

import torch

torch.set_num_threads(1)
