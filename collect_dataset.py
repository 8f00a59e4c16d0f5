"""Make an offline dataset the way D4RL made its own: train SAC online, keep its replay buffer, roll its policies out.

    quality        what the file holds
    random         stochastic rollouts of the untrained policy
    medium         stochastic rollouts of the policy that was first to reach --medium-score
    medium-replay  all transitions that training had seen by then (and at least --min-steps of them)
    expert         stochastic rollouts of the policy at the end of training
    medium-expert  the medium rows, then as many expert rows

    python collect_dataset.py --env-id Hopper-v4 --quality medium-replay medium
    python collect_dataset.py --resume runs/<run folder>
    python collect_dataset.py --policy-path runs/<run folder>/medium.pt --quality medium --rows 2000000
    python collect_dataset.py --from-minari mujoco/hopper/medium-v0

Evaluations, checkpoints and the end of training fall between episodes, and each episode is reset with a seed of its
own: so a resumed run repeats an uninterrupted one to the bit with no state of the simulator saved.
"""

import copy
import importlib.metadata
import io
import itertools
import json
import os
import re
import signal
import sys
import time
import warnings
import zipfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Literal, NamedTuple, NoReturn

import gymnasium as gym
import h5py
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from tqdm import tqdm

try:
    import fcntl
except ImportError:  # Windows: there nothing keeps a second process out of a run folder
    fcntl = None

Quality = Literal["random", "medium", "medium-replay", "expert", "medium-expert"]


@dataclass
class Args:
    # --- what to collect ---
    env_id: str = "Hopper-v4"
    """gymnasium environment with a bounded Box of actions and a flat Box of observations"""
    quality: tuple[Quality, ...] = ("medium-replay",)
    """one or several; a single training run serves them all"""
    rows: int = 1_000_000
    """transitions to roll out for each of random, medium and expert"""
    medium_score: float | None = None
    """evaluation that is medium: in Hopper, HalfCheetah and Walker2d a normalised score (default 40), else a return"""
    min_steps: int = 0
    """training does not stop before this step, so that medium-replay has at least so many rows"""
    store_state: bool = False
    """also write infos/qpos and infos/qvel, the MuJoCo state before each step, in float64"""
    max_episode_steps: int | None = None
    """time limit of an episode, by default the environment's own"""

    # --- where it comes from, instead of a new training run ---
    resume: str | None = None
    """run folder to continue; its flags hold, but for those given anew"""
    policy_path: str | None = None
    """collect from this policy, saved by an earlier run; --quality says what to call the result"""
    from_minari: str | None = None
    """convert this Minari dataset, e.g. mujoco/hopper/medium-v0 (needs the minari package)"""

    # --- experiment ---
    seed: int = 0
    """every random draw derives from it"""
    device: str = "cpu"
    """torch device of networks and replay buffer"""
    torch_threads: int = 1
    """CPU threads of torch; networks this small gain little from more"""
    output_dir: str = "data"
    """the dataset becomes <output-dir>/<env>-<quality>-<suffix>.hdf5"""
    suffix: str = "lite"
    """last part of the dataset's name"""
    overwrite: bool = False
    """replace datasets that exist"""
    runs_root: str = "runs"
    """a new folder in here gets the checkpoint and the policies"""
    checkpoint_every: int = 20_000
    """environment steps between two checkpoints"""

    # --- SAC ---
    total_steps: int = 1_000_000
    """environment steps at which training ends (with the episode then under way); expert is the policy there"""
    learning_starts: int = 5_000
    """environment steps before the first update; then one update for each step"""
    batch_size: int = 256
    """transitions in an update"""
    actor_lr: float = 3e-4
    """learning rate of the policy"""
    critic_lr: float = 3e-4
    """learning rate of the two critics"""
    alpha_lr: float = 3e-4
    """learning rate of the entropy weight; the target entropy is minus the number of action dimensions"""
    gamma: float = 0.99
    """discount"""
    tau: float = 0.005
    """share of the critics that moves into the target critics at each update"""
    eval_every: int = 5_000
    """environment steps between two evaluations"""
    eval_episodes: int = 10
    """episodes of an evaluation, with the stochastic policy, as it is what fills the file"""


