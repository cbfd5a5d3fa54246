#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Random tokens in two files that gpt_moe and a sequential reader see alike.

usage: tokens_for.py OURS.bin PEER.bin --sequence S --sequences N
                     [--vocab V] [--seed D]

gpt_moe takes the N windows of S tokens of OURS.bin in the order of its sampler
(src/data/sampler.h) with data.seed D; PEER.bin holds the windows in that order,
for a program that reads from the start, as peer_torch_moe.py --data does. The
last label of a window is the first token of the next one in the file, so all
windows begin with the same token (V - 1), and labels agree too. The order is of
the first epoch: steps * batch is at most N. Both are llm.c token files: 256
int32 words of header, then 16-bit ids below V (default 50257). Needs numpy.
"""
import argparse

import numpy as np

MAGIC, VERSION, HEADER_WORDS = 20240520, 1, 256
PURPOSE_SAMPLER = 5
ROUNDS = 6
WORD = 0xFFFFFFFF


def philox(seed, block, x, where):
    """Philox 4x32-10, as in moezero/random.h: four words of a block."""
    k0, k1 = seed & WORD, seed >> 32 & WORD
    c = [block & WORD, block >> 32, x, where]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k0, p1 & WORD, p0 >> 32 ^ c[3] ^ k1, p0 & WORD]
        k0, k1 = k0 + 0x9E3779B9 & WORD, k1 + 0xBB67AE85 & WORD
    return c


def sample_order(seed, n):
    """The permutation of [0, n) of epoch 0: a Feistel network, walked."""
    half = 0
    while half < 31 and 1 << 2 * half < n:
        half += 1
    mask = (1 << half) - 1

    def permute(value):
        left, right = value >> half, value & mask
        for r in range(ROUNDS):
            word = philox(seed, right // 4, 0, PURPOSE_SAMPLER << 16 | r)
            left, right = right, left ^ word[right % 4] & mask
        return left << half | right

    order = np.empty(n, dtype=np.int64)
    for g in range(n):
        value = permute(g)
        while value >= n:
            value = permute(value)
        order[g] = value
    return order


def write(path, windows, last):
    """The windows in a row, and the token after them."""
    tokens = np.append(windows.reshape(-1), np.uint16(last))
    header = np.zeros(HEADER_WORDS, dtype=np.int32)
    header[:3] = MAGIC, VERSION, tokens.size
    with open(path, "wb") as f:
        f.write(header.tobytes())
        f.write(tokens.tobytes())


def make(ours, peer, sequence, sequences, vocab=50257, seed=1234):
    rng = np.random.default_rng(seed)
    windows = rng.integers(0, vocab, (sequences, sequence)).astype(np.uint16)
    windows[:, 0] = vocab - 1
    write(ours, windows, vocab - 1)
    write(peer, windows[sample_order(seed, sequences)], vocab - 1)


def main():
    p = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("ours")
    p.add_argument("peer")
    p.add_argument("--sequence", type=int, required=True)
    p.add_argument("--sequences", type=int, required=True)
    p.add_argument("--vocab", type=int, default=50257)
    p.add_argument("--seed", type=int, default=1234)
    a = p.parse_args()
    if not (2 <= a.vocab <= 65536 and a.sequence >= 1 and a.sequences >= 1):
        p.error("need 2 <= vocab <= 65536, sequence >= 1, sequences >= 1")
    make(a.ours, a.peer, a.sequence, a.sequences, a.vocab, a.seed)


if __name__ == "__main__":
    main()
