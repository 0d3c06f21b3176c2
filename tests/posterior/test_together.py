"""What can be asked of a posterior goes together: calibrated, pruned, mixed, of a last layer, linearised, saved."""

import pytest
import torch
from torch import nn

import vprop
from vprop.calibration import fit_temperature, fit_variance_scale
from vprop.posterior import Scales


def posterior(seed=0, full=False, classes=3, structure=None):
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, classes)).double()
    x = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, classes, (60,), generator=generator)
    make = vprop.VONG if full else vprop.Vprop
    groups = model.parameters()
    if structure == "composed":
        kinds = ("eigenbasis", "diagonal", "full", "diagonal")
        groups = [{"params": [p], "structure": kind} for p, kind in zip(groups, kinds, strict=True)]
    further = {"structure": "eigenbasis", "basis_every": 1} if structure == "eigenbasis" else {}
    optimizer = make(groups, lr=0.1, num_data=60, batch_size=60, **further)
    objective = vprop.Objective(model, nn.functional.cross_entropy, x, y)
    for _ in range(5):
        optimizer.step(objective)
    return optimizer.posterior(model, likelihood="categorical")


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(9)
    return torch.randn(40, 4, generator=generator, dtype=torch.float64), torch.randint(0, 3, (40,), generator=generator)


def with_temperature(q, temperature):
    """Logits divided by it, and nothing else."""
    import copy

    other = copy.copy(q)
    other.scales = Scales(temperature=temperature)
    return other


def covariance_of(q):
    """Σ as a matrix, from products with it."""
    return q._covariance_times(torch.eye(q.num_parameters, dtype=torch.float64))


