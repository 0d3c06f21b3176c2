"""Rotations, what happens to the curvature when a basis turns, and bases that follow averages."""

import math

import pytest
import torch

from tests.random_matrices import orthogonal, random
from vprop.functional import eigenbasis

EPS = torch.finfo(torch.float64).eps


def with_spectrum(values, seed=0):
    basis = orthogonal(len(values), seed)
    return (basis * torch.as_tensor(values, dtype=torch.float64)) @ basis.mT


def off_diagonal(matrix):
    return float((matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))).abs().max())


# -- rotations ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sides", [(True, True), (True, False), (False, True), (False, False)])
def test_back_and_forth_and_the_vector_form(sides):
    """(Q_L⊗Q_R)ᵀ of the flattened matrix, row by row."""
    x = random(2, 3, 4)
    left = torch.stack([orthogonal(3, s) for s in (1, 2)]) if sides[0] else None
    right = torch.stack([orthogonal(4, s) for s in (3, 4)]) if sides[1] else None
    there = eigenbasis.rotated(x, left, right)
    torch.testing.assert_close(eigenbasis.rotated_back(there, left, right), x)
    for i in range(2):
        q = torch.kron(
            torch.eye(3, dtype=x.dtype) if left is None else left[i],
            torch.eye(4, dtype=x.dtype) if right is None else right[i],
        )
        torch.testing.assert_close(there[i].flatten(), q.mT @ x[i].flatten())
        variances = x[i].square() + 0.1
        expected = (q @ variances.flatten().diag() @ q.mT).diagonal()
        own = (None if left is None else left[i], None if right is None else right[i])
        diagonal = eigenbasis.diagonal_of_rotated_back(variances, *own)
        torch.testing.assert_close(diagonal.flatten(), expected)


# -- a basis that turns ------------------------------------------------------------------------------------------------


def kl(precision, old):
    """KL(N(0, 1/precision) ‖ N(0, old⁻¹))."""
    size = len(precision)
    trace = (old.diagonal() / precision).sum()
    return 0.5 * (trace - size + precision.log().sum() - torch.linalg.slogdet(old).logabsdet)


def test_the_projected_curvature_has_the_least_divergence():
    """Of all diagonal precisions in the new coordinates, against the old one: no neighbour is better."""
    hess, ess, damping = random(3, 4).square(), 50.0, 0.3
    left, right = orthogonal(3, 5), orthogonal(4, 6)
    turn = torch.kron(left, right)
    old = turn.mT @ (ess * (hess + damping)).flatten().diag() @ turn
    projected = eigenbasis.projected(hess, left, right)
    precision = ess * (projected + damping)
    torch.testing.assert_close(precision.flatten(), old.diagonal())
    best = kl(precision.flatten(), old)
    for seed in range(20):
        other = precision.flatten() * torch.exp(0.05 * random(12, seed=100 + seed))
        assert kl(other, old) > best


def test_what_a_turn_keeps():
    hess = random(5, 6).square() - 0.2  # some negative, as IVON's may be
    left, right = orthogonal(5, 1), orthogonal(6, 2)
    projected = eigenbasis.projected(hess, left, right)
    torch.testing.assert_close(projected.sum(), hess.sum())
    assert hess.min() <= projected.min() <= projected.max() <= hess.max()
    # Where all directions have the same curvature, any turn leaves it.
    same = torch.full((5, 6), 0.7, dtype=torch.float64)
    torch.testing.assert_close(eigenbasis.projected(same, left, right), same)
    # Two directions that change places take their curvatures with them.
    order = [1, 0, 2, 3, 4]
    swap = torch.eye(5, dtype=torch.float64)[:, order]
    torch.testing.assert_close(eigenbasis.projected(hess, swap, None), hess[order])


# -- bases that follow -------------------------------------------------------------------------------------------------

