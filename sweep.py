"""Every combination of algorithms, tasks and seeds, over Ray or on this machine alone; then tables and figures of it.

    python sweep.py --algorithms micro mobile rambo --tasks hopper-medium-v2 walker2d-medium-v2=my.hdf5 --seeds 4
    python sweep.py --algorithms micro rambo -- --total-updates 100000 -- rambo --total-updates 50000
    python sweep.py report --runs-root runs/sweep --output-dir report

A combination is a process of `micro.py` or `rambo_baseline.py` in a folder of its own, <runs-root>/<task>__<algorithm>__
<seed>/, with its output in log.txt. One that fails, or whose worker or node is lost, is resumed from its checkpoint; the
same command started again skips what is finished and goes on with the rest. What follows `--` goes to every run, or, after
an algorithm's name, to the runs of that algorithm. The dynamics ensemble is trained once for each task and seed by the
first of micro, eq8, none and mobile that is in the sweep; the others wait for its dynamics.pt, without taking a place.

On a cluster (--ray-address), this folder, the Python environment and --runs-root must be at the same path on every node.
"""

import concurrent.futures
import csv
import dataclasses
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

SCRIPTS = Path(__file__).resolve().parent
ALGORITHMS = ("micro", "mobile", "eq8", "none", "rambo")
SHARING = ("micro", "eq8", "none", "mobile")  # RAMBO's ensemble sees standardised observations and serves nobody else
TECHNICAL = {"device", "track", "compile", "checkpoint-every", "dataset-base-url"}  # may differ when a sweep goes on
OURS = {"env-id", "seed", "penalty", "runs-root", "resume", "eval-only", "dataset-path", "torch-threads"}


@dataclass
class Args:
    algorithms: tuple[Literal["micro", "mobile", "eq8", "none", "rambo"], ...] = ("micro", "mobile", "rambo")
    """which to run: micro.py with each --penalty, and rambo_baseline.py"""
    tasks: tuple[str, ...] = ("hopper-medium-replay-lite",)
    """--env-id of the runs; TASK=FILE.hdf5 gives a task other data; one task finishes before the next begins"""
    seeds: int = 4
    """seeds 1, 2, ... of each algorithm and task"""
    runs_root: str = "runs/sweep"
    """the folder of all runs; give the same one to go on with a sweep"""
    cpus_per_run: int = 1
    """cores of a run, and its threads"""
    gpus_per_run: float = 0.0
    """share of a GPU for a run, at most 1; with 0 it runs on the CPU"""
    local: bool = False
    """a plain pool of processes on this machine, also where Ray is installed"""
    ray_address: str | None = None
    """a Ray cluster, e.g. auto or ray://host:10001 (default: a Ray of its own on this machine)"""
    retries: int = 2
    """how often a failed run is resumed before it is given up"""


@dataclass
class ReportArgs:
    runs_root: str = "runs/sweep"
    """every result.json in or below it is used"""
    output_dir: str = "report"
    """where report.md, the .csv tables and the figures go"""


def fail(message: str) -> None:
    """One line that says what is wrong, and exit status 1."""
    raise SystemExit(f"{Path(__file__).name}: {' '.join(message.split())}")


# --- the queue --------------------------------------------------------------------------------------------------------
@dataclass
class Job:
    """One combination."""

    name: str
    folder: Path
    script: str
    flags: dict[str, list[str]]  # flag without its dashes -> values
    identity: dict  # what must be the same when a sweep goes on: all that decides the result
    trainer: "Job | None" = None  # whose dynamics ensemble it uses
    state: str = "queued"  # -> submitted -> running -> done or failed, or queued again
    attempts: int = 0
    note: str = ""
    log_size: int = 0  # when it was submitted: a log that grows says that it runs


def parse_flags(words: list[str]) -> dict[str, list[str]]:
    """['--beta', '1', '--no-compile'] -> {'beta': ['1'], 'no-compile': []}; a flag that comes again wins."""
    flags = {}
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("_", "-")
            for other in (name, f"no-{name}", name.removeprefix("no-")):
                flags.pop(other, None)
            flags[name] = [value] if equals else []
        elif flags:
            flags[name].append(word)
        else:
            fail(f"after -- stand flags for the runs, or an algorithm ({', '.join(ALGORITHMS)}) and its flags, not {word}")
    if reserved := OURS & flags.keys():
        fail(f"--{min(reserved)} is set by the sweep itself (see --algorithms, --tasks, --seeds, --cpus-per-run)")
    return flags


