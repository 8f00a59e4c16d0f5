"""Time per update and peak memory of micro.py against batch and ensemble size, draws, dataset rows and rollout length.

python benchmarks/growth.py measure --output results/growth/measured.json
python benchmarks/growth.py plot results/growth/measured.json --output docs/growth.png

Every setting is a run of micro.py in a process of its own, on a made-up HDF5 file with the shapes of halfcheetah: it
loads the data, trains the dynamics (two epochs, cut to a few batches), makes a rollout and fills the buffer, updates,
evaluates and writes a checkpoint. The last setting is the largest D4RL task. Linux only: memory is read from /proc.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import micro  # noqa: E402

OBS_DIM, ACT_DIM = 17, 6
BASE = dict(rows=1_000_000, batch_size=256, ensemble=(7, 5), penalty_draws=0, rollout_length=5)
GROWTH = {
    "batch_size": [64, 128, 256, 512, 1024, 2048],
    "ensemble": [(1, 1), (3, 2), (7, 5), (14, 10), (28, 20)],
    "penalty_draws": [0, 1, 2, 5, 10, 20],
    "rows": [50_000, 200_000, 500_000, 1_000_000, 2_000_000],
    "rollout_length": [1, 2, 5, 10, 20],
}
TITLES = dict(batch_size="batch size", ensemble="elites (of 1, 3, 7, 14, 28 networks)", penalty_draws="draws per elite",
              rows="dataset rows", rollout_length="rollout length")  # fmt: skip
LARGEST = BASE | dict(rows=2_000_000, env_id="halfcheetah-medium-expert-v2")  # its preset: h = 5, 50 000 rollouts
LIMIT_MB = 4000

phase, peaks = "imports", {}


def peak_mb() -> float:
    """The largest resident set since the last `enter`."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def enter(name: str) -> None:
    """End a phase: note its peak, and let the kernel begin a new one (5 resets VmHWM)."""
    global phase
    peaks[phase] = max(peaks.get(phase, 0.0), peak_mb())
    Path("/proc/self/clear_refs").write_text("5")
    phase = name


def make_file(path: Path, rows: int) -> None:
    """A file in D4RL's format whose episodes last 1000 steps, written in parts."""
    rng = np.random.default_rng(0)
    widths = dict(observations=OBS_DIM, actions=ACT_DIM, next_observations=OBS_DIM)
    with h5py.File(path, "w") as file:
        for key, width in widths.items():
            file.create_dataset(key, (rows, width), "f4")
        file["rewards"] = rng.normal(size=rows).astype(np.float32)
        file["terminals"], file["timeouts"] = np.zeros(rows, bool), np.arange(1, rows + 1) % 1000 == 0
        for begin in range(0, rows, 100_000):
            part = slice(begin, min(begin + 100_000, rows))
            states = rng.normal(size=(part.stop - begin, OBS_DIM)).astype(np.float32)
            file["observations"][part], file["next_observations"][part] = states, 0.9 * states
            file["actions"][part] = rng.uniform(-1, 1, size=(part.stop - begin, ACT_DIM)).astype(np.float32)


def run(flags: list[str], dynamics_batches: int = 20) -> dict:
    """A run of micro.py in this process: ms per update and for its share of rollouts, and the peak of each phase in MB.

    Time is the CPU time of the main thread, so that what else runs on the machine counts little.
    """
    ends, rollout_seconds = [], []
    bar, update, rollout, write = micro.progress_bar, micro.update, micro.rollout, micro.write_file

    def entering(name: str, function):
        return lambda *args: enter(name) or function(*args)

    def timed_update(*args):
        metrics = update(*args)
        ends.append(time.thread_time())
        return metrics

    def timed_rollout(actor, ensemble, num_elites, terminated, starts, length, buffer, rng):
        enter("rollouts")
        begin = time.thread_time()
        stats = rollout(actor, ensemble, num_elites, terminated, starts, length, buffer, rng)
        rollout_seconds.append(time.thread_time() - begin)
        while buffer.size < len(buffer.rows):  # as after the fifth rollout
            buffer.add(buffer.rows[: min(buffer.size, 50_000)].clone())
        enter("updates")
        return stats

    def entering_write(path: Path, content: bytes | dict, **options) -> None:
        enter("checkpoint" if path.name == "checkpoint.pt" and "agent" in content else phase)
        write(path, content, **options)

    def short_bar(items=None, desc: str = "", **options):
        return bar(items[:dynamics_batches] if "epoch" in desc else items, desc, **options)

    micro.progress_bar, micro.write_file = short_bar, entering_write
    micro.update, micro.rollout = timed_update, timed_rollout
    for name, function in (("data", "load_dataset"), ("dynamics", "train_dynamics"), ("evaluation", "evaluate")):
        setattr(micro, function, entering(name, getattr(micro, function)))
    args = micro.parse_args(flags)
    micro.main(args)
    enter("end")
    # a process of its own reads the file: the two peaks together are at most what both took at a time
    peaks["data"] += resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6
    rollout_ms = 1000 * min(rollout_seconds) / args.rollout_every  # spread over the updates
    update_ms = 1000 * float(np.quantile(np.diff(ends), 0.1))  # disturbances only add
    return dict(update_ms=update_ms, rollout_ms=rollout_ms, peak_mb=max(peaks.values()), phases_mb=dict(peaks))


