"""A mixture from one call: the same training several times, from other initial weights and with other noise."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from vprop.checks import check_loss, check_model, check_seed, invalid, is_number, shown
from vprop.likelihood import LikelihoodLike, likelihood_of
from vprop.objective import LossFunction, Objective
from vprop.optim.cycles import CosineCycles
from vprop.optim.optimizer import VariationalOptimizer
from vprop.posterior import Mixture, Posterior
from vprop.posterior.predictive.inputs import Place, is_array
from vprop.precision import as_labels
from vprop.wrappers import unwrapped


def train_mixture(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module, int], VariationalOptimizer],
    loader: Iterable[Any],
    loss_fn: LossFunction,
    *,
    members: int = 4,
    epochs: int = 1,
    seed: int = 0,
    make_scheduler: Callable[[Any], Any] | None = None,
    likelihood: LikelihoodLike | None = None,
) -> Mixture:
    """Train ``members`` networks on the batches of ``loader``, one after the other: a :class:`vprop.Mixture`.

    Args:
        make_model: a new model; it is called with torch's random numbers seeded for each member, and afterwards they
            are as they were.
        make_optimizer: from a model and a seed to its optimizer, e.g.
            ``lambda model, seed: vprop.Vario(model.parameters(), num_data=1000, batch_size=32, seed=seed)``.
        loader: batches (x, y), read ``epochs`` times for every member.
        loss_fn: ``loss_fn(model(x), y)``, the mean loss of a batch. It has no parameters of its own to be learned, as
            the optimizers have those of the models.
        members: how many.
        epochs: passes over the loader for each.
        seed: member k has the seed ``seed + k``.
        make_scheduler: from an optimizer to a scheduler, which makes a step after every one of the optimizer's. With
            :class:`vprop.CosineCycles` every cycle's end is a member: ``members`` times ``cycles`` in all.
        likelihood: what ``predict`` assumes; by default what ``loss_fn`` is known to stand for.

    >>> import torch, vprop
    >>> x = torch.linspace(-1, 1, 32)[:, None]
    >>> ensemble = train_mixture(
    ...     lambda: torch.nn.Linear(1, 1),
    ...     lambda model, seed: vprop.Vprop(model.parameters(), num_data=32, seed=seed),
    ...     [(x, 2 * x)], torch.nn.functional.mse_loss, members=3, epochs=2)
    >>> ensemble
    Mixture(3 members, 2 weights in each, ess=32.0)
    """
    check_loss(loss_fn, "train_mixture(..., loss_fn)")
    usual = (("members", members, "4 members are a usual ensemble."), ("epochs", epochs, "Each is a pass over loader."))
    for name, value, remedy in usual:
        if not is_number(value, whole=True) or value < 1:
            raise invalid(name, value, "an integer >= 1", remedy)
    _refuse_parameters(loss_fn)
    _require_functions(make_model=make_model, make_optimizer=make_optimizer, make_scheduler=make_scheduler)
    _require_model_and_seed(make_optimizer)
    posteriors, trained = list[Posterior](), dict[int, nn.Parameter]()
    seed = check_seed(seed)
    for number in (number % 2**64 for number in range(seed, seed + int(members))):
        with torch.random.fork_rng():
            torch.manual_seed(number)
            model = make_model()
            check_model(model, "train_mixture(make_model, ...): what it returned")
            _refuse_again(unwrapped(model), [posterior.model for posterior in posteriors])
            optimizer = make_optimizer(model, number)
            _require_a_posterior(optimizer)
            _refuse_trained(unwrapped(model), optimizer, trained)
            scheduler = None if make_scheduler is None else _scheduler(make_scheduler, optimizer)
            own_loss = copy.deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn  # it may have a state
            for _ in _trained(model, optimizer, scheduler, loader, own_loss, epochs):
                posteriors.append(optimizer.posterior(model, **_likelihood(own_loss, likelihood)))
    return Mixture(posteriors)


def _likelihood(loss_fn: LossFunction, given: LikelihoodLike | None) -> dict[str, Any]:
    """For ``posterior()``: what was given, else what the loss stands for."""
    known = likelihood_of(loss_fn) if given is None else None
    if known is None:
        return {"likelihood": given}
    return {"likelihood": known[0], "noise_variance": known[1] if known[0] == "gaussian" else None}


def _refuse_parameters(loss_fn: LossFunction) -> None:
    """Refuse a loss that learns: no optimizer here holds its parameters, and they would stay as they are."""
    parameters = loss_fn.named_parameters() if isinstance(loss_fn, nn.Module) else ()
    learned = [name for name, p in parameters if p.requires_grad]
    if learned:
        raise ValueError(
            f"train_mixture(..., loss_fn): the {type(loss_fn).__name__} has parameters to be learned, {learned}, must "
            "have none: nothing would train them. Hold them fixed, GaussianLikelihood(v, learnable=False), and mend "
            "the noise afterwards with calibration.fit_noise_scale; or train each member in a loop with a loss and an "
            "optimizer of its own, and pass their posteriors to vprop.Mixture([...])."
        )


def _refuse_again(model: nn.Module, members: Iterable[nn.Module]) -> None:
    """Refuse the model of another member."""
    if any(model is member for member in members):
        raise ValueError(
            "train_mixture(make_model, ...): it returned the same model twice, must return a new one each time: "
            "members would be one network, trained on and on. Pass e.g. lambda: MyModel()."
        )


def _refuse_trained(model: nn.Module, optimizer: Any, trained: dict[int, Any]) -> None:
    """Refuse weights that another member has trained: they would be trained on and on. Others may be shared.

    ``trained`` are those of all members, which it keeps: a number of one that is gone may be another's.
    """
    own = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    shared = [name for name, p in model.named_parameters() if id(p) in own and id(p) in trained]
    if shared:
        raise ValueError(
            f"train_mixture(make_model, ...): it returned models that share the weights {shown(shared)}, must return "
            "new ones each time: members would be one network, trained on and on. Make all that is trained in "
            "make_model; copy.deepcopy(part) there is a copy of a part that was made before."
        )
    trained.update(own)


def _require_functions(**functions: Any) -> None:
    """Refuse a model, an optimizer or a scheduler in the place of what makes one for each member."""
    for name, function in functions.items():
        if function is None and name == "make_scheduler":
            continue
        if isinstance(function, nn.Module) or not callable(function):
            raise TypeError(
                f"train_mixture({name}): got {shown(function)}, must be a function that makes a new one for each "
                "member. Pass a lambda."
            )


def _require_model_and_seed(make_optimizer: Callable[..., Any]) -> None:
    """Refuse a function of the model alone: all members would have the same noise."""
    try:
        signature = inspect.signature(make_optimizer)
    except (TypeError, ValueError):  # a function that does not say what it takes
        return
    try:
        signature.bind(None, 0)
    except TypeError as error:
        raise TypeError(
            f"train_mixture(make_optimizer): it takes other arguments ({error}), must take a model and a seed. Pass "
            "e.g. lambda model, seed: vprop.Vario(model.parameters(), num_data=1000, batch_size=32, seed=seed)."
        ) from None


def _require_a_posterior(optimizer: Any) -> None:
    if not isinstance(optimizer, VariationalOptimizer):
        raise TypeError(
            f"train_mixture(make_optimizer): it returned a {type(optimizer).__name__}, must return an optimizer of "
            "vprop, which has a posterior. Pass e.g. lambda model, seed: vprop.Vario(model.parameters(), "
            "num_data=1000, batch_size=32, seed=seed)."
        )


def _scheduler(make_scheduler: Callable[[Any], Any], optimizer: Any) -> Any:
    """A function that forgot to return it would leave the step size as it is, in silence."""
    scheduler = make_scheduler(optimizer)
    if not callable(getattr(scheduler, "step", None)):
        raise TypeError(
            f"train_mixture(make_scheduler): it returned {shown(scheduler)}, must return a scheduler, whose step() is "
            "called after every step. Leave it out for a constant step size."
        )
    inner = [one for one in getattr(scheduler, "_schedulers", ()) if isinstance(one, CosineCycles)]
    if inner:
        raise TypeError(
            f"train_mixture(make_scheduler): it returned a {type(scheduler).__name__} with CosineCycles inside, must "
            "return the CosineCycles itself: its cycles' ends would not be noticed. With others beside it, train in a "
            "loop of your own, and pass the posteriors at the ends to vprop.Mixture([...])."
        )
    return scheduler


def _trained(
    model: nn.Module, optimizer: Any, scheduler: Any, loader: Iterable[Any], loss_fn: LossFunction, epochs: int
) -> Iterator[None]:
    """Train, and stop at the end of every cycle of the scheduler, or at the end, if it has no cycles."""
    place, cycles = Place.of(model), scheduler if isinstance(scheduler, CosineCycles) else None
    if cycles is not None and (batches := _known_length(loader)) is not None:
        _require_length(cycles, batches * epochs)
    for _ in range(epochs):
        batches = 0
        for x, y in _pairs(loader):
            y = tree_map(lambda leaf: _target(leaf, place), y)
            optimizer.step(Objective(model, loss_fn, place.put(x), y))
            if scheduler is not None:
                scheduler.step()
            batches += 1
            if cycles is not None and cycles.ended:
                yield
        if batches == 0:
            raise ValueError(
                "train_mixture(loader): there are no batches in a pass. Pass a DataLoader or a list of (x, y), not an "
                "iterator that is used up."
            )
    if cycles is None:
        yield
    else:
        _require_length(cycles, cycles.last_epoch)  # of a loader that did not say it, or said something else


def _known_length(loader: Any) -> int | None:
    """Of a pass, as far as the loader says it."""
    try:
        return len(loader)
    except TypeError:
        return None


def _require_length(cycles: CosineCycles, steps: int) -> None:
    """Refuse cycles for a training of another length: the last one would not end."""
    if cycles.total_steps != steps:
        raise ValueError(
            f"train_mixture(make_scheduler): CosineCycles(total_steps={cycles.total_steps}) for a training of {steps} "
            f"steps. Pass total_steps={steps}."
        )


def _target(leaf: Any, place: Place) -> Any:
    """A part of the targets where the model is; integers of an array are class numbers, as torch's losses take them."""
    if is_array(leaf):
        return as_labels(place.put(leaf))
    return place.put(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _pairs(loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """The batches, if they are pairs: rows of a tensor in the place of a loader would be taken apart."""
    is_read = isinstance(loader, Iterable) or hasattr(loader, "__getitem__")  # a Dataset of batches has the second only
    if isinstance(loader, torch.Tensor) or not is_read:
        raise TypeError(
            f"train_mixture(loader): got a {type(loader).__name__}, must be a loader of batches (x, y). Pass a "
            "DataLoader or a list of them."
        )
    for batch in loader:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise TypeError(
                f"train_mixture(loader): got a batch of type {type(batch).__name__}, must be a pair (x, y). Several "
                "inputs go into one x, a tuple or a dict."
            )
        yield batch[0], batch[1]
