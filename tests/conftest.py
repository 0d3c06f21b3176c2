"""Settings for the whole suite: two workers on two cores, so one thread each; the same examples in every run."""

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # the CUDA kernels run in Triton's interpreter

torch.set_num_threads(1)
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")