def in_own_process(setting: dict, updates: int, threads: int, folder: str) -> dict:
    data = Path(folder) / f"{setting['rows']}.hdf5"
    if not data.exists():
        make_file(data, setting["rows"])
    named = {name: value for name, value in setting.items() if name not in ("rows", "ensemble")}
    named |= dict(num_models=setting["ensemble"][0], num_elites=setting["ensemble"][1], dataset_path=data)
    named = dict(env_id="halfcheetah-medium-v2") | named
    named |= dict(total_updates=updates, eval_every=updates, eval_episodes=1, dynamics_max_epochs=2, runs_root=folder)
    flags = [text for name, value in named.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, __file__, "run", *flags, "--device", "cpu", "--torch-threads", str(threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"growth.py: the setting {setting} failed:\n{done.stdout}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(updates: int, threads: int) -> dict:
    base, found = None, {}
    for name, values in GROWTH.items():
        found[name] = []
        for value in values:
            if value != BASE[name] or base is None:
                with tempfile.TemporaryDirectory() as folder:
                    result = in_own_process(BASE | {name: value}, updates, threads, folder)
                base = result if value == BASE[name] else base
            else:
                result = base  # measured already
            found[name].append(dict(value=value) | result)
            print(f"{TITLES[name]} {value}: {result['update_ms']:.1f} ms, {result['peak_mb']:.0f} MB", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        largest = in_own_process(LARGEST, updates, threads, folder)
    return dict(growth=found, largest=largest)


def plot(found: dict, output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(GROWTH), figsize=(15, 6), layout="constrained", sharey="row")
    for column, (name, results) in zip(axes.T, found["growth"].items()):
        x = [result["value"][1] if name == "ensemble" else result["value"] for result in results]
        column[0].plot(x, [result["update_ms"] for result in results], "o-", label="update")
        column[0].plot(x, [result["rollout_ms"] for result in results], "s--", label="rollouts, per update")
        column[1].plot(x, [result["peak_mb"] for result in results], "o-", label="whole run")
        column[1].plot(x, [result["phases_mb"]["updates"] for result in results], "s--", label="updates alone")
        for axis in column:
            axis.set(xlabel=TITLES[name], xlim=(0, None))
            axis.grid(alpha=0.3)
    for axis, label in zip(axes[:, 0], ("ms per update", "peak memory, MB")):
        axis.set(ylabel=label, ylim=(0, None))  # last, as the panels of a row share it
        axis.legend(fontsize=8)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        print(json.dumps(run(sys.argv[2:])))
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("measure")
    command.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    command.add_argument("--updates", type=int, default=120, help="updates of each run")
    command.add_argument("--torch-threads", type=int, default=1)
    command = commands.add_parser("plot")
    command.add_argument("measured", type=Path)
    command.add_argument("--output", type=Path, required=True, help="the figure to write")
    options = parser.parse_args()
    if options.command == "measure":
        torch.set_num_threads(options.torch_threads)
        found = dict(machine=micro.machine(torch.device("cpu")), updates=options.updates)
        found |= measure(options.updates, options.torch_threads)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        micro.write_file(options.output, json.dumps(found, indent=1).encode())
    else:
        found = json.loads(options.measured.read_text())
        plot(found, options.output)
    peak, phases = found["largest"]["peak_mb"], found["largest"]["phases_mb"]
    print("largest D4RL task, peak MB: " + ", ".join(f"{name} {value:.0f}" for name, value in phases.items()))
    if peak > LIMIT_MB:
        raise SystemExit(f"growth.py: the largest D4RL task needs {peak:.0f} MB, more than {LIMIT_MB}")
