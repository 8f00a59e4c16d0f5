"""Physics, attacks, statistics and whole evaluations: against closed forms, slow loops and the simulator itself."""

import copy
import hashlib
import io
import json
import math
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch
import tyro
from PIL import Image
from scipy import integrate, stats

import eval_robust
import micro
import rambo_baseline

ROOT = Path(eval_robust.__file__).resolve().parent
GYM_IDS = ["Hopper-v4", "Walker2d-v4", "HalfCheetah-v4"]
TINY = "--episodes 2 --gravity 0.5 2 2 --friction 0.5 1.5 2 --epsilon 0 0.1 2 --workers 1".split()
TINY += "--attack-candidates 5 --attack-restarts 3 --attack-steps 2".split()
CELLS = 1 + 2 * 2 + 5  # nominal, grid, and one epsilon above 0 for each attack


def policy_dict(gym_id="Hopper-v4", algorithm="micro", seed=0, hidden_size=16, **changes):
    """What a trainer's policy.pt holds, with random networks; RAMBO's see standardised observations."""
    env = micro.make_env(gym_id)
    obs_dim, act_dim = env.observation_space.shape[0], env.action_space.shape[0]
    torch.manual_seed(seed)
    actor, critics = micro.Actor(obs_dim, act_dim, hidden_size), micro.Critics(2, obs_dim, act_dim, hidden_size)
    obs_mean, obs_std = 0.1 * torch.randn(obs_dim), 0.5 + torch.rand(obs_dim)
    standardised = algorithm == "rambo"
    saved = dict(
        algorithm=algorithm,
        gym_id=gym_id,
        args=dict(seed=seed, beta=1.0, hidden_size=hidden_size),
        dataset=dict(file="some.hdf5", sha256="ab" * 32, rows=10, is_d4rl=False),
        machine=dict(torch="2.13.0"),
        actor=actor.state_dict(),
        critics=critics.state_dict(),
        obs_mean=obs_mean,
        obs_std=obs_std,
        input_mean=obs_mean if standardised else torch.zeros(obs_dim),
        input_std=obs_std + 1e-3 if standardised else torch.ones(obs_dim),
    )
    return saved | changes


def save_run(folder, **options):
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(policy_dict(**options), folder / "policy.pt")
    return folder


def content_of(saved):
    stream = io.BytesIO()
    torch.save(saved, stream)
    return stream.getvalue()


def build(saved):
    env = micro.make_env(saved["gym_id"])
    return eval_robust.build_policy(saved, env.observation_space.shape[0], env.action_space.shape[0], "policy.pt")


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """Nothing is written outside tmp_path."""
    monkeypatch.chdir(tmp_path)


def start(*flags, run_dirs=(), tiny=TINY):
    runs = ["--run-dirs", *map(str, run_dirs)] if run_dirs else []
    eval_robust.main(tyro.cli(eval_robust.Args, args=[*tiny, *map(str, flags), *runs]))


def results_in(folder="robustness"):
    return json.loads((Path(folder) / "robustness.json").read_text())


def returns_in(folder="robustness"):
    return {eval_robust.key_of(cell): cell["returns"] for cell in results_in(folder)["cells"]}


