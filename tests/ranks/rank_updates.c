/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients and one update over layouts, on the parts that 4 ranks have:
 *   rank_updates gradients   the summed gradients of step 1 equal one rank's
 *   rank_updates update      all that has a gradient changes, the same at every
 *                            stage; experts differ; the state is as planned
 * A last word "inline" runs without the communication thread. Exit code 0: all
 * is right. */
#include "tiny.h"

#include "base/alloc.h"
#include "base/check.h"
#include "train/engine_impl.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { OWN = 6, NUM_STAGES = 4 };

static int world_rank;

static int assemble(char own[][64], const char **all, int ep, int stage,
                    int batch)
{
  snprintf(own[0], 64, "moe.ep_size=%d", ep);
  snprintf(own[1], 64, "zero_optimization.stage=%d", stage);
  snprintf(own[2], 64, "train_batch_size=%d", batch);
  for (int i = 0; i < 3; i++)
    all[i] = own[i];
  return 3;
}

/* --- gradients --- */

typedef struct first_step {
  tiny_run_t grads;
  double loss, norm;
} first_step_t;

static mz_status_t take_first_step(MPI_Comm comm, int ep, int stage,
                                   first_step_t *out)
{
  char own[OWN][64];
  const char *all[OWN];
  mz_step_result_t result;
  tiny_t tiny;
  mz_status_t st;

  MZ_TRY_GOTO(st,
              tiny_create(all, assemble(own, all, ep, stage, 4), comm, &tiny),
              done);
  MZ_TRY_GOTO(st, tiny_step(&tiny, &result), done);
  out->loss = result.loss;
  out->norm = result.grad_norm;
  MZ_TRY_GOTO(st, tiny_read(&tiny, MZ_PART_GRADS, &out->grads), done);
done:
  tiny_destroy(&tiny);
  return st;
}

static double part_of(const tiny_run_t *a, const tiny_run_t *b, int t)
{
  double sum = 0;

  for (int64_t i = a->offsets[t]; i < a->offsets[t + 1]; i++) {
    double d = a->values[i] - (b ? b->values[i] : 0);
    sum += d * d;
  }
  return sqrt(sum);
}

static mz_status_t check_gradients(const first_step_t *one,
                                   const first_step_t *many)
{
  MZ_REQUIRE(fabs(many->loss - one->loss) <= 1e-5 * one->loss &&
                 fabs(many->norm - one->norm) <= 1e-5 * one->norm,
             MZ_ERR_DATA, "loss %.9g for %.9g, norm %.9g for %.9g", many->loss,
             one->loss, many->norm, one->norm);
  for (int t = 0; t < one->grads.num_tensors; t++) {
    double norm = part_of(&one->grads, NULL, t);
    double apart = part_of(&one->grads, &many->grads, t);

    MZ_REQUIRE(norm > 0 && apart <= 1e-5 * norm, MZ_ERR_DATA,
               "%s: %g apart, norm %g for %g", one->grads.names[t], apart,
               part_of(&many->grads, NULL, t), norm);
  }
  return MZ_OK;
}

static void try_gradients(const first_step_t *one, int np, int ep, int stage)
{
  first_step_t many = {0};
  char name[64];
  mz_status_t st = MZ_OK;
  MPI_Comm part;

  snprintf(name, sizeof name, "gradients, np %d ep %d stage %d", np, ep, stage);
  MPI_Comm_split(MPI_COMM_WORLD, world_rank < np ? 0 : MPI_UNDEFINED,
                 world_rank, &part);
  if (part != MPI_COMM_NULL) {
    st = take_first_step(part, ep, stage, &many);
    if (st == MZ_OK) st = check_gradients(one, &many);
    MPI_Comm_free(&part);
  }
  tiny_report(st, "%s", name);
  tiny_run_free(&many.grads);
}

