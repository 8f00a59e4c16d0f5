"""Sweeps of tiny runs, real ones and stand-ins that cost no training, on Ray and on the local pool; and the report."""

import csv
import itertools
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium as gym
import h5py
import numpy as np
import pytest
import scipy.stats

import micro
import sweep

ROOT = Path(sweep.__file__).resolve().parent
TINY = (
    "--dynamics-hidden-size 16 --hidden-size 16 --rollout-batch-size 50 --eval-episodes 1 --dynamics-max-epochs 1 "
    "--batch-size 32 --num-models 3 --num-elites 2"
).split()

ONE_MICRO = "--algorithms micro --tasks task --seeds 1 --runs-root runs"

# In place of the training scripts: the same files and exit statuses, steps of 20 ms instead of learning. A step is a
# line of trace.txt; two processes at once in one job's folder leave the line "overlap".
STAND_IN = """
import argparse, fcntl, json, os, signal, sys, time
from pathlib import Path
parser = argparse.ArgumentParser()
for name in "env-id seed penalty runs-root resume torch-threads device dataset-path dynamics-path".split():
    parser.add_argument("--" + name)
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--broken-seed")
args = parser.parse_args()
resumed = args.resume is not None
run = Path(args.resume or Path(args.runs_root) / "run")
run.mkdir(exist_ok=True)
trace, lock = open(run.parent / "trace.txt", "a", buffering=1), open(run / "lock", "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("overlap", file=trace)
if not args.resume:
    (run / "args.json").write_text(json.dumps(vars(args)))
args = argparse.Namespace(**json.loads((run / "args.json").read_text()))
print("start", os.getpid(), os.environ["OMP_NUM_THREADS"], os.environ.get("CUDA_VISIBLE_DEVICES"), file=trace)
if args.broken_seed == args.seed:
    sys.exit("this seed is broken")
if not args.dynamics_path:
    time.sleep(0.3)
    (run / "dynamics.pt").write_text("ensemble of " + run.parent.name)
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
done = int((run / "checkpoint.pt").read_text()) if resumed and (run / "checkpoint.pt").exists() else 0
while done < args.steps:
    time.sleep(0.02)
    done += 1
    print("step", done, file=trace)
    (run / "checkpoint.new").write_text(str(done))
    os.replace(run / "checkpoint.new", run / "checkpoint.pt")
    print(f"update {done}: score 12.5 ± 1.0, Q 1.0, 7 min left", flush=True)
    if asked:
        sys.exit(143)
(run / "result.json").write_text(json.dumps(dict(last_10_mean=12.5)))
"""


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -r requirements-dev.txt")
    # Workers import sweep by name.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "received_signals", [])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """A folder with a copy of sweep.py and stand-ins for the scripts beside it; the imported sweep uses them too."""
    folder = tmp_path / "repository"
    folder.mkdir()
    shutil.copy(ROOT / "sweep.py", folder)
    for name in ("micro.py", "rambo_baseline.py"):
        (folder / name).write_text(STAND_IN)
    monkeypatch.setattr(sweep, "SCRIPTS", folder)
    return folder


@pytest.fixture(params=["local", "ray"])
def where(request):
    """Both ways to run: flags of sweep.py."""
    if request.param == "ray":
        request.getfixturevalue("ray")
    return ["--local"] if request.param == "local" else []


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Random actions in Hopper-v4, in D4RL's format."""
    env, rng = gym.make("Hopper-v4"), np.random.default_rng(0)
    keys = "observations", "actions", "rewards", "next_observations", "terminals", "timeouts"
    columns = {key: [] for key in keys}
    obs, _ = env.reset(seed=0)
    for _ in range(400):
        action = rng.uniform(-1, 1, 3).astype(np.float32)
        next_obs, reward, terminated, truncated, _ = env.step(action)
        for key, value in zip(keys, (obs, action, reward, next_obs, terminated, truncated)):
            columns[key].append(value)
        obs = env.reset()[0] if terminated or truncated else next_obs
    path = tmp_path_factory.mktemp("data") / "hopper.hdf5"
    with h5py.File(path, "w") as file:
        for key, values in columns.items():
            file[key] = np.array(values)
    return path


def trace(job_folder):
    path = Path(job_folder) / "trace.txt"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def steps(job_folder):
    return [int(line[1]) for line in trace(job_folder) if line[0] == "step"]


