"""RAMBO: the adversarial gradient against closed forms, the parts around it, and whole runs at tiny size."""

import csv
import json
import math
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from test_runs import TINY, write_dataset

import rambo_baseline as rambo

CPU = torch.device("cpu")
SMALL = [flag for flag in TINY if flag != "--dynamics-lr" and flag != "0.01"]


class LinearCritics:
    """Q(s, a) = slope * s[0], from one critic: the value of a next state is known exactly."""

    def __init__(self, slope):
        self.slope = slope

    def __call__(self, obs, act):
        return (self.slope * obs[..., 0])[None]


class ToyAgent:
    def __init__(self, slope):
        self.actor, self.critics = rambo.Actor(1, 1, 4), LinearCritics(slope)


def constant_model(num_models, logvar):
    """Every network predicts the bias of its last layer: mean and log-variance of (s' - s, r)."""
    ensemble = rambo.Ensemble(num_models, 1, 1, 4)
    with torch.no_grad():
        for weight in ensemble.weights:
            weight.zero_()
        ensemble.max_logvar.fill_(50.0)  # far away: the soft clamp changes nothing
        ensemble.min_logvar.fill_(-50.0)
        ensemble.biases[-1][..., 2:] = torch.tensor(logvar)
    return ensemble


def never(obs):
    return torch.zeros(len(obs), dtype=torch.bool)


def adversarial_gradient(ensemble, slope, num_elites, rows=100_000, gamma=0.9):
    args = rambo.Args(num_elites=num_elites, gamma=gamma)
    rng = torch.Generator().manual_seed(0)
    elite = torch.randint(num_elites, (rows,), generator=rng)
    noise = rambo.normal(rng, rows, 1), rambo.normal(rng, rows, 2)
    loss, *_ = rambo.adversarial_loss(ToyAgent(slope), ensemble, never, torch.zeros(rows, 1), elite, *noise, args)
    loss.backward()
    return ensemble.biases[-1].grad[:, 0]  # (models, 4): means of (s' - s, r), then their log-variances


@pytest.mark.parametrize("slope", [2.0, -0.5])
def test_gradient_is_the_score_function_estimate_of_the_expected_advantage(slope):
    """One Gaussian: d E[A] / d mean is the slope of A, so after standardisation (gamma * slope, 1) / std(A), sign included.

    A is linear in the sample, so its correlation with the score of the log-variance is 0.
    """
    gamma, std_change, std_reward = 0.9, 0.5, 0.3
    ensemble = constant_model(1, [2 * math.log(std_change), 2 * math.log(std_reward)])
    gradient = adversarial_gradient(ensemble, slope, num_elites=1, gamma=gamma)[0]
    std_advantage = math.hypot(gamma * slope * std_change, std_reward)
    expected = [gamma * slope / std_advantage, 1 / std_advantage, 0.0, 0.0]
    np.testing.assert_allclose(gradient.numpy(), expected, atol=0.03)


def test_gradient_is_shared_by_the_elites_of_the_mixture_and_leaves_the_others_alone():
    """Three networks, two elites: each elite's share is half, whichever of them made the sample."""
    ensemble = constant_model(3, [2 * math.log(0.5), 2 * math.log(0.3)])
    gradient = adversarial_gradient(ensemble, 2.0, num_elites=2)
    expected = 0.5 * np.array([1.8, 1.0]) / math.hypot(1.8 * 0.5, 0.3)
    for member in (0, 1):
        np.testing.assert_allclose(gradient[member, :2].numpy(), expected, atol=0.03)
    assert (gradient[2] == 0).all()


