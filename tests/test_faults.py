"""Killed, torn, full, diverged, hostile: nothing lost, nothing executed, one line. `python -m tests.soak` does more of it."""

import errno
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import soak
import torch
from test_runs import TINY, column, progress, scalars, write_dataset

import collect_dataset
import micro
import rambo_baseline as rambo

ROOT = Path(micro.__file__).resolve().parent


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "hopper.hdf5", "Hopper-v4", 600)


def run(script, dataset, root, *extra):
    """A tiny run in this process: its folder."""
    script.main(script.parse_args([*TINY, "--dataset-path", str(dataset), "--runs-root", str(root), *map(str, extra)]))
    (folder,) = root.iterdir()
    return folder


def resume(script, folder, *extra):
    script.main(script.parse_args(["--resume", str(folder), *map(str, extra)]))
    return folder


def refusal(action, *arguments) -> str:
    with pytest.raises(SystemExit) as error:
        action(*arguments)
    assert isinstance(error.value.code, str) and "\n" not in error.value.code, error.value.code
    return error.value.code


# --- kill -9 ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, kills", [("micro", 4), ("rambo_baseline", 3), ("collect_dataset", 2)])
def test_killed_at_random_moments_and_resumed(name, kills, dataset, tmp_path):
    """SIGKILL at random times and between the files of a save; then every file is as of a run that was never stopped."""
    started = time.monotonic()
    soak.run_to_end(name, soak.first_flags(name, tmp_path / "whole", dataset))
    seconds, rng, fell, runs = time.monotonic() - started, np.random.default_rng(), 0, 0
    while fell < kills:  # a run may be faster than its killer
        ours = tmp_path / f"killed-{runs}"
        fell += soak.kill_and_resume(name, ours, dataset, kills - fell, rng, seconds).total()
        soak.assert_same_files(name, ours, tmp_path / "whole")
        runs += 1


class Killed(BaseException):
    """What no `except` of the scripts may catch, in place of SIGKILL."""


def test_killed_at_each_step_of_a_save(dataset, tmp_path, monkeypatch):
    """Before each fsync and each rename of a whole run, in this process, one after the other."""
    flags = "--total-updates", 4, "--eval-every", 2, "--checkpoint-every", 2, "--dynamics-max-epochs", 1, "--eval-episodes", 1
    whole = run(micro, dataset, tmp_path / "whole", *flags)
    calls = []

    def trapped(name, at):
        real = getattr(os, name)

        def call(*arguments):
            calls.append(name)
            if len(calls) == at:
                raise Killed
            return real(*arguments)

        return call

    at, ended = 0, False
    while not ended:
        at += 1
        calls.clear()
        root = tmp_path / f"killed-{at}"
        with monkeypatch.context() as patch:
            for name in ("fsync", "replace"):
                patch.setattr(os, name, trapped(name, at))
            try:
                run(micro, dataset, root, *flags)
                ended = True  # so many calls are not made
            except Killed:
                pass
        (folder,) = root.iterdir()
        if not (folder / "args.json").exists():
            assert str(folder) in refusal(resume, micro, folder)
            continue
        resume(micro, folder)
        assert (folder / "progress.csv").read_bytes() == (whole / "progress.csv").read_bytes()
        assert (folder / "result.json").exists()
        for name in ("policy.pt", "checkpoint.pt", "dynamics.pt"):
            soak.same(*(torch.load(f / name, weights_only=True) for f in (folder, whole)), name)
        soak.assert_same_curves(scalars(folder), scalars(whole))
    assert at > 20


def test_collect_dataset_saves_on_sigterm(tmp_path):
    soak.run_to_end("collect_dataset", soak.first_flags("collect_dataset", tmp_path / "whole", None))
    flags = [*soak.first_flags("collect_dataset", tmp_path / "ours", None), "--checkpoint-every", 10**6]
    process = soak.start("collect_dataset", flags)
    for line in process.stdout:
        if line.startswith("step"):  # after the first evaluation
            process.send_signal(signal.SIGTERM)
            break
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 143 and errors == "" and "--resume" in output
    folder = soak.run_folder(tmp_path / "ours")
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["step"] >= 400  # not the one of step 0
    soak.run_to_end("collect_dataset", ["--resume", folder, "--checkpoint-every", 200])
    soak.assert_same_files("collect_dataset", tmp_path / "ours", tmp_path / "whole")


