"""Lightning: posterior averaging in validation, logs of the posterior, accumulation and 16-bit precision.

Works with ``lightning`` and with ``pytorch_lightning``, of version 2.2 or newer.
"""

from vprop.integrations.lightning.callback import PosteriorCallback

__all__ = ["PosteriorCallback"]
