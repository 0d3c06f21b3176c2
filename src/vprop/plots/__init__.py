"""Pictures, with matplotlib (``pip install matplotlib``).

:mod:`vprop.plots.scores` draws what :mod:`vprop.metrics` measures; its functions are here, too. Each draws into the
``axes`` it is given, or into new ones, and returns them. :mod:`vprop.plots.style` is how all pictures of this project
look: ``with vprop.plots.style.pictures():`` gives yours the same.
"""

from vprop.plots import style
from vprop.plots.scores import outliers, reliability, risk_coverage

__all__ = ["outliers", "reliability", "risk_coverage", "style"]
