"""The benchmarks measure what they say: estimators on models whose f is known, the memory of a known allocation."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import micro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import growth  # noqa: E402
import penalty_estimator  # noqa: E402
import values  # noqa: E402

ELITES, OBS_DIM, ACT_DIM, ROWS = 5, 2, 1, 400
STATE_SLOPE, ACTION_SLOPE, POLICY_SLOPE, POLICY_STD = torch.tensor([1.0, -0.5]), 0.8, torch.tensor([0.3, 0.7]), 0.4
ARGS = dataclasses.replace(micro.Args(), num_elites=ELITES, batch_size=4)


class ToyActor:
    """a = b.s + 0.4 noise: a linear policy, without the tanh."""

    def sample(self, obs, noise):
        return (obs @ POLICY_SLOPE)[:, None] + POLICY_STD * noise


def toy_ensemble(offsets, stds):
    """Elite e predicts s' ~ N(s + offsets[e] * s, stds[e]^2), the same std in every dimension."""

    def ensemble(inputs, members):
        obs = inputs[:, :OBS_DIM]
        change = torch.as_tensor(offsets, dtype=torch.float32)[members, None, None] * obs
        mean = torch.cat([change, torch.zeros(*change.shape[:-1], 1)], -1)
        logvar = 2 * torch.as_tensor(stds, dtype=torch.float32).log()[members, None, None].expand_as(mean)
        return mean, logvar

    return ensemble


def linear_critics(obs, act):
    return torch.stack([obs @ STATE_SLOPE + ACTION_SLOPE * act[:, 0]] * 2)


def square_critics(obs, act):
    return torch.stack([3 * obs.square().sum(-1), obs.square().sum(-1)])  # the smaller one counts


def measure(offsets, stds, critics, reference_draws=100, repeats=3) -> dict:
    """Records by (penalty, estimator), and the rows' states."""
    rng = torch.Generator().manual_seed(0)
    obs, act = torch.randn(ROWS, OBS_DIM, generator=rng), torch.zeros(ROWS, ACT_DIM)
    networks = (toy_ensemble(offsets, stds), ToyActor(), critics)
    records = penalty_estimator.measure_networks(ARGS, networks, obs, act, reference_draws, repeats, rng)
    return {(record["penalty"], record["estimator"]): record for record in records} | dict(obs=obs.double().numpy())


def gap(values: np.ndarray) -> np.ndarray:  # (elites, rows) -> mean - min
    return values.mean(0) - values.min(0)


OFFSETS, STDS = [0.0, 0.1, -0.2, 0.3, 0.05], [0.2, 0.3, 0.1, 0.25, 0.4]
VALUE_SLOPE = STATE_SLOPE.numpy() + ACTION_SLOPE * POLICY_SLOPE.numpy()  # of Q(s, pi(s)) in s


def test_a_linear_value_leaves_nothing_to_antithetic_pairs_and_to_the_means():
    found = measure(OFFSETS, STDS, linear_critics)
    values = (1 + np.array(OFFSETS)[:, None]) * (found["obs"] @ VALUE_SLOPE)
    for kind, expected in (("micro", gap(values)), ("mobile", values.std(0, ddof=1))):
        assert found[kind, "means"]["reference_mean"] == pytest.approx(expected.mean(), rel=1e-4)
        for name in ("antithetic 2", "antithetic 4", "means"):
            assert found[kind, name]["rmse"] < 1e-5 and found[kind, name]["rank_correlation"] > 0.999
        for name in ("common 1", "common 2", "independent 10"):  # the stds differ, so that noise remains
            assert found[kind, name]["rmse"] > 0.01


def test_shared_noise_cancels_where_the_elites_share_their_variance():
    found = measure(OFFSETS, [0.3] * ELITES, linear_critics)
    for kind in ("micro", "mobile"):
        assert found[kind, "common 1"]["rmse"] < 1e-5 and found[kind, "common 2"]["rmse"] < 1e-5
        assert found[kind, "independent 10"]["rmse"] > 0.01