KINDS = {
    "eigenbasis": lambda: posterior(structure="eigenbasis"),
    "composed": lambda: posterior(structure="composed"),
    "last layer, eigenbasis": lambda: posterior(structure="eigenbasis").last_layer(),
    "last layer, composed": lambda: posterior(structure="composed").last_layer(),
    "diagonal": lambda: posterior(),
    "full": lambda: posterior(full=True),
    "pruned": lambda: posterior().prune(0.5),
    "pruned full": lambda: posterior(full=True).prune(0.3),
    "last layer": lambda: posterior().last_layer(),
    "pruned last layer": lambda: posterior().last_layer().prune(0.5),
    "mixture": lambda: vprop.Mixture([posterior(0), posterior(1, full=True)]),
    "mixture of last layers": lambda: vprop.Mixture([posterior(0), posterior(1)]).last_layer(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_temperature_divides_logits_however_they_are_predicted(kind, data):
    x, _ = data
    q = KINDS[kind]()
    calibrated = with_temperature(q, 2.0)
    loader = torch.utils.data.DataLoader(x, batch_size=16)
    plain = q.predict(x, 8).samples
    torch.testing.assert_close(calibrated.predict(x, 8).samples, plain / 2)
    torch.testing.assert_close(calibrated.predict(loader, 8).samples, plain / 2)
    if "mixture" not in kind:
        before, after = (each.predict(x, method="linearized") for each in (q, calibrated))
        torch.testing.assert_close(after.output_mean, before.output_mean / 2)
        torch.testing.assert_close(after.output_covariance, before.output_covariance / 4)


@pytest.mark.parametrize("kind", ["diagonal", "pruned", "pruned full", "mixture", "eigenbasis", "composed"])
def test_what_was_calibrated_is_saved(kind, data, tmp_path):
    x, y = data
    fit = fit_temperature(KINDS[kind](), x, y)
    assert fit.value != 1
    fit.posterior.save(tmp_path / "q.safetensors")
    loaded = vprop.load_posterior(tmp_path / "q.safetensors", fit.posterior.model)
    assert loaded.scales == fit.posterior.scales
    torch.testing.assert_close(loaded.predict(x, 8).samples, fit.posterior.predict(x, 8).samples)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mixture of last layers"])
def test_a_scaled_variance_is_that_of_every_part(kind, data):
    q = KINDS[kind]()
    wider = q._with_variance_times(4.0)
    if kind == "mixture":
        for before, after in zip(q.members, wider.members, strict=True):
            for name, variance in before.variance.items():
                torch.testing.assert_close(after.variance[name], 4 * variance)
    else:
        for name, variance in q.variance.items():
            torch.testing.assert_close(wider.variance[name], 4 * variance)
    assert isinstance(fit_variance_scale(q, *data).value, float)


@pytest.mark.parametrize("kind", ["mixture", "composed"])
def test_members_and_parts_know_what_an_example_counts_in_them(kind, data, tmp_path):
    """They are asked in the place of the whole; a scale of the variance leaves the changes of losses as they are."""
    q = KINDS[kind]()
    scaled = q._with_variance_scale(4.0)
    scaled.save(tmp_path / "q.safetensors")
    loaded = vprop.load_posterior(tmp_path / "q.safetensors", q.model)

    def changes(q):
        inner = q.members[0] if kind == "mixture" else q.parts["full"]
        return inner.sensitivity(data, loss_fn=nn.functional.cross_entropy).loss_change

    torch.testing.assert_close(changes(scaled), changes(q))
    torch.testing.assert_close(changes(loaded), changes(q))


def test_parts_have_the_temperature_of_the_whole():
    model = nn.Linear(2, 1)
    groups = [{"params": [model.weight], "structure": "full"}, {"params": [model.bias]}]
    q = vprop.Vprop(groups, num_data=10, temperature=0.5).posterior(model)
    assert [(part.temperature, part.ess) for part in q.parts.values()] == [(0.5, 20.0)] * 2


def test_a_mixture_of_calibrated_members_is_calibrated_alike_or_refused(data):
    x, _ = data
    members = [with_temperature(posterior(seed), 2.0) for seed in (0, 1)]
    plain = vprop.Mixture([posterior(seed) for seed in (0, 1)])
    mixed = vprop.Mixture(members)
    torch.testing.assert_close(mixed.predict(x, 8).samples, plain.predict(x, 8).samples / 2)
    assert vprop.Mixture([mixed, members[0]]).scales == Scales(temperature=2.0)
    with pytest.raises(ValueError, match=r"number 0 is calibrated with .*Calibrate the mixture"):
        vprop.Mixture([members[0], posterior(1)])
    with pytest.raises(ValueError, match="Calibrate the mixture"):
        vprop.Mixture([mixed, posterior(2)])


@pytest.mark.parametrize("kind", ["diagonal", "full", "pruned", "pruned full", "eigenbasis", "composed"])
def test_linearised_predictions_have_the_covariance_of_draws(kind, data):
    x, _ = data
    q = KINDS[kind]()
    draws = [torch.cat([v.flatten() for v in q._draw(0, i).values()]) for i in range(4000)]
    difference = (torch.stack(draws).T.cov() - covariance_of(q)).abs()
    scale = covariance_of(q).diagonal().sqrt()
    assert float((difference / (scale[:, None] * scale + 1e-12)).max()) < 0.1  # 5 to 6 standard errors
    parameters = {name: mean.clone() for name, mean in q.mean.items()}
    jacobian = torch.func.jacrev(lambda weights: torch.func.functional_call(q.model, weights, x[:3]))(parameters)
    rows = torch.cat([part.flatten(2) for part in jacobian.values()], -1)
    expected = rows @ q._covariance_times(rows.flatten(0, 1)).view_as(rows).mT
    torch.testing.assert_close(q.predict(x[:3], method="linearized").output_covariance, expected)


@pytest.mark.parametrize("kind", ["diagonal", "eigenbasis", "composed"])
def test_a_last_layer_has_the_marginal(kind):
    q = KINDS[kind]()
    head = q.last_layer()
    start = q.num_parameters - head.num_parameters
    torch.testing.assert_close(covariance_of(head), covariance_of(q)[start:, start:])


def test_forgetting_in_rotated_coordinates_takes_what_the_examples_added(data):
    q = posterior(structure="eigenbasis")
    x = data[0][:2]
    y = torch.tensor([0, 1])
    less = q.forget((x, y))
    assert less.ess == pytest.approx(q.ess - 2)
    bases = {name: torch.kron(q.left_basis[name], q.right_basis.get(name, torch.eye(1, dtype=torch.float64)))
             for name in q.mean}  # fmt: skip
    turn = torch.block_diag(*bases.values())
    weights = {name: mean.clone() for name, mean in q.mean.items()}
    call = torch.func.functional_call
    jacobian = torch.func.jacrev(lambda w: call(q.model, w, x))(weights)
    rows = torch.cat([part.flatten(2) for part in jacobian.values()], -1)
    probs = call(q.model, weights, x).softmax(-1)
    curvature = torch.einsum(
        "eow,eop,epv->wv", rows, torch.diag_embed(probs) - probs[:, :, None] * probs[:, None], rows
    )
    kept = (turn.T @ curvature @ turn).diagonal()
    before, after = (torch.cat([v.flatten() for v in p.rotated_variance.values()]) for p in (q, less))
    torch.testing.assert_close(1 / after, 1 / before - kept)
    slope = torch.einsum("eow,eo->w", rows, probs - torch.eye(3, dtype=torch.float64)[y])
    shift = torch.cat([(less.mean[name] - q.mean[name]).flatten() for name in q.mean])
    torch.testing.assert_close(shift, turn @ (after * (turn.T @ slope)))


def test_what_has_no_answer_says_what_to_do_instead(data, tmp_path):
    mixture = vprop.Mixture([posterior(0), posterior(1)])
    with pytest.raises(ValueError, match=r"Linearise each of mixture\.members"):
        mixture.predict(data[0], method="linearized")
    with pytest.raises(ValueError, match=r"posterior.last_layer\(\).prune"):
        posterior().prune(0.5).last_layer()
    with pytest.raises(TypeError, match=r"as_diagonal\(\).prune"):
        posterior(structure="eigenbasis").prune(0.5)
    with pytest.raises(ValueError, match="Save that one, load it, and call last_layer"):
        posterior().last_layer().save(tmp_path / "q.safetensors")
    last = mixture.last_layer()
    with pytest.raises(ValueError, match="Save that one, load it, and call last_layer"):
        last.save(tmp_path / "q.safetensors")
    mixture.save(tmp_path / "q.safetensors")
    again = vprop.load_posterior(tmp_path / "q.safetensors", mixture.members[0].model).last_layer()
    assert torch.equal(again.predict(data[0], 6).samples, last.predict(data[0], 6).samples)


def test_draws_of_a_mixture_are_those_of_its_models(data):
    x, _ = data
    mixture = vprop.Mixture([posterior(0), posterior(1), posterior(2)], [1, 2, 5])
    with torch.no_grad():
        apart = torch.stack([model(x) for model in mixture.sampled_models(7, seed=3)])
    torch.testing.assert_close(mixture.predict(x, 7, seed=3).samples, apart)
    assert [len(samples) for _, samples in mixture._shared_out(800, 0)] == [100, 200, 500]


# -- what a last layer, a number among the parameters and a calibration must not change --------------------------------


class Ended(nn.Module):
    """A head, and what is done with its output."""

    def __init__(self, end, head=None):
        super().__init__()
        self.body = nn.Linear(2, 3)
        self.head = nn.Linear(3, 2) if head is None else head
        self.end = end

    def forward(self, x):
        return self.end(self.head(torch.tanh(self.body(x))))


def small_posterior(model, **arguments):
    model = model.double()
    optimizer = vprop.Vprop(model.parameters(), num_data=50, hess_init=1.0)
    return optimizer.posterior(model, likelihood="gaussian", **arguments)


@pytest.mark.parametrize(
    "end", [nn.ReLU(inplace=True), lambda out: out.div_(4), lambda out: out.view(-1).mul_(2).view(-1, 2)]
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_head_whose_output_is_written_into_is_refused(end, mode):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        q = small_posterior(Ended(end))
    with mode(), pytest.raises(ValueError, match="something is done with it afterwards"):
        q.last_layer("head").predict(torch.full((4, 2), -3.0, dtype=torch.float64))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_head_that_writes_into_its_input_gets_the_same_for_every_draw(mode):
    head = nn.Sequential(nn.SiLU(inplace=True), nn.Linear(3, 2))
    q = small_posterior(Ended(nn.Identity(), head))._with_variance_times(1e-30)
    x = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with mode():
        torch.testing.assert_close(q.last_layer("head").predict(x, 3).samples, q.predict(x, 3).samples)
        torch.testing.assert_close(
            q.last_layer("head").predict(x, method="linearized").output_mean, q.predict(x, 1).samples[0]
        )


class Scaled(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.linear = nn.Linear(2, outputs)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.linear(x) * self.scale


@pytest.mark.parametrize(("outputs", "rows"), [(1, 4), (3, 3), (3, 1), (2, 5)])
@pytest.mark.parametrize("optimizer", [vprop.Vprop, vprop.VONG])
def test_a_number_among_the_parameters_is_one_column(optimizer, outputs, rows):
    model = Scaled(outputs).double()
    q = optimizer(model.parameters(), num_data=20, hess_init=1.0).posterior(model, likelihood="gaussian")
    x = torch.randn(rows, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    jacobian = torch.func.jacrev(lambda w: torch.func.functional_call(model, w, x))(dict(q.mean))
    flat = torch.cat([jacobian[name].reshape(rows, outputs, -1) for name in q.mean], -1)
    expected = flat @ covariance_of(q) @ flat.mT
    torch.testing.assert_close(q.predict(x, method="linearized").output_covariance, expected)
    y = torch.zeros(rows, outputs, dtype=torch.float64)
    assert len(q.sensitivity((x, y))) == rows


def exact_regression(noise):
    """Three weights, thirty rows: the exact posterior, of all rows or of all but the first two."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(30, 3, dtype=torch.float64, generator=generator)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    y = y + 0.5 * torch.randn(30, 1, dtype=torch.float64, generator=generator)

    def of(rows, ess):
        precision = x[rows].T @ x[rows] / noise + torch.eye(3, dtype=torch.float64)
        mean = torch.linalg.solve(precision, x[rows].T @ y[rows] / noise)
        prior = vprop.posterior.GaussianPrior(
            {"weight": torch.zeros((), dtype=torch.float64)}, {"weight": torch.ones((), dtype=torch.float64)}
        )
        return vprop.posterior.FullPosterior(
            nn.Linear(3, 1, bias=False).double(), {"weight": mean.T.contiguous()}, precision, prior, ess=ess,
            temperature=1.0, likelihood="gaussian", noise_variance=noise,
        )  # fmt: skip

    return x, y, of(slice(None), 30.0), of(slice(2, None), 28.0)


@pytest.mark.parametrize(("noise_scale", "variance_scale"), [(1.0, 1.0), (8.0, 1.0), (1.0, 0.5), (3.0, 2.0)])
def test_forgetting_does_not_depend_on_calibration(noise_scale, variance_scale):
    import copy

    x, y, everything, rest = exact_regression(0.25)
    q = copy.copy(everything._with_variance_times(variance_scale))
    q.scales = Scales(noise=noise_scale, variance=variance_scale)
    q.noise_variance = q.noise_variance * noise_scale
    less = q.forget((x[:2], y[:2]))
    torch.testing.assert_close(less.mean["weight"], rest.mean["weight"])
    torch.testing.assert_close(less.covariance, variance_scale * rest.covariance)
    assert less.ess == pytest.approx(28)
    plain, scaled = everything.sensitivity((x, y)), q.sensitivity((x, y))
    torch.testing.assert_close(scaled.leverage, plain.leverage)
    torch.testing.assert_close(scaled.prediction_change, plain.prediction_change)
    torch.testing.assert_close(scaled.weight_change, plain.weight_change / variance_scale**0.5)


def test_a_last_layers_examples_meet_the_body_of_the_snapshot(data, tmp_path):
    x, y = data
    q = posterior()
    q.save(tmp_path / "q.safetensors")
    fresh = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    loaded = vprop.load_posterior(tmp_path / "q.safetensors", fresh).last_layer()
    torch.testing.assert_close(loaded.sensitivity((x, y)).loss, q.last_layer().sensitivity((x, y)).loss)
    torch.testing.assert_close(loaded.sensitivity((x, y)).loss, q.sensitivity((x, y)).loss)


@pytest.mark.parametrize("classes", [4, 5])
def test_labels_in_time_have_their_classes_last(classes):
    model = nn.Linear(2, classes).double()
    q = vprop.Vprop(model.parameters(), num_data=20).posterior(model, likelihood="categorical")
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(3, 4, 2, dtype=torch.float64, generator=generator)
    y = torch.randint(0, classes, (3, 4), generator=generator)
    y[0, 0] = classes - 1
    expected = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").view(3, 4).mean(1)
    torch.testing.assert_close(q.sensitivity((x, y)).loss, expected.detach())
    own = q.sensitivity((x, y), loss_fn=lambda out, y: nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()))
    torch.testing.assert_close(own.loss, expected.detach())
    with pytest.raises(ValueError, match=f"there is a label {classes}, must be from 0 to {classes - 1}"):
        q.sensitivity((x, y.clamp_min(classes)))


def test_a_linearised_summary_does_not_depend_on_how_the_data_are_cut(data):
    x, q = data[0][:6], posterior()
    whole, cut = (q.predict(x, method="linearized", keep="summary", batch_size=size) for size in (None, 2))
    torch.testing.assert_close(cut.mutual_information, whole.mutual_information)
    torch.testing.assert_close(cut.std, whole.std)
    torch.testing.assert_close(
        q.predict(x, method="linearized", batch_size=4).samples, q.predict(x, method="linearized").samples
    )


def test_a_pruned_full_posterior_has_leverages(data):
    assert posterior().prune(0.3).sensitivity(data).leverage is None
    assert posterior(full=True).prune(0.3).sensitivity(data).leverage is not None


def test_batches_are_not_chosen_from_independent_draws(data):
    with pytest.raises(TypeError, match="drawn independently"):
        vprop.acquisition.batch_bald(posterior().predict(data[0], method="linearized"), 2)
