"""What `vprop compare` does, task by task: results on disk after each, tables at the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vprop.files import write_text
from vprop.lab.comparison import nuts
from vprop.lab.comparison.page import load_results, new_page, places, with_tables
from vprop.lab.comparison.protocol import compare
from vprop.lab.comparison.tasks import FULL, SHORT, TableSpec, load_data
from vprop.lab.data import DataNotFound
from vprop.lab.engine.pool import Pool
from vprop.lab.engine.problem import fingerprint
from vprop.lab.engine.request import Request
from vprop.lab.engine.store import write_json
from vprop.lab.errors import UsageError


@dataclass
class ComparisonRequest(Request):
    """What the user asked for."""

    page: Path | None = None

    def specs(self, what: str) -> tuple[TableSpec, ...]:
        """The tasks that are meant."""
        problem = "logreg" if what == "nuts" else what
        return tuple(spec for spec in (SHORT if self.short else FULL) if problem in ("all", spec.problem))


def run(what: str, request: ComparisonRequest, console: Console) -> Path:
    """Run what was asked for, and draw the tables of all results that are there."""
    if request.page is not None and not request.page.is_file():
        raise UsageError(f"There is no page {request.page}: leave out --page, and OUT/tables.md is written.")
    if request.page is not None and not places(request.page.read_text(encoding="utf-8")):
        raise UsageError(
            f"{request.page} has no place for a table: mark one with `<!-- table: a1a -->` and `<!-- end -->`."
        )
    if what != "table":
        _prepare(what, request)
        pool = request.pool(console)
        for spec in request.specs("nuts") if what in ("nuts", "all") else ():
            if what == "nuts" or _should_sample(spec, request, console):
                _sample(spec, request, pool)
        if what == "nuts":
            console.print(f"Results: {request.results}. `vprop compare logreg` holds the methods against them.")
            return request.results
        for spec in request.specs(what):
            result = compare(spec, pool, request.data_dir, request.results)
            write_json(request.results / f"{spec.name}.json", _command(what, request) | result, indent=1)
    return draw(request, console)


def draw(request: ComparisonRequest, console: Console) -> Path:
    """The tables, from results on disk: nothing is trained."""
    results = load_results(request.results)
    if not results:
        raise UsageError(
            f"There are no results in {request.results}: run `vprop compare logreg --out {request.out}` first."
        )
    if request.page is None:
        target, text = request.out / "tables.md", new_page(results)
    else:
        target = request.page
        text = with_tables(target.read_text(encoding="utf-8"), results)
    write_text(target, text)
    console.print(f"Tables: {target}", soft_wrap=True)
    return target


def _prepare(what: str, request: ComparisonRequest) -> None:
    """Refuse what cannot work before anything is run."""
    if what == "nuts":
        nuts.require()
    request.check()
    try:
        for spec in request.specs(what):
            load_data(spec, request.data_dir)
    except DataNotFound as error:
        raise UsageError(f"{error} With --short no file is needed.") from error


def _should_sample(spec: TableSpec, request: ComparisonRequest, console: Console) -> bool:
    """Whether it was not done before and can be done here; `all` does without it otherwise."""
    if nuts.load(request.results, spec, _fingerprint(spec, request)) is not None:
        return False
    if not nuts.installed():
        note = f"Note: {spec.name} without NUTS, which needs NumPyro: pip install numpyro"
        console.print(note, style="yellow", soft_wrap=True, markup=False)
    return nuts.installed()


def _fingerprint(spec: TableSpec, request: ComparisonRequest) -> str:
    return fingerprint(load_data(spec, request.data_dir))


def _sample(spec: TableSpec, request: ComparisonRequest, pool: Pool) -> None:
    little = {"warmup": 50, "draws": 50} if request.short else {}
    job = nuts.Sampling(spec, _fingerprint(spec, request), data_dir=request.data_dir, **little)
    result = pool.run_all(f"{spec.name}: NUTS", [job])[job.key]
    del result["job"]
    if not request.short:
        nuts.check(result)
    write_json(request.results / f"nuts-{spec.name}.json", _command("nuts", request) | result, indent=1)


def _command(what: str, request: ComparisonRequest) -> dict[str, Any]:
    return {"command": f"vprop compare {what}" + (" --short" if request.short else "")}
