"""Matrices that tests of rotations need, from a seed."""

import torch

DOUBLE = torch.float64


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def orthogonal(size, seed=0):
    return torch.linalg.qr(random(size, size, seed=seed)).Q.contiguous()
