r"""A matrix of weights in rotated coordinates, and how the rotation follows the gradients.

A weight is an m×n matrix W, and every function here takes a batch of them, ``(..., m, n)``. Two orthogonal bases Q_L
(m×m) and Q_R (n×n) turn it into W̃ = Q_Lᵀ W Q_R, of which each element belongs to one direction uᵢvⱼᵀ (columns of the
bases). ``None`` stands for the identity. In these coordinates the Gaussian is diagonal: its precision is
ess·(h̃+δ), one number for each direction. An isotropic prior is the same in every basis.

**Which bases.** Where the curvature is a Kronecker product A⊗B, its eigenvectors are the products of A's and B's, and a
gradient that varies with the curvature has E[GGᵀ] ∝ A and E[GᵀG] ∝ B up to a function of themselves: the same
eigenvectors. So Q_L and Q_R diagonalize averages of GGᵀ and GᵀG. They are kept in rotated coordinates,
C_L = average of g̃g̃ᵀ and C_R = average of g̃ᵀg̃ (the other side's rotation cancels in a product): what is off their
diagonals is how far the bases have fallen behind.

**When a basis turns**, from Q to QO, the old precision P = diag(p) is not diagonal any more: in the new coordinates it
is OᵀPO. Of all Gaussians that are diagonal there, N(μ, 1/p') with p' = diag(OᵀPO) has the least KL divergence from the
old one, for KL(q‖N(μ, P⁻¹)) = ½Σᵢ((OᵀPO)ᵢᵢ/p'ᵢ + log p'ᵢ) + const is least there; it is the projection that
variational inference itself makes. With two sides, O = O_L⊗O_R, and p = ess·(h̃+δ):

    h̃'ᵢⱼ = Σₖₗ (O_L)ₖᵢ² (O_R)ₗⱼ² h̃ₖₗ

Squares of an orthogonal matrix are the weights of averages (rows and columns sum up to one), so that δ drops out, the
sum of h̃ stays, nothing leaves the range of values that it had, an exchange of two directions exchanges their
curvatures, and among directions of the same curvature any rotation changes nothing. What was learned of the gradient,
C_L, C_R and the momentum average, is rotated exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vprop.precision import in_full_precision

Basis = Tensor | None
"""Q as a batch of orthogonal matrices, or ``None`` for the identity."""

LARGEST_TURN = 1.0
"""The spectral norm of a turn's generator: more at once would be no small rotation any more."""
SOLVED = (1, 2, 4, 8, 16)
"""Refreshes whose eigenvectors are computed anew."""
LEAST_SQUARE = 1e-10
"""Of a singular value, for an inverse root whose errors the polish can mend."""
_POLISHES = 4
"""Iterations X ← X(3I−XᵀX)/2: from singular values in [1, √1.25] they end within 10⁻¹² of 1."""


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """(m, n) of a weight as a matrix: outputs × all else; a vector is a column.

    >>> matrix_shape(torch.Size([8, 3, 5, 5])), matrix_shape(torch.Size([7])), matrix_shape(torch.Size([]))
    ((8, 75), (7, 1), (1, 1))
    """
    if len(shape) < 2:
        return shape.numel(), 1
    return shape[0], shape[1:].numel()


@in_full_precision
def rotated(x: Tensor, left: Basis, right: Basis) -> Tensor:
    """Q_Lᵀ x Q_R."""
    if left is not None:
        x = left.mT @ x
    return x if right is None else x @ right


@in_full_precision
def rotated_back(x: Tensor, left: Basis, right: Basis) -> Tensor:
    """Q_L x Q_Rᵀ."""
    if left is not None:
        x = left @ x
    return x if right is None else x @ right.mT


def diagonal_of_rotated_back(values: Tensor, left: Basis, right: Basis) -> Tensor:
    """The diagonal, in the coordinates of the weights, of a matrix that is diagonal in the rotated ones.

    Variances from σ̃², curvatures from h̃.
    """
    return rotated_back(values, None if left is None else left.square(), None if right is None else right.square())


def projected(hess: Tensor, left: Basis, right: Basis) -> Tensor:
    """h̃ after the bases turn by O_L and O_R: the diagonal of what it was."""
    return rotated(hess, None if left is None else left.square(), None if right is None else right.square())


