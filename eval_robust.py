"""How robust is a trained policy? Other gravity and friction, and attacks on what the policy sees, in one file.

Takes run folders of micro.py (with any --penalty) and rambo_baseline.py, and makes the kind of evidence that the MICRO
paper (Liu et al., IJCAI 2024) shows in its Figs. 2, 3 and 5. No installed file is touched: physics is scaled in memory.

    what                                                                               here
    gravity and friction times a factor, in the simulator                  Fig. 2      scale_physics
    s' = s + delta, |delta_i| <= epsilon * sigma_i (std in the dataset)    Fig. 3      perturbed
    RA   one uniform delta a step                                          Fig. 3      perturbed
    AD   largest KL(pi(s) || pi(s')) + KL(pi(s') || pi(s))                 Fig. 3      disagreement, symmetric_kl
    MQ   smallest min_k Q_k(s, tanh mu(s'))                                Fig. 3      value_loss
    AD, MQ by trying random delta                                          Fig. 3      sampled_attack
    AD, MQ by climbing the gradient: ad-grad, mq-grad                      -           gradient_attack

The simulator keeps the true state; only the policy is deceived. Every algorithm and every cell sees the same evaluation
seeds and the same attacker's draws, so comparisons are paired.

Usage: python eval_robust.py --run-dirs runs/A runs/B runs/C
       python eval_robust.py                    (the policy that ships with this repository)
"""

import functools
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import platform
import re
import signal
import sys
import textwrap
import threading
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator, Literal, NamedTuple, NoReturn, Sequence

# For --video alone: left in place, a renderer that is not there would stop mujoco's import.
RENDERERS = os.environ.pop("MUJOCO_GL", "egl osmesa glfw").split()

import gymnasium as gym
import matplotlib
import mujoco
import numpy as np
import torch
import torch.nn as nn
import tyro
from PIL import Image
from tqdm import tqdm

matplotlib.use("Agg")
import matplotlib.pyplot as plt

warnings.filterwarnings("ignore", message=".*is out of date.*")  # D4RL's v2 environments are gymnasium's v4, not v5

Attack = Literal["ra", "ad", "mq", "ad-grad", "mq-grad"]
SHIPPED_RUN = Path(__file__).resolve().parent / "data" / "hopper-medium-replay-lite__micro__1"


@dataclass
class Args:
    # --- what to evaluate, and where to ---
    run_dirs: tuple[str, ...] = ()
    """run folders of one environment; seeds of the same algorithm are pooled (none: the policy that ships)"""
    output_dir: str = "robustness"
    """gets robustness.json, summary.md and the figures; a second start goes on from what is there"""
    plot_only: bool = False
    """draw the figures and the table again from robustness.json, and nothing else"""
    video: bool = False
    """also write GIFs of a nominal, a physically perturbed and an attacked episode of each algorithm"""
    workers: int | None = None
    """processes, one thread each (None: one for each CPU); the result does not depend on it"""
    seed: int = 0
    """fixes the evaluation's start states and the attacker's draws"""
    episodes: int = 10
    """episodes a cell, with the deterministic policy"""

    # --- physics ---
    grid: bool = True
    """evaluate the grid of gravity and friction"""
    gravity: tuple[float, float, int] = (0.5, 5.0, 10)
    """factors on gravity: from, to, how many"""
    friction: tuple[float, float, int] = (0.5, 1.5, 10)
    """factors on the friction of every geom: from, to, how many"""

    # --- attacks ---
    attacks: tuple[Attack, ...] = ("ra", "ad", "mq", "ad-grad", "mq-grad")
    """random, action difference, minimum Q, and the latter two by gradient; none given: no attacks"""
    epsilon: tuple[float, float, int] = (0.0, 0.2, 10)
    """reach of an attack, in standard deviations of the dataset's observations: from, to, how many"""
    attack_candidates: int = 50
    """random perturbations among which ad and mq choose"""
    attack_restarts: int = 20
    """random starts of ad-grad and mq-grad"""
    attack_steps: int = 10
    """sign-gradient steps of ad-grad and mq-grad, each of epsilon / attack_steps"""


def fail(message: str) -> NoReturn:
    """One line that says what is wrong, and exit status 1."""
    raise SystemExit(f"{Path(__file__).name}: {' '.join(message.split())}")


def say(message: str) -> None:
    tqdm.write(message)
    sys.stdout.flush()


def check_args(args: Args) -> None:
    for name in ("gravity", "friction", "epsilon"):
        start, end, count = getattr(args, name)
        if not (0 <= start <= end < math.inf and count >= 1 and (count == 1) == (start == end)):
            fail(f"--{name} {start} {end} {count}: needs 0 <= from < to and how many > 1, or from = to and 1")
    for name in ("episodes", "workers", "attack_candidates", "attack_restarts", "attack_steps"):
        if (value := getattr(args, name)) is not None and value < 1:
            fail(f"--{name.replace('_', '-')} {value} is less than 1")
    if args.video and args.plot_only:
        fail("--video plays episodes, which --plot-only does not: leave one of them out")
    if len(set(args.attacks)) < len(args.attacks):
        fail(f"--attacks {' '.join(args.attacks)} names one twice")
    if args.seed < 0:
        fail(f"--seed {args.seed} is negative")
    if args.grid and args.gravity[:2] == args.friction[:2] == (1, 1):
        fail("the grid has nothing but the nominal cell, which is always evaluated: use --no-grid")