@pytest.mark.parametrize("draws", [1, 2, 5, 10])
def test_independent_draws_are_biased_by_the_expected_minimum_of_normals(draws):
    """Elites that agree have f = 0; what is measured is the expected gap of five normals, or their expected std."""
    spread = math.hypot(*(0.3 * VALUE_SLOPE), ACTION_SLOPE * POLICY_STD) / math.sqrt(draws)
    found = measure([0.1] * 4 + [0.1 - 1e-3], [0.3] * ELITES, linear_critics, repeats=20)
    grid = np.linspace(-8, 8, 20_001)
    density = np.exp(-grid**2 / 2) / math.sqrt(2 * math.pi)
    below = np.cumsum(density) * (grid[1] - grid[0])
    expected_maximum = np.trapezoid(grid * ELITES * below ** (ELITES - 1) * density, grid)  # 1.163
    c4 = math.sqrt(2 / (ELITES - 1)) * math.gamma(ELITES / 2) / math.gamma((ELITES - 1) / 2)  # E[std] / sigma
    for kind, factor in (("micro", expected_maximum), ("mobile", c4)):
        record = found[kind, f"independent {draws}"]
        measured = record["reference_mean"] * (1 + record["bias_percent"] / 100)
        assert measured == pytest.approx(factor * spread, rel=0.03)


def test_one_shared_draw_is_biased_by_the_spread_of_the_stds_and_two_by_less():
    """With equal means, mean - min of z * width_e over a normal z is (widest - narrowest) / sqrt(2 pi) on average.

    The state's noise acts through VALUE_SLOPE, the policy's is the same for every elite and cancels.
    """
    found = measure([0.1] * 4 + [0.1 - 1e-3], STDS, linear_critics, repeats=20)
    widths = np.array(STDS) * np.linalg.norm(VALUE_SLOPE)
    expected = (widths.max() - widths.min()) / math.sqrt(2 * math.pi)
    for name, draws in (("common 1", 1), ("common 2", 2)):  # two draws that are no pair: a normal of half the variance
        record = found["micro", name]
        measured = record["reference_mean"] * (1 + record["bias_percent"] / 100)
        assert measured == pytest.approx(expected / math.sqrt(draws), rel=0.05)


def test_a_curved_value_is_met_by_the_reference_and_missed_by_the_means():
    """Q = |s|^2: E Q = |mean|^2 + dims * std^2, of which the elites' means know the first part only."""
    found = measure(OFFSETS, STDS, square_critics, reference_draws=2000)
    squares = (1 + np.array(OFFSETS)[:, None]) ** 2 * np.square(found["obs"]).sum(1)
    exact, of_the_means = gap(squares + OBS_DIM * np.square(STDS)[:, None]), gap(squares)
    record = found["micro", "means"]
    assert record["reference_mean"] == pytest.approx(exact.mean(), rel=0.01)
    assert record["rmse"] == pytest.approx(np.sqrt(np.square(of_the_means - exact).mean()), rel=0.05)
    assert abs(found["micro", "independent 2000"]["bias_percent"]) < 3


def test_accuracy_by_hand():
    found = penalty_estimator.accuracy(np.array([[1.0, 2.0, 6.0], [2.0, 1.0, 3.0]]), np.array([1.0, 2.0, 3.0]))
    assert found["bias_percent"] == pytest.approx((50 + 0) / 2) and found["bias_percent_std"] == pytest.approx(25)
    assert found["rmse"] == pytest.approx((math.sqrt(3) + math.sqrt(2 / 3)) / 2)
    assert found["rank_correlation"] == pytest.approx((1 + 0.5) / 2)


def test_cost_counts_next_states_per_row():
    found = measure(OFFSETS, STDS, linear_critics, reference_draws=2, repeats=1)
    costs = {name: record["evaluations"] for (kind, name), record in list(found.items())[:-1] if kind == "micro"}
    each = {"independent 10": 50, "common 1": 5, "common 2": 10, "antithetic 2": 10, "antithetic 4": 20, "means": 5}
    assert {name: costs[name] for name in each} == each


