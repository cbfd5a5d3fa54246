#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loads and validation loss of balances, on the model of ci/quickstart with 8
experts.

usage: balance.py GPT_MOE TRAIN.txt VALID.txt [STEPS [SEEDS [NAME]]]

Trains STEPS (300) steps with each of SEEDS (5) seeds by each balance below, or
those whose name begins with NAME, one rank, and prints a markdown table of
medians over the seeds: the load variance, which is the mean of (count / mean -
1)^2 over experts, layers and the last third of the steps (expert_variance of
the metrics), the largest load over the mean, and the loss on the last text. Run
it in the root of the repository; TRAIN and VALID are those that ci/quickstart
leaves in .cache/quickstart.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile

BALANCES = [("none", ["moe.aux_loss=none"]),
            ("load_balancing 0.01", ["moe.aux_loss_coef=0.01"]),
            ("bias 0.001", ["moe.aux_loss=none", "moe.bias_update_rate=0.001"]),
            ("bias 0.01", ["moe.aux_loss=none", "moe.bias_update_rate=0.01"])]
# (lambda, temperature)
SQUARED = ((0.01, 1), (0.1, 1), (0.2, 1), (0.08, 1), (2, 1), (0.08, 1.2),
           (0.08, 0.8))
BALANCES += [("squared %g, temperature %g" % (x, t),
              ["moe.aux_loss=squared", "moe.aux_loss_coef=%g" % x,
               "moe.temperature=%g" % t])
             for x, t in SQUARED]


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
    late = [x for x in lines
            if "expert_variance" in x and x["step"] > 2 * steps // 3]
    return tuple(statistics.mean(y for x in late for y in x[key])
                 for key in ("expert_variance", "expert_largest"))


def main(program, train_text, valid_text, steps=300, seeds=5, name_start=""):
    texts, steps, seeds = (train_text, valid_text), int(steps), int(seeds)
    print("| Balance | Load variance | Largest / mean | Validation loss |")
    print("|---|---|---|---|", flush=True)
    for name, balance in BALANCES:
        if not name.startswith(name_start):
            continue
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
    if not 4 <= len(sys.argv) <= 7:
        sys.exit(__doc__)
    main(*sys.argv[1:])
