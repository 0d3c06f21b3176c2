"""Results that no run gave, and what a page made of them holds."""

from __future__ import annotations

import math
from html.parser import HTMLParser

from vprop.lab.report import page
from vprop.lab.report.schema import without_infinities
from vprop.lab.report.style import Styles

NASTY = "</script><script>alert('x')</script> & \"quotes\" $title"
ENVIRONMENT = {"vprop": "0.0", "torch": "2.6", "cuda": None}
PASSES = [0, 1, 2, 5, 10, 20, 50, 100]
EXACT = -600.0
CURVES = ["rmsprop", "bbvi", "vprop-2", "vprop-2-centered", "vogn"]  # the order of the legend
PANELS = ["logreg-toy-full", "logreg-toy-8"]


def method(name, label, group, gap, *, elbo=True, diverges=False):
    mean = [EXACT - gap - 500 * math.exp(-passes / 5) for passes in PASSES]
    log_loss = [0.3 + 0.4 * math.exp(-passes / 5) for passes in PASSES]
    if diverges:
        mean[4:] = [-1e5, -1e9, None, None]
        log_loss[4:] = [1e3, 1e6, None, None]
    spread = [None if value is None else 3.0 for value in mean]
    return {
        "name": name,
        "label": label,
        "group": group,
        "samples": 2,
        "grid": [
            {"lr": lr, "beta2": b, "score": None if lr == 1.0 else -620.0 - b} for lr in (0.1, 1.0) for b in (0.9, 0.99)
        ],
        "chosen": {"lr": 0.1, "beta2": 0.9},
        "score_name": "training ELBO",
        "seeds": [0, 1, 2],
        "passes": PASSES,
        "paper_passes": [passes / 2 for passes in PASSES],
        "elbo": {"mean": mean, "std": spread, "standard_error": [0.25] * len(PASSES)} if elbo else None,
        "log_loss": {"mean": log_loss, "std": [0.01] * len(PASSES)},
        "seconds": 1.5,
    }


def panel(identifier, batch, lines):
    return {
        "id": identifier,
        "title": f"toy, {batch} <batch>",
        "data": "toy",
        "batch": batch,
        "num_data": 1000,
        "num_parameters": 10,
        "prior_precision": 2.5,
        "lines": lines,
        "methods": [
            method("vprop-2", "Vprop-2", "paper", 30.0),
            method("vogn", "VOGN <b>&</b>", "extra", 5.0),
            method("vprop-2-centered", "Vprop-2, centred", "ours", 2.0),
            method("bbvi", "BBVI", "paper", 100.0, diverges=True),
            method("rmsprop", "RMSprop", "paper", 0.0, elbo=False),
        ],
    }


def header(name, title):
    settings = {"seeds": [0, 1, 2], "quick": True, "nasty": NASTY}
    common = {"experiment": name, "title": title, "description": f"What {title} shows: a < b.", "notes": [NASTY]}
    return common | {"environment": dict(ENVIRONMENT), "settings": settings}


def demo():
    """What `vprop demo` writes, in miniature."""
    diagram = {"confidence": [0.5, 0.9], "accuracy": [0.4, 0.9], "share": [0.2, 0.8]}
    scores = {"accuracy": 0.9, "log_loss": 0.2, "expected_calibration_error": 0.02, "mean_confidence_on_noise": 0.8}
    scores["reliability"] = diagram
    grid = [-1.0, 0.0, 1.0]
    regression = {"grid": grid, "mean": grid, "truth": grid, "x": [0.0], "y": [0.0], "networks": 1}
    return {
        "regression": regression | {"epistemic_std": [1.0, 0.1, 1.0], "total_std": [1.1, 0.2, 1.1]},
        "digits": {"test": 10, "splits": 1, "methods": {"Adam": scores, "Vario": scores | {"log_loss": 0.1}}},
    }


def make_results():
    lines = [
        {"label": "exact VI, diagonal", "metric": "elbo", "value": EXACT},
        {"label": "exact VI, diagonal", "metric": "log_loss", "value": 0.29},
    ]
    axis = [-2.0, -1.0, 0.0, 1.0, 2.0]
    tensors = "mean & <variance>"
    return {
        "logreg": header("logreg", "Logistic regression")
        | {"panels": [panel(PANELS[0], "full", lines), panel(PANELS[1], 8, [])]},
        "explore": header("explore", "Exploration")
        | {
            "surface": {"x": axis, "y": axis, "value": [[x * x + y * y for x in axis] for y in axis]},
            "minima": [
                {"x": 0, "y": 0, "value": 0.0, "label": "global minimum"},
                {"x": 1, "y": 1, "value": 2.0, "label": "near minimum"},
            ],
            "start": [-2, -2],
            "trajectories": [
                {"label": "Vprop-2", "points": [[-2, -2], [-1, -1], [0, 0]], "success": True},
                {"label": "Vprop-2", "points": [[-2, -2], [0, -1], [1, 1]], "success": False},
                {"label": "Newton", "points": [[-2, -2], [1, 1]], "success": False},
            ],
            "success": [
                {"label": "Newton", "rate": 0.0, "low": 0.0, "high": 0.1, "seeds": 20},
                {"label": "Vprop-2", "rate": 0.5, "low": 0.3, "high": 0.7, "seeds": 20},
            ],
        },
        "memory": header("memory", "Memory")
        | {
            "rows": [
                {"label": "RMSprop", "bytes_per_parameter": 4.0, "tensors": tensors, "group": "paper"},
                {"label": "Vprop-2, centred", "bytes_per_parameter": 8.0, "tensors": tensors, "group": "ours"},
            ]
        },
        "demo": demo(),
        "claims": {
            "claims": [
                {
                    "id": "1",
                    "sentence": NASTY,
                    "verdict": "holds in part",
                    "share": "1 of 2 comparisons",
                    "measured": "a < b & c",
                    "rule": 'gap < "5"',
                    "checks": [{"text": "here", "holds": True}, {"text": "there", "holds": False}],
                },
                {
                    "id": "2",
                    "sentence": "It is fast.",
                    "verdict": "not measured",
                    "share": "not measured",
                    "measured": "",
                    "rule": "",
                },
            ]
        },
    }


def rendered(results):
    """The page alone, without static figures."""
    return page.render(without_infinities(results), Styles(results), pictures={})


class Elements(HTMLParser):
    """Every start tag of a page, and its text outside scripts and styles."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self._open = [], "", ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data):
        if self._open not in ("script", "style"):
            self.text += data
