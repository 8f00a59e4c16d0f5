"""An update never waits for the device: nothing in it asks a tensor for its value, and nothing in it leaves the device."""

import shutil

import pytest
import torch

import micro
import rambo_baseline as rambo

OBS_DIM, ACT_DIM, BATCH, MODEL_ROWS = 4, 2, 16, 12
WAITS = ("item", "cpu", "numpy", "tolist", "__bool__", "__float__", "__int__", "__index__", "__array__")
SIZES = dict(hidden_size=8, batch_size=BATCH, num_models=3, num_elites=2)
BRANCHES = {
    "the means": dict(penalty_draws=0),
    "shared draws": dict(penalty_draws=2),
    "own draws": dict(penalty_draws=2, common_noise=False),
    "eq8": dict(penalty="eq8", penalty_draws=1, common_noise=False),
    "mobile": dict(penalty="mobile"),
    "none": dict(penalty="none"),
    "fixed alpha": dict(auto_alpha=False, deterministic_backup=True, clamp_target=False),
}


def random_rows(device: torch.device) -> torch.Tensor:
    return torch.rand(BATCH, 2 * OBS_DIM + ACT_DIM + 2, device=device)


def draws_on(device: torch.device, draw):
    """The draws of an update, each time anew. The device that has no values has no generator either: moved there."""
    if device.type == "cpu":
        return lambda: draw(torch.Generator())
    noise = draw(torch.Generator())
    return lambda: type(noise)(*(part.to(device) for part in noise))


def micro_update(device: torch.device, wrap=lambda update: update, **changes):
    """Everything built, and the update still to be called."""
    args = micro.Args(**SIZES, **changes)
    ensemble = micro.Ensemble(args.num_models, OBS_DIM, ACT_DIM, 8).to(device).requires_grad_(False)
    agent, rows = micro.Agent(OBS_DIM, ACT_DIM, args, device), random_rows(device)
    draw = draws_on(device, lambda rng: micro.draw_noise(args, MODEL_ROWS, OBS_DIM, ACT_DIM, rng))
    update = wrap(micro.update)
    return lambda: update(agent, ensemble, micro.unpack(rows, OBS_DIM, ACT_DIM), draw(), args)


def rambo_update(device: torch.device, wrap=lambda update: update, **changes):
    args = rambo.Args(**SIZES, **changes)
    agent, rows = rambo.Agent(OBS_DIM, ACT_DIM, args, device), random_rows(device)
    draw = draws_on(device, lambda rng: rambo.draw_noise(args, ACT_DIM, rng))
    update = wrap(rambo.update)
    return lambda: update(agent, rambo.unpack(rows, OBS_DIM, ACT_DIM), draw(), args)


def adversarial_update(device: torch.device):
    args = rambo.Args(**SIZES)
    ensemble = rambo.Ensemble(args.num_models, OBS_DIM, ACT_DIM, 8).to(device)
    agent, obs = rambo.Agent(OBS_DIM, ACT_DIM, args, device), random_rows(device)[:, :OBS_DIM]
    elite = torch.zeros(BATCH, dtype=torch.long, device=device)
    noise = torch.zeros(BATCH, ACT_DIM, device=device), torch.zeros(BATCH, OBS_DIM + 1, device=device)
    optimizer = rambo.dynamics_optimizer(ensemble, args.dynamics_lr)

    def step() -> torch.Tensor:
        terminated = rambo.TERMINATION["HalfCheetah"]
        loss, *_ = rambo.adversarial_loss(agent, ensemble, terminated, obs, elite, *noise, args)
        rambo.take_step(optimizer, loss)
        return loss

    return step


UPDATES = {f"micro, {name}": (micro_update, changes) for name, changes in BRANCHES.items()}
UPDATES |= {"rambo": (rambo_update, {}), "rambo, fixed alpha": (rambo_update, dict(auto_alpha=False))}
UPDATES |= {"rambo, adversarial": (adversarial_update, {})}


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_asks_no_tensor_for_its_value(name, monkeypatch):
    build, changes = UPDATES[name]
    update = build(torch.device("cpu"), **changes)

    def refuse(*_, **__):
        raise AssertionError("the update waits for the device")

    for method in WAITS:
        monkeypatch.setattr(torch.Tensor, method, refuse)
    metrics = update()
    monkeypatch.undo()
    assert torch.isfinite(metrics).all()


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_stays_on_its_device(name, monkeypatch):
    """On the device that has shapes but no values: a tensor made on the CPU by mistake, or a value asked for, would raise."""
    adam = torch.optim.Adam  # its fused form is not made for that device
    monkeypatch.setattr(torch.optim, "Adam", lambda *args, fused, **options: adam(*args, **options))
    build, changes = UPDATES[name]
    assert build(torch.device("meta"), **changes)().device.type == "meta"


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("build", [micro_update, rambo_update])
def test_a_compiled_update_gives_the_same_numbers(build):
    """--compile with its real backend, on small networks: the metrics of three updates, one after the other."""
    metrics = []
    for wrap in (lambda update: update, torch.compile):
        torch.manual_seed(0)
        step = build(torch.device("cpu"), wrap)
        metrics.append(torch.stack([step() for _ in range(3)]))
    torch.testing.assert_close(*metrics, rtol=1e-5, atol=1e-6)
