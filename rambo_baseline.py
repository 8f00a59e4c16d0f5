"""RAMBO: robust adversarial model-based offline RL, in one file. The rival of micro.py, in the same style.

Paper: Rigter, Lacerda and Hawes, "RAMBO-RL: Robust Adversarial Model-Based Offline Reinforcement Learning",
NeurIPS 2022.

Idea: a two-player game. SAC learns on short rollouts of a dynamics ensemble, and between its updates the ensemble is
trained against it: towards transitions of low value (a policy gradient on the model), while a supervised term holds it
to the data. Pessimism comes from the model, where MICRO takes it from the Bellman target.

    what                                                     paper      here
    dynamics ensemble, elites, branched rollouts             Sec. 4     Ensemble, train_dynamics, rollout
    likelihood of a transition under the elites' mixture     Eq. 9      mixture_log_prob
    model gradient: advantage times score, plus likelihood   Eq. 8-10   advantage, adversarial_loss
    behaviour cloning before the game                        Sec. 5     clone_behaviour
    critic, actor and temperature steps                      Alg. 1     update, sac_step

Usage: python rambo_baseline.py --env-id hopper-medium-v2
"""

import argparse
import copy
import hashlib
import itertools
import json
import math
import os
import platform
import re
import signal
import sys
import time
import urllib.request
import warnings
import zipfile
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple, NoReturn, get_args, get_origin

import gymnasium as gym
import h5py
import mujoco
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

try:
    import fcntl
except ImportError:  # Windows: there nothing keeps a second process out of a run folder
    fcntl = None

warnings.filterwarnings("ignore", message=".*is out of date.*")  # D4RL's v2 environments are gymnasium's v4, not v5
progress_bar = partial(tqdm, disable=None, dynamic_ncols=True)  # on a terminal only


@dataclass
class Args:
    # --- experiment ---
    env_id: str = "hopper-medium-replay-lite"
    """the task: an environment and a dataset; decides the presets"""
    gym_id: str | None = None
    """a gymnasium environment that is in no known task, with --dataset-path"""
    seed: int = 1
    """fixes every random draw of the run"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where networks, data and buffers live"""
    torch_threads: int | None = None
    """CPU threads of torch (None: torch decides)"""
    compile: bool = False
    """pass the update through torch.compile"""
    track: bool = False
    """also log to Weights & Biases"""
    runs_root: str = "runs"
    """the folder in which the run's own folder is made"""
    resume: str | None = None
    """a run folder to go on with from its last checkpoint; only total updates, logging, paths and device may change"""
    eval_only: str | None = None
    """a run folder whose policy is evaluated again, and nothing else"""

    # --- data ---
    dataset_path: str | None = None
    """a local D4RL-format HDF5 file instead of the task's own"""
    dataset_base_url: str = os.environ.get(
        "D4RL_DATASET_BASE_URL", "http://rail.eecs.berkeley.edu/datasets/offline_rl/gym_mujoco_v2"
    )
    """where D4RL files are downloaded from (default from $D4RL_DATASET_BASE_URL if set)"""

    # --- dynamics ensemble ---
    num_models: int = 7
    """networks in the ensemble"""
    num_elites: int = 5
    """the best of them by holdout error: the ones that are used"""
    dynamics_hidden_size: int = 200
    """width of their four hidden layers"""
    dynamics_lr: float = 3e-4
    """Adam's rate for the ensemble"""
    dynamics_patience: int = 10
    """stop after so many epochs in which no network improved by 1 %"""
    dynamics_max_epochs: int | None = None
    """stop after so many epochs in any case"""
    dynamics_path: str | None = None
    """a dynamics.pt of another run on the same data, instead of training"""

    # --- rollouts ---
    rollout_length: int = 5
    """steps of a model rollout (the paper's h)"""
    rollout_batch_size: int = 50_000
    """rollouts at a time, from random dataset states"""
    rollout_every: int = 1000
    """updates between rollouts"""

    # --- RAMBO ---
    adversarial_weight: float = 3e-4
    """weight of the adversarial term in the model's loss (the paper's lambda); 0: no adversary"""
    adversarial_every: int = 1000
    """SAC updates between bouts of model updates"""
    adversarial_updates: int = 1000
    """model updates in a bout"""
    supervised_updates: bool = False
    """where there is no adversary: still train the model on the data between SAC updates"""
    bc_epochs: int = 50
    """epochs of behaviour cloning before the first update (0: none)"""
    bc_lr: float = 1e-4
    """Adam's rate for behaviour cloning"""
    model_ratio: float = 0.5
    """share of each batch that comes from the model; the rest is data (the paper's f)"""

    # --- SAC ---
    total_updates: int = 2_000_000
    """updates of the run"""
    batch_size: int = 256
    """rows a batch, data and model together"""
    hidden_size: int = 256
    """width of the two hidden layers of actor and critics"""
    num_critics: int = 2
    """critics, of which the minimum counts (the paper's K)"""
    gamma: float = 0.99
    """discount"""
    tau: float = 0.005
    """rate at which target critics follow"""
    actor_lr: float = 1e-4
    """Adam's rate for the actor"""
    critic_lr: float = 3e-4
    """Adam's rate for the critics"""
    auto_alpha: bool = True
    """learn the entropy temperature (target entropy: -action dimensions)"""
    alpha: float = 0.1
    """the temperature where it is fixed (--no-auto-alpha)"""
    alpha_lr: float = 1e-4
    """Adam's rate for the temperature"""
    deterministic_backup: bool = False
    """leave the entropy out of the target"""

    # --- evaluation ---
    eval_every: int = 10_000
    """updates between evaluations (default: 50 over the run, at most 10 000 updates apart)"""
    eval_episodes: int = 10
    """episodes an evaluation, with the deterministic policy"""
    checkpoint_every: int = 20_000
    """updates between checkpoints; the last two are kept (hopper, full model buffer: 145 MB and 0.4 s each)"""


# What differs from the defaults, of RAMBO's authors.
PRESETS = {
    "halfcheetah-random": dict(adversarial_weight=0.0),
    "hopper-random": dict(rollout_length=2),
    "hopper-medium-replay": dict(rollout_length=2),
    "walker2d-random": dict(adversarial_weight=0.0),
    "walker2d-medium": dict(adversarial_weight=0.0),
    "walker2d-medium-replay": dict(adversarial_weight=0.0),
    "walker2d-medium-expert": dict(rollout_length=2),
}
# The shipped data: minutes instead of days. Longer rollouts keep the critic honest where the policy goes.
LITE_PRESET = dict(total_updates=20_000, rollout_length=20, rollout_batch_size=12_500, auto_alpha=False, alpha=0.05,
                   actor_lr=3e-4, dynamics_max_epochs=20)  # fmt: skip


def task_preset(env_id: str, given: dict) -> dict:
    """The preset of a task; where the paper has none, an `expert` task takes `medium-expert`'s."""
    task = re.sub("-(v2|lite)$", "", env_id)
    chosen = PRESETS.get(task) or PRESETS.get(task.replace("-expert", "-medium-expert"), {})
    return chosen | (LITE_PRESET if env_id.endswith("-lite") else {})


# === shared: arguments ===
SPLIT, EPOCH, TRAINING, EVALUATION, VALUE_GAP, CLONING = range(6)  # purposes of random draws
MAY_CHANGE = set("resume eval_only total_updates checkpoint_every eval_episodes runs_root track device torch_threads "
                 "compile dataset_path dataset_base_url".split())  # fmt: skip


def fail(message: str) -> NoReturn:
    """One line that says what is wrong, and exit status 1."""
    raise SystemExit(f"{Path(__file__).name}: {' '.join(message.split())[:1000]}")


