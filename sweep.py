"""Every combination of algorithms, tasks and seeds, over Ray or on this machine alone; then tables and figures of it.

    python sweep.py --algorithms micro mobile rambo --tasks hopper-medium-v2 walker2d-medium-v2=my.hdf5 --seeds 4
    python sweep.py --algorithms micro rambo -- --total-updates 100000 -- rambo --total-updates 50000
    python sweep.py report --runs-root runs/sweep --output-dir report

A combination is a process of micro.py or rambo_baseline.py with a folder of its own, <task>__<algorithm>__<seed>/ in
--runs-root, and its output in log.txt there. One that fails, or whose worker or node is lost, is resumed from its
checkpoint; the same command started again skips what is finished and goes on with the rest. What follows `--` goes to
every run or, after an algorithm's name, to the runs of that algorithm. The dynamics ensemble is trained once for a task
and seed, by the first of micro, eq8, none and mobile that is in the sweep, with its presets; the others wait for it
without taking a place. On a cluster, this folder, Python and --runs-root must be at the same path on every node.
"""

import csv
import fcntl
import hashlib
import io
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
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np
import tyro

SCRIPTS = Path(__file__).resolve().parent
ALGORITHMS = ("micro", "mobile", "eq8", "none", "rambo")
SHARING = ("micro", "eq8", "none", "mobile")  # RAMBO's ensemble sees standardised observations: it serves nobody else
OURS = {"env-id", "seed", "penalty", "runs-root", "resume", "eval-only", "dataset-path", "torch-threads"}
TECHNICAL = {"device", "track", "compile", "checkpoint-every", "dataset-base-url"}  # may change when a sweep goes on


@dataclass
class Args:
    algorithms: tuple[Literal["micro", "mobile", "eq8", "none", "rambo"], ...] = ("micro", "mobile", "rambo")
    """micro.py with each --penalty, and rambo_baseline.py"""
    tasks: tuple[str, ...] = ("hopper-medium-replay-lite",)
    """--env-id of the runs, one task after the other; TASK=FILE.hdf5 gives it other data"""
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
    """a Ray cluster, e.g. auto or host:6379 (default: a Ray of its own on this machine)"""
    retries: int = 2
    """how often a failed run is resumed before it is given up"""


@dataclass
class ReportArgs:
    runs_root: str = "runs/sweep"
    """every result.json in or below it is used"""
    output_dir: str = "report"
    """where report.md, its tables as .csv and its figures go"""


def fail(message: str) -> NoReturn:
    """One line that says what is wrong, and exit status 1."""
    raise SystemExit(f"{Path(__file__).name}: {' '.join(message.split())}")


def say(text: str) -> None:
    with suppress(OSError):  # a terminal that was closed, a pipe that nobody reads: the runs go on
        print(text, flush=True)


def write_file(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text)
        os.replace(part, path)
    except OSError as error:
        fail(f"cannot write {path}: {error}")


# --- the queue --------------------------------------------------------------------------------------------------------
@dataclass
class Job:
    """One combination."""

    name: str
    folder: Path
    script: str
    flags: dict[str, list[str]]  # without dashes -> values
    identity: dict  # all that decides the result: it must be the same when a sweep goes on
    trainer: "Job | None" = None  # whose dynamics ensemble it uses
    state: str = "queued"  # -> submitted -> running -> done or failed, or queued again
    attempts: int = 0
    note: str = ""
    log_size: int = 0  # when it was submitted: once the log grows, it runs


