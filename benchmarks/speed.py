"""How fast the training scripts are here, and how near to what the arithmetic allows.

Every time stands beside its bound: the floating-point operations of the networks' matrix products, counted from their
shapes below, divided by the throughput of the best large matrix product that torch reaches in the same run with as many
threads. Times are the fastest tenth of many repetitions and, with one thread, CPU time: other processes on the machine
matter little then. With more threads it is wall time, on a machine that should have nothing else to do.

    python benchmarks/speed.py --output results/speed/speed.json         every setting, some minutes
    python benchmarks/speed.py --quick --threads 1                       hopper, batches of 256
    python benchmarks/speed.py --profile                                 where the time of one update goes; --compile
"""

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import micro  # noqa: E402
import rambo_baseline as rambo  # noqa: E402

SHAPES = {"hopper": (11, 3), "walker2d": (17, 6)}  # observation and action dimensions
CPU = torch.device("cpu")


@dataclass
class Args:
    output: Path | None = None
    """write the figures here as JSON, and beside it as a Markdown table"""
    threads: tuple[int, ...] = (1, 2)
    """numbers of torch threads to measure with"""
    quick: bool = False
    """hopper's shapes and batches of 256 only, fewer repetitions"""
    profile: bool = False
    """instead, where the time of one update goes, and what --compile makes of it"""


# --- arithmetic -------------------------------------------------------------------------------------------------------
def layers(*sizes: int) -> int:
    """Multiplications for a row in a chain of linear layers."""
    return sum(i * o for i, o in zip(sizes, sizes[1:]))


def network_costs(obs_dim: int, act_dim: int, args: micro.Args) -> dict[str, int]:
    """Operations (two a multiplication) for one row through the actor, all critics, one dynamics network; and backwards.

    A backward pass takes as many for the weights' gradient, and as many again for the inputs' gradient of every layer but
    the first. In the actor's step the critics' weights take no gradient, and of their inputs only the action does.
    """
    hidden, width, critics = args.hidden_size, args.dynamics_hidden_size, args.num_critics
    actor = layers(obs_dim, hidden, hidden, 2 * act_dim)
    critic = layers(obs_dim + act_dim, hidden, hidden, 1)
    model = layers(obs_dim + act_dim, width, width, width, width, 2 * (obs_dim + 1))
    costs = dict(
        actor=actor,
        actor_backward=2 * actor - obs_dim * hidden,
        critics=critics * critic,
        critics_backward=critics * (2 * critic - (obs_dim + act_dim) * hidden),
        critics_action_gradient=critics * (critic - obs_dim * hidden),
        model=model,
        model_backward=2 * model - (obs_dim + act_dim) * width,
    )
    return {name: 2 * multiplications for name, multiplications in costs.items()}


def update_operations(cost: dict, args, model_rows: int) -> dict[str, float]:
    """Of each phase of an update. RAMBO's has no penalty."""
    batch, draws = args.batch_size, max(1, getattr(args, "penalty_draws", 1))
    target = batch * (cost["actor"] + cost["critics"])
    if getattr(args, "penalty", "none") != "none":
        set_rows = model_rows * args.num_elites
        target += set_rows * (cost["model"] + draws * (cost["actor"] + cost["critics"]))
    critic = batch * (cost["critics"] + cost["critics_backward"])
    actor = batch * (cost["actor"] + cost["critics"] + cost["critics_action_gradient"] + cost["actor_backward"])
    return dict(sampling=0, target=target, critic=critic, actor=actor, rest=0)


def adversarial_operations(cost: dict, args: rambo.Args) -> float:
    supervised = args.num_models * (cost["model"] + cost["model_backward"])
    adversarial = args.num_elites * (cost["model"] + cost["model_backward"])
    advantage = 2 * cost["critics"] + 2 * cost["actor"]  # s and s'; the action taken and the mode at s'
    return 256 * (supervised + adversarial + advantage)