def test_a_run_is_kept_measured_and_drawn(tmp_path, monkeypatch):
    """`train` keeps the networks of each checkpoint as they were; `measure` and `plot` take them from there."""
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "data.hdf5", "w") as file:
        states = rng.normal(size=(300, 3)).astype(np.float32)
        file["observations"], file["next_observations"] = states, states + 0.1
        file["actions"] = rng.uniform(-2, 2, size=(300, 1)).astype(np.float32)
        file["rewards"], file["terminals"] = rng.normal(size=300), np.zeros(300)
    flags = "--num-models 3 --num-elites 2 --hidden-size 8 --dynamics-hidden-size 8 --dynamics-max-epochs 1".split()
    flags += "--total-updates 4 --checkpoint-every 2 --batch-size 8 --rollout-batch-size 16 --eval-episodes 1".split()
    flags += ["--gym-id", "Pendulum-v1", "--dataset-path", str(tmp_path / "data.hdf5"), "--runs-root", str(tmp_path)]
    monkeypatch.setattr(micro, "write_file", micro.write_file)  # put back afterwards
    penalty_estimator.train(flags)
    (run_dir,) = tmp_path.glob("Pendulum*")
    kept = sorted(run_dir.glob("estimator-*.pt"))
    assert [path.name for path in kept] == ["estimator-2.pt", "estimator-4.pt"]
    last, end = torch.load(kept[1]), torch.load(run_dir / "checkpoint.pt")["agent"]
    for part in ("actor", "target_critics"):
        assert all(torch.equal(tensor, end[part][name]) for name, tensor in last[part].items())
    assert not torch.equal(last["actor"]["mean.bias"], torch.load(kept[0])["actor"]["mean.bias"])

    records = penalty_estimator.measure_run(run_dir, rows=20, reference_draws=4, repeats=2)
    assert {record["update"] for record in records} == {2, 4}
    assert all(math.isfinite(value) for record in records for value in record.values() if isinstance(value, float))
    assert len(json.loads(json.dumps(records))) == 2 * 2 * (1 + len(penalty_estimator.ESTIMATORS))
    for path in kept:  # a run of micro.py itself: its last two checkpoints hold the same networks
        path.unlink()
    assert penalty_estimator.measure_run(run_dir, rows=20, reference_draws=4, repeats=2) == records
    penalty_estimator.plot(records, "micro", tmp_path / "figures" / "figure.png")
    assert (tmp_path / "figures" / "figure.png").stat().st_size > 10_000
    assert penalty_estimator.table(records, "mobile").count("\n") == 1 + 1 + len(penalty_estimator.ESTIMATORS)


def test_what_counts_as_at_least_as_accurate():
    """No worse in bias, RMSE and rank correlation, at every checkpoint and for both penalties."""
    place = dict(task="t", bias_percent=-10.0, rmse=2.0, rank_correlation=0.8)
    places = [place | dict(update=update, penalty=kind) for update in (1, 2) for kind in penalty_estimator.PENALTIES]
    released = [here | dict(estimator=penalty_estimator.RELEASED) for here in places]
    equal = [here | dict(estimator="means", bias_percent=10.0) for here in places]
    assert penalty_estimator.at_least_as_accurate(released + equal, "means")
    for worse in (dict(bias_percent=-10.1), dict(rmse=2.1), dict(rank_correlation=0.79)):
        for number in range(4):
            changed = [record | (worse if number == index else {}) for index, record in enumerate(equal)]
            assert not penalty_estimator.at_least_as_accurate(released + changed, "means")


def test_peak_memory_is_that_of_each_phase():
    """A temporary of 200 MB shows in the phase that makes it, and in no later one."""
    growth.enter("before")
    growth.enter("large")
    torch.ones(50_000_000).sum()
    growth.enter("after")
    growth.enter("end")
    before, large, after = (growth.peaks[name] for name in ("before", "large", "after"))
    assert large - before == pytest.approx(200, abs=20)
    assert large - after == pytest.approx(200, abs=20)


def test_growth_measures_a_whole_run_of_micro(tmp_path):
    setting = growth.BASE | dict(rows=5000, batch_size=32, ensemble=(3, 2), rollout_length=2, hidden_size=32)
    found = growth.in_own_process(setting | dict(rollout_batch_size=500, rollout_every=5), 11, 1, str(tmp_path))
    phases = ["imports", "data", "dynamics", "rollouts", "updates", "evaluation", "checkpoint"]
    assert sorted(found["phases_mb"]) == sorted(phases)
    assert found["peak_mb"] == max(found["phases_mb"].values()) > 50
    assert found["update_ms"] > 0 and found["rollout_ms"] > 0
    (run_dir,) = tmp_path.glob("halfcheetah*")
    described = json.loads((run_dir / "args.json").read_text())
    assert described["dataset"]["rows"] == 4995  # without the last step of each of 5 episodes
    assert [described["args"][name] for name in ("num_models", "num_elites", "rollout_length")] == [3, 2, 2]


