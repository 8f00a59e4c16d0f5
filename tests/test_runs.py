"""Whole runs at tiny size: every branch, the run folder, seeds, resuming, presets and refused input."""

import csv
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch

import micro

ROOT = Path(micro.__file__).resolve().parent
TINY = (
    "--env-id hopper-medium-v2 --dynamics-hidden-size 16 --hidden-size 16 --rollout-batch-size 32 --total-updates 20 --eval-every 10 --eval-episodes 2 "
    "--dynamics-max-epochs 2 --dynamics-lr 0.01 --batch-size 32 --num-models 3 --num-elites 2 --torch-threads 1 --device cpu"
).split()
PENDULUM = "--gym-id", "Pendulum-v1", "--env-id", "Pendulum-v1"
TRAIN_COLUMNS = "critic_loss actor_loss q q_max target f f_max alpha entropy data_q value_gap".split()


def write_dataset(path, gym_id, steps, seed=0):
    """Random actions in the environment, in D4RL's format."""
    env, rng = gym.make(gym_id), np.random.default_rng(seed)
    low, high = env.action_space.low, env.action_space.high
    keys = "observations", "actions", "rewards", "next_observations", "terminals", "timeouts"
    columns = {key: [] for key in keys}
    obs, _ = env.reset(seed=seed)
    for _ in range(steps):
        action = rng.uniform(low, high).astype(np.float32)
        next_obs, reward, terminated, truncated, _ = env.step(action)
        for key, value in zip(keys, (obs, action, reward, next_obs, terminated, truncated)):
            columns[key].append(value)
        obs = env.reset()[0] if terminated or truncated else next_obs
    with h5py.File(path, "w") as file:
        for key, values in columns.items():
            file[key] = np.array(values, bool if key in ("terminals", "timeouts") else np.float32)
    return path


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("datasets")
    return dict(
        hopper=write_dataset(folder / "hopper.hdf5", "Hopper-v4", 600),
        other_hopper=write_dataset(folder / "other.hdf5", "Hopper-v4", 200, seed=1),
        pendulum=write_dataset(folder / "pendulum.hdf5", "Pendulum-v1", 300),
    )


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """Nothing outside tmp_path is touched, and a run's signal handlers go with it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(micro, "received_signals", [])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Runs:
    """Starts tiny runs under one folder."""

    def __init__(self, root, datasets):
        self.root, self.datasets = root, datasets

    def flags(self, *extra, dataset="hopper"):
        return [*TINY, "--runs-root", str(self.root), "--dataset-path", str(self.datasets[dataset]), *map(str, extra)]

    def run(self, *extra, dataset="hopper"):
        before = self.folders()
        micro.main(micro.parse_args(self.flags(*extra, dataset=dataset)))
        return self.new(before)

    def interrupted(self, *extra):
        """A run that is expected to stop with SystemExit: its folder and the exit status."""
        before = self.folders()
        with pytest.raises(SystemExit) as error:
            micro.main(micro.parse_args(self.flags(*extra)))
        micro.received_signals.clear()
        return self.new(before), error.value.code

    def folders(self):
        return set(self.root.iterdir()) if self.root.exists() else set()

    def new(self, before):
        (folder,) = self.folders() - before
        return folder


def resume(folder, *extra):
    micro.main(micro.parse_args(["--resume", str(folder), *map(str, extra)]))
    return folder


@pytest.fixture
def runs(tmp_path, datasets):
    return Runs(tmp_path / "runs", datasets)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, datasets):
    """One finished run with 12 evaluations, to look at and not to change."""
    runs = Runs(tmp_path_factory.mktemp("finished") / "runs", datasets)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    folder = runs.run("--total-updates", 24, "--eval-every", 2)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return folder


def progress(folder):
    with open(folder / "progress.csv") as file:
        return list(csv.DictReader(file))


def column(folder, name):
    return [float(row[name]) for row in progress(folder)]


def scalars(folder):
    """TensorBoard's curves: name -> [(step, value), ...]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance=dict(scalars=0))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def one_line(error):
    """What a user sees: a message (so that Python prints it and exits with 1), on one line."""
    assert isinstance(error.value.code, str)
    assert "\n" not in error.value.code
    return error.value.code


