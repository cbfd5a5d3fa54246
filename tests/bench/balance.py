#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loads and validation loss of balances, on the model of ci/quickstart with 8
experts.

usage: balance.py GPT_MOE TRAIN.txt VALID.txt [STEPS [SEEDS]]

Trains STEPS (300) steps with each of SEEDS (5) seeds by each balance below, one
rank, and prints a markdown table of medians over the seeds: the load variance,
which is the mean of (count / mean - 1)^2 over experts, layers and the last third
of the steps, the largest load over the mean, and the loss on the last text. Run
it in the root of the repository; TRAIN and VALID are those that ci/quickstart
leaves in .cache/quickstart.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile

LAMBDAS = (0.01, 0.08, 0.1, 0.2)
BALANCES = [("none", ["moe.aux_loss=none"]),
            ("load_balancing 0.01", ["moe.aux_loss_coef=0.01"]),
            ("bias 0.001", ["moe.aux_loss=none", "moe.bias_update_rate=0.001"]),
            ("bias 0.01", ["moe.aux_loss=none", "moe.bias_update_rate=0.01"])]
BALANCES += [("squared %g, temperature %g" % (x, t),
              ["moe.aux_loss=squared", "moe.aux_loss_coef=%g" % x,
               "moe.temperature=%g" % t])
             for x in LAMBDAS for t in (1.2, 0.8)]


def train(program, texts, steps, seed, balance, folder):
    """The lines of the run's metrics."""
    given = ["data.train=" + texts[0], "data.valid=" + texts[1],
             "train.steps=%d" % steps, "train.eval_interval=%d" % steps,
             "train.max_minutes=0", "train.seed=%d" % seed,
             "moe.num_experts=8", "checkpoint.save_interval=0"] + balance
    command = ["mpirun", "-n", "1", "--bind-to", "none", program,
               "apps/configs/quickstart.json", "--out", folder]
    for assignment in given:
        command += ["--set", assignment]
    done = subprocess.run(command, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    with open(os.path.join(folder, "metrics.jsonl")) as f:
        return [json.loads(line) for line in f]


def loads(lines, steps):
    """(variance, largest over mean) of the last third of the steps."""
    squares, largest = [], []
    for line in lines:
        if "expert_counts" not in line or line["step"] <= 2 * steps // 3:
            continue
        for counts in line["expert_counts"]:
            mean = sum(counts) / len(counts)
            squares.append(sum((c / mean - 1) ** 2 for c in counts) /
                           len(counts))
            largest.append(max(counts) / mean)
    return statistics.mean(squares), statistics.mean(largest)


def main(program, train_text, valid_text, steps=300, seeds=5):
    texts, steps, seeds = (train_text, valid_text), int(steps), int(seeds)
    print("| Balance | Load variance | Largest / mean | Validation loss |")
    print("|---|---|---|---|", flush=True)
    for name, balance in BALANCES:
        rows = []
        for seed in range(1, seeds + 1):
            with tempfile.TemporaryDirectory() as folder:
                lines = train(program, texts, steps, seed, balance,
                              os.path.join(folder, "run"))
            loss = [x["eval_loss"] for x in lines if "eval_loss" in x][-1]
            rows.append(loads(lines, steps) + (loss,))
        print("| %s | %.4f | %.2f | %.4f |" %
              ((name,) + tuple(statistics.median(x) for x in zip(*rows))),
              flush=True)


if __name__ == "__main__":
    if not 4 <= len(sys.argv) <= 6:
        sys.exit(__doc__)
    main(*sys.argv[1:])