def split_command_line(argv: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The sweep's own words, and those for the runs of each algorithm: the common ones, then its own."""
    sections = [[]]
    for word in argv:
        if word == "--":
            sections.append([])
        else:
            sections[-1].append(word)
    own, *others = sections
    common = [word for section in others if not set(section[:1]) & set(ALGORITHMS) for word in section]
    return own, {
        algorithm: common + [word for section in others if section[:1] == [algorithm] for word in section[1:]]
        for algorithm in ALGORITHMS
    }


def parse_flags(words: list[str]) -> dict[str, list[str]]:
    """['--beta', '1', '--no-compile'] -> {'beta': ['1'], 'no-compile': []}; the last of several wins."""
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
            fail(f"after -- come flags, or one of {', '.join(ALGORITHMS)} and its flags, not {word}")
    if reserved := OURS & flags.keys():
        fail(f"--{min(reserved)} is set by the sweep itself: see --algorithms, --tasks, --seeds and --cpus-per-run")
    return flags


def sha256_of(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        fail(f"cannot read the dataset {path}: {error}")


def plan(args: Args, words: dict[str, list[str]]) -> list[Job]:
    """Jobs in the order in which they should start: task by task, then seed by seed, so that comparisons come early."""
    tasks = dict(task.partition("=")[::2] for task in args.tasks)
    if len(tasks) < len(set(args.tasks)) or not all(re.fullmatch(r"\w[\w.-]*", task) for task in tasks):
        fail(f"--tasks {' '.join(args.tasks)}: each is TASK or TASK=FILE, and as it names a folder, there only once")
    if min(len(tasks), len(args.algorithms), args.seeds, args.cpus_per_run) < 1:
        fail("--tasks and --algorithms need one at least, and --seeds and --cpus-per-run are at least 1")
    if args.retries < 0 or not 0 <= args.gpus_per_run <= 1:
        fail("--retries is at least 0, and --gpus-per-run between 0 and 1")
    jobs = []
    for task, path in tasks.items():
        sha256 = sha256_of(path) if path else None
        for seed in range(1, args.seeds + 1):
            group = {}
            for algorithm in dict.fromkeys(args.algorithms):
                given = parse_flags(words[algorithm])
                flags = {"env-id": [task], "seed": [str(seed)], "torch-threads": [str(args.cpus_per_run)]}
                flags |= {"dataset-path": [str(Path(path).resolve())]} if path else {}
                flags |= {} if algorithm == "rambo" else {"penalty": [algorithm]}
                flags |= {} if args.gpus_per_run else {"device": ["cpu"]}
                decisive = {name: value for name, value in given.items() if name.removeprefix("no-") not in TECHNICAL}
                name = f"{task}__{algorithm}__{seed}"
                script = str(SCRIPTS / ("rambo_baseline.py" if algorithm == "rambo" else "micro.py"))
                identity = dict(flags=decisive, dataset=sha256, ensemble=None)
                group[algorithm] = Job(name, Path(args.runs_root).resolve() / name, script, flags | given, identity)
            trainer = next((group[algorithm] for algorithm in SHARING if algorithm in group), None)
            for algorithm in set(group) & set(SHARING):
                if group[algorithm] is not trainer and ensemble_flags(group[algorithm]) == ensemble_flags(trainer):
                    group[algorithm].trainer, group[algorithm].identity["ensemble"] = trainer, trainer.name
            jobs += group.values()
    return jobs


def ensemble_flags(job: Job) -> dict:
    return {name: value for name, value in job.flags.items() if name.startswith("dynamics") or name == "num-models"}


def run_folder(job_folder: Path) -> Path | None:
    """The run that was begun in a job's folder. A run's first file is args.json: without it nothing is lost."""
    return next((path.parent for path in sorted(job_folder.glob("*/args.json"))), None)


def final_score(run: Path) -> str:
    return f"score {json.loads((run / 'result.json').read_text())['last_10_mean']:.1f}"


def skip_finished(jobs: list[Job]) -> None:
    """Marks what is done. A run that was begun with other flags or data is neither skipped nor resumed."""
    for job in jobs:
        if run := run_folder(job.folder):
            try:
                before = json.loads((job.folder / "job.json").read_text())
                old, new = before["flags"], job.identity["flags"]
                changed = [name for name in ("dataset", "ensemble") if before[name] != job.identity[name]]
                if (run / "result.json").exists():
                    job.state, job.note = "done", final_score(run)
            except (OSError, ValueError, KeyError, TypeError) as error:
                fail(f"{job.folder} holds a torn file, or a run that no sweep began: {error!r}; try another --runs-root")
            changed += [f"--{name} (it was {' '.join(old.get(name, ['not given']))})"
                        for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]  # fmt: skip
            if changed:
                fail(f"{job.name} was begun in {job.folder.parent} with another {', another '.join(changed)}: "
                     "give it as it was, or another --runs-root")  # fmt: skip


# --- one run, on whichever node ---------------------------------------------------------------------------------------
# The training process must not outlive the one that watches it, or two could train in one folder: Linux will kill it.
GUARD = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the process that started this one is gone")
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def run_job(folder: str, script: str, flags: dict, threads: int, stop: str, environment: dict) -> tuple[int, str]:
    """Starts or resumes a job's run and waits for it. Gives its exit status, and its score or its log's last line."""
    job_folder = Path(folder)
    with open(job_folder / "log.txt", "ab") as log:
        for _ in range(150):  # the training process holds this lock too, as long as it lives, through its output
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.2)
            except OSError:  # a file system without locks: the run's own lock warns
                break
        else:
            return 1, "another process is running it"
        if run := run_folder(job_folder):
            kept = TECHNICAL | {"torch-threads", "dataset-path"} | {f"no-{name}" for name in TECHNICAL}
            flags = {"resume": [str(run)]} | {name: value for name, value in flags.items() if name in kept}
        else:
            flags = {"runs-root": [folder]} | flags
        command = [script, *(word for name, values in flags.items() for word in (f"--{name}", *values))]
        log.write(f"$ python {shlex.join(command)}  # on {platform.node()}\n".encode())
        log.flush()
        child = subprocess.Popen(
            [sys.executable, "-c", GUARD, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,  # Ctrl-C is for us to pass on
            env=os.environ | dict(OMP_NUM_THREADS=str(threads)) | environment,
        )  # fmt: skip
        asked = False
        while child.poll() is None:
            if not asked and (asked := os.path.exists(stop)):
                child.terminate()  # it saves a checkpoint and ends with 143
            time.sleep(0.1)
    if child.returncode == 0:
        return 0, final_score(run_folder(job_folder))
    killed = f" (killed by {signal.Signals(-child.returncode).name})" if child.returncode < 0 else ""
    return child.returncode, last_line(job_folder / "log.txt") + killed


def last_line(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, os.path.getsize(log) - 4096))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip("│ ") for line in reversed(lines) if re.search(r"\w", line)), "")  # no frames of boxes