def parse_args(argv: list[str]) -> Args:
    """Class defaults, overlaid by the task's preset or the resumed run's args, overlaid by the command line."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)  # the flags that others' defaults depend on
    for name in ("env_id", "gym_id", "penalty", "total_updates", "resume", "eval_only"):
        early.add_argument(f"--{name.replace('_', '-')}", f"--{name}", dest=name)
    given = {name: value for name, value in vars(early.parse_known_args(argv)[0]).items() if value is not None}
    run_dir = given.get("resume") or given.get("eval_only")
    if run_dir:
        default = saved_args(Path(run_dir))
    else:
        env_id = given.get("env_id") or given.get("gym_id", Args.env_id).replace("/", "-")
        default = Args(env_id=env_id, **task_preset(env_id, given))
        with suppress(KeyError, ValueError):  # not given, or no number: then tyro says so
            default.total_updates = int(given["total_updates"])
        default.eval_every = min(10_000, max(1, default.total_updates // 50))
    args = tyro.cli(Args, args=argv, default=default, description=__doc__.split("\n")[0])
    check_args(args)
    changed = {name for name, value in vars(args).items() if value != getattr(default, name)}
    if run_dir and (frozen := changed - MAY_CHANGE):
        fail(f"{', '.join(sorted(frozen))} cannot change in a run that has begun: start a new one")
    return args


def saved_args(run_dir: Path) -> Args:
    try:
        described = json.loads((run_dir / "args.json").read_text())
        args, _ = Args(**described["args"]), described["dataset"]["sha256"]
        for field in fields(args):
            value, kind = getattr(args, field.name), field.type
            if not (value in get_args(kind) if get_origin(kind) is Literal else isinstance(value, kind)):
                raise TypeError(f"{field.name} is {value}")
        return args
    except OSError as error:
        fail(f"{run_dir} is not a run folder, or nothing had begun in it: {error}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        fail(f"{run_dir / 'args.json'} is not of this script and version: {error!r}")


def check_args(args: Args) -> None:
    if args.gym_id is None and args.env_id not in known_tasks():
        fail(f"unknown --env-id {args.env_id}; known are {', '.join(known_tasks())}; for others see --gym-id")
    if args.resume and args.eval_only:
        fail("--resume goes on with a run and --eval-only evaluates one: give one of the two")
    if args.gym_id is not None and args.dataset_path is None:
        fail("--gym-id needs --dataset-path: only the known tasks have data of their own")
    if not re.fullmatch(r"\w[\w.-]*", args.env_id):
        fail(f"--env-id {args.env_id} names a folder: letters, digits, '.', '_' and '-' only")
    if args.num_elites > args.num_models:
        fail(f"--num-elites {args.num_elites} is more than --num-models {args.num_models}")
    for name, value in vars(args).items():
        least = 1 if type(value) is int and name not in ("seed", "bc_epochs", "penalty_draws") else 0
        most = 1 if name in ("model_ratio", "gamma", "tau") else math.inf
        if type(value) in (int, float) and not (least <= value <= most and math.isfinite(value)):
            fail(f"--{name.replace('_', '-')} {value} is not between {least} and {most}")


def generator(device: torch.device, *key: int) -> torch.Generator:
    """One for each (seed, purpose, ...), so that no part's draws depend on another's."""
    return torch.Generator(device).manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))


# === end shared ===


# === shared: termination ===
# The rule by which a predicted next state ends its episode: add one for an environment of your own.
TERMINATION = {
    "Hopper": lambda s: ~(
        torch.isfinite(s).all(-1) & (s[..., 1:].abs() < 100).all(-1) & (s[..., 0] > 0.7) & (s[..., 1].abs() < 0.2)
    ),
    "Walker2d": lambda s: ~((s.abs() < 100).all(-1) & (s[..., 0] > 0.8) & (s[..., 0] < 2) & (s[..., 1].abs() < 1)),
    "HalfCheetah": lambda s: ~(s.abs() < 100).all(-1),
}
GYM_IDS = {"hopper": "Hopper-v4", "walker2d": "Walker2d-v4", "halfcheetah": "HalfCheetah-v4"}


def termination_of(gym_id: str):
    return TERMINATION.get(environment_name(gym_id), lambda s: torch.zeros_like(s[..., 0], dtype=torch.bool))


# === end shared ===


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


# === shared: evaluation ===
@torch.no_grad()
def evaluate(policy, envs: list[gym.Env], seeds, device: torch.device) -> np.ndarray:
    """The return of one episode in each environment, all stepped together with one call of the policy."""
    obs = [env.reset(seed=int(seed))[0] for env, seed in zip(envs, seeds)]
    returns, running = np.zeros(len(envs)), list(range(len(envs)))
    while running:
        batch = torch.as_tensor(np.stack([obs[i] for i in running]), dtype=torch.float32, device=device)
        for i, action in zip(list(running), policy(batch).cpu().numpy()):
            obs[i], reward, terminated, truncated, _ = envs[i].step(action)
            returns[i] += reward
            if terminated or truncated:
                running.remove(i)
    return returns


# === end shared ===


# === shared: data ===
D4RL_SHA256 = {
    "halfcheetah-random-v2": "25407aef85b5d16c0f36b4149341edb4acc6a9e88c1db529b2de19e7464874ba",
    "halfcheetah-medium-v2": "41324e8487a9556d8cfa4538827f8937f4d63dae3030825ebc9f3a726ed08ca0",
    "halfcheetah-medium-replay-v2": "48d494a4770c11f48260736dec090b78bdca8375647ed4d24bfa5b6610c7f683",
    "halfcheetah-medium-expert-v2": "015db75dae5bbe8e94029b71fa0bafc2073365df0c94744e71031189f3f79c06",
    "halfcheetah-expert-v2": "d9fe53bb994eb1e20a99b4fa3412cd76a1bb7966a7ff55e0fcbdd6081bd2965f",
    "hopper-random-v2": "63103ef7059db4c0819bd054f4e83ff339030b50bcdb46bdbe50385f234b5054",
    "hopper-medium-v2": "5bdf1bc4a713c82941de44633df669b36c89850b652a25985166796d25cf71a0",
    "hopper-medium-replay-v2": "e121c5f7c9857a307baa9edc6a2c3b48e85fedb9ac316ecddd0f48ca7ef4e39b",
    "hopper-medium-expert-v2": "9d51ad87f8c905be3880d84c6140bcdb7fbf39a19e046a237f238ba34fec9e26",
    "hopper-expert-v2": "01aa219a5f8eea5e639eccdc636ec2bf40e317159a95cf4bf6e985f16909941b",
    "walker2d-random-v2": "4e863bb6090cf4a461548bd470564b32f1ae5b32ef3085f816b2ede7f092e7fa",
    "walker2d-medium-v2": "cf00f43add04c17fdfc2958dd581dea0851b2e5bedbe6fda073758a8f841aeda",
    "walker2d-medium-replay-v2": "e75de96a4f77acf7d4e0d6fdf0d7ccb177c26c44bb4388e4fd99f543ccfa18db",
    "walker2d-medium-expert-v2": "6b8d7f868c45bbaedf460be797fb7271b46dee6ebe45fe7a64319f2005b59a04",
    "walker2d-expert-v2": "2985dc3d436a8baa10e8f43f946fe1d7c6337a4e4fbc65def70618093b18c59a",
}
MAX_BYTES = 2 << 30  # six times what the largest of D4RL declares: more is refused before memory is taken
SHIPPED = Path(__file__).resolve().parent / "data"  # datasets of this repository


def known_tasks() -> list[str]:
    return [*D4RL_SHA256, *sorted(path.stem for path in SHIPPED.glob("*-lite.hdf5"))]


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_dataset(args: Args) -> Path:
    """The given file, the shipped one, or D4RL's own from its cache, downloaded first if need be."""
    if args.dataset_path is not None:
        return Path(args.dataset_path)
    if args.env_id not in D4RL_SHA256:
        return SHIPPED / f"{args.env_id}.hdf5"
    cache = Path(os.environ.get("D4RL_DATASET_DIR") or Path.home() / ".d4rl" / "datasets")
    path = cache / f"{args.env_id.removesuffix('-v2').replace('-', '_')}-v2.hdf5"
    expected = D4RL_SHA256[args.env_id]
    if path.is_file() and sha256_of(path) != expected:
        with suppress(FileNotFoundError):  # another process has moved it
            os.replace(path, path.with_suffix(".hdf5.refused"))
        say(f"{path} is truncated or altered (its SHA-256 should be {expected}): moved aside as .refused")
    if not path.is_file():
        download(f"{args.dataset_base_url.rstrip('/')}/{path.name}", path, expected)
    return path


