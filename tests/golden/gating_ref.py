#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The rules of gating (moezero/moe.h) in plain Python, written apart from the C
code. float64, except the capacity, which is rounded to float32 at each step.
Ties go to the lowest index. Reads a case a line as JSON and writes a line of
numbers: the capacity, the balance loss, counts of experts, for each route its
expert (-1: dropped) and weight, and the gradient of the logits for the balance
loss plus sum of d_weight * weight."""
import json, math, struct, sys

def f32(x):
    return struct.unpack('f', struct.pack('f', x))[0]

FP32_EPS = 2.0 ** -23

def softmax(row):
    m = max(row)
    e = [math.exp(v - m) for v in row]
    s = sum(e)
    return [v / s for v in e]

def argmax(row):
    best = 0
    for i, v in enumerate(row):
        if v > row[best]:
            best = i
    return best

def capacity(S, E, cf, k, min_cap):
    """ceil in float32: fp32(S/E) * fp32(cf*k)"""
    c = math.ceil(f32(f32(S / E) * f32(cf * k)))
    return max(c, min_cap)

def mean_cols(m, S, E):
    return [sum(m[s][e] for s in range(S)) / S for e in range(E)]

def top_c(col, C):
    """indices of the C largest values of col; ties: lowest index first"""
    C = min(C, len(col))
    return set(sorted(range(len(col)), key=lambda i: (-col[i], i))[:C])

def finish_slots(mask, S, E):
    """location of every kept route: exclusive running count down the token axis, per expert"""
    loc = [[0] * E for _ in range(S)]
    for e in range(E):
        n = 0
        for s in range(S):
            if mask[s][e]:
                loc[s][e] = n
                n += 1
    return loc

def top1(logits, cf, min_cap, used=None, gumbel=None, drop=True, U=None, group_max=None, tp=1):
    S, E = len(logits), len(logits[0])
    gates = [softmax(r) for r in logits]
    pick = [argmax([a + b for a, b in zip(logits[s], gumbel[s])]) if gumbel else argmax(gates[s]) for s in range(S)]
    m = [[1 if pick[s] == e else 0 for e in range(E)] for s in range(S)]
    if used is not None:
        m = [[m[s][e] * used[s] for e in range(E)] for s in range(S)]
    counts = [sum(m[s][e] for s in range(S)) for e in range(E)]
    C = capacity(S, E, cf, 1, min_cap)
    if not drop:
        C = max([max(counts)] + (group_max or []))
        C = math.ceil(C / tp) * tp
        C = min(C, S)
    me, ce = mean_cols(gates, S, E), mean_cols(m, S, E)
    l_aux = sum(a * b for a, b in zip(me, ce)) * E
    assert S >= min_cap, "No. of tokens must be >= min_capacity"
    kept = [[0] * E for _ in range(S)]
    for e in range(E):
        col = [m[s][e] * (U[s][e] if U else 1) for s in range(S)]
        for s in top_c(col, C):
            kept[s][e] = m[s][e]
    loc = finish_slots(kept, S, E)
    routes = []
    for s in range(S):
        e = pick[s]
        ok = kept[s][e]
        routes.append([(e, loc[s][e], gates[s][e])] if ok else [(-1, 0, 0.0)])
    return dict(C=C, l_aux=l_aux, counts=counts, routes=routes, gates=gates, me=me, ce=ce)

def top2(logits, cf, min_cap, gumbel=None, drop=True, group_max=None, tp=1):
    S, E = len(logits), len(logits[0])
    gates = [softmax(r) for r in logits]
    i1 = [argmax(g) for g in gates]
    second = [[(logits[s][e] + (gumbel[s][e] if gumbel else 0.0)) if e != i1[s] else -math.inf for e in range(E)] for s in range(S)]
    i2 = [argmax(r) for r in second]
    m1 = [[int(i1[s] == e) for e in range(E)] for s in range(S)]
    m2 = [[int(i2[s] == e) for e in range(E)] for s in range(S)]
    c1 = [sum(m1[s][e] for s in range(S)) for e in range(E)]
    counts = [c1[e] + sum(m2[s][e] for s in range(S)) for e in range(E)]
    me, ce = mean_cols(gates, S, E), mean_cols(m1, S, E)
    l_aux = sum(a * b for a, b in zip(me, ce)) / E * E * E
    l1, l2 = finish_slots(m1, S, E), finish_slots(m2, S, E)
    if drop:
        C = capacity(S, E, cf, 2, min_cap)
    else:
        C = max([max(counts)] + (group_max or []))
        C = math.ceil(C / tp) * tp
    routes = []
    for s in range(S):
        a, b = i1[s], i2[s]
        la, lb = l1[s][a], l2[s][b] + c1[b]
        ka, kb = la < C, lb < C
        ga, gb = (gates[s][a] if ka else 0.0), (gates[s][b] if kb else 0.0)
        den = max(ga + gb, FP32_EPS)
        routes.append([(a, la, ga / den) if ka else (-1, 0, 0.0), (b, lb, gb / den) if kb else (-1, 0, 0.0)])
    return dict(C=C, l_aux=l_aux, counts=counts, routes=routes, gates=gates, me=me, ce=ce)

def topk(logits, k, cf, min_cap, drop=True, policy='probs', group_max=None, tp=1):
    S, E = len(logits), len(logits[0])
    gates = [softmax(r) for r in logits]
    idx = [sorted(range(E), key=lambda e: (-gates[s][e], e))[:k] for s in range(S)]
    m = [[int(e in idx[s]) for e in range(E)] for s in range(S)]
    counts = [sum(m[s][e] for s in range(S)) for e in range(E)]
    me, ce = mean_cols(gates, S, E), mean_cols(m, S, E)
    l_aux = sum(a * b for a, b in zip(me, ce)) / E * E * E / k
    if drop:
        C = capacity(S, E, cf, k, min_cap)
        if policy == 'probs':
            for e in range(E):
                keep = top_c([gates[s][e] * m[s][e] for s in range(S)], C)
                for s in range(S):
                    m[s][e] = m[s][e] if s in keep else 0
            loc = finish_slots(m, S, E)
        elif policy == 'position':
            loc = finish_slots(m, S, E)
            m = [[m[s][e] if loc[s][e] < C else 0 for e in range(E)] for s in range(S)]
        else:
            raise ValueError('Invalid drop_policy')
    else:
        C = max([max(counts)] + (group_max or []))
        C = math.ceil(C / tp) * tp
        loc = finish_slots(m, S, E)
    routes = []
    for s in range(S):
        den = max(sum(gates[s][e] * m[s][e] for e in range(E)), FP32_EPS)
        routes.append([(e, loc[s][e], gates[s][e] / den) if m[s][e] else (-1, 0, 0.0) for e in idx[s]])
    return dict(C=C, l_aux=l_aux, counts=counts, routes=routes, gates=gates, me=me, ce=ce)

# ---------------------------------------------------------------- gradients (for golden backward tests)
def softmax_bwd(g, dg):
    d = sum(a * b for a, b in zip(g, dg))
    return [a * (b - d) for a, b in zip(g, dg)]

def laux_grad(gates, ce, scale):
    """d l_aux / d logits where l_aux = scale * sum_e me_e ce_e and ce is a constant"""
    S = len(gates)
    return [softmax_bwd(g, [scale * c / S for c in ce]) for g in gates]

def combine_grad_top1(res, dout):
    """dout[s] = dL/d(weight of the kept route of token s)"""
    S, E = len(res['gates']), len(res['gates'][0])
    out = []
    for s in range(S):
        e, _, _ = res['routes'][s][0]
        dg = [0.0] * E
        if e >= 0:
            dg[e] = dout[s]
        out.append(softmax_bwd(res['gates'][s], dg))
    return out

def combine_grad_renorm(res, dout):
    """dout[s][j] = dL/d(normalised weight of route j); weights w_j = g_j / max(sum kept g, eps)"""
    S, E = len(res['gates']), len(res['gates'][0])
    out = []
    for s in range(S):
        kept = [(e, j) for j, (e, _, _) in enumerate(res['routes'][s]) if e >= 0]
        den = sum(res['gates'][s][e] for e, _ in kept)
        dg = [0.0] * E
        if kept and den > FP32_EPS:
            dot = sum(dout[s][j] * res['gates'][s][e] for e, j in kept) / (den * den)
            for e, j in kept:
                dg[e] = dout[s][j] / den - dot
        out.append(softmax_bwd(res['gates'][s], dg))
    return out

# ---------------------------------------------------------------- cases of the tests
def run(case):
    x, k, E = case['logits'], case['k'], len(case['logits'][0])
    args = dict(cf=case['cf'], min_cap=case['min_capacity'], drop=case['drop'])
    if case['gate'] == 'top1':
        res = top1(x, used=case.get('used'), gumbel=case.get('gumbel'), U=case.get('U'), **args)
        weights = combine_grad_top1(res, [d[0] for d in case['d_weight']])
    elif case['gate'] == 'top2':
        res = top2(x, gumbel=case.get('gumbel'), **args)
        weights = combine_grad_renorm(res, case['d_weight'])
    else:
        res = topk(x, k, policy=case['policy'], **args)
        weights = combine_grad_renorm(res, case['d_weight'])
    scale = E / k if case['gate'] == 'topk' else E
    balance = laux_grad(res['gates'], res['ce'], scale)
    out = [res['C'], res['l_aux']] + res['counts']
    out += [v for token in res['routes'] for e, _, w in token for v in (e, w)]
    return out + [a + b for p, q in zip(weights, balance) for a, b in zip(p, q)]

if __name__ == '__main__':
    for line in sys.stdin:
        print(*['%.12g' % v for v in run(json.loads(line))])
