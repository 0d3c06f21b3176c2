"""One training with one seed, judged and kept."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import vprop
from vprop.files import replacing
from vprop.lab.deep import draws, predictions
from vprop.lab.deep.contenders import BY_NAME, DeepContender
from vprop.lab.deep.predictions import Averaged, Forward
from vprop.lab.deep.scores import diagram, score_labels, score_outliers
from vprop.lab.deep.snapshots import Snapshots
from vprop.lab.deep.swag import SWAG
from vprop.lab.deep.tasks import DeepTask, Part
from vprop.lab.deep.training import Trainer, cosine_cycles, cosine_then_constant, one_cycle
from vprop.lab.deep.unfinished import Unfinished
from vprop.lab.deep.workloads import How, TextWork, Workload, pretrained_path, workload
from vprop.lab.engine import sources
from vprop.lab.engine.job import Job
from vprop.lab.engine.store import finite_or_none
from vprop.optim.cycles import cycle_ends

OUTSIDE = ("dropout", "swa_lr", "cycles", "first")
"""Of a setting, what is not an argument of the optimizer."""


class OutOfTime(Exception):
    """A run was told to stop before it was finished."""


@dataclass(frozen=True)
class DeepJob(Job):
    """A job that is kept under its name and what was asked for.

    Unlike in the other comparisons a change of the code does not throw it away: hours of a GPU are too much for a
    comment. The state of the library is written down instead, and results that mix several say so.
    """

    task: DeepTask
    contender: str
    setting: tuple[tuple[str, float], ...]
    how: How = field(default_factory=How, kw_only=True)

    @property
    def identity(self) -> dict[str, Any]:
        """Without what does not decide the outcome."""
        return {name: value for name, value in super().identity.items() if name != "how"}

    @property
    def label(self) -> str:
        """What it is, for the name of its file."""
        return f"cost-{self.contender}-{spelled(self.setting)}"

    @property
    def key(self) -> str:
        """Readable, with a short hash of all that was asked for."""
        digest = hashlib.sha256(json.dumps(_deciding(self.identity), sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.task.name}/{self.label}-{digest}"


_DECIDES_NOTHING = ("how", "data_dir", "title", "tuned_on", "timed_on")


def _deciding(asked: dict[str, Any]) -> dict[str, Any]:
    """Without what does not change the outcome: how it runs, what people read, where settings and times are from."""
    kept = {name: value for name, value in asked.items() if name not in _DECIDES_NOTHING}
    return {name: _deciding(value) if isinstance(value, dict) else value for name, value in kept.items()}


def spelled(setting: tuple[tuple[str, float], ...]) -> str:
    """A setting in a file's name.

    >>> spelled((("lr", 0.1), ("weight_decay", 5e-4)))
    'lr0.1-weight_decay0.0005'
    """
    return "-".join(f"{name}{value:g}" for name, value in setting)


@dataclass(frozen=True)
class DeepRun(DeepJob):
    """All that decides a run."""

    seed: int
    part: Part

    @property
    def label(self) -> str:
        """What it is, for the name of its file."""
        return f"{self.part}-{self.contender}-{spelled(self.setting)}-seed{self.seed}"

    @property
    def share(self) -> float:
        """How long it is, of a whole training."""
        return self.task.tuning_share if self.part == "tuning" else 1.0

    @property
    def effort(self) -> float:
        """Gradients, as far as they are known without the data."""
        return self.share * (self.task.epochs or self.task.steps)

    def compute(self) -> dict[str, Any]:
        """Train, predict, judge, keep."""
        with warnings.catch_warnings(), torch.random.fork_rng(enabled=self.how.device == "cpu", devices=[]):
            warnings.simplefilter("ignore", RuntimeWarning)  # a diverging run says so by its scores
            torch.manual_seed(self.seed)
            try:
                with self.how.at_speed():
                    return self._compute()
            finally:
                gc.collect()
                if self.how.device.startswith("cuda"):
                    torch.cuda.empty_cache()

    def _compute(self) -> dict[str, Any]:
        work = workload(self.task, self.part, self.data_dir, self.how)
        contender, setting = BY_NAME[self.contender], dict(self.setting)
        model = work.model(setting.get("dropout", 0.0))
        optimizer = make_optimizer(contender, setting, model, work, self.seed, self.how)
        started = time.perf_counter()
        trained = train(self, contender, setting, work, model, optimizer)
        trained_for = time.perf_counter() - started
        started = time.perf_counter()
        judged = self._judge(work, contender, model, optimizer, trained)
        return {
            "steps": trained.steps,
            "train_seconds": round(trained_for, 2),
            "predict_seconds": round(time.perf_counter() - started, 2),
            "code": sources.core(),
            **judged,
        }

    def _judge(
        self, work: Workload, contender: DeepContender, model: nn.Module, optimizer: Optimizer, trained: Trained
    ) -> dict[str, Any]:
        sets, labels = {"test": work.test, **work.outliers}, {"test": work.labels}
        count = max(1, self.task.samples // 4) if self.part == "tuning" else self.task.samples
        options = (sets, labels, work.rows, self.how.autocast)
        statistics = draws.Statistics(trained.batches, self.how.autocast)
        model.eval()
        if trained.swag is not None:
            trained.swag.write_mean()
            statistics.write(model)
        at_mean = predictions.averaged([model], *options)
        drawn = self._draws(contender, model, optimizer, trained, count, statistics)
        over_draws = predictions.averaged_by_kind(drawn, *options)
        if self.part == "final":
            self._keep(work, model, contender, {draws.MEAN: at_mean} | over_draws)
        return judgement(at_mean, over_draws, work.labels) | {"sigma": median_sigma(optimizer, model)}

    def _draws(
        self,
        contender: DeepContender,
        model: nn.Module,
        optimizer: Optimizer,
        trained: Trained,
        count: int,
        statistics: draws.Statistics,
    ) -> Iterable[tuple[str, Forward]]:
        if contender.kind == "networks":
            return draws.of_one_kind(trained.snapshots.networks())
        if contender.kind == "posterior":
            drops = dict(self.setting).get("dropout", 0.0) > 0
            snapshots = trained.snapshots
            drawn = snapshots.draws(count) if snapshots.posteriors else draws.posterior(optimizer, model, count)
            return draws.of_all_kinds(drawn, statistics, dropout=drops)
        if contender.kind == "dropout":
            return draws.of_one_kind(draws.dropout(model, count))
        if contender.kind == "peer":
            return draws.of_all_kinds(draws.peer(optimizer, model, count), statistics)
        return () if trained.swag is None else draws.of_one_kind(draws.swag(trained.swag, count, statistics))

    def _keep(
        self,
        work: Workload,
        model: nn.Module,
        contender: DeepContender,
        by_kind: dict[str, dict[str, Averaged]],
    ) -> None:
        save = predictions.save_images if self.task.of_images else predictions.save_text
        save(predictions_path(self), by_kind, work.labels)
        if contender.kind == "point" and self.task.of_images:
            save_weights(model, weights_path(self))


def predictions_path(run: DeepJob) -> Any:
    """Of the run that has this key."""
    return run.how.out / "predictions" / f"{run.key}.npz"


def weights_path(run: DeepJob) -> Any:
    """Of the run that has this key, if it is one of a plain network."""
    return run.how.out / "weights" / f"{run.key}.pt"


def judgement(
    at_mean: dict[str, Averaged], over_draws: dict[str, dict[str, Averaged]], labels: Tensor
) -> dict[str, Any]:
    """All scores of a run, at the mean and averaged over the draws of each kind."""
    order = (draws.OWN, draws.RUNNING, draws.UNMASKED)
    kinds = {draws.MEAN: at_mean} | {kind: over_draws[kind] for kind in order if kind in over_draws}
    by_draws = over_draws[draws.OWN]["test"].nll_by_draws if draws.OWN in over_draws else {}
    return {
        "scores": {kind: score_labels(sets["test"].probs, labels) for kind, sets in kinds.items()},
        "outliers": {
            kind: {name: score_outliers(sets["test"], one) for name, one in sets.items() if name != "test"}
            for kind, sets in kinds.items()
        },
        "diagrams": {kind: diagram(sets["test"].probs, labels) for kind, sets in kinds.items()},
        "nll_by_draws": {str(count): finite_or_none(loss) for count, loss in by_draws.items()},
    }


def make_optimizer(
    contender: DeepContender, setting: dict[str, float], model: nn.Module, work: Workload, seed: int, how: How
) -> Optimizer:
    """Over what is trained of the model."""
    facts: dict[str, Any] = {"num_data": work.num_data, "batch_size": work.batch, "seed": seed}
    if how.device.startswith("cuda"):
        facts["capturable"] = True
    arguments = {name: value for name, value in setting.items() if name not in OUTSIDE}
    assert contender.make is not None
    return contender.make(contender.groups(model), facts, **arguments)


@dataclass(eq=False)
class Trained:
    """What is left of a training beside model and optimizer."""

    steps: int
    last_inputs: Tensor
    snapshots: Snapshots
    swag: SWAG | None = None

    def batches(self) -> Iterator[Tensor]:
        """Of the last epoch, as it was trained on, for statistics of BatchNorm."""
        return statistics_batches(self.last_inputs)


def statistics_batches(x: Tensor) -> Iterator[Tensor]:
    """Inputs that the statistics of BatchNorm are estimated from: at most 10,000."""
    return iter(x[:10_000].split(500))


def train(
    run: DeepRun,
    contender: DeepContender,
    setting: dict[str, float],
    work: Workload,
    model: nn.Module,
    optimizer: Optimizer,
) -> Trained:
    """All steps of the budget, or those that are left of it; if there is no time for them, what was done is kept."""
    steps = max(1, work.steps(run.share) // contender.gradients)
    generator = torch.Generator(work.test.device).manual_seed(run.seed)
    swag = SWAG(model) if contender.kind == "swag" else None
    ends = ends_of_cycles(setting, steps, work.steps_of_a_chunk)
    rates = make_rates(setting, optimizer, steps, ends)
    snapshots = Snapshots(model, optimizer, ends)
    kept = Unfinished(run.how.out / "unfinished" / f"{run.key}.pt", model, optimizer, generator, snapshots, swag)
    # Other packages may forget how many steps they made.
    first = kept.load() if contender.kind != "peer" else 0
    trainer = make_trainer(contender, work, model, optimizer, rates, run.how, first)
    # The last quarter is at a constant step size; a training of a few epochs has to begin earlier to have two weights.
    collecting_from = 0.75 * steps if steps * work.batch >= 8 * work.num_data else 0.5 * steps
    for x, y in work.chunks(generator):
        trainer.run_epoch(x, y)
        snapshots.take(trainer.steps_done)
        if swag is not None and trainer.steps_done >= collecting_from:
            swag.collect()
        if trainer.steps_done >= steps:
            kept.forget()
            return Trained(trainer.steps_done, x, snapshots, swag)
        if run.how.stop_at is not None and now() > run.how.stop_at:
            kept.save(trainer.steps_done)
            raise OutOfTime(run.key)
    raise AssertionError("chunks have no end")


def now() -> float:
    """Seconds since 1970."""
    return time.time()


def ends_of_cycles(setting: dict[str, float], steps: int, chunk: int) -> tuple[int, ...]:
    """After how many steps each cycle is over, if the setting asks for cycles: after whole chunks, but for the last."""
    if "cycles" not in setting:
        return ()
    ends = cycle_ends(-(-steps // chunk), int(setting["cycles"]), setting["first"])
    return (*(end * chunk for end in ends[:-1]), steps)


def make_rates(setting: dict[str, float], optimizer: Optimizer, steps: int, ends: tuple[int, ...] = ()) -> Tensor:
    """A warm-up over a twentieth of the steps and a cosine to zero; for SWAG to a step size that stays.

    With ``ends`` the same in every cycle.
    """
    peak = float(optimizer.param_groups[0]["lr"])
    if ends:
        return cosine_cycles(peak, ends)
    return cosine_then_constant(peak, setting["swa_lr"], steps) if "swa_lr" in setting else one_cycle(peak, steps)


def make_trainer(
    contender: DeepContender,
    work: Workload,
    model: nn.Module,
    optimizer: Optimizer,
    rates: Tensor,
    how: How,
    first_step: int = 0,
) -> Trainer:
    """As fast as the device allows."""
    forward = torch.compile(model) if "compile" in how.fast else None
    capture = contender.captured and "without-graphs" not in how.fast
    half = True if "bfloat16" in how.fast else None
    options = {"loss": work.loss, "forward": forward, "capture": capture, "autocast": half, "first_step": first_step}
    return Trainer(model, optimizer, rates, work.batch, **options)  # type: ignore[arg-type]


def median_sigma(optimizer: Optimizer, model: nn.Module) -> float | None:
    """Over the weights that have a posterior: how wide it is."""
    if not isinstance(optimizer, vprop.VariationalOptimizer):
        return None
    variance = torch.cat([one.flatten() for one in optimizer.posterior(model).variance.values()])
    median = float(variance.float().median())
    return finite_or_none(math.sqrt(median) if median >= 0 else None)


def save_weights(model: nn.Module, path: Any) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        torch.save({name: tensor.cpu() for name, tensor in model.state_dict().items()}, part)


@dataclass(frozen=True)
class Pretraining(DeepJob):
    """The network that adapters are for: AdamW on another text."""

    @property
    def label(self) -> str:
        """What it is, for the name of its file."""
        return "pretraining"

    def compute(self) -> dict[str, Any]:
        """Train and keep the weights; how good it is on its own text is the result."""
        with torch.random.fork_rng(enabled=self.how.device == "cpu", devices=[]):
            torch.manual_seed(0)
            work = TextWork(self.task, "final", self.data_dir, self.how, self.task.pretraining)
            contender, setting, model = BY_NAME[self.contender], dict(self.setting), work.model(0.0)
            optimizer = make_optimizer(contender, setting, model, work, 0, self.how)
            steps = self.task.pretraining_steps
            rates = make_rates(setting, optimizer, steps)
            trainer = make_trainer(contender, work, model, optimizer, rates, self.how)
            for x, y in work.chunks(torch.Generator(work.test.device).manual_seed(0)):
                trainer.run_epoch(x, y)
                if trainer.steps_done >= steps:
                    break
            save_weights(model, pretrained_path(self.task, self.how))
            found = predictions.averaged([model.eval()], {"test": work.test}, {}, work.rows, self.how.autocast)
            return {"nll": finite_or_none(predictions.log_loss(found["test"].probs, work.labels))}
