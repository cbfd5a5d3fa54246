#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gpt_moe and a PyTorch peer on one GPU, in turns, as a markdown table.

  gpu_bench.py [MODEL]... [--rounds N]        speed, memory, first step
  gpu_bench.py [MODEL] --losses [--steps N]   the same start and tokens: losses
  gpu_bench.py [MODEL]... --parts             where the time of a step goes
  gpu_bench.py [MODEL]... --shared N          the same on N ranks of the GPU
  gpu_bench.py [MODEL]... --kernels           kernels by time, and the peer's

A round runs the peer, gpt_moe with train.deterministic and gpt_moe without; 10
steps of a run are warm-up, the medians are over the 30 after them. The first
round of gpt_moe is cold, the later ones find the tuning file of the first; the
peer's compiler keeps its cache from round to round likewise. Before the first
and after the last run PyTorch times a product of 8192^3: when the two are
more than 3% apart the card did not hold its speed, and the exit code is 3. It
times a copy of 2 GiB too.

--losses: the peer's initial weights go through tests/peers/dump_to_h5.py into
gpt_moe, both read the tokens of tests/peers/tokens_for.py. Compared are the
losses of every step (largest relative difference at most 1e-2, and at most
twice that between the peer and itself in another precision setting); exit 1 if
they are not.

--parts: one run of gpt_moe with wall_clock_breakdown, no peer; parts_table.py
says what the rows are and how near each can come to that product or that copy.

--shared: ranks share the GPU, the experts lie on two, a micro-batch is one
sequence: messages that were not hidden, and gaps, with comm.wait host and
stream. For the waits themselves; ranks of one GPU say nothing about speed.

--kernels: one run of each program with the build's kernel_times in it, which
slows it a little: kernels by time over the last 10 steps, and pauses.

