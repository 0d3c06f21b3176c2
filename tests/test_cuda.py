"""What only a GPU can show. Run with `make test-cuda`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.harness import assert_same_run, attached_step, closure_step, make_batch, make_model, split, train
from tests.table import cases
from vprop import IVON, Vario, Vprop, load_posterior
from vprop.noise import Draw, normal, normals_like, portable_normal

pytestmark = pytest.mark.cuda


def to_cpu(model, optimizer):
    """The run with its tensors on the CPU, to compare."""
    twin = make_model(next(model.parameters()).dtype)
    twin.load_state_dict(model.state_dict())
    other = Vprop(twin.parameters(), num_data=1)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        other.state[q] = {key: value.cpu() for key, value in optimizer.state[p].items()}
    return twin, other


def train_on(device, case, steps=4, dtype=torch.float32, **arguments):
    model = make_model(dtype).to(device)
    optimizer = case(model.parameters(), **arguments)
    for step in range(steps):
        closure_step(optimizer, model, [tuple(tensor.to(device) for tensor in make_batch(dtype=dtype, seed=step))])
    return model, optimizer


def test_noise_is_the_same_to_float32_rounding():
    draw = Draw(seed=3, parameter=2, step=5, sample=1)
    cpu, cuda = normal(0, 1_000_003, draw), normal(0, 1_000_003, draw, device="cuda").cpu()
    assert (cpu - cuda).abs().max() < 5e-6
    parameters = [torch.zeros(3, 5, device="cuda"), torch.zeros(7, device="cuda")]
    for i, noise in normals_like(parameters, [Draw(1, i, torch.tensor(4, device="cuda")) for i in range(2)]):
        expected = normal(0, parameters[i].numel(), Draw(1, i, 4)).view(parameters[i].shape)
        torch.testing.assert_close(noise.cpu(), expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("case", cases())
def test_same_run_on_both_devices(case):
    # Eigenvectors amplify the difference of two roundings by the gaps between eigenvalues.
    dtype = torch.float64 if case.arguments.get("structure") == "eigenbasis" else torch.float32
    runs = [train_on(device, case, dtype=dtype) for device in ("cpu", "cuda")]
    assert_same_run(runs[0], to_cpu(*runs[1]), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", cases(first_only=True))
def test_half_precision(case, dtype):
    model, optimizer = train_on("cuda", case, dtype=dtype)
    assert all(optimizer.state[p]["mean"].dtype == torch.float32 for p in model.parameters())


def test_mixed_devices_in_one_optimizer():
    on_cpu, on_cuda = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = Vprop([on_cpu, on_cuda], num_data=10, lr=0.1, seed=0)
    for _ in range(3):

        def closure():
            optimizer.zero_grad()
            loss = on_cpu.square().sum() + on_cuda.square().sum().cpu()
            loss.backward()
            return loss

        optimizer.step(closure)
    assert (on_cpu < 1).all()
    assert (on_cuda < 1).all()


def test_a_checkpoint_moves_between_devices():
    case = cases(first_only=True)[0].values[0]
    reference = train(case, steps=2)
    model = make_model().cuda()
    model.load_state_dict(reference[0].state_dict())
    optimizer = case(model.parameters())
    optimizer.load_state_dict(reference[1].state_dict())
    state = optimizer.state[model[0].weight]
    assert state["hess"].device.type == "cuda"
    assert state["step"].device.type == "cpu"


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("case", cases(at_most_samples=1, any_loop=True, has_hess=True))
def test_cuda_graph_draws_fresh_noise_in_every_replay(case, set_to_none):
    """capturable: sample, forward, backward and step in one graph; replays equal the eager run."""
    batch = [tensor.cuda() for tensor in make_batch()]

    def one_step(model, optimizer):
        optimizer.zero_grad(set_to_none=set_to_none)
        with optimizer.sampled_params():
            F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    eager_model, model = make_model().cuda(), make_model().cuda()
    eager, optimizer = (
        case(m.parameters(), capturable=True, lr=torch.tensor(0.05).cuda()) for m in (eager_model, model)
    )
    for _ in range(8):
        one_step(eager_model, eager)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            one_step(model, optimizer)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_step(model, optimizer)
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert_same_run(to_cpu(eager_model, eager), to_cpu(model, optimizer), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "arguments"), [(Vprop, {"batch_size": 12}), (Vario, {"batch_size": 12}), (IVON, {})])
def test_a_cuda_graph_of_an_eigenbasis(kind, arguments):
    """Bases are refreshed between replays; with a refresh after every step that is the eager run."""
    batch, runs = [tensor.cuda() for tensor in make_batch()], []
    for captured in (False, True):
        model = make_model().cuda()
        facts = {"num_data": 200, "structure": "eigenbasis", "basis_every": 1, "capturable": True}
        optimizer = kind(model.parameters(), lr=torch.tensor(0.01).cuda(), **facts, **arguments)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3 if captured else 20):
                closure_step(optimizer, model, [batch])
        torch.cuda.current_stream().wait_stream(stream)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                closure_step(optimizer, model, [batch])
            turn = torch.cuda.CUDAGraph()
            for step in range(4, 21):
                graph.replay()
                if step == 5:  # the eager run has eigenvectors computed anew in steps 1, 2, 4, 8 and 16
                    with torch.cuda.graph(turn):
                        optimizer.refresh_bases(solve=False)
                if step in (4, 8, 16):
                    optimizer.refresh_bases()
                else:
                    turn.replay()
        runs.append(to_cpu(model, optimizer))
    assert_same_run(*runs, rtol=1e-4, atol=1e-5)


def test_a_step_after_a_capture_reads_its_own_gradients():
    """What a capture writes into tables is written when the graph runs, not before."""
    twins = [make_model().cuda(), make_model().cuda()]
    plain, captured = (Vprop(model.parameters(), num_data=100, capturable=True, lr=0.1) for model in twins)
    graph, batch = torch.cuda.CUDAGraph(), [tensor.cuda() for tensor in make_batch()]
    for model, optimizer in zip(twins, (plain, captured), strict=True):
        closure_step(optimizer, model, [batch])
    with torch.cuda.graph(graph):
        closure_step(captured, twins[1], [batch])
    for step in range(3):
        fresh = [tuple(tensor.cuda() for tensor in make_batch(seed=step))]
        for model, optimizer in zip(twins, (plain, captured), strict=True):
            optimizer.zero_grad()
            closure_step(optimizer, model, fresh)
    assert_same_run(to_cpu(twins[0], plain), to_cpu(twins[1], captured), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", cases(at_most_samples=1, any_loop=True, has_hess=True))
def test_an_attached_model_trains_as_with_a_closure(case):
    runs = []
    for loop in (attached_step, closure_step):
        model = make_model().cuda()
        optimizer = case(model.parameters())
        attachment = optimizer.attach(model) if loop is attached_step else None
        for step in range(5):
            loop(optimizer, model, [[tensor.cuda() for tensor in make_batch(seed=step)]])
        if attachment is not None:
            attachment.remove()
        runs.append(to_cpu(model, optimizer))
    assert_same_run(*runs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("arguments", "state"), [({}, 1), ({"betas": (0.9, 0.999)}, 2)])
def test_no_temporary_of_the_size_of_the_parameters(arguments, state):
    params = [torch.nn.Parameter(torch.randn(1 << 20, device="cuda")) for _ in range(16)]
    for p in params:
        p.grad = torch.randn_like(p)
    before, size = torch.cuda.memory_allocated(), 4 * sum(p.numel() for p in params)
    optimizer = Vprop(params, num_data=100, **arguments)
    for _ in range(2):
        optimizer.step(lambda: 0.0)
    assert (torch.cuda.memory_allocated() - before) / size < state + 0.01
    torch.cuda.reset_peak_memory_stats()
    optimizer.step(lambda: 0.0)
    assert (torch.cuda.max_memory_allocated() - before) / size < state + 0.01


def test_channels_last_and_contiguous_are_the_same_model():
    runs, x = [], torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)).cuda()
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 5, 2))
        model = model.cuda().to(memory_format=memory_format)
        optimizer = Vprop(model.parameters(), num_data=100, lr=0.1, fused=True)
        for _ in range(3):
            optimizer.step(lambda m=model, o=optimizer: (o.zero_grad(), m(x).square().mean().backward()))
        runs.append([p.detach().contiguous() for p in model.parameters()])
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-5)


def test_more_elements_than_32_bits_can_count():
    size, last = 2**31 + 1030, 1000
    p = torch.nn.Parameter(torch.zeros(size, device="cuda"))
    p.grad = torch.zeros_like(p)
    p.grad[-last:] = 1.0
    optimizer = Vprop([p], num_data=4, prior_precision=0.0, hess_init=1.0, lr=0.5, betas=(0.0, 0.5))
    with optimizer.sampled_params():
        noise = portable_normal(size - last, size, Draw(0, 0, 0))
        torch.testing.assert_close(p[-last:].detach().cpu(), noise / 2, rtol=1e-5, atol=2e-6)
    optimizer.step()
    hess = optimizer.state[p]["hess"]
    assert (hess[-last:] == 0.5 * 1 + 0.5 * 4).all()  # ess·g² is 4
    assert (hess[:-last] == 0.5).all()
    torch.testing.assert_close(p[-last:].detach(), torch.full((last,), -0.5 / 2.5, device="cuda"))


def test_grad_scaler_with_autocast():
    model = make_model().cuda()
    optimizer = Vprop(model.parameters(), num_data=100)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(5):
        x, y = (tensor.cuda() for tensor in make_batch(seed=step))
        optimizer.zero_grad()
        with optimizer.sampled_params(), torch.autocast("cuda", torch.float16):
            scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all((optimizer.state[p]["hess"] < 10).all() for p in model.parameters())


def test_bad_gradients_are_reported_when_the_posterior_is_asked_for():
    model = make_model().cuda()
    optimizer = Vprop(model.parameters(), num_data=100, mc_samples=0)
    F.cross_entropy(model(make_batch()[0].cuda()), make_batch()[1].cuda()).backward()
    model[0].bias.grad[0] = torch.nan
    optimizer.step()
    with pytest.warns(RuntimeWarning, match="1 gradient elements were NaN or infinite"):
        optimizer.posterior(model)


@pytest.mark.parametrize("case", cases(first_only=True, any_loop=True, has_hess=True))
def test_compiled_by_inductor(case):
    torch._dynamo.reset()
    runs = []
    for compiled in (False, True):
        model = make_model().cuda()
        optimizer = case(model.parameters())
        if compiled:
            optimizer.step = torch.compile(optimizer.step)
        for step in range(4):
            with optimizer.sampled_params():
                for x, y in split(make_batch(seed=step), 1):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x.cuda()), y.cuda()).backward()
            optimizer.step()
        runs.append(to_cpu(model, optimizer))
    assert_same_run(*runs, rtol=1e-4, atol=1e-5)


def test_posterior_files_move_between_devices(tmp_path):
    model, optimizer = train_on("cuda", Vprop, num_data=100)
    posterior = optimizer.posterior(model, likelihood="categorical")
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = load_posterior(tmp_path / "posterior.safetensors", make_model())
    x, _ = make_batch()
    torch.testing.assert_close(loaded.predict(x).probs, posterior.predict(x.cuda()).probs.cpu(), rtol=1e-4, atol=1e-5)
