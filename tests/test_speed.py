"""The operations that benchmarks/speed.py counts from shapes are those that torch counts when the scripts run."""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import micro
import rambo_baseline as rambo

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import speed  # noqa: E402

OBS_DIM, ACT_DIM, CPU = 11, 3, torch.device("cpu")


def counted(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", speed.settings(64))
def test_operations_of_an_update(name):
    script, args = speed.settings(64)[name]
    agent, rng = script.Agent(OBS_DIM, ACT_DIM, args, CPU), script.generator(CPU, 0)
    model_rows = 64 - int(64 * (1 - args.model_ratio))
    batch = script.unpack(torch.randn(64, 2 * OBS_DIM + ACT_DIM + 2), OBS_DIM, ACT_DIM)
    if script is micro:
        ensemble = micro.Ensemble(args.num_models, OBS_DIM, ACT_DIM, args.dynamics_hidden_size).requires_grad_(False)
        noise = micro.draw_noise(args, model_rows, OBS_DIM, ACT_DIM, rng)
        real = counted(lambda: micro.update(agent, ensemble, batch, noise, args))
    else:
        real = counted(lambda: rambo.update(agent, batch, rambo.draw_noise(args, ACT_DIM, rng), args))
    expected = sum(speed.update_operations(speed.network_costs(OBS_DIM, ACT_DIM, args), args, model_rows).values())
    # torch also takes the observations' share of the critics' input gradient, which nobody needs
    needless = 64 * 2 * args.num_critics * OBS_DIM * args.hidden_size
    assert real == expected + needless


def test_operations_of_an_adversarial_update_rollouts_and_dynamics():
    args, rng = rambo.Args(adversarial_updates=1), rambo.generator(CPU, 0)
    cost = speed.network_costs(OBS_DIM, ACT_DIM, args)
    agent, never = rambo.Agent(OBS_DIM, ACT_DIM, args, CPU), rambo.termination_of("none")
    ensemble = rambo.Ensemble(args.num_models, OBS_DIM, ACT_DIM, args.dynamics_hidden_size)
    optimizer, data = rambo.dynamics_optimizer(ensemble, 1e-3), torch.randn(300, 2 * OBS_DIM + ACT_DIM + 2)
    bout = [agent, ensemble, optimizer, never, data, OBS_DIM, ACT_DIM, args, rng]
    real = counted(lambda: rambo.train_model_against(*bout))
    log_std_head = 2 * 256 * args.hidden_size * ACT_DIM  # of the mode at s', which needs none
    assert real == speed.adversarial_operations(cost, args) - log_std_head
    buffer = micro.RingBuffer(1000, data.shape[1], CPU)
    rollouts = [agent.actor, ensemble, 5, never, data[:, :OBS_DIM], 3, buffer, rng]
    assert counted(lambda: micro.rollout(*rollouts)) == 300 * 3 * (cost["actor"] + cost["model"])
    batch = micro.inputs_and_targets(data[torch.randint(300, (7, 256))], OBS_DIM, ACT_DIM)
    real = counted(lambda: micro.take_step(optimizer, micro.dynamics_loss(ensemble, *batch)))
    assert real == 256 * 7 * (cost["model"] + cost["model_backward"])


def test_the_operations_of_the_target():
    """The phases have their own bounds: swapped ones would still have the right sum."""
    script, args = speed.settings(64)["micro, 2 draws"]
    agent, rng = micro.Agent(OBS_DIM, ACT_DIM, args, CPU), micro.generator(CPU, 0)
    ensemble = micro.Ensemble(args.num_models, OBS_DIM, ACT_DIM, args.dynamics_hidden_size).requires_grad_(False)
    batch = micro.unpack(torch.randn(64, 2 * OBS_DIM + ACT_DIM + 2), OBS_DIM, ACT_DIM)
    noise = micro.draw_noise(args, 61, OBS_DIM, ACT_DIM, rng)
    expected = speed.update_operations(speed.network_costs(OBS_DIM, ACT_DIM, args), args, 61)
    assert counted(lambda: micro.target_and_penalty(agent, ensemble, batch, noise, args)) == expected["target"]
    q = agent.critics(*batch[:2])  # outside, so that the count is the backward pass alone
    forward = counted(lambda: agent.critics(*batch[:2]))
    backward = counted(lambda: micro.take_step(agent.critic_optimizer, q.square().mean()))
    assert forward + backward == expected["critic"]


@pytest.mark.parametrize("name", ["micro, the means", "rambo"])
def test_the_phases_of_an_update_are_told_apart(name, monkeypatch):
    """With a clock that each phase advances by its own amount."""
    script, args = speed.settings(16)[name]
    now, took = [0.0], {"draw_noise": 1.0, "target_and_penalty": 2.0, "soft_target": 2.0, "take_step": 4.0}
    monkeypatch.setattr(speed, "clock", lambda: now[0])

    def slow(function, seconds):
        def wrapped(*args, **kwargs):
            now[0] += seconds
            return function(*args, **kwargs)

        return wrapped

    for function, seconds in took.items():
        if hasattr(script, function):
            monkeypatch.setattr(script, function, slow(getattr(script, function), seconds))
    found = speed.measure_update(script, args, OBS_DIM, ACT_DIM, 3)
    steps = 1 if not getattr(args, "auto_alpha", True) else 2  # where alpha is learned, its step belongs to the rest
    expected = dict(sampling=1e3, target=2e3, critic=4e3, actor=4e3, rest=4e3 * (steps - 1))
    assert found == pytest.approx(expected | dict(all=sum(expected.values())))


def test_the_tables_say_what_was_measured():
    row = dict(threads=1, shape="hopper", batch=256, what="micro, the means", ms=10.0, bound_ms=8.0, of_bound=0.8)
    row |= dict(gflops_per_s=100.0, target_ms=4.0, target_bound_ms=3.0, sampling_ms=0.5)
    others = [row | dict(batch=None, what="rollouts, 50 000 x 5", ms=2000.0)]
    others += [row | dict(batch=None, what="rambo, adversarial update", ms=30.0), row | dict(what="rambo", ms=8.0)]
    assert "100 GFLOP/s on 1 threads" in speed.best_products([row])[0]
    assert "| 10.0 | 8.0 | 80 % | 0.50 | 4.00, 75 % |" in speed.table([row])[-1]
    told = speed.all_told([row, *others])
    assert told[2] == "| 1 | hopper | micro, the means | 12.0 | 83 % | 0 % | 17 % |"
    assert told[3] == "| 1 | hopper | rambo | 40.0 | 20 % | 75 % | 5 % |"
    assert speed.gains([row, row | dict(threads=2, ms=6.25)])[-1] == "| hopper, micro, the means, batch 256 | 1.60 |"
