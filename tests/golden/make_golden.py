#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reference losses and gradients of small MoE models, in PyTorch's float64.

Writes gpt2_moe.h5 (groups tied, untied), llama_moe.h5 (groups k2, k1) and
beside_moe.h5 (dense maps beside the experts) beside this file. A group holds: attribute `config` (moezero's configuration, JSON),
`tokens` and `labels` [B, S] int32, attributes `loss`, `lm_loss`, `aux_loss`,
`z_loss` (coefficients not applied to the last two) and `min_gap`, and two
groups `weights` and `grads` whose datasets are called as moezero's tensors.
Weights are float32 numbers; gradients are rounded to float32 at the end.

Debian 12: apt-get install python3-torch python3-h5py; /usr/bin/python3 this.
"""
import json
import math
import os
import zlib

import h5py
import numpy as np
import torch
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)

HIDDEN, VOCAB, SEQUENCE, BATCH = 16, 48, 12, 2


def base_config(architecture, **model):
    return {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0}},
        "model": {
            "architecture": architecture,
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 24,
            "max_position_embeddings": SEQUENCE + 4,
            **model,
        },
        "moe": {
            "layers": [1],
            "num_experts": 4,
            "ep_size": 1,
            "k": 2,
            "expert_intermediate_size": 20,
            "drop_tokens": False,
            "norm_topk_prob": True,
            "aux_loss": "load_balancing",
            "aux_loss_scope": "group",
            "aux_loss_coef": 0.01,
            "z_loss_coef": 0.0,
        },
        "data": {"sequence_length": SEQUENCE},
        "train": {"device": "cpu", "seed": 1234},
    }


class Weights:
    """Named float64 leaves, made on first use from the name alone."""

    def __init__(self):
        self.all = {}

    def __call__(self, name, *shape):
        if name not in self.all:
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            values = rng.standard_normal(shape) * 0.3
            if name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight")):
                values = 1 + values
            if name.endswith("moe.gate.weight"):
                values = values * 3  # few near-ties
            values = values.astype(np.float32).astype(np.float64)
            self.all[name] = torch.tensor(values, requires_grad=True)
        return self.all[name]


def linear(w, name, x, n, bias):
    y = x @ w(name + ".weight", n, x.shape[-1]).T
    return y + w(name + ".bias", n) if bias else y


def norm(w, name, x, m):
    if m["norm"] == "rms":
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + m["norm_eps"])
        return x * scale * w(name + ".weight", HIDDEN)
    bias = w(name + ".bias", HIDDEN) if m["bias"] else None
    return F.layer_norm(x, (HIDDEN,), w(name + ".weight", HIDDEN), bias,
                        m["norm_eps"])


def rotate(x, theta):
    """x [B, heads, S, D]: pairs (i, i + D/2), angle p * theta^(-2 i / D)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half) / half)
    angle = torch.arange(x.shape[2])[:, None] * frequency[None, :]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(),
                      a * angle.sin() + b * angle.cos()), -1)


def attention(w, name, x, m):
    heads, kv_heads = m["num_attention_heads"], m["num_key_value_heads"]
    width = HIDDEN // heads
    qkv = linear(w, name + ".qkv", x, (heads + 2 * kv_heads) * width, m["bias"])
    q, k, v = (
        part.reshape(*x.shape[:2], -1, width).transpose(1, 2)
        for part in qkv.split((heads * width, kv_heads * width,
                               kv_heads * width), -1))
    if m["position_embedding"] == "rope":
        q, k = rotate(q, m["rope_theta"]), rotate(k, m["rope_theta"])
    k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(width)
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    out = scores.masked_fill(later, -math.inf).softmax(-1) @ v
    return linear(w, name + ".proj", out.transpose(1, 2).reshape(x.shape),
                  HIDDEN, m["bias"])


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) *
                                     (x + 0.044715 * x ** 3)))


def ffn(w, name, x, width, m):
    up = linear(w, name + ".up", x, width, m["bias"])
    if m["hidden_act"] == "swiglu":
        act = F.silu(linear(w, name + ".gate", x, width, m["bias"])) * up
    else:
        act = gelu(up)
    return linear(w, name + ".down", act, HIDDEN, m["bias"])


def moe(w, name, x, m, c, report):
    E, k = c["num_experts"], c["k"]
    rows = x.reshape(-1, HIDDEN)
    logits = rows @ w(name + ".gate.weight", E, HIDDEN).T
    probs = logits.softmax(-1)
    order = logits.sort(-1, descending=True).values
    report["min_gap"] = (order[:, k - 1] - order[:, k]).min().item()
    top, expert = probs.topk(k, -1)
    if k > 1 and c["norm_topk_prob"]:
        top = top / top.sum(-1, keepdim=True)
    y = torch.zeros_like(rows)
    for e in range(E):
        weight = (top * (expert == e)).sum(-1, keepdim=True)
        out = ffn(w, f"{name}.experts.{e}", rows,
                  c["expert_intermediate_size"], m)
        y = y + weight * out
    share = torch.bincount(expert.flatten(), minlength=E) / expert.numel()
    report["aux_loss"] = E * (share * probs.mean(0)).sum()
    report["z_loss"] = (logits.logsumexp(-1) ** 2).mean()
    return y.reshape(x.shape)


