"""`vprop reproduce`: the experiments, their results as JSON, and the report."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding

from vprop.files import write_text
from vprop.lab.data import DATASETS, DataError, DataNotFound, load
from vprop.lab.engine.pool import Pool
from vprop.lab.engine.request import Request
from vprop.lab.engine.store import read_json, write_json
from vprop.lab.errors import UsageError
from vprop.lab.experiments.claims import claims
from vprop.lab.experiments.curves import Figures, draw_figures
from vprop.lab.experiments.explore import explore
from vprop.lab.experiments.filter import filters
from vprop.lab.experiments.memory import memory
from vprop.lab.experiments.methods import BY_NAME
from vprop.lab.markdown import filled, table

PAPER_DATA = ("australian", "a1a")
SHIPPED_DATA = ("breast_cancer",)
LONG_METHODS = ("cvi-10", "vogn-10", "von-10", "vprop-2", "vprop-2-centered", "vong-2-centered")
LEFT_OUT = ("vong-2", "vprop-2-fisher", "bbvi-rmsprop", "bbvi-adam")
"""Left out of the figures unless asked for, so that they stay within minutes."""

COUNTING = (
    "Passes are counted fairly: a method that evaluates K gradients per step uses K passes, or with mini-batches their "
    "share of K passes. The button «as in the paper» counts every step once, whatever it evaluates. Second derivatives "
    "(CVI, VON) and per-example gradients (VOGN) come on top and are not counted; the seconds per run in the tables "
    "include them."
)


@dataclass
class PaperRequest(Request):
    """What the user asked for."""

    data: tuple[str, ...] = ()
    """Data sets by name; none for the paper's, or the shipped one where those cannot be found."""
    methods: tuple[str, ...] = ()
    seeds: int | None = None
    gradients: int | None = None
    notes: list[str] = field(default_factory=list)

    def pick(self, value: int | None, usual: int, short: int) -> int:
        """What was asked for, or the usual."""
        return value if value is not None else short if self.short else usual


def reproduce(experiments: tuple[str, ...], request: PaperRequest, console: Console) -> Path:
    """Run ``experiments``, write their results, and draw the report from all results that are there."""
    check(request, needs_data=any(name in WITH_DATA for name in experiments))
    for note in request.notes:
        console.print(f"Note: {note}", style="yellow", soft_wrap=True)
    pool = request.pool(console)
    for name in experiments:
        result = EXPERIMENTS[name](request, pool)
        write_json(request.results / f"{name}.json", result, indent=1)
    return report(request.out, console)


def report(out: Path, console: Console) -> Path:
    """The page, from results on disk: nothing is trained."""
    from vprop.lab.report import write_report
    from vprop.lab.report.schema import showing

    results = {}
    for name in EXPERIMENTS:
        path = out / "results" / f"{name}.json"
        if path.exists():
            with showing(name):
                results[name] = read_json(path, f"vprop reproduce {name}")
                results[name]["environment"]  # which every result has
    if not results:
        raise UsageError(f"There are no results in {out / 'results'}: run `vprop reproduce logreg --out {out}` first.")
    with showing("all"):
        decided = claims(results)
    write_json(out / "results" / "claims.json", decided, indent=1)
    shown = results | {"claims": decided}
    if (out / "demo.json").exists():  # the demo was run into the same folder
        shown["demo"] = read_json(out / "demo.json", "vprop demo")
    page = write_report(shown, out)
    _print_claims(decided, console)
    console.print(f"Report: {page}", soft_wrap=True)
    return page


def update_page(page: Path, out: Path) -> None:
    """A Markdown page: its table of claims, and the figures that it shows, from the report in ``out``."""
    try:
        words = page.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"Cannot read the page {page}: {error.strerror}.") from error
    decided = read_json(out / "results" / "claims.json", "vprop reproduce report")["claims"]
    rows = [(claim["sentence"], claim["share"], claim["measured"]) for claim in decided]
    drawn = table(("claim", "holds in", "what was found"), rows)
    write_text(page, filled(words, "claims", lambda _: drawn))
    for name in re.findall(r"\]\(([^)]*\.png)\)", words):
        figure = out / "report" / "figures" / Path(name).name
        if figure.exists():
            shutil.copyfile(figure, page.parent / name)


def check(request: PaperRequest, needs_data: bool = True) -> None:
    """Refuse what cannot work before anything is run, and settle which data are used."""
    request.methods, request.data = tuple(dict.fromkeys(request.methods)), tuple(dict.fromkeys(request.data))
    for name in request.methods:
        if name not in BY_NAME:
            raise UsageError(f"Unknown method {name!r}: must be one of {', '.join(BY_NAME)}.")
    at_least = {
        "seeds": (request.seeds, 1),
        # What one step of some method takes.
        "gradients": (request.gradients, max((BY_NAME[name].gradients for name in request.methods), default=10)),
    }
    for name, (value, least) in at_least.items():
        if value is not None and value < least:
            raise UsageError(f"Invalid --{name} {value}: must be at least {least}.")
    request.check()
    if needs_data:
        _settle_data(request)


def _settle_data(request: PaperRequest) -> None:
    if request.data or request.short:
        request.data = request.data or SHIPPED_DATA
        for name in request.data:
            _check_binary(name)
            load(name, request.data_dir)
        return
    try:
        for name in PAPER_DATA:
            load(name, request.data_dir)
        request.data = PAPER_DATA
    except DataNotFound as error:
        request.data = SHIPPED_DATA
        request.notes.append(
            "The paper's data were not found, so this run uses the breast cancer data that scikit-learn ships. "
            + str(error)
        )


