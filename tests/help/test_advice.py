"""The advice of ``diagnose()``, followed to the letter: it never makes held-out predictions worse."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.help.following import TASKS, Task, is_no_worse
from vprop import CVI, IVON, VOGN, Objective, Vadam, Vario, Vprop

PAIRS = {"mc_samples": 2, "antithetic": True, "betas": (0.9, 0.999)}
SETTINGS = {
    "Vprop": (Vprop, {"lr": 0.3}),
    "Vprop, large lr": (Vprop, {"lr": 1.0}),
    "Vprop, centered": (Vprop, {"lr": 0.3, "centered": True} | PAIRS),
    "Vprop on mini-batches": (Vprop, {"lr": 0.1, "batch_size": 32, "init_steps": 0, "betas": (0.9, 0.999)}),
    "Vprop, clipped": (Vprop, {"lr": 0.3, "clip_radius": 0.01}),
    "Vprop, strong prior": (Vprop, {"lr": 0.3, "prior_precision": 100.0}),
    "Vprop, short average": (Vprop, {"lr": 0.3, "betas": (0.0, 0.975)}),
    "IVON": (IVON, {"lr": 0.3}),
    "IVON, pairs": (IVON, {"lr": 0.3} | PAIRS),
    "IVON, short average": (IVON, {"lr": 0.3} | PAIRS | {"betas": (0.9, 0.975)}),
    "Vario": (Vario, {"lr": 0.01, "batch_size": 32}),
    "Vario, much noise": (Vario, {"lr": 0.01, "batch_size": 32, "noise_limit": math.inf}),
    "Vario, large lr": (Vario, {"lr": 0.3, "batch_size": 32}),
    "Vadam": (Vadam, {"lr": 0.003}),
}
ONE_LAYER = {"CVI": (CVI, {"lr": 0.3}), "VOGN": (VOGN, {"lr": 0.3})}


def check(name, settings, seeds):
    """Each piece of advice by itself, and all of it together."""
    runs = [Task(name, seed).train(settings) for seed in seeds]
    before = [run.log_losses() for run in runs]
    diagnoses = [run.diagnose() for run in runs]
    texts = {finding.remedy for diagnosis in diagnoses for finding in diagnosis}
    assert not any(words in text for text in texts for words in ("ower prior", "aise prior", "temperature"))
    choices = {tuple(f.symptom for f in diagnosis if f.advice) for diagnosis in diagnoses}
    symptoms = {symptom for choice in choices for symptom in choice}
    print(f"{name}: log-loss {sum(float(b.mean()) for b in before) / len(before):.3f}, found {sorted(symptoms)}")
    tried = {}
    for chosen in [*([symptom] for symptom in sorted(symptoms)), sorted(symptoms)]:
        advised = []
        for run, diagnosis, losses in zip(runs, diagnoses, before, strict=True):
            findings = [f for f in diagnosis if f.advice and f.symptom in chosen]
            key = (run.task.seed, str([f.advice for f in findings]))
            if key not in tried:
                tried[key] = run.follow(findings).log_losses() if findings else losses
            advised.append(tried[key])
        reached = sum(float(a.mean()) for a in advised) / len(advised)
        print(f"  {', '.join(chosen) or 'nothing'}: {reached:.3f}")
        assert is_no_worse(before, advised), f"{chosen}: {reached}"


@pytest.mark.parametrize("name", ["logistic_regression", "mlp"])
def test_of_the_documented_recipe(name):
    check(name, SETTINGS["Vprop"], seeds=[0])


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", TASKS)
def test_it_never_makes_predictions_worse(name, settings):
    check(name, settings, seeds=[0] if name == "Transformer" else [0, 1, 2])


@pytest.mark.slow
@pytest.mark.parametrize("settings", ONE_LAYER.values(), ids=ONE_LAYER)
def test_it_never_makes_one_layer_worse(settings):
    check("logistic_regression", settings, seeds=[0, 1, 2])


def test_a_sound_network_is_not_told_to_forget_its_start():
    """Once it was: lower betas[1], lower hess_init. Either took this model to chance level, where nothing was found."""
    task = Task("mlp")
    sound = task.train(SETTINGS["IVON, pairs"])
    assert sound.log_loss < 0.25
    diagnosis = sound.diagnose()
    assert [finding.symptom for finding in diagnosis] == ["curvature at hess_init"]
    assert diagnosis[0].advice is None
    assert "is no way there" in diagnosis[0].remedy

    for argument in ({"betas": (0.9, 0.975)}, {"hess_init": 0.01}):
        broken = task.train((IVON, {"lr": 0.3} | PAIRS | argument))
        assert broken.log_loss > 2.2
        assert "chance level" in {finding.symptom for finding in broken.diagnose()}
        mended = broken.follow(broken.diagnose())
        assert mended.log_loss < sound.log_loss


def test_a_mean_that_is_better_than_its_samples():
    """Curvature that is right for one layer lets the noise of a network grow until the samples are at chance level."""
    task = Task("cnn_with_batchnorm", epochs=5)
    noisy = task.train(SETTINGS["Vadam"])
    symptoms = {finding.symptom for finding in noisy.diagnose()}
    assert symptoms == {"mean better than samples", "noise dominates"} or "chance level" in symptoms
    (change,) = {tuple(finding.advice.change.items()) for finding in noisy.diagnose()}
    assert change == (("noise_limit", 0.2),)
    assert noisy.log_loss > 2
    assert noisy.follow(noisy.diagnose()).log_loss < 0.2


def test_sound_models_are_not_called_unsound():
    trained = Task("mlp", epochs=5).train(SETTINGS["Vario"])
    diagnosis = trained.diagnose()
    assert not diagnosis
    assert diagnosis.losses.mean < diagnosis.losses.samples < 0.3 * diagnosis.losses.constant
    assert diagnosis.losses.constant == pytest.approx(float(_entropy(trained.task.y)), rel=1e-4)
    with torch.no_grad():
        expected = F.cross_entropy(trained.model.eval()(trained.task.x), trained.task.y)
    assert diagnosis.losses.mean == pytest.approx(float(expected), rel=1e-4)
    batches = list(zip(trained.task.x.split(100), trained.task.y.split(100), strict=True))
    in_parts = trained.optimizer.diagnose([Objective(trained.model, F.cross_entropy, *batch) for batch in batches])
    assert in_parts.losses.mean == pytest.approx(diagnosis.losses.mean, rel=1e-4)
    assert in_parts.losses.samples == pytest.approx(diagnosis.losses.samples, rel=1e-4)
    assert in_parts.losses.constant == pytest.approx(diagnosis.losses.constant, rel=1e-4)


def _entropy(labels):
    shares = labels.bincount().float() / len(labels)
    return -(shares * shares.log()).sum()
