"""The hyperparameters that optimizers share, each declared once: name, type, words, default and checks.

A ``TypedDict`` is what type checkers and editors read without running anything; what its fields are annotated with is
what the rest of the library reads. There are sections because not every method takes all of them; their order is that
of the arguments. Another argument for all is another field here.
"""

import math
from collections.abc import Sequence
from typing import Annotated

from torch import Tensor
from typing_extensions import TypedDict

from vprop.help.auto_prior import PriorPrecision
from vprop.optim.hyperparameters import checks, prior
from vprop.optim.hyperparameters.declaration import Hyperparameter

LR = Hyperparameter(
    "step size, a number or a one-element tensor. The step is Newton-like, so 1 is a full step; 0.1 is the value to "
    "start from.",
    check=checks.rate(0.1),
)
"""The one that can be given by position, so that it stands in the constructors, with its default."""


class Data(TypedDict):
    """What the loss is a mean over."""

    num_data: Annotated[
        float,
        Hyperparameter(
            "N, how many training examples the mean loss stands for.",
            check=checks.positive("Pass the number of training examples, e.g. num_data=len(train_set)."),
            shared_by_groups=True,
        ),
    ]


_PRECISION = (
    'λ of the prior N(m₀, I/λ); or a list of tensors like ``params``, one λ per weight; or ``"auto"``, or a '
    ":class:`vprop.AutoPrior`, for the λ that maximizes the ELBO, followed while training"
)


class Precision(TypedDict, total=False):
    """The prior's precision, of each weight."""

    prior_precision: Annotated[
        PriorPrecision,
        Hyperparameter(_PRECISION + ".", 1.0, prior.precision, per_parameter=True),
    ]


class MatrixPrecision(TypedDict, total=False):
    """The prior's precision, with correlations or without."""

    prior_precision: Annotated[
        PriorPrecision | Tensor,
        Hyperparameter(
            _PRECISION + "; or a matrix over all weights, which ``posterior.as_prior()`` makes.",
            1.0,
            prior.precision_or_matrix,
            per_parameter=True,
        ),
    ]


class Averages(TypedDict, total=False):
    """Where the mean is pulled to, and the averages of what moves it."""

    prior_mean: Annotated[
        Sequence[Tensor] | None,
        Hyperparameter("m₀ as a list of tensors like ``params``; ``None`` is 0.", None, prior.mean, per_parameter=True),
    ]
    betas: Annotated[
        tuple[float, float],
        Hyperparameter(
            "(β₁, β₂), momentum of the gradient and decay of the curvature.",
            (0.0, 0.999),
            checks.pair_of_decays,
            shared_by_groups=True,
        ),
    ]


class Samples(TypedDict, total=False):
    """How many, and how they belong together."""

    mc_samples: Annotated[
        int, Hyperparameter("K, weight samples per step.", 1, checks.sample_count, checks.enough_samples)
    ]
    antithetic: Annotated[
        bool, Hyperparameter("samples 2j and 2j+1 use +ε and −ε.", False, checks.flag, shared_by_groups=True)
    ]
    centered: Annotated[
        bool,
        Hyperparameter(
            "take the curvature from the spread of the samples' gradients, which removes the bias of the squared mean "
            "and of the mini-batch noise. Needs ``mc_samples >= 2``; best with ``antithetic``.",
            False,
            checks.flag,
            shared_by_groups=True,
        ),
    ]


class Scales(TypedDict, total=False):
    """How wide the posterior is, and how it starts."""

    temperature: Annotated[
        float,
        Hyperparameter(
            "τ; 1 is Bayes, below 1 a colder and narrower posterior.",
            1.0,
            checks.positive("1 is the Bayesian posterior, smaller values are colder (less noise)."),
            shared_by_groups=True,
        ),
    ]
    hess_init: Annotated[
        float,
        Hyperparameter(
            "h before the first step, in units of the mean loss's curvature.",
            1.0,
            checks.not_negative("It is the curvature of the mean loss before any data: 1 is a good first try."),
            checks.finite_variance,
        ),
    ]
    clip_radius: Annotated[
        float,
        Hyperparameter(
            "bound on each element of the preconditioned step, before ``lr``.",
            math.inf,
            checks.number("a number > 0", lambda v: v > 0, 'Use float("inf") for no clipping.'),
        ),
    ]
    seed: Annotated[int, Hyperparameter("key of the noise.", 0, checks.seed)]


