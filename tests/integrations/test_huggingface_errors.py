"""Bad use of a Trainer gets an error that says what to do, before training rather than after."""

from __future__ import annotations

import importlib
from importlib import metadata

import pytest
import torch
from torch import nn

import vprop.integrations.huggingface
from tests.integrations.huggingface_harness import classifier, make_trainer, sequences, vprop_for
from vprop import CVI, Vprop
from vprop.integrations.huggingface import PosteriorCallback, variational_optimizer


def train(folder, model, optimizer, **changes):
    make_trainer(folder, model, optimizer, sequences(), **{"max_steps": 1} | changes).train()


def test_an_old_version_is_named_with_the_command_that_upgrades_it(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda package: "4.45.2")
    message = r"needs transformers >= 4\.46, but version 4\.45\.2 .*pip install 'transformers>=4\.46'"
    with pytest.raises(ImportError, match=message):
        importlib.reload(vprop.integrations.huggingface)


def test_an_optimizer_that_is_not_ours(tmp_path):
    model = classifier()
    message = r"Invalid optimizer: AdamW is not one of vprop's\. .*optimizers=\(vprop\.Vprop\("
    with pytest.raises(TypeError, match=message):
        train(tmp_path, model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(TypeError, match="AdamW"):  # the Trainer's own, where none was given
        train(tmp_path, classifier(), None)
    with pytest.raises(TypeError, match="NoneType"):
        variational_optimizer(None)


def test_several_samples_per_step(tmp_path):
    model = classifier()
    with pytest.raises(ValueError, match=r"Invalid mc_samples=2: must be 0 or 1 in a Trainer.*Use mc_samples=1"):
        train(tmp_path, model, vprop_for(model, mc_samples=2))


def test_a_method_that_needs_an_objective(tmp_path):
    model = classifier()
    with pytest.raises(TypeError, match=r"CVI takes its curvature from more than a gradient.*Use Vprop, IVON or Vadam"):
        train(tmp_path, model, CVI(model.parameters(), num_data=24))


def test_the_parameters_of_another_model(tmp_path):
    message = r"holds none of the model's \d+ trainable parameters.*after get_peft_model"
    with pytest.raises(ValueError, match=message):
        train(tmp_path, classifier(), vprop_for(classifier()))


def test_parameters_of_two_models(tmp_path):
    model, other = classifier(), nn.Linear(2, 2)
    optimizer = Vprop([*model.parameters(), *other.parameters()], num_data=24)
    with pytest.raises(ValueError, match=r"attach\(model\): 2 of the optimizer's parameters are not .*Attach the"):
        train(tmp_path, model, optimizer)


def test_parameters_that_nobody_trains_are_a_warning(tmp_path):
    model = classifier()
    optimizer = Vprop([p for name, p in model.named_parameters() if "classifier" not in name], num_data=24)
    message = r"2 of the model's \d+ trainable parameters are not in the optimizer.*\(classifier\.weight, .*freeze them"
    with pytest.warns(UserWarning, match=message):
        train(tmp_path, model, optimizer)


def test_weight_decay_in_place_of_a_prior(tmp_path):
    choice = {"optimizer_cls_and_kwargs": (Vprop, {"num_data": 24})}
    message = r"Invalid weight_decay=0\.01: must be 0 with Vprop.*prior_precision=weight_decay\*num_data"
    with pytest.raises(ValueError, match=message):
        train(tmp_path, classifier(), None, weight_decay=0.01, trainer_arguments=choice)


def test_forgetting_to_attach(tmp_path):
    model = classifier()
    with pytest.raises(RuntimeError, match=r"step\(\) without a sample.*or of vprop\.integrations\.huggingface"):
        train(tmp_path, model, vprop_for(model), callbacks=[])


@pytest.mark.parametrize(
    ("score", "greater", "wanted"),
    [("eval_posterior_perplexity", None, False), ("posterior_mse", True, False), ("posterior_accuracy", False, True)],
)
def test_keeping_the_worst_model(tmp_path, score, greater, wanted):
    """None is the Trainer's default, which guesses from the name."""
    model = classifier()
    changes = {"metric_for_best_model": score, "greater_is_better": greater}
    message = rf"Invalid greater_is_better={not wanted} for metric_for_best_model='{score}': must be {wanted}"
    with pytest.raises(ValueError, match=message):
        train(tmp_path, model, vprop_for(model), **changes)


@pytest.mark.parametrize("num_samples", [-1, 2.5, True])
def test_a_number_of_samples_that_is_none(num_samples):
    with pytest.raises(ValueError, match=r"Invalid num_samples=.*must be an integer >= 0 .*8 is the default"):
        PosteriorCallback(num_samples=num_samples)


def test_a_likelihood_that_is_none():
    with pytest.raises(ValueError, match=r"Invalid likelihood='softmax': must be one of"):
        PosteriorCallback(likelihood="softmax")


class NoLogits(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, input_ids, labels):
        return {"loss": (self.layer(input_ids.float()).squeeze(-1) - labels).square().mean()}


def test_a_model_without_logits(tmp_path):
    model = NoLogits()
    trainer = make_trainer(tmp_path, model, vprop_for(model), sequences(), eval_dataset=sequences(8), max_steps=1)
    trainer.train()
    with pytest.raises(TypeError, match=r"NoLogits returned no logits .*PosteriorCallback\(num_samples=0\)"):
        trainer.evaluate()


class Regression(NoLogits):
    """Targets that are integers, for which nothing says that they are no classes."""

    def forward(self, input_ids, labels):
        logits = self.layer(input_ids.float())
        return {"loss": (logits - labels).square().mean(), "logits": logits}


def test_labels_that_do_not_fit(tmp_path):
    model = Regression()
    held_out = [example | {"labels": example["input_ids"][:2]} for example in sequences(8)]
    trainer = make_trainer(tmp_path, model, vprop_for(model), sequences(), eval_dataset=held_out, max_steps=1)
    trainer.train()
    message = r"Logits of shape \(8, 1\) do not fit labels of shape \(8, 2\).*PosteriorCallback\(likelihood=\.\.\.\)"
    with pytest.raises(ValueError, match=message):
        trainer.evaluate()


def test_a_changed_number_of_parameters_at_resume(tmp_path):
    model = classifier()
    train(tmp_path, model, vprop_for(model), save_strategy="steps", save_steps=1)
    model = classifier()
    model.classifier.requires_grad_(False)
    trainer = make_trainer(tmp_path, model, vprop_for(model), sequences(), max_steps=2)
    message = r"checkpoint has 1 parameter group with 41 .*this optimizer 1 parameter group with 39 .*layers frozen"
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=True)
