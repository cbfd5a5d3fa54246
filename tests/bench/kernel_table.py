#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where the time of a step goes on the GPU, from a file of kernel_times.

usage: kernel_table.py FILE STEP_MS [STEPS]

Looks at the last STEPS (default 10) steps of STEP_MS milliseconds before the
last kernel of the file. Prints a markdown table by kernel (template arguments
left out), the time in which nothing ran, and what ran beside something else.
"""
import collections
import re
import subprocess
import sys


def demangled(names):
    """{mangled: readable}; as they are without c++filt."""
    names = list(names)
    try:
        text = subprocess.run(["c++filt", "-p"], input="\n".join(names),
                              capture_output=True, text=True, check=True).stdout
        return dict(zip(names, text.split("\n")))
    except (OSError, subprocess.CalledProcessError):
        return {name: name for name in names}


def short(name):
    """Without template arguments and scopes, at most 60 characters."""
    plain, depth = "", 0
    for char in name.replace("(anonymous namespace)::", ""):
        depth += char == "<"
        if depth == 0:
            plain += char
        depth -= char == ">"
    plain = re.sub(r"^(void|int) ", "", plain).split("(")[0]
    return plain.split("::")[-1][:60] or name[:60]


def read(path):
    """[(start, end, name)] by start, in ns."""
    rows = []
    with open(path) as f:
        for line in f:
            start, end, _, name = line.rstrip("\n").split(" ", 3)
            rows.append((int(start), int(end), name))
    return sorted(rows)


def union_ns(rows, begin, end):
    """Nanoseconds of [begin, end) in which at least one row ran, and the
    number of pauses between them."""
    busy, at, pauses = 0, begin, 0
    for start, stop, _ in rows:
        if start > at:
            pauses += 1
        start, stop = max(start, at), min(stop, end)
        if stop > start:
            busy += stop - start
            at = stop
    return busy, pauses


def table(path, step_ms, steps=10, most=25):
    rows = read(path)
    end = max(stop for _, stop, _ in rows)
    length = int(step_ms * 1e6 * steps)
    rows = [r for r in rows if r[0] >= end - length]
    names = demangled({name for _, _, name in rows})
    time, calls = collections.Counter(), collections.Counter()
    for start, stop, name in rows:
        key = short(names[name])
        time[key] += stop - start
        calls[key] += 1
    busy, pauses = union_ns(rows, end - length, end)

    def line(name, count, ns):
        return "| %s | %s | %.3f | %.1f%% |" % (
            name, count, ns * 1e-6 / steps, 100 * ns / length)

    out = ["| kernel | calls a step | ms a step | share |", "|---|---|---|---|"]
    shown = time.most_common(most)
    out += [line(name, "%.1f" % (calls[name] / steps), ns)
            for name, ns in shown]
    rest = sum(time.values()) - sum(ns for _, ns in shown)
    if rest > 0:
        out.append(line("the others", "%.1f" % (
            (len(rows) - sum(calls[name] for name, _ in shown)) / steps), rest))
    out.append(line("nothing runs", "%.1f pauses" % (pauses / steps),
                    length - busy))
    out.append(line("beside another", "", sum(time.values()) - busy))
    return out


def main():
    if len(sys.argv) not in (3, 4):
        print(__doc__, file=sys.stderr)
        return 2
    steps = int(sys.argv[3]) if len(sys.argv) == 4 else 10
    print("\n".join(table(sys.argv[1], float(sys.argv[2]), steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
