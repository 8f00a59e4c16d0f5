"""Reading D4RL files, against a slow and obvious loop, and fetching them, from a server on this machine."""

import hashlib
import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import micro

ROOT = Path(micro.__file__).resolve().parent
HOPPER, PENDULUM = micro.make_env("Hopper-v4"), micro.make_env("Pendulum-v1")


# --- the loader -------------------------------------------------------------------------------------------------------
def synthetic(count, env=HOPPER, seed=0, terminals=(), timeouts=()):
    """Arrays of a D4RL file; `terminals` and `timeouts` are row numbers. Every value is different from every other."""
    rng = np.random.default_rng(seed)
    obs_dim, space = env.observation_space.shape[0], env.unwrapped.action_space
    arrays = dict(
        observations=rng.normal(size=(count, obs_dim)).astype(np.float32),
        actions=rng.uniform(space.low, space.high, (count, len(space.low))).astype(np.float32),
        rewards=rng.normal(size=count).astype(np.float32),
        next_observations=rng.normal(size=(count, obs_dim)).astype(np.float32),
        terminals=np.zeros(count, bool),
        timeouts=np.zeros(count, bool),
    )
    arrays["terminals"][list(terminals)] = True
    arrays["timeouts"][list(timeouts)] = True
    return arrays


def without(arrays, *keys):
    return {key: array for key, array in arrays.items() if key not in keys}


def write(path, arrays):
    with h5py.File(path, "w") as file:
        for key, array in arrays.items():
            file[key] = array
    return path


def rows_by_loop(arrays):
    """SPEC 2, one row at a time: [s, a, r, s', terminal] of every row that has a next state and is no timeout."""
    rows, step = [], 0
    count = len(arrays["rewards"])
    for i in range(count):
        step += 1
        terminal = bool(np.ravel(arrays["terminals"])[i])
        if "timeouts" in arrays:
            timeout = bool(np.ravel(arrays["timeouts"])[i])
        else:
            timeout = step == 1000
        if terminal or timeout:
            step = 0
        if timeout:
            continue
        if "next_observations" in arrays:
            next_obs = arrays["next_observations"][i]
        elif terminal or i == count - 1:
            continue
        else:
            next_obs = arrays["observations"][i + 1]
        reward = np.ravel(arrays["rewards"])[i]
        rows.append([*arrays["observations"][i], *arrays["actions"][i], reward, *next_obs, float(terminal)])
    return np.array(rows, np.float32)


BOUNDARIES = {
    "none": dict(),
    "terminal": dict(terminals=[4]),
    "timeout": dict(timeouts=[4]),
    "both": dict(terminals=[4], timeouts=[4]),
    "one after the other": dict(terminals=[4, 6], timeouts=[5, 7]),
    "first row terminal": dict(terminals=[0]),
    "first row timeout": dict(timeouts=[0]),
    "last row terminal": dict(terminals=[11]),
    "last row timeout": dict(timeouts=[11]),
    "last row both": dict(terminals=[11], timeouts=[11]),
    "all kinds": dict(terminals=[2, 5, 9], timeouts=[3, 5, 11]),
}


@pytest.mark.parametrize("dropped", [(), ("next_observations",), ("timeouts",), ("next_observations", "timeouts")])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_boundaries(boundary, dropped, tmp_path):
    arrays = without(synthetic(12, **BOUNDARIES[boundary]), *dropped)
    rows = micro.load_dataset(write(tmp_path / "data.hdf5", arrays), HOPPER)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, rows_by_loop(arrays))


def test_a_small_file_by_hand(tmp_path):
    """Eight rows, of which one is a timeout, one a terminal, and the last one goes on."""
    arrays = synthetic(8, terminals=[5], timeouts=[2])
    rows = micro.load_dataset(write(tmp_path / "a.hdf5", arrays), HOPPER)
    np.testing.assert_array_equal(rows[:, 14], arrays["rewards"][[0, 1, 3, 4, 5, 6, 7]])
    np.testing.assert_array_equal(rows[:, -1], [0, 0, 0, 0, 1, 0, 0])
    rows = micro.load_dataset(write(tmp_path / "b.hdf5", without(arrays, "next_observations")), HOPPER)
    np.testing.assert_array_equal(rows[:, 14], arrays["rewards"][[0, 1, 3, 4, 6]])  # 5 and 7 have no next state
    np.testing.assert_array_equal(rows[:, 15:26], arrays["observations"][[1, 2, 4, 5, 7]])