def split_command_line(argv: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The sweep's own words, and the words for the runs of each algorithm."""
    sections = [[]]
    for word in argv:
        sections.append([]) if word == "--" else sections[-1].append(word)
    common = [word for section in sections[1:] if section[:1] not in [[name] for name in ALGORITHMS] for word in section]
    words = {
        algorithm: common + [word for section in sections[1:] if section[:1] == [algorithm] for word in section[1:]]
        for algorithm in ALGORITHMS
    }
    return sections[0], words


def sha256_of(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        fail(f"cannot read the dataset {path}: {error}")


def plan(args: Args, words: dict[str, list[str]]) -> list[Job]:
    """The jobs in the order in which they should start: task by task, then seed by seed, all algorithms of a seed."""
    jobs, root = [], Path(args.runs_root).resolve()
    tasks = dict(task.partition("=")[::2] for task in args.tasks)
    if len(tasks) < len(set(args.tasks)) or not all(re.fullmatch(r"\w[\w.-]*", task) for task in tasks):
        fail(f"--tasks {' '.join(args.tasks)}: each is a task's name or TASK=FILE, and names a folder, so only once")
    if args.seeds < 1 or args.cpus_per_run < 1 or args.retries < 0 or not 0 <= args.gpus_per_run <= 1:
        fail("--seeds and --cpus-per-run are at least 1, --retries at least 0, --gpus-per-run between 0 and 1")
    if not (args.algorithms and tasks):
        fail("--algorithms and --tasks need at least one each")
    for task, path in tasks.items():
        sha256 = sha256_of(path) if path else None
        for seed in range(1, args.seeds + 1):
            group = {}
            for algorithm in dict.fromkeys(args.algorithms):
                given = parse_flags(words[algorithm])
                flags = {"env-id": [task], "seed": [str(seed)]}
                flags |= {} if algorithm == "rambo" else {"penalty": [algorithm]}
                flags |= {"dataset-path": [str(Path(path).resolve())]} if path else {}
                flags |= {"torch-threads": [str(args.cpus_per_run)]} | given
                if args.gpus_per_run == 0:
                    flags.setdefault("device", ["cpu"])
                decisive = {name: value for name, value in given.items() if name.removeprefix("no-") not in TECHNICAL}
                name = f"{task}__{algorithm}__{seed}"
                script = str(SCRIPTS / ("rambo_baseline.py" if algorithm == "rambo" else "micro.py"))
                job = Job(name, root / name, script, flags, dict(flags=decisive, dataset=sha256))
                group[algorithm] = job
            trainer = next((group[algorithm] for algorithm in SHARING if algorithm in group), None)
            for algorithm, job in group.items():
                if algorithm in SHARING and job is not trainer and ensemble_flags(job) == ensemble_flags(trainer):
                    job.trainer = trainer
            jobs += group.values()
    return jobs


def ensemble_flags(job: Job) -> dict:
    return {name: value for name, value in job.flags.items() if name.startswith("dynamics") or name == "num-models"}


def run_folder(job_folder: Path) -> Path | None:
    """The run that was begun in a job's folder. Its args.json is the first file of a run: without it nothing is lost."""
    return next((path.parent for path in sorted(job_folder.glob("*/args.json"))), None)


def skip_finished(jobs: list[Job]) -> None:
    """Marks what is done, and refuses to skip or to resume a run that was begun with other flags or data."""
    for job in jobs:
        if run := run_folder(job.folder):
            try:
                before = json.loads((job.folder / "job.json").read_text())
                flags = before["flags"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                fail(f"{job.folder} holds a run, but not what this sweep asked of it: {error!r}; give another --runs-root")
            now = job.identity["flags"]
            changes = [
                f"--{name} was {' '.join(flags[name]) or 'given' if name in flags else 'not given'} and is now "
                f"{' '.join(now[name]) or 'given' if name in now else 'not given'}"
                for name in sorted(flags.keys() | now.keys())
                if flags.get(name) != now.get(name)
            ] + ["the dataset is another file"] * (before.get("dataset") != job.identity["dataset"])
            if changes:
                fail(f"{job.name} was begun in {job.folder.parent} otherwise: {', '.join(changes)}; give the same flags, "
                     "or another --runs-root")  # fmt: skip
            if (run / "result.json").exists():
                job.state, job.note = "done", f"{final_score(run)}, in an earlier sweep"


def final_score(run: Path) -> str:
    return f"score {json.loads((run / 'result.json').read_text())['last_10_mean']:.1f}"


# --- one run, on whichever node -----------------------------------------------------------------------------------------
# The training process must not outlive the one that watches it, or the run could be resumed beside it: Linux kills it.
GUARD = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the process that started this one is gone")
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def run_job(folder: str, script: str, flags: dict, threads: int, stop: str, environment: dict) -> tuple[int, str]:
    """Starts or resumes a job's run and waits for it: exit status, and its score or the last line of its log."""
    job_folder = Path(folder)
    with open(job_folder / "log.txt", "ab") as log:
        for attempt in range(150):  # the training process holds the lock too, through its output
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.2)
        else:
            return 1, "another process is running it"
        run = run_folder(job_folder)
        if run:
            flags = {name: value for name, value in flags.items() if name in TECHNICAL | {"torch-threads", "dataset-path"}}
        flags = {"resume": [str(run)]} | flags if run else {"runs-root": [folder]} | flags
        command = [script, *(word for name, values in flags.items() for word in (f"--{name}", *values))]
        log.write(f"$ python {shlex.join(command)}  # on {platform.node()}\n".encode())
        log.flush()
        child = subprocess.Popen(
            [sys.executable, "-c", GUARD, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,  # Ctrl-C is ours to pass on
            env=os.environ | dict(OMP_NUM_THREADS=str(threads)) | environment,
        )  # fmt: skip
        asked = False
        while child.poll() is None:
            if not asked and os.path.exists(stop):
                child.send_signal(signal.SIGTERM)  # it saves a checkpoint and ends with 143
                asked = True
            time.sleep(0.1)
    if child.returncode == 0:
        return 0, final_score(run_folder(job_folder))
    return child.returncode, last_line(job_folder / "log.txt") + killed_by(child.returncode)


def killed_by(status: int) -> str:
    return f" (killed by {signal.Signals(-status).name})" if status < 0 else ""


def last_line(log: Path) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.path.getsize(log) - 4096))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


class ProcessPool:
    """Runs on this machine; a thread waits for each."""

    def __init__(self, args: Args):
        gpus = visible_gpus() if args.gpus_per_run else []
        places = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self.places = places // args.cpus_per_run
        self.free = [dict(CUDA_VISIBLE_DEVICES=gpu) for _ in range(int(1 / (args.gpus_per_run or 1))) for gpu in gpus]
        if args.gpus_per_run:
            self.places = min(self.places, len(self.free))
        else:
            self.free = [{}] * self.places
        if self.places == 0:
            fail(f"this machine has {places} cores and {len(gpus)} GPUs: too few for one run with --cpus-per-run "
                 f"{args.cpus_per_run} and --gpus-per-run {args.gpus_per_run}")  # fmt: skip
        self.pool = concurrent.futures.ThreadPoolExecutor(self.places)

    def slots(self) -> int:
        return self.places

    def submit(self, *request):
        def run_with_gpu():
            environment = self.free.pop(0)
            try:
                return run_job(*request, environment)
            finally:
                self.free.append(environment)

        return self.pool.submit(run_with_gpu)

    def finished(self, handles: list) -> list:
        return list(concurrent.futures.wait(handles, 1, concurrent.futures.FIRST_COMPLETED).done)

    def outcome(self, handle) -> tuple[int, str]:
        return handle.result()

    def close(self) -> None:
        self.pool.shutdown()


def visible_gpus() -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True) if shutil.which("nvidia-smi") else None
    return [str(i) for i in range(len(re.findall("^GPU ", listed.stdout, re.M)))] if listed else []