@pytest.mark.parametrize("script", [micro, collect_dataset])
def test_a_second_signal_ends_at_once(script, monkeypatch):
    monkeypatch.setattr(script, "received_signals", [])
    before = signal.getsignal(signal.SIGINT)
    with script.signals_noted():
        os.kill(os.getpid(), signal.SIGINT)
        assert script.received_signals == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # which ends the process
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_there_is_anything_to_save(tmp_path):
    """In a download that never ends: status 130, no traceback."""
    code = "import runpy, urllib.request, os, signal, sys\n"
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job is born with it ignored
    code += "urllib.request.urlopen = lambda *a, **k: os.kill(os.getpid(), signal.SIGINT)\n"
    code += "sys.argv[1:] = ['--env-id', 'hopper-medium-v2']\nrunpy.run_path('micro.py', run_name='__main__')"
    environment = os.environ | dict(D4RL_DATASET_DIR=str(tmp_path))
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 130 and process.stderr == ""


# --- one process at a time --------------------------------------------------------------------------------------------
def test_a_second_process_on_a_run_folder_is_refused_but_not_after_a_kill(dataset, tmp_path):
    flags = soak.first_flags("micro", tmp_path, dataset)
    process = soak.start("micro", [*flags, "--total-updates", 10**7])
    try:
        while not (policies := list(tmp_path.glob("runs/*/policy.pt"))):
            assert process.poll() is None
            time.sleep(0.05)
        folder = policies[0].parent
        held = (folder / "args.json").read_bytes()
        second = soak.start("micro", ["--resume", folder])
        output, errors = second.communicate(timeout=300)
        assert second.returncode == 1 and errors.count("\n") == 1 and "another process" in errors and output == ""
        assert process.poll() is None and (folder / "args.json").read_bytes() == held
    finally:
        process.kill()
    process.communicate()
    update = torch.load(folder / "checkpoint.pt", weights_only=True)["update"]
    resume(micro, folder, "--total-updates", update + 1)
    assert (folder / "result.json").exists()


# --- torn files -------------------------------------------------------------------------------------------------------
def test_no_byte_of_a_checkpoint_can_change_unseen(tmp_path):
    """Every byte of a small file altered, and the file cut at every byte: refused, or the same content."""
    path, content = tmp_path / "small.pt", dict(rows=torch.arange(1.0, 25.0).view(4, 6), step=3)
    micro.write_file(path, content)
    whole, refused = path.read_bytes(), 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place])
        assert soak.read_or_refusal(path) is None
        for bit in {place % 8, 4}:  # 4: among the attributes of a record, "this is a folder"
            torn = bytearray(whole)
            torn[place] ^= 1 << bit
            path.write_bytes(torn)
            read = soak.read_or_refusal(path)
            refused += read is None
            if read is not None:  # padding, or a field that nobody reads
                soak.same(read, content)
    assert refused > len(whole) / 2


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory):
    return run(micro, dataset, tmp_path_factory.mktemp("finished") / "runs", "--checkpoint-every", 8)


def test_torn_checkpoints(finished, tmp_path):
    tally = soak.fuzz_checkpoints(300, finished / "checkpoint.pt", tmp_path)
    assert tally["refused"] > 200


def test_a_torn_checkpoint_is_not_loaded_but_the_one_before_it(dataset, tmp_path, capsys):
    flags = "--total-updates", 20, "--checkpoint-every", 8
    whole, folder = run(micro, dataset, tmp_path / "a", *flags), run(micro, dataset, tmp_path / "b", *flags)
    path = folder / "checkpoint.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    (folder / "result.json").unlink()
    capsys.readouterr()
    resume(micro, folder)
    assert re.search(r"checkpoint\.pt is torn.*going on from .*checkpoint\.previous\.pt", capsys.readouterr().out)
    soak.assert_same_curves(scalars(folder), scalars(whole))
    for name in ("policy.pt", "checkpoint.pt"):
        soak.same(*(torch.load(f / name, weights_only=True) for f in (folder, whole)), name)
    assert (folder / "progress.csv").read_bytes() == (whole / "progress.csv").read_bytes()
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        (folder / name).write_bytes(b"no zip")
    assert "checkpoint.previous.pt is torn" in refusal(resume, micro, folder)