Run it in the root of the repository, with a finished build. The peer needs
PyTorch, --losses also h5py. On a machine without a GPU the model bench-tiny
with --device cpu tries the script itself.
"""
import argparse
import datetime
import glob
import json
import os
import shutil
import statistics
import subprocess
import sys
import time

import gpu_card

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))))
PEERS = os.path.join(ROOT, "tests", "peers")
sys.path.insert(0, PEERS)
WARMUP = 10
MM_SPREAD = 0.03
MIXTRAL = ("--layers 12 --hidden 2048 --heads 16 --seq 2048 --batch 8 "
           "--experts 8 --top-k 2 --moe-every 1 --act swiglu --norm rmsnorm "
           "--no-bias --no-tie --ffn 5632")

# model: configuration, the peer's model, the peer's fastest settings
MODELS = {
    "dense-124m": (
        "--layers 12 --hidden 768 --heads 12 --batch 32 --moe-every 0",
        "--compile full"),
    "moe-0.55b": (
        "--layers 12 --hidden 1024 --heads 16 --batch 16 --experts 8 "
        "--top-k 2 --moe-every 2",
        "--compile blocks --ce compiled --experts-impl grouped"),
    "mixtral-3.7b": (MIXTRAL, "--compile blocks --ce compiled"),
    "bench-tiny": (
        "--layers 4 --hidden 256 --heads 4 --seq 256 --batch 4 --vocab 8192 "
        "--experts 4 --top-k 2 --moe-every 2 --expert-bias", ""),
}
# of --losses: eager, so that nothing waits for a compiler
EAGER = "--compile none --ce naive"


def say(text):
    print("gpu-bench: " + text, file=sys.stderr, flush=True)


def config_path(model):
    return os.path.join(ROOT, "apps", "configs", model + ".json")


class Shape:
    """What the runs need, from the configuration."""

    def __init__(self, model):
        with open(config_path(model)) as f:
            c = json.load(f)
        self.sequence = c["data"]["sequence_length"]
        self.batch = c.get("train_micro_batch_size_per_gpu",
                           c.get("train_batch_size"))
        padded = c["model"]["vocab_size"]
        self.vocab = 50257 if padded == 50304 else padded
        self.moe = "moe" in c


# --- one run of each program ---

class Failed(Exception):
    pass


def start(command, log, env=None):
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log,
                            text=True, cwd=ROOT, env=env)


def failed(name, process, log):
    log.flush()
    with open(log.name, errors="replace") as f:
        tail = "".join(f.readlines()[-15:])
    raise Failed("%s ended with %d:\n%s" % (name, process.returncode, tail))


def launcher(a, ranks):
    words = a.launcher.split()
    return [str(ranks) if before in ("-n", "-np") else word
            for before, word in zip([""] + words, words)]


def run_ours(a, model, tokens, out, steps, watch=False, extra=(), env=None,
             ranks=1):
    """The lines of the metrics; seconds from the start to the first step."""
    command = launcher(a, ranks) + [
        os.path.join(a.build, "apps", "gpt_moe"), config_path(model),
        "--data", tokens, "--out", out, "--steps", str(steps), "--json"]
    if a.device != "cuda":
        command += ["--set", "train.device=" + a.device]
    command += extra
    lines, first_s = [], None
    watched = gpu_card.Watch(watch)
    with open(out + ".log", "w") as log:
        began = time.time()
        process = start(command, log, env)
        for line in process.stdout:
            if not line.startswith('{"step"'):
                continue
            if first_s is None:
                first_s = time.time() - began
            lines.append(json.loads(line))
        process.wait()
        memory = watched.end()
        if process.returncode != 0 or len(lines) != steps:
            failed("gpt_moe", process, log)
    return {"lines": lines, "first_s": first_s, "card": memory}


def ours_folder(a, model, name):
    """An empty folder, but for the tuning file that an earlier run left."""
    out = os.path.join(a.work, "%s-%s" % (model, name))
    tuning = os.path.join(out, "tuning.json")
    kept = None
    if os.path.exists(tuning):
        with open(tuning, "rb") as f:
            kept = f.read()
    shutil.rmtree(out, ignore_errors=True)
    if kept is not None:
        os.makedirs(out)
        with open(tuning, "wb") as f:
            f.write(kept)
    return out, kept is not None


def run_peer(a, model, name, flags, watch=False, env=None):
    """The peer's JSON object, with first_s added."""
    path = os.path.join(a.work, "%s-%s" % (model, name))
    command = [a.python, os.path.abspath(__file__), "--as-peer"]
    command += MODELS[model][0].split() + flags
    if a.device != "cuda":
        command += ["--device", a.device]
    env = dict(env or os.environ, TORCHINDUCTOR_CACHE_DIR=os.path.join(
        a.work, "inductor"))
    first = last = None
    watched = gpu_card.Watch(watch)
    with open(path + ".log", "w") as log:
        began = time.time()
        process = start(command, log, env)
        for line in process.stdout:
            if line.startswith("first step at "):
                first = float(line.split()[-1]) - began
            elif line.startswith("{"):
                last = line
        process.wait()
        memory = watched.end()
        if process.returncode != 0 or last is None:
            failed("the peer", process, log)
    return dict(json.loads(last), first_s=first, card=memory)


def as_peer(flags):
    """The peer itself, telling when its first step ended."""
    import peer_torch_moe as peer
    import torch
    step = peer.Optimizer.step

    def first(self):
        norm = step(self)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print("first step at %.6f" % time.time(), flush=True)
        peer.Optimizer.step = step
        return norm

    peer.Optimizer.step = first
    sys.argv = [peer.__file__] + flags
    return peer.main()


# --- speed ---

def speed_of(steps_ms, tokens):
    return tokens / statistics.median(steps_ms) * 1e3


def ours_speed(run):
    lines = run["lines"][WARMUP:]
    return speed_of([x["step_ms"] for x in lines], lines[0]["tokens"])


class Side:
    """What the rounds of one program gave."""

    def __init__(self, name):
        self.name = name
        self.speeds, self.firsts = [], []
        self.card = self.reserved = None

    def add(self, speed, run):
        self.speeds.append(speed)
        self.firsts.append(run["first_s"])
        if run["card"] is not None:
            self.card = run["card"]
        say("%s: %.0f tokens/s, first step after %s s" %
            (self.name, speed, number(run["first_s"], "%.1f")))

    def median(self):
        return statistics.median(self.speeds)

    def spread(self):
        return (max(self.speeds) - min(self.speeds)) / self.median()


def number(value, form):
    return "-" if value is None else form % value


def gib(value):
    return number(None if value is None else value / 2 ** 30, "%.1f")


def planned(a, model):
    done = subprocess.run(
        [os.path.join(a.build, "apps", "gpt_moe"), "plan", config_path(model),
         "--ranks", "1", "--json"], capture_output=True, text=True, cwd=ROOT)
    try:
        return json.loads(done.stdout)["arena_bytes"]
    except (ValueError, KeyError):
        return None