def download(url: str, path: Path, expected: str) -> None:
    """Fetch beside the final place, check, then rename: the cache never holds a file that is not whole."""
    part = path.with_name(f"{path.name}.{os.getpid()}-{time.time_ns()}.part")
    advice = "try later, or pass a file with --dataset-path or a mirror with --dataset-base-url"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(url, timeout=60) as response, open(part, "wb") as file:
            size = int(response.headers.get("Content-Length") or 0)
            say(f"downloading {url} ({size / 1e6:.0f} MB)")
            with progress_bar(total=size, desc="download", unit="B", unit_scale=True) as bar:
                while (block := response.read(1 << 20)) and file.tell() < MAX_BYTES:
                    file.write(block)
                    bar.update(len(block))
        if (found := sha256_of(part)) != expected:
            fail(f"{url} gave a truncated or altered file: SHA-256 {found}, expected {expected}; {advice}")
        os.replace(part, path)
    except Exception as error:  # of the network, the address, the disk
        fail(f"cannot download {url}: {error}; {advice}")
    finally:
        with suppress(OSError):
            part.unlink()


def load_dataset(path: Path, env: gym.Env) -> np.ndarray:
    """The transitions of a D4RL-format file as packed float32 rows [s, a, r, s', terminal], actions in [-1, 1]."""
    box = env.env.action_space if isinstance(env, gym.wrappers.RescaleAction) else None
    with ProcessPoolExecutor(1) as reader:  # a process of its own, as libhdf5 crashes on some damaged files
        try:
            sizes = env.observation_space.shape[0], env.action_space.shape[0]
            return reader.submit(read_dataset, path, *sizes, box, getattr(env.spec, "id", "")).result()
        except BrokenProcessPool:
            fail(f"{path} is damaged: libhdf5 crashed on it")


def read_dataset(path: Path, obs_dim: int, act_dim: int, action_box: gym.spaces.Box | None, name: str) -> np.ndarray:
    widths = dict(observations=obs_dim, actions=act_dim, rewards=1, next_observations=obs_dim, terminals=1, timeouts=1)
    if not path.is_file():
        fail(f"there is no dataset {path}")
    try:
        with h5py.File(path, "r") as file:
            links = {key: file.get(key, getlink=True) for key in file if key in widths}
            if missing := widths.keys() - links.keys() - {"next_observations", "timeouts"}:
                fail(f"{path} has no {', '.join(sorted(missing))}; it has {', '.join(file)}")
            stored = {key: file[key] if isinstance(link, h5py.HardLink) else None for key, link in links.items()}
            for key, array in stored.items():
                numbers = isinstance(array, h5py.Dataset) and array.dtype.kind in "fiub"
                if not numbers or array.external or array.is_virtual:
                    fail(f"{path}: {key} is not an array of numbers in the file itself")
                if array.shape[1:] != (widths[key],) and (widths[key] > 1 or array.ndim != 1):
                    fail(f"{path}: {key} has the shape {array.shape}, but {name} has {widths[key]} of them")
                chunk = math.prod(array.chunks or ()) * array.dtype.itemsize
                if max(chunk, array.nbytes) > 2000 * (array.id.get_storage_size() + 1000):  # gzip makes 1/1000 of zeros
                    fail(f"{path}: {key} declares the shape {array.shape}, and there is no data for it")
            lengths = {key: len(array) for key, array in stored.items()}
            count = lengths["rewards"]
            if count == 0 or set(lengths.values()) != {count}:
                fail(f"{path} has no rows, or not as many of each: {lengths}")
            if sum(array.nbytes for array in stored.values()) > MAX_BYTES:
                fail(f"{path} declares {count} rows: more than MAX_BYTES, which can be raised")
            arrays = {key: array[()].reshape(-1, widths[key]) for key, array in stored.items()}
    except Exception as error:  # libhdf5 has many kinds for a file that is not what it says
        fail(f"{path} is not a D4RL-format HDF5 file: {error!r}")
    if not all(np.isfinite(arrays[key]).all() for key in ("terminals", "timeouts") if key in arrays):
        fail(f"{path} has non-finite values in terminals or timeouts")
    terminals = arrays["terminals"] = arrays["terminals"].astype(bool)
    index = np.arange(count)
    if "timeouts" in arrays:
        keep = ~arrays["timeouts"].astype(bool).ravel()
    else:  # an episode ends at a terminal or after 1000 steps
        previous_end = np.maximum.accumulate(np.where(terminals.ravel(), index, -1))
        keep = (index - np.concatenate([[-1], previous_end[:-1]])) % 1000 != 0
    if "next_observations" not in arrays:  # then it is the next row's observation, inside an episode only
        arrays["next_observations"] = np.roll(arrays["observations"], -1, axis=0)
        keep &= ~terminals.ravel() & (index < count - 1)
    if action_box is not None:
        arrays["actions"] = 2 * (arrays["actions"] - action_box.low) / (action_box.high - action_box.low) - 1
    columns = [arrays[key][keep] for key in ("observations", "actions", "rewards", "next_observations", "terminals")]
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused
        rows = np.concatenate(columns, axis=1, dtype=np.float32, casting="unsafe")
    if len(rows) < 2 or not np.isfinite(rows).all():
        fail(f"{path} has fewer than two usable transitions, or non-finite values among its {len(rows)}")
    return rows


def unpack(rows: torch.Tensor, obs_dim: int, act_dim: int) -> tuple[torch.Tensor, ...]:
    """Packed rows -> views of s, a, r, s', terminal."""
    obs, act, reward, next_obs, done = rows.split([obs_dim, act_dim, 1, obs_dim, 1], dim=-1)
    return obs, act, reward.squeeze(-1), next_obs, done.squeeze(-1)


# === end shared ===


