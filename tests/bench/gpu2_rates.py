# SPDX-License-Identifier: Apache-2.0
"""The table of ci/gpu2's part exchange: GB/s of bench_exchange beside those of
nccl_exchange.py, and the bounds."""
import re

import gpu_bench as bench

BOUNDS = {"exchange": 1.0, "gather": 1.0, "reduce": 1.0}
FROM_MIB = 16
PIECE_MIB = 32  # comm.piece_bytes
LINE = re.compile(r"(\w+) (\w+) (\w+) (\d+) MiB: ([\d.]+) ms, ([\d.]+) GB/s")


def rates(lines):
    """{(operation, whole or pieces or the way, MiB): {form: GB/s}}"""
    found = {}
    for match in filter(None, map(LINE.match, lines)):
        operation, form, parts, mib, _, rate = match.groups()
        found[operation, form, parts, int(mib)] = float(rate)
    return found


def over(ours, theirs):
    return ours / theirs if ours and theirs else None


def put(report, lines, nccl_lines, with_checks):
    """Like with like: what is queued with what is queued, what a host waits for
    with what a host waits for. An exchange, which is not queued, with NCCL's
    stream. Both take the output of their program, a list of lines."""
    mine, its = rates(lines), rates(nccl_lines)
    report.put("", "GB/s of the larger buffer of a rank, collective and "
               "pairwise. Until a waiting host knows that all is done, one "
               "operation at a time; units also queued, 50 one behind another "
               "as the engine posts them. NCCL by the device's clock among "
               "calls queued in a stream, and until a waiting host knows. "
               "reduce_stream: with comm.wait stream. "
               "Ratios: the better of ours, queued to NCCL's stream, host to "
               "host, and ours of a waiting host to NCCL's stream.", "",
               "| operation | MiB | host | queued | NCCL, host | NCCL, stream "
               "| queued / stream | host / host | host / stream |",
               "|---|---|---|---|---|---|---|---|---|")
    checks = []
    for operation, parts, mib in sorted({(o, p, m) for o, _, p, m in mine
                                         if not p.endswith("_queued")}):
        host, queued = [[mine.get((operation, form, parts + way, mib))
                         for form in ("collective", "pairwise")]
                        for way in ("", "_queued")]
        name = operation.split("_")[0]
        nccl_host, nccl_stream = [its.get((name, "nccl", way, mib))
                                  for way in ("host", "stream")]
        best = [max(x or 0.0 for x in pair) for pair in (host, queued)]
        ratios = [over(best[1], nccl_stream), over(best[0], nccl_host),
                  over(best[0], nccl_stream)]
        report.put("| %s, %s | %d | %s |" % (
            operation, parts, mib, " | ".join(
                [", ".join(bench.number(x, "%.0f") for x in pair)
                 for pair in (host, queued)] +
                [bench.number(x, "%.0f") for x in (nccl_host, nccl_stream)] +
                [bench.number(x, "%.2f") for x in ratios])))
        in_engine = operation == "exchange" or (
            parts == ("whole" if mib <= PIECE_MIB else "pieces") and
            operation in BOUNDS)
        if mib >= FROM_MIB and nccl_stream and in_engine:
            checks.append((operation, mib, ratios))
    report.put("")
    for operation, mib, ratios in checks if with_checks else []:
        bound = BOUNDS[operation]
        names = (["waited for, to NCCL's stream"] if operation == "exchange"
                 else ["queued, to NCCL's stream", "waited for, to NCCL's"])
        pairs = zip(names, ratios[2:] if operation == "exchange" else ratios)
        for name, ratio in pairs:
            report.check(ratio >= bound, "%s of %d MiB, %s: %.2f x (at least "
                         "%.2f)" % (operation, mib, name, ratio, bound))
