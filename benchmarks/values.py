"""Where does a policy fail? Its discounted return as Q says, in the model and in the simulator, from states of the data
and from states in which episodes begin; and on the way, how optimistic a step of the model is beside the penalty f.

python benchmarks/values.py runs/stand-ins --output results/stand-ins/values.md

*Optimism* of a step is mean_e (r_e + gamma V(s_e)) - (r + gamma V(s')), where elite e predicts r_e and s_e on average,
the simulator answers r and s', and V(s) = min_k Q_k(s, mode of pi). MICRO takes gamma beta f off the target, so beta would
have to be *optimism / (gamma f)* to make up for it on average.

The simulator is put into a state by its observation, which MuJoCo's Hopper, Walker2d and HalfCheetah allow (but for
velocities beyond ±10, which the first two clip). The policy is deterministic, as in evaluations; the model is the
ensemble as it was trained on the data, for RAMBO too, whose own model has since been changed.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import micro  # noqa: E402

STEPS, GAMMA = 500, 0.99  # 0.99^500 is below 1 %
COLUMNS = ("Q", "model", "simulator", "optimism", "gamma f")


def put_into_state(env: gym.Env, obs: np.ndarray) -> None:
    """The observation is the positions without the first, which is where the body is along the way, and velocities."""
    env.reset(seed=0)
    mujoco_env = env.unwrapped
    qpos, qvel = np.split(obs.astype(float), [mujoco_env.model.nq - 1])
    mujoco_env.set_state(np.concatenate([[0.0], qpos]), qvel)


def simulate(policy, env: gym.Env, obs: np.ndarray) -> tuple[float, list]:
    """The discounted return from there, and the transitions (s, a, r, s') in which nothing ends."""
    put_into_state(env, obs)
    total, transitions = 0.0, []
    for step in range(STEPS):
        action = policy(torch.as_tensor(obs[None], dtype=torch.float32))[0].numpy()
        next_obs, reward, terminated, _, _ = env.step(action)
        total += GAMMA**step * reward
        if terminated:
            break
        transitions.append((obs, action, reward, next_obs))
        obs = next_obs
    return total, transitions


def optimism_and_penalty(actor, critics, ensemble, num_elites: int, obs, act, reward, next_obs) -> tuple[float, float]:
    """Means over the rows of the model's optimism and of gamma f, at the elites' means and the policy's mode."""
    no_noise = (torch.zeros(1, 1, *rows.shape) for rows in (obs, act))
    set_values = micro.uncertainty_set_values(ensemble, num_elites, actor, critics, obs, act, *no_noise)
    predicted_reward = ensemble(torch.cat([obs, act], -1), slice(num_elites))[0][..., -1]  # (elites, rows)
    value = critics(next_obs, actor.mode(next_obs)).amin(0)
    optimism = (predicted_reward + GAMMA * set_values[0]).mean(0) - (reward + GAMMA * value)
    return float(optimism.mean()), GAMMA * float(micro.penalty("micro", set_values, value).mean())


@torch.no_grad()
def values(run_dir: Path, count: int) -> list[float]:
    """COLUMNS from data states, then from the environment's own first states: means over `count` of them."""
    saved = micro.read_tensors(run_dir / "policy.pt", "cpu")
    args, mean, std = saved["args"], saved["input_mean"], saved["input_std"]
    env = micro.make_env(saved["gym_id"])
    obs_dim, act_dim = env.observation_space.shape[0], env.action_space.shape[0]
    actor = micro.Actor(obs_dim, act_dim, args["hidden_size"])
    critics = micro.Critics(args["num_critics"], obs_dim, act_dim, args["hidden_size"])
    actor.load_state_dict(saved["actor"])
    critics.load_state_dict(saved["critics"])
    dynamics, num_elites = micro.read_tensors(run_dir / "dynamics.pt", "cpu"), args["num_elites"]
    ensemble = micro.load_dynamics(dynamics, obs_dim, act_dim, micro.Args(num_elites=num_elites), "cpu")
    actor.sample = lambda obs, noise: actor.mode(obs)
    ends = micro.termination_of(saved["gym_id"])
    terminated, rng = (lambda s: ends(s * std + mean)), micro.generator(torch.device("cpu"), 0)
    rows = micro.load_dataset(Path(args["dataset_path"] or micro.SHIPPED / f"{args['env_id']}.hdf5"), env)
    data_states = rows[torch.randint(len(rows), (count,), generator=rng), :obs_dim]
    first_states = np.stack([env.reset(seed=seed)[0] for seed in range(count)])
    found = []
    for states in (data_states, first_states):
        inputs = (torch.as_tensor(states, dtype=torch.float32) - mean) / std
        q, gap = micro.value_gap(actor, critics, ensemble, num_elites, terminated, inputs, GAMMA, rng, STEPS)
        returns, paths = zip(*(simulate(lambda obs: actor.mode((obs - mean) / std), env, s) for s in states))
        steps = [torch.as_tensor(np.array(part), dtype=torch.float32) for part in zip(*itertools.chain(*paths))]
        steps[0], steps[3] = (steps[0] - mean) / std, (steps[3] - mean) / std
        found += [q, q - gap, float(np.mean(returns))]
        found += optimism_and_penalty(actor, critics, ensemble, num_elites, *steps)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs_root", type=Path, help="a folder with finished runs in it or below")
    parser.add_argument("--output", type=Path, required=True, help="the Markdown file to write")
    parser.add_argument("--states", type=int, default=64, help="states of each kind")
    options = parser.parse_args()
    names = ["run", *(f"{name}, {where}" for where in ("data", "start") for name in COLUMNS)]
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    for path in sorted(options.runs_root.rglob("result.json"), key=lambda path: path.parent.name):
        beta = json.loads(path.read_text())["args"].get("beta")
        name = path.parent.name.rsplit("__", 1)[0] + (f", beta {beta:g}" if beta is not None else "")
        numbers = values(path.parent, options.states)
        lines.append(f"| {name} | " + " | ".join(f"{number:.3g}" for number in numbers) + " |")
        print(lines[-1], flush=True)
    micro.write_file(options.output, ("\n".join(lines) + "\n").encode())