class RayPool:
    """Runs wherever Ray finds room. Ray retries nothing itself: a lost worker is an attempt that failed."""

    def __init__(self, args: Args, ray):
        self.ray, self.args, self.own = ray, args, not ray.is_initialized()
        if self.own and args.ray_address:
            ray.init(address=args.ray_address, log_to_driver=False)
        elif self.own:
            ray.init(address="local", include_dashboard=False, log_to_driver=False)
        self.remote = ray.remote(num_cpus=args.cpus_per_run, num_gpus=args.gpus_per_run, max_retries=0)(run_job)
        if not args.ray_address and self.slots() == 0:
            self.close()
            fail(f"this machine has too few cores or GPUs for one run with --cpus-per-run {args.cpus_per_run} and "
                 f"--gpus-per-run {args.gpus_per_run}")  # fmt: skip

    def slots(self) -> int:
        there = self.ray.cluster_resources()
        places = int(there.get("CPU", 0) / self.args.cpus_per_run)
        if self.args.gpus_per_run:
            places = min(places, int(there.get("GPU", 0)) * int(1 / self.args.gpus_per_run))
        return places + bool(self.args.ray_address)  # one that waits tells a cluster to grow, if it can

    def submit(self, *request):
        return self.remote.remote(*request, {})  # Ray sets the visible GPUs

    def finished(self, handles: list) -> list:
        return self.ray.wait(handles, num_returns=1, timeout=1)[0]

    def outcome(self, handle) -> tuple[int, str]:
        return self.ray.get(handle)

    def close(self) -> None:
        if self.own:
            self.ray.shutdown()


def choose_pool(args: Args) -> ProcessPool | RayPool:
    try:
        import ray
    except ImportError:
        ray = None
    if args.ray_address and (args.local or not ray):
        fail("--ray-address needs Ray (pip install -r requirements-dev.txt), and no --local")
    pool = ProcessPool(args) if args.local or not ray else RayPool(args, ray)
    how = f"Ray {ray.__version__}" if isinstance(pool, RayPool) else "a local pool of processes"
    print(f"{how}{'' if ray else ' (Ray is not installed)'}: up to {pool.slots()} runs at a time", flush=True)
    return pool


