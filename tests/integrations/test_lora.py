"""Fine-tuning with LoRA: only the adapter has a posterior, and the rest of the model is as it was."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from safetensors.torch import load_file

from tests.harness import assert_same_run
from tests.integrations.huggingface_harness import (
    batch_of,
    classifier,
    language_model,
    make_trainer,
    sequences,
    texts,
    train_plainly,
    vprop_for,
)
from vprop import load_posterior
from vprop.integrations.huggingface import PosteriorCallback, num_targets


def with_adapter(model, *, seed=1, dropout=0.0):
    """A LoRA adapter on the queries and values; the head of a classifier is trained whole."""
    if hasattr(model, "classifier"):
        config = LoraConfig(TaskType.SEQ_CLS, r=2, target_modules=["query", "value"], lora_dropout=dropout)
    else:
        config = LoraConfig(TaskType.CAUSAL_LM, r=2, target_modules=["q_proj", "v_proj"], lora_dropout=dropout)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def is_adapter(name):
    return "lora_" in name or "modules_to_save" in name


def test_only_the_adapter_has_a_posterior(tmp_path):
    model = with_adapter(classifier())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = vprop_for(model)
    trainer = make_trainer(tmp_path, model, optimizer, sequences(), eval_dataset=sequences(8, seed=1))
    trainer.train()
    found = trainer.evaluate()
    assert found["eval_posterior_loss"] > 0
    posterior = optimizer.posterior(model)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(posterior.mean) == trainable
    assert all(is_adapter(name) for name in trainable)
    assert len(trainable) == 2 * 2 * 2 + 2  # A and B in two layers on two matrices; weight and bias of the head
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) is not is_adapter(name), name


@pytest.mark.parametrize("make", [classifier, language_model])
def test_a_trainer_is_the_plain_loop(tmp_path, make):
    data = sequences() if make is classifier else texts()
    loss_of = None if make is classifier else lambda model, batch, n: model(**batch, num_items_in_batch=n).loss
    runs = []
    for plain in (True, False):
        model = with_adapter(make())
        optimizer = vprop_for(model, num_data=num_targets(data, model))
        if plain:
            train_plainly(model, optimizer, data, micro_batches=2, loss_of=loss_of)
        else:
            make_trainer(tmp_path, model, optimizer, data, gradient_accumulation_steps=2).train()
        runs.append((model, optimizer))
    assert_same_run(*runs)


def test_gradient_checkpointing_sees_the_same_sample(tmp_path):
    runs = []
    for checkpointing in (False, True):
        model = with_adapter(language_model())
        model.enable_input_require_grads()  # as peft wants it
        optimizer = vprop_for(model)
        make_trainer(tmp_path, model, optimizer, texts(), gradient_checkpointing=checkpointing).train()
        runs.append((model, optimizer))
    assert_same_run(*runs)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    runs = []
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        model = with_adapter(classifier(dropout=0.1), dropout=0.1)
        optimizer = vprop_for(model)
        changes = {"save_strategy": "steps", "save_steps": 2}
        make_trainer(tmp_path, model, optimizer, sequences(), **changes).train(resume_from_checkpoint=checkpoint)
        runs.append((model, optimizer))
    assert_same_run(*runs)


def test_an_adapter_is_saved_at_the_mean_while_a_sample_is_in_the_weights(tmp_path):
    model = with_adapter(classifier())
    mean = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = vprop_for(model)
    optimizer.attach(model)
    model.train()(**batch_of(sequences(4)))
    assert any(not torch.allclose(value, mean[name], atol=1e-2) for name, value in model.named_parameters())
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert len(saved) == 10
    loaded = PeftModel.from_pretrained(classifier(), tmp_path)
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, mean[name], rtol=1e-5, atol=1e-6)


def test_the_best_adapter_has_its_own_variances(tmp_path):
    model = with_adapter(classifier())
    optimizer = vprop_for(model, num_data=1000)
    changes = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 5}
    changes |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_posterior_loss"}
    data = [example | {"labels": torch.tensor(0)} for example in sequences(8)]
    wrong = [example | {"labels": torch.tensor(1)} for example in sequences(8)]
    trainer = make_trainer(tmp_path, model, optimizer, data, eval_dataset=wrong, **changes)
    trainer.train()
    best = trainer.state.best_global_step
    assert best < 5, "the test needs a best model that is not the last"
    assert all(int(state["step"]) == best for state in optimizer.state.values())
    assert trainer.evaluate()["eval_posterior_loss"] == trainer.state.best_metric


def test_a_posterior_goes_to_a_file_and_to_a_new_model(tmp_path):
    model = with_adapter(classifier())
    optimizer = vprop_for(model)
    trainer = make_trainer(tmp_path, model, optimizer, sequences())
    trainer.train()
    posterior = optimizer.posterior(model, likelihood="categorical")
    posterior.save(tmp_path / "posterior.safetensors")
    other = with_adapter(classifier(), seed=7)
    loaded = load_posterior(tmp_path / "posterior.safetensors", other)
    assert all(is_adapter(name) for name in loaded.mean)
    inputs = {"input_ids": batch_of(sequences(4))["input_ids"]}
    # Only the adapters of the two models differ, and the posterior covers all of them.
    torch.testing.assert_close(loaded.predict(inputs, num_samples=3).samples, posterior.predict(inputs, 3).samples)


def test_predictions_are_logits_under_draws(tmp_path):
    model = with_adapter(classifier())
    optimizer = vprop_for(model)
    make_trainer(tmp_path, model, optimizer, sequences(), callbacks=[PosteriorCallback(0)]).train()
    prediction = optimizer.posterior(model, likelihood="categorical").predict(batch_of(sequences(4)), num_samples=3)
    assert prediction.samples.shape == (3, 4, 3)
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(4))


def test_after_training_the_mean_is_what_merges(tmp_path):
    model = with_adapter(classifier())
    make_trainer(tmp_path, model, vprop_for(model), sequences()).train()
    inputs = batch_of(sequences(4))
    at_mean = model.eval()(**inputs).logits
    merged = model.merge_and_unload().eval()
    torch.testing.assert_close(merged(**inputs).logits, at_mean, rtol=1e-4, atol=1e-5)


def test_an_optimizer_made_before_the_adapter_is_an_error(tmp_path):
    base = classifier()
    optimizer = vprop_for(base)
    with pytest.raises(ValueError, match=r"holds none of the model's \d+ trainable parameters.*after get_peft_model"):
        make_trainer(tmp_path, with_adapter(base), optimizer, sequences()).train()