@pytest.mark.parametrize("dropped", [("timeouts",), ("next_observations", "timeouts")])
@pytest.mark.parametrize("terminals", [[], [999], [998], [1000], [300, 1299, 1301], [5, 1005, 1006, 2006]])
def test_without_timeouts_an_episode_is_1000_steps(terminals, dropped, tmp_path):
    arrays = without(synthetic(3100, terminals=terminals), *dropped)
    rows = micro.load_dataset(write(tmp_path / "data.hdf5", arrays), HOPPER)
    np.testing.assert_array_equal(rows, rows_by_loop(arrays))


@pytest.mark.parametrize("seed", range(8))
def test_random_long_files(seed, tmp_path):
    rng = np.random.default_rng(seed)
    arrays = synthetic(3000, seed=seed)
    arrays["terminals"] = rng.random(3000) < 0.002
    arrays["timeouts"] = rng.random(3000) < 0.002
    arrays = without(arrays, *(key for key in ("next_observations", "timeouts") if rng.random() < 0.5))
    rows = micro.load_dataset(write(tmp_path / "data.hdf5", arrays), HOPPER)
    np.testing.assert_array_equal(rows, rows_by_loop(arrays))


@pytest.fixture(scope="module")
def one_file(tmp_path_factory):
    return tmp_path_factory.mktemp("data") / "data.hdf5"


flags = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=30)


@settings(max_examples=150, deadline=None)
@given(flags=flags, with_next=st.booleans(), with_timeouts=st.booleans(), column=st.booleans(),
       dtype=st.sampled_from(["bool", "uint8", "float32", "float64", "int64"]))  # fmt: skip
def test_any_short_file(one_file, flags, with_next, with_timeouts, column, dtype):
    arrays = synthetic(len(flags), env=PENDULUM)
    arrays["actions"] /= 2  # then the loop needs no rescaling
    arrays["terminals"], arrays["timeouts"] = np.array(flags).T.astype(dtype)
    if column:
        arrays |= {key: arrays[key][:, None] for key in ("rewards", "terminals", "timeouts")}
    dropped = ["next_observations"] * (not with_next) + ["timeouts"] * (not with_timeouts)
    arrays = without(arrays, *dropped)
    expected = rows_by_loop(arrays)
    write(one_file, arrays | dict(actions=2 * arrays["actions"]))
    if len(expected) < 2:
        with pytest.raises(SystemExit, match="fewer than two usable"):
            micro.load_dataset(one_file, PENDULUM)
    else:
        np.testing.assert_allclose(micro.load_dataset(one_file, PENDULUM), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "float32", "float64"])
def test_kinds_of_flags(dtype, tmp_path):
    arrays = synthetic(12, terminals=[3, 7], timeouts=[5, 7])
    expected = rows_by_loop(arrays)
    arrays |= {key: arrays[key].astype(dtype) for key in ("terminals", "timeouts")}
    np.testing.assert_array_equal(micro.load_dataset(write(tmp_path / "data.hdf5", arrays), HOPPER), expected)


def test_columns_extra_groups_and_float64(tmp_path):
    arrays = synthetic(12, terminals=[3], timeouts=[8])
    expected = rows_by_loop(arrays)
    arrays |= {key: arrays[key].astype(np.float64) for key in ("observations", "actions", "rewards", "next_observations")}
    arrays |= {key: arrays[key][:, None] for key in ("rewards", "terminals", "timeouts")}
    extra = {"infos/qpos": np.full((12, 6), np.nan), "infos/action_log_probs": np.zeros(3), "metadata/algorithm": b"SAC"}
    rows = micro.load_dataset(write(tmp_path / "data.hdf5", arrays | extra), HOPPER)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, expected)


def test_actions_are_rescaled_to_the_unit_box(tmp_path):
    """Pendulum's torque is between -2 and 2; a policy that ends in a tanh must see it between -1 and 1."""
    arrays = synthetic(20, env=PENDULUM)
    arrays["actions"][:3, 0] = [-2, 0, 2]
    rows = micro.load_dataset(write(tmp_path / "data.hdf5", arrays), PENDULUM)
    np.testing.assert_allclose(rows[:, 3], arrays["actions"][:, 0] / 2, atol=1e-6)
    np.testing.assert_allclose(rows[:3, 3], [-1, 0, 1], atol=1e-6)