# --- the sweep --------------------------------------------------------------------------------------------------------
received_signals = []


def ask_to_stop(number: int, _) -> None:
    """The runs save and end; a second signal ends all at once."""
    received_signals.append(number)
    signal.signal(number, signal.SIG_DFL)


def next_ready(jobs: list[Job]) -> Job | None:
    """The first job that waits for nothing. One that needs a dynamics ensemble takes no place until it is there."""
    for job in jobs:
        if job.state == "queued":
            if job.trainer and not run_folder(job.folder):  # (a run that has begun knows its own)
                path = next(job.trainer.folder.glob("*/dynamics.pt"), None)
                if path:
                    job.flags["dynamics-path"] = [str(path)]
                elif job.trainer.state == "failed":
                    job.state, job.note = "failed", f"it needs the dynamics ensemble of {job.trainer.name}, which failed"
                    continue
                elif job.trainer.state != "done":  # done, and its dynamics.pt was deleted: train one
                    continue
            return job


def run_sweep(jobs: list[Job], pool: ProcessPool | RayPool, args: Args, stop: Path) -> None:
    handles, lines_drawn, shown = {}, 0, {}
    while True:
        while not received_signals and len(handles) < pool.slots() and (job := next_ready(jobs)):
            job.folder.mkdir(parents=True, exist_ok=True)
            write_file(job.folder / "job.json", json.dumps(job.identity))
            log = job.folder / "log.txt"
            job.log_size = log.stat().st_size if log.exists() else 0
            job.state, job.attempts = "submitted", job.attempts + 1
            handles[pool.submit(str(job.folder), job.script, job.flags, args.cpus_per_run, str(stop))] = job
        lines_drawn = show(jobs, lines_drawn, shown)
        if not handles:
            return
        for handle in pool.finished(list(handles)):
            job = handles.pop(handle)
            try:
                status, job.note = pool.outcome(handle)
            except Exception as error:  # the worker or its node was lost, or could not write
                status, job.note = 1, str(error).strip().split("\n")[0]
            if status == 0:
                job.state = "done"
            elif received_signals or job.attempts <= args.retries:
                job.state, job.note = "queued", f"attempt {job.attempts} ended: {job.note}"
            else:
                job.state = "failed"
        if received_signals and not stop.exists():
            stop.touch()
            print(f"stopping: {len(handles)} runs save a checkpoint first; once more to end at once", flush=True)
            lines_drawn = 0


def write_file(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    os.replace(part, path)


def running_note(log: Path) -> str:
    """Score and time left of the last evaluation's line; before the first one, the log's last line."""
    line = last_line(log)
    seen = re.match(r"update (\d+): score (\S+) .* (\d+) min left", line)
    if not seen:
        return line
    left = max(0.0, int(seen[3]) - (time.time() - log.stat().st_mtime) / 60)
    return f"update {seen[1]}, score {seen[2]}, {left:.0f} min left"


def show(jobs: list[Job], lines_drawn: int, shown: dict) -> int:
    """On a terminal a table, drawn over the last one; elsewhere a line for each change. Returns the lines drawn."""
    lines = []
    for job in jobs:
        log = job.folder / "log.txt"
        if job.state == "submitted" and log.exists() and log.stat().st_size > job.log_size:
            job.state = "running"
        note = running_note(log) if job.state == "running" else job.note
        if job.state == "queued" and job.trainer and job.trainer.state != "done" and not note:
            note = f"needs the dynamics ensemble of {job.trainer.name}"
        word = "queued" if job.state == "submitted" else job.state
        again = f" (attempt {job.attempts})" if job.attempts > 1 and word == "running" else ""
        lines.append((word, f"{job.name:{max(len(job.name) for job in jobs)}}  {word}{again}  {note}"))
        change = (word, job.attempts, job.note)
        if not sys.stdout.isatty() and shown.get(job.name) != change and (shown or word != "queued" or job.attempts):
            print(f"{job.name}: {word}{again}{': ' if job.note and word != 'running' else ''}"
                  f"{job.note if word != 'running' else ''}", flush=True)  # fmt: skip
        shown[job.name] = change
    if not sys.stdout.isatty():
        return 0
    width, height = shutil.get_terminal_size()
    words = [word for word, _ in lines]
    counts = ", ".join(f"{words.count(word)} {word}" for word in ("queued", "running", "done", "failed"))
    for dropped in ("done", "queued", "failed", "running"):  # where not all fit, what matters least goes first
        if len(lines) > height - 3:
            lines = [line for line in lines if line[0] != dropped]
    text = [line[:width - 1] for _, line in lines] + [counts[:width - 1]]  # fmt: skip
    print((f"\x1b[{lines_drawn}F" if lines_drawn else "") + "\x1b[J" + "\n".join(text), flush=True)
    return len(text)


def main(argv: list[str]) -> int:
    own, words = split_command_line(argv)
    args = tyro.cli(Args, args=own, description=__doc__)
    jobs = plan(args, words)
    skip_finished(jobs)
    todo = sum(job.state != "done" for job in jobs)
    print(f"{len(jobs)} runs, of which {len(jobs) - todo} are finished, in {args.runs_root}", flush=True)
    stop = Path(args.runs_root).resolve() / f".stop-{platform.node()}-{os.getpid()}-{time.time_ns()}"
    if todo:
        pool = choose_pool(args)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, ask_to_stop)
        try:
            run_sweep(jobs, pool, args, stop)
        finally:
            stop.unlink(missing_ok=True)
        pool.close()
    failed = [job for job in jobs if job.state == "failed"]
    for job in failed:
        print(f"failed after {job.attempts} attempts: {job.name}: {job.note}; see {job.folder / 'log.txt'}")
    if received_signals:
        print("interrupted; the same command goes on from the checkpoints")
        return 128 + received_signals[0]
    print(f"{len(jobs) - len(failed)} done, {len(failed)} failed" + "; the same command tries them again" * bool(failed))
    print(f"tables and figures: python sweep.py report --runs-root {args.runs_root}")
    return 1 if failed else 0