def starts(job_folder):
    return [line for line in trace(job_folder) if line[0] == "start"]


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
    return value


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def training_pid(script, folder):
    """The process that trains in a job's folder (it names the folder in its command line)."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if len(words) > 1 and words[1].endswith(script) and any(word.startswith(str(folder)) for word in words):
            return int(path.parent.name)


def in_background(function, *arguments):
    failures = []

    def run():
        try:
            function(*arguments)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, failures


# --- real runs --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def real_sweep(ray, dataset, tmp_path_factory):
    """micro, mobile and rambo on a local Ray: the command, its exit status and its folder."""
    root = tmp_path_factory.mktemp("real")
    command = ["--algorithms", "micro", "mobile", "rambo", "--tasks", f"hopper-medium-v2={dataset}", "--seeds", "1"]
    command += ["--runs-root", str(root), "--retries", "0", "--", *TINY, "--total-updates", "20"]
    command += ["--", "rambo", "--bc-epochs", "1", "--adversarial-every", "10", "--adversarial-updates", "2"]
    return command, sweep.main(command), root


def test_real_runs_on_ray_are_all_done_and_share_the_ensemble(real_sweep):
    _, status, root = real_sweep
    assert status == 0, [sweep.last_line(path) for path in root.glob("*/log.txt")]
    results = {path.parts[-3].split("__")[1]: json.loads(path.read_text()) for path in root.glob("*/*/result.json")}
    assert results.keys() == {"micro", "mobile", "rambo"}
    assert {name: result["algorithm"] for name, result in results.items()} == {name: name for name in results}
    assert all(result["args"]["torch_threads"] == result["machine"]["threads"] == 1 for result in results.values())
    (trained,) = root.glob("hopper-medium-v2__micro__1/*/dynamics.pt")
    assert results["mobile"]["args"]["dynamics_path"] == str(trained) and results["mobile"]["seconds"]["dynamics"] == 0
    assert results["micro"]["args"]["dynamics_path"] is results["rambo"]["args"]["dynamics_path"] is None
    assert results["rambo"]["args"]["bc_epochs"] == 1 and results["rambo"]["args"]["total_updates"] == 20
    note = sweep.running_note(root / "hopper-medium-v2__micro__1" / "log.txt")
    assert "$ python" in (root / "hopper-medium-v2__micro__1" / "log.txt").read_text() and "files:" in note
    lines = (trained.parent.parent / "log.txt").read_text().splitlines()
    (root / "line.txt").write_text(next(line for line in lines if "update 20:" in line))  # as the live table reads it
    assert re.fullmatch(r"update 20, score -?[\d.]+, 0 min left", sweep.running_note(root / "line.txt"))


def test_a_second_start_does_nothing(real_sweep, monkeypatch, capsys):
    command, _, root = real_sweep
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
    monkeypatch.setattr(sweep, "choose_pool", lambda args: pytest.fail("nothing is left to run"))
    assert sweep.main(command) == 0
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()} == before
    assert ", 3 of them finished before" in capsys.readouterr().out


def test_the_report_takes_real_runs(real_sweep, tmp_path):
    text = sweep.report(sweep.ReportArgs(runs_root=str(real_sweep[2]), output_dir=str(tmp_path / "report"))).read_text()
    assert "Stand-in data" in text and "## D4RL data" not in text
    lines = read_csv(tmp_path / "report" / "stand-in-times.csv")
    assert [line["algorithm"] for line in lines] == ["micro", "mobile", "rambo"]
    assert [line["dynamics, s"] == "shared" for line in lines] == [False, True, False]


def test_a_real_run_whose_process_and_whose_ray_worker_are_killed_is_resumed_not_restarted(ray, dataset, tmp_path):
    """The progress.csv that comes out is that of a run that was left alone."""
    flags = [*TINY, "--total-updates", "300", "--eval-every", "20"]
    alone = [sys.executable, str(ROOT / "micro.py"), *"--env-id hopper-medium-v2 --seed 1 --device cpu".split()]
    alone += ["--torch-threads", "1", "--dataset-path", str(dataset), "--runs-root", str(tmp_path / "alone"), *flags]
    undisturbed = subprocess.Popen(alone, stdout=subprocess.DEVNULL, env=os.environ | dict(OMP_NUM_THREADS="1"))
    job_folder, updates_seen = tmp_path / "killed" / "hopper-medium-v2__micro__1", []

    def updates_done():
        paths = list(job_folder.glob("*/progress.csv"))
        return paths and len(read_csv(paths[0])) * 20

    def kill_twice():
        for victim in (lambda pid: pid, parent):  # the training process, then the Ray worker that watches it
            begun = updates_seen[-1] if updates_seen else 0
            pid = wait_for(lambda: updates_done() and updates_done() > begun and training_pid("micro.py", job_folder))
            updates_seen.append(updates_done())
            os.kill(victim(pid), signal.SIGKILL)
            wait_for(lambda: not alive(pid))

    thread, failures = in_background(kill_twice)
    command = ["--algorithms", "micro", "--tasks", f"hopper-medium-v2={dataset}", "--seeds", "1", "--retries", "2"]
    status = sweep.main([*command, "--runs-root", str(tmp_path / "killed"), "--", *flags, "--checkpoint-every", "10"])
    thread.join()
    assert not failures and status == 0
    assert updates_seen[0] < updates_seen[1] < 300
    commands = [line for line in (job_folder / "log.txt").read_text().splitlines() if line.startswith("$ ")]
    assert ["--resume" in line for line in commands] == [False, True, True]
    assert undisturbed.wait() == 0
    (expected,), (got,) = tmp_path.glob("alone/*/progress.csv"), job_folder.glob("*/progress.csv")
    assert got.read_text() == expected.read_text()


# --- the queue and its faults, with stand-ins for the scripts ---------------------------------------------------------
def test_killed_processes_are_resumed(stand_ins, where, tmp_path):
    folder = tmp_path / "runs" / "task__micro__1"

    def kill():
        wait_for(lambda: len(steps(folder)) >= 5)
        os.kill(int(starts(folder)[0][1]), signal.SIGKILL)

    thread, failures = in_background(kill)
    command = f"{ONE_MICRO} -- --steps 40".split()
    assert sweep.main([*where, *command]) == 0
    thread.join()
    assert not failures and len(starts(folder)) == 2
    assert sorted(set(steps(folder))) == list(range(1, 41)) and len(steps(folder)) <= 41  # it went on where it was
    assert ["overlap"] not in trace(folder)


def test_a_ray_worker_takes_its_training_process_with_it(stand_ins, ray, tmp_path, capsys):
    folder = tmp_path / "runs" / "task__rambo__1"

    def kill():
        wait_for(lambda: len(steps(folder)) >= 5)
        pid = int(starts(folder)[0][1])
        os.kill(parent(pid), signal.SIGKILL)
        wait_for(lambda: not alive(pid), seconds=5)

    thread, failures = in_background(kill)
    command = "--algorithms rambo --tasks task --seeds 1 --runs-root runs -- --steps 200".split()
    assert sweep.main(command) == 0
    thread.join()
    assert not failures and len(starts(folder)) == 2 and ["overlap"] not in trace(folder)
    assert "task__rambo__1: queued: attempt 1 ended" in capsys.readouterr().out  # Ray itself retried nothing
    assert sorted(set(steps(folder))) == list(range(1, 201)) and len(steps(folder)) <= 201


def test_a_run_that_always_fails_is_reported_and_does_not_stop_the_others(stand_ins, where, tmp_path, capsys):
    command = "--algorithms micro none rambo --tasks task --seeds 2 --runs-root runs --retries 1".split()
    command += ["--", "--broken-seed", "1"]
    assert sweep.main([*where, *command]) == 1
    out = capsys.readouterr().out
    assert "task__micro__1 failed after 2 attempts: this seed is broken" in out
    assert "task__none__1 failed after 2 attempts: this seed is broken" in out  # without an ensemble it tries by itself
    assert "3 done, 3 failed" in out
    finished = {path.parts[-3] for path in (tmp_path / "runs").rglob("result.json")}
    assert finished == {"task__micro__2", "task__none__2", "task__rambo__2"}
    assert all(len(starts(f"runs/task__{name}__1")) == 2 for name in ("micro", "none", "rambo"))
    for line in "task__micro__1: queued: attempt 1 ended: this seed is broken", "task__micro__2: done: score 12.5":
        assert line in out.splitlines()


@pytest.mark.parametrize("failing", [True, False])
def test_a_run_whose_ensemble_never_comes_trains_its_own(stand_ins, failing):
    """Its trainer failed before there was one, or is done and somebody has deleted it."""
    command = "--local --algorithms micro none --tasks task --seeds 1 --runs-root runs --retries 0 --".split()
    if failing:
        assert sweep.main([*command, "--steps", "3", "--", "micro", "--broken-seed", "1"]) == 1
    else:
        assert sweep.main([*ONE_MICRO.split(), "--local", "--", "--steps", "3"]) == 0
        Path("runs/task__micro__1/run/dynamics.pt").unlink()
        assert sweep.main([*command, "--steps", "3"]) == 0
    assert Path("runs/task__none__1/run/dynamics.pt").read_text() == "ensemble of task__none__1"
    assert steps("runs/task__none__1") == [1, 2, 3]


def test_refused_flags_are_not_tried_again_and_their_line_is_shown(stand_ins, capsys):
    """tyro draws a box around what it says: the note is its last line with words."""
    (stand_ins / "micro.py").write_text("import sys; print('│ no such flag │\\n╰──────╯'); sys.exit(2)")
    assert sweep.main(["--local", *ONE_MICRO.split()]) == 1
    assert "task__micro__1 failed after 1 attempts: no such flag;" in capsys.readouterr().out


def test_threads_and_data_path_may_change_when_a_run_goes_on(stand_ins, monkeypatch):
    """What is given again to a run that is resumed is what may change."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(2), raising=False)
    command = "--local --algorithms micro --seeds 1 --runs-root runs --retries 0".split()
    for name in ("first.hdf5", "moved.hdf5"):
        Path(name).write_bytes(b"data")

    def kill():
        wait_for(lambda: len(steps("runs/task__micro__1")) >= 3)
        os.kill(int(starts("runs/task__micro__1")[0][1]), signal.SIGKILL)

    thread, failures = in_background(kill)
    assert sweep.main([*command, "--tasks", "task=first.hdf5", "--", "--steps", "100"]) == 1
    thread.join()
    assert not failures
    again = [*command, "--tasks", "task=moved.hdf5", "--cpus-per-run", "2", "--", "--steps", "100"]
    assert sweep.main(again) == 0
    last = [line for line in Path("runs/task__micro__1/log.txt").read_text().splitlines() if line.startswith("$")][-1]
    assert "--resume" in last and "--torch-threads 2" in last and "moved.hdf5" in last and "--steps" not in last
    assert starts("runs/task__micro__1")[-1][2] == "2" and sorted(set(steps("runs/task__micro__1"))) == [*range(1, 101)]