class MiniBatches(TypedDict, total=False):
    """What a gradient is a mean of, and how its squares are averaged."""

    batch_size: Annotated[
        float | str | None,
        Hyperparameter(
            "M, how many independent examples a gradient is a mean of: the rows of a mini-batch, times the "
            "micro-batches that are accumulated, times the ranks of a data-parallel run. Tokens of a sequence are not "
            "independent: count sequences. Squared gradients then count M times, not N times, which is right for "
            'mini-batches, and the same for M = N. ``"objective"`` reads it off the :class:`vprop.Objective` of each '
            "step.",
            None,
            checks.batch_size,
            shared_by_groups=True,
        ),
    ]
    init_steps: Annotated[
        float | None,
        Hyperparameter(
            "how many steps ``hess_init`` counts for in the average of the curvature. 0: it is forgotten in the first "
            "step, as Adam debiases; ``None``: as many as the average remembers, 1/(1−β₂), so that it lingers.",
            None,
            checks.or_none(checks.not_negative("0 forgets hess_init at once, None lets it fade with β₂.")),
            shared_by_groups=True,
        ),
    ]


class Preconditioner(TypedDict, total=False):
    """What the step of the mean divides by."""

    preconditioner: Annotated[
        str,
        Hyperparameter(
            '``"precision"``: the natural-gradient step, which divides by h+δ; or ``"root"``: a step of Adam\'s kind, '
            "which divides by the size of the gradient, √(h/M + δ²((μ−m₀)²+σ²)), with ``lr`` as for Adam; needs "
            '``batch_size``; or ``"identity"``: a step of SGD\'s kind, which divides by nothing. Its ``lr`` is that of '
            "SGD divided by 1−β₁: 1 where SGD has 0.1 with momentum 0.9. The posterior's precision stays what it is.",
            "precision",
            checks.preconditioner,
            checks.root_of_known_batches,
        ),
    ]


class Floors(TypedDict, total=False):
    """How wide the posterior may become."""

    hess_floor: Annotated[
        float,
        Hyperparameter(
            "what h+δ is not below, in the variance and in steps that divide by it: σ is at most 1/√(ess·hess_floor).",
            0.0,
            checks.not_negative("0 is no floor; 0.5 is the size that networks train well with."),
        ),
    ]
    noise_limit: Annotated[
        float,
        Hyperparameter(
            "what σ is not above, as a share of the root mean square of the weights of its parameter (at least 1e-3), "
            "which is looked at in every sixteenth step; 0.1 to 0.2 suits networks of all kinds.",
            math.inf,
            checks.number("a number > 0", lambda v: v > 0, 'Use float("inf") for no limit.'),
        ),
    ]


class Ranks(TypedDict, total=False):
    """Who draws the same noise."""

    noise: Annotated[
        str,
        Hyperparameter(
            'in a run on several ranks (DistributedDataParallel), ``"shared"`` draws the same sample on all of them, '
            'and ``"per_rank"`` one of its own on each: more samples for the same work, at the price of one more '
            "reduction per step and a copy of the weights.",
            "shared",
            checks.who_draws,
            checks.own_noise_of_whole_parameters,
            shared_by_groups=True,
        ),
    ]


class Sign(TypedDict, total=False):
    """What the loss is."""

    maximize: Annotated[
        bool, Hyperparameter("the loss is a log-likelihood to maximize.", False, checks.flag, shared_by_groups=True)
    ]


class Implementation(TypedDict, total=False):
    """How it is computed; the results are the same to rounding."""

    foreach: Annotated[
        bool | None,
        Hyperparameter(
            "ask for torch's own operations, which run on any device and can be compiled, in place of kernels: "
            "``True`` for all parameters of a group as one flat tensor, ``False`` for one at a time. The same result "
            "to rounding.",
            None,
            checks.choice,
        ),
    ]
    fused: Annotated[
        bool | None,
        Hyperparameter(
            "``True`` asks for kernels that sample and update in one pass over memory, and is an error where there are "
            "none; ``False`` forbids them; ``None`` takes them where they are, unless ``foreach`` is given. There are "
            "kernels for float32, bfloat16 and float16 parameters on CUDA (Triton) and CPU.",
            None,
            checks.choice,
            checks.one_implementation,
        ),
    ]
    capturable: Annotated[
        bool,
        Hyperparameter(
            "keep the step count on the device, so that a CUDA graph can capture sampling and step.", False, checks.flag
        ),
    ]