# --- the report -------------------------------------------------------------------------------------------------------
# As the paper reports them; it copied its rivals' scores from their own papers.
PAPER_METHODS = ("MICRO", "ARMOR", "RAMBO", "COUNT", "MOBILE", "EDAC", "ATAC", "PBRL", "IQL")
PAPER_SCORES = {  # Table 1, normalised scores
    "halfcheetah-medium": (73.9, 54.2, 77.6, 76.5, 74.6, 65.9, 54.3, 57.9, 47.4),
    "hopper-medium": (106.5, 101.4, 92.8, 103.6, 106.6, 101.6, 102.8, 75.3, 66.3),
    "walker2d-medium": (86.6, 90.7, 86.9, 87.6, 87.7, 92.5, 91.0, 89.6, 78.3),
    "halfcheetah-medium-replay": (71.5, 50.5, 68.9, 71.5, 71.7, 61.3, 49.5, 45.1, 44.2),
    "hopper-medium-replay": (104.6, 97.1, 96.6, 101.7, 103.9, 101.0, 102.8, 100.6, 94.7),
    "walker2d-medium-replay": (94.2, 85.6, 85.0, 87.7, 89.9, 87.1, 94.1, 77.7, 73.9),
    "halfcheetah-medium-expert": (106.8, 93.5, 93.7, 100.0, 108.2, 106.3, 95.5, 92.3, 86.7),
    "hopper-medium-expert": (113.1, 103.4, 83.3, 111.4, 112.6, 110.7, 112.6, 110.8, 91.5),
    "walker2d-medium-expert": (116.3, 112.2, 68.3, 112.3, 115.2, 114.7, 116.3, 110.1, 109.6),
    "average": (97.1, 87.6, 83.7, 94.7, 96.7, 93.5, 91.0, 84.5, 76.9),
}
PAPER_MICRO_STD = dict(zip(PAPER_SCORES, (1.7, 0.8, 1.5, 1.9, 0.9, 0.9, 1.4, 0.4, 0.7)))
PAPER_SECONDS = {  # Table 2, of a whole run: MICRO, RAMBO
    "halfcheetah": (48031.4, 133438.0),
    "hopper": (45647.6, 118020.2),
    "walker2d": (49271.5, 132339.5),
    "mean": (47650.2, 127932.7),
}
PHASES = ("dynamics", "cloning", "adversary", "rollouts", "updates", "evaluation")
NO_SETTING = {"env_id", "seed", "device", "torch_threads", "compile", "track", "runs_root", "resume", "eval_only",
              "dataset_path", "dataset_base_url", "dynamics_path", "checkpoint_every"}  # fmt: skip
COLOURS = dict(zip(ALGORITHMS, ("#0072B2", "#E69F00", "#CC79A7", "#56B4E9", "#D55E00")))  # Okabe and Ito's: for all eyes


@dataclass
class Row:
    """The runs of one algorithm, with the same settings, on the same data: one for each seed."""

    task: str
    data: str  # "D4RL", or the stand-in's file
    label: str  # the algorithm, and the settings that tell it from others on the same data
    algorithm: str
    results: dict[int, dict]  # seed -> result.json

    def final(self, count: int) -> np.ndarray:
        return np.array([result[f"last_{count}_mean"] for result in self.results.values()])