# --- measuring --------------------------------------------------------------------------------------------------------
def clock() -> float:
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def fastest_tenth(samples) -> float:
    return float(np.quantile(samples, 0.1))


def throughput(repetitions: int) -> float:
    """Operations a second in large matrix products: the best of a few sizes."""
    best = 0.0
    for rows, inner, columns in ((1024, 256, 256), (2048, 256, 256), (1024, 1024, 1024)):
        a, b, out = torch.randn(rows, inner), torch.randn(inner, columns), torch.empty(rows, columns)
        seconds = []
        for _ in range(repetitions):
            start = clock()
            torch.mm(a, b, out=out)
            seconds.append(clock() - start)
        best = max(best, 2 * rows * inner * columns / fastest_tenth(seconds))
    return best


def stamp_after(module, names: tuple[str, ...], stamps: list) -> dict:
    """Let the named functions of a script note the time when they return. Returns the originals."""
    originals = {name: getattr(module, name) for name in names}

    def stamping(function):
        def wrapped(*args, **kwargs):
            result = function(*args, **kwargs)
            stamps.append(clock())
            return result

        return wrapped

    for name, function in originals.items():
        setattr(module, name, stamping(function))
    return originals


def measure_update(script, args, obs_dim: int, act_dim: int, repetitions: int) -> dict[str, float]:
    """Milliseconds of an update, phase by phase, exactly as main() takes it."""
    agent, rng = script.Agent(obs_dim, act_dim, args, CPU), script.generator(CPU, 0)
    model_rows = args.batch_size - int(args.batch_size * (1 - args.model_ratio))
    data = torch.randn(100_000, 2 * obs_dim + act_dim + 2)
    buffer = script.RingBuffer(len(data), data.shape[1], CPU)
    buffer.add(data)
    ensemble = script.Ensemble(args.num_models, obs_dim, act_dim, args.dynamics_hidden_size).requires_grad_(False)
    target, phases = ("target_and_penalty" if script is micro else "soft_target"), []
    stamps: list[float] = []
    originals = stamp_after(script, (target, "take_step"), stamps)
    for _ in range(repetitions):
        stamps.clear()
        start = clock()
        picks = torch.randint(len(data), (args.batch_size - model_rows,), generator=rng)
        rows = torch.cat([data[picks], buffer.sample(model_rows, rng)])
        batch = script.unpack(rows, obs_dim, act_dim)
        if script is micro:
            noise = script.draw_noise(args, model_rows, obs_dim, act_dim, rng)
            sampled = clock()
            script.update(agent, ensemble, batch, noise, args)
        else:
            noise = script.draw_noise(args, act_dim, rng)
            sampled = clock()
            script.update(agent, batch, noise, args)
        phases.append(np.diff([start, sampled, *stamps[:3], clock()]))  # target, critic, actor; then the rest
    for name, function in originals.items():
        setattr(script, name, function)
    phases = 1e3 * np.array(phases[len(phases) // 10 :])  # the first ones warm up
    split = {name: fastest_tenth(phases[:, i]) for i, name in enumerate(("sampling", "target", "critic", "actor", "rest"))}
    return split | dict(all=fastest_tenth(phases.sum(1)))


def make_update(args: micro.Args, obs_dim: int, act_dim: int, compiled: bool):
    """A function that takes one of MICRO's updates, always with the same networks, batch and noise."""
    agent, rng = micro.Agent(obs_dim, act_dim, args, CPU), micro.generator(CPU, 0)
    model_rows = args.batch_size - int(args.batch_size * (1 - args.model_ratio))
    batch = micro.unpack(micro.normal(rng, args.batch_size, 2 * obs_dim + act_dim + 2), obs_dim, act_dim)
    ensemble = micro.Ensemble(args.num_models, obs_dim, act_dim, args.dynamics_hidden_size).requires_grad_(False)
    noise = micro.draw_noise(args, model_rows, obs_dim, act_dim, rng)
    take_update = torch.compile(micro.update) if compiled else micro.update
    return lambda: take_update(agent, ensemble, batch, noise, args)


def profile_update(threads: int, repetitions: int = 100) -> dict[str, float]:
    """Hopper, the means, batches of 256: milliseconds as it is, with --compile, and (by torch's profiler, which adds to
    them) inside matrix products and outside; the seconds that compiling took, and how far its results are off."""
    import torch._inductor.config

    torch.set_num_threads(threads)
    torch._inductor.config.force_disable_caches = True  # or compiling would take as long as the last time allows
    took, metrics, args = dict(threads=threads), {}, micro.Args(penalty_draws=0, auto_alpha=False)
    for name in ("eager", "compiled"):
        take_update, seconds = make_update(args, *SHAPES["hopper"], compiled=name == "compiled"), []
        begun = time.perf_counter()
        metrics[name] = [take_update()]
        took["compiling_s"] = time.perf_counter() - begun  # of the last one, which is compiled
        for _ in range(repetitions):
            start = clock()
            metrics[name].append(take_update())
            seconds.append(clock() - start)
        took[f"{name}_ms"] = 1e3 * fastest_tenth(seconds)
    eager, compiled = (torch.stack(metrics[name][:10]) for name in ("eager", "compiled"))
    took["largest_difference"] = float(((compiled - eager).abs() / eager.abs().clamp(min=1e-3)).max())
    take_update = make_update(args, *SHAPES["hopper"], compiled=False)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(repetitions):
            take_update()
    spent = dict(products=0.0, rest=0.0)
    for event in profiler.key_averages():
        spent["products" if event.key.endswith("mm") else "rest"] += event.self_cpu_time_total / 1e3 / repetitions
    return took | {f"{name}_ms": value for name, value in spent.items()}


def measure_adversary(args: rambo.Args, obs_dim: int, act_dim: int, repetitions: int) -> float:
    """Milliseconds of one adversarial model update."""
    agent, rng = rambo.Agent(obs_dim, act_dim, args, CPU), rambo.generator(CPU, 0)
    ensemble = rambo.Ensemble(args.num_models, obs_dim, act_dim, args.dynamics_hidden_size)
    optimizer = rambo.dynamics_optimizer(ensemble, args.dynamics_lr)
    data, never = torch.randn(100_000, 2 * obs_dim + act_dim + 2), rambo.termination_of("none")
    args.adversarial_updates, seconds = 5, []
    for _ in range(repetitions):
        start = clock()
        rambo.train_model_against(agent, ensemble, optimizer, never, data, obs_dim, act_dim, args, rng)
        seconds.append((clock() - start) / args.adversarial_updates)
    return 1e3 * fastest_tenth(seconds)


def measure_rollouts(obs_dim: int, act_dim: int, repetitions: int) -> float:
    """Seconds of 50 000 rollouts of 5 steps, none of which ends early."""
    args, rng = micro.Args(), micro.generator(CPU, 0)
    actor = micro.Actor(obs_dim, act_dim)
    ensemble = micro.Ensemble(args.num_models, obs_dim, act_dim, args.dynamics_hidden_size).requires_grad_(False)
    buffer = micro.RingBuffer(5 * 5 * 50_000, 2 * obs_dim + act_dim + 2, CPU)
    seconds = []
    for _ in range(repetitions + 1):
        obs, start = torch.randn(50_000, obs_dim), clock()
        micro.rollout(actor, ensemble, args.num_elites, micro.termination_of("none"), obs, 5, buffer, rng)
        seconds.append(clock() - start)
    return fastest_tenth(seconds[1:])


def measure_dynamics(obs_dim: int, act_dim: int, rows: int) -> float:
    """Seconds of an epoch of dynamics training per 100 000 rows: the second and third epoch of a real training."""
    args, stamps = micro.Args(dynamics_max_epochs=3), []
    data = torch.randn(rows, 2 * obs_dim + act_dim + 2)
    micro.train_dynamics(data, obs_dim, act_dim, args, CPU, None, lambda *_: stamps.append(clock()))
    return min(np.diff(stamps)) * 100_000 / (rows - min(rows // 5, 1000))


# --- the table --------------------------------------------------------------------------------------------------------
def settings(batch: int) -> dict[str, tuple]:
    """Name -> script, arguments of the update."""

    def of(**changes) -> tuple:
        return micro, micro.Args(batch_size=batch, auto_alpha=False, **changes)

    return {
        "micro, the means": of(penalty_draws=0),
        "micro, 1 draw": of(penalty_draws=1),
        "micro, 2 draws": of(penalty_draws=2),
        "micro, 10 own draws": of(penalty_draws=10, common_noise=False),
        "eq8": of(penalty="eq8", penalty_draws=1, common_noise=False),
        "mobile, the means": of(penalty="mobile", penalty_draws=0),
        "mobile, 2 draws": of(penalty="mobile", penalty_draws=2),
        "mobile, 10 own draws": of(penalty="mobile", penalty_draws=10, common_noise=False),
        "none": of(penalty="none"),
        "rambo": (rambo, rambo.Args(batch_size=batch)),
    }


def measure(threads: int, quick: bool) -> list[dict]:
    torch.set_num_threads(threads)
    repetitions, rows = (60 if quick else 150), []
    best = throughput(repetitions)
    print(f"{threads} threads: {best / 1e9:.0f} GFLOP/s in large matrix products", flush=True)

    def record(shape: str, batch: int | None, what: str, took: float, operations: float, **split) -> None:
        bound = 1e3 * operations / best
        row = dict(threads=threads, shape=shape, batch=batch, what=what, ms=took, bound_ms=bound, of_bound=bound / took)
        rows.append(row | dict(gflops_per_s=best / 1e9) | split)
        print(f"  {shape}, batch {batch or '-'}, {what}: {took:.2f} ms, {100 * bound / took:.0f} % of the bound", flush=True)

    for shape in list(SHAPES)[: 1 if quick else None]:
        obs_dim, act_dim = SHAPES[shape]
        cost = network_costs(obs_dim, act_dim, micro.Args())
        for batch in (256,) if quick else (256, 1024):
            for name, (script, args) in settings(batch).items():
                took = measure_update(script, args, obs_dim, act_dim, repetitions)
                model_rows = batch - int(batch * (1 - args.model_ratio))
                operations = update_operations(cost, args, model_rows)
                split = {f"{phase}_ms": took[phase] for phase in operations}
                split |= {f"{phase}_bound_ms": 1e3 * count / best for phase, count in operations.items() if count}
                record(shape, batch, name, took["all"], sum(operations.values()), **split)
        args = rambo.Args()
        took = measure_adversary(args, obs_dim, act_dim, repetitions // 5)
        record(shape, None, "rambo, adversarial update", took, adversarial_operations(cost, args))
        took = 1e3 * measure_rollouts(obs_dim, act_dim, 2 if quick else 4)
        record(shape, None, "rollouts, 50 000 x 5", took, 50_000 * 5 * (cost["actor"] + cost["model"]))
        took = 1e3 * measure_dynamics(obs_dim, act_dim, 20_000 if quick else 40_000)
        operations = 100_000 * 7 * (cost["model"] + cost["model_backward"])
        record(shape, None, "dynamics, an epoch of 100 000 rows", took, operations)
    return rows


def title(about: dict) -> list[str]:
    preload = f", LD_PRELOAD={Path(about['preload']).name}" if about["preload"] else ""
    made = f"commit {about['commit']}, {about['seconds']:.0f} s"
    return [f"{about['machine']['device']}, torch {about['machine']['torch']}{preload}, {made}.", ""]


def best_products(rows: list[dict]) -> list[str]:
    best = {row["threads"]: row["gflops_per_s"] for row in rows}
    return ["Large matrix products: " + ", ".join(f"{g:.0f} GFLOP/s on {n} threads" for n, g in best.items()) + ".", ""]


def table(rows: list[dict]) -> list[str]:
    heads = ["threads", "shapes", "batch", "what", "ms", "bound, ms", "of the bound", "sampling", "target", "critic"]
    heads += ["actor", "rest"]
    lines = ["Of the phases: milliseconds, and the fraction of their bound.", ""]
    lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row["threads"], row["shape"], row["batch"] or "", row["what"], f"{row['ms']:.1f}", f"{row['bound_ms']:.1f}"]
        cells += [f"{100 * row['of_bound']:.0f} %"]
        for phase in ("sampling", "target", "critic", "actor", "rest"):
            took, bound = row.get(f"{phase}_ms"), row.get(f"{phase}_bound_ms")
            share = f", {100 * bound / took:.0f} %" if bound else ""
            cells.append("" if took is None else f"{took:.2f}{share}")
        lines += ["| " + " | ".join(map(str, cells)) + " |"]
    return lines


def all_told(rows: list[dict]) -> list[str]:
    """What one update costs with its share of the rollouts (50 000 x 5 every 1000) and of the adversary (one an update)."""
    lines = ["| threads | shapes | an update all told, batch 256 | ms | update | adversary | rollouts |", "|---|---|---|---|---|---|---|"]
    took = {(row["threads"], row["shape"], row["what"]): row["ms"] for row in rows if row["batch"] in (256, None)}
    for (threads, shape, what), update in took.items():
        if what.startswith(("micro", "mobile")) or what == "rambo":
            rollouts = took[threads, shape, "rollouts, 50 000 x 5"] / 1000
            adversary = took[threads, shape, "rambo, adversarial update"] if what == "rambo" else 0.0
            total = update + adversary + rollouts
            shares = [f"{100 * part / total:.0f} %" for part in (update, adversary, rollouts)]
            lines.append("| " + " | ".join([str(threads), shape, what, f"{total:.1f}", *shares]) + " |")
    return lines


def gains(rows: list[dict]) -> list[str]:
    """How many times faster two threads are than one."""
    one, two = ({(r["shape"], r["batch"], r["what"]): r["ms"] for r in rows if r["threads"] == n} for n in (1, 2))
    both = [(f"{shape}, {what}" + f", batch {batch}" * bool(batch), one[key] / two[key])
            for key in one.keys() & two.keys() for shape, batch, what in [key]]  # fmt: skip
    if not both:
        return []
    lines = ["| two threads against one | times faster |", "|---|---|"]
    return lines + [f"| {name} | {gain:.2f} |" for name, gain in sorted(both)]


def profile_table(rows: list[dict]) -> list[str]:
    names = ("threads", "eager_ms", "products_ms", "rest_ms", "compiled_ms", "compiling_s", "largest_difference")
    head = "| threads | hopper, the means, batch 256: ms | profiled: matrix products | the rest | with --compile "
    head += "| compiling, s | largest relative difference of a metric in 10 updates |"
    return [head, "|---" * len(names) + "|"] + ["| " + " | ".join(f"{row[n]:.3g}" for n in names) + " |" for row in rows]


def main(args: Args) -> None:
    started = time.perf_counter()
    if args.profile:
        rows = [profile_update(threads) for threads in args.threads]
        tables = profile_table(rows)
    else:
        rows = [row for threads in args.threads for row in measure(threads, args.quick)]
        tables = [*best_products(rows), *table(rows), "", *all_told(rows), "", *gains(rows)]
    git = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    about = dict(machine=micro.machine(CPU), cores=os.cpu_count(), system=platform.platform(), commit=git.stdout.strip())
    about |= dict(seconds=time.perf_counter() - started, preload=os.environ.get("LD_PRELOAD", ""))
    markdown = "\n".join([*title(about), *tables]) + "\n"
    print(markdown)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(about | dict(rows=rows), indent=1))
        args.output.with_suffix(".md").write_text(markdown)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n")[0]))