def test_another_ensemble_is_refused(stand_ins):
    """A run on an ensemble of its own does not become one of a sweep that shares."""
    assert sweep.main("--local --algorithms mobile --tasks task --seeds 1 --runs-root runs".split()) == 0
    with pytest.raises(SystemExit, match="task__mobile__1 was begun in .* with another ensemble"):
        sweep.main("--local --algorithms micro mobile --tasks task --seeds 1 --runs-root runs".split())


@pytest.mark.parametrize("cores, gpus", [(4, ["3", "5"]), (8, ["3", "3", "5", "5"])])
def test_runs_get_the_threads_and_gpus_that_were_granted(stand_ins, tmp_path, monkeypatch, cores, gpus):
    """Two threads and half a GPU for each run: two runs on 4 cores have a GPU each, four on 8 cores share them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores), raising=False)
    command = ["--local", "--algorithms", "rambo", "--tasks", "task", "--seeds", str(len(gpus)), "--runs-root", "runs"]
    assert sweep.main([*command, "--cpus-per-run", "2", "--gpus-per-run", "0.5", "--", "--steps", "20"]) == 0
    granted = [starts(f"runs/task__rambo__{seed + 1}")[0][2:] for seed in range(len(gpus))]
    assert sorted(granted) == [["2", gpu] for gpu in gpus]
    args = json.loads(Path("runs/task__rambo__1/run/args.json").read_text())
    assert args["torch_threads"] == "2" and args["device"] is None


def test_the_ensemble_is_trained_once_and_waiting_takes_no_place(stand_ins, tmp_path, monkeypatch):
    """One place: while the ensemble of seed 1 is trained nothing else runs, and what waited for it comes next."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(1), raising=False)
    assert sweep.main("--local --algorithms mobile rambo micro --tasks b a --seeds 2 --runs-root runs".split()) == 0
    order = sorted(Path("runs").glob("*/run/args.json"), key=lambda path: path.stat().st_mtime_ns)
    names = [path.parts[1] for path in order]
    # mobile waits for micro's ensemble; RAMBO, which needs none of it, goes first; b was given before a
    expected = itertools.product("ba", (1, 2), ("rambo", "micro", "mobile"))
    assert names == [f"{task}__{algorithm}__{seed}" for task, seed, algorithm in expected]
    for task, seed in itertools.product("ab", (1, 2)):
        args = json.loads(Path(f"runs/{task}__mobile__{seed}/run/args.json").read_text())
        assert Path(args["dynamics_path"]).read_text() == f"ensemble of {task}__micro__{seed}"
        assert args["device"] == "cpu"