def refused(*flags, run_dirs=(), about):
    """One line, exit status 1, nothing written."""
    before = {path: path.read_bytes() for path in Path.cwd().rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as stop:
        start(*flags, run_dirs=run_dirs)
    message = stop.value.code
    assert isinstance(message, str) and "\n" not in message and message.startswith("eval_robust.py: ")
    assert re.search(about, message), message
    assert {path: path.read_bytes() for path in Path.cwd().rglob("*") if path.is_file()} == before


# --- physics ----------------------------------------------------------------------------------------------------------
def installed_files():
    folder = Path(gym.__file__).parent / "envs" / "mujoco" / "assets"
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.xml")}


@pytest.mark.parametrize("gym_id", GYM_IDS)
def test_a_cell_steps_in_the_scaled_physics_and_only_in_memory(gym_id):
    fresh, files = gym.make(gym_id).unwrapped.model, installed_files()
    content, cell = content_of(policy_dict(gym_id)), dict(policy="", kind="physics", seed=0, episodes=2)
    steps = 0

    def check(env, gravity, friction):
        nonlocal steps
        steps += 1
        model, data = env.unwrapped.model, env.unwrapped.data
        np.testing.assert_allclose(model.opt.gravity, [0, 0, -9.81 * gravity])
        np.testing.assert_allclose(model.geom_friction, friction * fresh.geom_friction)
        for contact in data.contact:  # what the simulator makes of it: the larger of the two geoms'
            expected = friction * fresh.geom_friction[contact.geom, 0].max()
            assert math.isclose(contact.friction[0], expected, rel_tol=1e-9)

    for gravity, friction in ((2.0, 0.5), (2.0, 0.5), (0.5, 1.5), (1.0, 1.0)):  # the same envs: factors would compound
        scaled = cell | dict(gravity=gravity, friction=friction)
        eval_robust.run_cell(content, gym_id, scaled, lambda env: check(env, gravity, friction))
    assert steps > 40 and len(files) > 3
    assert installed_files() == files


def test_physics_of_a_cell_does_not_reach_the_next():
    content, nominal = content_of(policy_dict()), dict(policy="", kind="nominal", seed=0, episodes=2)
    before = eval_robust.run_cell(content, "Hopper-v4", nominal)
    other = eval_robust.run_cell(content, "Hopper-v4", nominal | dict(kind="physics", gravity=3.0, friction=0.5))
    assert other != before
    assert eval_robust.run_cell(content, "Hopper-v4", nominal) == before


@pytest.mark.parametrize("gym_id", GYM_IDS)
def test_under_twice_the_gravity_a_body_falls_twice_as_far(gym_id):
    env = gym.make(gym_id).unwrapped
    nominal, fallen = eval_robust.physics_of(env), []
    for gravity in (1.0, 2.0):
        eval_robust.scale_physics(env.model, nominal, gravity, 1.0)
        env.reset(seed=0)
        qpos = env.init_qpos.copy()
        qpos[1] = 50  # in the air
        env.set_state(qpos, 0 * env.init_qvel)
        before = env.data.subtree_com[0, 2]
        env.do_simulation(np.zeros(env.model.nu), 25)
        fallen.append(before - env.data.subtree_com[0, 2])
    seconds = 25 * env.model.opt.timestep
    assert fallen[0] == pytest.approx(0.5 * 9.81 * seconds**2, rel=0.1)
    assert fallen[1] == pytest.approx(2 * fallen[0], rel=0.01)


# --- objectives -------------------------------------------------------------------------------------------------------
def test_symmetric_kl_is_the_integral():
    for mean, std, other_mean, other_std in ((0.3, 0.5, -0.2, 0.8), (1.0, 2.0, 1.0, 2.0), (0.0, 1.0, 2.0, 1.0)):
        p, q = stats.norm(mean, std), stats.norm(other_mean, other_std)
        integrand = lambda x: (p.pdf(x) - q.pdf(x)) * (p.logpdf(x) - q.logpdf(x))  # noqa: E731
        expected = integrate.quad(integrand, -20, 20)[0]
        numbers = torch.tensor([[mean], [math.log(std)], [other_mean], [math.log(other_std)]], dtype=torch.float64)
        assert float(eval_robust.symmetric_kl(*numbers)) == pytest.approx(expected, abs=1e-7)


def test_symmetric_kl_sums_over_actions():
    rng = torch.Generator().manual_seed(0)
    mean, log_std, other_mean, other_log_std = (torch.randn(5, 3, generator=rng) for _ in range(4))
    p = torch.distributions.Normal(mean, log_std.exp())
    q = torch.distributions.Normal(other_mean, other_log_std.exp())
    kl = torch.distributions.kl_divergence
    expected = (kl(p, q) + kl(q, p)).sum(-1)
    torch.testing.assert_close(eval_robust.symmetric_kl(mean, log_std, other_mean, other_log_std), expected)


def numpy_layers(state, prefix, x, layers):
    for layer in layers:
        x = state[f"{prefix}{layer}.weight"].numpy() @ x + state[f"{prefix}{layer}.bias"].numpy()
        x = np.maximum(x, 0) if layer != 4 else x
    return x


def numpy_gaussian(saved, obs):
    """The policy before the tanh, one observation at a time, from the raw state dict."""
    state = saved["actor"]
    hidden = numpy_layers(state, "body.", (obs - saved["input_mean"].numpy()) / saved["input_std"].numpy(), (0, 2))
    heads = [state[f"{name}.weight"].numpy() @ hidden + state[f"{name}.bias"].numpy() for name in ("mean", "log_std")]
    return heads[0], np.clip(heads[1], -5, 2)


def numpy_ad(saved, obs, seen):
    (m, s), (n, t) = numpy_gaussian(saved, obs), numpy_gaussian(saved, seen)
    p = sum(b - a + (np.exp(2 * a) + (x - y) ** 2) / (2 * np.exp(2 * b)) - 0.5 for x, a, y, b in zip(m, s, n, t))
    return p + sum(a - b + (np.exp(2 * b) + (x - y) ** 2) / (2 * np.exp(2 * a)) - 0.5 for x, a, y, b in zip(m, s, n, t))


def numpy_mq(saved, obs, seen):
    inputs = (obs - saved["input_mean"].numpy()) / saved["input_std"].numpy()
    inputs = np.concatenate([inputs, np.tanh(numpy_gaussian(saved, seen)[0])])
    return -min(float(numpy_layers(saved["critics"], f"critics.{k}.", inputs, (0, 2, 4))[0]) for k in range(2))


SLOW = {"ad": numpy_ad, "mq": numpy_mq}


@pytest.mark.parametrize("algorithm", ["micro", "rambo"])
@pytest.mark.parametrize("kind", ["ad", "mq"])
def test_objectives_and_the_sampled_choice_against_a_slow_loop(kind, algorithm):
    saved = policy_dict(algorithm=algorithm, hidden_size=8)
    policy, rng = build(saved), np.random.default_rng(0)
    obs, epsilon, tries = rng.normal(size=(4, 11)).astype(np.float32), 0.3, 7
    cell = dict(kind=kind, epsilon=epsilon, candidates=tries)
    seen = eval_robust.perturbed(policy, torch.as_tensor(obs), cell, [np.random.default_rng(i) for i in range(4)])
    for episode in range(4):
        units = np.random.default_rng(episode).uniform(-1, 1, (tries, 11))
        choices = [obs[episode], *(obs[episode] + epsilon * saved["obs_std"].numpy() * unit for unit in units)]
        expected = max(choices, key=lambda choice: SLOW[kind](saved, obs[episode], choice))
        np.testing.assert_allclose(seen[episode], expected, atol=1e-5)
        batched = eval_robust.OBJECTIVES[kind](policy, torch.as_tensor(obs[episode]), seen[episode])
        assert float(batched) == pytest.approx(SLOW[kind](saved, obs[episode], expected), rel=1e-3, abs=1e-5)


def test_mq_leaves_the_observation_alone_where_every_candidate_is_better():
    saved = known_policy(np.array([1.0, 2.0]), -1.0)
    policy, obs = eval_robust.build_policy(saved, 2, 1, ""), torch.zeros(1, 2)
    candidates = torch.tensor([[[0.5, 0.5], [0.1, 0.9]]])  # both raise the action, hence Q = a
    chosen = eval_robust.sampled_attack(partial(eval_robust.value_loss, policy), obs, torch.ones(2), candidates)
    assert chosen.tolist() == [[0, 0]]


# --- attacks on a policy whose worst direction is known ---------------------------------------------------------------
def known_policy(direction, value_sign=1.0):
    """mu(s) = direction . s (through a pair of ReLUs), log sigma = -1, and Q(s, a) = -value_sign * a."""
    obs_dim = len(direction)
    actor, critics = micro.Actor(obs_dim, 1, 2), micro.Critics(2, obs_dim, 1, 2)
    with torch.no_grad():
        for parameter in (*actor.parameters(), *critics.parameters()):
            parameter.zero_()
        weight = torch.as_tensor(direction, dtype=torch.float32)
        actor.body[0].weight.copy_(torch.stack([weight, -weight]))
        actor.body[2].weight.copy_(torch.eye(2))
        actor.mean.weight.copy_(torch.tensor([[1.0, -1.0]]))
        actor.log_std.bias.fill_(-1)
        for critic in critics.critics:
            critic[0].weight[:, -1] = torch.tensor([1.0, -1.0])
            critic[2].weight.copy_(torch.eye(2))
            critic[4].weight.copy_(-value_sign * torch.tensor([[1.0, -1.0]]))
    zero, one = torch.zeros(obs_dim), torch.ones(obs_dim)
    return dict(
        actor=actor.state_dict(), critics=critics.state_dict(), gym_id="known", obs_mean=zero,
        obs_std=torch.linspace(0.5, 1.5, obs_dim), input_mean=zero, input_std=one,
    )  # fmt: skip


def worst_objective(kind, saved, direction, obs, epsilon):
    """The linear policy's mean moves by at most sum_i |direction_i| epsilon sigma_i."""
    shift = epsilon * (np.abs(direction) * saved["obs_std"].numpy()).sum()
    return shift**2 * math.exp(2) if kind == "ad" else np.tanh(obs @ direction + shift)


@pytest.mark.parametrize("kind", ["ad", "mq"])
def test_each_attack_is_stronger_than_the_one_before(kind):
    rng, epsilon, episodes = np.random.default_rng(1), 0.1, 50
    direction = rng.normal(size=11) / 5
    saved = known_policy(direction)
    policy, obs = eval_robust.build_policy(saved, 11, 1, ""), rng.normal(size=(episodes, 11)).astype(np.float32)
    reached = []
    sampling, climbing = dict(candidates=50), dict(candidates=50, restarts=20, steps=10)
    for name, extra in (("ra", {}), (kind, sampling), (f"{kind}-grad", climbing)):
        rngs = [np.random.default_rng([7, i]) for i in range(episodes)]
        seen = eval_robust.perturbed(policy, torch.as_tensor(obs), dict(kind=name, epsilon=epsilon, **extra), rngs)
        reached.append(eval_robust.OBJECTIVES[kind](policy, torch.as_tensor(obs), seen).numpy())
    random, sampled, gradient = reached
    worst = worst_objective(kind, saved, direction, obs, epsilon)
    assert (sampled >= random).all() and (gradient > sampled).all()
    assert random.mean() < sampled.mean() < gradient.mean()
    assert (gradient <= worst + 1e-4).all()
    clean = 0.0 if kind == "ad" else np.tanh(obs @ direction)
    assert ((gradient - clean) / (worst - clean)).mean() > 0.8 > ((sampled - clean) / (worst - clean)).mean()


@pytest.mark.parametrize("kind", ["ad", "mq"])
def test_in_two_dimensions_the_gradient_finds_the_worst_corner(kind):
    direction, episodes, epsilon = np.array([0.3, -0.2]), 20, 0.1
    saved = known_policy(direction)
    policy = eval_robust.build_policy(saved, 2, 1, "")
    obs = np.random.default_rng(0).normal(size=(episodes, 2)).astype(np.float32)
    cell = dict(kind=f"{kind}-grad", epsilon=epsilon, candidates=1, restarts=20, steps=10)
    rngs = [np.random.default_rng(i) for i in range(episodes)]
    seen = eval_robust.perturbed(policy, torch.as_tensor(obs), cell, rngs)
    corner = epsilon * saved["obs_std"].numpy() * np.sign(direction)
    difference = (seen.numpy() - obs) / corner
    if kind == "mq":
        np.testing.assert_allclose(difference, 1, atol=1e-4)
    else:  # either of two opposite corners
        np.testing.assert_allclose(np.abs(difference), 1, atol=1e-4)
        np.testing.assert_allclose(difference[:, 0], difference[:, 1], atol=1e-4)


def test_where_climbing_gets_nowhere_the_sampled_winner_stays():
    """The one start is where the gradient of AD's objective is zero."""
    policy, rng = build(policy_dict()), torch.Generator().manual_seed(0)
    obs, reach = torch.randn(40, 11, generator=rng), policy.obs_std
    candidates, starts = 2 * torch.rand(40, 200, 11, generator=rng) - 1, torch.zeros(40, 1, 11)
    objective = partial(eval_robust.disagreement, policy)
    sampled = eval_robust.sampled_attack(objective, obs, reach, candidates)
    climbed = eval_robust.gradient_attack(objective, obs, reach, candidates, starts, steps=3)
    assert torch.equal(climbed, sampled)


@pytest.mark.parametrize("kind", eval_robust.Args.attacks)
def test_perturbations_stay_inside_the_box(kind):
    saved = policy_dict(algorithm="rambo")
    policy, obs = build(saved), torch.randn(30, 11, generator=torch.Generator().manual_seed(0))
    cell = dict(kind=kind, epsilon=0.2, candidates=9, restarts=4, steps=3)
    seen = eval_robust.perturbed(policy, obs, cell, [np.random.default_rng(i) for i in range(30)])
    assert ((seen - obs).abs() <= 0.2 * saved["obs_std"] + 1e-6).all()
    assert ((seen - obs).abs().amax(0) > 0.1 * saved["obs_std"]).all()


def test_random_perturbations_fill_the_box():
    saved = policy_dict()
    policy, obs, rngs = build(saved), torch.zeros(500, 11), [np.random.default_rng(i) for i in range(500)]
    cell = dict(kind="ra", epsilon=0.2)
    seen = torch.cat([eval_robust.perturbed(policy, obs, cell, rngs) for _ in range(10)])
    units = (seen / (0.2 * saved["obs_std"])).numpy()
    for column in units.T:
        assert stats.kstest(column, stats.uniform(-1, 2).cdf).pvalue > 1e-4
    assert np.abs(np.corrcoef(units.T) - np.eye(11)).max() < 0.1  # the dimensions are independent


def test_an_episode_is_attacked_the_same_whoever_else_is_running():
    policy, obs = build(policy_dict()), torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
    cell = dict(kind="ad", epsilon=0.2, candidates=9)
    together = eval_robust.perturbed(policy, obs, cell, [np.random.default_rng(i) for i in range(3)])
    alone = eval_robust.perturbed(policy, obs[1:2], cell, [np.random.default_rng(1)])
    torch.testing.assert_close(alone[0], together[1])


def test_every_episode_has_an_attacker_of_its_own_and_every_cell_the_same(monkeypatch):
    first_draws, attack = [], eval_robust.perturbed

    def noting(policy, obs, cell, rngs):
        if not first_draws:
            first_draws.extend(copy.deepcopy(rng).uniform() for rng in rngs)
        return attack(policy, obs, cell, rngs)

    monkeypatch.setattr(eval_robust, "perturbed", noting)
    seen = []
    for seed, kind, epsilon in ((0, "ra", 0.1), (0, "ad", 0.2), (1, "ra", 0.1)):
        first_draws.clear()
        cell = dict(policy="", kind=kind, seed=seed, episodes=4, epsilon=epsilon)
        eval_robust.run_cell(content_of(policy_dict()), "Hopper-v4", cell)
        seen.append(list(first_draws))
    assert seen[0] == seen[1] and len(set(seen[0] + seen[2])) == 8


@pytest.mark.parametrize("algorithm", ["micro", "rambo"])
@pytest.mark.parametrize("kind", eval_robust.Args.attacks)
def test_without_reach_an_attack_gives_the_clean_return_exactly(kind, algorithm):
    saved = policy_dict(algorithm=algorithm)
    saved["actor"] = {name: 3 * weight for name, weight in saved["actor"].items()}  # wild: episodes of many lengths
    nominal = dict(policy="", kind="nominal", seed=3, episodes=3)
    attacked = nominal | dict(kind=kind, epsilon=0.0, candidates=5, restarts=3, steps=2)
    steps = Counter()
    clean = eval_robust.run_cell(content_of(saved), "Hopper-v4", nominal, lambda env: steps.update([id(env)]))
    assert len(set(steps.values())) > 1
    assert eval_robust.run_cell(content_of(saved), "Hopper-v4", attacked) == clean
    assert eval_robust.run_cell(content_of(saved), "Hopper-v4", attacked | dict(epsilon=0.5)) != clean
    actor = micro.Actor(11, 3, 16)  # and the clean return is the one that the trainers measure
    actor.load_state_dict(saved["actor"])
    policy = lambda obs: actor.mode((obs - saved["input_mean"]) / saved["input_std"])  # noqa: E731
    seeds, envs = eval_robust.evaluation_seeds(3, 3), [micro.make_env("Hopper-v4") for _ in range(3)]
    assert clean == micro.evaluate(policy, envs, seeds, torch.device("cpu")).tolist()


# --- scores -----------------------------------------------------------------------------------------------------------
def test_area_is_the_average_under_the_curve():
    curve = np.array([[10.0, 4.0, 4.0]])  # trapezoids of 0.7 and 0.8
    assert eval_robust.area(curve, [0.0, 0.1, 0.3]) == pytest.approx(1.5 / 0.3)
    assert eval_robust.area(np.array([[7.0], [3.0]]), [0.1]).tolist() == [7, 3]


def test_bootstrap_interval_against_the_normal_one():
    values = np.random.default_rng(0).normal(50, 10, 400)
    low, high = eval_robust.bootstrap_interval(values)
    half = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - half, abs=0.1) and high == pytest.approx(values.mean() + half, abs=0.1)
    assert eval_robust.bootstrap_interval(np.full(5, 3.0)) == (3, 3)


