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
