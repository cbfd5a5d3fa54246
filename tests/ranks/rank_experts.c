/* SPDX-License-Identifier: Apache-2.0 */
/* Many large experts on one rank, of which the last one gets every token: it
 * learns as it would alone, and the others stay as they are. With the sizes
 * left out their first matrix has 5.0 GiB in bf16 and the last expert begins
 * behind element 2^31; a GPU then needs 92 GiB.
 *   rank_experts DEVICE [EXPERTS HIDDEN INNER]
 * Exit code 0: all is right. */
#include "tiny.h"

#include "base/alloc.h"
#include "base/check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_EXPERTS = 256, NUM_PARTS = 4, LOGIT = 200, MAX_TEXT = 2048 };

static const char *const parts[NUM_PARTS] = {"up.weight", "up.bias",
                                             "down.weight", "down.bias"};

/* Weights of one expert. */
typedef struct expert {
  float *values[NUM_PARTS];
  int64_t num[NUM_PARTS];
} expert_t;

typedef struct sizes {
  const char *device;
  int experts, hidden, inner;
} sizes_t;

static int failed;

static void must(mz_status_t st)
{
  if (st == MZ_OK) return;
  fprintf(stderr, "%s\n", mz_error_last());
  MPI_Abort(MPI_COMM_WORLD, 1);
  exit(1);
}

static void report(bool good, const char *what)
{
  printf("%s %s\n", good ? "ok" : "FAILED", what);
  fflush(stdout);
  failed += !good;
}

static void create(const sizes_t *s, int experts, tiny_t *tiny)
{
  static char logits[MAX_TEXT];
  const char *all[TINY_MAX_GIVEN];
  tiny_given_t given = {.num = 0};
  int at = snprintf(logits, sizeof logits, "debug.fixed_logits=[");

  for (int e = 0; e < experts; e++) /* so far apart that its gate is 1 */
    at += snprintf(logits + at, sizeof logits - (size_t)at, "%s%d",
                   e > 0 ? "," : "", e == experts - 1 ? LOGIT : 0);
  snprintf(logits + at, sizeof logits - (size_t)at, "]");
  tiny_give(&given, "train.device=%s", s->device);
  tiny_give(&given, "model.hidden_size=%d", s->hidden);
  tiny_give(&given, "model.intermediate_size=%d", s->inner);
  tiny_give(&given, "model.num_hidden_layers=1");
  /* a head of at most 32: no width of heads is the limit here */
  tiny_give(&given, "model.num_attention_heads=%d",
            s->hidden > 32 ? s->hidden / 32 : 1);
  tiny_give(&given, "moe.num_experts=%d", experts);
  tiny_give(&given, "moe.k=1");
  tiny_give(&given, "bf16.enabled=true");
  tiny_give(&given, "optimizer.params.weight_decay=0");
  tiny_give(&given, "train_batch_size=4");
  memcpy(all, given.all, sizeof given.all);
  all[given.num] = logits;
  must(tiny_create(all, given.num + 1, MPI_COMM_WORLD, tiny));
}

static int32_t tensor_of(const tiny_t *tiny, int expert, int part)
{
  char name[MZ_NAME_MAX];

  snprintf(name, sizeof name, "h.0.moe.experts.%d.%s", expert, parts[part]);
  for (int32_t t = 0; t < mz_decl_num_tensors(tiny->decl); t++)
    if (strcmp(mz_decl_tensor_name(tiny->decl, t), name) == 0) return t;
  must(MZ_ERROR(MZ_ERR_ARG, "no tensor %s", name));
  return -1;
}

static void read_expert(tiny_t *tiny, int expert, expert_t *out)
{
  for (int p = 0; p < NUM_PARTS; p++) {
    int32_t t = tensor_of(tiny, expert, p);

    out->num[p] = mz_decl_tensor_elements(tiny->decl, t);
    if (!out->values[p]) must(mz_new(out->num[p], parts[p], &out->values[p]));
    must(mz_engine_read(tiny->engine, t, MZ_PART_WEIGHTS, out->values[p]));
  }
}

static void free_expert(expert_t *expert)
{
  for (int p = 0; p < NUM_PARTS; p++)
    mz_free(expert->values[p]);
}