def made_up_results(args, labels, episodes_return):
    """robustness.json's content, with `episodes_return(run, cell)` for the returns of each cell."""
    runs = [dict(run=f"r{i}", label=label, policy=str(i), dataset=dict(file="f")) for i, label in enumerate(labels)]
    cells = [cell for run in runs for cell in eval_robust.all_cells(args, run["policy"])]
    cells = [cell | dict(returns=episodes_return(int(cell["policy"]), cell)) for cell in cells]
    return dict(gym_id="Other-v0", args=args, runs=runs, cells=cells)


def test_pooling_grid_mean_worst_cell_and_areas_against_hand_made_numbers():
    args = eval_robust.Args(episodes=2, gravity=(1, 3, 2), friction=(0.5, 1, 2))
    args.attacks, args.epsilon = ("ra", "mq"), (0, 0.2, 3)
    grid = {(1.0, 0.5): 60, (1.0, 1.0): 1000, (3.0, 0.5): 30, (3.0, 1.0): 20}  # (1, 1) is the nominal cell: left out
    attacked = {("ra", 0.1): 80, ("ra", 0.2): 40, ("mq", 0.1): 20, ("mq", 0.2): 0}

    def episodes_return(run, cell):
        if cell["kind"] == "nominal":
            base = 100
        elif cell["kind"] == "physics":
            base = grid[cell["gravity"], cell["friction"]]
        else:
            base = attacked[cell["kind"], cell["epsilon"]]
        return [base + 4 * run - 1, base + 4 * run + 1]

    results = made_up_results(args, ["micro", "rambo", "micro"], episodes_return)
    scores = eval_robust.scores_by_label(results)
    assert list(scores) == ["micro", "rambo"]
    assert scores["micro"].nominal.tolist() == [99, 101, 107, 109]  # runs 0 and 2
    assert scores["micro"].grid[:, 1, 0].tolist() == [29, 31, 37, 39]
    assert scores["micro"].attacks["mq"][2].tolist() == [107, 27, 7]
    table = eval_robust.summary(results, scores)
    row = next(line for line in table.splitlines() if line.startswith("| micro"))
    means = [float(text) for text in re.findall(r"\| (-?[\d.]+) \[", row)]
    areas = [(50 + 80 + 20) / 2, (50 + 20 + 0) / 2]
    expected = [100, (60 + 30 + 20) / 3, 20, *areas]  # of a run without its offset, which is 0 or 8
    assert means == pytest.approx([value + 4 for value in expected], abs=0.051)
    assert "| 2 |" in row and "gravity ×3, friction ×1" in row
    assert "Return, 2 episodes" in table  # no reference returns in this environment
    low, high = map(float, re.search(r"104.0 \[([\d.]+), ([\d.]+)\]", row).groups())
    assert (low, high) == pytest.approx(eval_robust.bootstrap_interval(np.array([99.0, 101, 107, 109])), abs=0.051)