def beside(w, name, x, y, m, c):
    """The experts' output y mixed with that of a dense map of x."""
    if c.get("use_residual"):
        mlp = ffn(w, name + ".residual", x, c["expert_intermediate_size"], m)
        mix = linear(w, name + ".coefficient", x, 2, True).softmax(-1)
        return mix[..., :1] * y + mix[..., 1:] * mlp
    num, width = c.get("num_shared_experts", 0), c.get(
        "shared_expert_intermediate_size", c["expert_intermediate_size"])
    if num == 0:
        return y
    # num experts one by one: each has its part of the tensors, and of a bias
    # of the output that only their sum has
    shared = 0
    for i in range(num):
        def part(tensor, *shape):
            full = list(shape)
            axis = 1 if tensor.endswith("down.weight") else 0
            if tensor.endswith("down.bias"):
                return w(tensor, *shape) / num
            full[axis] *= num
            return w(tensor, *full).narrow(axis, i * width, width)
        shared = shared + ffn(part, name + ".shared", x, width, m)
    if c.get("shared_expert_gate"):
        shared = torch.sigmoid(x @ w(name + ".shared_gate.weight", 1,
                                     HIDDEN).T) * shared
    return y + shared


def model(w, config, tokens, labels):
    m, c, report = config["model"], config["moe"], {}
    wte = w("wte.weight", VOCAB, HIDDEN)
    x = wte[tokens]
    if m["position_embedding"] == "learned":
        positions = m["max_position_embeddings"]
        x = x + w("wpe.weight", positions, HIDDEN)[:SEQUENCE]
    for l in range(m["num_hidden_layers"]):
        x = x + attention(w, f"h.{l}.attn", norm(w, f"h.{l}.ln_1", x, m), m)
        h = norm(w, f"h.{l}.ln_2", x, m)
        if l in c["layers"]:
            name = f"h.{l}.moe"
            x = x + beside(w, name, h, moe(w, name, h, m, c, report), m, c)
        else:
            x = x + ffn(w, f"h.{l}.mlp", h, m["intermediate_size"], m)
    head = wte if m["tie_word_embeddings"] else w("lm_head.weight", VOCAB,
                                                  HIDDEN)
    logits = norm(w, "ln_f", x, m) @ head.T
    report["lm_loss"] = F.cross_entropy(logits.reshape(-1, VOCAB),
                                        labels.flatten(), ignore_index=-1)
    report["loss"] = (report["lm_loss"] +
                      c["aux_loss_coef"] * report["aux_loss"] +
                      c["z_loss_coef"] * report["z_loss"])
    return report


def write(file, name, config):
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, VOCAB, (BATCH, SEQUENCE + 1)).astype(np.int32)
    labels = tokens[:, 1:].copy()
    labels[0, 3] = labels[1, -1] = -1
    tokens = tokens[:, :-1].copy()
    w = Weights()
    report = model(w, config, torch.tensor(tokens).long(),
                   torch.tensor(labels).long())
    report["loss"].backward()
    assert report["min_gap"] > 1e-3, (name, report["min_gap"])

    group = file.create_group(name)
    group.attrs["config"] = np.bytes_(json.dumps(config))
    group["tokens"], group["labels"] = tokens, labels
    for key, value in report.items():
        group.attrs[key] = float(value)
    for tensor, value in w.all.items():
        group["weights/" + tensor] = value.detach().numpy().astype(np.float32)
        group["grads/" + tensor] = value.grad.numpy().astype(np.float32)
    print(f"{name}: {len(w.all)} tensors, loss {float(report['loss']):.9f}, "
          f"gap {report['min_gap']:.4f}")


def main():
    folder = os.path.dirname(os.path.abspath(__file__))
    gpt2 = dict(norm="layer", norm_eps=1e-5, hidden_act="gelu", bias=True,
                position_embedding="learned", num_key_value_heads=4)
    llama = dict(norm="rms", norm_eps=1e-6, hidden_act="swiglu", bias=False,
                 position_embedding="rope", rope_theta=10000.0,
                 num_key_value_heads=2)
    with h5py.File(os.path.join(folder, "gpt2_moe.h5"), "w",
                   libver="latest") as file:
        for tied in (True, False):
            config = base_config("gpt2", tie_word_embeddings=tied, **gpt2)
            write(file, "tied" if tied else "untied", config)
    with h5py.File(os.path.join(folder, "llama_moe.h5"), "w",
                   libver="latest") as file:
        for k in (2, 1):
            config = base_config("llama", tie_word_embeddings=False, **llama)
            config["moe"].update(k=k, z_loss_coef=0.001)
            write(file, f"k{k}", config)
    with h5py.File(os.path.join(folder, "beside_moe.h5"), "w",
                   libver="latest") as file:
        for name, architecture, base, keys in (
                ("residual", "gpt2", gpt2, dict(use_residual=True, k=1)),
                ("residual_swiglu", "llama", llama, dict(use_residual=True)),
                ("shared", "gpt2", gpt2,
                 dict(num_shared_experts=2,
                      shared_expert_intermediate_size=12)),
                ("shared_gated", "llama", llama,
                 dict(num_shared_experts=1, shared_expert_gate=True))):
            config = base_config(architecture, tie_word_embeddings=False,
                                 **base)
            config["moe"].update(keys)
            write(file, name, config)


if __name__ == "__main__":
    main()
