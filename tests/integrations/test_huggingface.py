"""Training in a Trainer is the plain loop, bit for bit; checkpoints hold the mean, and resuming changes nothing."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.harness import assert_same_run, everything
from tests.integrations.huggingface_harness import (
    batch_of,
    classifier,
    language_model,
    make_trainer,
    sequences,
    texts,
    tied_language_model,
    train_plainly,
    vprop_for,
)
from vprop import IVON, Vprop
from vprop.integrations.huggingface import PosteriorCallback, num_targets, variational_optimizer


@pytest.mark.parametrize("attached_by", ["callback", "user"])
def test_a_trainer_is_the_plain_loop(tmp_path, attached_by):
    runs = []
    for plain in (True, False):
        model = classifier()
        optimizer = vprop_for(model)
        if plain:
            train_plainly(model, optimizer, sequences(), clip=1.0)
        else:
            handle = optimizer.attach(model) if attached_by == "user" else None
            callbacks = None if attached_by == "callback" else []
            make_trainer(tmp_path, model, optimizer, sequences(), callbacks=callbacks, max_grad_norm=1.0).train()
            if handle is not None:
                handle.remove()
        runs.append((model, optimizer))
    assert_same_run(*runs)


@pytest.mark.parametrize("kind", ["classifier", "language model"])
def test_micro_batches_see_one_sample_and_add_up_to_one_batch(tmp_path, kind):
    """The language model's micro-batches have different numbers of labels."""
    make, data = (classifier, sequences()) if kind == "classifier" else (language_model, texts())
    loss_of = None if kind == "classifier" else lambda model, batch, n: model(**batch, num_items_in_batch=n).loss
    runs = []
    for plain, sizes in ((True, (4, 3)), (False, (4, 3)), (False, (12, 1))):
        model = make()
        optimizer = vprop_for(model)
        if plain:
            train_plainly(model, optimizer, data, batch_size=4, micro_batches=3, loss_of=loss_of)
        else:
            size, parts = sizes
            changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts}
            make_trainer(tmp_path, model, optimizer, data, **changes).train()
        runs.append((model, optimizer))
    assert_same_run(runs[0], runs[1])
    assert_same_run(runs[0], runs[2], rtol=1e-3, atol=1e-5)


def test_a_model_that_ignores_the_number_of_items_is_an_error(tmp_path):
    """Or its gradients would be too large by the number of micro-batches, and nobody would say so."""
    model = classifier()
    mean = {name: value.clone() for name, value in model.state_dict().items()}
    del model.accepts_loss_kwargs  # what the class says, as users have it
    optimizer = vprop_for(model)
    trainer = make_trainer(tmp_path, model, optimizer, sequences(), gradient_accumulation_steps=3)
    if not trainer.model_accepts_loss_kwargs:
        pytest.skip("this version of transformers divides by the number of micro-batches itself")
    message = r"loss of BertForSequenceClassification is a mean .* about 3 times .*accepts_loss_kwargs = False"
    with pytest.raises(ValueError, match=message):
        trainer.train()
    for name, p in model.named_parameters():  # the sample is out again
        torch.testing.assert_close(p, mean[name], rtol=1e-5, atol=1e-5)


def test_gradient_checkpointing_sees_the_same_sample(tmp_path):
    runs = []
    for checkpointing in (False, True):
        model = language_model()
        optimizer = vprop_for(model)
        make_trainer(tmp_path, model, optimizer, texts(), gradient_checkpointing=checkpointing).train()
        assert model.is_gradient_checkpointing is checkpointing
        runs.append((model, optimizer))
    assert_same_run(*runs)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_bfloat16_autocast(tmp_path):
    runs = []
    for plain in (True, False):
        model = classifier()
        optimizer = vprop_for(model)
        with torch.backends.mkldnn.flags(enabled=False):  # its bfloat16 needs instructions that some machines lack
            if plain:
                train_plainly(model, optimizer, sequences(), dtype=torch.bfloat16)
            else:
                make_trainer(tmp_path, model, optimizer, sequences(), bf16=True).train()
        runs.append((model, optimizer))
    assert_same_run(*runs)


