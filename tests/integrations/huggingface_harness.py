"""Tiny transformers made from a config, data for them, and a Trainer that is quiet and writes where it is told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.utils import logging

from vprop import VariationalOptimizer, Vprop
from vprop.integrations.huggingface import PosteriorCallback

logging.set_verbosity_error()

VOCABULARY, LENGTH, CLASSES = 40, 8, 3
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}

Example = dict[str, Tensor]


def classifier(*, dropout: float = 0.0, seed: int = 0, **config: Any) -> BertForSequenceClassification:
    """A classifier of sequences. Its loss is a mean over the micro-batch, which the Trainer has to be told."""
    config = {"num_labels": CLASSES, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout} | config
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BertForSequenceClassification(
            BertConfig(vocab_size=VOCABULARY, hidden_size=16, max_position_embeddings=LENGTH, **SIZES, **config)
        )
    model.accepts_loss_kwargs = False
    return model


def language_model(seed: int = 0) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, max_position_embeddings=LENGTH, bos_token_id=1, eos_token_id=2, **SIZES
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def tied_language_model() -> GPT2LMHeadModel:
    """Its last layer is its embedding: one tensor in two places."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=16,
                n_layer=2,
                n_head=2,
                n_positions=LENGTH,
                bos_token_id=1,
                eos_token_id=2,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )


def sequences(size: int = 24, seed: int = 0) -> list[Example]:
    """Sequences whose class is the first token, modulo the number of classes."""
    tokens = torch.randint(3, VOCABULARY, (size, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row[0] % CLASSES} for row in tokens]


def texts(size: int = 24, seed: int = 0) -> list[Example]:
    """Sequences of which each token is the last one plus one; some beginnings have no label."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(3, VOCABULARY - LENGTH, (size, 1), generator=generator)
    tokens = starts + torch.arange(LENGTH)
    unlabelled = torch.arange(LENGTH) < torch.randint(0, 4, (size, 1), generator=generator)
    return [
        {"input_ids": row, "labels": torch.where(hidden, -100, row)}
        for row, hidden in zip(tokens, unlabelled, strict=True)
    ]


def batch_of(examples: list[Example]) -> Example:
    return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}


def vprop_for(model: nn.Module, **arguments: Any) -> Vprop:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return Vprop(trainable, **{"lr": 0.05, "num_data": 24, "hess_init": 2.0} | arguments)


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 8,
        "max_steps": 4,
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "log_level": "error",
    }
    return TrainingArguments(str(folder), **settings | changes)


def make_trainer(
    folder: Path,
    model: nn.Module,
    optimizer: Any,
    data: list[Example],
    *,
    callbacks: Iterable[Any] | None = None,
    trainer: type[Trainer] = Trainer,
    eval_dataset: Any = None,
    trainer_arguments: dict[str, Any] | None = None,
    **changes: Any,
) -> Trainer:
    """A Trainer with a ``PosteriorCallback``, unless ``callbacks`` says otherwise; ``changes`` are to its arguments."""
    made = trainer(
        model=model,
        args=arguments(folder, **changes),
        train_dataset=data,
        eval_dataset=eval_dataset,
        optimizers=(optimizer, None),
        callbacks=[PosteriorCallback(num_samples=2)] if callbacks is None else list(callbacks),
        **trainer_arguments or {},
    )
    made.remove_callback(next(c for c in made.callback_handler.callbacks if type(c).__name__ == "PrinterCallback"))
    return made


def train_plainly(
    model: nn.Module,
    optimizer: VariationalOptimizer,
    data: list[Example],
    *,
    steps: int = 4,
    batch_size: int = 4,
    micro_batches: int = 1,
    loss_of: Callable[[nn.Module, Example, int], Tensor] | None = None,
    clip: float | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """The Trainer's loop by hand: in order, with a linear schedule, with hooks."""
    handle = optimizer.attach(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (steps - step) / steps))
    model.train()
    for step in range(steps):
        first = step * batch_size * micro_batches % len(data)
        parts = [data[first + i * batch_size :][:batch_size] for i in range(micro_batches)]
        batches = [batch_of(part) for part in parts]
        items = sum(int((batch["labels"][..., 1:] != -100).sum()) for batch in batches)
        for batch in batches:
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = model(**batch).loss / micro_batches if loss_of is None else loss_of(model, batch, items)
            loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    handle.remove()