def table(sides, reference):
    rows = ["| program | tokens/s | of the peer | spread | memory planned or "
            "reserved, GiB | on the card, GiB | first step: first run, later, "
            "s |", "|---|---|---|---|---|---|---|"]
    for s in sides:
        if not s.speeds:
            continue
        later = min(s.firsts[1:]) if len(s.firsts) > 1 else None
        ratio = s.median() / reference if reference else None
        rows.append("| %s | %.0f | %s | %.1f%% | %s | %s | %s, %s |" % (
            s.name, s.median(), number(ratio, "%.3f"), 100 * s.spread(),
            gib(s.reserved), gib(s.card), number(s.firsts[0], "%.1f"),
            number(later, "%.1f")))
    return rows


def bench_model(a, model):
    shape = Shape(model)
    steps = WARMUP + a.steps
    tokens = make_tokens(a, model, shape, steps)[0]
    flags = MODELS[model][1].split() + a.peer_flags.split()
    flags += ["--warmup", str(WARMUP), "--steps", str(a.steps)]
    peer = Side("PyTorch, " + (MODELS[model][1] or "eager"))
    ours = {"true": Side("moezero, deterministic"),
            "false": Side("moezero, not deterministic")}
    for value in ours:
        shutil.rmtree(os.path.join(a.work, "%s-%s" % (model, value)),
                      ignore_errors=True)
    for r in range(a.rounds):
        if not a.no_peer:
            run = run_peer(a, model, "peer", flags, watch=r == 0)
            peer.reserved = run["peak_memory_reserved_gib"] * 2 ** 30
            peer.add(run["tokens_per_s"], run)
        for value in a.deterministic.split(","):
            out = ours_folder(a, model, value)[0]
            run = run_ours(a, model, tokens, out, steps, watch=r == 0,
                           extra=["--set", "train.deterministic=" + value])
            ours[value].add(ours_speed(run), run)
    for side in ours.values():
        side.reserved = planned(a, model)
    reference = peer.median() if peer.speeds else None
    return table([peer] + list(ours.values()), reference)


# --- kernels ---

def with_times(a, name):
    """An environment in which a program writes its kernels' times; the files'
    common beginning."""
    prefix = os.path.join(a.work, name + ".kernels")
    for path in glob.glob(prefix + ".*"):
        os.remove(path)
    library = os.path.join(a.build, "tests", "bench", "libkernel_times.so")
    return dict(os.environ, CUDA_INJECTION64_PATH=library,
                MZ_KERNEL_TIMES=prefix), prefix


def kernels_of(name, prefix, steps_ms):
    import kernel_table
    step_ms = statistics.median(steps_ms[-10:])
    rows = ["%s: %.2f ms a step" % (name, step_ms), ""]
    found = sorted(glob.glob(prefix + ".*"), key=os.path.getsize)
    if not found:
        return rows + ["no times: is libkernel_times.so in the build?", ""]
    return rows + kernel_table.table(found[-1], step_ms) + [""]


def kernels_model(a, model):
    steps = WARMUP + 15
    tokens = make_tokens(a, model, Shape(model), steps)[0]
    value = a.deterministic.split(",")[0]
    env, prefix = with_times(a, model + "-ours")
    run = run_ours(a, model, tokens, ours_folder(a, model, value)[0], steps,
                   extra=["--set", "train.deterministic=" + value], env=env)
    rows = kernels_of("moezero", prefix, [x["step_ms"] for x in run["lines"]])
    if a.no_peer:
        return rows
    env, prefix = with_times(a, model + "-peer")
    flags = MODELS[model][1].split() + a.peer_flags.split()
    run = run_peer(a, model, "peer", flags + ["--warmup", str(WARMUP),
                                              "--steps", "15"], env=env)
    return rows + kernels_of("PyTorch", prefix, run["ms_steps"])


# --- parts ---

BREAKDOWN = ["--set", "wall_clock_breakdown=true"]


def parts_model(a, model, mm, copy):
    import parts_table
    steps = WARMUP + a.steps
    tokens = make_tokens(a, model, Shape(model), steps)[0]
    value = a.deterministic.split(",")[0]
    out = ours_folder(a, model, value)[0]
    run_ours(a, model, tokens, out, steps, extra=BREAKDOWN + [
        "--set", "train.deterministic=" + value])
    return parts_table.table(out, WARMUP, mm, copy) + [""]