def test_actions_are_rescaled_when_the_bounds_are_lopsided(tmp_path):
    class Lopsided(gym.Env):
        observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))
        action_space = gym.spaces.Box(np.array([0, -3]), np.array([10, 1]), dtype=np.float64)

    env = gym.wrappers.RescaleAction(Lopsided(), -1.0, 1.0)
    arrays = synthetic(3, env=env)
    arrays["actions"][:] = [[0, -3], [5, -1], [10, 1]]
    rows = micro.load_dataset(write(tmp_path / "data.hdf5", arrays), env)
    np.testing.assert_allclose(rows[:, 2:4], [[-1, -1], [0, 0], [1, 1]], atol=1e-6)


def test_the_views_of_a_row(tmp_path):
    arrays = synthetic(6, terminals=[2])
    rows = torch.as_tensor(micro.load_dataset(write(tmp_path / "data.hdf5", arrays), HOPPER))
    obs, act, reward, next_obs, done = micro.unpack(rows, 11, 3)
    np.testing.assert_array_equal(obs, arrays["observations"])
    np.testing.assert_array_equal(act, arrays["actions"])
    np.testing.assert_array_equal(reward, arrays["rewards"])
    np.testing.assert_array_equal(next_obs, arrays["next_observations"])
    np.testing.assert_array_equal(done, arrays["terminals"])


# --- files that cannot be used: one line each -------------------------------------------------------------------------
def spoiled(key, row, value):
    arrays = synthetic(12)
    arrays[key] = arrays[key].astype(np.float32)
    arrays[key][row] = value
    return arrays


BAD_ARRAYS = {
    "no observations": (without(synthetic(12), "observations"), "observations"),
    "no actions": (without(synthetic(12), "actions"), "actions"),
    "no rewards": (without(synthetic(12), "rewards"), "rewards"),
    "no terminals": (without(synthetic(12), "terminals"), "terminals"),
    "nothing at all": ({}, "observations"),
    "wide observations": (synthetic(12) | dict(observations=np.zeros((12, 12))), "observations"),
    "narrow observations": (synthetic(12) | dict(observations=np.zeros((12, 10))), "observations"),
    "wide next_observations": (synthetic(12) | dict(next_observations=np.zeros((12, 12))), "next_observations"),
    "wide actions": (synthetic(12) | dict(actions=np.zeros((12, 4))), "actions"),
    "flat actions": (synthetic(12) | dict(actions=np.zeros(36)), "actions"),
    "flat observations": (synthetic(12) | dict(observations=np.zeros(132)), "observations"),
    "cubic observations": (synthetic(12) | dict(observations=np.zeros((12, 11, 1))), "observations"),
    "two rewards": (synthetic(12) | dict(rewards=np.zeros((12, 2))), "rewards"),
    "a scalar for terminals": (synthetic(12) | dict(terminals=np.float32(0)), "terminals"),
    "NaN in observations": (spoiled("observations", 3, np.nan), "finite"),
    "inf in next_observations": (spoiled("next_observations", 3, np.inf), "finite"),
    "NaN in actions": (spoiled("actions", 3, np.nan), "finite"),
    "-inf in rewards": (spoiled("rewards", 3, -np.inf), "finite"),
    "NaN in the last row": (spoiled("observations", 11, np.nan), "finite"),
    "NaN in terminals": (spoiled("terminals", 3, np.nan), "finite"),
    "NaN in timeouts": (spoiled("timeouts", 3, np.nan), "finite"),
    "no rows": (synthetic(0), "rows"),
    "only timeouts": (synthetic(12, timeouts=range(12)), "usable"),
    "fewer rewards": (synthetic(12) | dict(rewards=np.zeros(11)), "rewards"),
    "fewer observations": (synthetic(12) | dict(observations=np.zeros((11, 11))), "observations"),
    "more timeouts": (synthetic(12) | dict(timeouts=np.zeros(13)), "timeouts"),
    "more terminals": (synthetic(12) | dict(terminals=np.zeros(13)), "terminals"),
    "a group for rewards": (without(synthetic(12), "rewards") | {"rewards/a": np.zeros(12)}, "rewards is not an array"),
    "a group for timeouts": (without(synthetic(12), "timeouts") | {"timeouts/a": np.zeros(12)}, "timeouts is not an array"),
    "text for rewards": (synthetic(12) | dict(rewards=np.array([b"one"] * 12)), "data.hdf5"),
    "text for terminals": (synthetic(12) | dict(terminals=np.array([b"no"] * 12)), "data.hdf5"),
    "text for observations": (synthetic(12) | dict(observations=np.full((12, 11), b"here")), "data.hdf5"),
    "text of any length for actions": (synthetic(12) | dict(actions=np.full((12, 3), "up", object)), "data.hdf5"),
}


