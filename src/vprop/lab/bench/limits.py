"""The least that an operation must move through memory, in bytes per float32 parameter.

Every tensor that goes in is read once and every one that comes out is written once, 4 bytes each; noise is made in
registers, so it is free.

| operation | reads | writes | bytes |
| --- | --- | --- | --- |
| sample | μ, h | θ | 12 |
| restore: the mean back | θ, h | μ | 12 |
| step, taking the sample out | θ, ĝ, h | μ, h | 20 |
| momentum, in a step | m | m | + 8 |
| from + to − of an antithetic pair | θ₊, h | θ₋ | 12 |
| step of a pair | θ₋, ĝ₊, ĝ₋, h | μ, h | 24 |
| SGD | θ, ĝ | θ | 12 |
| RMSprop | θ, ĝ, v | θ, v | 20 |
| AdamW | θ, ĝ, m, v | θ, m, v | 28 |

With a closure, and with an attached model, the step itself may take the sample out. After a ``sampled_params()``
block the weights are the mean again, as promised, so this loop pays for a restore: 44 bytes where the others pay 32.
"""

from __future__ import annotations

SAMPLE = RESTORE = FLIP = 12
STEP = 20
PAIR_STEP = 24
MOMENTUM = 8
TORCH = {"SGD": 12, "RMSprop": 20, "AdamW": 28}


def loop_bytes(loop: str, *, momentum: bool = False, pair: bool = False) -> int:
    """Of one step of training, sampling included, in one of the loops; or of a part of it.

    >>> [loop_bytes(loop) for loop in ("closure", "context", "attach", "sample", "restore", "step")]
    [32, 44, 32, 12, 12, 20]
    >>> loop_bytes("closure", momentum=True), loop_bytes("closure", pair=True), loop_bytes("context", pair=True)
    (40, 48, 72)
    """
    step = (PAIR_STEP if pair else STEP) + MOMENTUM * momentum
    parts = {"sample": SAMPLE, "restore": RESTORE, "step": step}
    if loop in parts:
        return parts[loop]
    if loop == "context":
        return (2 if pair else 1) * (SAMPLE + RESTORE) + step
    return SAMPLE + FLIP * pair + step