static void compare_gradients(void)
{
  static const int layouts[][2] = {{2, 1}, {2, 2}, {4, 2}, {4, 4}};
  first_step_t one = {0};

  tiny_report(take_first_step(MPI_COMM_SELF, 1, 0, &one),
              "gradients of one rank");
  for (int stage = 0; stage < NUM_STAGES && tiny_num_failed == 0; stage++)
    for (int i = 0; i < 4; i++)
      try_gradients(&one, layouts[i][0], layouts[i][1], stage);
  tiny_run_free(&one.grads);
}

/* --- one update --- */

/* Elements that this rank owns, over the ranks: each element once. */
static mz_status_t check_owners(const mz_plan_t *p, int64_t elements)
{
  int64_t own = 0, all;

  for (int32_t i = 0; i < p->num_segments[MZ_SHARE_OWNED]; i++)
    own += p->segments[MZ_SHARE_OWNED][i].length;
  MPI_Allreduce(&own, &all, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
  MZ_REQUIRE(all == elements, MZ_ERR_DATA,
             "%" PRId64 " elements have an owner, the model has %" PRId64, all,
             elements);
  return MZ_OK;
}

/* Two moments in fp32 of this rank's dense and expert shards, worked out from
 * the shapes; the padding of a unit is less than an aligned shard a rank, and
 * less than an aligned block a tensor. */
static mz_status_t check_state(const tiny_t *tiny, const tiny_run_t *w,
                               int stage)
{
  const mz_plan_t *p = mz_engine_plan(tiny->engine);
  int64_t dense = 0, experts = 0, planned, exact, most;

  for (int t = 0; t < w->num_tensors; t++)
    *(strstr(w->names[t], ".experts.") ? &experts : &dense) +=
        w->offsets[t + 1] - w->offsets[t];
  MZ_TRY(check_owners(p, dense + experts));
  /* 4 dense replicas; 2 of each expert, of which a rank holds half */
  exact = 8 * (stage == 0 ? dense + experts / 2 : dense / 4 + experts / 4);
  most = exact + 8 * MZ_PLAN_ALIGN * (p->num_units + p->num_unit_tensors);
  planned = p->buffers[p->exp_avg].bytes + p->buffers[p->exp_avg_sq].bytes;
  MZ_REQUIRE(planned >= exact && planned <= most &&
                 planned == p->category_bytes[MZ_CAT_OPTIMIZER],
             MZ_ERR_DATA,
             "state: %" PRId64 " bytes, the ledger says %" PRId64
             ", from the shapes %" PRId64 " to %" PRId64,
             planned, p->category_bytes[MZ_CAT_OPTIMIZER], exact, most);
  return MZ_OK;
}

static mz_status_t check_changes(const tiny_run_t *before,
                                 const tiny_run_t *grads,
                                 const tiny_run_t *after)
{
  for (int t = 0; t < before->num_tensors; t++) {
    int64_t with_grad = 0, changed = 0;

    for (int64_t i = before->offsets[t]; i < before->offsets[t + 1]; i++) {
      with_grad += grads->values[i] != 0;
      changed += grads->values[i] != 0 && before->values[i] != after->values[i];
    }
    MZ_REQUIRE(with_grad > 0 && changed == with_grad, MZ_ERR_DATA,
               "%s: %" PRId64 " of %" PRId64 " elements changed",
               before->names[t], changed, with_grad);
  }
  return MZ_OK;
}

/* Where weights are whole on every owner (stages 0 to 2), this rank's copy is
 * what all ranks read together. */
static mz_status_t check_copies(const tiny_t *tiny, const tiny_run_t *after)
{
  const void *const *weights = mz_zero_weights(tiny->engine->zero);
  int copies = 0;

  for (int t = 0; t < after->num_tensors; t++) {
    int64_t at = after->offsets[t], n = after->offsets[t + 1] - at;

    MZ_REQUIRE(!weights[t] || memcmp(weights[t], after->values + at,
                                     (size_t)n * sizeof(float)) == 0,
               MZ_ERR_DATA, "%s: this rank's copy differs", after->names[t]);
    copies += weights[t] != NULL;
  }
  MZ_REQUIRE(copies > after->num_tensors / 2, MZ_ERR_DATA,
             "only %d of %d tensors are here", copies, after->num_tensors);
  return MZ_OK;
}

/* No two matrices of experts are the same. */
static mz_status_t check_distinct(const tiny_run_t *w)
{
  for (int a = 0; a < w->num_tensors; a++)
    for (int b = 0; b < a; b++) {
      int64_t n = w->offsets[a + 1] - w->offsets[a];

      if (!strstr(w->names[a], ".experts.") ||
          !strstr(w->names[b], ".experts.") ||
          n != w->offsets[b + 1] - w->offsets[b])
        continue;
      MZ_REQUIRE(memcmp(w->values + w->offsets[a], w->values + w->offsets[b],
                        (size_t)n * sizeof(float)) != 0,
                 MZ_ERR_DATA, "%s and %s are equal", w->names[a], w->names[b]);
    }
  return MZ_OK;
}

static mz_status_t update_once(tiny_t *tiny, int stage, tiny_run_t *after)
{
  tiny_run_t before = {0}, grads = {0};
  mz_step_result_t result;
  mz_status_t st;

  MZ_TRY_GOTO(st, tiny_read(tiny, MZ_PART_WEIGHTS, &before), done);
  MZ_TRY_GOTO(st, tiny_step(tiny, &result), done);
  MZ_TRY_GOTO(st, tiny_read(tiny, MZ_PART_GRADS, &grads), done);
  MZ_TRY_GOTO(st, tiny_read(tiny, MZ_PART_WEIGHTS, after), done);
  MZ_TRY_GOTO(st, check_changes(&before, &grads, after), done);
  MZ_TRY_GOTO(st, check_distinct(after), done);
  MZ_TRY_GOTO(st, check_state(tiny, after, stage), done);
  if (stage < 3) MZ_TRY_GOTO(st, check_copies(tiny, after), done);
done:
  tiny_run_free(&before);
  tiny_run_free(&grads);
  return st;
}

static mz_status_t try_update(int stage, const tiny_run_t *plain,
                              tiny_run_t *after)
{
  char own[OWN][64];
  const char *all[OWN];
  tiny_t tiny;
  mz_status_t st;
  int n = assemble(own, all, 2, stage, 8);

  all[n++] = "optimizer.params.lr=1e-2";
  all[n++] = "optimizer.params.weight_decay=0";
  MZ_TRY_GOTO(st, tiny_create(all, n, MPI_COMM_WORLD, &tiny), done);
  MZ_TRY_GOTO(st, update_once(&tiny, stage, after), done);
  for (int64_t i = 0; i < plain->num_values; i++)
    MZ_REQUIRE_GOTO(fabsf(after->values[i] - plain->values[i]) <= 1e-5f, st,
                    done, MZ_ERR_DATA, "element %" PRId64 ": %g, stage 0: %g",
                    i, (double)after->values[i], (double)plain->values[i]);
done:
  tiny_destroy(&tiny);
  return st;
}

static void compare_updates(void)
{
  tiny_run_t plain = {0};

  tiny_report(try_update(0, &plain, &plain), "update, np 4 ep 2 stage 0");
  for (int stage = 1; stage < NUM_STAGES && tiny_num_failed == 0; stage++) {
    tiny_run_t after = {0};
    char name[64];

    snprintf(name, sizeof name, "update, np 4 ep 2 stage %d", stage);
    tiny_report(try_update(stage, &plain, &after), "%s", name);
    tiny_run_free(&after);
  }
  tiny_run_free(&plain);
}

int main(int argc, char **argv)
{
  int provided;

  if (argc < 2) return 2;
  tiny_inline = strcmp(argv[argc - 1], "inline") == 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  if (strcmp(argv[1], "gradients") == 0)
    compare_gradients();
  else
    compare_updates();
  MPI_Finalize();
  return tiny_num_failed > 0;
}