def one_line(error):
    """What a user sees: a message (so that Python prints it and exits with 1), on one line."""
    assert isinstance(error.value.code, str)
    assert "\n" not in error.value.code
    return error.value.code


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_bad_arrays_are_refused(case, tmp_path):
    arrays, word = BAD_ARRAYS[case]
    path = write(tmp_path / "data.hdf5", arrays)
    with pytest.raises(SystemExit) as error:
        micro.load_dataset(path, HOPPER)
    assert word in one_line(error)
    assert "data.hdf5" in one_line(error)


def test_text_for_actions_that_would_be_rescaled(tmp_path):
    arrays = synthetic(12, env=PENDULUM) | dict(actions=np.full((12, 1), b"up"))
    with pytest.raises(SystemExit) as error:
        micro.load_dataset(write(tmp_path / "data.hdf5", arrays), PENDULUM)
    assert "data.hdf5" in one_line(error)


def test_wrong_width_names_the_environment_and_both_widths(tmp_path):
    """The commonest mistake: another environment's file."""
    path = write(tmp_path / "data.hdf5", synthetic(12, env=PENDULUM))
    with pytest.raises(SystemExit) as error:
        micro.load_dataset(path, HOPPER)
    assert "Hopper-v4" in one_line(error) and ("3" in one_line(error) or "11" in one_line(error))


