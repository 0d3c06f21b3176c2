"""Entries of parameter groups that no optimizer here has: never lost in silence, unless they are somebody else's."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import vprop
from tests.harness import train
from tests.table import TABLE
from vprop import IVON, Vprop
from vprop.optim._group_keys import ALLOWED

TYPOS = {
    "prior_precison": "prior_precision",
    "Temperature": "temperature",
    "hes_init": "hess_init",
    "beta": "betas",
    "LR": "lr",
    "numdata": "num_data",
    "clip_radios": "clip_radius",
}


def weight():
    return nn.Parameter(torch.ones(2))


def nanogpt_groups(model, weight_decay):
    """As nanoGPT's configure_optimizers makes them."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


WORDS = {"structure": "eigenbasis", "preconditioner": "identity"}
WITHOUT = [(info, name) for info in TABLE for name in WORDS if name not in info.build([weight()], num_data=10).defaults]


@pytest.mark.parametrize(("info", "name"), WITHOUT, ids=lambda one: getattr(one, "name", one))
def test_words_for_other_optimizers_of_ours_are_refused(info, name):
    """They are no marks of somebody else: a diagonal posterior would stand where an eigenbasis was asked for."""
    entry = {name: WORDS[name]}
    with pytest.raises(ValueError, match=rf"Invalid {name}='.*must be left out with {info.name}.*Vprop, Vario"):
        info.build([{"params": [weight()], **entry}], num_data=10)
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{name}'\. Vprop, Vario"):
        info.constructor([weight()], num_data=10, **info.required, **entry)


@pytest.mark.parametrize("info", TABLE, ids=lambda info: info.name)
class TestEveryOptimizer:
    def test_weight_decay_says_what_it_becomes(self, info):
        groups = nanogpt_groups(nn.Linear(3, 2), 0.1)
        message = rf"Invalid weight_decay=0\.1: must be 0 with {info.name}.*prior_precision=weight_decay\*num_data"
        with pytest.raises(ValueError, match=message):
            info.build(groups, num_data=10)
        optimizer = info.build(nanogpt_groups(nn.Linear(3, 2), 0.0), num_data=10)
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [weight()], "weight_decay": 0.1})
        assert len(optimizer.param_groups) == 2

    def test_momentum_says_what_it_becomes(self, info):
        with pytest.raises(ValueError, match=r"Invalid momentum=0\.9: must be 0 with .*betas=\(momentum, "):
            info.build([{"params": [weight()], "momentum": 0.9}], num_data=10)

    @pytest.mark.parametrize("value", [3.0, 0.0])
    @pytest.mark.parametrize("typo", TYPOS)
    def test_a_typo_names_what_was_meant(self, info, typo, value):
        """Also where it is zero: no prior is not the usual prior."""
        message = rf"Invalid {typo}={value} .*{info.name} has no such argument\. Did you mean {TYPOS[typo]}\?"
        with pytest.raises(ValueError, match=message):
            info.build([{"params": [weight()], typo: value}], num_data=10)

    def test_other_unknown_numbers_are_a_warning(self, info):
        match = rf"eps_root=1e-08, which is no argument of {info.name}.*It has: .*betas"
        with pytest.warns(UserWarning, match=match) as built:
            optimizer = info.constructor([{"params": [weight()], "eps_root": 1e-8}], num_data=10, **info.required)
        with pytest.warns(UserWarning, match=match) as added:
            optimizer.add_param_group({"params": [weight()], "eps_root": 1e-8})
        assert built[0].filename == added[0].filename == __file__  # where the group was written

    def test_what_is_somebody_elses_passes_in_silence(self, info):
        """Marks, words, whatever is off, and what schedulers and torch write."""
        entries = dict.fromkeys(ALLOWED - {"params", "param_names", "auto_prior"}, 0.5)
        entries |= {"use_muon": False, "amsgrad": False, "l2": None, "kind": "encoder", "weight_decay": 0.0}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer = info.build([{"params": [weight()]} | entries], num_data=10)
        assert optimizer.param_groups[0]["name"] == 0.5
        assert optimizer.param_groups[0]["variational_method"] == info.name


SCHEDULERS = {
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10, cycle_momentum=False),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "ReduceLROnPlateau": torch.optim.lr_scheduler.ReduceLROnPlateau,
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_groups_that_a_scheduler_has_written_to_build_another_optimizer(scheduler):
    model, optimizer = train(Vprop, num_data=50, steps=1)
    SCHEDULERS[scheduler](optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Vprop(optimizer.param_groups, num_data=50)
        Vprop(model.parameters(), num_data=50).load_state_dict(optimizer.state_dict())


def test_no_argument_of_torchs_optimizers_is_taken_for_a_typo():
    """Nor is any mark; only those that we have ourselves may be close to ours."""
    made = [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam]
    names = {name for constructor in made for name in constructor([weight()]).defaults} | {"decay", "scale", "speed_up"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names - set(Vprop([weight()], num_data=1).defaults) - {"weight_decay", "momentum"}:
            Vprop([{"params": [weight()], name: 0.5}], num_data=1)


def test_groups_of_torch_and_of_another_method_build_another_optimizer():
    """torch writes all arguments of an optimizer into the dicts it is given; those that are off ask for nothing."""
    groups = [{"params": [weight()]}]
    torch.optim.SGD(groups, lr=0.1)
    IVON(groups, num_data=50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = Vprop(groups, num_data=50)
    assert optimizer.param_groups[0]["variational_method"] == "Vprop"


def test_an_argument_of_another_method_is_not_lost_in_silence():
    with pytest.warns(UserWarning, match="rescale_lr=True, which is no argument of Vprop"):
        Vprop([{"params": [weight()], "rescale_lr": True}], num_data=50)


def test_the_remedy_is_followed():
    """prior_precision = weight_decay·num_data pulls a weight without gradient as weight decay pulls SGD's."""
    decayed, pulled = weight(), weight()
    sgd = torch.optim.SGD([{"params": [decayed], "weight_decay": 0.1}], lr=0.5)
    ours = vprop.Vprop([{"params": [pulled], "prior_precision": 0.1 * 50_000}], num_data=50_000, lr=0.5, mc_samples=0)
    ours.param_groups[0]["betas"] = (0.0, 0.0)
    decayed.grad, pulled.grad = torch.zeros(2), torch.zeros(2)
    sgd.step()
    ours.step()
    # The step is Newton-like: divided by the curvature, which of a prior alone is λ/N.
    torch.testing.assert_close(1 - pulled.detach(), (1 - decayed.detach()) / 0.1)