def test_labels():
    runs = [policy_dict(seed=1), policy_dict(seed=2), policy_dict(algorithm="rambo")]
    assert eval_robust.label_runs(runs) == ["micro", "micro", "rambo"]
    runs[1]["args"]["beta"] = 0.1
    assert eval_robust.label_runs(runs) == ["micro (beta 1.0)", "micro (beta 0.1)", "rambo"]
    runs[1]["args"]["beta"], runs[1]["dataset"]["sha256"] = 1.0, "cd" * 32
    assert eval_robust.label_runs(runs)[:2] == ["micro (data some.hdf5 abababab)", "micro (data some.hdf5 cdcdcdcd)"]


# --- whole evaluations ------------------------------------------------------------------------------------------------
@pytest.fixture
def runs(tmp_path):
    return [
        save_run(tmp_path / "a" / "first", seed=1),
        save_run(tmp_path / "a" / "second", seed=2),
        save_run(tmp_path / "a" / "third", algorithm="rambo", seed=1),
    ]


def test_a_whole_evaluation_and_its_files(runs, capsys):
    start(run_dirs=runs)
    results, table = results_in(), Path("robustness/summary.md").read_text()
    assert table in capsys.readouterr().out
    assert [run["label"] for run in results["runs"]] == ["micro", "micro", "rambo"]
    assert [run["dataset"]["file"] for run in results["runs"]] == ["some.hdf5"] * 3
    assert results["versions"]["mujoco"] and results["args"]["episodes"] == 2 and results["gym_id"] == "Hopper-v4"
    assert len(results["cells"]) == 3 * CELLS == len(returns_in())
    assert all(len(cell["returns"]) == 2 and np.isfinite(cell["returns"]).all() for cell in results["cells"])
    assert len(results["evaluation_seeds"]) == 2
    names = {path.name for path in Path("robustness").iterdir()}
    figures = {f"{name}.{suffix}" for name in ("physics", "attacks") for suffix in ("png", "pdf")}
    assert names == figures | {"robustness.json", "summary.md"}
    assert Image.open("robustness/physics.png").size[0] > 1000 and Image.open("robustness/attacks.png").size[0] > 1000
    nominal = [cell["returns"] for cell in results["cells"] if cell["kind"] == "nominal"]
    micro_score = micro.normalised_score(np.concatenate(nominal[:2]), "Hopper-v4").mean()
    assert re.search(r"\| micro \| 2 \| ([\d.-]+)", table)[1] == f"{micro_score:.1f}"


