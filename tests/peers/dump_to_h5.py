#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The weights that peer_torch_moe.py --dump-init wrote, as a one-file model.

usage: dump_to_h5.py DIR MODEL.h5 [--expert-layout nk|kn]

DIR holds manifest.rank<R>.json and raw fp32 files; what rank R lists of an
expert tensor are the experts after those of the ranks before it. MODEL.h5 is
read by gpt_moe --init-from. --expert-layout: as the peer was told (default nk,
[out, in] as everywhere in MODEL.h5).

Where the two models differ in how they cut a tensor:
  peer                              moezero
  mlp.fc [2 F, H] of SwiGLU         mlp.gate [F, H], then mlp.up [F, H]
  experts.w1 [E, F or 2 F, H]       experts.<e>.up (and gate), a tensor an expert
  attn.qkv                          the same: query heads, key heads, value heads
Needs numpy and h5py.
"""
import argparse
import glob
import json
import os
import re

import h5py
import numpy as np

TOP = {"wte": "wte.weight", "wpe": "wpe.weight", "head": "lm_head.weight",
       "lnf.weight": "ln_f.weight", "lnf.bias": "ln_f.bias"}
BLOCK = {"ln1": "ln_1", "ln2": "ln_2", "attn.qkv": "attn.qkv",
         "attn.proj": "attn.proj", "mlp.proj": "mlp.down"}
EXPERT = {"w1": "weight", "w2": "weight", "b1": "bias", "b2": "bias"}


def read_dump(folder):
    """{name: [array of rank 0, of rank 1, ...]} by the manifests."""
    found = {}
    lists = glob.glob(os.path.join(folder, "manifest.rank*.json"))
    if not lists:
        raise SystemExit("%s: no manifest.rank<R>.json in it" % folder)
    for path in sorted(lists, key=lambda p: int(re.findall(r"\d+", p)[-1])):
        with open(path) as f:
            for entry in json.load(f):
                values = np.memmap(os.path.join(folder, entry["file"]),
                                   dtype=np.float32, mode="r",
                                   shape=tuple(entry["shape"]))
                found.setdefault(entry["name"], []).append(values)
    return found


def split_first(prefix, suffix, values, inner):
    """The first map of a feed-forward: with SwiGLU the gate lies above."""
    if values.shape[0] == inner:
        return [("%s.up.%s" % (prefix, suffix), values)]
    if values.shape[0] != 2 * inner:
        raise SystemExit("%s: %d rows for an inner width of %d" %
                         (prefix, values.shape[0], inner))
    return [("%s.gate.%s" % (prefix, suffix), values[:inner]),
            ("%s.up.%s" % (prefix, suffix), values[inner:])]


def map_experts(dump, block, part, layout, ranks):
    """Tensors of one stacked tensor of block "blocks.<l>"."""
    down = dump["%s.mlp.experts.w2" % block][0].shape
    inner = down[2] if layout == "nk" else down[1]
    first = 0
    for stacked in ranks:
        for e, values in enumerate(stacked):
            prefix = "h.%s.moe.experts.%d" % (block.split(".")[1], first + e)
            if layout == "kn" and part.startswith("w"):
                values = values.T
            if part.endswith("1"):
                yield from split_first(prefix, EXPERT[part], values, inner)
            else:
                yield "%s.down.%s" % (prefix, EXPERT[part]), values
        first += len(stacked)


def map_tensor(dump, name, ranks, layout):
    """(moezero's name, array) pairs of one tensor of the peer."""
    if name in TOP:
        return [(TOP[name], ranks[0])]
    block, rest = re.fullmatch(r"(blocks\.\d+)\.(.*)", name).groups()
    here = "h." + block.split(".")[1]
    if rest == "mlp.router":
        return [(here + ".moe.gate.weight", ranks[0])]
    if rest.startswith("mlp.experts."):
        return map_experts(dump, block, rest[len("mlp.experts."):], layout,
                           ranks)
    module, suffix = rest.rsplit(".", 1)
    if module == "mlp.fc":
        inner = dump["%s.mlp.proj.weight" % block][0].shape[1]
        return split_first(here + ".mlp", suffix, ranks[0], inner)
    return [("%s.%s.%s" % (here, BLOCK[module], suffix), ranks[0])]


def convert(folder, path, layout="nk"):
    """Writes the file; returns the number of tensors and of elements."""
    dump = read_dump(folder)
    tensors = elements = 0
    with h5py.File(path, "w") as out:
        out.attrs["format"] = np.bytes_("moezero model")
        for name, ranks in dump.items():
            for ours, values in map_tensor(dump, name, ranks, layout):
                out.create_dataset(ours, data=np.ascontiguousarray(values))
                tensors += 1
                elements += values.size
    return tensors, elements


def main():
    p = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("dir")
    p.add_argument("model")
    p.add_argument("--expert-layout", choices=["nk", "kn"], default="nk")
    a = p.parse_args()
    print("%s: %d tensors, %d elements" %
          ((a.model,) + convert(a.dir, a.model, a.expert_layout)))


if __name__ == "__main__":
    main()
