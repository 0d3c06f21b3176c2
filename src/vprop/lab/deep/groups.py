"""Ensembles and mixtures from kept predictions: the mean of the members' probabilities, and nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vprop.lab.deep import predictions
from vprop.lab.deep.predictions import Averaged
from vprop.lab.deep.scores import diagram, score_labels, score_outliers


def of_images(paths: Sequence[Path], kind: str) -> dict[str, Any]:
    """The scores of the mean over members, each with its own predictions of this kind."""
    members = [predictions.load(path, kind) for path in paths]
    labels = members[0][1]
    if any(not torch.equal(labels, other) for _, other in members):
        raise ValueError(f"The members of a group are not of one test set: {', '.join(map(str, paths))}.")
    sets = {name: _mean([sets[name] for sets, _ in members]) for name in members[0][0]}
    outliers = {name: score_outliers(sets["test"], one) for name, one in sets.items() if name != "test"}
    test = sets["test"].probs
    return {"scores": score_labels(test, labels), "outliers": outliers, "diagram": diagram(test, labels)}


def of_text(paths: Sequence[Path], kind: str) -> dict[str, Any]:
    """Of texts the log-loss alone is known."""
    probs = torch.stack([predictions.load_text(path, kind) for path in paths]).mean(0)
    return {"scores": {"nll": float(-probs.log().mean())}, "outliers": {}, "diagram": None}


def _mean(members: Sequence[Averaged]) -> Averaged:
    probs = torch.stack([one.probs for one in members]).mean(0)
    entropy = torch.stack([one.expected_entropy for one in members]).mean(0)
    return Averaged(probs, entropy, len(members))