def test_every_cell_starts_from_the_same_states(runs, monkeypatch):
    seeds, reset = [], gym.wrappers.TimeLimit.reset

    def noting(env, *, seed):
        seeds.append(seed)
        return reset(env, seed=seed)

    monkeypatch.setattr(gym.wrappers.TimeLimit, "reset", noting)
    start(run_dirs=runs)
    assert seeds == results_in()["evaluation_seeds"] * (3 * CELLS)


def test_the_result_does_not_depend_on_the_workers(runs):
    start("--output-dir", "one", run_dirs=runs[1:])
    start("--output-dir", "two", "--workers", 2, run_dirs=runs[1:])
    assert returns_in("one") == returns_in("two") and len(returns_in("one")) == 2 * CELLS
    for name in ("summary.md", "physics.png", "attacks.png"):
        assert (Path("one") / name).read_bytes() == (Path("two") / name).read_bytes()


def counted(monkeypatch, stop_after=math.inf):
    """Counts the cells that are computed, and raises Ctrl-C's exception before one too many."""
    computed, run_cell = [], eval_robust.run_cell

    def counting(content, gym_id, cell):
        if len(computed) >= stop_after:
            raise KeyboardInterrupt
        computed.append(cell["kind"])
        return run_cell(content, gym_id, cell)

    monkeypatch.setattr(eval_robust, "run_cell", counting)
    return computed


