"""Faults by the hundred: `python -m tests.soak --kills 200 --cases 10000`, which writes results/soak.txt.

tests/test_faults.py uses the same functions with small numbers. A kill is SIGKILL, either after a random time or at a
random call of the system's file functions (before or after it), so that moments between the files of a save come up too.
"""

import argparse
import contextlib
import importlib
import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import h5py  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from test_runs import scalars, write_dataset  # noqa: E402

import micro  # noqa: E402

TRAINER = (
    "--env-id hopper-medium-v2 --dynamics-hidden-size 16 --hidden-size 16 --rollout-batch-size 50 --rollout-every 10 "
    "--dynamics-max-epochs 6 --batch-size 32 --num-models 3 --num-elites 2 --torch-threads 1 --device cpu --auto-alpha "
    "--total-updates 120 --eval-every 20 --eval-episodes 1 --checkpoint-every 7"
).split()
FLAGS = {
    "micro": TRAINER,
    "rambo_baseline": [*TRAINER, *"--adversarial-every 30 --adversarial-updates 10 --bc-epochs 2".split()],
    "collect_dataset": (
        "--env-id Pendulum-v1 --quality medium-replay medium expert --medium-score -100000 --total-steps 1200 --rows 200 "
        "--learning-starts 200 --eval-every 400 --eval-episodes 1 --batch-size 8 --checkpoint-every 200 --min-steps 700"
    ).split(),
}
FORK = False  # the soak forks instead of importing torch anew; a process that has used autograd, as pytest's, cannot


def lay_trap(calls: int, after: bool) -> None:
    """Kill this process at the n-th call of one of the functions through which files change, before or after it."""
    left = [calls]

    def trapped(real):
        def call(*arguments, **options):
            left[0] -= 1
            if left[0] == 0 and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments, **options)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in ("fsync", "replace", "unlink", "mkdir"):
        setattr(os, name, trapped(getattr(os, name)))


def call_main(name: str, argv: list[str], trap: tuple[int, bool] | None) -> None:
    script = importlib.import_module(name)
    if trap:
        lay_trap(*trap)
    script.main(argv if name == "collect_dataset" else script.parse_args(argv))


def start(name: str, argv: list, trap: tuple[int, bool] | None = None) -> subprocess.Popen:
    code = f"import soak; soak.call_main({name!r}, {[str(word) for word in argv]!r}, {trap})"
    command = [sys.executable, "-c", code] if trap else [sys.executable, str(ROOT / f"{name}.py"), *map(str, argv)]
    environment = os.environ | dict(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}", PYTHONUNBUFFERED="1")
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)


