#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What bench_exchange measures, by PyTorch's collectives, in bf16.

  torchrun --standalone --nproc-per-node 2 nccl_exchange.py [cpu|cuda] MIB...

A size is that of the larger buffer of a rank: what all_to_all_single and
reduce_scatter_tensor send, what all_gather_into_tensor receives. Medians of 50
after 20, in two ways: `stream`, the device's time of a call among calls that
are queued one behind the other; `host`, from the call until the host knows
that it is done, as a program sees it that waits. On CPUs only the second.
"""
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

WARM, TIMED, MIB = 20, 50, 1 << 20


def operations(bytes_, size, device):
    whole = torch.ones(bytes_ // 2, dtype=torch.bfloat16, device=device)
    other = torch.empty_like(whole)
    shard = torch.ones(whole.numel() // size, dtype=whole.dtype, device=device)
    return {
        "exchange": lambda: dist.all_to_all_single(other, whole),
        "gather": lambda: dist.all_gather_into_tensor(other, shard),
        "reduce": lambda: dist.reduce_scatter_tensor(shard, whole)}


def in_stream(run):
    marks = [torch.cuda.Event(enable_timing=True)
             for _ in range(TIMED + 1)]
    for _ in range(WARM):
        run()
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]


def by_host(run, cuda):
    times = []
    for _ in range(WARM + TIMED):
        begin = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return times[WARM:]


def main(args):
    cuda = args[0] != "cpu"
    sizes = [int(x) * MIB for x in args if x.isdigit()]
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    for name in ("exchange", "gather", "reduce"):
        for bytes_ in sizes:
            run = operations(bytes_, dist.get_world_size(), device)[name]
            ways = [("host", by_host(run, cuda))]
            if cuda:
                ways.insert(0, ("stream", in_stream(run)))
            for way, times in ways:
                ms = statistics.median(times)
                if dist.get_rank() == 0:
                    print("%s nccl %s %d MiB: %.4f ms, %.1f GB/s" % (
                        name, way, bytes_ // MIB, ms, bytes_ / ms * 1e-6),
                        flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
