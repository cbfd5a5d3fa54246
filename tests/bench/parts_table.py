#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where the time of a step goes, from a run with wall_clock_breakdown.

usage: parts_table.py RUN [--skip N] [--mm TFLOPS] [--copy TBS]

RUN is the run's folder (config.json, metrics.jsonl); the first N steps (default
10) do not count. Prints a markdown table of means over the others: rows add up
to the step. --mm: TFLOP/s of a large product on the card, --copy: TB/s read and
written of a large copy; without them rates are printed, but no shares of them.
Right for one rank (T tokens a step); rows R that experts work on are counted.

Operations (H width, L blocks, F and V inner width and vocabulary, S sequence; a
map of n x k costs 2 n k a token and product, backward is two products):
  products       3 * 2 * T * (qkv + projection of L blocks, dense FFNs, also
                 those beside experts)
  experts        3 * 2 * R * FFN of an expert
  cross-entropy  3 * 2 * T * V * H; its kernel is timed with its products
  attention      2 * 2 * T * S * H / 2 a block forward, 2.5 times that backward,
                 against what cuDNN reaches on an H200 (CUDNN below)

Bytes (e of an activation: 2 in bf16; P parameters; each operation reads what it
is given and writes its results once; numbers a token or an expert do not count):
  norm           forward x, y -> sum, h; backward sum, dh, d -> d; the first
                 norm only x -> h, the last has no d: (16 L + 5) e T H
  router and permutation, a MoE layer
                 gate x; permute x -> rows; combine rows -> y; backward: dy, rows
                 -> d rows; d rows -> dx; gate x, dx -> dx: e H (8 T + 5 R), and
                 probabilities 3 * 4 T E. Copies between the two orders of rows
                 (regroup) are timed here; one rank needs none: no bytes. Mix
                 with a map beside the experts: e H T times 6 (a sum), 11 (by a
                 sigmoid) or 13 (by a softmax)
  activations    GELU again in backward u -> a: 2 e R F; SwiGLU twice gate, up
                 -> a, its gradient 3 -> 2: 11 e R F; R here T in a dense FFN
  embedding      row -> x; dx -> fp32 gradient of the rows (tied: read and
                 written where a token stands, at most V rows; else V written)
  optimizer      norm 4 P, AdamW 28 P (four read, three written), a working copy
                 of 2 P in bf16
"""
import argparse
import json
import os
import sys

PRODUCTS = ("linear", "linear_dgrad", "linear_wgrad")
LINES = {  # by operation; products by step
    "attention": ("attention", "attention_grad"),
    "norm": ("add_norm", "add_norm_grad"),
    "router and permutation": (
        "gate", "gate_grad", "permute", "permute_grad", "combine",
        "combine_grad", "regroup", "mix", "mix_grad", "mix_dgrad"),
    "activations": ("gelu", "swiglu", "swiglu_grad", "rope", "dropout"),
    "embedding": ("embedding", "embedding_grad"),
    "cross-entropy": ("xent",),
}
ORDER = ["products", "experts", "attention", "norm", "router and permutation",
         "activations", "embedding", "cross-entropy", "optimizer",
         "gradients and weights that travel", "exchange exposed",
         "launch gaps", "other", "between steps"]
# TFLOP/s forward and backward, causal, by head width (S 1024, S 2048)
CUDNN = {64: (312, 231), 128: (520, 414)}


def line_of(part):
    """The line that a part belongs to."""
    step, _, op = part.partition(".")
    if part == "gaps":
        return "launch gaps"
    if step == "message":
        return "exchange exposed"
    if step == "update":
        return "optimizer"
    if step == "bulk":
        return "gradients and weights that travel"
    if op in PRODUCTS:
        return "experts" if step.startswith("experts") else "products"
    for line, ops in LINES.items():
        if op in ops:
            return line
    return "other"


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def read(run, skip):
    """The resolved configuration, and the lines of the metrics that count."""
    with open(os.path.join(run, "config.json")) as f:
        config = json.load(f)
    path = os.path.join(run, config["monitor"]["jsonl"])
    with open(path) as f:
        lines = [x for x in map(json.loads, f) if "step_ms" in x][skip:]
    if not lines:
        raise ValueError("%s: no step after the first %d" % (path, skip))
    return config, lines


def parts_of(lines):
    """Mean milliseconds by part; what is the host's alone is left out."""
    names = {}
    for x in lines:
        for name, ms in x["time_ms"].items():
            if "." in name or name == "gaps":
                names[name] = names.get(name, 0) + ms / len(lines)
    if not names:
        raise ValueError("no parts: was wall_clock_breakdown on?")
    return names