# Returns of D4RL's random and expert policies, between which it normalises scores.
REFERENCE = {"hopper": (-20.272305, 3234.3), "halfcheetah": (-280.178953, 12135.0), "walker2d": (1.629008, 4592.3)}
CHECKPOINT_KEYS = {"args", "step", "rows", "replay_rows", "evaluations", "policies", "learner", "generators"}
# --resume may change these: none alters the steps of training already taken.
FREE_ON_RESUME = {
    "quality", "rows", "medium_score", "min_steps", "resume", "device", "torch_threads", "output_dir", "suffix",
    "overwrite", "runs_root", "checkpoint_every", "total_steps",
}  # fmt: skip


def fail(message: object) -> NoReturn:
    sys.exit(f"collect_dataset.py: {' '.join(str(message).split())[:300]}")  # one line to stderr, exit status 1


def short_name(env_id: str) -> str:
    return re.split("[/:]", env_id)[-1].rsplit("-v", 1)[0].lower()


def score_of(env_id: str, episode_return: float) -> float:
    lowest, highest = REFERENCE.get(short_name(env_id), (0.0, 100.0))  # without reference: the return itself
    return 100 * (episode_return - lowest) / (highest - lowest)


def make_generator(args: Args, purpose: str) -> torch.Generator:
    """Each purpose draws from a stream of its own, so that more draws for one leave the others as they were."""
    seed = np.random.SeedSequence([args.seed, *purpose.encode()]).generate_state(1, np.uint64)[0] >> 1
    return torch.Generator(args.device).manual_seed(int(seed))


# --- environment ---
def make_environment(args: Args) -> gym.Env:
    warnings.filterwarnings("ignore", message=".*out of date.*")  # v4 is on purpose: v5 differs from D4RL's tasks
    try:
        environment = gym.make(args.env_id, max_episode_steps=args.max_episode_steps, disable_env_checker=True)
    except (gym.error.Error, ImportError) as error:
        fail(f"--env-id {args.env_id}: {error}")
    actions, observations = environment.action_space, environment.observation_space
    if not (isinstance(actions, gym.spaces.Box) and len(actions.shape) == 1 and actions.is_bounded()):
        fail(f"--env-id {args.env_id}: the actions must be a bounded flat Box, not {actions}")
    if not (isinstance(observations, gym.spaces.Box) and len(observations.shape) == 1):
        fail(f"--env-id {args.env_id}: the observations must be a flat Box, not {observations}")
    if environment.spec.max_episode_steps is None:
        fail(f"--env-id {args.env_id}: no time limit of its own, so give --max-episode-steps")
    if args.store_state and not hasattr(getattr(environment.unwrapped, "data", None), "qpos"):
        fail(f"--store-state: {args.env_id} is no MuJoCo environment")
    return environment


def environment_units(action: np.ndarray, space: gym.spaces.Box) -> np.ndarray:
    """From the policy's [-1, 1] to the environment's units, in float32: what is stepped is then what is stored."""
    low, high = space.low.astype(np.float32), space.high.astype(np.float32)
    return np.clip((low + high) / 2 + (high - low) / 2 * action, low, high)


def row_widths(args: Args, environment: gym.Env) -> list[int]:
    """Of a packed row: observation, action in [-1, 1], reward, next observation, terminal, timeout, log-probability,
    and qpos, qvel with --store-state. Packed, a batch is one index_select."""
    observation_size, action_size = environment.observation_space.shape[0], environment.action_space.shape[0]
    simulator = environment.unwrapped.model if args.store_state else None
    state_sizes = [simulator.nq, simulator.nv] if simulator else [0, 0]
    return [observation_size, action_size, 1, observation_size, 1, 1, 1, *state_sizes]


def empty_rows(args: Args, widths: list[int], count: int) -> Tensor:
    dtype = torch.float64 if args.store_state else torch.float32  # a state in float32 would be another state
    return torch.empty(count, sum(widths), dtype=dtype, device=args.device)


