"""One posterior asked by many threads at once: every answer right, and nothing of the model changed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from tests.harness import train
from tests.test_replica import MODELS, build
from vprop import Vprop
from vprop.integrations.sklearn import BayesianMLPClassifier

THREADS = 8


def at_once(ask, questions):
    """The answers of eight threads that take the questions in turn, all starting together."""
    start = threading.Barrier(THREADS)

    def work(own):
        start.wait()
        return [ask(question) for question in own]

    with ThreadPoolExecutor(THREADS) as pool:
        parts = list(pool.map(work, [questions[i::THREADS] for i in range(THREADS)]))
    return {
        question: answer
        for i, part in enumerate(parts)
        for question, answer in zip(questions[i::THREADS], part, strict=True)
    }


def posterior_of(name):
    model = build(name)
    optimizer = Vprop(model.parameters(), lr=0.01, num_data=10)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return model, optimizer.posterior(model), x


@pytest.mark.parametrize("name", MODELS)
def test_every_answer_is_right_and_the_model_is_as_it_was(name):
    calls = 1000 if name == "batchnorm" else 200
    model, posterior, x = posterior_of(name)
    model.train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    questions = [(seed % 5, 1 + seed % 3, seed) for seed in range(calls)]

    def ask(question):
        rows, samples, seed = question
        return posterior.predict(x[: rows + 1], num_samples=samples, seed=seed % 7).samples

    expected = {question: ask(question) for question in questions}
    answers = at_once(ask, questions)
    assert len(answers) == calls
    assert all(torch.equal(answers[question], expected[question]) for question in questions)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


def test_threads_predict_while_the_same_model_and_another_train():
    model, posterior, x = posterior_of("batchnorm")
    expected = [posterior.predict(x, num_samples=4, seed=seed).samples for seed in range(7)]
    stop, failures = threading.Event(), []
    reference, _ = train(Vprop, steps=300, num_data=100)

    def train_the_same_model():
        optimizer = Vprop(model.parameters(), lr=0.01, num_data=10)
        model.train()
        optimizer.attach(model)
        while not stop.is_set():
            loss = F.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if not all(module.training for module in model.modules()):
                failures.append("somebody put the model into evaluation mode")

    trainer = threading.Thread(target=train_the_same_model)
    trainer.start()
    try:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(train, Vprop, steps=300, num_data=100)
            answers = at_once(lambda seed: posterior.predict(x, num_samples=4, seed=seed % 7).samples, list(range(400)))
            trained, _ = other.result()
    finally:
        stop.set()
        trainer.join()
    assert not failures
    assert all(torch.equal(answer, expected[seed % 7]) for seed, answer in answers.items())
    for name, value in trained.state_dict().items():
        assert torch.equal(value, reference.state_dict()[name])


def test_fresh_draws_differ():
    _, posterior, _ = posterior_of("hooks")
    draws = at_once(lambda _: posterior.sample()["0.weight"], list(range(400)))
    assert len({tuple(draw.flatten().tolist()) for draw in draws.values()}) == 400


def test_the_elbo():
    _, posterior, x = posterior_of("batchnorm")
    batches = [(x, x)]
    expected = [posterior.elbo(batches, 2, loss_fn=F.mse_loss, seed=seed) for seed in range(5)]
    answers = at_once(lambda seed: posterior.elbo(batches, 2, loss_fn=F.mse_loss, seed=seed % 5), list(range(100)))
    assert all(torch.equal(answer, expected[seed % 5]) for seed, answer in answers.items())


def test_the_scikit_learn_estimators():
    x, y = load_digits(n_class=3, return_X_y=True)
    estimator = BayesianMLPClassifier(max_iter=2, random_state=0).fit(x[:100], y[:100])
    expected = {row: estimator.predict_proba(x[row : row + 3]) for row in range(40)}
    answers = at_once(lambda row: estimator.predict_proba(x[row : row + 3]), list(range(40)))
    assert all((answers[row] == expected[row]).all() for row in expected)


def test_hooks_of_an_attached_model_are_left_alone():
    model = nn.Linear(3, 2)
    optimizer = Vprop(model.parameters(), lr=0.1, num_data=10)
    optimizer.attach(model)
    posterior = optimizer.posterior(model)
    loss = model(torch.ones(4, 3)).square().mean()
    sample = model.weight.detach().clone()
    posterior.predict(torch.ones(4, 3), num_samples=2)
    assert torch.equal(model.weight, sample)
    loss.backward()
    optimizer.step()
