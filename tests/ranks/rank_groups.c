/* SPDX-License-Identifier: Apache-2.0 */
/* Parameter groups in the engine: one step of TINY with optimizer.param_groups
 * against the same step without. Usage: rank_groups [KEY=VALUE]... */
#include "tiny.h"

#include "base/alloc.h"
#include "base/check.h"

#include <fnmatch.h>
#include <math.h>
#include <stdio.h>

enum { MAX_ASSIGNMENTS = 16 };

typedef struct given {
  const char *all[MAX_ASSIGNMENTS + 4];
  int num;
} given_t;

/* All tensors of a part after one step. */
typedef struct state {
  tiny_t tiny;
  float
      *parts[4]; /* by mz_tensor_part_t, tensor after tensor; [GRADS]: start */
} state_t;

static void state_free(state_t *s)
{
  for (int p = 0; p < 4; p++)
    mz_free(s->parts[p]);
  tiny_destroy(&s->tiny);
}

static mz_status_t read_part(state_t *s, mz_tensor_part_t part, float **out)
{
  int32_t num = mz_decl_num_tensors(s->tiny.decl);
  int64_t total = 0;

  for (int32_t t = 0; t < num; t++)
    total += mz_decl_tensor_elements(s->tiny.decl, t);
  MZ_TRY(mz_new(total, "values", out));
  total = 0;
  for (int32_t t = 0; t < num; t++) {
    MZ_TRY(mz_engine_read(s->tiny.engine, t, part, *out + total));
    total += mz_decl_tensor_elements(s->tiny.decl, t);
  }
  return MZ_OK;
}

static mz_status_t step(const given_t *given, const char *more[3], state_t *s)
{
  given_t g = *given;
  mz_step_result_t r;

  *s = (state_t){0};
  for (int i = 0; i < 3 && more[i]; i++)
    g.all[g.num++] = more[i];
  MZ_TRY(tiny_create(g.all, g.num, MPI_COMM_WORLD, &s->tiny));
  MZ_TRY(read_part(s, MZ_PART_WEIGHTS, &s->parts[MZ_PART_GRADS]));
  MZ_TRY(tiny_step(&s->tiny, &r));
  MZ_TRY(read_part(s, MZ_PART_WEIGHTS, &s->parts[MZ_PART_WEIGHTS]));
  MZ_TRY(read_part(s, MZ_PART_EXP_AVG, &s->parts[MZ_PART_EXP_AVG]));
  return MZ_TRACE(
      read_part(s, MZ_PART_EXP_AVG_SQ, &s->parts[MZ_PART_EXP_AVG_SQ]));
}

/* What an element must be, from the run without groups. */
typedef double (*expect_fn)(const state_t *plain, int64_t i);

static mz_status_t compare(const state_t *plain, const state_t *got,
                           mz_tensor_part_t part, const char *pattern,
                           expect_fn expect)
{
  int64_t at = 0;
  int32_t in_group = 0;

  for (int32_t t = 0; t < mz_decl_num_tensors(plain->tiny.decl); t++) {
    const char *name = mz_decl_tensor_name(plain->tiny.decl, t);
    int64_t end = at + mz_decl_tensor_elements(plain->tiny.decl, t);
    int in = fnmatch(pattern, name, 0) == 0;

    in_group += in;
    for (; at < end; at++) {
      double want = in ? expect(plain, at) : (double)plain->parts[part][at];
      double x = got->parts[part][at];
      MZ_REQUIRE(fabs(x - want) <= (in ? 2e-6 * fabs(want) + 1e-9 : 0),
                 MZ_ERR_DATA, "%s %s: %.9g, expected %.9g", pattern, name, x,
                 want);
    }
  }
  MZ_REQUIRE(in_group > 0, MZ_ERR_DATA, "%s matches nothing", pattern);
  return MZ_OK;
}

/* lr 0: as at the start. */
static double stays(const state_t *p, int64_t i)
{
  return p->parts[MZ_PART_GRADS][i];
}

/* The first step of Adam moves by lr * g / (|g| + eps): half the rate. */
static double half_way(const state_t *p, int64_t i)
{
  double start = p->parts[MZ_PART_GRADS][i];
  return start + (p->parts[MZ_PART_WEIGHTS][i] - start) / 2;
}

/* Decoupled decay 0.5 at the rate 1e-3. */
static double decays(const state_t *p, int64_t i)
{
  return p->parts[MZ_PART_WEIGHTS][i] -
         1e-3 * 0.5 * (double)p->parts[MZ_PART_GRADS][i];
}

/* (1 - beta1) g with beta1 0.5 in place of 0.9. */
static double first_mean(const state_t *p, int64_t i)
{
  return 5 * (double)p->parts[MZ_PART_EXP_AVG][i];
}

/* (1 - beta2) g^2 with beta2 0.99 in place of 0.999. */
static double second_mean(const state_t *p, int64_t i)
{
  return 10 * (double)p->parts[MZ_PART_EXP_AVG_SQ][i];
}

/* Other tensors keep the bits of the run without groups. */
static mz_status_t run_all(const given_t *given)
{
#define G(text) "optimizer.param_groups=" text
  const struct {
    const char *more[3];
    mz_tensor_part_t part;
    const char *pattern;
    expect_fn expect;
  } cases[] = {
      {{G("[{\"experts\": true, \"lr\": 0}]")},
       MZ_PART_WEIGHTS,
       "*.experts.*",
       stays},
      {{G("[{\"pattern\": \"h.1.*\", \"lr\": 5e-4}]")},
       MZ_PART_WEIGHTS,
       "h.1.*",
       half_way},
      /* the schedule's 2e-3 times 2.5e-4 / 1e-3 */
      {{G("[{\"pattern\": \"*.experts.3.*\", \"lr\": 2.5e-4}, "
          "{\"lr\": 5e-4}]"),
        "scheduler={\"type\": \"WarmupLR\", \"params\": {\"warmup_min_lr\": "
        "2e-3, \"warmup_max_lr\": 2e-3}}"},
       MZ_PART_WEIGHTS,
       "*.experts.3.*",
       half_way},
      {{G("[{\"pattern\": \"*ln_?.*\", \"weight_decay\": 0.5}]")},
       MZ_PART_WEIGHTS,
       "*ln_?.*",
       decays},
      {{G("[{\"pattern\": \"*bias\", \"betas\": [0.5, 0.99]}]")},
       MZ_PART_EXP_AVG,
       "*bias",
       first_mean},
      {{G("[{\"pattern\": \"*bias\", \"betas\": [0.5, 0.99]}]")},
       MZ_PART_EXP_AVG_SQ,
       "*bias",
       second_mean},
  };
  const char *none[3] = {NULL};
  state_t plain = {0}, got = {0};
  mz_status_t st = step(given, none, &plain);

  for (size_t i = 0; st == MZ_OK && i < sizeof cases / sizeof *cases; i++) {
    st = step(given, (const char **)cases[i].more, &got);
    if (st == MZ_OK)
      st = compare(&plain, &got, cases[i].part, cases[i].pattern,
                   cases[i].expect);
    state_free(&got);
  }
  state_free(&plain);
  return MZ_TRACE(st);
}

int main(int argc, char **argv)
{
  given_t given = {.num = 0};
  int provided, rank, failed, any = 0;

  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  for (int i = 1; i < argc && given.num < MAX_ASSIGNMENTS; i++)
    given.all[given.num++] = argv[i];
  failed = run_all(&given) != MZ_OK;
  if (failed) fprintf(stderr, "rank %d: %s\n", rank, mz_error_last());
  MPI_Allreduce(&failed, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Finalize();
  return any;
}