# === shared: ensemble ===
class Ensemble(nn.Module):
    """Gaussian models of (s' - s, r) given (s, a), evaluated side by side: every parameter has a leading model axis."""

    def __init__(self, num_models: int, obs_dim: int, act_dim: int, hidden_size: int):
        super().__init__()
        sizes = [obs_dim + act_dim, *[hidden_size] * 4, 2 * (obs_dim + 1)]
        self.weights = nn.ParameterList(torch.empty(num_models, i, o) for i, o in zip(sizes, sizes[1:]))
        self.biases = nn.ParameterList(torch.zeros(num_models, 1, o) for o in sizes[1:])
        for weight in self.weights:
            std = 1 / (2 * math.sqrt(weight.shape[1]))
            nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
        self.max_logvar = nn.Parameter(torch.full((obs_dim + 1,), 0.5))
        self.min_logvar = nn.Parameter(torch.full((obs_dim + 1,), -10.0))
        self.register_buffer("input_mean", torch.zeros(obs_dim + act_dim))
        self.register_buffer("input_std", torch.ones(obs_dim + act_dim))

    def forward(self, inputs: torch.Tensor, members: slice | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, s + a), or (models, batch, s + a) -> mean and log-variance, both (models, batch, s + 1)."""
        x = (inputs - self.input_mean) / self.input_std
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases)):
            if members is not None:
                weight, bias = weight[members], bias[members]
            x = torch.baddbmm(bias, x.expand(len(weight), *x.shape[-2:]), weight)
            if layer < len(self.weights) - 1:
                x = F.silu(x, inplace=not torch.is_grad_enabled())
        mean, logvar = x.chunk(2, dim=-1)
        logvar = self.max_logvar - F.softplus(self.max_logvar - logvar)
        return mean, self.min_logvar + F.softplus(logvar - self.min_logvar)


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


HOLDOUT_SHARE = 0.1
LOGVAR_COEFFICIENT = 0.001


# === shared: dynamics ===
WEIGHT_DECAYS = (2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4)  # one a layer, weights only


def inputs_and_targets(rows: torch.Tensor, obs_dim: int, act_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    obs, act, reward, next_obs, _ = unpack(rows, obs_dim, act_dim)
    return torch.cat([obs, act], -1), torch.cat([next_obs - obs, reward[..., None]], -1)


def dynamics_loss(ensemble: Ensemble, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Gaussian likelihood, mean over rows and dimensions and summed over models, and the pull on the logvar bounds."""
    mean, logvar = ensemble(inputs)
    likelihood = ((mean - targets).square() * torch.exp(-logvar) + logvar).mean((1, 2)).sum()
    return likelihood + LOGVAR_COEFFICIENT * (ensemble.max_logvar.sum() - ensemble.min_logvar.sum())


def dynamics_optimizer(ensemble: Ensemble, lr: float) -> torch.optim.Adam:
    """Adam's weight_decay adds wd * W to the gradient: the term wd / 2 * |W|^2 of the loss, without its cost."""
    groups = [dict(params=[weight], weight_decay=decay) for weight, decay in zip(ensemble.weights, WEIGHT_DECAYS)]
    groups += [dict(params=[*ensemble.biases, ensemble.max_logvar, ensemble.min_logvar])]
    return torch.optim.Adam(groups, lr=lr, fused=True)


def take_step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Gradients of this optimizer's parameters only: the actor's step leaves out the critics' weights."""
    optimizer.zero_grad()
    loss.backward(inputs=[parameter for group in optimizer.param_groups for parameter in group["params"]])
    optimizer.step()


def train_dynamics(rows, obs_dim, act_dim, args: Args, device, saved: dict | None, after_epoch) -> dict:
    """What dynamics.pt holds: each network as it was at its best holdout error, best network first.

    `after_epoch` is given the whole state (the live tensors) and what to log; `saved` is such a state to go on from.
    """
    rng = generator(device, args.seed, SPLIT)
    holdout_size = max(1, min(int(HOLDOUT_SHARE * len(rows)), 1000))
    shuffled = torch.randperm(len(rows), generator=rng, device=device)
    holdout, train = shuffled[:holdout_size], shuffled[holdout_size:]
    # each network's own sample with replacement, as indices only: (models, rows)
    bootstrap = train[torch.randint(len(train), (args.num_models, len(train)), generator=rng, device=device)]
    torch.manual_seed(args.seed)
    ensemble = Ensemble(args.num_models, obs_dim, act_dim, args.dynamics_hidden_size).to(device)
    std, mean = torch.std_mean(rows[train, : obs_dim + act_dim], 0, correction=0)
    ensemble.input_mean.copy_(mean)
    ensemble.input_std.copy_(torch.where(std < 1e-12, 1.0, std))
    optimizer = dynamics_optimizer(ensemble, args.dynamics_lr)
    networks = [*ensemble.weights, *ensemble.biases]
    snapshots = [parameter.detach().clone() for parameter in networks]
    best, epoch, stale = torch.full((args.num_models,), math.inf, device=device), 0, 0
    if saved:
        ensemble.load_state_dict(saved["ensemble"])
        optimizer.load_state_dict(saved["optimizer"])
        snapshots, best, epoch, stale = (saved[name] for name in ("snapshots", "best", "epoch", "stale"))
    holdout_inputs, holdout_targets = inputs_and_targets(rows[holdout], obs_dim, act_dim)
    while stale < args.dynamics_patience and (args.dynamics_max_epochs is None or epoch < args.dynamics_max_epochs):
        rng = generator(device, args.seed, EPOCH, epoch)
        order = torch.rand(bootstrap.shape, generator=rng, device=device).argsort(1)
        batches = bootstrap.gather(1, order).split(256, dim=1)
        total_loss = torch.zeros((), device=device)
        for batch in progress_bar(batches, f"dynamics epoch {epoch + 1}", leave=False):
            loss = dynamics_loss(ensemble, *inputs_and_targets(rows[batch], obs_dim, act_dim))
            take_step(optimizer, loss)
            total_loss += loss.detach()
        with torch.no_grad():
            error = (ensemble(holdout_inputs)[0] - holdout_targets).square().mean((1, 2))  # (models,)
            improved = error < 0.99 * best
            best = torch.where(improved, error, best)
            for snapshot, parameter in zip(snapshots, networks):
                snapshot[improved] = parameter[improved]
        epoch, stale = epoch + 1, 0 if improved.any() else stale + 1
        state = dict(ensemble=ensemble.state_dict(), optimizer=optimizer.state_dict(), snapshots=snapshots, best=best)
        logvar_bounds = dict(max_logvar=ensemble.max_logvar.mean(), min_logvar=ensemble.min_logvar.mean())
        holdout_errors = {f"holdout_error_{member}": value for member, value in enumerate(error)}
        metrics = dict(loss=total_loss / len(batches), holdout_error=error.mean(), best=best.mean())
        after_epoch(state | dict(epoch=epoch, stale=stale), metrics | holdout_errors | logvar_bounds)
    order = best.argsort()
    with torch.no_grad():
        for snapshot, parameter in zip(snapshots, networks):
            parameter.copy_(snapshot[order])
    return dict(ensemble=ensemble.state_dict(), holdout_error=best[order], epochs=epoch)


def load_dynamics(saved: dict, obs_dim: int, act_dim: int, args: Args, device) -> Ensemble:
    try:
        num_models, _, hidden_size = saved["ensemble"]["weights.0"].shape
        ensemble = Ensemble(num_models, obs_dim, act_dim, hidden_size).to(device)
        ensemble.load_state_dict(saved["ensemble"])
    except (KeyError, ValueError, RuntimeError) as error:
        fail(f"the dynamics ensemble does not fit this environment: {error}".splitlines()[0])
    if num_models < args.num_elites:
        fail(f"the dynamics ensemble has {num_models} networks, fewer than --num-elites {args.num_elites}")
    return ensemble.requires_grad_(False)


# === end shared ===


# === shared: rollouts ===
CHUNK = 2048  # rows at a time where no gradient is needed: temporaries stay in the cache


def normal(rng: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=rng, device=rng.device)


def draw(rows: torch.Tensor, count: int, rng: torch.Generator) -> torch.Tensor:
    return rows[torch.randint(len(rows), (count,), generator=rng, device=rng.device)]