def test_interrupted_and_continued_equals_uninterrupted(runs, monkeypatch, capsys):
    start("--output-dir", "whole", run_dirs=runs[:1])
    with monkeypatch.context() as patch:
        counted(patch, stop_after=4)
        with pytest.raises(SystemExit) as stop:
            start("--output-dir", "broken", run_dirs=runs[:1])
    assert stop.value.code == 130 and "the same command goes on" in capsys.readouterr().out
    assert len(returns_in("broken")) == 4
    refused("--output-dir", "broken", "--plot-only", about="not finished")
    computed = counted(monkeypatch)
    start("--output-dir", "broken", run_dirs=runs[:1])
    assert len(computed) == CELLS - 4 and returns_in("broken") == returns_in("whole")
    assert Path("broken/summary.md").read_bytes() == Path("whole/summary.md").read_bytes()
    start("--output-dir", "broken", run_dirs=runs[:1])
    assert len(computed) == CELLS - 4  # nothing more to do


def test_other_settings_take_over_only_what_they_do_not_change(runs, monkeypatch):
    start(run_dirs=runs[:1])
    first, computed = returns_in(), counted(monkeypatch)
    start("--attack-candidates", 6, run_dirs=runs[:1])
    assert sorted(computed) == ["ad", "ad-grad", "mq", "mq-grad"]
    computed.clear()
    start("--attack-steps", 3, "--no-grid", "--attacks", "ra", "ad-grad", run_dirs=runs[:1])
    assert computed == ["ad-grad"]
    computed.clear()
    start("--seed", 1, "--attacks", run_dirs=runs[:1])
    assert len(computed) == 5
    computed.clear()
    save_run(runs[0], seed=9)  # trained on
    start("--no-grid", "--attacks", run_dirs=runs[:1])
    assert computed == ["nominal"]
    assert first.items() <= returns_in().items()  # nothing was lost


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_for_real(runs, number):
    """A process with two workers is stopped in the middle: its workers end too, and another start goes on."""
    flags = ["--attacks", "--gravity", "0.5", "2", "40", "--friction", "0.5", "1.5", "40", "--workers", "2"]
    command = [sys.executable, str(ROOT / "eval_robust.py"), *TINY, *flags, "--run-dirs", str(runs[0])]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background job is born with it ignored
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=heed, **pipes)
    deadline = time.monotonic() + 300
    while not (Path("robustness/robustness.json").exists() and results_in()["cells"]):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in errors
    assert ("the same command goes on" in output) == (number == signal.SIGINT)
    while any(map(alive, children)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    done = returns_in()
    assert len(children) >= 2 and 0 < len(done) < 1600
    content = (runs[0] / "policy.pt").read_bytes()
    for key, returns in list(done.items())[:3]:
        assert eval_robust.run_cell(content, "Hopper-v4", json.loads(key)) == returns


def test_a_worker_that_dies(runs):
    contents = {"p": (runs[0] / "policy.pt").read_bytes()}
    cells = [dict(policy="p", kind="nominal", seed=seed, episodes=50) for seed in range(200)]
    with pytest.raises(SystemExit, match="a worker died.*finished cells are kept"):
        for _ in eval_robust.run_cells(contents, "Hopper-v4", cells, 2):
            for child in multiprocessing.active_children():
                child.kill()


def test_plot_only_redraws(runs, monkeypatch, capsys):
    start(run_dirs=runs)
    before = {path: path.read_bytes() for path in Path("robustness").iterdir()}
    for path in before:
        if path.suffix != ".json":
            path.unlink()
    computed = counted(monkeypatch)
    capsys.readouterr()
    eval_robust.main(eval_robust.Args(plot_only=True))
    assert {path: path.read_bytes() for path in Path("robustness").iterdir()} == before and not computed
    assert Path("robustness/summary.md").read_text() in capsys.readouterr().out


@pytest.mark.parametrize("gym_id", ["Walker2d-v4", "HalfCheetah-v4", "Reacher-v4"])
def test_other_environments(tmp_path, gym_id):
    run = save_run(tmp_path / "run", gym_id=gym_id)
    flags = "--gravity 2 2 1 --friction 0.5 0.5 1 --attacks ra mq --epsilon 0.1 0.1 1 --episodes 1".split()
    start(*flags, run_dirs=[run])
    assert len({tuple(cell["returns"]) for cell in results_in()["cells"]}) > 1
    assert ("Normalised score" in Path("robustness/summary.md").read_text()) == (gym_id != "Reacher-v4")


def test_an_environment_without_mujoco(tmp_path):
    run = save_run(tmp_path / "run", gym_id="Pendulum-v1")
    refused(run_dirs=[run], about="Pendulum-v1 has no MuJoCo model.*--no-grid")
    start("--no-grid", "--attacks", "ad-grad", run_dirs=[run])
    assert len(returns_in()) == 2 and not Path("robustness/physics.png").exists()


@pytest.mark.parametrize("trainer", [micro, rambo_baseline])
def test_the_trainers_policies_fit(tmp_path, trainer, monkeypatch):
    rng, rows = np.random.default_rng(0), 60
    with h5py.File(tmp_path / "data.hdf5", "w") as file:
        for key, width in (("observations", 11), ("next_observations", 11), ("actions", 3)):
            file[key] = rng.uniform(-0.1, 0.1, (rows, width)).astype(np.float32)
        for key in ("rewards", "terminals", "timeouts"):
            file[key] = np.zeros(rows, np.float32)
    flags = (
        "--env-id hopper-medium-v2 --dataset-path data.hdf5 --runs-root runs --total-updates 2 --eval-episodes 1 "
        "--hidden-size 8 --dynamics-hidden-size 8 --dynamics-max-epochs 1 --rollout-batch-size 8 --num-critics 3"
    ).split()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(trainer, "received_signals", [])
    trainer.main(trainer.parse_args(flags + (["--bc-epochs", "1"] if trainer is rambo_baseline else [])))
    for number, handler in handlers.items():
        signal.signal(number, handler)
    (run,) = (tmp_path / "runs").iterdir()
    start("--no-grid", "--attacks", "mq-grad", run_dirs=[run])
    (described,) = results_in()["runs"]
    assert described["label"] == ("micro" if trainer is micro else "rambo") and described["run"] == run.name
    assert described["dataset"]["file"] == "data.hdf5" and described["args"]["num_critics"] == 3


def test_the_policy_that_ships():
    """The command works right after a clone: the policy is there, small, with its args, and beats its data's."""
    path = eval_robust.SHIPPED_RUN / "policy.pt"
    assert path.is_file(), f"{path.relative_to(ROOT)} is missing: the trained policy that ships with the repository"
    assert path.stat().st_size < 2e6 and json.loads((path.parent / "args.json").read_text())["algorithm"] == "micro"
    start("--no-grid", "--attacks", "--episodes", "5")
    (cell,) = results_in()["cells"]
    assert micro.normalised_score(cell["returns"], "Hopper-v4").mean() > 11.6


# --- video ------------------------------------------------------------------------------------------------------------
def test_video_or_a_line_that_says_why_not(runs, monkeypatch, capsys):
    flags = "--attacks ra --epsilon 0.1 0.1 1 --gravity 2 2 1 --friction 0.5 0.5 1 --video".split()
    start(*flags, run_dirs=runs[2:])
    names = [f"video-1-rambo-{kind}.gif" for kind in ("nominal", "physics", "ra")]
    said = capsys.readouterr().out.splitlines()[-1]
    if said.startswith("no video: this machine cannot render with egl, osmesa, glfw"):
        assert not list(Path("robustness").glob("*.gif"))
    else:
        assert said == f"videos: {', '.join(names)}"
        for name in names:
            assert Image.open(Path("robustness") / name).n_frames > 1
    monkeypatch.setattr(eval_robust, "RENDERERS", ["nonsense"])
    start(*flags, "--output-dir", "other", run_dirs=runs[2:])
    assert capsys.readouterr().out.splitlines()[-1].startswith("no video: this machine cannot render with nonsense")
    assert Path("other/summary.md").exists() and not list(Path("other").glob("*.gif"))


# --- refused ----------------------------------------------------------------------------------------------------------
class Bomb:
    def __reduce__(self):
        return os.system, ("touch executed",)


def test_a_checkpoint_with_code_is_refused_and_not_executed(tmp_path):
    for name, write in (
        ("pickle", lambda path: path.write_bytes(pickle.dumps(policy_dict() | dict(args=Bomb())))),
        ("archive", lambda path: torch.save(policy_dict() | dict(args=Bomb()), path)),
        ("object", lambda path: torch.save(policy_dict() | dict(args=eval_robust.Args()), path)),
    ):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "policy.pt")
        refused(run_dirs=[tmp_path / name], about="more than tensors and plain values; nothing in it was executed")
    assert not Path("executed").exists()
    torch.load(tmp_path / "archive" / "policy.pt", weights_only=False)
    assert Path("executed").exists()  # so the bomb was live