def test_gradient_agrees_with_brute_force_in_numpy():
    """A mixture of two different Gaussians: grad log p-bar times the advantage, row by row in float64 with central differences."""
    ensemble = constant_model(2, [-1.0, -2.0])
    with torch.no_grad():
        ensemble.biases[-1][:, 0, :2] = torch.tensor([[0.3, -0.1], [-0.4, 0.2]])
    rows, gamma = 64, 0.9
    args, agent = rambo.Args(num_elites=2, gamma=gamma), ToyAgent(1.5)
    rng = torch.Generator().manual_seed(1)
    elite, obs = torch.randint(2, (rows,), generator=rng), rambo.normal(rng, rows, 1)
    noise = rambo.normal(rng, rows, 1), rambo.normal(rng, rows, 2)
    loss, next_obs, log_prob, gain = rambo.adversarial_loss(agent, ensemble, never, obs, elite, *noise, args)
    loss.backward()

    outputs = ensemble.biases[-1].detach().numpy()[:, 0].astype(np.float64)
    samples, advantages = [], []
    for i in range(rows):
        mean, logvar = outputs[elite[i], :2], outputs[elite[i], 2:]
        change = mean + np.exp(0.5 * logvar) * noise[1][i].double().numpy()
        samples.append(change)
        advantages.append(change[1] + gamma * 1.5 * (obs[i].item() + change[0]) - 1.5 * obs[i].item())
    advantages = (np.array(advantages) - np.mean(advantages)) / (np.std(advantages, ddof=1) + 1e-6)

    def objective(outputs):
        total = 0.0
        for change, advantage in zip(samples, advantages):
            densities = []
            for out in outputs:
                variance = np.exp(out[2:])
                densities.append(np.prod(np.exp(-((change - out[:2]) ** 2) / (2 * variance)) / np.sqrt(2 * np.pi * variance)))
            total += np.log(np.mean(densities)) * advantage
        return total / rows

    numeric = np.zeros_like(outputs)
    for index in np.ndindex(outputs.shape):
        step = np.zeros_like(outputs)
        step[index] = 1e-5
        numeric[index] = (objective(outputs + step) - objective(outputs - step)) / 2e-5
    np.testing.assert_allclose(loss.item(), objective(outputs), rtol=1e-4)
    np.testing.assert_allclose(ensemble.biases[-1].grad[:, 0].numpy(), numeric, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(gain.numpy(), advantages, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose((next_obs - obs)[:, 0].numpy(), np.array(samples)[:, 0], rtol=1e-4, atol=1e-5)
    assert not log_prob.requires_grad and not gain.requires_grad and not next_obs.requires_grad


def test_mixture_log_prob_does_not_underflow():
    """Log-probabilities down to -1e5: exp would be 0 and its logarithm -inf."""
    rng = np.random.default_rng(0)
    mean, logvar = rng.normal(size=(5, 8, 12)) * 30, rng.uniform(-9, 1, size=(5, 8, 12))
    change = rng.normal(size=(8, 12))
    each = -0.5 * ((change - mean) ** 2 * np.exp(-logvar) + logvar + np.log(2 * np.pi)).sum(-1)
    top = each.max(0)
    expected = top + np.log(np.exp(each - top).mean(0))
    got = rambo.mixture_log_prob(*(torch.tensor(x, dtype=torch.float32) for x in (mean, logvar, change)))
    assert expected.min() < -1e5 and torch.isfinite(got).all()
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5)


def test_advantage_is_standardised_and_stops_at_terminals():
    torch.manual_seed(0)
    obs, act, reward, next_obs = torch.randn(32, 1), torch.randn(32, 1), torch.randn(32), torch.randn(32, 1)
    done = (torch.arange(32) % 3 == 0).float()
    expected = []
    for i in range(32):
        future = 0.0 if done[i] else 0.9 * 2.0 * next_obs[i].item()
        expected.append(reward[i].item() + future - 2.0 * obs[i].item())
    expected = (np.array(expected) - np.mean(expected)) / (np.std(expected, ddof=1) + 1e-6)
    got = rambo.advantage(ToyAgent(2.0), obs, act, reward, next_obs, done, 0.9).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def bout(weight, supervised_data_shift=0.0, updates=100):
    """Mean predicted change of s before and after a bout of model updates, where high s is valuable."""
    torch.manual_seed(0)
    ensemble = rambo.Ensemble(3, 1, 1, 16)
    args = rambo.Args(num_models=3, num_elites=2, adversarial_weight=weight, adversarial_updates=updates, rollout_length=3)
    obs = torch.randn(2000, 1)
    rows = torch.cat([obs, torch.rand(2000, 1) * 2 - 1, torch.zeros(2000, 1), obs + supervised_data_shift, torch.zeros(2000, 1)], -1)
    optimizer = rambo.dynamics_optimizer(ensemble, 3e-3)
    inputs = rows[:200, :2]
    before = ensemble(inputs)[0][:2, :, 0].mean().item()
    rng = torch.Generator().manual_seed(0)
    stats = rambo.train_model_against(ToyAgent(1.0), ensemble, optimizer, never, rows, 1, 1, args, rng)
    return before, ensemble(inputs)[0][:2, :, 0].mean().item(), stats


def test_adversarial_updates_lower_the_value_of_imagined_next_states():
    _, supervised, _ = bout(weight=0.0)
    _, adversarial, stats = bout(weight=10.0)
    assert adversarial < supervised - 0.1
    assert stats["advantage_min"] < 0 < stats["advantage_max"] and stats["log_prob_min"] <= stats["log_prob_max"]


def test_supervised_term_holds_the_model_to_the_data():
    before, after, _ = bout(weight=0.0, supervised_data_shift=0.7)
    assert abs(after - 0.7) < 0.2 < abs(before - 0.7)


def test_behaviour_cloning_visits_every_row_once_an_epoch_in_a_new_order(monkeypatch):
    visited = []
    original = rambo.unpack
    monkeypatch.setattr(rambo, "unpack", lambda rows, *dims: (visited.append(rows[:, 2].tolist()), original(rows, *dims))[1])
    rows = torch.randn(600, 5)
    rows[:, 2] = torch.arange(600)
    torch.manual_seed(0)
    actor = rambo.Actor(1, 1, 8)
    rambo.clone_behaviour(actor, rows, 1, 1, rambo.Args(bc_epochs=2), CPU)
    epochs = [sum(visited[:3], []), sum(visited[3:], [])]
    for order in epochs:
        assert sorted(order) == list(range(600)) and order != list(range(600))
    assert epochs[0] != epochs[1]


def test_behaviour_cloning_learns_the_behaviour():
    torch.manual_seed(0)
    obs = torch.randn(4000, 1)
    rows = torch.cat([obs, torch.tanh(0.8 * obs), torch.zeros(4000, 3)], -1)
    actor = rambo.Actor(1, 1, 32)
    rambo.clone_behaviour(actor, rows, 1, 1, rambo.Args(bc_epochs=15, bc_lr=3e-3), CPU)
    assert (actor.mode(obs) - torch.tanh(0.8 * obs)).abs().mean() < 0.05
    assert actor(obs)[1].mean() < -1  # the noise only costs: the policy becomes nearly deterministic


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("rambo") / "hopper.hdf5", "Hopper-v4", 600)


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rambo, "received_signals", [])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