SPECTRA = {
    "apart": [1.0, 0.5, 0.25, 0.1, 0.01, 0.003, 1e-4],
    "even": [1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7],
    "equal": [1.0] * 7,
    "one": [1.0] + [0.0] * 6,
    "pairs": [2.0, 2.0, 1.0, 1.0, 0.5, 0.5, 0.25],
    "nothing": [0.0] * 7,
}


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("method", ["solved", "turned"])
def test_bases_become_eigenvectors(spectrum, method):
    matrix = torch.stack([with_spectrum(SPECTRA[spectrum], seed) for seed in (0, 1)])
    basis = torch.stack([orthogonal(7, 8), torch.eye(7, dtype=torch.float64)])
    for _ in range(1 if method == "solved" else 100):
        basis = getattr(eigenbasis, method)(basis, basis.mT @ matrix @ basis, rounding=EPS)
    assert torch.isfinite(basis).all()
    identity = torch.eye(7, dtype=torch.float64)
    torch.testing.assert_close(basis.mT @ basis, identity.expand(2, 7, 7), rtol=0, atol=1e-12)
    # One direction from nowhere is approached linearly, all others quadratically.
    assert off_diagonal(basis.mT @ matrix @ basis) < (1e-6 if spectrum == "one" else 1e-12)


def test_a_turn_squares_the_error():
    matrix, errors = with_spectrum(SPECTRA["apart"]), []
    basis = torch.linalg.eigh(matrix).eigenvectors
    generator = random(7, 7, seed=3) * 1e-3
    basis = eigenbasis.orthogonal(basis @ (torch.eye(7, dtype=torch.float64) + generator - generator.mT))
    for _ in range(3):
        c = basis.mT @ matrix @ basis
        scale = c.diagonal().rsqrt()
        errors.append(off_diagonal(scale[:, None] * c * scale))
        basis = eigenbasis.turned(basis, c, rounding=EPS)
    assert errors[1] < 0.1 * errors[0]
    assert errors[2] < 0.01 * errors[1]


def test_a_turn_is_bounded_however_far_it_is():
    """Dense correlations would ask for 45 degrees between all pairs at once; the result is orthogonal nevertheless."""
    x = random(40, 3)
    basis = eigenbasis.turned(torch.eye(40, dtype=torch.float64), x @ x.mT, rounding=EPS)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(40, dtype=torch.float64), rtol=0, atol=1e-11)
    assert torch.linalg.matrix_norm(basis - torch.eye(40, dtype=torch.float64), 2) < math.pi / 2


def test_unknown_directions_do_not_depend_on_rounding():
    """Three gradients in twelve dimensions: nine directions of which nothing is known."""
    x = random(12, 3)
    basis, average = orthogonal(12, 4), x @ x.mT
    expected = eigenbasis.solved(basis, average, rounding=EPS)
    noise = random(12, 12, seed=9) * 1e-16 * float(average.abs().max())
    other = eigenbasis.solved(basis, average + noise + noise.mT, rounding=EPS)
    torch.testing.assert_close(other, expected, rtol=0, atol=1e-12)
    turned = [eigenbasis.turned(basis, a, rounding=EPS) for a in (average, average + noise + noise.mT)]
    torch.testing.assert_close(*turned, rtol=0, atol=1e-12)


@pytest.mark.parametrize("smallest", [1.0, 1e-4, 1e-9, 0.0])
def test_the_nearest_orthogonal_matrix(smallest):
    """The last two are beyond what squares can tell."""
    left, right = orthogonal(5, 1), orthogonal(5, 2)
    matrix = left * torch.tensor([1.0, 0.9, 0.5, 0.1, smallest], dtype=torch.float64) @ right.mT
    found = eigenbasis.orthogonal(eigenbasis._nearest_orthogonal(matrix))
    torch.testing.assert_close(found.mT @ found, torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-12)
    known = slice(None) if smallest else slice(4)  # of a direction that is lost the sign is anybody's
    torch.testing.assert_close((left.mT @ found @ right)[known, known], torch.eye(5, dtype=torch.float64)[known, known])


def test_a_decomposition_that_fails_keeps_the_basis(monkeypatch):
    def fail(_):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    basis = orthogonal(4)
    assert torch.equal(eigenbasis.solved(basis, with_spectrum([1.0, 2.0, 3.0, 4.0]), rounding=EPS), basis)