@torch.no_grad()
def model_step(actor: Actor, ensemble: Ensemble, num_elites: int, obs: torch.Tensor, rng: torch.Generator):
    """A step of each state in the model of one elite, drawn for each row: s, a, r, s', rows grouped by elite."""
    elite = torch.randint(num_elites, (len(obs),), generator=rng, device=obs.device)
    groups = obs[elite.argsort()].split(torch.bincount(elite, minlength=num_elites).tolist())
    steps = []
    for member, group in enumerate(groups):
        for state in group.split(CHUNK):
            act = actor.sample(state, normal(rng, len(state), actor.mean.out_features))
            mean, logvar = ensemble(torch.cat([state, act], -1), slice(member, member + 1))
            change = mean[0] + (0.5 * logvar[0]).exp() * normal(rng, *mean[0].shape)
            steps.append((state, act, change[:, -1], state + change[:, :-1]))
    return [torch.cat(parts) for parts in zip(*steps)]


class RingBuffer:
    """The newest `capacity` packed rows."""

    def __init__(self, capacity: int, width: int, device: torch.device):
        self.rows, self.size, self.next = torch.zeros(capacity, width, device=device), 0, 0

    def add(self, rows: torch.Tensor) -> None:
        rows, capacity = rows[-len(self.rows) :], len(self.rows)
        self.rows[(self.next + torch.arange(len(rows), device=rows.device)) % capacity] = rows
        self.next, self.size = (self.next + len(rows)) % capacity, min(self.size + len(rows), capacity)

    def state_dict(self) -> dict:
        filled = self.rows if self.size == len(self.rows) else self.rows[: self.size].clone()  # views are saved whole
        return dict(rows=filled, size=self.size, next=self.next)

    def load_state_dict(self, state: dict) -> None:
        self.rows[: state["size"]], self.size, self.next = state["rows"], state["size"], state["next"]

    def sample(self, count: int, rng: torch.Generator) -> torch.Tensor:
        return draw(self.rows[: self.size], count, rng)


def rollout(actor, ensemble, num_elites, terminated, obs, length: int, buffer: RingBuffer, rng) -> dict:
    """Branched rollouts from `obs` into the buffer. A row that ends its episode is stored, and its rollout stops."""
    starts, rows, reward_sum, ended, largest = len(obs), 0, 0.0, 0, obs.abs().max()
    for _ in range(length):
        obs, act, reward, next_obs = model_step(actor, ensemble, num_elites, obs, rng)
        done = terminated(next_obs)
        buffer.add(torch.cat([obs, act, reward[:, None], next_obs, done[:, None]], -1))
        rows, reward_sum, ended = rows + len(obs), reward_sum + reward.sum(), ended + done.sum()
        largest = torch.maximum(largest, next_obs.abs().max())  # NaN stays NaN
        obs = next_obs[~done]
        if len(obs) == 0:
            break
    stats = dict(rollout_rows=rows, rollout_reward=float(reward_sum) / rows, rollout_ended=int(ended) / starts)
    return stats | dict(rollout_max=float(largest))


@torch.no_grad()
def value_gap(actor, critics, ensemble, num_elites, terminated, obs, gamma: float, rng, steps: int = 500):
    """Q(s, pi(s)) at data states, and how much that exceeds the policy's discounted return from there in the model.

    An honest critic's gap is near 0 (plus the entropy bonus, where the target has one). A large gap, with a model
    return that the simulator confirms, says that the critic is wrong and not the model.
    """
    values = critics(obs, actor.sample(obs, normal(rng, len(obs), actor.mean.out_features))).amin(0).mean()
    starts, model_return = len(obs), 0.0
    for step in range(steps):
        _, _, reward, next_obs = model_step(actor, ensemble, num_elites, obs, rng)
        model_return = model_return + gamma**step * reward.sum() / starts
        obs = next_obs[~terminated(next_obs)]
        if len(obs) == 0:
            break
    return float(values), float(values - model_return)


# === end shared ===


# --- the paper's contribution -----------------------------------------------------------------------------------------
def mixture_log_prob(mean: torch.Tensor, logvar: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """log of the elites' equal mixture at (s' - s, r): means and logvars (elites, batch, s + 1) -> (batch,)."""
    log_probs = -0.5 * ((change - mean).square() * torch.exp(-logvar) + logvar + math.log(2 * math.pi)).sum(-1)
    return torch.logsumexp(log_probs, 0) - math.log(len(log_probs))  # exp, sum, log would underflow


@torch.no_grad()
def advantage(agent, obs, act, reward, next_obs, done, gamma: float) -> torch.Tensor:
    """How much better than the critics expected each transition was, standardised over the batch."""
    next_value = agent.critics(next_obs, agent.actor.mode(next_obs)).amin(0)
    difference = reward + gamma * (1 - done) * next_value - agent.critics(obs, act).amin(0)
    return (difference - difference.mean()) / (difference.std() + 1e-6)


def adversarial_loss(agent, ensemble, terminated, obs, elite, action_noise, change_noise, args):
    """Descending it makes transitions of high advantage less likely. Also returns s', log p and the advantage."""
    with torch.no_grad():
        act = agent.actor.sample(obs, action_noise)
    mean, logvar = ensemble(torch.cat([obs, act], -1), slice(args.num_elites))  # (elites, batch, s + 1)
    with torch.no_grad():  # the sample is from the elite drawn for its row, and takes no gradient
        rows = torch.arange(len(obs), device=obs.device)
        change = mean[elite, rows] + (0.5 * logvar[elite, rows]).exp() * change_noise
        next_obs = obs + change[:, :-1]
        done = terminated(next_obs).float()
        gain = advantage(agent, obs, act, change[:, -1], next_obs, done, args.gamma)
    log_prob = mixture_log_prob(mean, logvar, change)
    return (log_prob * gain).mean(), next_obs, log_prob.detach(), gain


# ----------------------------------------------------------------------------------------------------------------------
MODEL_METRICS = ("model_loss", "log_prob", "log_prob_min", "log_prob_max", "advantage_min", "advantage_max")


def train_model_against(agent, ensemble, optimizer, terminated, data, obs_dim, act_dim, args, rng) -> dict:
    """A bout of model updates: rollouts of the current model from data states, with an update at each step."""
    sums = torch.zeros(len(MODEL_METRICS), device=rng.device)
    for update_number in range(args.adversarial_updates):
        loss = dynamics_loss(ensemble, *inputs_and_targets(draw(data, 256, rng), obs_dim, act_dim))
        metrics = [loss.detach()] + [torch.zeros_like(loss)] * 5
        if args.adversarial_weight > 0:
            if update_number % args.rollout_length == 0:
                obs = draw(data[:, :obs_dim], 256, rng)
            elite = torch.randint(args.num_elites, (256,), generator=rng, device=rng.device)
            noise = normal(rng, 256, act_dim), normal(rng, 256, obs_dim + 1)
            adversarial, obs, log_prob, gain = adversarial_loss(agent, ensemble, terminated, obs, elite, *noise, args)
            loss = loss + args.adversarial_weight * adversarial
            metrics = [loss.detach(), log_prob.mean(), log_prob.min(), log_prob.max(), gain.min(), gain.max()]
        take_step(optimizer, loss)
        sums += torch.stack(metrics)
    return dict(zip(MODEL_METRICS, (sums / args.adversarial_updates).tolist()))


def clone_behaviour(actor: Actor, data, obs_dim: int, act_dim: int, args: Args, device) -> float:
    """Start the policy near the data: squared error of a sampled action, in an order drawn anew each epoch."""
    optimizer, loss = torch.optim.Adam(actor.parameters(), lr=args.bc_lr, fused=True), torch.zeros(())
    for epoch in progress_bar(range(args.bc_epochs), "behaviour cloning"):
        rng = generator(device, args.seed, CLONING, epoch)
        for batch in torch.randperm(len(data), generator=rng, device=device).split(256):
            obs, act, *_ = unpack(data[batch], obs_dim, act_dim)
            loss = (actor.sample(obs, normal(rng, len(batch), act_dim)) - act).square().mean()
            take_step(optimizer, loss)
    return loss.item()


PHASES = ("dynamics", "cloning", "adversary", "rollouts", "updates", "evaluation")


class Noise(NamedTuple):
    """Every normal draw of an update."""

    next_action: torch.Tensor  # (batch, a)
    action: torch.Tensor  # (batch, a)


def draw_noise(args: Args, act_dim: int, rng: torch.Generator) -> Noise:
    return Noise(*normal(rng, 2, args.batch_size, act_dim))


# === shared: agent ===
class Agent:
    """All that an update changes, part by part."""

    def __init__(self, obs_dim: int, act_dim: int, args: Args, device: torch.device):
        torch.manual_seed(args.seed)
        self.actor = Actor(obs_dim, act_dim, args.hidden_size).to(device)
        self.critics = Critics(args.num_critics, obs_dim, act_dim, args.hidden_size).to(device)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        start = 0.0 if args.auto_alpha else math.log(args.alpha) if args.alpha > 0 else -math.inf
        self.temperature = nn.ParameterDict(dict(log_alpha=torch.tensor(start))).to(device)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=args.actor_lr, fused=True)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=args.critic_lr, fused=True)
        self.alpha_optimizer = torch.optim.Adam(self.temperature.parameters(), lr=args.alpha_lr, fused=True)

    def alpha(self, args: Args) -> torch.Tensor:
        alpha = self.temperature.log_alpha.detach().exp()
        return alpha.clamp(max=1) if args.auto_alpha else alpha

    def state_dict(self) -> dict:
        return {name: part.state_dict() for name, part in vars(self).items()}

    def load_state_dict(self, state: dict) -> None:
        for name, part in vars(self).items():
            part.load_state_dict(state[name])


