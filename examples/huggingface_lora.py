"""LoRA in Hugging Face's Trainer: the adapter and the head get a posterior, the rest of the transformer stays as it is.

    python examples/huggingface_lora.py [--short]

The transformer is made from a config and the texts are made here, so that nothing is downloaded. For a pretrained one
replace `BertForSequenceClassification(config)` by `AutoModelForSequenceClassification.from_pretrained(name)`.
"""

import argparse
import tempfile

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, EvalPrediction, Trainer, TrainingArguments

import vprop
from vprop import metrics
from vprop.integrations.huggingface import PosteriorCallback

parser = argparse.ArgumentParser(description="LoRA on a small transformer, with a posterior over the adapter.")
parser.add_argument("--short", action="store_true", help="a few seconds, for a first look")
epochs = 6 if parser.parse_args().short else 40

WORDS, LENGTH, TOPICS = 60, 12, 3


def make_texts(size: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Texts on one of three topics: half of the words are the topic's own, and one label in ten is wrong."""
    generator = torch.Generator().manual_seed(seed)
    topics = torch.randint(TOPICS, (size,), generator=generator)
    words = torch.randint(WORDS, (size, LENGTH), generator=generator)
    own = torch.rand(size, LENGTH, generator=generator) < 0.5
    words = torch.where(own, words // TOPICS * TOPICS + topics[:, None], words)
    wrong = torch.rand(size, generator=generator) < 0.1
    labels = torch.where(wrong, torch.randint(TOPICS, (size,), generator=generator), topics)
    return [{"input_ids": text, "labels": label} for text, label in zip(words, labels, strict=True)]


def scores_at_the_mean(found: EvalPrediction) -> dict[str, float]:
    """What the callback computes for the posterior, for the model as it is: its weights are the mean."""
    probs, labels = torch.tensor(found.predictions).softmax(-1), torch.tensor(found.label_ids)
    error = metrics.expected_calibration_error(probs, labels)
    return {"accuracy": metrics.accuracy(probs, labels), "calibration_error": error}


torch.manual_seed(0)
sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
config = BertConfig(vocab_size=WORDS, num_labels=TOPICS, initializer_range=0.15, **sizes)
lora = LoraConfig(TaskType.SEQ_CLS, r=4, target_modules=["query", "value"])  # and the head, as a whole
model = get_peft_model(BertForSequenceClassification(config), lora)
train_set, test_set = make_texts(400, seed=1), make_texts(1000, seed=2)

adapter = [p for p in model.parameters() if p.requires_grad]
optimizer = vprop.Vprop(adapter, lr=0.3, num_data=len(train_set))
with tempfile.TemporaryDirectory() as folder:
    settings = {
        "num_train_epochs": epochs,
        "per_device_train_batch_size": 20,
        "per_device_eval_batch_size": 200,
        "max_grad_norm": 0,  # clipped gradients would make the curvature too small
        "logging_steps": 0.25,
    }
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    trainer = Trainer(
        model,
        TrainingArguments(folder, **settings, **quiet),
        train_dataset=train_set,
        optimizers=(optimizer, None),  # None: the Trainer's schedule, which decays to zero
        compute_metrics=scores_at_the_mean,
        callbacks=[PosteriorCallback(num_samples=16)],  # samples in training, and in evaluation
    )
    trainer.train()
    scores = trainer.evaluate(test_set)

posterior = optimizer.posterior(model)
print(f"{posterior.num_parameters} of {sum(p.numel() for p in model.parameters())} weights have a posterior")
for name in ("loss", "accuracy", "calibration_error"):
    print(f"{name:18} at the mean {scores[f'eval_{name}']:.3f}   averaged {scores[f'eval_posterior_{name}']:.3f}")