/* L2 of the difference of two changes from the same start, over the change. */
static double changes_apart(const expert_t *start, const expert_t *a,
                            const expert_t *b)
{
  double square = 0, apart = 0;

  for (int p = 0; p < NUM_PARTS; p++)
    for (int64_t i = 0; i < start->num[p]; i++) {
      double x = (double)a->values[p][i] - start->values[p][i];
      double y = (double)b->values[p][i] - start->values[p][i];

      square += x * x;
      apart += (x - y) * (x - y);
    }
  return square > 0 ? sqrt(apart / square) : HUGE_VAL;
}

static bool same_bits(const expert_t *a, const expert_t *b)
{
  for (int p = 0; p < NUM_PARTS; p++)
    if (memcmp(a->values[p], b->values[p], (size_t)a->num[p] * sizeof(float)) !=
        0)
      return false;
  return true;
}

static void check_idle(tiny_t *many, int expert, const expert_t *before)
{
  expert_t after = {.num = {0}};
  char what[64];

  read_expert(many, expert, &after);
  snprintf(what, sizeof what, "expert %d stays as it is", expert);
  report(same_bits(before, &after), what);
  free_expert(&after);
}

/* The last expert's step among all, and its start; the others' states. */
static void run_many(const sizes_t *s, expert_t *start, expert_t *end,
                     mz_step_result_t *result)
{
  const int idle[3] = {0, s->experts * 4 / 5, s->experts - 2};
  expert_t before[3] = {{.num = {0}}};
  tiny_t many;

  create(s, s->experts, &many);
  read_expert(&many, s->experts - 1, start);
  for (int i = 0; i < 3; i++)
    read_expert(&many, idle[i], &before[i]);
  must(tiny_step(&many, result));
  for (int i = 0; i < 3; i++) {
    check_idle(&many, idle[i], &before[i]);
    free_expert(&before[i]);
  }
  read_expert(&many, s->experts - 1, end);
  tiny_destroy(&many);
}

static void run_alone(const sizes_t *s, const expert_t *start, expert_t *end,
                      mz_step_result_t *result)
{
  tiny_t alone;

  create(s, 1, &alone);
  for (int p = 0; p < NUM_PARTS; p++)
    must(mz_engine_write(alone.engine, tensor_of(&alone, 0, p), MZ_PART_WEIGHTS,
                         start->values[p]));
  must(tiny_step(&alone, result));
  read_expert(&alone, 0, end);
  tiny_destroy(&alone);
}

/* Outputs of bf16: 1e-2 (the case's bound). */
static void check(const sizes_t *s)
{
  expert_t start = {.num = {0}}, many = {.num = {0}}, alone = {.num = {0}};
  mz_step_result_t of_many, of_alone;
  double loss, norm, change;
  char what[256];

  run_many(s, &start, &many, &of_many);
  run_alone(s, &start, &alone, &of_alone);
  loss = fabs(of_many.loss - of_alone.loss) / of_alone.loss;
  norm = fabs(of_many.grad_norm - of_alone.grad_norm) / of_alone.grad_norm;
  change = changes_apart(&start, &many, &alone);
  snprintf(what, sizeof what,
           "expert %d of %d against itself alone: loss %.6f, %.1e apart; "
           "gradient norm %.1e; its change %.1e, %s bits",
           s->experts - 1, s->experts, of_many.loss, loss, norm, change,
           same_bits(&many, &alone) ? "the same" : "other");
  report(loss <= 1e-2 && norm <= 1e-2 && change <= 1e-2, what);
  free_expert(&start);
  free_expert(&many);
  free_expert(&alone);
}

int main(int argc, char **argv)
{
  sizes_t s = {.experts = 80, .hidden = 2048, .inner = 16384};
  int provided, world;

  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  if (argc == 5) {
    s.experts = atoi(argv[2]);
    s.hidden = atoi(argv[3]);
    s.inner = atoi(argv[4]);
  }
  if (world != 1 || (argc != 2 && argc != 5) || s.experts < 6 ||
      s.experts > MAX_EXPERTS) {
    fprintf(stderr,
            "usage: rank_experts DEVICE [EXPERTS HIDDEN INNER], on one "
            "rank, 6 to %d experts\n",
            MAX_EXPERTS);
    MPI_Finalize();
    return 2;
  }
  s.device = argv[1];
  check(&s);
  MPI_Finalize();
  return failed > 0;
}