def plan(command):
    own, words = sweep.split_command_line(command.split())
    return {job.name: job for job in sweep.plan(sweep.tyro.cli(sweep.Args, args=own), words)}


def test_only_equal_ensembles_are_shared():
    jobs = plan("--algorithms mobile none eq8 rambo --tasks task --seeds 1")
    assert {job.name: job.trainer and job.trainer.name for job in jobs.values()} == {
        "task__mobile__1": "task__eq8__1", "task__none__1": "task__eq8__1", "task__eq8__1": None, "task__rambo__1": None
    }  # fmt: skip
    jobs = plan("--algorithms micro mobile --tasks task --seeds 1 -- mobile --dynamics-patience 9")
    assert jobs["task__mobile__1"].trainer is None


def test_flags_of_one_algorithm_win_over_the_common_ones():
    rambo, common = " -- rambo --total-updates 50 --common-noise", " -- --total-updates=9 --no-common-noise"
    for extra in (rambo + common, common + rambo):
        jobs = plan("--algorithms micro rambo --tasks task --seeds 1" + extra)
        assert jobs["task__rambo__1"].flags.items() >= {"total-updates": ["50"], "common-noise": []}.items()
        assert jobs["task__micro__1"].flags.items() >= {"total-updates": ["9"], "no-common-noise": []}.items()
        assert "no-common-noise" not in jobs["task__rambo__1"].flags


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--tasks", "a=x", "a=y"], "only once"),
        (["--tasks", "../a"], "names a folder"),
        (["--tasks", "a=missing.hdf5"], "cannot read the dataset missing.hdf5"),
        (["--seeds", "0"], "--seeds and --cpus-per-run are at least 1"),
        (["--algorithms"], "--tasks and --algorithms need one at least"),
        (["--local", "--tasks", "a", "--runs-root", "/dev/null/runs"], "cannot write /dev/null/runs/a__micro__1/job.json"),
        (["--gpus-per-run", "2"], "--gpus-per-run between 0 and 1"),
        (["--", "--seed", "3"], "--seed is set by the sweep itself"),
        (["--", "--dataset_path=x"], "--dataset-path is set by the sweep itself"),
        (["--", "ppo", "--beta", "1"], "not ppo"),
        (["--", "none", "--beta", "1"], "there are flags for none, which is not among --algorithms"),
        (["--local", "--ray-address", "auto"], "--ray-address needs Ray"),
        (["--local", "--cpus-per-run", "9999"], "there is no room for a run with --cpus-per-run 9999"),
        (["--local", "--gpus-per-run", "0.5"], "--gpus-per-run 0.5"),
    ],
)
def test_refused_input(argv, message, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit, match=re.escape(message)) as error:
        sweep.main(argv)
    assert "\n" not in str(error.value) and not any(Path().iterdir())