def read_results(root: Path) -> list[Row]:
    """Groups that are never mixed: by task, the data's SHA-256, algorithm, and every setting that matters."""
    groups, folders = defaultdict(dict), {}
    for path in sorted(root.rglob("result.json")):
        try:
            result = json.loads(path.read_text())
            args, data, algorithm = result["args"], result["dataset"], result["algorithm"]
            name = "D4RL" if data["is_d4rl"] else f"{data['file']} ({data['sha256'][:6]})"
            result["evaluations"][-1]["score"], result["seconds"]["updates"], result["last_10_mean"]
            settings = json.dumps({key: args[key] for key in sorted(args.keys() - NO_SETTING)})
            key = (args["env_id"], name, data["sha256"], algorithm, settings)
            seed = args["seed"]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            fail(f"{path} is not the result of a run: {error!r}")
        if seed in groups[key]:
            fail(f"{folders[key, seed]} and {path.parent} are the same run: same task, data, algorithm, settings and seed")
        groups[key][seed], folders[key, seed] = result, path.parent
    if not groups:
        fail(f"there is no result.json in or below {root}")
    variants = defaultdict(list)
    for key in groups:
        variants[key[:4]].append(json.loads(key[4]))
    rows = []
    for key, results in groups.items():
        task, data, _, algorithm, settings = key
        settings, others = json.loads(settings), variants[key[:4]]
        differing = sorted({name for other in others for name in other.keys() | settings.keys()
                            if other.get(name) != settings.get(name)})  # fmt: skip
        label = " ".join([algorithm, *(f"{name}={settings.get(name)}" for name in differing)])
        rows.append(Row(task, data, label, algorithm, dict(sorted(results.items()))))
    return sorted(rows, key=lambda row: (row.data != "D4RL", row.task, row.data, ALGORITHMS.index(row.algorithm), row.label))


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """Of runs x tasks, flattened: the mean of what is left without the lowest and the highest quarter. Batched in front."""
    flat = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = int(0.25 * flat.shape[-1])
    return flat[..., cut : flat.shape[-1] - cut].mean(-1)


def bootstrap_interval(scores: np.ndarray, samples: int = 20_000, seed: int = 0) -> tuple[float, float]:
    """95 % of the interquartile means when the runs of each task are drawn again with replacement, tasks apart."""
    runs, tasks = scores.shape
    picks = np.random.default_rng(seed).integers(runs, size=(samples, runs, tasks))
    drawn = np.take_along_axis(scores[None], picks, axis=1)
    return tuple(np.percentile(interquartile_mean(drawn), [2.5, 97.5]))


def score_table(rows: list[Row]) -> list[dict]:
    table = []
    for row in rows:
        task = row.task.removesuffix("-v2")
        scores = [[evaluation["score"] for evaluation in result["evaluations"]] for result in row.results.values()]
        rise = np.mean([np.mean(score[-10:]) - np.mean(score[-20:-10]) for score in scores if len(score) >= 20] or [np.nan])
        line = dict(task=row.task, data=row.data, algorithm=row.label, seeds=len(row.results), updates=updates_of(row))
        line |= {f"last {n}": spread(row.final(n)) for n in (5, 10)}
        line |= {"change over the last 10": "–" if np.isnan(rise) else f"{rise:+.1f}"}
        if row.data == "D4RL":
            methods = dict(zip(PAPER_METHODS, PAPER_SCORES.get(task, ())))
            reported = methods.get(row.algorithm.upper())
            std = f" ± {PAPER_MICRO_STD[task]}" if row.algorithm == "micro" and reported else ""
            line |= {"reported by the paper": f"{reported}{std}" if reported else "–"}
        table.append(line)
    return table


def updates_of(row: Row) -> int:
    return next(iter(row.results.values()))["evaluations"][-1]["update"]


def spread(values: np.ndarray) -> str:
    return f"{values.mean():.1f} ± {values.std():.1f}" if len(values) > 1 else f"{values.mean():.1f}"


def aggregate_table(rows: list[Row]) -> list[dict]:
    """Of each set of tasks that some algorithm has, for every algorithm that has them all: like is compared with like."""
    by_label = defaultdict(dict)
    for row in rows:
        by_label[row.label][row.task, row.data] = row
    table = []
    for tasks in sorted({tuple(sorted(own)) for own in by_label.values()}, key=lambda tasks: (-len(tasks), tasks)):
        for label, own in by_label.items():
            seeds = sorted(set.intersection(*(set(own[task].results) for task in tasks))) if set(tasks) <= own.keys() else []
            if seeds:
                line = dict(tasks=", ".join(task for task, _ in tasks), algorithm=label, seeds=len(seeds))
                for n in (5, 10):
                    finals = [[own[task].results[seed][f"last_{n}_mean"] for task in tasks] for seed in seeds]
                    low, high = bootstrap_interval(np.array(finals))
                    line |= {f"IQM of last {n}": round(float(interquartile_mean(np.array(finals))), 2)}
                    line |= {f"95 % from ({n})": round(low, 2), f"to ({n})": round(high, 2)}
                table.append(line)
    return table


