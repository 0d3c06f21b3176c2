"""The page of the deep networks: how it was done, and tables between markers, so that every number is from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vprop.lab import markdown
from vprop.lab.deep.table import own_kind, section, summary
from vprop.lab.deep.tasks import BY_NAME
from vprop.lab.engine.store import read_results

Results = dict[str, dict[str, Any]]

OPENING = """# Deep networks

Networks that people know, trained by what people use and by this library: accuracy, log-loss (NLL), calibration,
outliers, cost. `vprop compare deep` makes every number here, in `docs/deep/results/`; `vprop compare deep table
--page docs/deep.md` draws this page from them. Rows of this library are in bold.
In this first table, the best is who has the smallest NLL on the test data.

<!-- deep: summary -->
<!-- end -->

## How it was done

- **Tasks and contenders** are two lists that can be read: `src/vprop/lab/deep/tasks.py` and `contenders.py`.
- **Equal budgets.** All contenders of a task evaluate the same number of mini-batch gradients, on batches in the same
  orders. The step size warms up over a twentieth of the steps and falls along a cosine to zero. SWAG's stays at a
  constant for the last quarter, which its weights are collected in, one at the end of every epoch. "In cycles" that
  schedule is run through several times within the same number of steps, the first time in the share "first" of them;
  predictions are averaged over the networks at the ends of all cycles, or over draws from their posteriors in turn, and
  "the last mean" is the last network alone.
- **Settings** are chosen by the NLL (of averaged predictions, where a contender averages) on the last part of the
  training data, which tuning runs do not train on, with a seed that is not reported. Test data are not looked at.
  Every contender has a grid of one to four settings; what was chosen is in the last column, the grids with their
  losses are in the results. Tuning runs are as long as the others, of Fashion-MNIST, FilterResponseNorm and books half
  as long. In the same way it is chosen which statistics of BatchNorm draws have, their own or the running ones: the
  first table and the plots of scores and reliability show that kind, and mixtures predict with it; the tables of scores
  and outliers show both. The log-loss by the number of draws is with their own.
- **Predictions** are made at the mean of the weights, and averaged over draws: of the posterior, of dropout masks, of
  SWAG's Gaussian. Probabilities are averaged, not logits. A draw of the weights has statistics of BatchNorm of its own,
  from 10,000 training images; rows with "running statistics" are the same draws without them. "SGD with new statistics"
  is SGD's network with those of as many, of another epoch, under its last weights. Dropout masks, and draws of the last
  layer alone, keep the running ones. Of a network that was trained with dropout, "draws with masks" are draws of the
  weights and of masks, "no masks" the same draws without; where there is no such row, draws of a posterior are without
  masks.
- **Ensembles and mixtures** are means of the probabilities of runs with different seeds. An ensemble's members
  predict with their weights, or with dropout masks ("draws of all"), a mixture's with draws from their posteriors. A
  group costs as many trainings as it has members.
- **Scores.** NLL in nats. ECE in 15 bins of equal width. Brier score as a sum over classes. Outliers are told by the
  entropy of the averaged probabilities, and by the mutual information of label and weights; FPR95 is the share of
  outliers that pass when 95 % of the test data do.
- **Training on a GPU** is in bfloat16 (autocast), predictions in float16 with float64 sums. A step is one CUDA graph.
  Several runs go side by side, except those that are timed.
  A CPU trains in float32, or in bfloat16 if it is asked to (`--fast bfloat16`), and predicts in float32.
"""


def load_results(folder: Path) -> Results:
    """The results of all tasks in ``folder``, by name, in the order of the list of tasks."""
    found = read_results(folder, "vprop compare deep", section)
    places = {name: place for place, name in enumerate(BY_NAME)}
    return {name: found[name] for name in sorted(found, key=lambda name: places.get(name, len(places)))}


def new_page(results: Results, figures: Path) -> str:
    """A page with a place for every task that there are results of."""
    return filled(OPENING, results, figures)


def filled(text: str, results: Results, figures: Path) -> str:
    """``text`` with its places drawn anew, and places at its end for tasks that had none."""
    for name in results:
        if name not in markdown.places(text, "deep"):
            text += f"\n## {results[name]['title']}\n\n<!-- deep: {name} -->\n<!-- end -->\n"

    def draw(name: str) -> str:
        if name == "summary":
            return summary(results.values())
        if name not in results:
            return "*Not run yet.*\n"
        images = "".join(f"![{kind}]({figures}/{name}-{kind}.png)\n" for kind in plots_of(results[name]))
        return f"{section(results[name])}\n{images}"

    return markdown.filled(text, "deep", draw)


def plots_of(result: dict[str, Any]) -> list[str]:
    """The plots that there are figures for."""
    rows = result["contenders"]
    there = {
        "scores": True,
        "reliability": any(row["diagrams"][own_kind(row)] for row in rows),
        "draws": any(row["nll_by_draws"] for row in rows),
        "time": any(row["cost"] for row in rows),
    }
    return [name for name, is_there in there.items() if is_there]