def test_no_module_is_imported_on_a_files_word(tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text("open('executed', 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    run = save_run(tmp_path / "run", **dict(policy_dict(), gym_id="Hopper-v4"))
    torch.save(policy_dict() | dict(gym_id="evil:Hopper-v4"), run / "policy.pt")
    refused(run_dirs=[run], about="evil:Hopper-v4 asks for a module")
    assert not Path("executed").exists()


def test_missing_and_half_written_runs(tmp_path, runs):
    refused(run_dirs=[runs[0], tmp_path / "nowhere"], about="there is no run folder .*nowhere")
    (tmp_path / "young").mkdir()
    refused(run_dirs=[tmp_path / "young"], about="young has no policy.pt.*first checkpoint")
    whole = (runs[0] / "policy.pt").read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 1):
        (runs[0] / "policy.pt").write_bytes(whole[:size])
        refused(run_dirs=runs, about="policy.pt is refused: it is torn")


@pytest.mark.parametrize(
    "changes, about",
    [
        (dict(format=2), "newer version .*format 2"),
        (dict(format="x"), "newer version"),
        (dict(encoder={}), "newer version .*encoder"),
        (dict(critics=None), "not a whole policy.*critics"),
        (dict(obs_std=[1.0]), "not a whole policy.*obs_std"),
        (dict(dataset=dict(file="x")), "dataset"),
        (dict(args=dict(seed=torch.ones(1))), "args"),
        (dict(gym_id="Walker2d-v4"), "do not fit Walker2d-v4"),
        (dict(gym_id="Nowhere-v4"), "cannot make Nowhere-v4"),
        (dict(actor={}), "do not fit"),
        (dict(critics={"x": 1}), "do not fit"),
        (dict(obs_std=torch.ones(5)), "do not fit"),
        (dict(obs_std=torch.ones(1)), "do not fit"),
        (dict(obs_std=torch.full((11,), math.nan)), "not finite"),
        (dict(input_std=torch.zeros(11)), "deviation of 0"),
    ],
)
def test_policies_that_are_not_as_they_should_be(tmp_path, changes, about):
    run = save_run(tmp_path / "run")
    torch.save(policy_dict() | changes, run / "policy.pt")
    refused(run_dirs=[run], about=about)


def test_policies_that_lack_something_or_are_something_else(tmp_path):
    run = save_run(tmp_path / "run")
    for key in policy_dict():
        torch.save({k: v for k, v in policy_dict().items() if k != key}, run / "policy.pt")
        refused(run_dirs=[run], about=f"not a whole policy.*{key}")
    torch.save([torch.ones(3)], run / "policy.pt")
    refused(run_dirs=[run], about="not a policy")


def test_runs_that_cannot_go_together(tmp_path, runs):
    other = save_run(tmp_path / "other", gym_id="Walker2d-v4")
    refused(run_dirs=[*runs, other], about="different environments .*first in Hopper-v4.*other in Walker2d-v4")
    refused(run_dirs=[runs[0], runs[0]], about="same policy")


@pytest.mark.parametrize(
    "flags, about",
    [
        ("--episodes 0", "--episodes 0"),
        ("--workers 0", "--workers 0"),
        ("--attack-steps 0", "--attack-steps 0"),
        ("--seed -1", "--seed -1"),
        ("--attacks ra ad ra", "--attacks ra ad ra names one twice"),
        ("--gravity 2 1 5", "--gravity 2.0 1.0 5"),
        ("--friction -1 1 5", "--friction -1.0"),
        ("--epsilon 0 0.2 1", "--epsilon 0.0 0.2 1"),
        ("--epsilon 0 inf 3", "--epsilon"),
        ("--gravity 1 1 1 --friction 1 1 1", "nominal cell.*--no-grid"),
        ("--plot-only", "cannot read .*robustness.json"),
        ("--plot-only --video", "leave one of them out"),
        ("--output-dir file", "cannot (read|write) file"),
    ],
)
def test_arguments_that_make_no_sense(runs, flags, about):
    Path("file").write_text("")
    refused(*flags.split(), run_dirs=runs[:1], about=about)


def test_a_robustness_json_that_cannot_be_gone_on_with(runs):
    start("--no-grid", "--attacks", run_dirs=runs[:1])
    path = Path("robustness/robustness.json")
    whole = path.read_text()
    for text, about in (
        (whole[:-50], "not a whole robustness.json"),
        ("{}", "not a whole robustness.json"),
        ("[]", "not a whole robustness.json"),
        (whole.replace('"format": 1', '"format": 2'), "newer version"),
        (re.sub('"returns": .*?]', '"returns": []', whole), "without its returns"),
        (re.sub('"mujoco": ".*?"', '"mujoco": "3.5.0"', whole), "3.5.0.*--output-dir"),
    ):
        assert text != whole
        path.write_text(text)
        refused("--no-grid", "--attacks", run_dirs=runs[:1], about=about)