def test_a_second_start_with_other_flags_or_data_is_refused_by_name(stand_ins, tmp_path):
    Path("data.hdf5").write_bytes(b"first")
    command = ["--local", "--algorithms", "micro", "--tasks", "task=data.hdf5", "--seeds", "1", "--runs-root", "runs"]
    assert sweep.main([*command, "--", "--steps", "3"]) == 0
    before = {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
    for flags, message in (["--steps", "4"], r"--steps \(it was 3\)"), ([], r"--steps \(it was 3\)"):
        with pytest.raises(SystemExit, match=f"task__micro__1 was begun in .* with another {message}"):
            sweep.main([*command, "--", *flags])
    Path("moved.hdf5").write_bytes(b"first")
    command[4] = "task=moved.hdf5"
    assert sweep.main([*command, "--", "--steps", "3", "--device", "cpu"]) == 0  # neither changes the result
    Path("moved.hdf5").write_bytes(b"second")
    with pytest.raises(SystemExit, match="task__micro__1 was begun in .* with another dataset"):
        sweep.main([*command, "--", "--steps", "3"])
    command[4] = "task"
    with pytest.raises(SystemExit, match="task__micro__1 was begun in .* with another dataset"):
        sweep.main([*command, "--", "--steps", "3"])
    assert {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()} == before


def test_what_may_differ_when_a_sweep_goes_on_may_change_in_the_scripts():
    assert {name.replace("-", "_") for name in sweep.TECHNICAL} <= micro.MAY_CHANGE
    assert sweep.NO_SETTING <= vars(micro.Args()).keys()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_runs_save_and_the_same_command_goes_on(stand_ins, number):
    command = [sys.executable, str(stand_ins / "sweep.py"), "--local", *f"{ONE_MICRO} -- --steps 60".split()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    wait_for(lambda: len(steps("runs/task__micro__1")) >= 3)
    os.killpg(process.pid, number)  # as a terminal does: every process of the group gets it
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + number and "the same command goes on from the checkpoints" in out
    reached = steps("runs/task__micro__1")
    assert 3 <= len(reached) < 60 and not any(Path("runs").glob(".stop*"))
    assert not alive(starts("runs/task__micro__1")[0][1])
    assert "Traceback" not in Path("runs/task__micro__1/log.txt").read_text()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert steps("runs/task__micro__1") == list(range(1, 61))  # nothing twice, nothing lost


def test_a_closed_terminal_lets_the_runs_save(stand_ins):
    """Printing fails there; the sweep still waits for the runs, which save and end."""
    ours, theirs = pty.openpty()
    command = [sys.executable, str(stand_ins / "sweep.py"), "--local", *f"{ONE_MICRO} -- --steps 500".split()]
    heeded = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests themselves run under nohup
    terminal = dict(stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    process = subprocess.Popen(command, **terminal, preexec_fn=heeded)
    os.close(theirs)
    wait_for(lambda: len(steps("runs/task__micro__1")) >= 3)
    os.close(ours)
    os.kill(process.pid, signal.SIGHUP)
    process.wait(timeout=60)
    reached = steps("runs/task__micro__1")
    assert 3 <= len(reached) < 500 and not alive(starts("runs/task__micro__1")[0][1])
    assert Path("runs/task__micro__1/run/checkpoint.pt").read_text() == str(len(reached))
    assert not any(Path("runs").glob(".stop*"))


def test_nohup_is_respected(stand_ins):
    """Where SIGHUP was ignored from the start, it stays so."""
    command = ["nohup", sys.executable, str(stand_ins / "sweep.py"), "--local", *f"{ONE_MICRO} -- --steps 40".split()]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(steps("runs/task__micro__1")) >= 3)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 0 and steps("runs/task__micro__1") == [*range(1, 41)]


def test_a_fault_of_the_sweep_itself_lets_the_runs_save(stand_ins, where, monkeypatch):
    def fault(*_):
        if len(steps("runs/task__micro__1")) >= 3:
            raise OSError("some fault")
        return 0

    monkeypatch.setattr(sweep, "draw_table", fault)
    with pytest.raises(OSError, match="some fault"):
        sweep.main([*where, *f"{ONE_MICRO} -- --steps 500".split()])
    reached = steps("runs/task__micro__1")
    assert 3 <= len(reached) < 500 and not alive(starts("runs/task__micro__1")[0][1])
    assert Path("runs/task__micro__1/run/checkpoint.pt").read_text() == str(len(reached))


def test_no_ray_at_the_address(ray):
    with pytest.raises(SystemExit, match="cannot start Ray, or reach it at nonsense") as error:
        sweep.RayPool(sweep.Args(ray_address="nonsense"), NoRay())
    assert "\n" not in str(error.value)


class NoRay:
    """What Ray does where nobody answers, without the wait."""

    def is_initialized(self):
        return False

    def init(self, address, **_):
        raise ConnectionError(f"nobody answers at {address}\nmore lines")


def test_a_table_higher_than_the_terminal_keeps_what_runs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: (80, 6))
    states = ["done", "queued", "running", "failed", "running", "queued"]
    jobs = [sweep.Job(f"job{i}", tmp_path, "", {}, {}, state=state) for i, state in enumerate(states)]
    (tmp_path / "log.txt").write_text("working\n")
    assert sweep.draw_table(jobs, 0) == 4
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.replace("\x1b[J", "").splitlines()[:3]] == ["job2", "job4", "job3"]
    assert "2 queued, 2 running, 1 done, 1 failed" in out