def spaced(start: float, end: float, count: int) -> list[float]:
    return np.linspace(start, end, count).round(6).tolist()


# === shared: environments ===
# D4RL's normalised score is 0 at the first return (a random policy's) and 100 at the second (an expert's).
REFERENCE_RETURNS = {
    "Hopper": (-20.272305, 3234.3),
    "Walker2d": (1.629008, 4592.3),
    "HalfCheetah": (-280.178953, 12135.0),
}


def environment_name(gym_id: str) -> str:
    return gym_id.split("/")[-1].split("-")[0]


def normalised_score(returns, gym_id: str) -> np.ndarray:
    """D4RL's score of each return; in an environment without reference returns, the return itself."""
    low, high = REFERENCE_RETURNS.get(environment_name(gym_id), (0.0, 100.0))
    return 100 * (np.asarray(returns) - low) / (high - low)


def make_env(gym_id: str) -> gym.Env:
    try:
        env = gym.make(gym_id)
    except (gym.error.Error, ImportError) as error:
        fail(f"gymnasium cannot make {gym_id}: {error}")
    space = env.action_space
    if not all(isinstance(box, gym.spaces.Box) and len(box.shape) == 1 for box in (env.observation_space, space)):
        fail(f"{gym_id} has the spaces {env.observation_space} and {space}: only flat Box spaces can be used")
    if not space.is_bounded():
        fail(f"the action space of {gym_id} has no bounds")
    unit = (space.low == -1).all() and (space.high == 1).all()
    return env if unit else gym.wrappers.RescaleAction(env, -1.0, 1.0)  # the policy ends in a tanh


# === end shared ===


# === shared: networks ===
def mlp(inputs: int, hidden_size: int) -> list[nn.Module]:
    first, second = nn.Linear(inputs, hidden_size), nn.Linear(hidden_size, hidden_size)
    return [first, nn.ReLU(inplace=True), second, nn.ReLU(inplace=True)]