FLAGS = [*SMALL, "--bc-epochs", "1", "--adversarial-every", "8", "--adversarial-updates", "4", "--rollout-every", "5"]


def run(dataset, root, *flags):
    argv = ["--env-id", "hopper-medium-v2", "--dataset-path", str(dataset), "--runs-root", str(root), *FLAGS, *flags]
    result = rambo.main(rambo.parse_args(argv))
    (folder,) = Path(root).iterdir()
    return folder, result


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--adversarial-weight", "0"],
        ["--adversarial-weight", "0", "--supervised-updates"],
        ["--bc-epochs", "0", "--no-auto-alpha"],
        ["--deterministic-backup", "--model-ratio", "1", "--rollout-length", "1"],
    ],
    ids=" ".join,
)
def test_every_branch_runs_and_the_model_changes_only_when_it_should(dataset, tmp_path, flags):
    folder, result = run(dataset, tmp_path / "runs", *flags)
    assert folder.name.startswith("hopper-medium-v2__rambo__1__") and math.isfinite(result["last_5_mean"])
    trained = torch.load(folder / "dynamics.pt", weights_only=True)["ensemble"]
    final = torch.load(folder / "checkpoint.pt", weights_only=True)["ensemble"]
    changed = any(not torch.equal(trained[name], final[name]) for name in trained)
    assert changed == (flags[:2] != ["--adversarial-weight", "0"] or "--supervised-updates" in flags)
    with open(folder / "progress.csv") as file:
        row = list(csv.DictReader(file))[-1]
    assert {"q_min", "q_max", "log_prob_min", "log_prob_max", "advantage_min", "advantage_max"} <= set(row)
    assert (float(row["log_prob_min"]) != 0) == ("--adversarial-weight" not in flags)


def test_same_seed_same_run_and_resumed_run_too(dataset, tmp_path):
    first, _ = run(dataset, tmp_path / "a")
    second, _ = run(dataset, tmp_path / "b")
    assert (first / "progress.csv").read_bytes() == (second / "progress.csv").read_bytes()

    stop_at = 13
    original, calls = rambo.update, []

    def interrupted_update(*args):
        calls.append(1)
        if len(calls) == stop_at:
            rambo.received_signals.append(signal.SIGTERM)
        return original(*args)

    rambo.update = interrupted_update
    try:
        with pytest.raises(SystemExit) as stopped:
            run(dataset, tmp_path / "c")
    finally:
        rambo.update = original
        rambo.received_signals.clear()
    assert stopped.value.code == 143
    (third,) = (tmp_path / "c").iterdir()
    assert torch.load(third / "checkpoint.pt", weights_only=True)["update"] == stop_at
    rambo.main(rambo.parse_args(["--resume", str(third)]))
    assert (first / "progress.csv").read_bytes() == (third / "progress.csv").read_bytes()
    policies = [torch.load(folder / "policy.pt", weights_only=True) for folder in (first, third)]
    assert all(torch.equal(policies[0]["actor"][name], policies[1]["actor"][name]) for name in policies[0]["actor"])