class Model:
    """Sizes, from the resolved configuration and the routed rows."""

    def __init__(self, config, lines):
        m, moe = config["model"], config.get("moe", {})
        self.H, self.L = m["hidden_size"], m["num_hidden_layers"]
        self.V, self.F = m["vocab_size"], m["intermediate_size"]
        self.D = self.H // m["num_attention_heads"]
        self.qkv = self.H + 2 * m["num_key_value_heads"] * self.D
        self.S = config["data"]["sequence_length"]
        self.gelu = m["hidden_act"] == "gelu"
        self.maps = 2 if self.gelu else 3
        self.tied = m["tie_word_embeddings"]
        self.learned = m["position_embedding"] == "learned"
        self.moes = len(moe.get("layers", []))
        self.E = sum(moe["num_experts"]) if self.moes else 0  # of all layers
        self.Fe = moe.get("expert_intermediate_size", 0)
        self.Fb, self.mix = 0, 0  # beside the experts: width, rows of the mix
        if self.moes and moe.get("use_residual"):
            self.Fb, self.mix = self.Fe, 13
        elif self.moes and moe.get("num_shared_experts"):
            self.Fb = (moe["num_shared_experts"] *
                       moe["shared_expert_intermediate_size"])
            self.mix = 11 if moe["shared_expert_gate"] else 6
        self.e = 2 if config["bf16"]["enabled"] else 4
        self.T = mean(x["tokens"] for x in lines)
        self.R = mean(sum(map(sum, x["expert_kept"])) for x in lines)
        self.P = lines[0]["bytes"]["gradients"] / 4

    def operations(self):
        dense = (self.L * (self.qkv + self.H) * self.H +
                 self.maps * self.H * ((self.L - self.moes) * self.F +
                                       self.moes * self.Fb))
        return {"products": 6 * self.T * dense,
                "experts": 6 * self.R * self.maps * self.H * self.Fe,
                "attention": 3.5 * self.attention(),
                "cross-entropy": 6 * self.T * self.V * self.H}

    def attention(self):
        """Forward, all blocks."""
        return self.L * 2 * self.T * self.S * self.H

    def bytes(self):
        e, T, R, H = self.e, self.T, self.R, self.H
        inner = (T * ((self.L - self.moes) * self.F + self.moes * self.Fb) +
                 R * self.Fe)
        rows = min(T, self.V)
        return {
            "norm": (16 * self.L + 5) * e * T * H,
            "router and permutation":
                e * H * ((8 + self.mix) * self.moes * T + 5 * R) +
                12 * T * self.E,
            "activations": (2 if self.gelu else 11) * e * inner,
            "embedding":
                3 * e * T * H + (8 * rows if self.tied else 4 * self.V) * H +
                (4 * self.S * H if self.learned else 0),
            "optimizer": (32 + (2 if e == 2 else 0)) * self.P}

    def ceiling_ms(self, mm, copy):
        """What each line would take at its ceiling."""
        ops, out = self.operations(), {}
        if mm:
            for line in ("products", "experts", "cross-entropy"):
                out[line] = ops[line] / mm * 1e-9
        if self.D in CUDNN and mm:
            forward, backward = CUDNN[self.D]
            out["attention"] = self.attention() * 1e-9 * (1 / forward +
                                                          2.5 / backward)
        if copy:
            for line, moved in self.bytes().items():
                out[line] = moved / copy * 1e-9
        return out


def rows_of(ms, step, model, mm, copy):
    operations, moved = model.operations(), model.bytes()
    ceiling = model.ceiling_ms(mm, copy)
    for line in ORDER:
        if not ms.get(line):
            continue
        rate = share = "-"
        if line in operations:
            rate = "%.1f TFLOP/s" % (operations[line] / ms[line] * 1e-9)
        elif line in moved:
            rate = "%.2f TB/s" % (moved[line] / ms[line] * 1e-9)
        if line in ceiling:
            share = "%.2f" % (ceiling[line] / ms[line])
        yield "| %s | %.2f | %.1f%% | %s | %s |" % (
            line, ms[line], 100 * ms[line] / step, rate, share)


def table(run, skip, mm=None, copy=None):
    """Rows of the markdown table, the messages and the largest parts."""
    config, lines = read(run, skip)
    parts = parts_of(lines)
    step = mean(x["step_ms"] for x in lines)
    ms = {}
    for name, value in parts.items():
        ms[line_of(name)] = ms.get(line_of(name), 0) + value
    ms["between steps"] = step - sum(parts.values())
    rows = ["| part | ms a step | of the step | rate | of its ceiling |",
            "|---|---|---|---|---|"]
    rows += rows_of(ms, step, Model(config, lines), mm, copy)
    rows += ["| step | %.2f | 100%% | %.0f tokens/s | |" % (
        step, mean(x["tokens"] for x in lines) / step * 1e3), ""]
    largest = sorted(parts.items(), key=lambda x: -x[1])
    return rows + ["By layer step and operation, ms: " + ", ".join(
        "%s %.2f" % x for x in largest if x[1] >= 0.005) + "."]


def shared_table(runs, skip):
    """Of runs {name: folder} on a shared card: what the card waited for."""
    kinds, rows = {}, []
    for name, run in runs.items():
        lines = read(run, skip)[1]
        parts = parts_of(lines)
        for part in parts:
            if part.startswith("message."):
                kinds.setdefault(part, part[len("message."):])
        rows.append((name, mean(x["step_ms"] for x in lines), parts,
                     mean(x["time_ms"]["wait"] for x in lines)))
    head = ["run", "step", "gaps"] + ["exposed: " + k for k in kinds.values()]
    out = ["| %s | host waits |" % " | ".join(head), "|---" * len(head) +
           "|---|"]
    for name, step, parts, wait in rows:
        numbers = [step] + [parts.get(k, 0) for k in ["gaps", *kinds]] + [wait]
        out.append("| %s | %s |" % (name, " | ".join(
            "%.2f" % x for x in numbers)))
    return out + ["", "Milliseconds a step, of rank 0."]


def main():
    p = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("run", metavar="RUN")
    p.add_argument("--skip", type=int, default=10)
    p.add_argument("--mm", type=float)
    p.add_argument("--copy", type=float)
    a = p.parse_args()
    try:
        print("\n".join(table(a.run, a.skip, a.mm, a.copy)))
    except (OSError, ValueError, KeyError) as error:
        sys.exit("parts_table: %s" % error)


if __name__ == "__main__":
    main()