def command_line(*arguments, **options):
    """`python micro.py ...` as a user runs it."""
    command = [sys.executable, str(ROOT / "micro.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


# --- every branch runs ------------------------------------------------------------------------------------------------
BRANCHES = {
    "micro": [],
    "eq8": ["--penalty", "eq8"],
    "mobile": ["--penalty", "mobile"],
    "none": ["--penalty", "none"],
    "automatic alpha": ["--auto-alpha"],
    "another fixed alpha": ["--no-auto-alpha", "--alpha", 0.3],
    "no entropy": ["--no-auto-alpha", "--alpha", 0],
    "deterministic backup": ["--deterministic-backup"],
    "no clamp": ["--no-clamp-target", "--beta", 50],
    "data only": ["--model-ratio", 0],
    "half and half": ["--model-ratio", 0.5],
    "model only": ["--model-ratio", 1],
    "beta 0": ["--beta", 0],
    "one draw": ["--penalty-draws", 1],
    "two draws": ["--penalty-draws", 2],
    "two draws, own noise": ["--penalty-draws", 2, "--no-common-noise"],
    "three draws": ["--penalty-draws", 3],
    "three draws, own noise": ["--penalty-draws", 3, "--no-common-noise"],
    "one critic": ["--num-critics", 1],
    "three critics": ["--num-critics", 3],
    "one elite": ["--num-elites", 1],
    "all are elites": ["--num-elites", 3],
    "one model": ["--num-models", 1, "--num-elites", 1],
    "one step": ["--rollout-length", 1],
    "two steps": ["--rollout-length", 2],
    "often new rollouts": ["--rollout-every", 3],
    "other rates": ["--actor-lr", 1e-3, "--critic-lr", 1e-3, "--dynamics-lr", 1e-4, "--gamma", 0.9, "--tau", 0.1],
    "mobile with one elite": ["--penalty", "mobile", "--num-elites", 1],
    "eq8, automatic alpha": ["--penalty", "eq8", "--auto-alpha", "--alpha-lr", 0.01],
    "an evaluation that is not a multiple": ["--eval-every", 7],
    "more epochs": ["--dynamics-max-epochs", 4],
    "batch of one": ["--batch-size", 1],
}


@pytest.fixture(scope="module")
def plain_progress(tmp_path_factory, datasets):
    runs = Runs(tmp_path_factory.mktemp("plain") / "runs", datasets)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    folder = runs.run()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return (folder / "progress.csv").read_bytes()


@pytest.mark.parametrize("branch", BRANCHES)
def test_every_branch_runs_and_matters(branch, runs, plain_progress):
    folder = runs.run(*BRANCHES[branch])
    rows = progress(folder)
    updates = [7, 14, 20] if "--eval-every" in BRANCHES[branch] else [10, 20]
    assert [int(row["update"]) for row in rows] == updates
    assert all(math.isfinite(float(value)) for row in rows for value in row.values())
    assert ((folder / "progress.csv").read_bytes() == plain_progress) == (branch == "micro")  # no flag is ignored


def test_what_a_branch_does_shows_in_the_curves(runs):
    assert column(runs.run("--penalty", "none"), "f") == [0, 0]
    assert column(runs.run("--model-ratio", 0), "f") == [0, 0]
    assert column(runs.run("--num-elites", 1), "f") == [0, 0]
    assert min(column(runs.run("--penalty", "micro"), "f")) > 0
    assert column(runs.run("--no-auto-alpha", "--alpha", 0.3), "alpha") == pytest.approx([0.3, 0.3])
    automatic = column(runs.run("--auto-alpha", "--alpha-lr", 0.01), "alpha")
    assert 1 > automatic[0] > automatic[1]  # starts at 1, and the policy's entropy is above the target's
    clamped, free = (column(runs.run("--beta", 1e5, flag), "target") for flag in ("--clamp-target", "--no-clamp-target"))
    assert min(clamped) >= 0 > max(free)
    short = progress(runs.run("--rollout-length", 1))
    assert {row["rollout_rows"] for row in short} == {"32"}


def test_patience_ends_dynamics_training(runs):
    """At a rate of 0 nothing improves after the first epoch, and 3 more of those are enough."""
    flags = "--dynamics-lr", 0, "--dynamics-patience", 3, "--dynamics-max-epochs", 30
    assert torch.load(runs.run(*flags) / "dynamics.pt", weights_only=True)["epochs"] == 4


def test_another_environment(runs):
    """Pendulum: 200-step episodes, actions between -2 and 2, no termination rule, no reference returns."""
    folder = runs.run(*PENDULUM, dataset="pendulum")
    assert folder.name.startswith("Pendulum-v1__micro__1__")
    assert column(folder, "score") == pytest.approx(column(folder, "return_mean"), rel=1e-12)
    assert column(folder, "rollout_ended") == [0, 0]
    assert column(folder, "rollout_rows") == [160, 160]
    assert max(column(folder, "score")) < 0
    assert progress(resume(folder, "--total-updates", 30))[-1]["update"] == "30"
    assert len(micro.main(micro.parse_args(["--eval-only", str(folder)]))["returns"]) == 2


def test_a_trained_ensemble_serves_another_run(runs, capsys):
    first = runs.run()
    capsys.readouterr()
    again = runs.run("--dynamics-path", first / "dynamics.pt")
    assert "dynamics epoch" not in capsys.readouterr().out
    assert (again / "progress.csv").read_bytes() == (first / "progress.csv").read_bytes()
    saved, reused = (torch.load(folder / "dynamics.pt", weights_only=True) for folder in (first, again))
    assert all(torch.equal(saved["ensemble"][name], reused["ensemble"][name]) for name in saved["ensemble"])
    assert runs.run("--dynamics-path", first / "dynamics.pt", "--seed", 2) not in (first, again)


def test_an_ensemble_that_does_not_fit(runs, tmp_path):
    other = runs.run(*PENDULUM, dataset="pendulum")
    (tmp_path / "torn.pt").write_bytes((other / "dynamics.pt").read_bytes()[:500])
    for path in (other / "dynamics.pt", other / "args.json", tmp_path / "torn.pt", tmp_path / "absent.pt"):
        message = runs.interrupted("--dynamics-path", path)[1]
        assert isinstance(message, str) and "\n" not in message
    fits = runs.run()
    assert "num-elites" in runs.interrupted("--dynamics-path", fits / "dynamics.pt", "--num-models", 7, "--num-elites", 5)[1]


@pytest.mark.parametrize("task, own", [("hopper-medium-v2", True), ("hopper-expert-v2", False)])
def test_only_a_tasks_own_file_counts_as_its_d4rl_data(task, own, runs, datasets, monkeypatch):
    """Another task's file gives no score of this task."""
    monkeypatch.setitem(micro.D4RL_SHA256, task, micro.sha256_of(datasets["hopper"]))
    described = json.loads((runs.run("--env-id", "hopper-medium-v2") / "args.json").read_text())
    assert described["dataset"]["is_d4rl"] is own


def test_a_runs_root_that_points_nowhere_is_refused(tmp_path):
    """A dangling link exists and cannot be made: no reason to try every second of the future."""
    (tmp_path / "runs").symlink_to(tmp_path / "absent")
    with pytest.raises(SystemExit, match="cannot make a run folder in"):
        micro.make_run_dir(micro.Args(runs_root=str(tmp_path / "runs")), "micro")


@pytest.mark.parametrize("number", ["_", "1__0", "many"])
def test_a_number_of_updates_that_is_none(number, capsys):
    with pytest.raises(SystemExit) as error:
        micro.parse_args(["--total-updates", number])
    assert error.value.code == 2 and number in capsys.readouterr().err


def test_a_run_is_not_cut_short_nor_resumed_and_evaluated_at_once(finished, tmp_path):
    run_dir = shutil.copytree(finished, tmp_path / "copy")
    with pytest.raises(SystemExit, match="has taken 24 updates already, more than --total-updates 20"):
        resume(run_dir, "--total-updates", 20)
    with pytest.raises(SystemExit, match="give one of the two"):
        resume(run_dir, "--eval-only", finished)
    assert (run_dir / "result.json").read_bytes() == (finished / "result.json").read_bytes()


def test_a_folder_in_which_nothing_can_be_written(tmp_path):
    (tmp_path / "lock").mkdir()
    with pytest.raises(SystemExit, match="cannot write in"), micro.locked(tmp_path):
        pytest.fail("it is not locked")


@pytest.mark.filterwarnings("ignore")
def test_compile_passes_the_update_through_torch_compile(runs, plain_progress, monkeypatch):
    """A whole run, with the backend that only captures."""
    compiled = []
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, *_, **__: compiled.append(f) or real(f, backend="eager"))
    folder = runs.run("--compile")
    assert compiled
    expected = plain_progress.decode().splitlines()[-1].split(",")
    assert [float(x) for x in progress(folder)[-1].values()] == pytest.approx([float(x) for x in expected], rel=1e-6)


def test_an_update_leaves_the_targets_outside_the_graph():
    """Target critics that were part of the graph would keep every update's history: memory that grows to the end."""
    args = micro.Args(hidden_size=8, batch_size=8, num_models=2, num_elites=2)
    agent, ensemble = micro.Agent(3, 1, args, torch.device("cpu")), micro.Ensemble(2, 3, 1, 8).requires_grad_(False)
    rng = torch.Generator().manual_seed(0)
    for _ in range(2):
        batch = micro.unpack(torch.randn(8, 9, generator=rng), 3, 1)
        micro.update(agent, ensemble, batch, micro.draw_noise(args, 7, 3, 1, rng), args)
    assert all(target.grad_fn is None and not target.requires_grad for target in agent.target_critics.parameters())


# --- the loop ---------------------------------------------------------------------------------------------------------
def without_training(monkeypatch, look):
    """Replace the update by one that only looks at (agent, batch): thousands of them take a second."""

    def look_only(agent, ensemble, batch, noise, args):
        look(agent, batch)
        return torch.zeros(len(micro.METRICS))

    monkeypatch.setattr(micro, "update", look_only)


def test_the_schedule(runs, monkeypatch):
    """SPEC 5: rollouts at updates 0, 1000, 2000 ..., and a cosine on the actor's rate alone, stepped at the same times."""
    events, actor_rates, critic_rates = [], [], []
    real = micro.rollout
    monkeypatch.setattr(micro, "rollout", lambda *a, **k: events.append(len(actor_rates)) or real(*a, **k))

    def look(agent, batch):
        actor_rates.append(agent.actor_optimizer.param_groups[0]["lr"])
        critic_rates.append(agent.critic_optimizer.param_groups[0]["lr"])

    without_training(monkeypatch, look)
    runs.run("--total-updates", 3000, "--eval-every", 3000)
    assert events == [0, 1000, 2000]
    expected = [1e-4 * (1 + math.cos(math.pi * (update // 1000) / 3)) / 2 for update in range(3000)]
    assert actor_rates == pytest.approx(expected)
    assert set(critic_rates) == {3e-4}


@pytest.mark.parametrize("ratio, offline", [(0.95, 1), (0.5, 16), (0.3, 22), (0, 32), (1, 0)])
def test_offline_rows_come_first(ratio, offline, runs, datasets, monkeypatch):
    """int(32 (1 - model_ratio)) rows of the batch are the dataset's, and the rest are the model's."""
    with h5py.File(datasets["hopper"]) as file:
        pairs = zip(file["observations"][()], file["next_observations"][()])
        known = {(tuple(obs), tuple(next_obs)) for obs, next_obs in pairs}
    batches = []
    without_training(monkeypatch, lambda agent, batch: batches.append(batch))
    runs.run("--model-ratio", ratio)
    for obs, act, reward, next_obs, done in batches:
        from_data = [(tuple(a), tuple(b)) in known for a, b in zip(obs.numpy(), next_obs.numpy())]
        assert from_data == [True] * offline + [False] * (32 - offline)


def test_the_model_buffer_holds_five_rollouts(runs, monkeypatch):
    sizes = []
    real = micro.RingBuffer
    monkeypatch.setattr(micro, "RingBuffer", lambda capacity, *rest: sizes.append(capacity) or real(capacity, *rest))
    without_training(monkeypatch, lambda agent, batch: None)
    runs.run("--rollout-length", 4)
    assert sizes == [32 * 4 * 5]


# --- the run folder ---------------------------------------------------------------------------------------------------
def test_the_folder_and_its_files(finished):
    assert re.fullmatch(r"hopper-medium-v2__micro__1__\d+", finished.name)
    names = {path.name for path in finished.iterdir()}
    events = {name for name in names if name.startswith("events.out.tfevents")}
    assert len(events) == 1
    assert names - events == {
        "args.json", "progress.csv", "result.json", "policy.pt", "dynamics.pt", "checkpoint.pt", "checkpoint.previous.pt",
        "lock",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["micro", "mobile", "eq8", "none"])
def test_the_folder_names_the_algorithm_and_the_seed(kind, tmp_path):
    args = micro.parse_args(["--env-id", "hopper-medium-v2", "--penalty", kind, "--seed", "7", "--runs-root", str(tmp_path / "deep" / "runs")])
    folder = micro.make_run_dir(args, kind)
    assert folder.is_dir() and folder.parent == tmp_path / "deep" / "runs"
    assert re.fullmatch(rf"hopper-medium-v2__{kind}__7__\d+", folder.name)


def test_runs_that_start_in_the_same_second_get_different_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1.7e9)
    args = micro.Args(runs_root=str(tmp_path / "runs"))
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: micro.make_run_dir(args, "micro"), range(16)))
    assert len(set(folders)) == 16 and all(folder.is_dir() for folder in folders)


def check_dataset(described, path):
    assert described["file"] == path.name
    assert described["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert described["is_d4rl"] is False


def test_args_json(finished, datasets):
    described = json.loads((finished / "args.json").read_text())
    assert described["args"]["total_updates"] == 24 and described["args"]["env_id"] == "hopper-medium-v2"
    assert micro.Args(**described["args"]).beta == 1.0
    check_dataset(described["dataset"], datasets["hopper"])
    machine = described["machine"]
    assert machine["python"] == sys.version.split()[0]
    for module in (torch, gym):
        assert machine[module.__name__] == str(module.__version__)
    assert machine["mujoco"] and machine["device"].startswith("cpu")


def test_progress_csv(finished):
    rows = progress(finished)
    assert [int(row["update"]) for row in rows] == list(range(2, 25, 2))
    assert set(TRAIN_COLUMNS) | {"score", "score_std", "return_mean", "return_std"} <= set(rows[0])
    for name in rows[0]:  # no wall-clock: the file is a function of the args
        assert not any(word in name for word in ("second", "time", "speed", "minute"))


def test_result_json(finished, datasets):
    result = json.loads((finished / "result.json").read_text())
    evaluations = result["evaluations"]
    assert [row["update"] for row in evaluations] == list(range(2, 25, 2))
    assert all(len(row["returns"]) == 2 for row in evaluations)
    scores = [100 * (sum(row["returns"]) / 2 + 20.272305) / (3234.3 + 20.272305) for row in evaluations]
    assert result["last_5_mean"] == pytest.approx(sum(scores[-5:]) / 5)
    assert result["last_10_mean"] == pytest.approx(sum(scores[-10:]) / 10)
    assert result["last_5_mean"] != result["last_10_mean"]
    assert column(finished, "score") == pytest.approx(scores)
    spreads = [100 * np.std(row["returns"]) / (3234.3 + 20.272305) for row in evaluations]
    assert column(finished, "score_std") == pytest.approx(spreads)
    assert {"dynamics", "rollouts", "updates", "evaluation"} <= set(result["seconds"])
    assert all(seconds > 0 for seconds in result["seconds"].values())
    check_dataset(result["dataset"], datasets["hopper"])


def test_tensor_files_hold_only_data(finished):
    for name in ("policy.pt", "dynamics.pt", "checkpoint.pt"):
        assert isinstance(torch.load(finished / name, weights_only=True), dict)


def test_policy_pt(finished, datasets):
    """What the README's five lines and eval_robust.py rely on."""
    policy = torch.load(finished / "policy.pt", weights_only=True)
    assert (finished / "policy.pt").stat().st_size < 2_000_000
    actor, critics = micro.Actor(11, 3, 16), micro.Critics(2, 11, 3, 16)
    actor.load_state_dict(policy["actor"])
    critics.load_state_dict(policy["critics"])
    assert actor.mode(torch.zeros(1, 11)).shape == (1, 3)
    with h5py.File(datasets["hopper"]) as file:
        keep = ~file["timeouts"][()]
        observations = file["observations"][()][keep].astype(np.float64)
    np.testing.assert_allclose(policy["obs_mean"], observations.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(policy["obs_std"], observations.std(0), rtol=1e-3, atol=1e-5)
    assert policy["args"]["env_id"] == "hopper-medium-v2"


def test_a_full_size_policy_is_under_2_mb(tmp_path):
    """Walker2d's networks are the largest of the three."""
    actor, critics = micro.Actor(17, 6), micro.Critics(2, 17, 6)
    micro.write_file(tmp_path / "policy.pt", dict(actor=actor.state_dict(), critics=critics.state_dict()))
    assert (tmp_path / "policy.pt").stat().st_size < 1_950_000


def test_tensorboard(finished):
    curves = scalars(finished)
    expected = {"train/" + name for name in TRAIN_COLUMNS if name not in ("data_q", "value_gap")}
    expected |= {"train/rollout_rows", "train/rollout_reward", "train/rollout_ended", "train/updates_per_second"}
    expected |= {"dynamics/loss", "dynamics/max_logvar", "dynamics/min_logvar"}
    expected |= {f"dynamics/holdout_error_{member}" for member in range(3)}
    expected |= {f"evaluation/{name}" for name in ("score", "score_std", "return_mean", "return_std", "value_gap")}
    assert expected <= set(curves)
    assert [step for step, _ in curves["dynamics/loss"]] == [1, 2]
    assert [step for step, _ in curves["train/q"]] == list(range(2, 25, 2))
    assert [value for _, value in curves["evaluation/score"]] == pytest.approx(column(finished, "score"), rel=1e-5)
    assert [value for _, value in curves["train/f"]] == pytest.approx(column(finished, "f"), rel=1e-5)


def test_eval_only(finished, capsys):
    """The finished run's policy again, with more episodes; nothing in the folder changes."""
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    result = micro.main(micro.parse_args(["--eval-only", str(finished), "--eval-episodes", "3"]))
    assert len(result["returns"]) == 3 and "score" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in finished.iterdir()} == before
    assert list(Path.cwd().iterdir()) == []  # and no new run


def test_eval_only_of_a_run_without_a_policy(finished, tmp_path):
    folder = tmp_path / "unfinished"
    folder.mkdir()
    shutil.copy(finished / "args.json", folder)
    with pytest.raises(SystemExit) as error:
        micro.main(micro.parse_args(["--eval-only", str(folder)]))
    assert "policy.pt" in one_line(error)


# --- seeds ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("flags", [[], ["--penalty", "eq8", "--auto-alpha"]], ids=["micro", "eq8"])
def test_the_same_seed_gives_the_same_run(flags, runs):
    first = runs.run(*flags)
    torch.manual_seed(123)  # whatever happened before in this process
    np.random.seed(123)
    again, other = runs.run(*flags), runs.run(*flags, "--seed", 2)
    assert (first / "progress.csv").read_bytes() == (again / "progress.csv").read_bytes()
    for name in TRAIN_COLUMNS:
        if name not in ("alpha", "f_max"):
            assert column(first, name) != column(other, name), name


def test_the_seed_decides_which_rows_are_drawn(runs, monkeypatch):
    """Not only how the networks begin: the first batches of data of three runs, of which two have the same seed."""
    batches = []
    without_training(monkeypatch, lambda agent, batch: batches.append(batch[0]))
    for seed in (1, 1, 2):
        runs.run("--seed", seed, "--model-ratio", 0)
    first, again, other = batches[0], batches[20], batches[40]
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_evaluation_changes_nothing_in_training(runs):
    few, many = runs.run("--eval-episodes", 1), runs.run("--eval-episodes", 5)
    for name in TRAIN_COLUMNS:
        assert column(few, name) == column(many, name), name
    rare = runs.run("--eval-every", 20)
    policies = [torch.load(folder / "policy.pt", weights_only=True)["actor"] for folder in (few, many, rare)]
    for other in policies[1:]:
        assert all(torch.equal(policies[0][name], other[name]) for name in other)


def test_logging_and_checkpoints_change_nothing_in_training(runs):
    often, never = runs.run("--checkpoint-every", 1), runs.run("--checkpoint-every", 1000)
    assert (often / "progress.csv").read_bytes() == (never / "progress.csv").read_bytes()


# --- interruption and resuming ----------------------------------------------------------------------------------------
def stop_at(monkeypatch, name, call, action):
    """Do `action` inside the n-th call of one of micro's functions."""
    real, calls = getattr(micro, name), []

    def replacement(*arguments, **options):
        calls.append(name)
        if len(calls) == call:
            action()
        return real(*arguments, **options)

    monkeypatch.setattr(micro, name, replacement)


def crash():
    raise RuntimeError("the machine went down")


terminate = partial(os.kill, os.getpid(), signal.SIGTERM)
LONGER = ["--total-updates", 40, "--rollout-every", 7, "--dynamics-max-epochs", 4, "--auto-alpha"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, datasets):
    runs = Runs(tmp_path_factory.mktemp("uninterrupted") / "runs", datasets)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    folder = runs.run(*LONGER)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return folder


def assert_same_run(folder, expected):
    assert (folder / "progress.csv").read_bytes() == (expected / "progress.csv").read_bytes()
    for name in ("policy.pt", "dynamics.pt"):
        parts = [torch.load(path / name, weights_only=True) for path in (folder, expected)]
        for key in ("actor", "critics", "ensemble"):
            if key in parts[0]:
                assert all(torch.equal(parts[0][key][k], parts[1][key][k]) for k in parts[1][key]), (name, key)
    ours, theirs = (json.loads((path / "result.json").read_text()) for path in (folder, expected))
    assert ours["evaluations"] == theirs["evaluations"] and ours["last_10_mean"] == theirs["last_10_mean"]


@pytest.mark.parametrize("update", [1, 5, 10, 23, 39])
def test_terminated_in_an_update_and_resumed(update, runs, uninterrupted, monkeypatch):
    """SIGTERM asks for a checkpoint and an end with status 143; going on gives the run that was never interrupted."""
    with monkeypatch.context() as patch:
        stop_at(patch, "update", update, terminate)
        folder, status = runs.interrupted(*LONGER)
    assert status == 128 + signal.SIGTERM == 143
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["update"] == update
    assert not (folder / "result.json").exists()
    assert_same_run(resume(folder), uninterrupted)
    assert runs.folders() == {folder}


@pytest.mark.parametrize("update", [11, 20, 21, 38])
def test_crashed_between_checkpoints_and_resumed(update, runs, uninterrupted, monkeypatch):
    """Power cut: the run goes on from the last checkpoint, and evaluations after it are made again, not twice."""
    with monkeypatch.context() as patch:
        stop_at(patch, "update", update, crash)
        with pytest.raises(RuntimeError):
            runs.run(*LONGER, "--checkpoint-every", 8)
    (folder,) = runs.folders()
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["update"] == (update - 1) // 8 * 8
    assert_same_run(resume(folder), uninterrupted)


def test_interrupted_twice(runs, uninterrupted, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, "update", 13, terminate)
        folder, _ = runs.interrupted(*LONGER)
    with monkeypatch.context() as patch:
        stop_at(patch, "update", 4, terminate)
        with pytest.raises(SystemExit):
            resume(folder)
    micro.received_signals.clear()
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["update"] == 17
    assert_same_run(resume(folder), uninterrupted)


@pytest.mark.parametrize("call", [1, 3, 6, 8])
def test_terminated_in_dynamics_training_and_resumed(call, runs, uninterrupted, monkeypatch, capsys):
    """480 rows are two batches an epoch: the epoch is finished, kept, and not trained again."""
    with monkeypatch.context() as patch:
        stop_at(patch, "dynamics_loss", call, terminate)
        folder, status = runs.interrupted(*LONGER)
    assert status == 143
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["dynamics"]["epoch"] == (call + 1) // 2
    capsys.readouterr()
    assert_same_run(resume(folder), uninterrupted)
    assert capsys.readouterr().out.count("dynamics epoch") == 4 - (call + 1) // 2


@pytest.mark.parametrize("call", [1, 4, 7])
def test_crashed_in_dynamics_training_and_resumed(call, runs, uninterrupted, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, "dynamics_loss", call, crash)
        with pytest.raises(RuntimeError):
            runs.run(*LONGER)
    (folder,) = runs.folders()
    assert_same_run(resume(folder), uninterrupted)


def test_crashed_between_dynamics_and_the_first_checkpoint(runs, uninterrupted, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, "rollout", 1, crash)
        with pytest.raises(RuntimeError):
            runs.run(*LONGER)
    (folder,) = runs.folders()
    assert_same_run(resume(folder), uninterrupted)


@pytest.mark.parametrize("name, call", [("dynamics_loss", 3), ("update", 2), ("update", 23)])
def test_curves_survive_an_interruption(name, call, runs, uninterrupted, monkeypatch):
    """TensorBoard shows each step once, those before the interruption too."""
    with monkeypatch.context() as patch:
        stop_at(patch, name, call, terminate)
        folder, _ = runs.interrupted(*LONGER)
    curves, expected = scalars(resume(folder)), scalars(uninterrupted)
    for tag in ("dynamics/loss", "train/q", "evaluation/score"):
        assert curves[tag] == expected[tag], tag


def test_resume_goes_on_further(runs, uninterrupted):
    """A finished run may be made longer; --total-updates is the only thing about the training that may change."""
    folder = runs.run(*LONGER, "--total-updates", 20)
    assert_same_run(resume(folder, "--total-updates", 40), uninterrupted)
    assert json.loads((folder / "args.json").read_text())["args"]["total_updates"] == 40


def test_averages_after_going_on_further_are_averages(runs):
    """The last evaluation of 15 updates falls between two of the longer run. A fixed alpha's mean is that alpha."""
    folder = runs.run("--total-updates", 15, "--no-auto-alpha", "--alpha", 0.3)
    resume(folder, "--total-updates", 30)
    assert [int(row["update"]) for row in progress(folder)] == [10, 15, 20, 30]
    assert column(folder, "alpha") == pytest.approx([0.3] * 4)


def test_resume_of_a_finished_run_changes_nothing(runs):
    folder = runs.run()
    before = (folder / "progress.csv").read_bytes(), (folder / "policy.pt").stat().st_size
    resume(folder)
    assert ((folder / "progress.csv").read_bytes(), (folder / "policy.pt").stat().st_size) == before


@pytest.mark.parametrize(
    "flags",
    [["--beta", 0.7], ["--seed", 2], ["--penalty", "mobile"], ["--batch-size", 16], ["--env-id", "walker2d-medium-v2"],
     ["--auto-alpha"], ["--gamma", 0.9], ["--hidden-size", 8], ["--eval-every", 5]],
)  # fmt: skip
def test_resume_with_another_training_is_refused_by_name(flags, finished):
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    with pytest.raises(SystemExit) as error:
        resume(finished, *flags)
    assert flags[0].strip("-").replace("-", "_") in one_line(error).replace("-", "_")
    assert {path.name: path.read_bytes() for path in finished.iterdir()} == before


def test_resume_with_another_dataset_is_refused(finished, datasets):
    before = (finished / "args.json").read_bytes()
    with pytest.raises(SystemExit) as error:
        resume(finished, "--dataset-path", datasets["other_hopper"])
    assert "dataset" in one_line(error) and "other.hdf5" in one_line(error)
    assert (finished / "args.json").read_bytes() == before


def test_resume_with_the_dataset_elsewhere_is_accepted(runs, datasets, tmp_path):
    folder = runs.run()
    moved = shutil.copy(datasets["hopper"], tmp_path / "moved.hdf5")
    resume(folder, "--dataset-path", moved, "--total-updates", 30)
    assert progress(folder)[-1]["update"] == "30"


def wait_for(condition, process):
    end = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_signals_to_a_process(number, runs, datasets, monkeypatch):
    """As a cluster or Ctrl-C does it: SIGTERM in an update, SIGINT in dynamics training."""
    in_updates = number == signal.SIGTERM
    longer = ["--total-updates", 1_000_000] if in_updates else ["--dynamics-max-epochs", 10**6, "--dynamics-patience", 10**6]
    command = [sys.executable, str(ROOT / "micro.py"), *runs.flags(*longer, "--eval-every", 10, "--checkpoint-every", 5)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: list(runs.root.glob("*/policy.pt" if in_updates else "*/checkpoint.pt")), process)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number  # 143 and 130
    assert "--resume" in output and "Traceback" not in errors
    (folder,) = runs.folders()
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    if in_updates:
        before = progress(folder) if (folder / "progress.csv").exists() else []
        resume(folder, "--total-updates", checkpoint["update"] + 20)
        assert progress(folder)[: len(before)] == before
        assert int(progress(folder)[-1]["update"]) == checkpoint["update"] + 20
    else:
        epochs = checkpoint["dynamics"]["epoch"]
        assert [step for step, _ in scalars(folder)["dynamics/loss"]] == list(range(1, epochs + 1))  # all on the disk


# --- the command line -------------------------------------------------------------------------------------------------
def test_a_run_in_a_process(runs, plain_progress):
    run = command_line(*runs.flags())
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    (folder,) = runs.folders()
    closing = run.stdout.splitlines()[-3:]
    assert re.search(r"score -?[\d.]+ ± [\d.]+ .*last 5", closing[0])
    assert all(phase in closing[1] for phase in ("dynamics", "rollouts", "updates", "evaluation"))
    assert str(folder) in closing[2]
    assert (folder / "progress.csv").read_bytes() == plain_progress  # the same in another process


REFUSED = {
    "unknown task": (["--env-id", "hopper-huge-v2"], ["hopper-huge-v2", "hopper-medium-v2", "walker2d-expert-v2"]),
    "task of another version": (["--env-id", "hopper-medium-v0"], ["hopper-medium-v0", "hopper-medium-v2"]),
    "negative beta": (["--beta", "-1"], ["--beta"]),
    "beta nan": (["--beta", "nan"], ["--beta"]),
    "beta inf": (["--beta", "inf"], ["--beta"]),
    "model ratio above 1": (["--model-ratio", "1.5"], ["--model-ratio"]),
    "model ratio below 0": (["--model-ratio", "-0.1"], ["--model-ratio"]),
    "gamma above 1": (["--gamma", "1.01"], ["--gamma"]),
    "tau above 1": (["--tau", "2"], ["--tau"]),
    "negative rate": (["--actor-lr", "-1e-4"], ["--actor-lr"]),
    "rollout length 0": (["--rollout-length", "0"], ["--rollout-length"]),
    "rollout batch 0": (["--rollout-batch-size", "0"], ["--rollout-batch-size"]),
    "rollout every 0": (["--rollout-every", "0"], ["--rollout-every"]),
    "batch 0": (["--batch-size", "0"], ["--batch-size"]),
    "batch -5": (["--batch-size", "-5"], ["--batch-size"]),
    "no updates": (["--total-updates", "0"], ["--total-updates"]),
    "no models": (["--num-models", "0"], ["num"]),
    "no elites": (["--num-elites", "0"], ["--num-elites"]),
    "no critics": (["--num-critics", "0"], ["--num-critics"]),
    "draws below 0": (["--penalty-draws", "-1"], ["--penalty-draws"]),
    "no episodes": (["--eval-episodes", "0"], ["--eval-episodes"]),
    "evaluations 0 apart": (["--eval-every", "0"], ["--eval-every"]),
    "checkpoints 0 apart": (["--checkpoint-every", "0"], ["--checkpoint-every"]),
    "no threads": (["--torch-threads", "0"], ["--torch-threads"]),
    "no patience": (["--dynamics-patience", "0"], ["--dynamics-patience"]),
    "no epochs": (["--dynamics-max-epochs", "0"], ["--dynamics-max-epochs"]),
    "negative seed": (["--seed", "-1"], ["--seed"]),
    "more elites than models": (["--num-elites", "8"], ["--num-elites 8", "--num-models 7"]),
    "fewer models than elites": (["--num-models", "3"], ["--num-elites 5", "--num-models 3"]),
    "gym id without data": (["--gym-id", "Pendulum-v1"], ["--dataset-path"]),
    "a path for a name": (["--env-id", "../x", "--gym-id", "Pendulum-v1", "--dataset-path", "x"], ["--env-id"]),
    "resume nothing": (["--resume", "no/such/run"], ["no/such/run"]),
    "evaluate nothing": (["--eval-only", "no/such/run"], ["no/such/run"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_arguments(case):
    argv, words = REFUSED[case]
    with pytest.raises(SystemExit) as error:
        micro.parse_args(argv)
    for word in words:
        assert word in one_line(error)


def test_a_run_folder_of_another_script(tmp_path):
    for content in ("", "{}", "[]", '{"args": {"no_such_flag": 1}}', '{"args": 3}'):
        (tmp_path / "args.json").write_text(content)
        with pytest.raises(SystemExit) as error:
            micro.parse_args(["--resume", str(tmp_path)])
        assert str(tmp_path) in one_line(error)


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_device_that_is_not_there(device, runs):
    if getattr(torch, device).is_available():
        pytest.skip(f"{device} is there")
    with pytest.raises(SystemExit) as error:
        micro.main(micro.parse_args(runs.flags("--device", device)))
    assert f"--device {device}" in one_line(error) and "cpu" in one_line(error)
    assert runs.folders() == set()


def test_track_without_wandb(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises ImportError
    with pytest.raises(SystemExit) as error:
        micro.main(micro.parse_args(runs.flags("--track")))
    assert "wandb" in one_line(error)


def test_a_bad_dataset_leaves_no_run_folder(runs, tmp_path):
    for path in (datasets_text(tmp_path), tmp_path / "absent.hdf5"):
        with pytest.raises(SystemExit) as error:
            micro.main(micro.parse_args(runs.flags("--dataset-path", path)))
        assert path.name in one_line(error)
    assert runs.folders() == set()


def datasets_text(tmp_path):
    (tmp_path / "text.hdf5").write_text("not HDF5 at all")
    return tmp_path / "text.hdf5"


def test_a_run_folder_that_cannot_be_made(runs, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as error:
        micro.main(micro.parse_args(runs.flags("--runs-root", tmp_path / "file")))
    assert "run folder" in one_line(error)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_very_small_dataset_runs_or_is_refused_in_one_line(rows, runs, tmp_path):
    write_dataset(tmp_path / "small.hdf5", "Hopper-v4", rows)
    try:
        runs.run("--dataset-path", tmp_path / "small.hdf5")
    except SystemExit as error:
        assert isinstance(error.code, str) and "\n" not in error.code


@pytest.mark.parametrize(
    "argv, word",
    [(["--env-id", "nonsense"], "hopper-medium-replay-v2"), (["--device", "cuda"], "--device cuda")],
)
def test_a_refusal_in_a_process(argv, word, datasets):
    """One line on stderr, exit status 1, no traceback."""
    if argv[-1] == "cuda" and torch.cuda.is_available():
        pytest.skip("cuda is there")
    run = command_line(*argv, "--dataset-path", datasets["hopper"])
    assert run.returncode == 1 and run.stdout == ""
    assert len(run.stderr.splitlines()) == 1 and word in run.stderr


# --- presets ----------------------------------------------------------------------------------------------------------
# task: rollout_length, beta, model_ratio, alpha (None: automatic), entropy in the target, patience, max epochs
MICRO_TABLE = {
    "halfcheetah-medium": (5, 0.5, 0.95, None, True, 5, None),
    "halfcheetah-medium-replay": (5, 0.5, 0.95, None, True, 5, None),
    "halfcheetah-medium-expert": (5, 0.5, 0.5, None, False, 30, None),
    "hopper-medium": (5, 1.0, 0.95, 0.1, True, 10, None),
    "hopper-medium-replay": (5, 0.1, 0.5, 0.1, True, 5, None),
    "hopper-medium-expert": (10, 1.0, 0.95, None, False, 30, None),
    "walker2d-medium": (5, 0.5, 0.95, None, True, 30, 30),
    "walker2d-medium-replay": (1, 0.2, 0.5, None, True, 5, None),
    "walker2d-medium-expert": (1, 1.0, 0.95, None, True, 5, None),
}
MOBILE_TABLE = {
    "halfcheetah-medium": (5, 0.5, 0.95, None, False, 5, None),
    "halfcheetah-medium-replay": (5, 0.1, 0.95, None, False, 5, None),
    "halfcheetah-medium-expert": (5, 1.0, 0.5, None, False, 5, None),
    "hopper-medium": (5, 1.5, 0.95, 0.2, False, 5, None),
    "hopper-medium-replay": (5, 0.1, 0.95, 0.2, False, 5, None),
    "hopper-medium-expert": (5, 1.5, 0.95, None, False, 5, None),
    "walker2d-medium": (5, 0.5, 0.95, None, False, 5, 30),
    "walker2d-medium-replay": (1, 0.5, 0.95, None, False, 5, None),
    "walker2d-medium-expert": (1, 1.5, 0.95, None, False, 5, None),
    "halfcheetah-random": (5, 0.5, 0.95, None, False, 5, None),
    "hopper-random": (5, 5.0, 0.95, None, False, 5, None),
    "walker2d-random": (5, 2.0, 0.95, None, False, 5, None),
}


def in_table_form(args):
    alpha = None if args.auto_alpha else args.alpha
    entropy = not args.deterministic_backup
    return (args.rollout_length, args.beta, args.model_ratio, alpha, entropy, args.dynamics_patience, args.dynamics_max_epochs)


@pytest.mark.parametrize("task", MICRO_TABLE)
def test_presets_of_micro(task):
    assert in_table_form(micro.parse_args(["--env-id", f"{task}-v2"])) == MICRO_TABLE[task]
    assert in_table_form(micro.parse_args([f"--env-id={task}-v2", "--penalty=eq8"])) == MICRO_TABLE[task]
    assert in_table_form(micro.parse_args(["--penalty", "none", "--env_id", f"{task}-v2"])) == MICRO_TABLE[task]


@pytest.mark.parametrize("task", MOBILE_TABLE)
def test_presets_of_mobile(task):
    assert in_table_form(micro.parse_args(["--penalty", "mobile", "--env-id", f"{task}-v2"])) == MOBILE_TABLE[task]


def test_what_all_tasks_share():
    """SPEC 4 and 5, typed by hand."""
    args = micro.parse_args(["--env-id", "halfcheetah-medium-v2"])
    assert (args.num_models, args.num_elites, args.dynamics_hidden_size, args.dynamics_lr) == (7, 5, 200, 1e-3)
    assert (args.rollout_batch_size, args.rollout_every, args.total_updates, args.batch_size) == (50_000, 1000, 3_000_000, 256)
    assert (args.hidden_size, args.num_critics, args.gamma, args.tau) == (256, 2, 0.99, 0.005)
    assert (args.actor_lr, args.critic_lr, args.alpha_lr) == (1e-4, 3e-4, 1e-4)
    assert args.clamp_target and args.penalty == "micro" and not args.compile and not args.track
    assert (args.eval_every, args.eval_episodes) == (10_000, 10)


def test_eq8_to_the_letter_is_one_own_draw():
    args = micro.parse_args(["--penalty", "eq8"])
    assert (args.penalty_draws, args.common_noise) == (1, False)
    args = micro.parse_args(["--penalty", "eq8", "--penalty-draws", "2", "--common-noise"])
    assert (args.penalty_draws, args.common_noise) == (2, True)


@pytest.mark.parametrize("kind", ["micro", "mobile"])
@pytest.mark.parametrize("quality", ["random", "expert"])
@pytest.mark.parametrize("environment", ["halfcheetah", "hopper", "walker2d"])
def test_random_and_expert_tasks_have_defaults(environment, quality, kind):
    args = micro.parse_args(["--env-id", f"{environment}-{quality}-v2", "--penalty", kind])
    assert args.env_id == f"{environment}-{quality}-v2"
    assert args.rollout_length >= 1 and args.beta > 0


@pytest.mark.parametrize(
    "task, flags, expected",
    [  # each value is the class's default, which differs from the preset
        ("hopper-medium-replay", ["--beta", "1.0"], dict(beta=1.0)),
        ("hopper-medium", ["--auto-alpha"], dict(auto_alpha=True)),
        ("hopper-medium-replay", ["--model-ratio", "0.95"], dict(model_ratio=0.95)),
        ("hopper-medium-expert", ["--rollout-length", "5"], dict(rollout_length=5)),
        ("hopper-medium-expert", ["--no-deterministic-backup"], dict(deterministic_backup=False)),
        ("walker2d-medium", ["--dynamics-patience", "5"], dict(dynamics_patience=5)),
        ("walker2d-medium", ["--dynamics-max-epochs", "None"], dict(dynamics_max_epochs=None)),
        ("walker2d-medium-replay", ["--rollout_length=5"], dict(rollout_length=5)),
        ("hopper-medium", ["--penalty", "mobile", "--alpha", "0.1"], dict(alpha=0.1, auto_alpha=False)),
        ("hopper-medium", ["--penalty", "eq8", "--common-noise"], dict(common_noise=True)),
    ],
)
def test_the_command_line_wins_over_the_preset(task, flags, expected):
    plain = micro.parse_args(["--env-id", f"{task}-v2", *(flags[:2] if flags[0] == "--penalty" else [])])
    args = micro.parse_args([*flags, "--env-id", f"{task}-v2"])
    for name, value in expected.items():
        assert getattr(args, name) == value
    changed = {name for name, value in vars(args).items() if value != getattr(plain, name)}
    assert changed <= set(expected) and changed


@pytest.mark.parametrize(
    "updates, every",
    [("3000000", 10_000), ("500000", 10_000), ("150000", 3000), ("1000", 20), ("50", 1), ("7", 1), ("150_000", 3000)],
)
def test_fifty_evaluations_at_most_10000_apart(updates, every):
    assert micro.parse_args(["--total-updates", updates]).eval_every == every
    assert micro.parse_args(["--total-updates", updates, "--eval-every", "10000"]).eval_every == 10_000


@pytest.mark.parametrize(
    "argv, shown",
    [
        (["--env-id", "hopper-medium-replay-v2"], {"beta": "0.1", "model-ratio": "0.5", "alpha": "0.1"}),
        (["--env-id", "walker2d-medium-v2"], {"beta": "0.5", "dynamics-max-epochs": "30", "dynamics-patience": "30"}),
        (["--penalty", "mobile", "--env-id", "hopper-medium-v2"], {"beta": "1.5", "alpha": "0.2"}),
        (["--total-updates", "1000"], {"eval-every": "20", "batch-size": "256"}),
    ],
)
def test_help_shows_the_values_that_will_be_used(argv, shown, capsys):
    with pytest.raises(SystemExit) as error:
        micro.parse_args([*argv, "--help"])
    assert error.value.code in (0, None)
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", "", capsys.readouterr().out).split())
    for flag, value in shown.items():
        after = text.split(f" --{flag} ", 1)[1]
        assert re.search(r"\(default: (\S+)\)", after).group(1) == value, flag


def test_help_names_every_flag(capsys):
    """The flags that users and the other scripts rely on, from the issue."""
    with pytest.raises(SystemExit):
        micro.parse_args(["--help"])
    text = capsys.readouterr().out
    for flag in (
        "env-id dataset-path dataset-base-url seed device torch-threads compile track runs-root resume eval-only total-updates "
        "batch-size beta penalty penalty-draws common-noise model-ratio rollout-length rollout-batch-size rollout-every num-models "
        "num-elites num-critics dynamics-lr dynamics-patience dynamics-max-epochs dynamics-path auto-alpha alpha alpha-lr "
        "deterministic-backup clamp-target actor-lr critic-lr gamma tau eval-every eval-episodes checkpoint-every gym-id"
    ).split():
        assert re.search(rf"--{flag}\b", text), flag
    for flag in "compile track common-noise auto-alpha deterministic-backup clamp-target".split():
        assert f"--no-{flag}" in text