class ProcessPool:
    """Runs on this machine; a thread waits for each."""

    def __init__(self, args: Args):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        places = [{}] * cores
        if args.gpus_per_run:
            places = [dict(CUDA_VISIBLE_DEVICES=gpu) for _ in range(int(1 / args.gpus_per_run)) for gpu in gpus_here()]
        self.free = places[: cores // args.cpus_per_run]
        self.slots = len(self.free)
        self.threads = futures.ThreadPoolExecutor(max(1, self.slots))

    def submit(self, *request) -> futures.Future:
        def run() -> tuple[int, str]:
            environment = self.free.pop(0)
            try:
                return run_job(*request, environment)
            finally:
                self.free.append(environment)

        return self.threads.submit(run)

    def finished(self, handles: list) -> set:
        return futures.wait(handles, timeout=1, return_when=futures.FIRST_COMPLETED).done

    def outcome(self, handle: futures.Future) -> tuple[int, str]:
        return handle.result()

    def close(self) -> None:
        self.threads.shutdown()


def gpus_here() -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.split() if shutil.which(query[0]) else []


class RayPool:
    """Runs wherever Ray finds room. Ray retries nothing itself: a worker or node that is lost is a failed attempt."""

    def __init__(self, args: Args, ray):
        self.ray, self.args, self.own = ray, args, not ray.is_initialized()
        if self.own:
            alone = {} if args.ray_address else dict(include_dashboard=False)
            try:
                ray.init(args.ray_address or "local", log_to_driver=False, logging_level="error", **alone)
            except Exception as error:  # there are many kinds for an address at which nobody answers
                fail(f"cannot start Ray, or reach it at {args.ray_address}: {str(error).splitlines()[0]}")
        self.handles = []
        self.remote = ray.remote(num_cpus=args.cpus_per_run, num_gpus=args.gpus_per_run, max_retries=0)(run_job)

    @property
    def slots(self) -> int:  # a cluster may grow; one job more than fit tells it to
        there, slots = self.ray.cluster_resources(), float("inf")
        for resource, share in ("CPU", self.args.cpus_per_run), ("GPU", self.args.gpus_per_run):
            slots = min(slots, there.get(resource, 0) // share) if share else slots
        return int(slots) + bool(self.args.ray_address)

    def submit(self, *request):
        self.handles.append(self.remote.remote(*request, {}))  # Ray itself names the visible GPUs
        return self.handles[-1]

    def finished(self, handles: list) -> list:
        return self.ray.wait(handles, timeout=1)[0]

    def outcome(self, handle) -> tuple[int, str]:
        return self.ray.get(handle)

    def close(self) -> None:
        if self.handles:  # what still runs was asked to save and end
            self.ray.wait(self.handles, num_returns=len(self.handles))
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
    if pool.slots == 0:
        pool.close()
        fail(f"there is no room for a run with --cpus-per-run {args.cpus_per_run} --gpus-per-run {args.gpus_per_run}")
    how = f"on Ray {ray.__version__}" if isinstance(pool, RayPool) else "in a local pool of processes"
    say(f"{how}{'' if ray else ' (Ray is not installed)'}, up to {pool.slots} at a time")
    return pool


# --- the sweep --------------------------------------------------------------------------------------------------------
received_signals = []


def ask_to_stop(number: int, _) -> None:
    """The runs save and end; a second signal ends everything at once."""
    received_signals.append(number)
    signal.signal(number, signal.SIG_DFL)


def next_ready(jobs: list[Job]) -> Job | None:
    """The first job that waits for nothing."""
    for job in jobs:
        if job.state == "queued":
            if job.trainer and not run_folder(job.folder):  # a run that has begun knows its ensemble
                path = next(job.trainer.folder.glob("*/dynamics.pt"), None)
                if path:
                    job.flags["dynamics-path"] = [str(path)]
                elif job.trainer.state not in ("done", "failed"):  # then without an ensemble: this job trains its own
                    continue
            return job


def run_sweep(jobs: list[Job], pool: ProcessPool | RayPool, args: Args, stop: Path) -> None:
    handles, lines_drawn = {}, 0
    while True:
        while not received_signals and len(handles) < pool.slots and (job := next_ready(jobs)):
            write_file(job.folder / "job.json", json.dumps(job.identity))
            log = job.folder / "log.txt"
            job.log_size = log.stat().st_size if log.exists() else 0
            job.state, job.attempts = "submitted", job.attempts + 1
            handles[pool.submit(str(job.folder), job.script, job.flags, args.cpus_per_run, str(stop))] = job
        for job in jobs:
            log = job.folder / "log.txt"
            if job.state == "submitted" and log.exists() and log.stat().st_size > job.log_size:
                job.state, job.note = "running", f"attempt {job.attempts}" if job.attempts > 1 else ""
                announce(job)
        lines_drawn = draw_table(jobs, lines_drawn)
        if not handles:
            return
        for handle in pool.finished(list(handles)):
            job = handles.pop(handle)
            try:
                status, job.note = pool.outcome(handle)
            except Exception as error:  # the worker or its node was lost
                status, job.note = 1, str(error).strip().split("\n")[0][:200]
            if status == 0:
                job.state = "done"
            elif received_signals or (job.attempts <= args.retries and status != 2):  # 2: flags that are refused
                job.state, job.note = "queued", f"attempt {job.attempts} ended: {job.note}"
            else:
                job.state = "failed"
            announce(job)
        if received_signals and handles and not stop.exists():
            stop.touch()
            say(f"stopping: {len(handles)} runs save a checkpoint first; once more to end at once")
            lines_drawn = 0


def announce(job: Job) -> None:
    """Where there is no terminal, a line for each change."""
    if not sys.stdout.isatty():
        say(": ".join(filter(None, (job.name, job.state, job.note))))


def running_note(log: Path) -> str:
    """Score and time left from the last evaluation's line; before the first one, the log's last line."""
    line = last_line(log)
    if seen := re.match(r"update (\d+): score (\S+) .* (\d+) min left", line):
        left = max(0.0, int(seen[3]) - (time.time() - log.stat().st_mtime) / 60)
        return f"update {seen[1]}, score {seen[2]}, {left:.0f} min left"
    return line


def draw_table(jobs: list[Job], lines_drawn: int) -> int:
    """On a terminal, over the last table; what does not fit is left out, the done first. Returns the lines drawn."""
    if not sys.stdout.isatty():
        return 0
    lines, name_width = [], max(len(job.name) for job in jobs)
    for job in jobs:
        note = f"{job.note} {running_note(job.folder / 'log.txt')}".strip() if job.state == "running" else job.note
        if job.state == "queued" and job.trainer and job.trainer.state in ("queued", "submitted", "running"):
            note = note or f"may wait for the ensemble of {job.trainer.name}"
        state = "queued" if job.state == "submitted" else job.state
        lines.append((state, f"{job.name:{name_width}}  {state:7}  {note}"))
    states = [state for state, _ in lines]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("queued", "running", "done", "failed"))
    width, height = shutil.get_terminal_size()
    if len(lines) > height - 3:
        lines.sort(key=lambda line: ("running", "failed", "queued", "done").index(line[0]))
    text = [line[: width - 1] for _, line in lines[: max(0, height - 3)]] + [counts]
    say((f"\x1b[{lines_drawn}F" if lines_drawn else "") + "\x1b[J" + "\n".join(text))
    return len(text)


def main(argv: list[str]) -> int:
    own, words = split_command_line(argv)
    args = tyro.cli(Args, args=own, description=__doc__)
    named = {word for before, word in zip(argv, argv[1:]) if before == "--"} & set(ALGORITHMS)
    if stray := named - set(args.algorithms):
        fail(f"there are flags for {min(stray)}, which is not among --algorithms {' '.join(args.algorithms)}")
    jobs = plan(args, words)
    skip_finished(jobs)
    to_do = [job for job in jobs if job.state != "done"]
    say(f"{len(jobs)} runs in {args.runs_root}, {len(jobs) - len(to_do)} of them finished before")
    if to_do:
        pool = choose_pool(args)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
                signal.signal(number, ask_to_stop)
        stop = Path(args.runs_root).resolve() / f".stop-{platform.node()}-{time.time_ns()}"  # seen by runs on any node
        try:
            run_sweep(jobs, pool, args, stop)
        except BaseException:
            with suppress(OSError):
                stop.touch()  # whatever it was, the runs save first
            raise
        finally:
            pool.close()
            with suppress(OSError):
                stop.unlink()
    failed = [job for job in jobs if job.state == "failed"]
    for job in failed:
        say(f"{job.name} failed after {job.attempts} attempts: {job.note}; see {job.folder / 'log.txt'}")
    if received_signals:
        say("interrupted; the same command goes on from the checkpoints")
        return 128 + received_signals[0]
    say(f"{len(jobs) - len(failed)} done, {len(failed)} failed{'; the same command tries again' * bool(failed)}")
    say(f"tables and figures: python sweep.py report --runs-root {args.runs_root}")
    return 1 if failed else 0


# --- the report -------------------------------------------------------------------------------------------------------
# As the paper reports them. It copied its rivals' scores from their own papers.
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
PAPER_SECONDS = {  # Table 2, of a run: MICRO, RAMBO
    "halfcheetah": (48031.4, 133438.0),
    "hopper": (45647.6, 118020.2),
    "walker2d": (49271.5, 132339.5),
    "mean": (47650.2, 127932.7),
}
PHASES = ("dynamics", "cloning", "adversary", "rollouts", "updates", "evaluation")
NO_SETTING = {"env_id", "seed", "device", "torch_threads", "compile", "track", "runs_root", "resume", "eval_only",
              "dataset_path", "dataset_base_url", "dynamics_path", "checkpoint_every"}  # fmt: skip
COLOURS = dict(zip(ALGORITHMS, ("#0072B2", "#E69F00", "#009E73", "#000000", "#CC79A7")))  # told apart by all eyes


@dataclass
class Row:
    """The runs of one algorithm with the same settings on the same data, one for each seed."""

    task: str
    data: str  # "D4RL", or the stand-in's file
    algorithm: str
    label: str  # the algorithm, and the settings that tell it from others on the same data
    results: dict[int, dict]  # seed -> result.json

    def each(self, function) -> np.ndarray:
        return np.array([function(result) for result in self.results.values()])


def read_results(root: Path) -> list[Row]:
    """Runs that differ in task, the data's SHA-256, algorithm, or a setting that matters are never mixed."""
    groups = defaultdict(dict)  # (task, data, algorithm) -> settings -> seed -> (result, folder)
    for path in sorted(root.rglob("result.json")):
        try:
            result = json.loads(path.read_text())
            args, data, seed = result["args"], result["dataset"], result["args"]["seed"]
            data = "D4RL" if data["is_d4rl"] else f"{data['file']} {data['sha256'][:8]}"
            settings = tuple((name, str(value)) for name, value in sorted(args.items()) if name not in NO_SETTING)
            ALGORITHMS.index(result["algorithm"])  # ValueError for one that is not known
            _ = [float(result[f"last_{n}_mean"]) for n in (5, 10)], [e["score"] for e in result["evaluations"]]
            _ = dict(result["seconds"]), result["machine"]["device"], result["machine"]["threads"]
            updates = [evaluation["update"] for evaluation in result["evaluations"]]
            _ = updates[-1]  # all that the tables and figures will read is there
            runs = groups[args["env_id"], data, result["algorithm"]].setdefault(settings, {})
        except (OSError, ValueError, LookupError, TypeError) as error:
            fail(f"{path} is not the result of a run: {error!r}")
        if seed in runs:
            fail(f"{runs[seed][1]} and {path.parent} are the same run: same task, data, algorithm, settings and seed")
        for other, folder in runs.values():
            if updates != [evaluation["update"] for evaluation in other["evaluations"]]:
                fail(f"{folder} and {path.parent} are seeds of one setting, but were evaluated at other updates")
        runs[seed] = result, path.parent
    if not groups:
        fail(f"there is no result.json in or below {root}")
    rows = []
    for (task, data, algorithm), variants in groups.items():
        alike = set.intersection(*map(set, variants))
        for settings, runs in variants.items():
            differing = dict(setting for setting in settings if setting not in alike)
            if "total_updates" in differing:  # evaluations are as many, further apart
                differing.pop("eval_every", None)
            label = " ".join([algorithm, *map("=".join, differing.items())])
            rows.append(Row(task, data, algorithm, label, {seed: runs[seed][0] for seed in sorted(runs)}))
    return sorted(rows, key=lambda row: (row.task, row.data, ALGORITHMS.index(row.algorithm), row.label))


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """(..., runs, tasks) -> (...): the mean of all of them without the lowest and the highest quarter."""
    flat = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = int(0.25 * flat.shape[-1])
    return flat[..., cut : flat.shape[-1] - cut].mean(-1)


def bootstrap_interval(scores: np.ndarray, samples: int = 20_000) -> tuple[float, float]:
    """95 % of the interquartile means that come out when each task's runs are drawn anew, with replacement."""
    picks = np.random.default_rng(0).integers(len(scores), size=(samples, *scores.shape))
    low, high = np.percentile(interquartile_mean(np.take_along_axis(scores[None], picks, axis=1)), [2.5, 97.5])
    return float(low), float(high)


def score_table(rows: list[Row]) -> list[dict]:
    table = []
    for row in rows:
        line = dict(task=row.task, data=row.data, algorithm=row.label, seeds=len(row.results), updates=updates_of(row))
        for n in (5, 10):
            finals = row.each(lambda result: result[f"last_{n}_mean"])
            line[f"last {n}"] = f"{finals.mean():.1f}" + f" ± {finals.std():.1f}" * (len(finals) > 1)
        curves = row.each(lambda result: [evaluation["score"] for evaluation in result["evaluations"]][-20:])
        rise = (curves[:, 10:].mean() - curves[:, :10].mean()) if curves.shape[1] == 20 else None
        line["change"] = "–" if rise is None else f"{rise:+.1f}"
        if row.data == "D4RL":
            task, method = row.task.removesuffix("-v2"), row.algorithm.upper()
            reported = dict(zip(PAPER_METHODS, PAPER_SCORES.get(task, ()))).get(method, "–")
            std = f" ± {PAPER_MICRO_STD[task]}" if method == "MICRO" and task in PAPER_MICRO_STD else ""
            line["reported by the paper"] = f"{reported}{std}"
        table.append(line)
    return table


def updates_of(row: Row) -> int:
    return int(row.each(lambda result: result["evaluations"][-1]["update"]).max())


def aggregate_table(rows: list[Row]) -> list[dict]:
    """For each set of tasks that an algorithm has, all algorithms that have these: like is compared with like."""
    by_label, table = defaultdict(dict), []
    for row in sorted(rows, key=lambda row: ALGORITHMS.index(row.algorithm)):
        by_label[row.label][row.task, row.data] = row.results
    for tasks in sorted({tuple(own) for own in by_label.values()}, key=lambda tasks: (-len(tasks), tasks)):
        for label, own in by_label.items():
            seeds = set.intersection(*(set(own.get(task, ())) for task in tasks))
            if seeds:
                names = [task if data == "D4RL" else f"{task} ({data})" for task, data in tasks]
                line = dict(tasks=" + ".join(names), algorithm=label, seeds=len(seeds))
                for n in (5, 10):
                    scores = np.array([[own[task][seed][f"last_{n}_mean"] for task in tasks] for seed in sorted(seeds)])
                    line[f"IQM of last {n}"] = f"{interquartile_mean(scores):.1f}"
                    line[f"95 % ({n})"] = "{:.1f} to {:.1f}".format(*bootstrap_interval(scores))
                table.append(line)
    return table


def time_table(rows: list[Row]) -> list[dict]:
    table, place = [], lambda row: (row.task, row.data, machine_of(row))
    rambo = defaultdict(list)
    for row in rows:
        if row.algorithm == "rambo":
            rambo[place(row)].append(per_update(row))
    for row in rows:
        line = dict(task=row.task, data=row.data, algorithm=row.label, updates=updates_of(row))
        for phase in PHASES:
            seconds = [result["seconds"][phase] for result in row.results.values() if phase in result["seconds"]
                       and not (phase == "dynamics" and result["args"].get("dynamics_path"))]  # fmt: skip
            line[f"{phase}, s"] = f"{np.mean(seconds):.0f}" if seconds else "shared" if phase == "dynamics" else "–"
        line["ms per update"] = f"{per_update(row):.2f}"
        rivals, paper = rambo[place(row)], PAPER_SECONDS.get(row.task.split("-")[0])
        line["over RAMBO's"] = f"{per_update(row) / rivals[0]:.2f}" if len(rivals) == 1 else "–"
        line["paper's Table 2"] = f"{paper[0] / paper[1]:.2f}" if paper and row.algorithm == "micro" else "–"
        table.append(line | dict(machine=machine_of(row)))
    return table


def per_update(row: Row) -> float:
    """Milliseconds, with an update's share of rollouts and of adversarial model updates; without evaluation."""
    phases = ("updates", "rollouts", "adversary")
    seconds = row.each(lambda result: sum(result["seconds"].get(phase, 0.0) for phase in phases))
    return 1000 * float(np.mean(seconds / row.each(lambda result: result["evaluations"][-1]["update"])))


def machine_of(row: Row) -> str:
    machines = row.each(lambda result: f"{result['machine']['device']}, threads: {result['machine']['threads']}")
    return "; ".join(sorted(set(machines)))


def run_table(rows: list[Row]) -> list[dict]:
    """Every run, with all digits."""
    return [
        dict(task=row.task, data=row.data, algorithm=row.label, seed=seed, last_5=result["last_5_mean"])
        | dict(last_10=result["last_10_mean"], updates=result["evaluations"][-1]["update"])
        | {f"{phase}_seconds": result["seconds"].get(phase, "") for phase in PHASES}
        for row in rows for seed, result in row.results.items()
    ]  # fmt: skip


def markdown(table: list[dict]) -> str:
    lines = [list(table[0]), ["---"] * len(table[0]), *(list(line.values()) for line in table)]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines) + "\n"