def test_files_that_are_not_hdf5_are_refused(tmp_path):
    whole = write(tmp_path / "whole.hdf5", synthetic(200)).read_bytes()
    for name, content in dict(text=b"hello\n" * 100, empty=b"", torn=whole[: len(whole) // 2]).items():
        path = tmp_path / f"{name}.hdf5"
        path.write_bytes(content)
        with pytest.raises(SystemExit) as error:
            micro.load_dataset(path, HOPPER)
        assert "HDF5" in one_line(error) and path.name in one_line(error)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(SystemExit) as error:
        micro.load_dataset(tmp_path, HOPPER)
    assert str(tmp_path) in one_line(error)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(SystemExit) as error:
        micro.load_dataset(tmp_path / "absent.hdf5", HOPPER)
    assert "no dataset" in one_line(error) and "absent.hdf5" in one_line(error)


# --- the downloader ---------------------------------------------------------------------------------------------------
TASK, FILE = "hopper-medium-replay-v2", "hopper_medium_replay-v2.hdf5"
BODY = os.urandom(300_000)


class Server(http.server.ThreadingHTTPServer):
    """Serves BODY under FILE on 127.0.0.1, well or badly, and remembers what was asked of it."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.mode, self.asked = "good", []
        self.two_at_once = threading.Barrier(2)
        self.url = f"http://127.0.0.1:{self.server_port}/v2"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        mode = self.server.mode
        self.server.asked.append(self.path)
        if mode == "absent" or self.path != f"/v2/{FILE}":
            return self.send_error(404)
        self.send_response(200)
        if mode != "unsized":
            self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        if mode == "two at once":
            self.server.two_at_once.wait(timeout=60)
        body = dict(truncated=BODY[:100_000], altered=BODY[:-1] + bytes([BODY[-1] ^ 1])).get(mode, BODY)
        for start in range(0, len(body), 20_000):
            self.wfile.write(body[start : start + 20_000])
            self.wfile.flush()
            time.sleep(0.03 if mode in ("slow", "two at once") else 0)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs=dict(poll_interval=0.02))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path / "cache"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(micro.D4RL_SHA256, TASK, hashlib.sha256(BODY).hexdigest())
    return tmp_path / "cache"


def find(url):
    return micro.find_dataset(micro.Args(env_id=TASK, dataset_base_url=url))


def refused(url, cache):
    """The message with which a download is refused; nothing may be left in the cache."""
    with pytest.raises(SystemExit) as error:
        find(url)
    assert not cache.exists() or list(cache.iterdir()) == []
    return one_line(error)


@pytest.mark.parametrize("mode", ["good", "slow", "unsized"])
def test_a_download_is_cached(mode, server, cache):
    server.mode = mode
    path = find(server.url)
    assert path == cache / FILE and path.read_bytes() == BODY
    assert find(server.url + "/") == path  # now from the cache
    assert server.asked == [f"/v2/{FILE}"]
    assert list(cache.iterdir()) == [path]


def test_the_cache_is_the_d4rl_packages_own(server, cache, monkeypatch, tmp_path):
    monkeypatch.delenv("D4RL_DATASET_DIR")
    assert find(server.url) == tmp_path / "home" / ".d4rl" / "datasets" / FILE


@pytest.mark.parametrize("mode", ["truncated", "altered"])
def test_a_truncated_or_altered_download_is_refused(mode, server, cache):
    server.mode = mode
    assert hashlib.sha256(BODY).hexdigest() in refused(server.url, cache)
    server.mode = "good"
    assert find(server.url).read_bytes() == BODY


def test_an_absent_file_is_refused(server, cache):
    server.mode = "absent"
    message = refused(server.url, cache)
    assert "404" in message and FILE in message and "--dataset-path" in message


@pytest.fixture
def closed_url():
    """A port of this machine on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return f"http://127.0.0.1:{port}/v2"


def test_a_refused_connection(closed_url, cache):
    message = refused(closed_url, cache)
    assert "refused" in message and "--dataset-base-url" in message


@pytest.mark.parametrize("url", ["nonsense", "http://", "http://127.0.0.1:99999"])
def test_an_impossible_url(url, cache):
    assert "cannot download" in refused(url, cache)


def test_a_cache_that_cannot_be_written(server, cache, tmp_path):
    cache.write_bytes(b"a file where the folder should be")
    with pytest.raises(SystemExit) as error:
        find(server.url)
    assert "cannot download" in one_line(error)


@pytest.mark.parametrize("content", [b"", BODY[:-1], BODY[:-1] + b"?"], ids=["empty", "truncated", "altered"])
def test_a_bad_cached_file_is_moved_aside_and_fetched_again(content, server, cache, capsys):
    cache.mkdir()
    (cache / FILE).write_bytes(content)
    assert find(server.url).read_bytes() == BODY
    others = [path for path in cache.iterdir() if path.name != FILE]
    assert [path.read_bytes() for path in others] == [content]
    assert hashlib.sha256(BODY).hexdigest() in capsys.readouterr().out


def test_a_bad_cached_file_is_not_used_without_a_server(closed_url, cache):
    cache.mkdir()
    (cache / FILE).write_bytes(BODY[:-1])
    with pytest.raises(SystemExit):
        find(closed_url)
    assert not (cache / FILE).exists()


def test_two_downloads_at_once_leave_one_good_file(server, cache):
    """Two processes, whose answers the server holds back until both have asked."""
    server.mode = "two at once"
    code = (
        f"import micro; micro.D4RL_SHA256[{TASK!r}] = {hashlib.sha256(BODY).hexdigest()!r}\n"
        f"print(micro.find_dataset(micro.Args(env_id={TASK!r}, dataset_base_url={server.url!r})))"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in "ab"]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all(output.splitlines()[-1] == str(cache / FILE) for output in outputs)
    assert len(server.asked) == 2
    assert list(cache.iterdir()) == [cache / FILE]
    assert (cache / FILE).read_bytes() == BODY


def test_a_local_path_needs_no_cache(cache):
    assert micro.find_dataset(micro.Args(env_id=TASK, dataset_path="some/file.hdf5")) == Path("some/file.hdf5")
    assert not cache.exists()


def test_every_d4rl_file_name(server, cache, monkeypatch):
    """A dash becomes an underscore, but not the one before the version."""
    asked = []
    monkeypatch.setattr(micro, "download", lambda url, path, expected: asked.append((url, path.name, expected)))
    for environment in ("halfcheetah", "hopper", "walker2d"):
        for kind in ("random", "medium", "medium-replay", "medium-expert", "expert"):
            task, name = f"{environment}-{kind}-v2", f"{environment}_{kind.replace('-', '_')}-v2.hdf5"
            micro.find_dataset(micro.Args(env_id=task, dataset_base_url="http://mirror/d4rl/"))
            assert asked[-1] == (f"http://mirror/d4rl/{name}", name, micro.D4RL_SHA256[task])
    assert len(asked) == 15 and len({checksum for _, _, checksum in asked}) == 15


def test_the_environment_variable_sets_the_base_url(tmp_path):
    environment = os.environ | dict(D4RL_DATASET_BASE_URL="http://127.0.0.1:1/mirror", HOME=str(tmp_path), COLUMNS="200")
    command = [sys.executable, "micro.py", "--help"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0
    assert "http://127.0.0.1:1/mirror" in run.stdout and "berkeley" not in run.stdout
