#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What only two GPUs can show, in parts, as one markdown report.

  tiny        TINY on 2 and 4 ranks equals one CPU rank, twice the same bits
  exchange    exchanges and units by src/comm beside NCCL, GB/s
  mixtral     mixtral-3.7b, ZeRO-3 x EP 2, beside FSDP2 and DDP + EP
  nlg         nlg-350m-moe128 (13.1 B), EP 2, beside DDP + EP
  stages      mixtral-3.7b: ZeRO-3 and ZeRO-1 at EP 2 and at EP 1
  checkpoint  saved on two GPUs, resumed on one, on CPU ranks, and back
  claims      memory and messages of six layouts as planned
  overlap     token exchange not hidden with moe.overlap_chunks 0 (no overlap),
              1, 2, 4, where every expert gets the same rows

The parts run in this order until the time is over; each command has a limit of
its own. The report is written anew after every part, so that none is lost. The
first four take about 6 minutes. The last line of stdout counts the checks;
exit code 0: all parts ran and all bounds are kept, 1: not so, 2: something is
missing.

In their first steps on random tokens routers send up to all rows of a layer to
one rank: EP loses what FSDP2 does not. With --balanced every expert gets the
same rows in all programs (the peer's --force-balance, our debug.route_table).

Run it in the root of the repository with a build (-Dtest_hooks=true for claims,
overlap and --balanced) that has the programs of the parts; for claims alone: ninja
tests/ranks/rank_outside tests/device/device_memory tests/outside/liboutside.so.
The library may be static or shared. The peers need PyTorch. --dry tries
everything on one GPU that two ranks share: small models, few steps, peers on
one process. --device cpu tries the script itself with the model bench-tiny.
"""
import argparse
import datetime
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time

import gpu2_rates
import gpu_bench as bench
import gpu_card

ROOT = bench.ROOT
RANKS = 2
MIXTRAL = "mixtral-3.7b"
NLG = "nlg-350m-moe128"
PEER = os.path.join("tests", "peers", "peer_torch_moe.py")
COMPILED = "--compile blocks --ce compiled"
NLG_PEER = ("--layers 24 --hidden 1024 --heads 16 --seq 2048 --batch 8 "
            "--experts 128 --top-k 1 --moe-every 2 " + COMPILED)
FSDP2 = "--parallel fsdp2 --fsdp-prefetch 1 --reduce-dtype bf16"
DDP_EP = "--parallel ddp-ep"
# Rows of experts on other ranks vary.
SETTINGS = ["moe.saved_rows=1.25"]
DRY = ["model.num_hidden_layers=4", "train_micro_batch_size_per_gpu=2"]
DRY_PEER = "--layers 4 --batch 2"
SIZES = [1, 4, 16, 64, 256]


class Report:
    """Markdown that is on the disk after each part, and the checks."""

    def __init__(self, path):
        self.path, self.lines = path, []
        self.good = self.bad = 0

    def put(self, *lines):
        self.lines.extend(lines)
        with open(self.path, "w") as f:
            f.write("\n".join(self.lines) + "\n")

    def check(self, good, text):
        """A line in the report and on stdout."""
        self.good, self.bad = self.good + good, self.bad + (not good)
        text = ("ok: " if good else "FAILED: ") + text
        self.put("- " + text)
        print(text, flush=True)


def say(text):
    print("gpu2: " + text, file=sys.stderr, flush=True)


# --- running programs ---

def left_s(a):
    return a.end - time.time()


def limit(a, seconds):
    """Seconds for a command; an exception where nothing is left."""
    if left_s(a) < 10:
        raise bench.Failed("no time left")
    return int(min(seconds, left_s(a)))


def mpirun(a, ranks, seconds):
    return ["timeout", "-k", "5", str(limit(a, seconds)), "mpirun", "-n",
            str(ranks), "--bind-to", "none"]


def torchrun(a, seconds):
    processes = 1 if a.dry and a.device == "cuda" else RANKS
    return ["timeout", "-k", "5", str(limit(a, seconds)), a.python, "-m",
            "torch.distributed.run", "--standalone", "--nproc-per-node",
            str(processes)]


def program(a, *path):
    return os.path.join(a.build, *path)


def in_work(a, name, ending=""):
    return os.path.join(a.work, re.sub(r"[^\w.]+", "-", name) + ending)


def output_of(a, name, command, env=None):
    """The lines of stdout and the exit code; all in work/NAME.log."""
    began = time.time()
    with open(in_work(a, name, ".log"), "w") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log,
                              text=True, cwd=ROOT, env=env)
        log.write(done.stdout)
    lines = done.stdout.splitlines()
    say("%s: exit code %d after %.0f s" % (
        name, done.returncode, time.time() - began))
    return lines, done.returncode


def tail_of(a, name, num=12):
    with open(in_work(a, name, ".log"), errors="replace") as f:
        return [x.rstrip() for x in f.readlines()[-num:]]


# --- training runs, ours and the peer's ---

def assignments(a, given):
    words = SETTINGS + given + (DRY if a.dry else []) + a.set
    return [x for word in words for x in ("--set", word)]


def routed(a, model):
    """The model's configuration; with --balanced one with a route table."""
    if not a.balanced:
        return model
    with open(bench.config_path(model)) as f:
        config = json.load(f)
    experts = config["moe"]["num_experts"]
    config["debug"] = {"route_table": [
        token % experts for token in range(config["model"]["vocab_size"])]}
    path = os.path.join(a.work, model + "-balanced")
    with open(path + ".json", "w") as f:
        json.dump(config, f)
    return path


def planned_bytes(a, model, given):
    done = subprocess.run(
        [program(a, "apps", "gpt_moe"), "plan", bench.config_path(model),
         "--ranks", str(RANKS), "--json"] + assignments(a, given),
        capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise bench.Failed("plan: " + done.stderr)
    return json.loads(done.stdout)["arena_bytes"]


def most_loaded(line, ep_size):
    """Rows of the rank with the most in a layer, over balanced rows."""
    most = 1.0
    for layer in line["expert_kept"]:
        part = len(layer) // ep_size
        sums = [sum(layer[r * part:(r + 1) * part]) for r in range(ep_size)]
        if sum(sums) > 0:
            most = max(most, max(sums) * ep_size / sum(sums))
    return most


def tokens_for(a, model):
    import tokens_for
    shape = bench.Shape(model)
    paths = [os.path.join(a.work, "%s.%s.bin" % (model, side))
             for side in ("ours", "peer")]
    if not os.path.exists(paths[0]):
        tokens_for.make(*paths, shape.sequence,
                        (a.warmup + a.steps) * shape.batch * RANKS,
                        shape.vocab)
    return paths[0]


def ours(a, name, model, given, seconds=110):
    """A row: speed, milliseconds, memory."""
    model = routed(a, model)
    a.launcher = " ".join(mpirun(a, RANKS, seconds))
    out = in_work(a, name)
    shutil.rmtree(out, ignore_errors=True)
    row = {"name": name, "planned": planned_bytes(a, model, given)}
    run = bench.run_ours(a, model, tokens_for(a, model), out,
                         a.warmup + a.steps, watch=a.device == "cuda",
                         extra=assignments(a, given), ranks=RANKS)
    lines = run["lines"][a.warmup:]
    row["ms"] = statistics.median(x["step_ms"] for x in lines)
    row["speed"] = lines[0]["tokens"] / row["ms"] * 1e3
    row["card"], row["first_s"] = run["card"], run["first_s"]
    ep_size = RANKS if "moe.ep_size=%d" % RANKS in given else 1
    row["load"] = max(most_loaded(x, ep_size) for x in lines)
    row["times"] = [x["time_ms"] for x in lines]
    for key in ("under_way", "exposed", "exposed_least"):
        row[key] = statistics.mean(x["exchange_ms"][key] or 0.0
                                   for x in lines)
    say("%s: %.0f tokens/s, first step after %.1f s" % (
        name, row["speed"], row["first_s"]))
    return row


def peer(a, name, flags, seconds=130):
    command = torchrun(a, seconds) + [PEER] + flags.split()
    if a.dry:
        command += DRY_PEER.split()
    if a.balanced:
        command.append("--force-balance")
    command += ["--device", a.device, "--warmup", str(a.warmup),
                "--steps", str(a.steps)]
    env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=os.path.join(
        a.work, "inductor"))
    watched = gpu_card.Watch(a.device == "cuda")
    lines, code = output_of(a, name, command, env)
    card = watched.end()
    objects = [x for x in lines if x.startswith("{")]
    if not objects:  # how it ends after the last step does not matter
        raise bench.Failed("\n".join(["exit code %d" % code] +
                                     tail_of(a, name)))
    got = json.loads(objects[-1])
    return {"name": "PyTorch " + name, "speed": got["tokens_per_s"],
            "ms": got["ms_per_step_median"], "card": card,
            "reserved": got["peak_memory_reserved_gib"] * 2 ** 30}


def attempt(report, run, a, name, *args, **kwargs):
    """A row, or None and a failed check: the other runs go on."""
    try:
        return run(a, name, *args, **kwargs)
    except bench.Failed as error:
        lines = str(error).strip().splitlines()
        report.check(False, "%s: %s" % (name, lines[0]))
        if lines[1:]:
            report.put("```", *lines[1:], "```")
        return None


def together(runs):
    """One row of the rounds of a program: the median speed."""
    runs = [r for r in runs if r]
    if not runs:
        return None
    row = dict(runs[0])
    row["speed"] = statistics.median(r["speed"] for r in runs)
    row["ms"] = statistics.median(r["ms"] for r in runs)
    return row


def put_rows(report, rows):
    report.put("", "| program | tokens/s | ms a step | memory planned or "
               "reserved, GiB | on the card, GiB | rows of the most loaded "
               "rank | first step, s |", "|---|---|---|---|---|---|---|")
    for r in rows:
        if r:
            report.put("| %s | %.0f | %.2f | %s | %s | %s | %s |" % (
                r["name"], r["speed"], r["ms"],
                bench.gib(r.get("planned", r.get("reserved"))),
                bench.gib(r["card"]), bench.number(r.get("load"), "%.3f"),
                bench.number(r.get("first_s"), "%.1f")))
    report.put("")


def check_ratio(a, report, one, other, bound, goal=None):
    if not one or not other:
        return
    ratio = one["speed"] / other["speed"]
    text = "%s / %s: %.3f x (at least %.2f%s)" % (
        one["name"], other["name"], ratio, bound,
        ", goal %.2f" % goal if goal else "")
    if a.dry or a.device != "cuda":
        report.put("- " + text)
    else:
        report.check(ratio >= bound, text)


def check_memory(a, report, one, other):
    if not one or not other or a.dry or a.device != "cuda":
        return
    report.check(one["planned"] <= other["reserved"],
                 "memory: %s plans %s GiB, %s reserves %s GiB" % (
                     one["name"], bench.gib(one["planned"]), other["name"],
                     bench.gib(other["reserved"])))


# --- parts ---

def counted(a, report, name, command):
    """A program that checks by itself; what it says into the report."""
    env = dict(os.environ, OMP_NUM_THREADS="1",
               OMPI_MCA_mpi_yield_when_idle="1")
    lines, code = output_of(a, name, command, env)
    counts = [x for x in lines if re.search(r"\d passed, \d+ failed", x)]
    report.check(code == 0, "%s: %s" % (
        name, counts[-1] if counts else "exit code %d" % code))
    shown = lines[-40:] if code == 0 else tail_of(a, name, 40)
    report.put("", "```", *shown, "```")


def part_tiny(a, report):
    for ranks in (2,) if a.dry else (2, 4):
        counted(a, report, "tiny-%d" % ranks, mpirun(a, ranks, 120) +
                [program(a, "tests", "ranks", "rank_device")])
    counted(a, report, "tiny-overlap", mpirun(a, 2, 120) + [
        program(a, "tests", "ranks", "rank_device"), "overlap",
        "moe.num_experts=8", "model.initializer_range=0.2"])


def part_exchange(a, report):
    sizes = [str(x) for x in a.sizes]
    lines, code = output_of(
        a, "exchange-ours", mpirun(a, RANKS, 60) +
        [program(a, "tests", "device", "bench_exchange"), a.device, "thread"] +
        sizes)
    report.check(code == 0 and not any(x.startswith("staged") for x in lines),
                 "all that arrived was right, from and to the GPUs' memory")
    more, code = output_of(
        a, "exchange-stream", mpirun(a, RANKS, 40) +
        [program(a, "tests", "device", "bench_exchange"), a.device, "stream"] +
        sizes)
    report.check(code == 0, "sums were right whose stream waits for them")
    lines += more
    theirs, code = output_of(
        a, "exchange-nccl", torchrun(a, 60) +
        [os.path.join("tests", "bench", "nccl_exchange.py"), a.device] + sizes)
    report.check(code == 0, "PyTorch's collectives ran")
    gpu2_rates.put(report, lines, theirs, not a.dry)


def part_mixtral(a, report):
    z3, fsdp2, ddp = [], [], []
    flags = bench.MODELS[a.mixtral]
    flags = flags[0] + " " + flags[1] + " "
    for _ in range(a.rounds):
        z3.append(attempt(report, ours, a, "ZeRO-3 EP 2", a.mixtral,
                          layout(3, 2)))
        fsdp2.append(attempt(report, peer, a, "FSDP2", flags + FSDP2))
        ddp.append(attempt(report, peer, a, "DDP + EP", flags + DDP_EP))
    z3, fsdp2, ddp = together(z3), together(fsdp2), together(ddp)
    a.kept[3, 2] = z3
    put_rows(report, [z3, fsdp2, ddp])
    check_ratio(a, report, z3, fsdp2, 1.0, 1.35)
    check_ratio(a, report, z3, ddp, 1.2)
    check_memory(a, report, z3, fsdp2)


def layout(stage, ep_size):
    return ["zero_optimization.stage=%d" % stage, "moe.ep_size=%d" % ep_size]


def part_nlg(a, report):
    flags = NLG_PEER
    if a.nlg != NLG:
        flags = " ".join(bench.MODELS[a.nlg])
    # the rate of the peer: constant
    rate = ["scheduler=null", "optimizer.params.lr=0.0003"]
    one = attempt(report, ours, a, "ZeRO-1 EP 2, 13.1 B", a.nlg,
                  layout(1, 2) + rate, 150)
    other = attempt(report, peer, a, "DDP + EP, 13.1 B", flags + " " + DDP_EP,
                    150)
    put_rows(report, [one, other])
    check_ratio(a, report, one, other, 1.0, 2.0)
    check_memory(a, report, one, other)


def part_stages(a, report):
    rows = {}
    for ep_size in (2, 1):
        for stage in (3, 1):
            kept = a.kept.get((stage, ep_size))
            rows[stage, ep_size] = kept or attempt(
                report, ours, a, "ZeRO-%d EP %d" % (stage, ep_size), a.mixtral,
                layout(stage, ep_size))
    put_rows(report, rows.values())
    for ep_size in (2, 1):
        check_ratio(a, report, rows[3, ep_size], rows[1, ep_size], 0.93, 0.97)


def part_checkpoint(a, report):
    counted(a, report, "checkpoint", [
        "timeout", "-k", "5", str(limit(a, 120)), "sh",
        os.path.join("ci", "gpu-test"), "--only", "checkpoint", "--device",
        a.device, a.build])


def part_claims(a, report):
    outside = program(a, "tests", "outside", "liboutside.so")
    layouts = [layout(stage, ep) for ep in (1, 2) for stage in (1, 2, 3)]
    words = []
    for form in ("auto", "collective"):
        for given in layouts:
            words += ["--"] * bool(words) + given + [
                "train.device=" + a.device, "comm.messages=" + form]
    counted(a, report, "messages", mpirun(a, RANKS, 90) + [
        program(a, "tests", "ranks", "rank_outside"), outside, "3"] + words)
    if a.dry:
        return  # the card is not the rank's alone
    for given in layouts:
        counted(a, report, "memory " + " ".join(given), mpirun(a, RANKS, 40) + [
            program(a, "tests", "device", "device_memory"), outside,
            bench.config_path("moe-0.55b")] + given)


def part_overlap(a, report):
    """With balanced routes: a rank that has more rows than the other keeps it
    waiting for its experts, which no exchange hides."""
    a = argparse.Namespace(**dict(vars(a), balanced=True))
    rows, exposed, least = [], {}, {}
    for chunks in (0, 1, 2, 4):
        given = layout(1, 2) + ["moe.overlap_chunks=%d" % chunks]
        row = attempt(report, ours, a, "overlap_chunks %d" % chunks, a.mixtral,
                      given + ["wall_clock_breakdown=true"])
        plain = attempt(report, ours, a, "overlap_chunks %d plain" % chunks,
                        a.mixtral, given)
        if not row or not plain:
            continue
        names = {name for times in row["times"] for name in times
                 if name.startswith("message.") or name == "gaps"}
        parts = {name: statistics.mean(times.get(name, 0.0)
                                       for times in row["times"])
                 for name in sorted(names)}
        # null where the stream waits: then as the GPU's clock has it
        exposed[chunks] = row["exposed"] or parts.get("message.tokens", 0.0)
        least[chunks] = row["exposed_least"] or exposed[chunks]
        rows.append("| %d | %.2f | %.2f | %.2f | %.2f | %.2f | %.2f | %s |" % (
            chunks, plain["ms"], row["ms"], row["under_way"], exposed[chunks],
            least[chunks], exposed[chunks] / max(row["under_way"], 1e-9),
            ", ".join("%s %.2f" % x for x in parts.items())))
    report.put("", "ZeRO-1 EP 2, the same rows for every expert; rank 0. Tokens "
               "under way and exposed: exchange_ms of the metrics; parts: of "
               "the GPU's clock; both with wall_clock_breakdown, which costs a "
               "wait at the end of a step.", "",
               "| overlap_chunks | ms a step | with breakdown | tokens under "
               "way, ms | exposed, ms | of the rank that waits least, ms | "
               "share | parts, ms |", "|---|---|---|---|---|---|---|---|",
               *rows, "")
    if exposed.get(0) and len(exposed) > 1:
        ratio = min(least.values()) / least[0]
        text = ("exposed at best, of the rank that waits least: %.2f of that "
                "without overlap (at most 0.35); of rank 0 %.2f" %
                (ratio, min(exposed.values()) / exposed[0]))
        if a.dry:
            report.put("- " + text)
        else:
            report.check(ratio <= 0.35, text)


PARTS = {"tiny": part_tiny, "exchange": part_exchange, "mixtral": part_mixtral,
         "nlg": part_nlg, "stages": part_stages, "checkpoint": part_checkpoint,
         "claims": part_claims, "overlap": part_overlap}


# --- the whole ---

def parse():
    p = argparse.ArgumentParser(
        prog="gpu2", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dry", action="store_true")
    p.add_argument("--balanced", action="store_true")
    p.add_argument("--only", help="parts, with commas between them")
    p.add_argument("--minutes", type=float, default=7.5)
    p.add_argument("--rounds", type=int, default=1, help="of mixtral")
    p.add_argument("--steps", type=int, help="that count; default 20")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                   help="added in all runs of gpt_moe")
    p.add_argument("--build", default="build")
    p.add_argument("--work", default=os.path.join(ROOT, ".cache", "gpu2"))
    p.add_argument("--python", default=sys.executable, help="has PyTorch")
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    p.add_argument("--out", help="the report; default gpu2.md in "
                   "tests/bench/results, in a trial in the work folder")
    a = p.parse_args()
    trial = a.dry or a.device != "cuda"
    names = a.only.split(",") if a.only else list(PARTS)
    for name in names:
        if name not in PARTS:
            p.error("no part %s" % name)
    a.parts = [name for name in PARTS if name in names]
    a.warmup = 2 if trial else 8
    a.steps = a.steps or (3 if trial else 20)
    a.sizes = SIZES[:2] if a.device != "cuda" else SIZES
    a.mixtral, a.nlg = MIXTRAL, NLG
    if a.device != "cuda":
        a.mixtral = a.nlg = "bench-tiny"
        a.dry = True
    a.kept = {}
    a.build, a.work = os.path.abspath(a.build), os.path.abspath(a.work)
    os.makedirs(a.work, exist_ok=True)
    a.out = a.out or os.path.join(
        a.work if trial else os.path.join(ROOT, "tests", "bench", "results"),
        "gpu2.md")
    return a


NEEDS = {"tiny": ["tests/ranks/rank_device"],
         "exchange": ["tests/device/bench_exchange"],
         "checkpoint": ["apps/gpt_moe", "tests/bench/token_file"],
         "claims": ["tests/device/device_memory", "tests/ranks/rank_outside",
                    "tests/outside/liboutside.so"]}


def missing(a):
    """What the parts need and is not there, or None: a build packed for some of
    them need not be whole."""
    for part in a.parts:
        for path in NEEDS.get(part, ["apps/gpt_moe"]):
            if not os.path.exists(program(a, path)):
                return program(a, path) + ": not built"
    if a.device != "cuda":
        return None
    try:
        text = subprocess.run(["nvidia-smi", "-L"], capture_output=True,
                              text=True).stdout
    except OSError:
        text = ""
    cards = len(re.findall(r"^GPU \d", text, re.M))
    wanted = 1 if a.dry else RANKS
    if cards >= wanted:
        return None
    return "%d GPUs, needed are %d" % (cards, wanted)


def set_environment():
    os.environ.setdefault("OMPI_MCA_rmaps_base_oversubscribe", "1")
    os.environ.setdefault("PRTE_MCA_rmaps_default_mapping_policy",
                          ":oversubscribe")
    threads = max(1, len(os.sched_getaffinity(0)) // RANKS)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def main():
    a = parse()
    lack = missing(a)
    if lack:
        say(lack)
        return 2
    set_environment()
    a.end = time.time() + 60 * a.minutes
    report = Report(a.out)
    report.put("`ci/gpu2 %s`, %s; %s" % (
        " ".join(sys.argv[1:]), datetime.date.today().isoformat(),
        bench.versions(a)), "")
    for name in a.parts:
        began = time.time()
        report.put("## " + name, "")
        print("== %s (%.0f s left)" % (name, left_s(a)), flush=True)
        try:
            PARTS[name](a, report)
        except bench.Failed as error:
            report.check(False, "%s: %s" % (name, str(error).strip()))
        report.put("", "%.0f s" % (time.time() - began), "")
    print("report: %s" % a.out)
    print("%d passed, %d failed" % (report.good, report.bad))
    return 0 if report.bad == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