def shared_model(a, model):
    """The table; whether both forms of waiting ran."""
    import parts_table
    steps, runs, refused = WARMUP + a.steps, {}, []
    shape = Shape(model)
    tokens = make_tokens(a, model, shape, steps)[0]
    env = dict(os.environ, OMPI_MCA_rmaps_base_oversubscribe="1",
               PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
               OMPI_MCA_mpi_yield_when_idle="1", OMP_NUM_THREADS="1")
    for wait in ("host", "stream"):
        out = ours_folder(a, model, "shared-" + wait)[0]
        extra = BREAKDOWN + ["--set", "comm.wait=" + wait]
        extra += ["--set", "train_micro_batch_size_per_gpu=1"]
        if shape.moe:
            extra += ["--set", "moe.ep_size=2"]
        try:
            run_ours(a, model, tokens, out, steps, extra=extra, env=env,
                     ranks=a.shared)
            runs["comm.wait " + wait] = out
        except Failed as error:
            reasons = [x for x in str(error).splitlines()
                       if x.startswith("gpt_moe: ")] or [str(error)]
            refused += ["comm.wait %s did not run: %s" % (wait, reasons[0]), ""]
    rows = parts_table.shared_table(runs, WARMUP) if runs else []
    return rows + [""] + refused, not refused


# --- losses ---

def make_tokens(a, model, shape, steps):
    import tokens_for
    paths = [os.path.join(a.work, "%s-%d.%s.bin" % (model, steps, x))
             for x in ("ours", "peer")]
    if not all(os.path.exists(p) for p in paths):
        tokens_for.make(*paths, shape.sequence, steps * shape.batch,
                        shape.vocab)
    return paths


def largest(ours, theirs):
    """Largest relative difference and its step, counted from 1."""
    rows = [(abs(x - y) / abs(y), i + 1)
            for i, (x, y) in enumerate(zip(ours, theirs))]
    return max(rows)


def losses_of_all(a, model):
    import dump_to_h5
    steps = a.steps
    mine, its = make_tokens(a, model, Shape(model), steps)
    flags = a.loss_flags.split() + ["--data", its, "--warmup", "0",
                                    "--steps", str(steps)]
    base, other = a.precisions.split(",")
    dump = os.path.join(a.work, model + "-dump")
    weights = os.path.join(a.work, model + ".h5")
    shutil.rmtree(dump, ignore_errors=True)
    first = run_peer(a, model, "peer-" + base,
                     flags + ["--precision", base, "--dump-init", dump])
    say("%d tensors, %d elements" % dump_to_h5.convert(dump, weights))
    shutil.rmtree(dump)
    second = run_peer(a, model, "peer-" + other,
                      flags + ["--precision", other])
    out, _ = ours_folder(a, model, "losses")
    run = run_ours(a, model, mine, out, steps, extra=["--init-from", weights])
    os.remove(weights)
    lines = run["lines"]
    return {"ours": [x["lm_loss"] for x in lines],
            "norms": [x["grad_norm"] for x in lines],
            "aux": [x["aux_loss"] for x in lines],
            base: first, other: second}


def compare_losses(a, model):
    """The table, and whether the losses are near enough."""
    base, other = a.precisions.split(",")
    got = losses_of_all(a, model)
    first, second = got[base], got[other]
    rows = ["| step | moezero | PyTorch %s | PyTorch %s | norm | its norm |"
            % (base, other), "|---|---|---|---|---|---|"]
    for i in range(a.steps):
        if i < 3 or (i + 1) % 5 == 0 or i + 1 == a.steps:
            rows.append("| %d | %.6f | %.6f | %.6f | %.4f | %.4f |" % (
                i + 1, got["ours"][i], first["losses"][i],
                second["losses"][i], got["norms"][i], first["grad_norms"][i]))
    mine, at = largest(got["ours"], first["losses"])
    spread, its_at = largest(second["losses"], first["losses"])
    norms = largest(got["norms"], first["grad_norms"])
    rows += ["", "Largest relative difference of the losses: %.2e (step %d) "
             "from the peer, %.2e (step %d) between the peer and itself in "
             "%s; ratio %.2f. Of the gradient norms: %.2e (step %d)." %
             (mine, at, spread, its_at, other,
              mine / spread if spread else float("inf"), *norms)]
    if first["aux_losses"][0] > 0:
        rows += ["Of the balance losses: %.2e (step %d)." %
                 largest(got["aux"], first["aux_losses"])]
    return rows, mine <= a.bound and mine <= 2 * max(spread, a.floor)