class Actor(nn.Module):
    """Tanh-Gaussian policy. The noise comes from outside, so that every draw is a function of the run's seed."""

    def __init__(self, obs_dim: int, act_dim: int, hidden_size: int = 256):
        super().__init__()
        self.body = nn.Sequential(*mlp(obs_dim, hidden_size))
        self.mean, self.log_std = nn.Linear(hidden_size, act_dim), nn.Linear(hidden_size, act_dim)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(obs)
        return self.mean(hidden), self.log_std(hidden).clamp(-5, 2)

    def mode(self, obs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mean(self.body(obs)))

    def sample(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        mean, log_std = self(obs)
        return torch.tanh(mean + log_std.exp() * noise)

    def sample_with_log_prob(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = self(obs)
        action = torch.tanh(mean + log_std.exp() * noise)
        log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi) - torch.log(1 - action.square() + 1e-6)
        return action, log_prob.sum(-1)


class Critics(nn.Module):
    def __init__(self, num_critics: int, obs_dim: int, act_dim: int, hidden_size: int = 256):
        super().__init__()
        self.critics = nn.ModuleList(
            nn.Sequential(*mlp(obs_dim + act_dim, hidden_size), nn.Linear(hidden_size, 1)) for _ in range(num_critics)
        )

    def forward(self, obs: torch.Tensor, act: torch.Tensor) -> torch.Tensor:  # (critics, batch)
        inputs = torch.cat([obs, act], dim=-1)
        return torch.stack([critic(inputs).squeeze(-1) for critic in self.critics])


# === end shared ===


class Policy(NamedTuple):
    """A trained policy of raw observations: RAMBO's networks take them standardised, which happens in here."""

    actor: Actor
    critics: Critics
    obs_std: torch.Tensor  # (obs,), of the dataset
    input_mean: torch.Tensor
    input_std: torch.Tensor

    def gaussian(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and log standard deviation of the action before the tanh."""
        return self.actor((obs - self.input_mean) / self.input_std)

    def mode(self, obs: torch.Tensor) -> torch.Tensor:
        return self.actor.mode((obs - self.input_mean) / self.input_std)

    def value(self, obs: torch.Tensor, act: torch.Tensor) -> torch.Tensor:
        return self.critics((obs - self.input_mean) / self.input_std, act).amin(0)


# --- run folders ------------------------------------------------------------------------------------------------------
FORMAT = 1  # the newest policy.pt and robustness.json that this script knows
DESCRIPTIONS = dict(algorithm=str, gym_id=str, args=dict, dataset=dict, machine=dict)
NETWORKS = dict(actor=dict, critics=dict)
VECTORS = dict.fromkeys(("obs_mean", "obs_std", "input_mean", "input_std"), torch.Tensor)
# Arguments of a training run in which runs may differ and still be seeds of one algorithm.
NOT_THE_ALGORITHM = {
    "seed", "device", "torch_threads", "compile", "track", "runs_root", "resume", "eval_only", "dataset_path",
    "dataset_base_url", "dynamics_path", "eval_every", "eval_episodes", "checkpoint_every",
}  # fmt: skip


def read_run(run_dir: Path) -> tuple[bytes, dict]:
    """policy.pt as bytes, read once because its training may go on, and what they hold. Nothing is executed."""
    path = run_dir / "policy.pt"
    if not run_dir.is_dir():
        fail(f"there is no run folder {run_dir}")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        fail(f"{run_dir} has no policy.pt: it is no run folder, or its training has not come to its first checkpoint")
    except OSError as error:
        fail(f"cannot read {path}: {error}")
    try:
        with warnings.catch_warnings(action="ignore"):
            saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception:  # torch raises many kinds, with the advice to load unsafely
        fail(f"{path} is refused: it is torn, or holds more than tensors and plain values; nothing in it was executed")
    expected = DESCRIPTIONS | NETWORKS | VECTORS
    if not isinstance(saved, dict):
        fail(f"{path} is not a policy of micro.py or rambo_baseline.py")
    version, unknown = saved.get("format", 1), sorted(map(str, saved.keys() - expected.keys() - {"format"}))
    if not isinstance(version, int) or version > FORMAT or unknown:
        what = f"unknown entries: {', '.join(unknown)}" if unknown else f"format {version}, known is {FORMAT}"
        fail(f"{path} was made by a newer version ({what}): use the eval_robust.py of that version")
    if wrong := [name for name, kind in expected.items() if not isinstance(saved.get(name), kind)]:
        fail(f"{path} is not a whole policy of micro.py or rambo_baseline.py: see its {', '.join(wrong)}")
    try:
        json.dumps({name: saved[name] for name in DESCRIPTIONS})
        saved["dataset"]["file"], saved["dataset"]["sha256"], saved["args"]["seed"]
    except (TypeError, ValueError, KeyError) as error:
        fail(f"{path}: its args or its dataset's description are not as they should be: {error!r}")
    if ":" in saved["gym_id"]:  # gymnasium would import what stands before the colon
        fail(f"{path}: its environment {saved['gym_id']} asks for a module to be imported, which no file may")
    return content, saved


def build_policy(saved: dict, obs_dim: int, act_dim: int, name: str) -> Policy:
    try:
        hidden_size = saved["actor"]["mean.weight"].shape[1]
        actor = Actor(obs_dim, act_dim, hidden_size)
        actor.load_state_dict(saved["actor"])
        critics = Critics(len({key.split(".")[1] for key in saved["critics"]}), obs_dim, act_dim, hidden_size)
        critics.load_state_dict(saved["critics"])
        vectors = {key: saved[key].float().reshape(obs_dim) for key in VECTORS}
    except (KeyError, IndexError, AttributeError, TypeError, RuntimeError) as error:
        fail(f"{name}: its networks do not fit {saved['gym_id']}: {error}")
    tensors = [*actor.parameters(), *critics.parameters(), *vectors.values()]
    if not all(torch.isfinite(tensor).all() for tensor in tensors) or not (vectors["input_std"] > 0).all():
        fail(f"{name} holds numbers that are not finite, or a standard deviation of 0: its training diverged")
    del vectors["obs_mean"]
    return Policy(actor.requires_grad_(False), critics.requires_grad_(False), **vectors)


def label_runs(policies: Sequence[dict]) -> list[str]:
    """The algorithm of each run, and where runs of one algorithm differ in more than their seed, in what."""
    settings = []
    for saved in policies:
        dataset = f"{saved['dataset']['file']} {str(saved['dataset']['sha256'])[:8]}"
        settings.append({k: v for k, v in saved["args"].items() if k not in NOT_THE_ALGORITHM} | dict(data=dataset))
    labels = []
    for saved, mine in zip(policies, settings):
        same = [theirs for other, theirs in zip(policies, settings) if other["algorithm"] == saved["algorithm"]]
        differing = [k for k in mine if any(theirs.get(k) != mine[k] for theirs in same)]
        details = ", ".join(f"{k} {mine[k]}" for k in differing)
        labels.append(f"{saved['algorithm']} ({details})" if details else saved["algorithm"])
    return labels


# --- physics ----------------------------------------------------------------------------------------------------------
class Physics(NamedTuple):
    gravity: np.ndarray  # (3,)
    friction: np.ndarray  # (geoms, 3)


def physics_of(env: gym.Env) -> Physics | None:
    """A copy of the simulator's own values; None where there is no MuJoCo model."""
    model = getattr(env.unwrapped, "model", None)
    return Physics(model.opt.gravity.copy(), model.geom_friction.copy()) if isinstance(model, mujoco.MjModel) else None


def scale_physics(model: mujoco.MjModel, nominal: Physics, gravity: float, friction: float) -> None:
    """In memory and from the nominal values, so that factors never compound; a reset leaves the model as it is."""
    model.opt.gravity[:] = gravity * nominal.gravity
    model.geom_friction[:] = friction * nominal.friction


# --- attacks ----------------------------------------------------------------------------------------------------------
def symmetric_kl(mean, log_std, other_mean, other_log_std) -> torch.Tensor:
    """KL(p || q) + KL(q || p) of diagonal Gaussians: the logarithms cancel."""
    variance, other_variance, distance = (2 * log_std).exp(), (2 * other_log_std).exp(), (mean - other_mean).square()
    return 0.5 * ((variance + distance) / other_variance + (other_variance + distance) / variance - 2).sum(-1)


def disagreement(policy: Policy, obs: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """AD's objective: how far the policy at what it sees is from the policy at the truth, before the tanh."""
    return symmetric_kl(*policy.gaussian(obs), *policy.gaussian(seen))


def value_loss(policy: Policy, obs: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """MQ's objective: -min_k Q_k at the true state, of the action for what is seen."""
    return -policy.value(obs.expand_as(seen), policy.mode(seen))


OBJECTIVES = {"ad": disagreement, "mq": value_loss}


def best_of(units: torch.Tensor, objective: torch.Tensor) -> torch.Tensor:
    """The (episodes, obs) of the largest objective among (episodes, tries, obs)."""
    return units[torch.arange(len(units)), objective.argmax(1)]


def sampled_attack(objective: Callable, obs, reach, candidates: torch.Tensor) -> torch.Tensor:
    """The best of no perturbation and the candidates (episodes, tries, obs), which are in units of the reach."""
    units = torch.cat([torch.zeros_like(candidates[:, :1]), candidates], 1)
    return best_of(units, objective(obs[:, None], obs[:, None] + reach * units))


def gradient_attack(objective: Callable, obs, reach, candidates, starts: torch.Tensor, steps: int) -> torch.Tensor:
    """Projected sign-gradient ascent from each of the starts; the best of all iterates and of the sampled attack.

    The starts are random because the gradient of AD's objective is zero where nothing is perturbed.
    """
    obs, units = obs[:, None], starts  # (episodes, 1, obs), (episodes, restarts, obs)
    tried = [torch.zeros_like(candidates[:, :1]), candidates]
    objectives = [objective(obs, obs + reach * torch.cat(tried, 1))]
    for _ in range(steps):
        with torch.enable_grad():
            units.requires_grad_()
            reached = objective(obs, obs + reach * units)
            (slope,) = torch.autograd.grad(reached.sum(), units)
        units = units.detach()
        tried, objectives = [*tried, units], [*objectives, reached.detach()]
        units = (units + slope.sign() / steps).clamp(-1, 1)
    tried, objectives = [*tried, units], [*objectives, objective(obs, obs + reach * units)]
    return best_of(torch.cat(tried, 1), torch.cat(objectives, 1))


def perturbed(policy: Policy, obs: torch.Tensor, cell: dict, rngs: list[np.random.Generator]) -> torch.Tensor:
    """What the policy sees in place of obs (episodes, obs), inside the box of half-widths epsilon * obs_std."""
    counts = [cell.get("candidates", 1), cell.get("restarts", 0)]
    draws = np.stack([rng.uniform(-1, 1, (sum(counts), obs.shape[1])) for rng in rngs])  # each episode has its own
    candidates, starts = torch.as_tensor(draws, dtype=torch.float32).split(counts, dim=1)
    kind, reach = cell["kind"], cell["epsilon"] * policy.obs_std
    if kind == "ra":
        return obs + reach * candidates[:, 0]
    objective = functools.partial(OBJECTIVES[kind.removesuffix("-grad")], policy)
    if kind.endswith("-grad"):
        return obs + reach * gradient_attack(objective, obs, reach, candidates, starts, cell["steps"])
    return obs + reach * sampled_attack(objective, obs, reach, candidates)


# --- cells ------------------------------------------------------------------------------------------------------------
EVALUATION, ATTACK = range(2)  # purposes of random draws
# Rough cost of a cell: orders the work, the longest first, and makes the time left come true.
COST = {"nominal": 1, "physics": 1, "ra": 1, "ad": 2, "mq": 4, "ad-grad": 16, "mq-grad": 36}


def evaluation_seeds(seed: int, episodes: int) -> list[int]:
    return np.random.SeedSequence([seed, EVALUATION]).generate_state(episodes).tolist()


def nominal_cell(args: Args, policy: str) -> dict:
    return dict(policy=policy, kind="nominal", seed=args.seed, episodes=args.episodes)


def physics_cells(args: Args, policy: str) -> list[list[dict]]:
    """By gravity, then by friction."""
    cell = nominal_cell(args, policy) | dict(kind="physics")
    return [[cell | dict(gravity=g, friction=f) for f in spaced(*args.friction)] for g in spaced(*args.gravity)]


def attack_cells(args: Args, policy: str, kind: str) -> list[dict]:
    """By epsilon. Where that is 0 there is no attack."""
    nominal = nominal_cell(args, policy)
    cell = nominal | dict(kind=kind)
    cell |= dict(candidates=args.attack_candidates) if kind != "ra" else {}
    cell |= dict(restarts=args.attack_restarts, steps=args.attack_steps) if kind.endswith("-grad") else {}
    return [cell | dict(epsilon=epsilon) if epsilon > 0 else nominal for epsilon in spaced(*args.epsilon)]


def all_cells(args: Args, policy: str) -> list[dict]:
    cells = [nominal_cell(args, policy)]
    cells += sum(physics_cells(args, policy), []) if args.grid else []
    return cells + [cell for kind in args.attacks for cell in attack_cells(args, policy, kind) if cell != cells[0]]


def key_of(cell: dict) -> str:
    """Everything that decides a cell's returns: what was computed for one is never taken for another."""
    return json.dumps({name: value for name, value in cell.items() if name != "returns"}, sort_keys=True)


@functools.cache
def make_envs(gym_id: str, count: int) -> list[tuple[gym.Env, Physics | None]]:
    envs = [make_env(gym_id) for _ in range(count)]
    return [(env, physics_of(env)) for env in envs]


@torch.no_grad()
def run_cell(content: bytes, gym_id: str, cell: dict, after_step: Callable | None = None) -> list[float]:
    """The return of each episode of a cell, all stepped together with one call of the policy."""
    envs, seeds = make_envs(gym_id, cell["episodes"]), evaluation_seeds(cell["seed"], cell["episodes"])
    dims = envs[0][0].observation_space.shape[0], envs[0][0].action_space.shape[0]
    policy = build_policy(torch.load(io.BytesIO(content), weights_only=True), *dims, "policy.pt")
    rngs = [np.random.default_rng([cell["seed"], ATTACK, episode]) for episode in range(cell["episodes"])]
    for env, nominal in envs:
        if nominal is not None:
            scale_physics(env.unwrapped.model, nominal, cell.get("gravity", 1.0), cell.get("friction", 1.0))
    obs = np.stack([env.reset(seed=seed)[0] for (env, _), seed in zip(envs, seeds)]).astype(np.float32)
    returns, running = np.zeros(len(envs)), list(range(len(envs)))
    while running:
        seen = torch.as_tensor(obs[running])
        if "epsilon" in cell:
            seen = perturbed(policy, seen, cell, [rngs[i] for i in running])
        for i, action in zip(list(running), policy.mode(seen).numpy()):
            obs[i], reward, terminated, truncated, _ = envs[i][0].step(action)
            returns[i] += reward
            if after_step is not None:
                after_step(envs[i][0])
            if terminated or truncated:
                running.remove(i)
    return returns.tolist()


def start_worker() -> None:
    """One thread each; Ctrl-C is the parent's to handle, and nobody outlives it."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def run_cells(contents: dict[str, bytes], gym_id: str, cells: list[dict], workers: int) -> Iterator[dict]:
    """The cells with their returns, as they get ready."""
    if workers == 1:
        for cell in cells:
            yield cell | dict(returns=run_cell(contents[cell["policy"]], gym_id, cell))
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker)
    try:
        futures = {pool.submit(run_cell, contents[cell["policy"]], gym_id, cell): cell for cell in cells}
        for future in as_completed(futures):
            yield futures[future] | dict(returns=future.result())
        pool.shutdown()
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()
        if isinstance(error, BrokenProcessPool):
            fail("a worker died (was there memory enough?); finished cells are kept: start again, with fewer --workers")
        raise


# --- robustness.json --------------------------------------------------------------------------------------------------
def write_file(path: Path, content: bytes) -> None:
    """Beside its place first, then renamed: what stands under the final name is always whole."""
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as error:
        fail(f"cannot write {path}: {error}")


def write_results(path: Path, results: dict) -> None:
    """A line for each cell."""
    head = json.dumps({name: value for name, value in results.items() if name != "cells"}, indent=2)
    cells = ",\n".join("    " + json.dumps(cell) for cell in results["cells"])
    write_file(path, f'{head[:-2]},\n  "cells": [\n{cells}\n  ]\n}}\n'.encode())


def read_results(path: Path) -> dict:
    advice = "move it away, or choose another --output-dir"
    try:
        results = json.loads(path.read_text())
        if results["format"] > FORMAT:
            fail(f"{path} was made by a newer version: {advice}")
        results["gym_id"], results["versions"], [run["policy"] for run in results["runs"]]
        results["args"] = Args(**results["args"])
        if any(len(cell["returns"]) != cell["episodes"] for cell in results["cells"]):
            raise ValueError("a cell without its returns")
    except OSError as error:
        fail(f"cannot read {path}: {error}")
    except (ValueError, KeyError, TypeError) as error:
        fail(f"{path} is not a whole robustness.json of this script ({error!r}): {advice}")
    return results


def versions() -> dict[str, str]:
    modules = {module.__name__: str(module.__version__) for module in (torch, gym, mujoco, np)}
    return modules | dict(python=platform.python_version())


BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed} gone, {remaining} left"


def read_runs(args: Args) -> tuple[str, list[dict], dict[str, bytes]]:
    """The environment, what robustness.json says of each run, and the policies by their SHA-256."""
    run_dirs = [Path(run_dir) for run_dir in args.run_dirs] or [SHIPPED_RUN]
    contents, policies = zip(*map(read_run, run_dirs))
    gym_id = policies[0]["gym_id"]
    if any(saved["gym_id"] != gym_id for saved in policies):
        found = ", ".join(f"{run_dir} in {saved['gym_id']}" for run_dir, saved in zip(run_dirs, policies))
        fail(f"the runs are of different environments ({found}): give those of one at a time")
    (env, nominal), *_ = make_envs(gym_id, args.episodes)
    if args.grid and nominal is None:
        fail(f"{gym_id} has no MuJoCo model, hence no gravity and friction to scale: use --no-grid")
    runs, by_digest = [], {}
    for run_dir, content, saved, label in zip(run_dirs, contents, policies, label_runs(policies)):
        build_policy(saved, env.observation_space.shape[0], env.action_space.shape[0], str(run_dir / "policy.pt"))
        digest = hashlib.sha256(content).hexdigest()
        if digest in by_digest:
            fail(f"{run_dir} has the same policy as a run before it: give each run once")
        by_digest[digest] = content
        run = dict(run=run_dir.resolve().name, label=label, policy=digest)
        runs.append(run | {name: saved[name] for name in DESCRIPTIONS})
    return gym_id, runs, by_digest


def evaluate_runs(args: Args, path: Path) -> tuple[dict, dict[str, bytes]]:
    """All cells of all runs, written as they come; what an earlier start has finished is not computed again."""
    gym_id, runs, contents = read_runs(args)
    results = dict(format=FORMAT, gym_id=gym_id, versions=versions(), args=vars(args))
    results |= dict(evaluation_seeds=evaluation_seeds(args.seed, args.episodes), runs=runs, cells=[])
    if path.exists():
        earlier = read_results(path)
        if earlier["versions"] != results["versions"]:
            fail(f"{path} was computed with {earlier['versions']}, not {versions()}: choose another --output-dir")
        results["cells"] = earlier["cells"]  # those of other runs and settings too: nothing is lost
    finished = {key_of(cell) for cell in results["cells"]}
    todo = [cell for policy in contents for cell in all_cells(args, policy) if key_of(cell) not in finished]
    todo.sort(key=lambda cell: -COST[cell["kind"]])
    workers = min(args.workers or os.cpu_count(), max(1, len(todo)))
    write_results(path, results)
    say(f"{gym_id}: {len(todo)} cells of {args.episodes} episodes to do, {len(finished)} on file, {workers} workers")
    total, spent, started, next_line = sum(COST[cell["kind"]] for cell in todo), 0, time.perf_counter(), 0.1
    with tqdm(total=total, desc="cells", disable=not sys.stderr.isatty(), bar_format=BAR, dynamic_ncols=True) as bar:
        for cell in run_cells(contents, gym_id, todo, workers):
            results["cells"].append(cell)
            write_results(path, results)
            bar.update(COST[cell["kind"]])
            spent += COST[cell["kind"]]
            if bar.disable and spent >= next_line * total:  # quiet lines where there is no terminal
                minutes, next_line = (time.perf_counter() - started) / 60, next_line + 0.1
                left = minutes * (total / spent - 1)
                say(f"{100 * spent / total:.0f} % after {minutes:.1f} min, {left:.1f} min left")
    return results | dict(args=args), contents


# --- scores, table and figures ----------------------------------------------------------------------------------------
class Scores(NamedTuple):
    """Of one algorithm; the first axis is all episodes of all its runs."""

    nominal: np.ndarray  # (episodes,)
    grid: np.ndarray | None  # (episodes, gravity, friction)
    attacks: dict[str, np.ndarray]  # each (episodes, epsilon)


def scores_by_label(results: dict) -> dict[str, Scores]:
    args, returns = results["args"], {key_of(cell): cell["returns"] for cell in results["cells"]}

    def pooled(cells_of_policy: Callable[[str], list], label: str) -> np.ndarray:
        """Scores of an array of cells, of all runs with the label: (all episodes, *cells)."""
        runs = [cells_of_policy(run["policy"]) for run in results["runs"] if run["label"] == label]
        cells = np.array(runs, dtype=object)  # (runs, *cells)
        values = np.array([returns[key_of(cell)] for cell in cells.flat]).reshape(*cells.shape, args.episodes)
        return normalised_score(np.concatenate(np.moveaxis(values, -1, 1)), results["gym_id"])

    try:
        return {
            label: Scores(
                pooled(lambda policy: nominal_cell(args, policy), label),
                pooled(lambda policy: physics_cells(args, policy), label) if args.grid else None,
                {kind: pooled(lambda policy: attack_cells(args, policy, kind), label) for kind in args.attacks},
            )
            for label in dict.fromkeys(run["label"] for run in results["runs"])
        }
    except KeyError:
        fail("robustness.json is not finished: start again without --plot-only, which goes on where it stopped")


def perturbed_cells(args: Args) -> np.ndarray:
    """Which cells (gravity, friction) of the grid are not the nominal one."""
    return ~np.logical_and.outer(np.array(spaced(*args.gravity)) == 1, np.array(spaced(*args.friction)) == 1)


def worst_cell(grid: np.ndarray, args: Args) -> tuple[int, int]:
    means = np.where(perturbed_cells(args), grid.mean(0), np.inf)
    return np.unravel_index(means.argmin(), means.shape)


def area(scores: np.ndarray, epsilon: list[float]) -> np.ndarray:
    """Under each episode's curve (episodes, epsilon), by trapezoids, over the range: the average score in it."""
    return np.trapezoid(scores, epsilon, axis=1) / (epsilon[-1] - epsilon[0]) if len(epsilon) > 1 else scores[:, 0]


def bootstrap_interval(values: np.ndarray, resamples: int = 10_000) -> tuple[float, float]:
    """95 % percentile interval of the mean over episodes."""
    picks = np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))
    return tuple(np.percentile(values[picks].mean(1), [2.5, 97.5]))


def summary(results: dict, scores: dict[str, Scores]) -> str:
    """Each statistic is a mean over episodes, across cells first: an episode has the same start in all of them."""
    args = results["args"]
    gravity, friction, epsilon = spaced(*args.gravity), spaced(*args.friction), spaced(*args.epsilon)
    header = ["algorithm", "runs", "nominal"] + ["mean over the grid", "worst cell"] * args.grid
    rows = [header + [f"{kind.upper()} area" for kind in args.attacks]]
    rows.append(["---"] * len(rows[0]))
    for label, (nominal, grid, attacks) in scores.items():
        columns = [nominal]
        if grid is not None:
            worst = worst_cell(grid, args)
            columns += [grid[:, perturbed_cells(args)].mean(1), grid[:, *worst]]
        columns += [area(curve, epsilon) for curve in attacks.values()]
        texts = ["{:.1f} [{:.1f}, {:.1f}]".format(values.mean(), *bootstrap_interval(values)) for values in columns]
        if grid is not None:
            texts[2] += f" at gravity ×{gravity[worst[0]]:.3g}, friction ×{friction[worst[1]]:.3g}"
        rows.append([label, str(sum(run["label"] == label for run in results["runs"])), *texts])
    lines = [
        f"# Robustness in {results['gym_id']}",
        "",
        f"{score_name(results['gym_id']).capitalize()}, {args.episodes} episodes a run and cell, with 95 % bootstrap"
        " intervals over episodes. Area: average over ε of the score under attack.",
        "",
    ]
    lines += [f"| {' | '.join(row)} |" for row in rows] + [""]
    for run in results["runs"]:
        data = run["dataset"]
        origin = "D4RL's own" if data.get("is_d4rl") else "not D4RL data"
        lines.append(f"- {run['label']}: `{run['run']}`, trained on `{data['file']}` ({origin})")
    return "\n".join(lines) + "\n"


def score_name(gym_id: str) -> str:
    return "normalised score" if environment_name(gym_id) in REFERENCE_RETURNS else "return"


def write_figure(figure: plt.Figure, path: Path) -> None:
    for suffix, options in ((".png", dict(dpi=150)), (".pdf", dict(metadata=dict(CreationDate=None)))):
        stream = io.BytesIO()
        figure.savefig(stream, format=suffix[1:], **options)
        write_file(path.with_suffix(suffix), stream.getvalue())
    plt.close(figure)


def plot_grids(results: dict, scores: dict[str, Scores], path: Path) -> None:
    """Heat maps side by side on one colour scale."""
    args, columns = results["args"], min(len(scores), 4)
    gravity, friction = spaced(*args.gravity), spaced(*args.friction)
    rows = math.ceil(len(scores) / columns)
    size = (0.9 + 3.3 * columns, 3.5 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    means = [score.grid.mean(0) for score in scores.values()]
    limits = dict(vmin=min(map(np.min, means)), vmax=max(map(np.max, means)))
    for axis in axes.flat[len(scores) :]:
        axis.remove()
    for axis, (label, score), mean in zip(axes.flat, scores.items(), means):
        image = axis.imshow(mean, origin="lower", aspect="auto", cmap="viridis", **limits)
        average = mean[perturbed_cells(args)].mean()
        title = "\n".join(textwrap.wrap(label, 40))
        axis.set_title(f"{title}\ngrid mean {average:.1f}, nominal {score.nominal.mean():.1f}", fontsize=10)
        axis.set(xlabel="friction ×", ylabel="gravity ×" if axis in axes[:, 0] else None)
        axis.set_xticks(range(len(friction)), [f"{value:.2f}" for value in friction], rotation=90, fontsize=8)
        axis.set_yticks(range(len(gravity)), [f"{value:.2g}" for value in gravity], fontsize=8)
    figure.colorbar(image, ax=axes, label=score_name(results["gym_id"]))
    figure.suptitle(f"{results['gym_id']}, other physics", fontsize=11)
    write_figure(figure, path)


# Okabe and Ito's palette, which the colour-blind can tell apart, and markers for paper without colour.
STYLES = [("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P"),
          ("#000000", "X")]  # fmt: skip
ATTACK_NAMES = {
    "ra": "RA: random",
    "ad": "AD: action difference",
    "mq": "MQ: minimum Q",
    "ad-grad": "AD by gradient",
    "mq-grad": "MQ by gradient",
}


def plot_attacks(results: dict, scores: dict[str, Scores], path: Path) -> None:
    """A panel for each attack: mean over episodes and runs, and a band of one standard deviation."""
    args, epsilon = results["args"], spaced(*results["args"].epsilon)
    size = (0.6 + 2.7 * len(args.attacks), 3.3)
    figure, axes = plt.subplots(1, len(args.attacks), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for axis, kind in zip(axes.flat, args.attacks):
        for (label, score), (colour, marker) in zip(scores.items(), itertools.cycle(STYLES)):
            mean, std = score.attacks[kind].mean(0), score.attacks[kind].std(0)
            axis.plot(epsilon, mean, color=colour, marker=marker, markersize=4, label=label)
            axis.fill_between(epsilon, mean - std, mean + std, color=colour, alpha=0.18, linewidth=0)
        axis.set_title(ATTACK_NAMES[kind], fontsize=10)
        axis.set(xlabel="ε (std of observations)")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel(score_name(results["gym_id"]))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"{results['gym_id']}, attacks on the observation", fontsize=11)
    write_figure(figure, path)


# --- video ------------------------------------------------------------------------------------------------------------
def gif_of_episode(content: bytes, gym_id: str, cell: dict, renderer: str) -> bytes:
    os.environ["MUJOCO_GL"], sys.unraisablehook = renderer, lambda _: None  # gymnasium's half-made viewers complain
    frames, steps = [], itertools.count()
    ((env, nominal),) = make_envs(gym_id, 1)
    env.unwrapped.render_mode = "rgb_array"
    if nominal is not None and "track" in [env.unwrapped.model.camera(i).name for i in range(env.unwrapped.model.ncam)]:
        env.unwrapped.mujoco_renderer.camera_id = env.unwrapped.model.camera("track").id  # follows the body
    every = max(1, round(env.unwrapped.metadata.get("render_fps", 25) / 25))  # steps a frame, for 25 a second

    def after_step(env: gym.Env) -> None:
        if next(steps) % every == 0:
            frames.append(Image.fromarray(np.ascontiguousarray(env.unwrapped.render()[::2, ::2])))

    run_cell(content, gym_id, cell, after_step)
    stream = io.BytesIO()
    frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:], duration=40, loop=0)
    return stream.getvalue()


def write_videos(results: dict, scores: dict[str, Scores], contents: dict[str, bytes], output_dir: Path) -> None:
    """The first episode of each algorithm's first run: nominal, in its worst cell, and under its worst attack."""
    args, videos = results["args"], {}
    for number, (label, score) in enumerate(scores.items()):
        policy = next(run["policy"] for run in results["runs"] if run["label"] == label)
        cells = [nominal_cell(args, policy)]
        if args.grid:
            row, column = worst_cell(score.grid, args)
            cells.append(physics_cells(args, policy)[row][column])
        if args.attacks:
            worst = min(args.attacks, key=lambda kind: score.attacks[kind][:, -1].mean())
            cells.append(attack_cells(args, policy, worst)[-1])
        name = re.sub(r"[^\w.-]+", "_", label).strip("_")
        videos |= {f"video-{number + 1}-{name}-{cell['kind']}.gif": cell | dict(episodes=1) for cell in cells}
    for renderer in RENDERERS:  # in a process of its own: a graphics library that crashes takes nothing with it
        try:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), start_worker) as pool:
                for name, cell in videos.items():
                    job = pool.submit(gif_of_episode, contents[cell["policy"]], results["gym_id"], cell, renderer)
                    write_file(output_dir / name, job.result())
            return say(f"videos: {', '.join(videos)}")
        except Exception as error:  # whatever graphics libraries raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    say(f"no video: this machine cannot render with {', '.join(RENDERERS)} ({reason[:100]})")


def main(args: Args) -> None:
    check_args(args)
    torch.set_num_threads(1)
    output_dir = Path(args.output_dir)
    try:
        results, contents = (
            (read_results(output_dir / "robustness.json"), {})
            if args.plot_only
            else evaluate_runs(args, output_dir / "robustness.json")
        )
    except KeyboardInterrupt:
        say(f"interrupted; what is finished stands in {output_dir}: the same command goes on from there")
        raise SystemExit(130)
    scores = scores_by_label(results)
    if results["args"].grid:
        plot_grids(results, scores, output_dir / "physics")
    if results["args"].attacks:
        plot_attacks(results, scores, output_dir / "attacks")
    table = summary(results, scores)
    write_file(output_dir / "summary.md", table.encode())
    say(table)
    say(f"files: {output_dir}")
    if args.video:
        write_videos(results, scores, contents, output_dir)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n")[0]))