SAC_METRICS = ("critic_loss", "actor_loss", "q", "q_min", "q_max", "target", "alpha", "entropy")


def sac_step(agent: Agent, obs, act, y, action_noise, args: Args) -> list[torch.Tensor]:
    """Critic step towards the target y, then actor, temperature and target critics. Returns SAC_METRICS."""
    q = agent.critics(obs, act)
    critic_loss = (q - y).square().mean()
    take_step(agent.critic_optimizer, critic_loss)

    action, log_prob = agent.actor.sample_with_log_prob(obs, action_noise)
    alpha = agent.alpha(args)
    actor_loss = (alpha * log_prob - agent.critics(obs, action).min(0).values).mean()
    take_step(agent.actor_optimizer, actor_loss)

    log_prob = log_prob.detach()
    if args.auto_alpha:  # the target entropy is -|A|
        take_step(agent.alpha_optimizer, -(agent.temperature.log_alpha * (log_prob - act.shape[-1])).mean())
    with torch.no_grad():
        torch._foreach_lerp_(list(agent.target_critics.parameters()), list(agent.critics.parameters()), args.tau)
    values = (q.mean(), q.min(), q.max(), y.mean(), alpha, -log_prob.mean())
    return [metric.detach() for metric in (critic_loss, actor_loss, *values)]


# === end shared ===


@torch.no_grad()
def soft_target(agent: Agent, batch, noise: Noise, args: Args) -> torch.Tensor:
    """SAC's target of every row."""
    _, _, reward, next_obs, done = batch
    next_action, log_prob = agent.actor.sample_with_log_prob(next_obs, noise.next_action)
    next_value = agent.target_critics(next_obs, next_action).amin(0)
    entropy_bonus = 0.0 if args.deterministic_backup else -agent.alpha(args) * log_prob
    return reward + args.gamma * (1 - done) * (next_value + entropy_bonus)


METRICS = SAC_METRICS


def update(agent: Agent, batch, noise: Noise, args: Args) -> torch.Tensor:
    """SAC's step. Returns METRICS as one tensor: nothing here waits for the device."""
    return torch.stack(sac_step(agent, *batch[:2], soft_target(agent, batch, noise, args), noise.action, args))


# === shared: files ===
received_signals = []


def say(message: str) -> None:
    tqdm.write(message)
    sys.stdout.flush()


