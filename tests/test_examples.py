"""Every example runs in its short mode, prints what it promises, and is short to read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import ENVIRONMENT, LIMIT, Said, run_program

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]


def without_warnings(said: Said) -> str:
    """What is printed, if it holds no warning of ours."""
    # Python prints the file that a warning is about: one of ours, or the example's own line that called us.
    assert not re.search(r"(vprop|examples)/\S+:\d+: \w*Warning", said.stderr), said.stderr
    return said.stdout


def output_of(script: str, *arguments: str, logs: Path) -> str:
    """What an example prints in its short mode, without a network and without a GPU."""
    ranks = 2 if script == "torchrun.py" else None
    said = run_program(EXAMPLES / script, *arguments, "--short", cwd=EXAMPLES.parent, logs=logs, ranks=ranks)
    return without_warnings(said)


def numbers_after(label: str, output: str) -> list[float]:
    """The decimal numbers on the first line that begins with ``label``."""
    line = next((line for line in output.splitlines() if line.strip().startswith(label)), None)
    assert line is not None, f"no line begins with {label!r} in:\n{output}"
    return [float(number) for number in re.findall(r"-?\d+\.\d+", line)]


# -- what must be in the output ------------------------------------------------------------------------------


def learns_and_knows_what_it_does_not_know(output):
    assert numbers_after("accuracy", output)[0] > 0.8  # 0.1 is chance
    assert numbers_after("log-loss", output)[0] < 1.0  # 2.3 is chance
    assert numbers_after("calibration error", output)[0] < 0.2
    kinds = ("digits it gets right", "digits it gets wrong", "images of pure noise")
    right, wrong, noise = (numbers_after(kind, output)[0] for kind in kinds)
    assert right < min(wrong, noise)
    assert numbers_after("noise is told from digits", output)[0] > 0.8  # 0.5 is chance


def remembers_because_of_the_prior(output):
    without, with_prior = numbers_after("mean accuracy on the old tasks", output)
    assert without < 0.5
    assert with_prior > 0.8
    newest = [float(line.split()[-1]) for line in output.splitlines() if line.strip().startswith("after task")]
    assert len(newest) == 6
    assert min(newest) > 0.7  # new tasks are learned, too


def chooses_better_than_at_random(output):
    """The best of the ways, by its mean over three seeds after four rounds; a worse one may be there, and is shown."""
    at_random = numbers_after("random", output)[-2]
    assert numbers_after("variation ratio", output)[-2] > at_random + 0.02
    assert numbers_after("the same, drawn", output)[-2] > at_random


def is_calibrated_on_held_out_data(output):
    trained = numbers_after("as trained", output)
    for name in ("with the temperature", "with the variance scaled"):
        accuracy, log_loss, error = numbers_after(name, output)
        assert abs(accuracy - trained[0]) < 0.05
        assert log_loss < trained[1]
        assert error < trained[2]
    for level in (0.8, 0.9, 0.95):
        asked, covered, size = numbers_after(f"asked for {level:.2f}", output)
        # n = 400 and 997 test images: 4 standard errors, and a model that is right more often has more.
        assert covered > asked - 4 * (asked * (1 - asked) * (1 / 400 + 1 / 997)) ** 0.5
        assert 1 <= size < 6


def knows_its_errors_and_strange_inputs(output):
    everything, most, some, _, auroc, aupr, _ = numbers_after("entropy", output)
    assert some < most < everything
    assert min(auroc, aupr) > 0.8  # 0.5 is chance


def finds_most_of_the_wrong_labels(output):
    assert numbers_after("wrong among as many suspects", output)[0] > 0.7  # 0.06 is chance
    assert numbers_after("AUROC of loss_change", output)[0] > 0.95


def is_better_than_chance(output):
    """More than half are right, which is far from chance with ten classes, and more than chance with two."""
    found = [float(number) for number in re.findall(r"accuracy\D*?(\d?\.\d+)", output.lower())]
    assert found, output
    assert max(found) > 0.55


def reports_a_number(output):
    assert re.search(r"\d\.\d", output), output


def ways_to_predict_agree(output):
    ways = ("32 draws", "the same, summary", "linearized", "last layer, 32 draws", "last layer, linearized")
    losses = [numbers_after(way, output)[0] for way in ways]
    assert losses[0] == losses[1]
    assert max(losses) < 0.5  # 2.3 is chance
    assert max(losses) - min(losses) < 0.1
    assert 0.8 < numbers_after("intervals for 90 %", output)[0] < 0.98  # of 142 rows


CASES = [
    (["plain_loop.py"], learns_and_knows_what_it_does_not_know),
    (["lightning_trainer.py"], is_better_than_chance),
    (["huggingface_lora.py"], reports_a_number),
    (["torchrun.py", "--strategy", "ddp"], is_better_than_chance),
    (["torchrun.py", "--strategy", "fsdp"], is_better_than_chance),
    (["sklearn_estimators.py"], is_better_than_chance),
    (["continual_learning.py"], remembers_because_of_the_prior),
    (["active_learning.py"], chooses_better_than_at_random),
    (["calibrated_predictions.py"], is_calibrated_on_held_out_data),
    (["knowing_when_not_to_answer.py"], knows_its_errors_and_strange_inputs),
    (["flipped_labels.py"], finds_most_of_the_wrong_labels),
    (["predictions.py"], ways_to_predict_agree),
]
SCRIPTS = sorted({command[0] for command, _ in CASES})


@pytest.mark.parametrize(("command", "check"), CASES, ids=[" ".join(command) for command, _ in CASES])
def test_runs(command, check, tmp_path):
    picture = tmp_path / "picture.png"
    draws = "--plot" in (EXAMPLES / command[0]).read_text()
    check(output_of(*command, *(["--plot", str(picture)] if draws else []), logs=tmp_path))
    assert picture.exists() == draws


@pytest.mark.slow
@pytest.mark.parametrize(("command", "check"), CASES, ids=[" ".join(command) for command, _ in CASES])
def test_runs_as_typed(command, check):
    """In a process that has imported nothing, and under torchrun itself."""
    script, *arguments = command
    launch = [sys.executable, *(TORCHRUN if script == "torchrun.py" else []), f"examples/{script}"]
    done = subprocess.run(
        [*launch, *arguments, "--short"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        cwd=EXAMPLES.parent,
        env=os.environ | ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    check(without_warnings(Said(done.stdout, done.stderr)))


@pytest.mark.parametrize("script", SCRIPTS)
def test_is_short_and_named_in_the_readme(script):
    assert len((EXAMPLES / script).read_text().splitlines()) <= 80
    assert f"examples/{script}" in (EXAMPLES / "README.md").read_text()


def test_every_example_is_tested():
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == SCRIPTS
