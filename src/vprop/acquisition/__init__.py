"""Which examples to label next, from predictions for those that have no label yet.

Scores for one example at a time (:func:`entropy`, :func:`mutual_information`, :func:`variation_ratio`,
:func:`least_confidence`), and ways to choose several at once: :func:`top`, the best scores; :func:`batch_bald`,
examples that tell most *together*; :func:`power_sample`, scores with chance in them, for pools of any size.
"""

from vprop.acquisition.batch import Batch, batch_bald
from vprop.acquisition.choice import power_sample, top
from vprop.acquisition.scores import entropy, least_confidence, mutual_information, variation_ratio

__all__ = [
    "Batch",
    "batch_bald",
    "entropy",
    "least_confidence",
    "mutual_information",
    "power_sample",
    "top",
    "variation_ratio",
]