@pytest.mark.parametrize("gym_id", ["Hopper-v4", "Walker2d-v4", "HalfCheetah-v4"])
def test_a_simulator_is_put_into_an_observed_state(gym_id):
    """From there the same action has the same reward and next observation as it had the first time."""
    env = micro.make_env(gym_id)
    env.action_space.seed(0)
    obs, _ = env.reset(seed=0)
    for _ in range(4):
        obs = env.step(0.3 * env.action_space.sample())[0]
    action = env.action_space.sample()
    next_obs, reward, *_ = env.step(action)
    values.put_into_state(env, obs)
    again, same_reward, *_ = env.step(action)
    np.testing.assert_allclose(again, next_obs, atol=1e-5)
    assert same_reward == pytest.approx(reward, abs=1e-4)


@pytest.mark.parametrize("script", ["micro", "rambo_baseline"])
def test_values_of_a_run_against_a_plain_loop(script, tmp_path, monkeypatch):
    """Q by hand and, from first states, episodes that the simulator begins; RAMBO has units of its own."""
    module = __import__(script)
    source = Path(micro.SHIPPED / "hopper-medium-replay-lite.hdf5")
    with h5py.File(source) as shipped, h5py.File(tmp_path / "data.hdf5", "w") as file:
        for name in ("observations", "actions", "rewards", "next_observations", "terminals", "timeouts"):
            file[name] = shipped[name][:400]
    flags = "--num-models 3 --num-elites 2 --hidden-size 8 --dynamics-hidden-size 8 --dynamics-max-epochs 1".split()
    flags += "--total-updates 4 --batch-size 8 --rollout-batch-size 16 --eval-episodes 1".split()
    flags += f"--env-id hopper-medium-v2 --dataset-path {tmp_path}/data.hdf5 --runs-root {tmp_path}".split()
    module.main(module.parse_args(flags))
    (run_dir,) = tmp_path.glob("hopper*")
    monkeypatch.setattr(values, "STEPS", 30)
    found = values.values(run_dir, 5)
    assert len(found) == 10 and all(map(math.isfinite, found))

    policy, env = torch.load(run_dir / "policy.pt", weights_only=True), micro.make_env("Hopper-v4")
    actor, critics = micro.Actor(11, 3, 8), micro.Critics(2, 11, 3, 8)
    actor.load_state_dict(policy["actor"])
    critics.load_state_dict(policy["critics"])
    described = json.loads((run_dir / "args.json").read_text())["args"]
    dynamics = torch.load(run_dir / "dynamics.pt", weights_only=True)
    ensemble = micro.load_dynamics(dynamics, 11, 3, micro.Args(num_elites=described["num_elites"]), "cpu")
    q, returns, optimism, gamma_f = [], [], [], []

    def value(inputs) -> float:
        return float(critics(inputs[None], actor.mode(inputs[None])).min())

    for seed in range(5):
        obs, total = env.reset(seed=seed)[0], 0.0
        for step in range(30):
            inputs = (torch.as_tensor(obs, dtype=torch.float32) - policy["input_mean"]) / policy["input_std"]
            with torch.no_grad():
                action = actor.mode(inputs[None])
                if step == 0:
                    q.append(float(critics(inputs[None], action).min()))
            obs, reward, terminated, _, _ = env.step(action[0].numpy())
            total += 0.99**step * reward
            if terminated:
                break
            with torch.no_grad():
                next_inputs = (torch.as_tensor(obs, dtype=torch.float32) - policy["input_mean"]) / policy["input_std"]
                means = ensemble(torch.cat([inputs, action[0]])[None])[0][:2, 0]  # the two elites'
                set_values = [value(inputs + mean[:-1]) for mean in means]
                promised = np.mean([mean[-1].item() + 0.99 * v for mean, v in zip(means, set_values)])
                optimism.append(promised - reward - 0.99 * value(next_inputs))
                gamma_f.append(0.99 * (np.mean(set_values) - min(set_values)))
        returns.append(total)
    assert found[5] == pytest.approx(np.mean(q), rel=1e-4)
    assert found[7] == pytest.approx(np.mean(returns), rel=1e-3)
    assert found[8] == pytest.approx(np.mean(optimism), rel=1e-3)
    assert found[9] == pytest.approx(np.mean(gamma_f), rel=1e-3)
