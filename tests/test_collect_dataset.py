"""collect_dataset.py: what it writes is what the environment said, whole, and the same again from the same seed."""

import errno
import os
import resource
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import collect_dataset
import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies

SCRIPT = Path(collect_dataset.__file__)
ALL_KEYS = {
    "observations", "actions", "rewards", "terminals", "timeouts", "next_observations", "infos/action_log_probs"
}  # fmt: skip
TIME_LIMIT = 8


class Recorder(gym.Env):
    """Episodes of 3 to 12 steps, cut at 8, and a diary of all that was said. Actions have lopsided units."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([1.0, 5.0], np.float32))
    diaries: list[list[dict]] = []  # one for each instance, in the order in which they were made

    def __init__(self):
        self.diary: list[dict] = []
        Recorder.diaries.append(self.diary)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length, self.steps = int(self.np_random.integers(3, 13)), 0
        self.observation = self.np_random.normal(size=3)
        self.reused = self.observation.copy()
        return self.reused, {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.steps += 1
        following = 0.5 * self.observation + self.np_random.normal(size=3)
        reward = np.float64(1 - (action[0] + 0.5) ** 2 - 0.1 * (action[1] - 2) ** 2)  # MuJoCo's are of this type
        terminated, truncated = self.steps == self.length, self.steps == TIME_LIMIT  # the latter by gymnasium's wrapper
        said = dict(observation=self.observation, action=action.copy(), reward=reward, next_observation=following)
        self.diary.append(said | dict(terminated=terminated, truncated=truncated))
        self.observation = following
        self.reused[:] = following  # as an environment may do
        return self.reused, reward, terminated, False, {}


class Endless(Recorder):
    """Registered without a time limit."""


class Broken(Recorder):
    """Gives a reward that is no number."""

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float("nan"), *rest


class DiscreteActions(Recorder):
    action_space = gym.spaces.Discrete(2)


class UnboundedActions(Recorder):
    action_space = gym.spaces.Box(-np.inf, np.inf, (2,))


class PictureObservations(Recorder):
    observation_space = gym.spaces.Box(0, 1, (3, 3))


gym.register("Recorder-v0", f"{__name__}:Recorder", max_episode_steps=TIME_LIMIT)  # a name: Minari stores it
gym.register("Endless-v0", Endless)
for broken in (Broken, DiscreteActions, UnboundedActions, PictureObservations):
    gym.register(f"{broken.__name__}-v0", broken, max_episode_steps=TIME_LIMIT)

SMALL = "--env-id Recorder-v0 --rows 60 --total-steps 200 --learning-starts 40 --batch-size 16 --eval-every 50"
SMALL += " --eval-episodes 2 --medium-score -1000 --min-steps 120 --checkpoint-every 40"


def collect(folder: Path, flags: str) -> dict[str, Path]:
    """Run the script here, and give the files that it left, by name."""
    Recorder.diaries.clear()
    collect_dataset.main([*flags.split(), "--output-dir", str(folder / "data"), "--runs-root", str(folder / "runs")])
    return {path.name: path for path in folder.rglob("*") if path.is_file()}


def reread(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        arrays = {}
        file.visititems(lambda name, item: arrays.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
        return arrays


def run_folder_of(folder: Path) -> Path:
    (run_folder,) = (folder / "runs").iterdir()
    return run_folder


def assert_same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].dtype == second[name].dtype
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


# --- what is in a file ---
def assert_as_said(arrays: dict[str, np.ndarray], diary: list[dict]) -> None:
    """Row by row what the environment said; a row after which the data stops is a timeout."""
    assert len(arrays["rewards"]) <= len(diary)
    last = len(arrays["rewards"]) - 1
    for row in range(last + 1):
        said = diary[row]
        np.testing.assert_array_equal(arrays["observations"][row], said["observation"].astype(np.float32))
        np.testing.assert_array_equal(arrays["next_observations"][row], said["next_observation"].astype(np.float32))
        np.testing.assert_array_equal(arrays["actions"][row], said["action"])
        assert arrays["rewards"][row] == np.float32(said["reward"])
        assert arrays["terminals"][row] == said["terminated"]
        assert arrays["timeouts"][row] == (said["truncated"] or (row == last and not said["terminated"]))


def test_random_rows_are_what_the_environment_said(tmp_path):
    files = collect(tmp_path, "--env-id Recorder-v0 --quality random --rows 61")
    arrays = reread(files["recorder-random-lite.hdf5"])
    assert_as_said(arrays, Recorder.diaries[0])
    assert len(arrays["rewards"]) == 61
    assert arrays["terminals"].any() and (arrays["timeouts"] & ~arrays["terminals"])[:-1].any()  # both occurred


def test_data_that_stops_inside_an_episode_ends_with_a_timeout(tmp_path):
    for rows in range(20, 32):  # some of these lengths cut an episode, some do not
        collect(tmp_path, f"--env-id Recorder-v0 --quality random --rows {rows} --overwrite")
        arrays = reread(tmp_path / "data/recorder-random-lite.hdf5")
        assert_as_said(arrays, Recorder.diaries[0])
        assert arrays["terminals"][-1] or arrays["timeouts"][-1]


def test_medium_replay_is_all_that_training_saw(tmp_path):
    files = collect(tmp_path, SMALL + " --quality medium-replay")
    arrays, diary = reread(files["recorder-medium-replay-lite.hdf5"]), Recorder.diaries[0]
    assert_as_said(arrays, diary)
    assert len(arrays["rewards"]) == len(diary)  # training stopped there
    assert 120 <= len(diary) < 120 + 50 + 2 * TIME_LIMIT  # the first evaluation from --min-steps on
    assert diary[-1]["terminated"] or diary[-1]["truncated"]


def test_keys_shapes_and_attributes(tmp_path):
    path = collect(tmp_path, SMALL + " --quality medium")["recorder-medium-lite.hdf5"]
    arrays = reread(path)
    assert arrays.keys() == ALL_KEYS
    assert {name: array.shape for name, array in arrays.items()} == {
        "observations": (60, 3), "actions": (60, 2), "rewards": (60,), "terminals": (60,), "timeouts": (60,),
        "next_observations": (60, 3), "infos/action_log_probs": (60,),
    }  # fmt: skip
    for name, array in arrays.items():
        assert array.dtype == (bool if name in ("terminals", "timeouts") else np.float32)
    episode_return, returns = 0.0, []
    for row in range(60):
        episode_return += float(arrays["rewards"][row])
        cut_here = row == 59 and not Recorder.diaries[0][-1]["terminated"] and not Recorder.diaries[0][-1]["truncated"]
        if (arrays["terminals"][row] or arrays["timeouts"][row]) and not cut_here:
            returns.append(episode_return)
            episode_return = 0.0
        elif row < 59:
            np.testing.assert_array_equal(arrays["next_observations"][row], arrays["observations"][row + 1])
    with h5py.File(path) as file:
        assert all(item.compression == "gzip" and item.shuffle for item in (file["observations"], file["rewards"]))
        attributes = dict(file.attrs)
    assert (attributes["env_id"], attributes["quality"], attributes["seed"]) == ("Recorder-v0", "medium", 0)
    assert attributes["episodes"] == len(returns)
    assert attributes["behaviour_return_mean"] == pytest.approx(np.mean(returns))
    assert attributes["behaviour_return_std"] == pytest.approx(np.std(returns))
    assert attributes["gymnasium_version"] == gym.__version__ and attributes["torch_version"] == torch.__version__
    assert str(tmp_path) not in str(attributes)


def test_log_probs_are_densities_in_the_environments_units(tmp_path):
    files = collect(tmp_path, SMALL + " --quality medium")
    arrays = {name: torch.from_numpy(array) for name, array in reread(files["recorder-medium-lite.hdf5"]).items()}
    weights = torch.load(files["medium.pt"], weights_only=True)["actor"]
    hidden = arrays["observations"]
    for layer in ("hidden1", "hidden2"):
        hidden = torch.relu(hidden @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"])
    mean = hidden @ weights["mean.weight"].T + weights["mean.bias"]
    std = (hidden @ weights["log_std.weight"].T + weights["log_std.bias"]).clamp(-5, 2).exp()
    squash = torch.distributions.transforms.TanhTransform()
    scale = torch.distributions.transforms.AffineTransform(torch.tensor([-0.5, 2.5]), torch.tensor([1.5, 2.5]))
    policy = torch.distributions.TransformedDistribution(torch.distributions.Normal(mean, std), [squash, scale])
    inside = ((arrays["actions"] - scale.loc) / scale.scale).abs().amax(1) < 0.99  # beyond, float32 loses the inverse
    assert inside.sum() > 30
    expected = policy.log_prob(arrays["actions"]).sum(1)
    torch.testing.assert_close(arrays["infos/action_log_probs"][inside], expected[inside], rtol=1e-3, atol=1e-3)


@settings(max_examples=30, deadline=None)
@given(strategies.lists(strategies.tuples(strategies.booleans(), strategies.booleans()), min_size=1, max_size=12))
def test_episode_statistics_against_a_loop(tmp_path_factory, ends):
    path = tmp_path_factory.mktemp("statistics") / "file.hdf5"
    rewards = np.arange(1, len(ends) + 1, dtype=np.float32) ** 2
    terminals, timeouts = (np.array(column, bool) for column in zip(*ends))
    part = {"rewards": rewards, "terminals": terminals, "timeouts": timeouts.copy()}
    collect_dataset.write_dataset(path, [part], "Recorder-v0", {})
    total, returns = 0.0, []
    for reward, terminal, timeout in zip(rewards, terminals, timeouts):
        total += float(reward)
        if terminal or timeout:
            returns.append(total)
            total = 0.0
    with h5py.File(path) as file:
        assert file.attrs["episodes"] == len(returns)
        if returns:
            assert file.attrs["behaviour_return_mean"] == pytest.approx(np.mean(returns))
            assert file.attrs["behaviour_return_std"] == pytest.approx(np.std(returns))
        assert list(file["timeouts"][:-1]) == list(timeouts[:-1])
        assert file["timeouts"][-1] == (timeouts[-1] or not terminals[-1])


# --- simulator states ---
@pytest.mark.parametrize("env_id", ["Hopper-v4", "HalfCheetah-v4"])
def test_a_stored_state_and_action_lead_to_the_stored_next_observation(tmp_path, env_id):
    flags = f"--env-id {env_id} --quality random medium-replay --rows 250 --max-episode-steps 150 --store-state"
    flags += " --total-steps 300 --learning-starts 200 --batch-size 16 --eval-episodes 1 --medium-score -100"
    files = collect(tmp_path, flags)
    name = collect_dataset.short_name(env_id)
    simulator = gym.make(env_id).unwrapped
    simulator.reset(seed=12345)
    for quality in ("random", "medium-replay"):
        arrays = reread(files[f"{name}-{quality}-lite.hdf5"])
        assert arrays["infos/qpos"].dtype == arrays["infos/qvel"].dtype == np.float64
        for row in range(len(arrays["rewards"])):
            simulator.set_state(arrays["infos/qpos"][row], arrays["infos/qvel"][row])
            next_observation, reward, terminated, _, _ = simulator.step(arrays["actions"][row])
            np.testing.assert_allclose(arrays["next_observations"][row], next_observation, rtol=0, atol=1e-5)
            assert arrays["rewards"][row] == pytest.approx(reward, abs=1e-5)
            assert arrays["terminals"][row] == terminated


def test_storing_states_changes_nothing_else(tmp_path):
    flags = "--env-id Hopper-v4 --quality medium-replay --total-steps 150 --learning-starts 100 --batch-size 16"
    flags += " --eval-episodes 1 --medium-score -100"
    without = reread(collect(tmp_path / "without", flags)["hopper-medium-replay-lite.hdf5"])
    with_state = reread(collect(tmp_path / "with", flags + " --store-state")["hopper-medium-replay-lite.hdf5"])
    assert with_state.keys() - without.keys() == {"infos/qpos", "infos/qvel"}
    assert_same(without, {name: with_state[name] for name in without})


# --- qualities, seeds, saved policies ---
EVERY_QUALITY = "random medium medium-replay expert medium-expert"


@pytest.fixture(scope="module")
def one_run(tmp_path_factory) -> tuple[dict[str, Path], Path]:
    folder = tmp_path_factory.mktemp("one_run")
    return collect(folder, f"{SMALL} --quality {EVERY_QUALITY}"), folder


def test_one_run_serves_every_quality(one_run):
    files, _ = one_run
    datasets = {name: reread(files[f"recorder-{name}-lite.hdf5"]) for name in EVERY_QUALITY.split()}
    assert {name: len(arrays["rewards"]) for name, arrays in datasets.items() if name != "medium-replay"} == {
        "random": 60, "medium": 60, "expert": 60, "medium-expert": 120
    }  # fmt: skip
    for name in ALL_KEYS:
        both = np.concatenate([datasets["medium"][name], datasets["expert"][name]])
        np.testing.assert_array_equal(datasets["medium-expert"][name], both)
    assert not np.array_equal(datasets["random"]["actions"], datasets["medium"]["actions"])
    assert not np.array_equal(datasets["expert"]["actions"], datasets["medium"]["actions"])


@pytest.mark.parametrize("quality", EVERY_QUALITY.split())
def test_each_quality_alone_is_what_the_common_run_writes(tmp_path, one_run, quality):
    name = f"recorder-{quality}-lite.hdf5"
    alone = collect(tmp_path, f"{SMALL} --quality {quality}")
    assert_same(reread(alone[name]), reread(one_run[0][name]))
    assert {path.suffix for path in alone.values() if path.name != "lock"} <= {".hdf5", ".pt"}


def test_expert_is_the_last_policy_and_medium_the_first_that_is_good_enough(one_run):
    files, folder = one_run
    checkpoint = torch.load(run_folder_of(folder) / "checkpoint.pt", weights_only=True)
    names = ("random", "medium", "expert")
    saved = {name: torch.load(files[f"{name}.pt"], weights_only=True)["actor"] for name in names}
    for name, weight in checkpoint["learner"]["actor"].items():
        assert torch.equal(weight, saved["expert"][name])
    assert checkpoint["evaluations"][0][0] < 50 + TIME_LIMIT and checkpoint["step"] >= 200
    assert not torch.equal(saved["random"]["hidden1.weight"], saved["medium"]["hidden1.weight"])
    assert not torch.equal(saved["medium"]["hidden1.weight"], saved["expert"]["hidden1.weight"])


def test_the_same_seed_writes_the_same_bytes_and_another_does_not(tmp_path, one_run):
    again = collect(tmp_path / "again", f"{SMALL} --quality {EVERY_QUALITY}")
    other = collect(tmp_path / "other", f"{SMALL} --quality {EVERY_QUALITY} --seed 1")
    for name, path in one_run[0].items():
        if path.suffix == ".hdf5":
            assert path.read_bytes() == again[name].read_bytes()
            assert not np.array_equal(reread(path)["observations"][:20], reread(other[name])["observations"][:20])


def test_evaluating_more_leaves_training_as_it_was(tmp_path, one_run):
    more = collect(tmp_path, f"{SMALL} --quality medium-replay --eval-episodes 5")["recorder-medium-replay-lite.hdf5"]
    assert_same(reread(more), reread(one_run[0]["recorder-medium-replay-lite.hdf5"]))


def test_a_saved_policy_gives_the_rows_of_its_run_and_more(tmp_path, one_run):
    files, _ = one_run
    flags = f"--env-id Recorder-v0 --quality medium --policy-path {files['medium.pt']} --rows 90"
    arrays = reread(collect(tmp_path, flags)["recorder-medium-lite.hdf5"])
    original = reread(files["recorder-medium-lite.hdf5"])
    assert len(arrays["rewards"]) == 90
    for name in ALL_KEYS - {"timeouts"}:  # the original's last row may be a timeout by being the last
        np.testing.assert_array_equal(arrays[name][:60], original[name])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("env_id, episode_return, score", [
    ("Hopper-v4", 1326, 41.366), ("HalfCheetah-v4", 5704, 48.201), ("Walker2d-v4", 2715, 59.105), ("Other-v0", 77, 77),
])  # fmt: skip
def test_scores(env_id, episode_return, score):
    assert collect_dataset.score_of(env_id, episode_return) == pytest.approx(score, abs=2e-3)


# --- SAC against a slow and obvious one ---
def test_sac_update_against_autograd_by_the_book():
    args = collect_dataset.Args(seed=3)
    widths, gamma, tau = [3, 2, 1, 3, 1, 1, 1, 0, 0], args.gamma, args.tau
    learner = collect_dataset.make_learner(args, widths)
    oracle = collect_dataset.make_learner(args, widths)
    log_alpha = torch.zeros((), requires_grad=True)
    critics, targets, actor = oracle.critics, oracle.target_critics, oracle.actor
    adams = [torch.optim.Adam(p, lr=3e-4) for p in (critics.parameters(), actor.parameters(), [log_alpha])]

    def policy(observation, noise):
        hidden = torch.relu(actor.hidden2(torch.relu(actor.hidden1(observation))))
        gaussian = torch.distributions.Normal(actor.mean(hidden), actor.log_std(hidden).clamp(-5, 2).exp())
        raw = gaussian.mean + gaussian.stddev * noise
        return torch.tanh(raw), (gaussian.log_prob(raw) - torch.log(1 - torch.tanh(raw) ** 2 + 1e-6)).sum(1)

    def q(networks, observation, action):
        return [network(torch.cat([observation, action], 1))[:, 0] for network in networks]

    for number in range(5):
        torch.manual_seed(number)
        batch = torch.randn(32, sum(widths))
        batch[:, 9] = (batch[:, 9] > 0).float()  # terminal
        collect_dataset.sac_update(args, learner, batch, widths, torch.Generator().manual_seed(number))

        generator = torch.Generator().manual_seed(number)
        noises = [torch.randn(32, 2, generator=generator) for _ in range(2)]
        observation, action, following = batch[:, :3], batch[:, 3:5], batch[:, 6:9]
        reward, terminal = batch[:, 5], batch[:, 9]
        alpha = log_alpha.exp().item()
        with torch.no_grad():
            next_action, next_log_prob = policy(following, noises[0])
            next_q = torch.minimum(*q(targets, following, next_action))
            y = torch.where(terminal > 0, reward, reward + gamma * (next_q - alpha * next_log_prob))
        losses = [sum(((value - y) ** 2).mean() for value in q(critics, observation, action)) / 2]
        adams[0].zero_grad(), losses[0].backward(), adams[0].step()
        new_action, log_prob = policy(observation, noises[1])
        losses.append((alpha * log_prob - torch.minimum(*q(critics, observation, new_action))).mean())
        adams[1].zero_grad(), losses[1].backward(), adams[1].step()
        losses.append(-(log_alpha * (log_prob.detach() + -2)).mean())
        adams[2].zero_grad(), losses[2].backward(), adams[2].step()
        with torch.no_grad():
            for target, critic in zip(targets.parameters(), critics.parameters()):
                target.copy_((1 - tau) * target + tau * critic)

    torch.testing.assert_close(learner.temperature["log_alpha"], log_alpha, rtol=1e-5, atol=1e-6)
    for name in ("actor", "critics", "target_critics"):
        for mine, theirs in zip(getattr(learner, name).parameters(), getattr(oracle, name).parameters()):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-6)


# --- interruption ---
@pytest.mark.parametrize("updates", [1, 75, 130])
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path, one_run, monkeypatch, updates):
    calls, update = [], collect_dataset.sac_update

    def update_then_stop(*arguments):
        calls.append(1)
        if len(calls) > updates:
            raise KeyboardInterrupt
        update(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(collect_dataset, "sac_update", update_then_stop)
        collect(tmp_path, f"{SMALL} --quality {EVERY_QUALITY}")
    assert not list((tmp_path / "data").iterdir())
    torch.manual_seed(99), np.random.seed(99)
    collect_dataset.main(["--resume", str(run_folder_of(tmp_path))])
    files, folder = one_run
    for path in (tmp_path / "data").iterdir():
        assert path.read_bytes() == files[path.name].read_bytes()
    first, second = (torch.load(run_folder_of(f) / "checkpoint.pt", weights_only=True) for f in (folder, tmp_path))
    assert torch.equal(first["rows"], second["rows"]) and first["evaluations"] == second["evaluations"]


def test_a_finished_run_can_be_resumed_for_more(tmp_path, one_run):
    collect(tmp_path, f"{SMALL} --quality medium-replay")
    collect_dataset.main(["--resume", str(run_folder_of(tmp_path)), "--quality", "expert"])
    assert_same(reread(tmp_path / "data/recorder-expert-lite.hdf5"), reread(one_run[0]["recorder-expert-lite.hdf5"]))


def test_medium_that_is_not_reached_is_said_and_can_be_resumed(tmp_path):
    with pytest.raises(SystemExit, match="^collect_dataset.py: medium .1000.0. not reached.*--resume"):
        collect(tmp_path, f"{SMALL} --quality medium --medium-score 1000")
    assert not list((tmp_path / "data").iterdir())
    flags = "--quality medium --medium-score -1000 --total-steps 260".split()
    collect_dataset.main(["--resume", str(run_folder_of(tmp_path)), *flags])
    assert (tmp_path / "data/recorder-medium-lite.hdf5").exists()


# --- a full disk, a kill ---
RANDOM = "--env-id Pendulum-v1 --quality random --rows 400 --output-dir".split()


def run_forked(folder: Path, before: Callable[[], object]) -> tuple[int, str]:
    """The script as a program in a child process, after a call that lays a trap: exit status (or -signal) and stderr.
    A fork, as importing torch anew takes seconds."""
    errors = folder.with_name("stderr")
    child = os.fork()
    if child == 0:
        status = 99
        with open(errors, "w") as stderr:
            sys.argv, sys.stderr = [str(SCRIPT), *RANDOM, str(folder)], stderr
            try:
                before()
                runpy.run_path(str(SCRIPT), run_name="__main__")
                status = 0
            except SystemExit as refusal:  # do with it what Python does
                status = refusal.code if isinstance(refusal.code, int) else 1
                stderr.write("" if isinstance(refusal.code, int) else f"{refusal.code}\n")
            finally:
                stderr.flush()
                os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), errors.read_text()


def die_at_fsync(number: int) -> Callable[[], object]:
    return lambda: setattr(os, "fsync", lambda _: os.kill(os.getpid(), number))


def assert_one_line(text: str) -> None:
    assert text.startswith("collect_dataset.py: ") and text.count("\n") == 1 and text.endswith("\n"), text


def test_kill_in_the_middle_of_writing_leaves_no_file_under_the_final_name(tmp_path):
    folder = tmp_path / "data"
    assert run_forked(folder, die_at_fsync(signal.SIGKILL))[0] == -signal.SIGKILL
    assert [path.name for path in folder.iterdir()] == ["pendulum-random-lite.hdf5.part"]  # it was in the middle
    collect_dataset.main([*RANDOM, str(folder)])
    assert [path.name for path in folder.iterdir()] == ["pendulum-random-lite.hdf5"]
    assert len(reread(folder / "pendulum-random-lite.hdf5")["rewards"]) == 400


def test_termination_in_the_middle_of_writing_leaves_nothing(tmp_path):
    assert run_forked(tmp_path / "data", die_at_fsync(signal.SIGTERM)) == (143, "")
    assert not list((tmp_path / "data").iterdir())


def test_a_file_that_the_system_refuses_leaves_nothing_and_one_line(tmp_path):
    limit = (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    status, errors = run_forked(tmp_path / "data", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    assert status == 1
    assert_one_line(errors)
    assert not list((tmp_path / "data").iterdir())


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_full_disk_leaves_the_earlier_file_alone(tmp_path, monkeypatch, function):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    flags = "--env-id Recorder-v0 --quality random --rows 30"
    (path,) = collect(tmp_path, flags).values()
    before = path.read_bytes()
    monkeypatch.setattr(os, function, full)
    with pytest.raises(SystemExit, match="^collect_dataset.py: .*random-lite.hdf5.*No space left"):
        collect(tmp_path, flags + " --overwrite --seed 5")
    assert [p.name for p in path.parent.iterdir()] == [path.name] and path.read_bytes() == before


# --- Minari ---
@pytest.mark.filterwarnings("ignore:.*is set to None")
def test_from_minari_row_by_row(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari", reason="the minari package is not installed")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    Recorder.diaries.clear()
    environment = gym.make("Recorder-v0", disable_env_checker=True)
    generator, buffers = np.random.default_rng(0), []
    for number in range(30):
        first = environment.reset(seed=number)[0].copy()
        buffer = minari.data_collector.EpisodeBuffer(number, observations=[first], actions=[])
        for _ in range(2 if number == 4 else 100):  # one episode is left unfinished
            buffer.actions.append(generator.uniform([-2, 0], [1, 5]).astype(np.float32))
            observation, reward, terminated, truncated, _ = environment.step(buffer.actions[-1])
            buffer.observations.append(observation.copy())
            buffer.rewards.append(reward)
            buffer.terminations.append(terminated)
            buffer.truncations.append(truncated)
            if terminated or truncated:
                break
        buffers.append(buffer)
    minari.create_dataset_from_buffers("test/recorder/tiny-v3", buffers, environment, description="", requirements=[])
    diary = Recorder.diaries[0]
    collect_dataset.main(["--from-minari", "test/recorder/tiny-v3", "--output-dir", str(tmp_path / "data")])
    path = tmp_path / "data/recorder-tiny-v3-minari.hdf5"
    arrays = reread(path)
    assert arrays.keys() == ALL_KEYS - {"infos/action_log_probs"}
    assert len(arrays["rewards"]) == len(diary)
    assert any(said["terminated"] and said["truncated"] for said in diary)  # then both flags are set
    for row, said in enumerate(diary):
        np.testing.assert_array_equal(arrays["observations"][row], said["observation"].astype(np.float32))
        np.testing.assert_array_equal(arrays["next_observations"][row], said["next_observation"].astype(np.float32))
        np.testing.assert_array_equal(arrays["actions"][row], said["action"])
        assert arrays["rewards"][row] == np.float32(said["reward"])
        assert arrays["terminals"][row] == said["terminated"]
        ended = row + 1 == len(diary) or not np.array_equal(diary[row + 1]["observation"], said["next_observation"])
        assert arrays["timeouts"][row] == (said["truncated"] or (ended and not said["terminated"]))
    with h5py.File(path) as file:
        assert file.attrs["env_id"] == "Recorder-v0" and file.attrs["minari_dataset"] == "test/recorder/tiny-v3"


def test_minari_without_that_dataset(tmp_path, monkeypatch):
    pytest.importorskip("minari", reason="the minari package is not installed")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.setenv("MINARI_REMOTE", "no-such-kind://nowhere")
    with pytest.raises(SystemExit) as refusal:
        collect(tmp_path, "--from-minari test/recorder/none-v0")
    assert_one_line(f"{refusal.value}\n")


def test_minari_missing(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as refusal:
        patch.setitem(sys.modules, "minari", None)
        collect(tmp_path, "--from-minari mujoco/hopper/medium-v0")
    assert_one_line(f"{refusal.value}\n")
    assert "pip install" in str(refusal.value)


# --- what is refused ---
REFUSED = {
    "--rows 0": "--rows",
    "--rows -5": "--rows",
    "--total-steps 0": "--total-steps",
    "--batch-size 0": "--batch-size",
    "--eval-every 0": "--eval-every",
    "--eval-episodes 0": "--eval-episodes",
    "--checkpoint-every 0": "--checkpoint-every",
    "--torch-threads 0": "--torch-threads",
    "--max-episode-steps 0": "--max-episode-steps",
    "--seed -1": "--seed",
    "--learning-starts -1": "--learning-starts",
    "--min-steps 300 --total-steps 200": "--min-steps",
    "--actor-lr -1": "--actor-lr",
    "--critic-lr nan": "--critic-lr",
    "--alpha-lr inf": "--alpha-lr",
    "--gamma 1.1": "--gamma",
    "--tau -0.1": "--tau",
    "--medium-score nan": "--medium-score",
    "--device no-such-device": "--device",
    "--device cuda:77": "--device",
    "--env-id NoSuchEnvironment-v0": "NoSuchEnvironment",
    "--env-id no_such_package:Thing-v0": "no_such_package",
    "--env-id Endless-v0": "--max-episode-steps",
    "--env-id DiscreteActions-v0": "action",
    "--env-id UnboundedActions-v0": "action",
    "--env-id PictureObservations-v0": "observations",
    "--env-id Recorder-v0 --quality medium": "--medium-score",
    "--env-id Recorder-v0 --quality random --store-state": "MuJoCo",
    "--env-id Broken-v0 --quality random --rows 20": "finite",
    "--env-id Broken-v0 --quality expert --total-steps 20": "diverged",
    "--quality random random": "--quality",
    "--quality": "--quality",
    "--policy-path no-such.pt --quality medium": "no-such.pt",
    "--policy-path no-such.pt --quality medium-replay": "--quality",
    "--policy-path no-such.pt --quality medium expert": "--quality",
    "--policy-path no-such.pt --from-minari a/b-v0": "exclude",
    "--from-minari a/b-v0 --store-state": "--store-state",
    "--resume no-such-folder": "no-such-folder",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_refused_in_one_line(tmp_path, flags):
    with pytest.raises(SystemExit) as refusal:
        collect(tmp_path, flags)
    assert isinstance(refusal.value.code, str)  # Python prints it to stderr and exits with status 1
    assert_one_line(f"{refusal.value.code}\n")
    assert REFUSED[flags] in refusal.value.code
    assert not list(tmp_path.rglob("*.hdf5"))


def test_refused_files_and_changes_of_a_run(tmp_path, one_run):
    files, folder = one_run
    cut_short, foreign = tmp_path / "cut.pt", tmp_path / "foreign.pt"
    cut_short.write_bytes(files["medium.pt"].read_bytes()[:-100])
    torch.save({"weights": torch.zeros(3)}, foreign)
    torch.save({"env_id": "Recorder-v0", "actor": {"mean.weight": torch.zeros(3)}}, tmp_path / "wrong.pt")
    resume, policy = f"--resume {run_folder_of(folder)}", "--env-id Recorder-v0 --quality medium --policy-path"
    for flags, part in {
        f"{policy} {cut_short}": "cut.pt",
        f"{policy} {foreign}": "foreign.pt",
        f"{policy} {tmp_path / 'wrong.pt'}": "wrong.pt",
        f"--env-id Pendulum-v1 --quality medium --policy-path {files['medium.pt']}": "Recorder-v0",
        f"{resume} --seed 4": "--seed",
        f"{resume} --env-id Pendulum-v1": "--env-id",
        f"{resume} --actor-lr 0.1": "--actor-lr",
        f"{resume} --store-state": "--store-state",
    }.items():
        with pytest.raises(SystemExit) as refusal:
            collect(tmp_path, flags)
        assert_one_line(f"{refusal.value.code}\n")
        assert part in refusal.value.code


def test_existing_files_are_kept_unless_told(tmp_path):
    flags = "--env-id Recorder-v0 --quality random --rows 20"
    (path,) = collect(tmp_path, flags).values()
    before = path.read_bytes()
    with pytest.raises(SystemExit, match="random-lite.hdf5 exists"):
        collect(tmp_path, flags + " --seed 7")
    assert path.read_bytes() == before
    collect(tmp_path, flags + " --seed 7 --overwrite")
    assert path.read_bytes() != before


def test_as_a_program(tmp_path):
    def run(*flags: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(SCRIPT), "--env-id", "Hopper-v4", "--quality", "random", *flags]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=180)

    (tmp_path / "taken").write_text("a file where the folder should be")
    refused = run("--output-dir", "taken")
    assert refused.returncode == 1
    assert_one_line(refused.stderr)
    accepted = run("--rows", "50")
    assert accepted.returncode == 0 and accepted.stderr == ""  # nothing "out of date", no bar without a terminal
    assert accepted.stdout.startswith("data/hopper-random-lite.hdf5: 50 rows") and accepted.stdout.count("\n") == 1
