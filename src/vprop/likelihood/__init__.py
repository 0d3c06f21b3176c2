"""Which distribution a loss is the negative log-likelihood of, labels drawn from it, and losses that learn noise."""

from vprop.likelihood.gaussian import (
    GaussianLikelihood,
    HeteroscedasticGaussianLikelihood,
    split_heteroscedastic,
)
from vprop.likelihood.kinds import (
    Likelihood,
    LikelihoodLike,
    LikelihoodModule,
    check_likelihood,
    likelihood_of,
    snapshot_likelihood,
)
from vprop.likelihood.labels import draw_labels, labels_in_the_mean

__all__ = [
    "GaussianLikelihood",
    "HeteroscedasticGaussianLikelihood",
    "Likelihood",
    "LikelihoodLike",
    "LikelihoodModule",
    "check_likelihood",
    "draw_labels",
    "labels_in_the_mean",
    "likelihood_of",
    "snapshot_likelihood",
    "split_heteroscedastic",
]