# --- the report ---

def versions(a):
    def first_line(command):
        try:
            done = subprocess.run(command, capture_output=True, text=True,
                                  cwd=ROOT)
            return (done.stdout.strip().splitlines() or ["-"])[0]
        except OSError:
            return "-"

    card = first_line(["nvidia-smi", "--id=0", "--format=csv,noheader",
                       "--query-gpu=name,driver_version"])
    torch = first_line([a.python, "-c",
                        "import torch; print(torch.__version__)"])
    version = first_line([os.path.join(a.build, "apps", "gpt_moe"), "--version"])
    commit = version.split(" commit ")[-1]
    return "card %s; PyTorch %s; commit %s" % (card, torch, commit)


def parse():
    p = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("models", nargs="*", metavar="MODEL",
                   help="of %s; default: the first three, with --losses "
                   "and --shared moe-0.55b" % ", ".join(MODELS))
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=30, help="that count")
    p.add_argument("--losses", action="store_true")
    p.add_argument("--parts", action="store_true")
    p.add_argument("--shared", type=int, default=0, metavar="N",
                   help="an even number of ranks")
    p.add_argument("--kernels", action="store_true")
    p.add_argument("--no-peer", action="store_true")
    p.add_argument("--no-mm", action="store_true")
    p.add_argument("--deterministic", default="true,false",
                   choices=["true,false", "true", "false"])
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    p.add_argument("--build", default="build")
    p.add_argument("--work", default=os.path.join(ROOT, ".cache", "gpu-bench"))
    p.add_argument("--launcher", default="mpirun -n 1 --bind-to none",
                   help="with -n 1, which --shared changes")
    p.add_argument("--python", default=sys.executable, help="has PyTorch")
    p.add_argument("--peer-flags", default="", help="added in speed runs")
    p.add_argument("--loss-flags", default=EAGER,
                   help="of the peer with --losses")
    p.add_argument("--precisions", default="bf16-master,autocast",
                   help="the peer's settings with --losses; the first is the "
                   "one to follow")
    p.add_argument("--bound", type=float, default=1e-2)
    p.add_argument("--floor", type=float, default=0.0,
                   help="a spread below this counts as this")
    p.add_argument("--out", help="also write the report here")
    a = p.parse_args()
    a.models = a.models or (["moe-0.55b"] if a.losses or a.shared else
                            list(MODELS)[:3])
    for model in a.models:
        if model not in MODELS:
            p.error("no model %s" % model)
    a.build, a.work = os.path.abspath(a.build), os.path.abspath(a.work)
    os.makedirs(a.work, exist_ok=True)
    return a


def report(a):
    """Prints as it goes; the exit code."""
    code, text = 0, []

    def put(*lines):
        text.extend(lines)
        print("\n".join(lines), flush=True)

    put("`ci/gpu-bench %s`, %s; %s" % (
        " ".join(sys.argv[1:]), datetime.date.today().isoformat(),
        versions(a)), "")
    with_mm = not (a.no_mm or a.losses or a.kernels or a.shared)
    before, copy = gpu_card.measure(a.python) if with_mm else (None, None)
    for model in a.models:
        put("## %s" % model, "")
        try:
            if a.losses:
                rows, good = compare_losses(a, model)
                put(*rows, "")
                code = code or (0 if good else 1)
            elif a.parts:
                put(*parts_model(a, model, before, copy))
            elif a.shared:
                rows, good = shared_model(a, model)
                put(*rows)
                code = code or (0 if good else 1)
            elif a.kernels:
                put(*kernels_model(a, model))
            else:
                put(*bench_model(a, model), "")
        except Failed as error:
            say("%s: %s" % (model, error))
            put("failed", "")
            code = 1
    if before:
        after = gpu_card.measure(a.python)[0]
        apart = abs(after - before) / before
        put("8192^3 product: %.0f TFLOP/s before, %.0f after; copy of 2 GiB: "
            "%.2f TB/s%s" % (before, after, copy, "" if apart <= MM_SPREAD else
            "; MORE THAN 3% APART: the run does not count"))
        code = code or (0 if apart <= MM_SPREAD else 3)
    if a.out:
        with open(a.out, "w") as f:
            f.write("\n".join(text) + "\n")
    return code


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-peer"]:
        sys.exit(as_peer(sys.argv[2:]))
    sys.exit(report(parse()))
