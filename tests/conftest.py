"""Settings for the whole suite: two workers on two cores, so one thread each; the same examples in every run."""

import gc
import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # the CUDA kernels run in Triton's interpreter

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start, too
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


def pytest_collection_finish():
    """What is loaded by now stays: tests that collect garbage need not look through all of it, half a second each."""
    gc.collect()
    gc.freeze()