def play_episode(args: Args, environment: gym.Env, actor: "Actor", generator: torch.Generator) -> Iterator[tuple]:
    """A packed row and its reward for each step. The actor may learn between two rows."""
    observation, _ = environment.reset(seed=int(torch.randint(2**31, (), generator=generator, device=args.device)))
    ended, state = False, []
    while not ended:
        observation = np.array(observation, np.float32)  # a copy: an environment may write the next one into the same
        if args.store_state:
            state = [environment.unwrapped.data.qpos.copy(), environment.unwrapped.data.qvel.copy()]
        with torch.no_grad():
            batch = torch.as_tensor(observation, device=args.device).unsqueeze(0)
            action, log_prob = (tensor[0].cpu().numpy() for tensor in actor.sample(batch, generator))
        step_action = environment_units(action, environment.action_space)
        next_observation, reward, terminated, truncated, _ = environment.step(step_action)
        ended = terminated or truncated
        scalars = [terminated, truncated, log_prob]
        yield np.concatenate([observation, action, [reward], next_observation, scalars, *state]), float(reward)
        observation = next_observation


def roll_out(args: Args, environment: gym.Env, actor: "Actor", quality: str) -> Tensor:
    """Exactly args.rows rows; the last episode is cut where they are full."""
    rows, generator = empty_rows(args, row_widths(args, environment), args.rows), make_generator(args, quality)
    endless = (step for _ in itertools.count() for step in play_episode(args, environment, actor, generator))
    steps = tqdm(itertools.islice(endless, args.rows), f"{quality} rows", args.rows, disable=None, unit_scale=True)
    for index, (row, _) in enumerate(steps):
        rows[index] = torch.from_numpy(row)
    return rows