def _check_binary(name: str) -> None:
    if name not in DATASETS:
        load(name)  # names the known ones
    if name not in (*PAPER_DATA, *SHIPPED_DATA):
        usable = ", ".join((*PAPER_DATA, *SHIPPED_DATA))
        raise DataError(f"The experiments need two classes, which {name!r} has not: choose from {usable}.")


def _methods(request: PaperRequest, experiment: str, left_out: tuple[str, ...] = ()) -> tuple[str, ...]:
    usable = [name for name in request.methods if experiment == "mlp" or "logreg" in BY_NAME[name].problems]
    if request.methods and not usable:
        raise UsageError(f"{', '.join(request.methods)} is for networks: use it with `vprop reproduce mlp`.")
    short = ("bbvi", "cvi-10", "vprop-2", "vprop-1", "vprop-0", "rmsprop", "vprop-2-centered", "vong-2-centered")
    if request.methods:
        return request.methods
    return short if request.short else tuple(name for name in BY_NAME if name not in left_out)


def _figures(request: PaperRequest, problem: str, passes: int, left_out: tuple[str, ...], points: int = 16) -> Figures:
    """The paper's: full batches and mini-batches; a look has full batches alone."""
    return Figures(
        problem=problem,
        data=request.data,
        batches=(None,) if request.short else (None, 32),
        seeds=request.pick(request.seeds, 3, 2),
        gradients=request.pick(request.gradients, passes, 200),
        methods=_methods(request, problem, left_out),
        data_dir=request.data_dir,
        points=points,
    )


def _logreg(request: PaperRequest, pool: Pool) -> dict[str, Any]:
    return draw_figures(_figures(request, "logreg", 600, ("vogn-10", *LEFT_OUT)), pool) | {
        "title": "Logistic regression",
        "description": "ELBO on the training data, by quadrature (left), and log-loss of the posterior predictive on "
        "the test data (right). The dashed lines are exact variational inference by L-BFGS, diagonal and full. "
        + COUNTING,
        "notes": request.notes,
    }


def _long(request: PaperRequest, pool: Pool) -> dict[str, Any]:
    figures = replace(
        _figures(request, "logreg", 4000, LEFT_OUT),
        data=("a1a" if "a1a" in request.data else request.data[0],),
        batches=(None,),
        seeds=1,
        gradients=request.pick(request.gradients, 4000, 400),
        methods=_methods(request, "long") if request.methods else LONG_METHODS,
        fixed={"lr": 0.1, "beta2": 0.98},
        decay=True,
        id_suffix="-long",
    )
    return draw_figures(figures, pool) | {
        "experiment": "long",
        "title": "Given time",
        "description": "Where the methods end up when they are run for long, one seed, one setting for all, the step "
        "falling to zero over the second half: how near the ground truth an estimator's own bias lets it come. "
        + COUNTING,
        "notes": request.notes,
    }


def _mlp(request: PaperRequest, pool: Pool) -> dict[str, Any]:
    return draw_figures(_figures(request, "mlp", 800, ("von-10", *LEFT_OUT), points=14), pool) | {
        "title": "A small network",
        "description": "Two hidden layers of ten tanh units, λ = 1. The ELBO is estimated with 100 weight samples, the "
        "same noise for every method; its standard error is in the tables. The test log-loss averages 32 samples. "
        + COUNTING,
        "notes": [
            *request.notes,
            "Full-covariance methods take part where the network has at most 500 weights. VON, whose Hessian of a "
            "network costs two gradients per weight, takes part only if asked for (--method von-10).",
        ],
    }


def _explore(request: PaperRequest, pool: Pool) -> dict[str, Any]:
    return explore(pool, request.pick(request.seeds, 40, 10))


def _filter(request: PaperRequest, pool: Pool) -> dict[str, Any]:
    data = "australian" if "australian" in request.data else request.data[0]
    result = filters(pool, data, request.pick(request.seeds, 5, 2), request.data_dir)
    return result | {"notes": [*request.notes, *result["notes"]]}


def _memory(request: PaperRequest, pool: Pool) -> dict[str, Any]:
    return memory()


WITH_DATA = ("logreg", "mlp", "long", "filter")

EXPERIMENTS: dict[str, Callable[[PaperRequest, Pool], dict[str, Any]]] = {
    "logreg": _logreg,
    "mlp": _mlp,
    "long": _long,
    "filter": _filter,
    "explore": _explore,
    "memory": _memory,
}


def _print_claims(decided: dict[str, Any], console: Console) -> None:
    """In words: where a claim holds only here and there, what differs is worth more than a colour."""
    measured = [claim for claim in decided["claims"] if claim["verdict"] != "not measured"]
    if measured:
        console.print("\nThe paper's claims", style="bold")
    for claim in measured:
        console.print(f"\n{claim['sentence']}", highlight=False)
        console.print(Padding(f"Holds in {claim['share']}. {claim['measured']}", (0, 0, 0, 4)), highlight=False)
    console.print()
    left = len(decided["claims"]) - len(measured)
    if left:
        console.print(f"Of the paper's claims {left} need other experiments: `vprop reproduce` runs them all.")