def write_file(path: Path, content: bytes | dict, keep_previous: bool = False) -> None:
    """Bytes, or tensors and plain values. Beside its place first, then renamed: under its own name a file is whole."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.unlink(missing_ok=True)  # what a killed process left; "x" then follows no link out of the folder
        with open(part, "xb") as file:
            torch.save(content, file) if isinstance(content, dict) else file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if keep_previous and path.exists():
            os.replace(path, path.with_stem(f"{path.stem}.previous"))
        os.replace(part, path)
    except (OSError, RuntimeError) as error:  # torch makes a RuntimeError of a full disk
        fail(f"cannot write {path}, is the disk full? {error.__context__ or error}; what was saved before is untouched")
    finally:
        with suppress(OSError):
            part.unlink()


def read_tensors(path: Path, device: torch.device | str) -> dict:
    """Tensors and plain values only: nothing in the file is executed, and every byte must agree with its checksum."""
    try:
        with zipfile.ZipFile(path) as file:  # torch writes checksums but does not read them
            if any(record.compress_type or record.external_attr for record in file.infolist()) or file.testzip():
                raise ValueError("a checksum is wrong, or a record is not as torch writes it")
        return dict(torch.load(path, map_location=device, weights_only=True))
    except FileNotFoundError:
        fail(f"there is no {path}")
    except Exception as error:  # there are many kinds for a file that is torn or holds more than data
        fail(f"{path} is torn, or holds more than tensors and plain values: {f'{error}.'.splitlines()[0]}")


def read_checkpoint(run_dir: Path, device: torch.device | str) -> dict:
    """The last one, or the one before it where that is torn or was not yet renamed; {} before the first."""
    last, previous = run_dir / "checkpoint.pt", run_dir / "checkpoint.previous.pt"
    try:
        return read_tensors(last, device) if last.exists() or previous.exists() else {}
    except SystemExit as refusal:
        if not previous.exists():
            raise
        say(f"{refusal}; going on from {previous}")
        return read_tensors(previous, device)


@contextmanager
def locked(run_dir: Path):
    """One process at a time in a run folder. The system releases the lock when the process ends, however it ends."""
    try:
        file = open(run_dir / "lock", "a")
    except OSError as error:
        fail(f"cannot write in {run_dir}: {error}")
    with file:
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"another process is at work in {run_dir}")
        except OSError as error:
            say(f"{run_dir} cannot be locked ({error}): see to it that no second process works in it")
        yield


@contextmanager
def signals_noted():
    """SIGTERM and Ctrl-C ask for a checkpoint and an orderly end; a second one ends at once."""

    def note(number: int, _) -> None:
        received_signals.append(number)
        signal.signal(number, signal.SIG_DFL)

    handlers = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def stop_if_asked(run_dir: Path) -> None:
    if received_signals:
        say(f"interrupted; go on with --resume {run_dir}")
        raise SystemExit(128 + received_signals[0])


# === end shared ===


# === shared: run ===
def make_run_dir(args: Args, algorithm: str) -> Path:
    try:
        os.makedirs(args.runs_root, exist_ok=True)
        for stamp in itertools.count(int(time.time())):
            with suppress(FileExistsError):  # another run began in the same second
                run_dir = Path(args.runs_root) / f"{args.env_id}__{algorithm}__{args.seed}__{stamp}"
                run_dir.mkdir()
                return run_dir
    except OSError as error:
        fail(f"cannot make a run folder in {args.runs_root}: {error}")


def event_log(run_dir: Path, events: list):
    """The function that logs, to `events` and to TensorBoard, whose file is written anew from `events`: what a killed
    process logged after its last checkpoint comes again, and must not stand there twice."""
    for old in run_dir.glob("events.out.tfevents.*"):
        old.unlink()
    writer, past = SummaryWriter(str(run_dir)), events.copy()

    def log(group: str, step: int, values: dict, at: float | None = None) -> None:
        events.append((group, step, values, at or time.time()))
        try:
            for name, value in values.items():
                writer.add_scalar(f"{group}/{name}", value, step, events[-1][-1])
            writer.flush()
        except OSError as error:
            fail(f"cannot write TensorBoard's events: {error}; the last checkpoint is untouched")

    events.clear()
    for event in past:
        log(*event)
    return log


def divergence_limits(data: torch.Tensor, obs_dim: int, act_dim: int, args: Args) -> dict:
    """What no data can explain, by a wide margin: ten times the largest discounted sum of rewards and entropy bonuses
    (-log pi is within 20 a dimension), and model rows a thousand times larger than any of the data."""
    reward = data[:, obs_dim + act_dim].abs().max().clamp(min=1).item()
    entropy = 20 * act_dim * (1 if args.auto_alpha else args.alpha)
    value = 10 * (reward + entropy) / (1 - args.gamma) if args.gamma < 1 else sys.float_info.max
    row = 1000 * data.abs().max().clamp(min=1).item()
    return dict(q_min=value, q_max=value, rollout_max=row, holdout_error=row**2)


def stop_if_diverged(metrics: dict, limits: dict, when: str, run_dir: Path, state) -> None:
    for name, value in metrics.items():
        limit = limits.get(name, sys.float_info.max)
        if not abs(value) <= limit:  # so it is for NaN
            write_file(run_dir / "diverged.pt", state())
            fail(f"training diverged before {when}: {name} is {value:.4g}, and the data explain {limit:.4g} at most; "
                 f"the state is in {run_dir / 'diverged.pt'}, and the last checkpoint stands")  # fmt: skip


def restore(parts: dict, rng: torch.Generator, checkpoint: dict) -> None:
    try:
        for name, part in parts.items():
            part.load_state_dict(checkpoint.pop(name))
        rng.set_state(checkpoint["rng"].cpu())
    except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        fail(f"the checkpoint is not of a run with these arguments: {error!r}")


@contextmanager
def timed(seconds: dict, phase: str):
    start = time.perf_counter()
    yield
    seconds[phase] += time.perf_counter() - start


def evaluate_actor(actor, input_mean, input_std, envs, update_number: int, args: Args, device) -> np.ndarray:
    seeds = np.random.SeedSequence([args.seed, EVALUATION, update_number]).generate_state(args.eval_episodes)
    return evaluate(lambda obs: actor.mode((obs - input_mean) / input_std), envs, seeds, device)


def evaluate_again(args: Args, envs: list[gym.Env], gym_id: str, device: torch.device) -> dict:
    policy = read_tensors(Path(args.eval_only) / "policy.pt", device)
    actor = Actor(envs[0].observation_space.shape[0], envs[0].action_space.shape[0], args.hidden_size).to(device)
    try:
        actor.load_state_dict(policy["actor"])
        units = policy["input_mean"], policy["input_std"]
        returns = evaluate_actor(actor, *units, envs, args.total_updates, args, device)
    except (KeyError, TypeError, RuntimeError) as error:
        fail(f"the policy of {args.eval_only} does not fit its arguments: {error!r}")
    scores = normalised_score(returns, gym_id)
    say(f"{args.eval_only}: score {scores.mean():.1f} ± {scores.std():.1f} over {len(scores)} episodes")
    return dict(returns=returns.tolist())


def write_progress(run_dir: Path, history: list[dict]) -> None:
    columns = [name for name in history[0] if name != "returns"]
    lines = [columns, *([row[name] for name in columns] for row in history)]
    write_file(run_dir / "progress.csv", "".join(",".join(map(str, line)) + "\n" for line in lines).encode())


def write_result(run_dir: Path, described: dict, history: list[dict], seconds: dict) -> dict:
    scores = np.array([row["score"] for row in history])
    result = {f"last_{n}_{what.__name__}": float(what(scores[-n:])) for n in (5, 10) for what in (np.mean, np.std)}
    result |= described | dict(seconds=seconds)
    result |= dict(evaluations=[{name: row[name] for name in ("update", "score", "returns")} for row in history])
    write_file(run_dir / "result.json", json.dumps(result, indent=2).encode())
    say(f"score {result['last_5_mean']:.1f} ± {result['last_5_std']:.1f} over the last 5 evaluations, "
        f"{result['last_10_mean']:.1f} ± {result['last_10_std']:.1f} over the last 10")  # fmt: skip
    say("minutes: " + ", ".join(f"{phase} {value / 60:.1f}" for phase, value in seconds.items()))
    say(f"files: {run_dir}")
    return result


def machine(device: torch.device) -> dict:
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = re.search(r"model name\s*: (.*)|$", cpuinfo)[1] or platform.processor() or platform.machine()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    versions = {module.__name__: str(module.__version__) for module in (torch, gym, mujoco, np)}
    versions |= dict(python=platform.python_version())
    return versions | dict(device=f"{device.type}: {name}", threads=torch.get_num_threads())


def main(args: Args) -> dict:
    """Everything around the training: device, environments, data, and a run folder that no other process is using."""
    if args.torch_threads:
        torch.set_num_threads(args.torch_threads)
    devices = ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available() + ["cpu"]
    if args.device not in ("auto", *devices):
        fail(f"--device {args.device} is not there; available: {', '.join(devices)}")
    device = torch.device(devices[0] if args.device == "auto" else args.device)
    algorithm = getattr(args, "penalty", "rambo")
    if args.track:
        try:
            import wandb
        except ImportError:
            fail("--track needs Weights & Biases: pip install wandb")
    gym_id = args.gym_id or GYM_IDS[args.env_id.split("-")[0]]
    envs = [make_env(gym_id) for _ in range(args.eval_episodes)]
    if args.eval_only:
        return evaluate_again(args, envs, gym_id, device)

    path = find_dataset(args)
    data = torch.as_tensor(load_dataset(path, envs[0]), device=device)
    sha256 = sha256_of(path)
    is_d4rl = D4RL_SHA256.get(args.env_id) == sha256
    dataset = dict(file=path.name, sha256=sha256, rows=len(data), is_d4rl=is_d4rl)
    described = dict(algorithm=algorithm, gym_id=gym_id, args=vars(args) | dict(resume=None), dataset=dataset)
    if args.resume and json.loads((Path(args.resume) / "args.json").read_text())["dataset"]["sha256"] != sha256:
        fail(f"{path} is not the dataset that {args.resume} began with")
    run_dir = Path(args.resume) if args.resume else make_run_dir(args, algorithm)
    with locked(run_dir), signals_noted():
        described |= dict(machine=machine(device))
        write_file(run_dir / "args.json", json.dumps(described, indent=2).encode())
        if args.track:
            wandb.init(project="micro", name=run_dir.name, config=vars(args), sync_tensorboard=True, dir=run_dir)
        say(f"{run_dir}: {len(data)} transitions of {path.name}, {device.type}, {torch.get_num_threads()} threads")
        return train(args, data, envs, described, run_dir, device)


# === end shared ===


def train(args: Args, data: torch.Tensor, envs: list[gym.Env], described: dict, run_dir: Path, device) -> dict:
    obs_dim, act_dim = envs[0].observation_space.shape[0], envs[0].action_space.shape[0]
    gym_id = described["gym_id"]
    obs_std, obs_mean = torch.std_mean(data[:, :obs_dim], 0, correction=0)
    input_mean, input_std = obs_mean, obs_std + 1e-3  # policy, critics and model all see standardised observations
    for observations in unpack(data, obs_dim, act_dim)[0::3]:
        observations.sub_(input_mean).div_(input_std)

    def terminated(standardised_obs: torch.Tensor) -> torch.Tensor:
        return termination_of(gym_id)(standardised_obs * input_std + input_mean)

    limits = divergence_limits(data, obs_dim, act_dim, args)

    # `run` is where the run stands: a checkpoint is `run`, and the states of networks, buffer and generators
    run = SimpleNamespace(update=0, averaged=0, metric_sums=torch.zeros(len(METRICS), device=device), rollout_stats={},
                          model_stats=dict.fromkeys(MODEL_METRICS, 0.0),
                          history=[], events=[], seconds=dict.fromkeys(PHASES, 0.0))  # fmt: skip
    checkpoint = read_checkpoint(run_dir, device)
    vars(run).update({name: checkpoint[name] for name in vars(run) if name in checkpoint})
    if run.update > args.total_updates:
        fail(f"{run_dir} has taken {run.update} updates already, more than --total-updates {args.total_updates}")
    log = event_log(run_dir, run.events)

    # dynamics
    def after_epoch(state: dict, metrics: dict) -> None:
        epoch, metrics = state["epoch"], {name: value.item() for name, value in metrics.items()}
        run.seconds["dynamics"] = time.perf_counter() - started
        log("dynamics", epoch, metrics)
        stop_if_diverged(metrics, limits, f"the end of dynamics epoch {epoch}", run_dir, lambda: state)
        write_file(run_dir / "checkpoint.pt", vars(run) | dict(dynamics=state), keep_previous=True)
        say(f"dynamics epoch {epoch}: " + ", ".join(f"{k} {v:.5g}" for k, v in list(metrics.items())[:3]))
        stop_if_asked(run_dir)

    started = time.perf_counter() - run.seconds["dynamics"]
    if "agent" in checkpoint:
        dynamics = checkpoint["dynamics"]
    elif args.dynamics_path:
        dynamics = read_tensors(Path(args.dynamics_path), device)
    else:
        dynamics = train_dynamics(data, obs_dim, act_dim, args, device, checkpoint.get("dynamics"), after_epoch)
    ensemble = load_dynamics(dynamics, obs_dim, act_dim, args, device).requires_grad_(True)
    units = torch.stack([input_mean, input_std])
    if not torch.equal(dynamics.setdefault("observation_units", units), units):
        fail("the dynamics ensemble was trained on observations in other units: by another script, or on other data")
    write_file(run_dir / "dynamics.pt", dynamics)

    # policy
    agent, rng = Agent(obs_dim, act_dim, args, device), generator(device, args.seed, TRAINING)
    model_rows = args.batch_size - int(args.batch_size * (1 - args.model_ratio))
    generations = 5 * max(1, 1000 // args.rollout_every)
    buffer = RingBuffer(generations * args.rollout_length * args.rollout_batch_size, data.shape[1], device)
    model_optimizer = dynamics_optimizer(ensemble, args.dynamics_lr)
    parts = dict(agent=agent, buffer=buffer, ensemble=ensemble, model_optimizer=model_optimizer)

    def state() -> dict:
        parts_state = {name: part.state_dict() for name, part in parts.items()}
        return vars(run) | parts_state | dict(rng=rng.get_state(), dynamics=dynamics)

    def save() -> None:  # the checkpoint last: a kill in between makes the other files again
        policy = dict(actor=agent.actor.state_dict(), critics=agent.critics.state_dict())
        policy |= dict(obs_mean=obs_mean, obs_std=obs_std, input_mean=input_mean, input_std=input_std)
        write_file(run_dir / "policy.pt", described | policy)
        write_file(run_dir / "checkpoint.pt", state(), keep_previous=True)

    if "agent" in checkpoint:
        restore(parts, rng, checkpoint)
    else:
        with timed(run.seconds, "cloning"):
            cloning_loss = clone_behaviour(agent.actor, data, obs_dim, act_dim, args, device)
        say(f"behaviour cloning: {args.bc_epochs} epochs, squared error {cloning_loss:.4f}")
        save()
    take_update = torch.compile(update) if args.compile else update
    bar = progress_bar(total=args.total_updates, desc="updates", initial=run.update)
    started, started_at = time.perf_counter(), run.update
    model_changes = args.adversarial_weight > 0 or args.supervised_updates
    while run.update < args.total_updates:
        if run.update > 0 and run.update % args.adversarial_every == 0 and model_changes:
            with timed(run.seconds, "adversary"):
                run.model_stats = train_model_against(
                    agent, ensemble, model_optimizer, terminated, data, obs_dim, act_dim, args, rng
                )
        if run.update % args.rollout_every == 0 and model_rows > 0:
            with timed(run.seconds, "rollouts"):
                starts = draw(data[:, :obs_dim], args.rollout_batch_size, rng)
                run.rollout_stats = rollout(
                    agent.actor, ensemble, args.num_elites, terminated, starts, args.rollout_length, buffer, rng
                )
        with timed(run.seconds, "updates"):
            rows = draw(data, args.batch_size - model_rows, rng)
            if model_rows > 0:
                rows = torch.cat([rows, buffer.sample(model_rows, rng)])
            noise = draw_noise(args, act_dim, rng)
            run.metric_sums += take_update(agent, unpack(rows, obs_dim, act_dim), noise, args)
        run.update += 1
        bar.update()

        evaluating = run.update % args.eval_every == 0 or run.update == args.total_updates
        saving = run.update % args.checkpoint_every == 0 or run.update == args.total_updates or bool(received_signals)
        if evaluating or saving or run.update % 1000 == 0:
            metrics = dict(zip(METRICS, (run.metric_sums / (run.update - run.averaged)).tolist())) | run.rollout_stats
            metrics |= run.model_stats
            stop_if_diverged(metrics, limits, f"update {run.update}", run_dir, state)
        if evaluating or run.update % 1000 == 0:
            run.metric_sums.zero_()
            run.averaged = run.update
            speed = (run.update - started_at) / (time.perf_counter() - started)
            log("train", run.update, metrics | dict(updates_per_second=speed))
            bar.set_postfix_str(f"loss {metrics['critic_loss']:.2f}, Q {metrics['q']:.1f}")
        if evaluating:
            with timed(run.seconds, "evaluation"):
                returns = evaluate_actor(agent.actor, input_mean, input_std, envs, run.update, args, device)
                gap_rng = generator(device, args.seed, VALUE_GAP, run.update)
                states = draw(data[:, :obs_dim], 128, gap_rng)
                data_q, gap = value_gap(
                    agent.actor, agent.critics, ensemble, args.num_elites, terminated, states, args.gamma, gap_rng
                )
            scores = normalised_score(returns, gym_id)
            evaluation = dict(score=scores.mean().item(), score_std=scores.std().item(), data_q=data_q, value_gap=gap)
            evaluation |= dict(return_mean=returns.mean().item(), return_std=returns.std().item())
            log("evaluation", run.update, evaluation)
            run.history.append(dict(update=run.update) | evaluation | metrics | dict(returns=returns.tolist()))
            write_progress(run_dir, run.history)
            say(f"update {run.update}: score {scores.mean():.1f} ± {scores.std():.1f}, Q {metrics['q']:.1f}, "
                f"value gap {gap:.1f}, {speed:.1f} updates/s, "
                f"{(args.total_updates - run.update) / speed / 60:.0f} min left")  # fmt: skip
        if saving:
            save()
            stop_if_asked(run_dir)
    bar.close()
    return write_result(run_dir, described, run.history, run.seconds)


if __name__ == "__main__":
    try:
        main(parse_args(sys.argv[1:]))
    except KeyboardInterrupt:  # before there was anything to save
        raise SystemExit(130)