class Basic(Data, Precision, Averages, Samples, Scales, Ranks, Sign, Implementation, total=False):
    """What no optimizer is without."""


class Floored(Data, Precision, Averages, Samples, Scales, Floors, Ranks, Sign, Implementation, total=False):
    """What a diagonal with an update of its own shares with the others."""


class Shared(
    Data,
    Precision,
    Averages,
    Samples,
    MiniBatches,
    Preconditioner,
    Scales,
    Floors,
    Ranks,
    Sign,
    Implementation,
    total=False,
):
    """What the optimizers with a diagonal share."""


class SharedByFull(
    Data, MatrixPrecision, Averages, Samples, MiniBatches, Scales, Ranks, Sign, Implementation, total=False
):
    """What the optimizers with a full covariance share."""


_DIAGONAL_OR_EIGENBASIS = (
    '``"diagonal"``: one variance for each weight; ``"eigenbasis"``: one for each direction of two bases that follow '
    "the gradients of a weight matrix (a convolution as outputs × all else, a vector as a column), which takes in the "
    "correlations inside of a layer; see :mod:`vprop.functional.eigenbasis`"
)


class Bases(TypedDict, total=False):
    """How the Gaussian over a group's weights is kept, of the methods that can keep it in an eigenbasis."""

    structure: Annotated[
        str,
        Hyperparameter(
            _DIAGONAL_OR_EIGENBASIS + ". Groups may differ.",
            "diagonal",
            checks.one_of(
                ("diagonal", "eigenbasis"),
                "Diagonal: independent weights; eigenbasis: correlations inside of a matrix.",
                '"diagonal" or "eigenbasis"',
            ),
        ),
    ]
    max_basis_dim: Annotated[
        int,
        Hyperparameter(
            "with an eigenbasis: the longest side of a matrix that gets a basis, of that length squared; longer ones "
            "keep the coordinates of the weights. Read when a parameter's state is made.",
            1024,
            checks.at_least_one,
        ),
    ]
    basis_every: Annotated[
        int,
        Hyperparameter(
            "with an eigenbasis: steps between two changes of a basis. Sides take turns, so that each step has its "
            "share.",
            10,
            checks.at_least_one,
        ),
    ]
    basis_beta: Annotated[
        float,
        Hyperparameter(
            "with an eigenbasis: decay of the averages of products of gradients that the bases follow.",
            0.999,
            checks.number("a number in [0, 1)", lambda v: 0 <= v < 1, "0.999 remembers about a thousand steps."),
        ),
    ]


STRUCTURES = {
    "words": (
        _DIAGONAL_OR_EIGENBASIS
        + '; ``"full"``: one covariance over all weights of the groups that ask for it, as in :class:`vprop.VONG`, '
        'with a natural-gradient step (``preconditioner="precision"``, no floor). Groups may differ.'
    ),
    "check": checks.one_of(
        ("diagonal", "eigenbasis", "full"),
        "Diagonal: independent weights; eigenbasis: correlations inside of a matrix; full: all correlations.",
        '"diagonal", "eigenbasis" or "full"',
    ),
}
"""What ``structure`` is for methods that have a full form as well."""


class SampledFisher(TypedDict, total=False):
    """Of the methods whose curvature is made of gradients."""

    sampled_fisher: Annotated[
        bool,
        Hyperparameter(
            "take the curvature from labels drawn from the model in place of the observed ones, which makes it the "
            "Fisher; ``step`` then needs a :class:`vprop.Objective`, and each sample costs a second gradient.",
            False,
            checks.flag,
            checks.fisher_or_centered,
            shared_by_groups=True,
        ),
    ]


class HessianRows(TypedDict, total=False):
    """Of the methods that compute Hessians."""

    chunk_size: Annotated[
        int, Hyperparameter("rows of the Hessian computed at a time; bounds the memory.", 32, checks.at_least_one)
    ]


class MatrixSize(TypedDict, total=False):
    """Of the methods with a full covariance."""

    max_parameters: Annotated[int, Hyperparameter("the largest matrix you agree to.", 5000, checks.at_least_one)]