def test_a_compiled_model(tmp_path):
    runs = []
    for compiled in (False, True):
        model = classifier()
        optimizer = vprop_for(model)
        changes = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled else {}
        make_trainer(tmp_path, model, optimizer, sequences(), eval_dataset=sequences(8), **changes).train()
        runs.append((model, optimizer))
    torch._dynamo.reset()
    assert_same_run(*runs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_evaluation_leaves_no_trace(tmp_path, dropout):
    """With dropout it must not even take a number from the random state. (The Trainer's own evaluation does.)"""
    runs, without = [], "no" if dropout == 0 else "steps"
    for num_samples, strategy in ((0, without), (3, "steps")):
        model = classifier(dropout=dropout)
        optimizer = vprop_for(model)
        callbacks = [PosteriorCallback(num_samples=num_samples)]
        changes = {"eval_dataset": sequences(8, seed=1), "eval_strategy": strategy, "eval_steps": 1}
        trainer = make_trainer(tmp_path, model, optimizer, sequences(), callbacks=callbacks, **changes)
        trainer.train()
        scored = sum("eval_posterior_loss" in entry for entry in trainer.state.log_history)
        assert scored == (4 if num_samples else 0)
        runs.append((model, optimizer))
    assert_same_run(*runs)


@pytest.mark.parametrize("optimizer_class", [Vprop, IVON])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, optimizer_class):
    """Noise, dropout, momentum, schedule and a prior that follows the posterior."""
    settings = {"lr": 0.05, "num_data": 24, "betas": (0.9, 0.99), "prior_precision": "auto"}
    runs = []
    for checkpoint in (None, str(tmp_path / "checkpoint-3")):
        model = classifier(dropout=0.1)
        optimizer = optimizer_class(model.parameters(), **settings)
        changes = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
        trainer = make_trainer(tmp_path, model, optimizer, sequences(), **changes)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.state.global_step == 6
        runs.append((model, optimizer))
    assert_same_run(*runs)
    assert runs[0][1].param_groups[0]["prior_precision"] == runs[1][1].param_groups[0]["prior_precision"]


def test_a_checkpoint_is_saved_at_the_mean_while_a_sample_is_in_the_weights(tmp_path):
    model = tied_language_model()
    mean = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = vprop_for(model)
    optimizer.attach(model)
    model.train()(**batch_of(texts(4)))
    assert not torch.allclose(model.lm_head.weight, mean["lm_head.weight"], atol=1e-2)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert "transformer.wte.weight" in saved
    for name, value in saved.items():
        torch.testing.assert_close(value, mean[name], rtol=1e-5, atol=1e-6)


def test_tied_weights_have_one_posterior(tmp_path):
    model = tied_language_model()
    optimizer = vprop_for(model)
    trainer = make_trainer(tmp_path, model, optimizer, texts(), eval_dataset=texts(8, seed=1))
    trainer.train()
    posterior = optimizer.posterior(model)
    assert "transformer.wte.weight" in posterior.mean
    assert "lm_head.weight" not in posterior.mean
    assert model.lm_head.weight is model.transformer.wte.weight
    weights = [p.clone() for p in model.parameters()]
    trainer.evaluate()
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))


