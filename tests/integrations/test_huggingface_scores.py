"""What a Trainer's evaluation says of the posterior is what the posterior's own draws give."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from tests.integrations.huggingface_harness import (
    VOCABULARY,
    batch_of,
    classifier,
    language_model,
    make_trainer,
    sequences,
    texts,
    vprop_for,
)
from vprop import GaussianLikelihood, metrics
from vprop.calling import call_with_weights
from vprop.integrations._scores import CategoricalScores
from vprop.integrations.huggingface import PosteriorCallback
from vprop.integrations.huggingface._scores import score

SAMPLES = 3


def trained(folder, model, data, held_out, **arguments):
    """A Trainer after two steps, its optimizer, and the logits of ``held_out`` under the draws of an evaluation."""
    optimizer = vprop_for(model, num_data=200)
    callback = PosteriorCallback(num_samples=SAMPLES, seed=5, **arguments.pop("callback", {}))
    arguments = {"max_steps": 2, "callbacks": [callback], "eval_dataset": held_out} | arguments
    trainer = make_trainer(folder, model, optimizer, data, **arguments)
    trainer.train()
    model.eval()
    with torch.no_grad():
        draws = optimizer.posterior(model).sampled_models(SAMPLES, seed=5)
        logits = torch.stack([sampled(**batch_of(held_out)).logits for sampled in draws])
    return trainer, optimizer, logits


def test_a_classifier(tmp_path):
    held_out = sequences(20, seed=3)  # in batches of 8, 8 and 4
    trainer, optimizer, logits = trained(tmp_path, classifier(), sequences(), held_out)
    probs, labels = logits.softmax(-1).mean(0), batch_of(held_out)["labels"]
    found = trainer.evaluate()
    assert found["eval_posterior_loss"] == pytest.approx(metrics.nll(probs, labels), rel=1e-5)
    assert found["eval_posterior_accuracy"] == metrics.accuracy(probs, labels)
    error = metrics.expected_calibration_error(probs, labels)
    assert found["eval_posterior_calibration_error"] == pytest.approx(error, rel=1e-5)
    assert "eval_posterior_perplexity" not in found
    mean = {name: value.to(torch.float32) for name, value in optimizer.posterior(trainer.model).mean.items()}
    at_mean = call_with_weights(trainer.model, mean, batch_of(held_out)).loss
    assert found["eval_loss"] == pytest.approx(float(at_mean), rel=1e-5)
    assert trainer.state.log_history[-1]["eval_posterior_loss"] == found["eval_posterior_loss"]


def test_a_language_model(tmp_path):
    """Labels are shifted by one, and −100 does not count."""
    held_out = texts(20, seed=3)
    trainer, _, logits = trained(tmp_path, language_model(), texts(), held_out)
    labels = batch_of(held_out)["labels"][:, 1:]
    probs, kept = logits[:, :, :-1].softmax(-1).mean(0), labels != -100
    found = trainer.evaluate()
    expected = metrics.nll(probs[kept], labels[kept])
    assert found["eval_posterior_loss"] == pytest.approx(expected, rel=1e-5)
    assert found["eval_posterior_perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert found["eval_posterior_accuracy"] == metrics.accuracy(probs[kept], labels[kept])
    assert len(probs[0, 0]) == VOCABULARY


@pytest.mark.parametrize("noise", ["of the loss", "given", "learned"])
def test_regression(tmp_path, noise):
    def targets(examples):
        return [example | {"labels": example["input_ids"].float().mean() / 10} for example in examples]

    likelihood = GaussianLikelihood(0.3)
    callback = {"of the loss": {}, "given": {"noise_variance": 0.2}, "learned": {"likelihood": likelihood}}[noise]
    variance = {"of the loss": 0.5, "given": 0.2, "learned": 0.3}[noise]
    held_out = targets(sequences(20, seed=3))
    model = classifier(num_labels=1)
    trainer, _, logits = trained(tmp_path, model, targets(sequences()), held_out, callback=callback)
    mean, y = logits.mean(0)[:, 0].double(), batch_of(held_out)["labels"].double()
    found = trainer.evaluate()
    assert found["eval_posterior_mse"] == pytest.approx(float(F.mse_loss(mean, y)), rel=1e-5)
    total = logits.double().var(0)[:, 0] + variance
    assert found["eval_posterior_loss"] == pytest.approx(metrics.gaussian_nll(mean, total, y), rel=1e-5)


def test_several_labels(tmp_path):
    def tagged(examples):
        return [example | {"labels": (example["input_ids"][:3] % 2).float()} for example in examples]

    held_out = tagged(sequences(20, seed=3))
    model = classifier(problem_type="multi_label_classification")
    trainer, _, logits = trained(tmp_path, model, tagged(sequences()), held_out)
    probs, labels = logits.double().sigmoid().mean(0), batch_of(held_out)["labels"]
    found = trainer.evaluate()
    assert found["eval_posterior_loss"] == pytest.approx(metrics.nll(probs, labels, task="multilabel"), rel=1e-5)
    assert found["eval_posterior_accuracy"] == metrics.accuracy(probs, labels, task="multilabel")


def test_predictions_get_scores_where_there_are_labels(tmp_path):
    held_out = sequences(8, seed=3)
    trainer, _, logits = trained(tmp_path, classifier(), sequences(), held_out)
    probs, labels = logits.softmax(-1).mean(0), batch_of(held_out)["labels"]
    found = trainer.predict(held_out).metrics
    assert found["test_posterior_loss"] == pytest.approx(metrics.nll(probs, labels), rel=1e-5)
    unlabelled = [{"input_ids": example["input_ids"]} for example in held_out]
    assert not any("posterior" in name for name in trainer.predict(unlabelled).metrics)


def test_several_evaluation_sets(tmp_path):
    sets = {"first": sequences(8, seed=3), "second": sequences(8, seed=4)}
    model = classifier()
    changes = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
    trainer = make_trainer(tmp_path, model, vprop_for(model), sequences(), eval_dataset=sets, **changes)
    trainer.train()
    found = trainer.evaluate()
    first, second = found["eval_first_posterior_loss"], found["eval_second_posterior_loss"]
    assert first != second
    assert first == trainer.evaluate(sets["first"])["eval_posterior_loss"]


def test_a_trainer_that_logs_a_copy(tmp_path):
    class Copying(Trainer):
        def log(self, logs, *rest):
            super().log({**logs, "own": 1.0}, *rest)

    model = classifier()
    data = {"eval_dataset": sequences(8), "trainer": Copying, "max_steps": 1}
    trainer = make_trainer(tmp_path, model, vprop_for(model), sequences(), **data)
    trainer.train()
    found = trainer.evaluate()
    assert found["eval_posterior_loss"] == trainer.state.log_history[-1]["eval_posterior_loss"]


def test_early_stopping_sees_the_scores(tmp_path):
    """The evaluation labels are wrong, so the first evaluation is the best."""
    model = classifier()
    wrong = [example | {"labels": (example["labels"] + 1) % 3} for example in sequences(8)]
    changes = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 30}
    changes |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_posterior_loss"}
    callbacks = [EarlyStoppingCallback(early_stopping_patience=2), PosteriorCallback(num_samples=2)]
    optimizer = vprop_for(model, num_data=1000)
    trainer = make_trainer(tmp_path, model, optimizer, sequences(8), eval_dataset=wrong, callbacks=callbacks, **changes)
    trainer.train()
    assert trainer.state.global_step < 30


def test_a_logger_sees_the_scores_if_the_callback_is_moved_to_the_front(tmp_path):
    """The Trainer lists its loggers first; this is the advice for them."""
    seen = []

    class Logger(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    model = classifier()
    callbacks = [Logger(), PosteriorCallback(num_samples=2)]
    data = {"eval_dataset": sequences(8), "max_steps": 1}
    trainer = make_trainer(tmp_path, model, vprop_for(model), sequences(), callbacks=callbacks, **data)
    trainer.callback_handler.callbacks.insert(0, trainer.pop_callback(PosteriorCallback))
    trainer.train()
    trainer.evaluate()
    assert "posterior_kl" in seen[0]
    assert "eval_posterior_loss" in seen[-1]


def test_a_probability_that_underflows_has_a_finite_loss():
    scores, label = CategoricalScores(), torch.tensor([1])
    scores.add((torch.tensor([[0.0, logit]]), label) for logit in (-500.0, -400.0))
    assert scores.result(processes=1)["log_loss"] == pytest.approx(400 + math.log(2))


def test_dropout_is_off_and_modes_stay_as_they_are():
    """Also for a Trainer that does not put its model into evaluation mode."""
    model = classifier(dropout=0.5)
    posterior = vprop_for(model).posterior(model)
    settings = {"num_samples": 2, "seed": 0, "label_name": "labels"}
    batches = [batch_of(sequences(8))]
    model.eval()
    expected = score(posterior, batches, **settings)
    model.train()
    assert score(posterior, batches, **settings) == expected
    assert all(module.training for module in model.modules())