def play(name: str, argv: list, trap: tuple | None = None, kill_after: float | None = None) -> tuple[int, str, str]:
    """The script in a process of its own, killed after so many seconds: exit status (or -signal), output and errors."""
    if not FORK:
        process = start(name, argv, trap)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(kill_after) if kill_after else None
        if kill_after:
            process.kill()
        output, errors = process.communicate(timeout=900)
        return process.returncode, output, errors
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.dup2(output.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                call_main(name, [str(word) for word in argv], trap)
                status = 0
            except SystemExit as end:  # do with it what Python does
                status = end.code if isinstance(end.code, int) else 1
                os.write(2, b"" if isinstance(end.code, int) else f"{end.code}\n".encode())
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                sys.stdout.flush()
                os._exit(status)
        end = time.monotonic() + (kill_after or 900)
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                ended = os.waitpid(child, 0)
                break
            time.sleep(0.005)
        output.seek(0), errors.seek(0)
        return os.waitstatus_to_exitcode(ended[1]), output.read(), errors.read()


def first_flags(name: str, folder: Path, dataset: Path) -> list:
    flags = [*FLAGS[name], "--runs-root", folder / "runs"]
    return flags + (["--output-dir", folder / "data"] if name == "collect_dataset" else ["--dataset-path", dataset])


def run_to_end(name: str, argv: list) -> str:
    status, output, errors = play(name, argv)
    assert status == 0 and errors == "", (status, output, errors)
    return output


def run_folder(folder: Path) -> Path | None:
    """The run folder from which --resume can go on, if a process came so far; one without its flags is removed."""
    for path in (folder / "runs").glob("*"):
        if (path / "args.json").exists() or list(path.glob("checkpoint*.pt")):
            return path
        shutil.rmtree(path)
    return None


def kill_and_resume(name: str, folder: Path, dataset: Path, kills: int, rng: np.random.Generator, seconds: float) -> Counter:
    """A run that is killed so many times, and then finishes. Returns where the kills fell. `seconds` is how long a whole
    run takes."""
    fell = Counter()
    while fell.total() < kills:
        known = run_folder(folder)
        argv = ["--resume", known] if known else first_flags(name, folder, dataset)
        moment = dict(kill_after=rng.uniform(0.1, seconds))
        if rng.random() < 0.5:
            moment = dict(trap=(int(rng.integers(1, 120)), bool(rng.random() < 0.5)))
        status, output, errors = play(name, argv, **moment)
        assert status in (0, -signal.SIGKILL) and errors == "", (status, output, errors)
        if status == 0:  # it was faster: begin another one
            return fell
        last = output.splitlines()[-1] if output else ""
        phases = {"epoch": "dynamics", "update": "updates", "step": "updates", "score": "end", "rows": "end", "files": "end"}
        words = [phase for word, phase in phases.items() if re.search(rf"\b{word}\b", last)]
        fell[words[0] if words else "start"] += 1
    known = run_folder(folder)
    run_to_end(name, ["--resume", known] if known else first_flags(name, folder, dataset))
    return fell


def same(ours, theirs, place: str = "") -> None:
    """To the bit, but for what is a time or a path."""
    assert type(ours) is type(theirs), place
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), place
        for key in ours.keys() - {"seconds", "runs_root", "output_dir", "resume", "machine", "updates_per_second"}:
            same(ours[key], theirs[key], f"{place}/{key}")
    elif isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), place
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), place
        clock = len(ours) if not place.endswith("/events[]") else 3  # the fourth of an event is its time
        for a, b in zip(ours[:clock], theirs[:clock]):
            same(a, b, f"{place}[]")
    else:
        assert ours == theirs or (ours != ours and theirs != theirs), (place, ours, theirs)


def assert_same_files(name: str, ours: Path, theirs: Path) -> None:
    """What two finished runs left: every tensor, every row, every curve, every dataset."""
    a, b = run_folder(ours), run_folder(theirs)
    assert not list(a.glob("*.part"))
    for path in b.glob("*.pt"):
        if path.name != "checkpoint.previous.pt":
            same(*(torch.load(run / path.name, weights_only=True) for run in (a, b)), path.name)
    if name == "collect_dataset":
        assert {p.name for p in (ours / "data").iterdir()} == {p.name for p in (theirs / "data").iterdir()}
        for path in (theirs / "data").iterdir():
            assert (ours / "data" / path.name).read_bytes() == path.read_bytes(), path.name
    else:
        assert (a / "progress.csv").read_bytes() == (b / "progress.csv").read_bytes()
        same(*(json.loads((run / "result.json").read_text()) for run in (a, b)), "result.json")
        assert_same_curves(scalars(a), scalars(b))