def time_table(rows: list[Row]) -> list[dict]:
    table = []
    for row in rows:
        results = list(row.results.values())
        line = dict(task=row.task, data=row.data, algorithm=row.label, runs=len(results), updates=updates_of(row))
        for phase in PHASES:
            own = [result for result in results if phase != "dynamics" or not result["args"].get("dynamics_path")]
            there = [result["seconds"][phase] for result in own if phase in result["seconds"]]
            line[f"{phase}, s"] = f"{np.mean(there):.0f}" if there else "shared" if phase == "dynamics" else "–"
        line["ms per update"] = f"{milliseconds_per_update(row):.2f}"
        machines = {f"{result['machine']['device']}, {result['machine']['threads']} threads" for result in results}
        table.append(line | dict(machine="; ".join(sorted(machines))))
    return table


def milliseconds_per_update(row: Row) -> float:
    """All that an update costs but evaluation: its own time, and its share of rollouts and adversarial updates."""
    times = [sum(result["seconds"].get(phase, 0.0) for phase in ("updates", "rollouts", "adversary"))
             / result["evaluations"][-1]["update"] for result in row.results.values()]  # fmt: skip
    return 1000 * float(np.mean(times))


def ratio_table(rows: list[Row]) -> list[dict]:
    """MICRO's time beside RAMBO's on the same data, where the machine was the same too."""
    machines = {id(row): {(r["machine"]["device"], r["machine"]["threads"]) for r in row.results.values()} for row in rows}
    table = []
    for ours in rows:
        for rival in rows:
            if (ours.algorithm, rival.algorithm) == ("micro", "rambo") and (ours.task, ours.data) == (rival.task, rival.data):
                times = milliseconds_per_update(ours), milliseconds_per_update(rival)
                line = dict(task=ours.task, data=ours.data, ours=ours.label, rival=rival.label)
                line |= {"MICRO, ms per update": f"{times[0]:.2f}", "RAMBO, ms per update": f"{times[1]:.2f}"}
                same = len(machines[id(ours)] | machines[id(rival)]) == 1
                line |= {"MICRO / RAMBO": f"{times[0] / times[1]:.2f}" if same else "not on the same machine"}
                paper = PAPER_SECONDS.get(ours.task.split("-")[0])
                line |= {"reported by the paper, whole runs": f"{paper[0] / paper[1]:.2f}" if paper else "–"}
                table.append(line)
    return table


def markdown(table: list[dict]) -> str:
    lines = [list(table[0]), ["---"] * len(table[0]), *(list(line.values()) for line in table)]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines) + "\n"


def paper_tables() -> str:
    scores = [dict(task=task) | dict(zip(PAPER_METHODS, values)) for task, values in PAPER_SCORES.items()]
    for line in scores[:-1]:
        line["MICRO"] = f"{line['MICRO']} ± {PAPER_MICRO_STD[line['task']]}"
    seconds = [dict(environment=name, MICRO=ours, RAMBO=rival) | {"MICRO / RAMBO": f"{ours / rival:.2f}"}
               for name, (ours, rival) in PAPER_SECONDS.items()]  # fmt: skip
    return (
        "## Reported by the paper\n\nLiu et al., IJCAI 2024, on D4RL's v2 datasets; nothing here was measured by this "
        "repository. Table 1, normalised scores (the rivals' were copied there from their own papers):\n\n"
        + markdown(scores)
        + "Table 2, seconds of a run; the number of updates is not stated there (the released codes' defaults are 3M for "
        "MICRO and 2M for RAMBO):\n\n"
        + markdown(seconds)
    )