def test_no_run_outlives_a_sweep_that_is_killed(stand_ins):
    command = [sys.executable, str(stand_ins / "sweep.py"), "--local", *f"{ONE_MICRO} -- --steps 3000".split()]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_for(lambda: steps("runs/task__micro__1"))
    process.kill()
    process.wait()
    wait_for(lambda: not alive(starts("runs/task__micro__1")[0][1]), seconds=5)


def test_two_sweeps_do_not_run_one_job_at_once(stand_ins, monkeypatch):
    Path("job").mkdir()
    with open("job/log.txt", "ab") as log:
        sweep.fcntl.flock(log, sweep.fcntl.LOCK_EX)
        monkeypatch.setattr(sweep.time, "sleep", lambda seconds: None)
        outcome = sweep.run_job("job", str(stand_ins / "micro.py"), {}, 1, "stop", {})
    assert outcome == (1, "another process is running it") and not starts("job")


def test_without_ray_it_runs_and_says_so(stand_ins, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    command = ONE_MICRO.split()
    assert sweep.main(command) == 0
    assert "in a local pool of processes (Ray is not installed)" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--ray-address needs Ray"):
        sweep.main([*command, "--seeds", "2", "--ray-address", "auto"])


def test_the_table_on_a_terminal(stand_ins):
    ours, theirs = pty.openpty()
    words = "--local --algorithms micro none --tasks task --seeds 1 --runs-root runs -- --steps 60".split()
    command = [sys.executable, str(stand_ins / "sweep.py"), *words]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=os.environ | dict(COLUMNS="120", LINES="40"))
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
    assert process.wait() == 0
    frames = seen.decode().split("\x1b[J")
    assert any(re.search(r"micro__1 +running +update \d+, score 12.5, 7 min left", frame) for frame in frames)
    assert "may wait for the ensemble of task__micro__1" in frames[1] and "queued" in frames[1]
    done = r"task__micro__1 +done +score 12.5\s+task__none__1 +done +score 12.5\s+0 queued, 0 running, 2 done"
    assert re.search(done, frames[-1])
    assert all("\x1b[3F" in frame for frame in frames[1:-1])  # each is drawn over the last: two jobs and the counts


# --- the report -------------------------------------------------------------------------------------------------------
def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_result(folder, algorithm, seed, scores, is_d4rl=False, sha256="a" * 64, seconds=None, **args):
    args = dict(env_id="hopper-medium-v2", seed=seed, dynamics_path=None, beta=1.0) | args
    result = dict(algorithm=algorithm, gym_id="Hopper-v4", args=args)
    result |= dict(dataset=dict(file="data.hdf5", sha256=sha256, rows=10, is_d4rl=is_d4rl))
    result |= dict(machine=dict(device="cpu: some", threads=1))
    result |= dict(seconds=seconds or dict(dynamics=3.0, rollouts=1.0, updates=2.0, evaluation=9.0))
    result |= dict(evaluations=[dict(update=100 * (i + 1), score=score, returns=[]) for i, score in enumerate(scores)])
    result |= {f"last_{n}_mean": sum(scores[-n:]) / len(scores[-n:]) for n in (5, 10)}
    Path(folder).mkdir(parents=True)
    (Path(folder) / "result.json").write_text(json.dumps(result))


def make_report():
    sweep.report(sweep.ReportArgs(runs_root="runs", output_dir="report"))
    return Path("report/report.md").read_text()