def assert_same_curves(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for tag in theirs:
        assert [step for step, _ in ours[tag]] == [step for step, _ in theirs[tag]], tag
        assert tag == "train/updates_per_second" or ours[tag] == theirs[tag], tag


# --- datasets that are not what they say ------------------------------------------------------------------------------
HOPPER = micro.make_env("Hopper-v4")
KEYS = ("observations", "actions", "rewards", "next_observations", "terminals", "timeouts")


def base_file(path: Path, rng: np.random.Generator) -> None:
    count, options = int(rng.integers(2, 60)), {}
    if rng.random() < 0.6:
        options = dict(chunks=True, compression=str(rng.choice(["gzip", "lzf"])), shuffle=bool(rng.random() < 0.5))
        options |= dict(fletcher32=bool(rng.random() < 0.2))
    with h5py.File(path, "w", libver=str(rng.choice(["earliest", "latest"]))) as file:
        for key in KEYS:
            width = dict(observations=11, next_observations=11, actions=3).get(key)
            array = rng.normal(size=(count, width) if width else count).astype(np.float32)
            file.create_dataset(key, data=array > 1.5 if key in ("terminals", "timeouts") else array, **options)


def alter_bytes(content: bytearray, rng: np.random.Generator) -> bytearray:
    kind = rng.integers(5)
    if kind == 0:
        return content[: rng.integers(len(content))]
    if kind == 1:  # mostly among the headers, which come first
        for _ in range(rng.integers(1, 12)):
            place = rng.integers(len(content) if rng.random() < 0.4 else min(len(content), 4000))
            content[place] ^= 1 << int(rng.integers(8))
    elif kind == 2:
        place, length = rng.integers(len(content)), int(rng.integers(1, 64))
        content[place : place + length] = bytes([rng.choice([0, 255])]) * length
    elif kind == 3:
        place = rng.integers(len(content))
        content[place:place] = rng.bytes(int(rng.integers(1, 300)))
    else:
        place, other = rng.integers(len(content), size=2)
        content[place : place + 64] = content[other : other + 64]
    return content


def alter_structure(path: Path, rng: np.random.Generator) -> None:
    """A key that is a link, of another kind or shape, without data, in other files, or with values that are no numbers."""
    key, kind = str(rng.choice(KEYS)), rng.integers(13)
    with h5py.File(path, "r+") as file:
        count, width = len(file[key]), file[key].shape[1:]
        values = file[key][()]
        del file[key]
        huge = (int(10.0 ** rng.uniform(7, 18)), *width)
        if kind == 0:
            file[key] = h5py.SoftLink(f"/{rng.choice([key, 'rewards', 'nowhere'])}")  # also to itself
        elif kind == 1:
            file[key] = h5py.ExternalLink(str(rng.choice(["../secret", path.name, "nowhere"])), "/rewards")
        elif kind == 2:
            file[key] = file["/"]  # a group that holds itself
        elif kind == 3:
            file.create_dataset(key, huge, "f4", chunks=(min(1000, huge[0]), *width))
        elif kind == 4:  # all of them: as many rows each, and no data at all
            for name in KEYS:
                wide = () if name not in file else file[name].shape[1:]
                if name in file:
                    del file[name]
                wide = dict(observations=(11,), next_observations=(11,), actions=(3,)).get(name, ())
                file.create_dataset(name, (huge[0], *wide), "f4", chunks=(1000, *wide))
        elif kind == 5:
            types = ["S3", "f2", "f8", "i1", "u8", ">f4", "c8", h5py.string_dtype(), h5py.vlen_dtype("f4"), h5py.ref_dtype]
            chosen = types[rng.integers(len(types))]
            file.create_dataset(key, (count, *width), [("x", "f4")] if rng.random() < 0.1 else chosen)
        elif kind == 6:
            shape = [(), (count + 1, *width), (count, 5, *width), (0, *width), (count, 0), h5py.Empty("f4")][rng.integers(6)]
            file.create_dataset(key, data=shape) if isinstance(shape, h5py.Empty) else file.create_dataset(key, shape, "f4")
        elif kind == 7:
            outside = [(str(path.parent.parent / rng.choice(["nowhere", "secret"])), 0, h5py.h5f.UNLIMITED)]
            file.create_dataset(key, (count, *width), "f4", external=outside)
        elif kind == 8:
            layout = h5py.VirtualLayout((count, *width), "f4")
            layout[:] = h5py.VirtualSource(str(rng.choice([".", "../secret"])), "rewards", (count, *width))
            file.create_virtual_dataset(key, layout)
        elif kind == 9:
            values = values.astype(np.float64)
            values.flat[rng.integers(values.size)] = rng.choice([np.nan, np.inf, -np.inf, 1e300, -1e39])
            file[key] = values
        elif kind == 10:
            file.create_dataset(key, (count, *width), "f4", maxshape=(None, *width), chunks=(2**24, *width))  # huge chunks
        elif kind == 11:
            bomb = (300_000, *width)
            file.create_dataset(key, bomb, "f4", chunks=bomb, compression="gzip", data=np.zeros(bomb, "f4"))
        else:
            pass  # it is missing


def make_case(path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    base_file(path, rng)
    if rng.random() < 0.3:
        alter_structure(path, rng)
    if rng.random() < 0.8:
        path.write_bytes(alter_bytes(bytearray(path.read_bytes()), rng))


def try_case(path: Path) -> str:
    try:
        rows = micro.load_dataset(path, HOPPER)
    except SystemExit as refusal:
        message = str(refusal.code)
        assert message.startswith("micro.py: ") or ".py: " in message
        assert "\n" not in message and len(message) < 1100
        return "a crash of libhdf5, said in one line" if "crashed" in message else "refused in one line"
    assert rows.dtype == np.float32 and rows.shape[1] == 27 and len(rows) >= 2 and np.isfinite(rows).all()
    return "loaded, and valid"


def one_case(path: Path, seed: int) -> tuple[str, float, float]:
    """The outcome, its seconds, and the most memory that this process has taken, in GB."""
    make_case(path, seed)
    before = {p: p.stat().st_mtime_ns for p in path.parent.iterdir()}
    signal.alarm(30)
    started = time.perf_counter()
    try:
        outcome = try_case(path)
    except BaseException as error:
        outcome = f"WRONG: {type(error).__name__} {error}"
    took = time.perf_counter() - started
    signal.alarm(0)
    if {p: p.stat().st_mtime_ns for p in path.parent.iterdir()} != before:
        outcome = "WRONG: a file was written"
    path.unlink()
    usage = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return outcome, took, max(usage) / 1e6


def fuzz_datasets(cases: int, folder: Path, seed: int = 0) -> Counter:
    """Each case in a child process that may take 30 s: a crash of libhdf5 would be seen, and counted."""
    tally, number = Counter(), 0
    peak, slowest = 0.0, 0.0
    while number < cases:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                for case in range(number, cases):
                    result = one_case(folder / f"{case}.hdf5", seed * 1_000_000 + case)
                    os.write(write, (json.dumps(result) + "\n").encode())
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(write)
        with open(read) as lines:
            for line in lines:
                outcome, took, memory = json.loads(line)
                tally[outcome] += 1
                number, peak, slowest = number + 1, max(peak, memory), max(slowest, took)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if number < cases:
            tally[f"the process ended with {status} at case {number}"] += 1
            number += 1
    print(f"fuzzed datasets: {cases} cases, {dict(tally)}, at most {slowest:.1f} s and {peak:.1f} GB")
    return tally


# --- torn checkpoints -------------------------------------------------------------------------------------------------
def tear(content: bytes, rng: np.random.Generator) -> bytes:
    torn, kind = bytearray(content), rng.integers(4)
    if kind == 0:
        return content[: rng.integers(len(content))]
    if kind == 1:
        place, length = rng.integers(len(content)), int(rng.integers(1, 4096))
        torn[place : place + length] = bytes(min(length, len(content) - place))  # a page that was never written
    elif kind == 2:  # among the last bytes stand the names, sizes and checksums
        torn[-int(rng.integers(1, min(len(content), 6000)))] ^= 1 << int(rng.integers(8))
    else:
        torn[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    return bytes(torn)


def read_or_refusal(path: Path):
    try:
        return micro.read_tensors(path, "cpu")
    except SystemExit as refusal:
        assert "\n" not in str(refusal.code)
        return None


def fuzz_checkpoints(cases: int, whole: Path, folder: Path, seed: int = 0) -> Counter:
    content, expected, tally = whole.read_bytes(), torch.load(whole, weights_only=True), Counter()
    rng = np.random.default_rng(seed)
    for _ in range(cases):
        torn = tear(content, rng)
        (folder / "torn.pt").write_bytes(torn)
        read = read_or_refusal(folder / "torn.pt")
        if read is None:
            tally["refused"] += 1
        else:  # a byte that means nothing: padding, or zeros over zeros
            same(read, expected)
            tally["harmless: the same content" if torn != content else "unchanged"] += 1
    print(f"torn checkpoints: {cases} cases, {dict(tally)}")
    return tally


def fill_disk(folder: Path, dataset: Path, sizes: list[int], report) -> int:
    """Runs on a small tmpfs of each size, in KiB, which then grows: the run must go on to the same end."""
    reference = folder / "roomy"
    run_to_end("micro", first_flags("micro", reference, dataset))
    full = 0
    for size in sizes:
        disk = folder / f"disk-{size}"
        disk.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", disk], capture_output=True)
        if mounted.returncode != 0:
            report("full disk: no tmpfs can be mounted here, skipped")
            return 0
        try:
            status, output, errors = play("micro", first_flags("micro", disk, dataset))
            assert status in (0, 1) and len(errors.splitlines()) == status, (output, errors)
            full += status
            known = run_folder(disk)
            for path in known.glob("checkpoint*.pt") if known else ():
                micro.read_tensors(path, "cpu")
            subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True)
            run_to_end("micro", ["--resume", known] if known else first_flags("micro", disk, dataset))
            assert_same_files("micro", disk, reference)
        finally:
            subprocess.run(["umount", disk], check=True)
    report(f"full disk: {full} of {len(sizes)} runs on a tmpfs of {sizes[0]} to {sizes[-1]} KiB stopped for it, with one line; "
           "all went on to the same end once there was room")  # fmt: skip
    return full


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "soak.txt")
    options = parser.parse_args()
    global FORK
    FORK = True
    torch.set_num_threads(1)
    for script in FLAGS:
        importlib.import_module(script)
    lines, began = [], time.time()

    def report(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    command = f"python -m tests.soak --kills {options.kills} --cases {options.cases} --seed {options.seed}"
    report(f"{command}  (Python {platform.python_version()}, torch {torch.__version__}, h5py {h5py.__version__})")
    with tempfile.TemporaryDirectory() as name:
        folder, rng = Path(name), np.random.default_rng(options.seed)
        dataset = write_dataset(folder / "hopper.hdf5", "Hopper-v4", 600)
        kills = Counter()
        for script in FLAGS:
            share = math.ceil(options.kills * (0.2 if script == "collect_dataset" else 0.4))
            reference = folder / script
            started = time.time()
            run_to_end(script, first_flags(script, reference, dataset))
            seconds, fell, runs = time.time() - started, Counter(), 0
            while fell.total() < share:
                ours = folder / f"{script}-{runs}"
                fell += kill_and_resume(script, ours, dataset, min(10, share - fell.total()), rng, seconds)
                assert_same_files(script, ours, reference)
                shutil.rmtree(ours)
                runs += 1
            kills += fell
            report(f"{script}: {runs} runs killed {fell.total()} times in all ({dict(fell)}) and resumed: every file the same "
                   "to the bit as of a run never stopped, no curve with a step twice")  # fmt: skip
        report(f"kill -9: {kills.total()} survived, 0 updates lost but those since the last checkpoint, which came again")
        fill_disk(folder, dataset, [100 * n for n in range(1, 9)], report)
        checkpoint = run_folder(folder / "micro") / "checkpoint.pt"
        torn = fuzz_checkpoints(options.cases // 5, checkpoint, folder, options.seed)
        report(f"torn checkpoints: {torn.total()} ({dict(torn)}); none loaded with other content")
        (folder / "fuzz").mkdir()
        tally = fuzz_datasets(options.cases, folder / "fuzz", options.seed)
        report(f"fuzzed datasets: {tally.total()} ({dict(tally)})")
        assert not [outcome for outcome in tally if outcome.startswith("WRONG")]
    report(f"{(time.time() - began) / 60:.0f} minutes")
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