@in_full_precision
def turned(basis: Tensor, average: Tensor, rounding: float) -> Tensor:
    """Bases after one small rotation towards the eigenvectors of Q·C·Qᵀ, by matrix products alone.

    Each pair of directions would be made uncorrelated by the angle ½ atan(2Cᵢⱼ/(Cⱼⱼ−Cᵢᵢ)), as in Jacobi's method; all
    pairs are turned at once, by the generator A of these angles, whose norm is bounded. For small angles that is
    first-order perturbation theory, so that the error is squared in each call. An orthogonal matrix is made of
    Q(I+A+½A²), whose singular values are between 1 and √(1+¼‖A‖⁴), by Newton–Schulz iterations. Pairs
    of which nothing is known, because Cᵢⱼ is within ten ``rounding`` of the largest element, are not turned.
    """
    diagonal = average.diagonal(dim1=-2, dim2=-1)
    gap = diagonal.unsqueeze(-2) - diagonal.unsqueeze(-1)
    angle = torch.where(gap < 0, -0.5, 0.5) * torch.atan2(2 * average, gap.abs())
    known = average.abs() > 10 * rounding * diagonal.amax(-1)[..., None, None]
    angle = (angle * known).triu(1)
    generator = angle - angle.mT
    square = generator @ generator
    scale = (LARGEST_TURN / _norm_bound(square)).clamp_max(1)
    return orthogonal(basis + basis @ (scale * generator + 0.5 * scale.square() * square))


def _norm_bound(square: Tensor) -> Tensor:
    """An upper bound on the spectral norms of antisymmetric matrices, within a factor of (m/2)^⅛: the Schatten 8-norm.

    From their squares. Singular values come in pairs, of which one counts.
    """
    norm = torch.linalg.matrix_norm(square @ square, keepdim=True)
    return (norm.square() / 2).pow(1 / 8).clamp_min(1e-30)


@in_full_precision
def orthogonal(matrix: Tensor) -> Tensor:
    """The orthogonal matrix nearest to one whose singular values are near 1."""
    batch = matrix.reshape(-1, *matrix.shape[-2:])
    for _ in range(_POLISHES):
        batch = torch.baddbmm(batch, batch, batch.mT @ batch, beta=1.5, alpha=-0.5)
    return batch.reshape(matrix.shape)


@in_full_precision
def gram(x: Tensor) -> Tensor:
    """xᵀx."""
    return x.mT @ x


@in_full_precision
def solved(basis: Tensor, average: Tensor, rounding: float) -> Tensor:
    """Bases of the eigenvectors of Q·C·Qᵀ themselves; as they were where the decomposition fails.

    Early averages have few terms, and many directions of which nothing is known: all vectors there are eigenvectors,
    and rounding would choose. Those nearest to the present directions are taken, and eigenvectors with their largest
    component positive, so that gradients that differ by roundings have bases that do.
    """
    try:
        values, vectors = torch.linalg.eigh(average)
    except torch.linalg.LinAlgError:
        return basis
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    vectors = vectors * torch.where(largest < 0, -1.0, 1.0)
    unknown = (values <= 100 * rounding * values.amax(-1, keepdim=True)).sum(-1).reshape(-1).tolist()
    flat = vectors.reshape(-1, *vectors.shape[-2:])
    for one, count in zip(flat, unknown, strict=True):  # eigenvalues ascend
        if count:
            null = one[:, :count]
            axes = null.square().sum(-1).topk(count).indices.sort().values
            one[:, :count] = null @ _nearest_orthogonal(null[axes].mT)
    return orthogonal(basis @ flat.reshape(vectors.shape))


def _nearest_orthogonal(matrix: Tensor) -> Tensor:
    """UVᵀ of a square matrix USVᵀ, as A(AᵀA)^(-½): on a GPU eigenvectors take a small part of the time of an SVD.

    Squares lose half of the digits; where that is too many, the SVD is taken after all.
    """
    try:
        values, vectors = torch.linalg.eigh(matrix.mT @ matrix)
    except torch.linalg.LinAlgError:
        values = matrix.new_zeros(1)
    if float(values[0]) > LEAST_SQUARE:
        return matrix @ (vectors * values.rsqrt()) @ vectors.mT
    left, _, right = torch.linalg.svd(matrix)
    return left @ right


def is_solved(refresh: int) -> bool:
    """Whether the eigenvectors are computed anew in this refresh, counted from 1: 1, 2, 4, 8 and 16.

    Early averages change quickly, and small turns would follow them slowly. Later ones are followed by turns alone: on
    a GPU the eigenvectors of a large network take as long as ten steps.

    >>> [k for k in range(1, 100) if is_solved(k)]
    [1, 2, 4, 8, 16]
    """
    return refresh in SOLVED