def test_the_best_model_has_its_own_variances(tmp_path):
    """The Trainer loads the best weights and leaves the optimizer's state where it is.

    The labels of the evaluation are wrong: the longer the training, the worse.
    """
    model = classifier()
    optimizer = vprop_for(model, num_data=1000)
    trainer = make_trainer(
        tmp_path,
        model,
        optimizer,
        [example | {"labels": torch.tensor(0)} for example in sequences(8)],
        eval_dataset=[example | {"labels": torch.tensor(1)} for example in sequences(8)],
        max_steps=6,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_posterior_loss",
    )
    trainer.train()
    losses = [e["eval_posterior_loss"] for e in trainer.state.log_history if "eval_posterior_loss" in e]
    best = losses.index(min(losses)) + 1
    assert trainer.state.best_metric == min(losses)
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    assert best < 6, "the test needs a best model that is not the last"
    assert all(int(state["step"]) == best for state in optimizer.state.values())
    assert trainer.evaluate()["eval_posterior_loss"] == min(losses)


def test_a_best_model_without_a_saved_state_is_a_warning(tmp_path):
    model = classifier()
    changes = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}
    changes |= {"eval_steps": 2, "save_steps": 2, "save_only_model": True}
    trainer = make_trainer(tmp_path, model, vprop_for(model), sequences(), eval_dataset=sequences(8), **changes)
    with pytest.warns(UserWarning, match="variances of the last step. Train with save_only_model=False"):
        trainer.train()


def test_the_trainer_may_build_the_optimizer(tmp_path):
    model = classifier()
    choice = (Vprop, {"lr": 0.05, "num_data": 24})
    made = {"optimizer_cls_and_kwargs": choice}
    trainer = make_trainer(tmp_path, model, None, sequences(), eval_dataset=sequences(8), trainer_arguments=made)
    assert "eval_posterior_loss" not in trainer.evaluate()  # no optimizer yet, so no posterior
    trainer.train()
    posterior = variational_optimizer(trainer.optimizer).posterior(model)
    assert posterior.num_parameters == model.num_parameters()
    assert "eval_posterior_loss" in trainer.evaluate()


def test_detaching_at_the_end_leaves_the_users_own_attachment(tmp_path):
    for own in (False, True):
        model = classifier()
        optimizer = vprop_for(model)
        if own:
            optimizer.attach(model)
        make_trainer(tmp_path, model, optimizer, sequences()).train()
        before = everything(model, optimizer)["classifier.weight"].clone()
        model.train()(**batch_of(sequences(4)))
        assert torch.equal(model.classifier.weight, before) is not own


def test_the_log_describes_the_posterior(tmp_path):
    model = classifier()
    optimizer = vprop_for(model)
    trainer = make_trainer(tmp_path, model, optimizer, sequences())
    trainer.train()
    entry = [e for e in trainer.state.log_history if "loss" in e][-1]
    posterior = optimizer.posterior(model)
    variances = torch.cat([v.flatten() for v in posterior.variance.values()]).double()
    curvatures = torch.cat([state["hess"].flatten() for state in optimizer.state.values()]).double()
    assert entry["posterior_kl"] == pytest.approx(float(posterior.kl()), rel=1e-6)
    assert entry["posterior_sigma"] == pytest.approx(float(variances.mean().sqrt()), rel=1e-6)
    assert entry["posterior_curvature"] == pytest.approx(float(curvatures.mean()), rel=1e-6)


def test_the_kl_to_a_flat_prior_is_left_out(tmp_path):
    model = classifier()
    trainer = make_trainer(tmp_path, model, vprop_for(model, prior_precision=0.0), sequences(), max_steps=1)
    trainer.train()
    assert "posterior_kl" not in trainer.state.log_history[0]
    assert "posterior_sigma" in trainer.state.log_history[0]


def test_the_number_of_data_of_a_language_model_is_its_number_of_predicted_tokens():
    data = texts(6)
    expected = sum(int((example["labels"][1:] != -100).sum()) for example in data)
    assert num_targets(data, language_model()) == expected
    assert num_targets([batch_of(data[:4]), batch_of(data[4:])], language_model()) == expected
    assert num_targets(sequences(6), classifier()) == 6
    with pytest.raises(ValueError, match=r"must be dicts with 'labels', found \['input_ids'\].*collate_fn=collator"):
        num_targets([{"input_ids": [1, 2]}], language_model())