def test_torn_dynamics_and_policy_are_refused(finished, dataset, tmp_path):
    torn = tmp_path / "dynamics.pt"
    content = bytearray((finished / "dynamics.pt").read_bytes())
    middle = len(content) // 2
    content[middle : middle + 200] = bytes(200)
    torn.write_bytes(content)
    assert "dynamics.pt is torn" in refusal(run, micro, dataset, tmp_path / "runs", "--dynamics-path", torn)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "args.json").write_bytes((finished / "args.json").read_bytes())
    (folder / "policy.pt").write_bytes((finished / "policy.pt").read_bytes()[:-1])
    assert "policy.pt is torn" in refusal(micro.main, micro.parse_args(["--eval-only", str(folder)]))


def test_files_are_data_and_not_code(finished, tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save(dict(actor=Attack()), tmp_path / "policy.pt")
    (tmp_path / "args.json").write_bytes((finished / "args.json").read_bytes())
    refusal(micro.main, micro.parse_args(["--eval-only", str(tmp_path)]))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name, value", [("seed", "1"), ("beta", None), ("penalty", "x"), ("device", 3), ("env_id", [])])
def test_args_of_the_wrong_kind_are_refused_by_name(name, value, finished, tmp_path):
    described = json.loads((finished / "args.json").read_text())
    described["args"][name] = value
    (tmp_path / "args.json").write_text(json.dumps(described))
    assert name in refusal(micro.parse_args, ["--resume", str(tmp_path)])


def test_a_checkpoint_of_another_run_is_refused(finished, dataset, tmp_path):
    other = run(micro, dataset, tmp_path / "runs", "--hidden-size", 8)
    (other / "checkpoint.pt").write_bytes((finished / "checkpoint.pt").read_bytes())
    assert "not of a run with these arguments" in refusal(resume, micro, other)


def test_only_the_filled_part_of_the_buffer_is_saved(tmp_path):
    rng = torch.Generator().manual_seed(0)
    for rows in (3, 10, 25):
        buffer, again = (micro.RingBuffer(10, 4, torch.device("cpu")) for _ in "ab")
        buffer.add(torch.randn(rows, 4, generator=rng))
        micro.write_file(tmp_path / "buffer.pt", dict(buffer=buffer.state_dict()))
        saved = micro.read_tensors(tmp_path / "buffer.pt", "cpu")["buffer"]
        assert saved["rows"].untyped_storage().nbytes() == min(rows, 10) * 16
        again.load_state_dict(saved)
        for one in (buffer, again):
            one.add(torch.full((4, 4), 7.0))
        assert torch.equal(buffer.rows, again.rows) and (buffer.size, buffer.next) == (again.size, again.next)


def test_a_link_in_the_run_folder_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    os.symlink(tmp_path / "precious", tmp_path / "checkpoint.pt.part")
    os.symlink(tmp_path / "precious", tmp_path / "checkpoint.pt")
    os.symlink(tmp_path / "precious", tmp_path / "lock")
    micro.write_file(tmp_path / "checkpoint.pt", b"new")
    with micro.locked(tmp_path):
        pass
    assert (tmp_path / "precious").read_text() == "mine" and (tmp_path / "checkpoint.pt").read_bytes() == b"new"


# --- a full disk ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("script, at", [(micro, 3), (micro, 6), (micro, 8), (micro, 9), (rambo, 7), (rambo, 10)])
def test_a_full_disk_stops_in_order(script, at, dataset, tmp_path, monkeypatch):
    """The n-th file that is written finds no room: one line, the last checkpoint whole, and then on to the same end."""
    flags = "--checkpoint-every", 5
    whole, calls = run(script, dataset, tmp_path / "whole", *flags), []
    real = os.fsync

    def full(file):
        calls.append(1)
        if len(calls) >= at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        message = refusal(run, script, dataset, tmp_path / "full", *flags)
    assert "No space left" in message and "untouched" in message
    (folder,) = (tmp_path / "full").iterdir()
    assert not list(folder.glob("*.part"))
    resume(script, folder)
    assert (folder / "progress.csv").read_bytes() == (whole / "progress.csv").read_bytes()
    soak.same(*(torch.load(f / "checkpoint.pt", weights_only=True) for f in (folder, whole)))


def test_a_write_that_the_system_refuses_midway(finished, dataset, tmp_path):
    """A real one, from inside torch.save: files may have 30 KB at most, more than policy.pt and less than a checkpoint."""
    folder = run(micro, dataset, tmp_path / "runs", "--total-updates", 10)
    before = {path.name: path.read_bytes() for path in folder.glob("[!p]*.pt")}
    limit = (30_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    process = subprocess.run(
        [sys.executable, str(ROOT / "micro.py"), "--resume", str(folder), "--total-updates", "20"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit), capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 1 and process.stderr.count("\n") == 1, process.stderr
    assert re.search(r"cannot write .*\.pt, is the disk full.*untouched", process.stderr)
    assert {path.name: path.read_bytes() for path in folder.glob("[!p]*.pt")} == before
    resume(micro, folder)
    soak.same(*(torch.load(f / "policy.pt", weights_only=True)["actor"] for f in (folder, finished)))


def test_room_for_no_events(dataset, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(micro.SummaryWriter, "flush", full)
    assert "No space left" in refusal(run, micro, dataset, tmp_path / "runs")


# --- divergence -------------------------------------------------------------------------------------------------------
def check_stopped(script, message, quantity, root):
    assert re.search(rf"diverged before .*{quantity} is ", message), message
    (folder,) = root.iterdir()
    assert isinstance(micro.read_tensors(folder / "diverged.pt", "cpu"), dict) and not (folder / "result.json").exists()
    return folder


@pytest.mark.parametrize("script", [micro, rambo])
@pytest.mark.parametrize("quantity, value", [("critic_loss", math.nan), ("actor_loss", math.inf), ("q_max", 1e6), ("q_min", -1e6)])
def test_losses_and_values_that_nothing_explains(script, quantity, value, dataset, tmp_path, monkeypatch):
    """From update 12 on; the checkpoint of update 10 stays, and the one of update 15 is not written."""
    real, calls = script.update, []

    def update(*arguments):
        metrics = real(*arguments)
        calls.append(1)
        if len(calls) >= 12:
            metrics[script.METRICS.index(quantity)] = value * 20  # so is the mean beyond it
        return metrics

    monkeypatch.setattr(script, "update", update)
    flags = "--checkpoint-every", 5, "--eval-every", 20
    message = refusal(run, script, dataset, tmp_path, *flags)
    assert "update 15" in message
    folder = check_stopped(script, message, quantity, tmp_path)
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["update"] == 10
    assert torch.load(folder / "diverged.pt", weights_only=True)["update"] == 15


def test_a_learning_rate_that_diverges(dataset, tmp_path):
    """Without any pretence: critics that learn at a rate of 1000."""
    message = refusal(run, micro, dataset, tmp_path, "--critic-lr", 1e3, "--no-clamp-target", "--total-updates", 200)
    check_stopped(micro, message, "(q_min|q_max|critic_loss|actor_loss)", tmp_path)


def test_an_ensemble_that_diverges(dataset, tmp_path):
    message = refusal(run, micro, dataset, tmp_path, "--dynamics-lr", 1e9)
    check_stopped(micro, message, "(loss|holdout_error|best|.*logvar)", tmp_path)
    assert "dynamics epoch 1" in message


@pytest.mark.parametrize("script", [micro, rambo])
@pytest.mark.parametrize("value", [math.nan, 1e9])
def test_a_model_that_explodes(script, value, dataset, tmp_path, monkeypatch):
    real = script.rollout

    def rollout(*arguments):
        stats = real(*arguments)
        arguments[6].rows[0, 0] = value
        return stats

    monkeypatch.setattr(script, "rollout", rollout)
    check_stopped(script, refusal(run, script, dataset, tmp_path, "--model-ratio", 0.5), ".*", tmp_path)


@pytest.mark.parametrize("flags", [["--gamma", 1], ["--gamma", 0], ["--no-auto-alpha", "--alpha", 0], ["--no-auto-alpha", "--alpha", 50]])
def test_no_false_alarm(flags, dataset, tmp_path):
    folder = run(micro, dataset, tmp_path, *flags, "--total-updates", 60, "--critic-lr", 0.003)
    assert len(progress(folder)) and max(column(folder, "rollout_max")) > 0


def test_the_limits_by_hand():
    """Rewards of at most 2 at a discount of 0.9, fixed alpha 0.5, one action: 10 (2 + 20 * 0.5) / 0.1."""
    rows = torch.tensor([[3.0, 0.5, -2.0, -7.0, 0.0], [1.0, 0.1, 1.0, 1.0, 1.0]])
    args = micro.Args(gamma=0.9, auto_alpha=False, alpha=0.5)
    limits = micro.divergence_limits(rows, 1, 1, args)
    assert limits == pytest.approx(dict(q_min=1200, q_max=1200, rollout_max=7000, holdout_error=7000**2))
    args.gamma = 1  # a sum without end explains any finite value
    assert micro.divergence_limits(rows, 1, 1, args)["q_max"] == sys.float_info.max


# --- hostile datasets -------------------------------------------------------------------------------------------------
def test_fuzzed_datasets(tmp_path, capsys):
    tally = soak.fuzz_datasets(200, tmp_path, seed=int(time.time()) % 10**6)
    with capsys.disabled():
        print(f"\n{tally.total()} fuzzed datasets: {dict(tally)}")
    assert set(tally) <= {"refused in one line", "loaded, and valid", "a crash of libhdf5, said in one line"}


def hostile(path, key, make):
    soak.base_file(path, np.random.default_rng(0))
    with h5py.File(path, "r+") as file:
        shape = file[key].shape
        del file[key]
        make(file, key, shape)
    return path


HOSTILE = {
    "a soft link to itself": lambda f, k, s: f.__setitem__(k, h5py.SoftLink(f"/{k}")),
    "a soft link": lambda f, k, s: f.__setitem__(k, h5py.SoftLink("/rewards")),
    "another file": lambda f, k, s: f.__setitem__(k, h5py.ExternalLink("secret.hdf5", "/rewards")),
    "raw bytes of another file": lambda f, k, s: f.create_dataset(k, s, "f4", external=[("secret.hdf5", 0, 10**6)]),
    "10^12 rows": lambda f, k, s: f.create_dataset(k, (10**12, *s[1:]), "f4", chunks=(1000, *s[1:])),
    "chunks of 1 GB": lambda f, k, s: f.create_dataset(k, s, "f4", maxshape=(None, *s[1:]), chunks=(2**24, *s[1:])),
    "a cycle of groups": lambda f, k, s: f.__setitem__(k, f["/"]),
    "texts": lambda f, k, s: f.create_dataset(k, s, h5py.string_dtype()),
    "arrays of any length": lambda f, k, s: f.create_dataset(k, s, h5py.vlen_dtype("f4")),
    "references": lambda f, k, s: f.create_dataset(k, s, h5py.ref_dtype),
}


@pytest.mark.parametrize("key", ["observations", "timeouts"])
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_arrays_are_refused_by_name(case, key, tmp_path):
    soak.base_file(tmp_path / "secret.hdf5", np.random.default_rng(1))
    path = hostile(tmp_path / "data.hdf5", key, HOSTILE[case])
    assert re.search(rf"data\.hdf5.*{key}", refusal(micro.load_dataset, path, soak.HOPPER))


def test_a_file_that_declares_rows_without_data_takes_no_memory(tmp_path):
    """Every array with ten million rows, of which not one is stored."""
    with h5py.File(tmp_path / "bomb.hdf5", "w") as file:
        for key in soak.KEYS:
            width = dict(observations=(11,), next_observations=(11,), actions=(3,)).get(key, ())
            file.create_dataset(key, (10**7, *width), "f4", chunks=(1000, *width))
    assert "no data for it" in refusal(micro.load_dataset, tmp_path / "bomb.hdf5", soak.HOPPER)


def test_a_file_that_is_too_large(tmp_path, monkeypatch):
    soak.base_file(tmp_path / "data.hdf5", np.random.default_rng(0))
    monkeypatch.setattr(micro, "MAX_BYTES", 1000)
    assert "MAX_BYTES" in refusal(micro.load_dataset, tmp_path / "data.hdf5", soak.HOPPER)


def test_a_crash_of_the_reader_is_one_line(tmp_path, monkeypatch):
    soak.base_file(tmp_path / "data.hdf5", np.random.default_rng(0))
    monkeypatch.setattr(micro.h5py, "File", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert "crashed" in refusal(micro.load_dataset, tmp_path / "data.hdf5", soak.HOPPER)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.hdf5")
    assert "pipe.hdf5" in refusal(micro.load_dataset, tmp_path / "pipe.hdf5", soak.HOPPER)


@pytest.mark.parametrize("suffix", ["../x", "a/b", "..", "", "/tmp/x"])
def test_a_suffix_cannot_lead_out_of_the_output_folder(suffix, tmp_path):
    flags = ["--quality", "random", "--rows", "10", "--output-dir", str(tmp_path / "data"), "--suffix", suffix]
    assert "--suffix" in refusal(collect_dataset.main, flags)
    assert not list(tmp_path.rglob("*.hdf5"))