def draw_curves(rows: list[Row], path: Path) -> None:
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((row.task, row.data) for row in rows))
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure, axes = plt.subplots(down, across, figsize=(4.6 * across, 3.5 * down), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (task, data) in zip(axes.flat, panels):
        own = [row for row in rows if (row.task, row.data) == (task, data)]
        for row in own:
            evaluations = [result["evaluations"] for result in row.results.values()]
            updates = [evaluation["update"] for evaluation in evaluations[0]]
            scores = np.array([[evaluation["score"] for evaluation in one] for one in evaluations])
            mean, std = scores.mean(0), scores.std(0)
            twins = [other.label for other in own if other.algorithm == row.algorithm]
            style = ("-", "--", ":", "-.")[twins.index(row.label) % 4]
            label = f"{row.label}, {len(scores)} seed{'s' * (len(scores) > 1)}"
            axis.plot(updates, mean, style, color=COLOURS[row.algorithm], label=label, linewidth=1.4)
            axis.fill_between(updates, mean - std, mean + std, color=COLOURS[row.algorithm], alpha=0.18, linewidth=0)
        axis.set_title(f"{task}\n{data if data == 'D4RL' else f'stand-in data: {data}'}", fontsize=9)
        axis.set(xlabel="updates", ylabel="normalised score")
        axis.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_aggregate(table: list[dict], kind: str, path: Path) -> None:
    import matplotlib.pyplot as plt

    sets = list(dict.fromkeys(line["tasks"] for line in table))
    figure, axes = plt.subplots(1, len(sets), figsize=(4.4 * len(sets), 3.6), squeeze=False, layout="constrained")
    for axis, tasks in zip(axes.flat, sets):
        own = [line for line in table if line["tasks"] == tasks]
        middle = np.array([line["IQM of last 10"] for line in own])
        ends = np.array([[line["95 % from (10)"], line["to (10)"]] for line in own]).T
        colours = [COLOURS[line["algorithm"].split()[0]] for line in own]
        axis.bar(range(len(own)), middle, color=colours, yerr=np.abs(ends - middle), capsize=5, width=0.65)
        names = [f"{line['algorithm'].replace(' ', chr(10))}\n{line['seeds']} seeds" for line in own]
        axis.set_xticks(range(len(own)), names, fontsize=8)
        count = len(tasks.split(", "))
        axis.set_title(f"{kind}: {tasks if count == 1 else f'{count} tasks'}", fontsize=9)
        axis.set_ylabel("IQM of normalised scores, 95 % interval")
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(args: ReportArgs) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    root, output = Path(args.runs_root), Path(args.output_dir)
    rows = read_results(root)
    output.mkdir(parents=True, exist_ok=True)
    unfinished = sorted(str(path.parent.relative_to(root)) for path in root.rglob("args.json")
                        if not (path.parent / "result.json").exists())  # fmt: skip
    runs = sum(len(row.results) for row in rows)
    text = f"# Results\n\n{runs} finished runs, written by `sweep.py report`."
    text += f" Unfinished, and left out: {', '.join(unfinished)}." if unfinished else ""
    text += ("\n\nA score is the mean of a run's last 5 or last 10 evaluations, ± the standard deviation over seeds "
             "(divided by n). *Change over the last 10* is their mean minus that of the 10 before: where it is well above "
             "0, the curve is still rising.")  # fmt: skip
    if any(len(result["evaluations"]) < 10 for row in rows for result in row.results.values()):
        text += " Runs with fewer than 10 evaluations count all they have."
    text += "\n\n"
    kinds = {"D4RL data": [row for row in rows if row.data == "D4RL"]}
    kinds |= {"Stand-in data": [row for row in rows if row.data != "D4RL"]}
    for kind, own in kinds.items():
        if not own:
            continue
        stem = kind.split()[0].lower()
        aggregate = aggregate_table(own)
        tables = {"scores": score_table(own), "aggregate": aggregate, "times": time_table(own), "ratios": ratio_table(own)}
        for name, table in tables.items():
            if table:
                with open(output / f"{stem}-{name}.csv", "w", newline="") as file:
                    writer = csv.DictWriter(file, table[0])
                    writer.writeheader()
                    writer.writerows(table)
        draw_curves(own, output / f"{stem}-curves.png")
        draw_aggregate(aggregate, kind, output / f"{stem}-aggregate.png")
        text += f"## {kind}\n\n"
        if kind != "D4RL data":
            text += "**Not D4RL's data: no score here can be compared with a published one, the paper's below included.**\n\n"
        text += markdown(tables["scores"]) + f"![learning curves]({stem}-curves.png)\n\nMean over seeds; the band is ± one "
        text += ("standard deviation.\n\nInterquartile mean (IQM) over runs and tasks, with 95 % stratified bootstrap "
                 "intervals (20 000 samples), as rliable defines them. Each set of tasks stands for itself; only algorithms "
                 "that have all of its tasks are in it, with the seeds that they have on every one of them. With two or "
                 "three runs a task, an interval says little.\n\n")  # fmt: skip
        text += markdown(aggregate) + f"![aggregate]({stem}-aggregate.png)\n\nSeconds of a run in each phase, mean over "
        text += ("seeds. *Shared*: the ensemble was trained by another run of the same task and seed. *ms per update*: "
                 "updates, rollouts and adversarial updates over the number of updates; no evaluation.\n\n")  # fmt: skip
        text += markdown(tables["times"])
        if tables["ratios"]:
            text += "MICRO's cost beside RAMBO's, and the paper's claim (its Table 2):\n\n" + markdown(tables["ratios"])
    write_file(output / "report.md", text + paper_tables().rstrip() + "\n")
    print(f"{runs} runs: {output / 'report.md'}")
    return output / "report.md"


if __name__ == "__main__":
    if sys.argv[1:2] == ["report"]:
        report(tyro.cli(ReportArgs, args=sys.argv[2:], description="Tables and figures of finished runs."))
    else:
        raise SystemExit(main(sys.argv[1:]))