def draw_curves(rows: list[Row], path: Path) -> None:
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((row.task, row.data) for row in rows))
    across, down = min(3, len(panels)), -(-len(panels) // 3)
    figure, axes = plt.subplots(down, across, figsize=(4.8 * across, 4.2 * down), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, panel in zip(axes.flat, panels):
        drawn = defaultdict(int)
        for row in rows:
            if (row.task, row.data) == panel:
                updates = row.each(lambda result: [evaluation["update"] for evaluation in result["evaluations"]])[0]
                scores = row.each(lambda result: [evaluation["score"] for evaluation in result["evaluations"]])
                style, colour = ("-", "--", ":", "-.")[drawn[row.algorithm] % 4], COLOURS[row.algorithm]
                label = f"{row.label}, {len(scores)} seed{'s' * (len(scores) > 1)}"
                mean, std = scores.mean(0), scores.std(0)
                axis.plot(updates, mean, style, color=colour, label=label, linewidth=1.5)
                axis.fill_between(updates, mean - std, mean + std, color=colour, alpha=0.18, linewidth=0)
                drawn[row.algorithm] += 1
        axis.set_title(f"{panel[0]}\n{'' if panel[1] == 'D4RL' else 'stand-in data: '}{panel[1]}", fontsize=9)
        axis.set(xlabel="updates", ylabel="normalised score")
        axis.xaxis.set_major_formatter(lambda updates, _: f"{updates / 1000:g}k" if updates >= 1000 else f"{updates:g}")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_aggregate(table: list[dict], kind: str, path: Path) -> None:
    import matplotlib.pyplot as plt

    sets = list(dict.fromkeys(line["tasks"] for line in table))
    width = max(4.4, 1.4 * max(sum(line["tasks"] == tasks for line in table) for tasks in sets))
    figure, axes = plt.subplots(1, len(sets), figsize=(width * len(sets), 3.6), squeeze=False, layout="constrained")
    for axis, tasks in zip(axes.flat, sets):
        own, count = [line for line in table if line["tasks"] == tasks], tasks.count(" + ") + 1
        names = [f"{line['algorithm']} ×{line['seeds']}".replace(" ", "\n") for line in own]
        heights = np.array([float(line["IQM of last 10"]) for line in own])
        ends = np.array([[float(end) for end in line["95 % (10)"].split(" to ")] for line in own]).T
        colours = [COLOURS[line["algorithm"].split()[0]] for line in own]
        axis.bar(names, heights, color=colours, yerr=np.abs(ends - heights), ecolor="#666666", capsize=5, width=0.6)
        name = tasks.replace(" (", "\n(") if count == 1 else f"{count} tasks"
        axis.set_title(f"{kind}, × seeds\n{name}", fontsize=9)
        axis.set_ylabel("normalised score, IQM and 95 % interval", fontsize=8)
        axis.tick_params(axis="x", labelsize=8)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


ABOUT_SCORES = """A score is the mean of a run's last 5 or last 10 evaluations; ± is the standard deviation over seeds
(divided by n). *Change*: the mean of the last 10 evaluations minus that of the 10 before; well above 0, the curve is
still rising.

"""
ABOUT_CURVES = "Band: ± one standard deviation over seeds.\n\n"
ABOUT_AGGREGATES = """Interquartile mean (IQM) over runs and tasks, with 95 % stratified bootstrap intervals (20 000
samples), as rliable defines them. On a set of tasks only algorithms that have all of them are compared, each with the
seeds it has on all. With two or three runs a task, an interval says little.

"""
ABOUT_TIMES = """Seconds of a run in each phase, mean over seeds. *Shared*: the ensemble is that of another run
(`--dynamics-path`). *ms per update*: updates, rollouts and adversarial updates, no evaluation. *Over RAMBO's*: on
the same data and machine; beside it MICRO / RAMBO as reported by the paper, for whole runs on D4RL's data.

"""
ABOUT_PAPER = """## Reported by the paper

Liu et al., IJCAI 2024, on D4RL's v2 data; nothing in these two tables was measured here. Table 1, normalised scores,
the rivals' taken from their own papers:

"""
ABOUT_SECONDS = """Table 2, seconds of a run. The number of updates is not stated; the released codes' defaults are 3M
for MICRO and 2M for RAMBO:

"""


def report(args: ReportArgs) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    root, output = Path(args.runs_root), Path(args.output_dir)
    rows = read_results(root)
    write_file(output / "report.md", "")  # refuses a folder that cannot be written before any work
    begun = {path.parent for path in root.rglob("args.json")}
    unfinished = sorted(str(folder.relative_to(root)) for folder in begun if not (folder / "result.json").exists())
    count = sum(len(row.results) for row in rows)
    text = f"# Results\n\n{count} finished runs. " + ABOUT_SCORES
    text += f"Not finished, and left out: {', '.join(unfinished)}.\n\n" if unfinished else ""
    d4rl, stand_ins = ([row for row in rows if (row.data == "D4RL") == is_d4rl] for is_d4rl in (True, False))
    for kind, own in ("D4RL data", d4rl), ("Stand-in data", stand_ins):
        if own:
            stem = kind.split()[0].lower()
            makers = dict(scores=score_table, aggregate=aggregate_table, times=time_table, runs=run_table)
            tables = {name: make(own) for name, make in makers.items()}
            for name, table in tables.items():
                lines = io.StringIO()
                writer = csv.DictWriter(lines, table[0] if table else (), lineterminator="\n")
                writer.writeheader()
                writer.writerows(table)
                write_file(output / f"{stem}-{name}.csv", lines.getvalue())
            draw_curves(own, output / f"{stem}-curves.png")
            text += f"## {kind}\n\n"
            text += "**Not D4RL's data: no score here compares with a published one.**\n\n" if own is stand_ins else ""
            text += markdown(tables["scores"]) + f"![learning curves]({stem}-curves.png)\n\n" + ABOUT_CURVES
            if tables["aggregate"]:  # there is none where an algorithm has no seed on all of its tasks
                draw_aggregate(tables["aggregate"], kind, output / f"{stem}-aggregate.png")
                text += ABOUT_AGGREGATES + markdown(tables["aggregate"]) + f"![aggregate]({stem}-aggregate.png)\n\n"
            text += ABOUT_TIMES + markdown(tables["times"])
    scores = [dict(task=task) | dict(zip(PAPER_METHODS, values)) for task, values in PAPER_SCORES.items()]
    for line in scores[:-1]:
        line["MICRO"] = f"{line['MICRO']} ± {PAPER_MICRO_STD[line['task']]}"
    seconds = [dict(environment=environment, MICRO=ours, RAMBO=rival) | {"MICRO / RAMBO": f"{ours / rival:.2f}"}
               for environment, (ours, rival) in PAPER_SECONDS.items()]  # fmt: skip
    text += ABOUT_PAPER + markdown(scores) + ABOUT_SECONDS + markdown(seconds)
    write_file(output / "report.md", text)
    print(f"{count} runs: {output / 'report.md'}")
    return output / "report.md"


if __name__ == "__main__":
    if sys.argv[1:2] == ["report"]:
        report(tyro.cli(ReportArgs, args=sys.argv[2:], description="Tables and figures of finished runs."))
    else:
        raise SystemExit(main(sys.argv[1:]))