def test_the_policy_sees_standardised_observations_and_termination_raw_ones(dataset, tmp_path, monkeypatch):
    seen = []
    rule = rambo.TERMINATION["Hopper"]
    monkeypatch.setitem(rambo.TERMINATION, "Hopper", lambda obs: (seen.append(obs.clone()), rule(obs))[1])
    folder, _ = run(dataset, tmp_path / "runs")
    policy = torch.load(folder / "policy.pt", weights_only=True)
    buffer = torch.load(folder / "checkpoint.pt", weights_only=True)["buffer"]
    stored = buffer["rows"][: buffer["size"], :11]
    assert stored.mean(0).abs().max() < 1.5 and 0.5 < stored.std() < 3  # standardised in the buffer
    height = torch.cat([obs.reshape(-1, 11) for obs in seen])[:, 0]
    assert abs(height.median() - policy["obs_mean"][0]) < 5 * policy["obs_std"][0]  # metres: about 1.2
    torch.testing.assert_close(policy["input_mean"], policy["obs_mean"])
    torch.testing.assert_close(policy["input_std"], policy["obs_std"] + 1e-3)


def test_eval_only_uses_the_run_s_own_normalisation(dataset, tmp_path):
    folder, result = run(dataset, tmp_path / "runs")
    again = rambo.main(rambo.parse_args(["--eval-only", str(folder)]))
    assert again["returns"] == result["evaluations"][-1]["returns"]


def test_divergence_stops_with_one_line(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(rambo, "update", lambda *args: torch.full((len(rambo.METRICS),), math.nan))
    with pytest.raises(SystemExit, match="diverged before update"):
        run(dataset, tmp_path / "runs")


def test_dynamics_in_other_units_are_refused(dataset, tmp_path):
    import micro

    argv = ["--env-id", "hopper-medium-v2", "--dataset-path", str(dataset), "--runs-root", str(tmp_path / "micro"), *SMALL]
    micro.main(micro.parse_args(argv))
    (folder,) = (tmp_path / "micro").iterdir()
    with pytest.raises(SystemExit, match="other units"):
        run(dataset, tmp_path / "rambo", "--dynamics-path", str(folder / "dynamics.pt"))


PRESETS = {  # rollout length, lambda
    "halfcheetah-medium": (5, 3e-4), "halfcheetah-medium-replay": (5, 3e-4), "halfcheetah-medium-expert": (5, 3e-4),
    "hopper-medium": (5, 3e-4), "hopper-medium-expert": (5, 3e-4), "hopper-medium-replay": (2, 3e-4), "hopper-random": (2, 3e-4),
    "walker2d-medium-expert": (2, 3e-4), "walker2d-medium": (5, 0), "walker2d-medium-replay": (5, 0),
    "halfcheetah-random": (5, 0), "walker2d-random": (5, 0),
}  # fmt: skip


@pytest.mark.parametrize("task", PRESETS)
def test_presets_and_overrides(task):
    args = rambo.parse_args(["--env-id", f"{task}-v2"])
    assert (args.rollout_length, args.adversarial_weight) == PRESETS[task]
    assert (args.dynamics_lr, args.dynamics_patience, args.model_ratio, args.bc_epochs) == (3e-4, 10, 0.5, 50)
    assert args.auto_alpha and not args.deterministic_backup and args.total_updates == 2_000_000
    override = rambo.parse_args(["--env-id", f"{task}-v2", "--adversarial-weight", "3e-4", "--rollout-length", "5"])
    assert (override.rollout_length, override.adversarial_weight) == (5, 3e-4)


@pytest.mark.parametrize("flags", [["--adversarial-weight", "-1"], ["--bc-epochs", "-1"], ["--adversarial-updates", "0"]])
def test_bad_input_is_refused_in_one_line(flags):
    with pytest.raises(SystemExit) as refused:
        rambo.parse_args(["--env-id", "hopper-medium-v2", *flags])
    assert flags[0] in str(refused.value) and "\n" not in str(refused.value)


def test_args_json_names_the_algorithm(dataset, tmp_path):
    folder, _ = run(dataset, tmp_path / "runs")
    assert json.loads((folder / "args.json").read_text())["algorithm"] == "rambo"