def test_the_scores_are_those_computed_by_hand():
    write_result("runs/1", "micro", 1, [0.0] * 10 + [2.0] * 5 + [10.0] * 5)  # last 5: 10, last 10: 6, the 10 before: 0
    write_result("runs/2", "micro", 2, [0.0] * 10 + [6.0] * 5 + [20.0] * 5)  # last 5: 20, last 10: 13
    make_report()
    (line,) = read_csv("report/stand-in-scores.csv")
    assert (line["last 5"], line["last 10"]) == ("15.0 ± 5.0", "9.5 ± 3.5")
    assert (line["change"], line["seeds"], line["updates"]) == ("+9.5", "2", "2000")
    (line,) = read_csv("report/stand-in-times.csv")
    assert line["ms per update"] == "1.50"  # (1 + 2) s / 2000
    assert [float(line["last_10"]) for line in read_csv("report/stand-in-runs.csv")] == [6, 13]
    assert [line[f"{phase}, s"] for phase in sweep.PHASES] == ["3", "–", "–", "1", "2", "9"]
    for name in ("curves", "aggregate"):
        assert Path(f"report/stand-in-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_stand_in_data_is_never_mixed_with_d4rl_data():
    write_result("runs/1", "micro", 1, [100.0] * 20, is_d4rl=True)
    write_result("runs/2", "micro", 1, [10.0] * 20, sha256="b" * 64)
    write_result("runs/3", "micro", 1, [20.0] * 20, sha256="c" * 64)  # the same name, other data
    text = make_report()
    (line,) = read_csv("report/d4rl-scores.csv")
    assert (line["data"], line["last 10"], line["reported by the paper"]) == ("D4RL", "100.0", "106.5 ± 0.8")
    lines = read_csv("report/stand-in-scores.csv")
    assert [line["last 10"] for line in lines] == ["10.0", "20.0"] and lines[0]["data"] != lines[1]["data"]
    assert all("reported by the paper" not in line for line in lines)
    assert [line["IQM of last 10"] for line in read_csv("report/d4rl-aggregate.csv")] == ["100.0"]
    (aggregate,) = read_csv("report/stand-in-aggregate.csv")
    assert aggregate["IQM of last 10"] == "15.0"
    assert aggregate["tasks"] == "hopper-medium-v2 (data.hdf5 bbbbbbbb) + hopper-medium-v2 (data.hdf5 cccccccc)"
    d4rl, stand_in, paper = re.split(r"^## ", text, flags=re.M)[1:]
    assert (d4rl[:9], stand_in[:13], paper[:21]) == ("D4RL data", "Stand-in data", "Reported by the paper")
    assert "Not D4RL's data" in stand_in and "106.5" not in stand_in


def test_runs_with_other_settings_are_rows_of_their_own():
    write_result("runs/1", "micro", 1, [1.0] * 20, beta=1.0, torch_threads=1)
    write_result("runs/2", "micro", 2, [3.0] * 20, beta=1.0, torch_threads=2)
    write_result("runs/3", "micro", 1, [5.0] * 20, beta=0.5, torch_threads=1)
    make_report()
    scores = {line["algorithm"]: line["last 10"] for line in read_csv("report/stand-in-scores.csv")}
    assert scores == {"micro beta=0.5": "5.0", "micro beta=1.0": "2.0 ± 1.0"}
    for seed, updates in enumerate((100, 200)):
        write_result(f"runs/rambo{seed}", "rambo", 1, [1.0] * 20, total_updates=updates, eval_every=updates // 50)
    make_report()
    labels = [line["algorithm"] for line in read_csv("report/stand-in-scores.csv")]
    assert labels[-2:] == ["rambo total_updates=100", "rambo total_updates=200"]


def test_the_same_run_twice_is_refused():
    write_result("runs/1", "micro", 1, [1.0])
    write_result("runs/2", "micro", 1, [2.0])
    with pytest.raises(SystemExit, match="runs/1 and runs/2 are the same run"):
        make_report()


def test_bad_and_missing_results_are_named():
    with pytest.raises(SystemExit, match="no result.json in or below runs"):
        make_report()
    Path("runs").mkdir()
    Path("runs/result.json").write_text("{}")
    with pytest.raises(SystemExit, match="runs/result.json is not the result of a run"):
        make_report()
    Path("runs/result.json").unlink()
    write_result("runs/1", "micro", 1, [1.0] * 10)
    whole = json.loads(Path("runs/1/result.json").read_text())
    for change in (dict(algorithm="ppo"), dict(last_5_mean=None), dict(evaluations=[]), dict(machine={}), dict(args=3)):
        Path("runs/1/result.json").write_text(json.dumps(whole | change))
        with pytest.raises(SystemExit, match="runs/1/result.json is not the result of a run"):
            make_report()
    Path("runs/1/result.json").unlink()
    Path("runs/1/result.json").mkdir()
    with pytest.raises(SystemExit, match="runs/1/result.json is not the result of a run"):
        make_report()
    assert not Path("report").exists()


def test_seeds_that_were_evaluated_at_other_updates_are_named():
    write_result("runs/1", "micro", 1, [1.0] * 10)
    write_result("runs/2", "micro", 2, [1.0] * 11)
    with pytest.raises(SystemExit, match="runs/1 and runs/2 are seeds of one setting, but"):
        make_report()


def test_a_torn_result_is_named_when_a_sweep_goes_on(stand_ins):
    assert sweep.main(["--local", *ONE_MICRO.split()]) == 0
    Path("runs/task__micro__1/run/result.json").write_text("{")
    with pytest.raises(SystemExit, match="task__micro__1 holds a torn file, or a run that no sweep began"):
        sweep.main(["--local", *ONE_MICRO.split()])


def test_a_report_of_a_sweep_that_has_just_begun():
    """No seed is there on both tasks: the scores are reported, and no aggregate."""
    write_result("runs/1", "micro", 1, [1.0] * 10, env_id="a")
    write_result("runs/2", "micro", 2, [1.0] * 10, env_id="b")
    text = make_report()
    assert "| a |" in text and "Interquartile" not in text and not Path("report/stand-in-aggregate.png").exists()


def test_unfinished_runs_are_named_and_left_out():
    write_result("runs/1", "micro", 1, [1.0] * 10)
    Path("runs/job/run").mkdir(parents=True)
    Path("runs/job/run/args.json").write_text("{}")
    assert "Not finished, and left out: job/run." in make_report()


def test_aggregates_compare_the_same_tasks_with_the_seeds_that_all_of_them_have():
    tasks = dict(a=(1, 2, 3, 4), b=(1, 2))  # seeds
    for task, seeds in tasks.items():
        for seed in seeds:
            score = 10.0 * seed + 100 * (task == "b")
            write_result(f"runs/{task}{seed}", "micro", seed, [score - 4] * 5 + [score] * 5, env_id=task)
    write_result("runs/other", "none", 1, [7.0] * 10, env_id="a")
    make_report()
    lines = {(line["tasks"], line["algorithm"]): line for line in read_csv("report/stand-in-aggregate.csv")}
    a, b = (f"{task} (data.hdf5 aaaaaaaa)" for task in "ab")
    assert lines.keys() == {(f"{a} + {b}", "micro"), (a, "micro"), (a, "none")}
    both, alone = lines[f"{a} + {b}", "micro"], lines[a, "micro"]
    assert (both["seeds"], both["IQM of last 5"]) == ("2", "65.0")  # 10, 20, 110, 120 without the ends
    assert (alone["seeds"], alone["IQM of last 5"]) == ("4", "25.0")  # 10, 20, 30, 40 without the ends
    assert (both["IQM of last 10"], alone["IQM of last 10"]) == ("63.0", "23.0")  # of which half is 4 lower


def test_the_cost_stands_beside_the_papers():
    seconds = dict(dynamics=50.0, cloning=7.0, adversary=5.0, rollouts=1.0, updates=2.0, evaluation=99.0)
    write_result("runs/1", "micro", 1, [1.0] * 10)
    write_result("runs/2", "rambo", 1, [1.0] * 10, seconds=seconds)
    write_result("runs/3", "mobile", 1, [1.0] * 10, dynamics_path="elsewhere.pt")
    make_report()
    lines = {line["algorithm"]: line for line in read_csv("report/stand-in-times.csv")}
    assert {name: line["dynamics, s"] for name, line in lines.items()} == dict(micro="3", mobile="shared", rambo="50")
    assert (lines["micro"]["ms per update"], lines["rambo"]["ms per update"]) == ("3.00", "8.00")
    assert (lines["micro"]["over RAMBO's"], lines["rambo"]["over RAMBO's"]) == ("0.38", "1.00")
    assert (lines["micro"]["paper's Table 2"], lines["rambo"]["paper's Table 2"]) == ("0.39", "–")  # 45647.6 / 118020.2
    write_result("runs/4", "rambo", 1, [1.0] * 10, seconds=seconds | dict(adversary=95.0), sha256="b" * 64)
    write_result("runs/5", "rambo", 1, [1.0] * 10, seconds=seconds, sha256="c" * 64, beta=1.0)
    write_result("runs/6", "rambo", 1, [1.0] * 10, seconds=seconds | dict(adversary=0.0), sha256="c" * 64, beta=2.0)
    make_report()
    lines = read_csv("report/stand-in-times.csv")  # RAMBO on other data is no measure, nor is one of two
    assert [line["over RAMBO's"] for line in lines] == ["0.38", "0.38", "1.00", "1.00", "–", "–"]
    changed = json.loads(Path("runs/2/result.json").read_text())
    changed["machine"]["threads"] = 2
    Path("runs/2/result.json").write_text(json.dumps(changed))
    make_report()
    assert read_csv("report/stand-in-times.csv")[0]["over RAMBO's"] == "–"  # not on the same machine


def test_the_papers_tables_are_typed_without_slips():
    """Its averages are those of its rows, to what one decimal allows, but for the 84.5 reported for PBRL (84.4)."""
    rows = np.array([sweep.PAPER_SCORES[task] for task in sweep.PAPER_SCORES if task != "average"])
    assert rows.shape == (9, 9)
    slips = np.abs(rows.mean(0) - sweep.PAPER_SCORES["average"])
    assert [name for name, slip in zip(sweep.PAPER_METHODS, slips) if slip > 0.06] == ["PBRL"] and slips.max() < 0.13
    seconds = np.array([sweep.PAPER_SECONDS[name] for name in ("halfcheetah", "hopper", "walker2d")])
    assert np.abs(seconds.mean(0) - sweep.PAPER_SECONDS["mean"]).max() < 0.2


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (4, 1), (3, 2), (4, 9), (5, 3)])
def test_interquartile_mean_is_the_trimmed_mean_of_all_runs_and_tasks(shape):
    scores = np.random.default_rng(0).normal(50, 20, (6, *shape))
    expected = [scipy.stats.trim_mean(matrix, proportiontocut=0.25, axis=None) for matrix in scores]
    np.testing.assert_allclose(sweep.interquartile_mean(scores), expected)


@pytest.mark.parametrize("scores", [[[10.0, 71.3], [20.1, 30.9], [33.7, 52.2]], [[1.0], [2.5], [4.1], [9.0]]])
def test_the_bootstrap_is_stratified_and_its_interval_is_the_percentile_one(scores):
    """rliable's definition, by listing every equally likely resample: each task draws its own runs with replacement."""
    scores = np.array(scores)
    runs, tasks = scores.shape
    draws = list(itertools.product(range(runs), repeat=runs))
    values = np.sort([
        scipy.stats.trim_mean(np.concatenate([scores[list(draw), task] for task, draw in enumerate(chosen)]), 0.25)
        for chosen in itertools.product(draws, repeat=tasks)
    ])  # fmt: skip
    low, high = sweep.bootstrap_interval(scores)
    assert low == pytest.approx(values[round(0.025 * len(values))], abs=0.02 * np.ptp(scores))
    assert high == pytest.approx(values[round(0.975 * len(values)) - 1], abs=0.02 * np.ptp(scores))
    assert sweep.bootstrap_interval(scores) == (low, high)  # a report made again says the same