# --- SAC ---
class Actor(nn.Module):
    """Tanh-Gaussian policy with actions in [-1, 1]."""

    def __init__(self, observation_size: int, action_size: int):
        super().__init__()
        self.hidden1, self.hidden2 = nn.Linear(observation_size, 256), nn.Linear(256, 256)
        self.mean, self.log_std = nn.Linear(256, action_size), nn.Linear(256, action_size)

    def sample(self, observation: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        hidden = F.relu(self.hidden2(F.relu(self.hidden1(observation))))
        mean, log_std = self.mean(hidden), self.log_std(hidden).clamp(-5, 2)
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        action = torch.tanh(mean + log_std.exp() * noise)
        gaussian = -0.5 * noise.square() - log_std - 0.5 * np.log(2 * np.pi)
        return action, (gaussian - torch.log(1 - action.square() + 1e-6)).sum(-1)


def q_values(critics: nn.ModuleList, observation: Tensor, action: Tensor) -> Tensor:
    inputs = torch.cat([observation, action], dim=1)
    return torch.stack([critic(inputs).squeeze(-1) for critic in critics])  # (critics, batch)


class Learner(NamedTuple):
    """All that training changes; each part has a state_dict for the checkpoint."""

    actor: Actor
    critics: nn.ModuleList
    target_critics: nn.ModuleList
    temperature: nn.ParameterDict
    actor_optimizer: torch.optim.Optimizer
    critic_optimizer: torch.optim.Optimizer
    temperature_optimizer: torch.optim.Optimizer


def make_learner(args: Args, widths: list[int]) -> Learner:
    torch.manual_seed(make_generator(args, "networks").initial_seed())  # nn.Linear draws from the global stream
    actor = Actor(widths[0], widths[1]).to(args.device)
    critics = nn.ModuleList(
        nn.Sequential(nn.Linear(sum(widths[:2]), 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
        for _ in range(2)
    ).to(args.device)
    target_critics = copy.deepcopy(critics).requires_grad_(False)
    temperature = nn.ParameterDict({"log_alpha": torch.zeros((), device=args.device)})
    learning_rates = ((actor, args.actor_lr), (critics, args.critic_lr), (temperature, args.alpha_lr))
    optimizers = (torch.optim.Adam(module.parameters(), lr=rate, fused=True) for module, rate in learning_rates)
    return Learner(actor, critics, target_critics, temperature, *optimizers)


def sac_update(args: Args, learner: Learner, batch: Tensor, widths: list[int], generator: torch.Generator) -> None:
    """One step each of critics, policy, entropy weight and target critics, on a batch of packed rows."""
    observation, action, reward, next_observation, terminal, *_ = batch.split(widths, dim=1)
    actor, critics, log_alpha = learner.actor, learner.critics, learner.temperature["log_alpha"]
    alpha = log_alpha.detach().exp()

    with torch.no_grad():
        next_action, next_log_prob = actor.sample(next_observation, generator)
        next_value = q_values(learner.target_critics, next_observation, next_action).amin(0) - alpha * next_log_prob
        target = reward[:, 0] + args.gamma * (1 - terminal[:, 0]) * next_value
    critic_loss = (q_values(critics, observation, action) - target).square().mean()
    learner.critic_optimizer.zero_grad()
    critic_loss.backward()
    learner.critic_optimizer.step()

    new_action, log_prob = actor.sample(observation, generator)
    actor_loss = (alpha * log_prob - q_values(critics, observation, new_action).amin(0)).mean()
    learner.actor_optimizer.zero_grad()
    actor_loss.backward(inputs=list(actor.parameters()))  # spares the gradients of the critics' weights
    learner.actor_optimizer.step()

    # The gradient of -log_alpha * (log_prob + target entropy), whose target is minus the number of action dimensions.
    log_alpha.grad = -(log_prob.detach() - action.shape[1]).mean()
    learner.temperature_optimizer.step()
    with torch.no_grad():
        torch._foreach_lerp_(list(learner.target_critics.parameters()), list(critics.parameters()), args.tau)


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


def load(path: Path, keys: set[str]) -> dict:
    content = read_tensors(path, "cpu")
    if missing := keys - content.keys():
        fail(f"{path} is not a file that this script saved: it has no {', '.join(sorted(missing))}")
    return content


def dataset_arrays(args: Args, rows: Tensor, environment: gym.Env) -> dict[str, np.ndarray]:
    """D4RL's arrays from packed rows."""
    space = environment.action_space
    columns = [column.cpu().numpy() for column in rows.split(row_widths(args, environment), dim=1)]
    observations, actions, rewards, next_observations, terminals, timeouts, log_probs, qpos, qvel = columns
    log_scale = np.log((space.high.astype(np.float64) - space.low) / 2).sum()  # a density changes with the units
    arrays = {
        "observations": observations, "actions": environment_units(actions.astype(np.float32), space),
        "rewards": rewards[:, 0], "next_observations": next_observations, "terminals": terminals[:, 0] > 0,
        "timeouts": timeouts[:, 0] > 0, "infos/action_log_probs": log_probs[:, 0] - log_scale,
    }  # fmt: skip
    arrays = {name: array if array.dtype == bool else array.astype(np.float32) for name, array in arrays.items()}
    return arrays | ({"infos/qpos": qpos, "infos/qvel": qvel} if args.store_state else {})


def write_dataset(path: Path, parts: list[dict[str, np.ndarray]], env_id: str, attributes: dict) -> None:
    """One part after the other. A part that stops inside an episode gets a timeout there; its return is not counted."""
    returns = np.empty(0)
    for part in parts:
        ends = np.flatnonzero(part["terminals"] | part["timeouts"])
        sums_at_ends = part["rewards"].cumsum(dtype=np.float64)[ends]
        returns = np.append(returns, np.diff(sums_at_ends, prepend=0))
        part["timeouts"][-1] |= not part["terminals"][-1]
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            fail(f"{path} is not written: {name} has values that are not finite")
    mean, std = (returns.mean(), returns.std()) if returns.size else (np.nan, np.nan)
    attributes |= {"env_id": env_id, "episodes": returns.size, "behaviour_score": score_of(env_id, mean)}
    attributes |= {"behaviour_return_mean": mean, "behaviour_return_std": std}
    for name in ("gymnasium", "mujoco", "numpy", "torch"):  # as installed: not all of them are imported in every run
        attributes[f"{name}_version"] = importlib.metadata.version(name)
    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        for name, array in arrays.items():
            chunks = (min(len(array), 16_384), *array.shape[1:])
            file.create_dataset(name, data=array, chunks=chunks, compression="gzip", compression_opts=9, shuffle=True)
        file.attrs.update(sorted(attributes.items()))
    write_file(path, image.getbuffer())
    episodes = f"{returns.size} complete episodes, return {mean:.1f} ± {std:.1f}"
    print(f"{path}: {len(arrays['rewards'])} rows, {episodes}, {path.stat().st_size / 1e6:.1f} MB", flush=True)


def was_written(path: Path, flags: str) -> bool:
    """By a run with the same flags: under its own name a file is whole."""
    try:
        with h5py.File(path, "r") as file:
            return file.attrs.get("flags") == flags
    except OSError:
        return False


def convert_minari(dataset_id: str, path: Path) -> None:
    """Minari's truncations are D4RL's timeouts, and its episodes hold one observation more than actions."""
    try:
        import minari

        dataset = minari.load_dataset(dataset_id, download=True)
    except ImportError as error:
        fail(f"--from-minari needs the minari package, pip install 'minari[hdf5,hf]' ({error})")
    except Exception as error:  # unknown id, no network, another format: minari has no common class for them
        fail(f"--from-minari {dataset_id}: {error}")
    if not all(isinstance(space, gym.spaces.Box) for space in (dataset.observation_space, dataset.action_space)):
        fail(f"--from-minari {dataset_id}: observations and actions must be plain arrays (Box)")
    parts = []
    for episode in tqdm(dataset.iterate_episodes(), total=dataset.total_episodes, desc="episodes", disable=None):
        observations = np.asarray(episode.observations, np.float32)
        parts.append({
            "observations": observations[:-1], "actions": np.asarray(episode.actions, np.float32),
            "rewards": np.asarray(episode.rewards, np.float32), "next_observations": observations[1:],
            "terminals": np.array(episode.terminations, bool), "timeouts": np.array(episode.truncations, bool),
        })  # fmt: skip
    if not parts:
        fail(f"--from-minari {dataset_id}: no episodes in it")
    write_dataset(path, parts, dataset.env_spec.id if dataset.env_spec else "", {"minari_dataset": dataset_id})


# --- main ---
def parse(arguments: list[str] | None) -> tuple[Args, dict]:
    """The flags, and the checkpoint to continue (empty if there is none)."""
    args, checkpoint = tyro.cli(Args, args=arguments, description=__doc__), {}
    if args.resume:
        checkpoint = read_checkpoint(Path(args.resume), "cpu")
        if missing := CHECKPOINT_KEYS - checkpoint.keys():
            fail(f"--resume {args.resume}: no checkpoint there with {', '.join(sorted(missing))}")
        try:
            saved = Args(**checkpoint["args"] | {"resume": args.resume})
        except TypeError as error:
            fail(f"--resume {args.resume}: the checkpoint is not of this version: {error}")
        args = tyro.cli(Args, args=arguments, default=saved)
        for name in vars(args).keys() - FREE_ON_RESUME:
            if getattr(args, name) != getattr(saved, name):
                fail(f"--resume: --{name.replace('_', '-')} was {getattr(saved, name)} and has to stay so")
    return args, checkpoint


def check(args: Args, outputs: list[Path]) -> None:
    """Refuse what can be refused before hours of work."""
    may_be_zero = {"min_steps", "seed", "learning_starts", "actor_lr", "critic_lr", "alpha_lr", "gamma", "tau"}
    for name, value in vars(args).items():
        least = -(10**8) if name == "medium_score" else 0 if name in may_be_zero else 1
        most = 1 if name in ("gamma", "tau") else 10**8
        if type(value) in (int, float) and not least <= value <= most:  # true of NaN too
            fail(f"--{name.replace('_', '-')} must be between {least} and {most}, not {value}")
    if args.min_steps > args.total_steps:
        fail(f"--min-steps {args.min_steps} is more than --total-steps {args.total_steps}")
    if not re.fullmatch(r"\w[\w.-]*", args.suffix):
        fail(f"--suffix {args.suffix} is part of a file's name: letters, digits, '.', '_' and '-' only")
    if len(set(args.quality)) != len(args.quality) or not args.quality:
        fail("--quality: name one or several, each once")
    if sum(option is not None for option in (args.resume, args.policy_path, args.from_minari)) > 1:
        fail("--resume, --policy-path and --from-minari exclude each other")
    if args.policy_path and args.quality not in (("random",), ("medium",), ("expert",)):
        fail("--policy-path: rows of a single policy, so --quality must be random, medium or expert")
    if args.from_minari and args.store_state:
        fail("--store-state: no simulator states to convert in a Minari dataset")
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError) as error:
        fail(f"--device {args.device}: {error}")
    for path in outputs:
        if path.exists() and not args.overwrite:
            fail(f"{path} exists: give --overwrite, another --suffix or another --output-dir")
        path.parent.mkdir(parents=True, exist_ok=True)


def train(args: Args, checkpoint: dict, environment: gym.Env, learner: Learner, run_folder: Path):
    """Online SAC. Returns the policies by quality, and the rows of medium-replay."""
    needs_medium = any("medium" in name for name in args.quality)
    needs_end = any("expert" in name for name in args.quality)
    medium_score = args.medium_score
    if medium_score is None:
        medium_score = 40.0 if short_name(args.env_id) in REFERENCE else float("inf")
    if needs_medium and medium_score == float("inf"):
        fail(f"--medium-score: {args.env_id} has no reference score, so give the return that is medium")
    widths, evaluation_environment = row_widths(args, environment), make_environment(args)
    capacity = args.total_steps + environment.spec.max_episode_steps  # the last episode goes on to its end
    rows = empty_rows(args, widths, capacity)
    generators = {name: make_generator(args, name) for name in ("exploration", "replay", "update")}
    policies = {"random": copy.deepcopy(learner.actor.state_dict())}
    step, replay_rows, evaluations = 0, 0, []  # replay_rows: length of medium-replay, once it is known
    if checkpoint:
        try:
            step, replay_rows, evaluations = (checkpoint[name] for name in ("step", "replay_rows", "evaluations"))
            policies, rows[:step] = checkpoint["policies"], checkpoint["rows"]
            for name, part in learner._asdict().items():
                part.load_state_dict(checkpoint["learner"][name])
            for name, generator in generators.items():
                generator.set_state(checkpoint["generators"][name])
        except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
            fail(f"--resume {run_folder}: the checkpoint does not fit its flags: {error!r}")

    def state() -> dict:
        return {
            "args": vars(args), "step": step, "replay_rows": replay_rows, "evaluations": evaluations,
            "policies": policies, "rows": rows[:step].clone(),
            "learner": {name: part.state_dict() for name, part in learner._asdict().items()},
            "generators": {name: generator.get_state() for name, generator in generators.items()},
        }  # fmt: skip

    def save() -> None:  # the checkpoint last: a kill in between makes the other files again
        for name, actor in policies.items():
            write_file(run_folder / f"{name}.pt", {"env_id": args.env_id, "actor": actor})
        write_file(run_folder / "checkpoint.pt", state(), keep_previous=True)

    if not checkpoint:
        save()  # from here on, --resume finds the flags
    print(f"training; after an interruption: --resume {run_folder}", flush=True)
    saved_at, batch_shape = step, (args.batch_size,)
    progress = tqdm(total=args.total_steps, initial=step, desc="training", disable=None, unit_scale=True)
    while step < args.total_steps and (needs_end or not replay_rows):
        for row, _ in play_episode(args, environment, learner.actor, generators["exploration"]):
            rows[step] = torch.from_numpy(row)
            step += 1
            progress.update()
            if step > args.learning_starts:
                indices = torch.randint(step, batch_shape, generator=generators["replay"], device=args.device)
                sac_update(args, learner, rows.index_select(0, indices).float(), widths, generators["update"])
        at_end = step >= args.total_steps

        evaluated_at = evaluations[-1][0] if evaluations else 0
        if at_end or step // args.eval_every > evaluated_at // args.eval_every:
            generator = make_generator(args, f"evaluation at {step}")
            average = 0.0
            for _ in range(args.eval_episodes):
                episode = play_episode(args, evaluation_environment, learner.actor, generator)
                average += sum(reward for _, reward in episode) / args.eval_episodes
            weight = max(parameter.abs().max().item() for parameter in learner.critics.parameters())
            if not (np.isfinite(average) and np.isfinite(weight)):
                write_file(run_folder / "diverged.pt", state())
                fail(f"training diverged before step {step}: the evaluation's return is {average}, the critics' largest "
                     f"weight {weight}; the state is in diverged.pt, and the last checkpoint stands")  # fmt: skip
            score = score_of(args.env_id, average)
            evaluations.append((step, average, score))
            say(f"step {step}: return {average:.1f}, score {score:.1f}")
            if "medium" not in policies and score >= medium_score:
                policies["medium"] = copy.deepcopy(learner.actor.state_dict())
            if "medium" in policies and not replay_rows and step >= args.min_steps:
                replay_rows = step
        if at_end:
            policies["expert"] = copy.deepcopy(learner.actor.state_dict())

        due = at_end or (replay_rows and not needs_end) or step - saved_at >= args.checkpoint_every
        if due or received_signals:
            saved_at = step
            save()
        stop_if_asked(run_folder)
    progress.close()
    if needs_medium and not replay_rows:
        best = max(score for _, _, score in evaluations)
        fail(f"medium ({medium_score}) not reached, best {best:.1f}: --resume {run_folder} with more --total-steps")
    return policies, rows[:replay_rows]


def main(arguments: list[str] | None = None) -> None:
    args, checkpoint = parse(arguments)
    if args.from_minari:
        output = Path(args.output_dir, "-".join(args.from_minari.split("/")[-2:]) + "-minari.hdf5")
        check(args, [output])
        return convert_minari(args.from_minari, output)
    prefix = f"{args.output_dir}/{short_name(args.env_id)}"
    outputs = {quality: Path(f"{prefix}-{quality}-{args.suffix}.hdf5") for quality in args.quality}
    places = {"output_dir", "runs_root", "resume", "policy_path", "overwrite"}  # say nothing of what is in the file
    flags = json.dumps({name: value for name, value in vars(args).items() if name not in places})
    if args.resume and not args.overwrite:  # killed between two files: the first one is there
        outputs = {quality: path for quality, path in outputs.items() if not was_written(path, flags)}
    check(args, list(outputs.values()))
    torch.set_num_threads(args.torch_threads)
    environment = make_environment(args)
    learner = make_learner(args, row_widths(args, environment))
    policies = {"random": copy.deepcopy(learner.actor.state_dict())}

    if args.policy_path:
        policy = load(Path(args.policy_path), {"env_id", "actor"})
        if policy["env_id"] != args.env_id:
            fail(f"--policy-path: a policy for {policy['env_id']}, not for --env-id {args.env_id}")
        try:
            learner.actor.load_state_dict(policy["actor"])
        except (RuntimeError, TypeError) as error:
            fail(f"--policy-path {args.policy_path}: {error}")
        policies = {args.quality[0]: policy["actor"]}
    elif set(args.quality) != {"random"}:
        run_name = f"{args.env_id}__collect_dataset__{args.seed}__{int(time.time())}"
        run_folder = Path(args.resume or Path(args.runs_root, re.sub("[/:]", "-", run_name)))
        run_folder.mkdir(parents=True, exist_ok=True)
        with locked(run_folder), signals_noted():
            policies, replay = train(args, checkpoint, environment, learner, run_folder)

    for quality, path in outputs.items():
        parts = []
        for name in ("medium", "expert") if quality == "medium-expert" else (quality,):
            if name == "medium-replay":
                packed = replay
            else:
                learner.actor.load_state_dict(policies[name])
                packed = roll_out(args, environment, learner.actor, name)
            parts.append(dataset_arrays(args, packed, environment))
        write_dataset(path, parts, args.env_id, {"quality": quality, "seed": args.seed, "flags": flags})


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` removes a half-written file
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        fail(error)
