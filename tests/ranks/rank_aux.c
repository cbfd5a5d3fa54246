/* SPDX-License-Identifier: Apache-2.0 */
/* The strength of the balance loss, on parts of 4 ranks: eight copies of one
 * sequence, split in four ways into ranks, micro-batches and accumulation. What
 * the coefficient adds to the gates' gradients is the same in all, doubles with
 * it, and is the slope of the reported balance loss.
 *   rank_aux [inline]
 * "inline" runs without the communication thread. Exit code 0: all is right. */
#include "tiny.h"

#include "base/check.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { COPIES = 8, SLOPES = 5, EXPERTS = 4, WIDTH = 32, MOES = 2 };

typedef struct layout {
  int micro, accumulation, ranks;
} layout_t;

static const layout_t layouts[] = {{8, 1, 1}, {1, 8, 1}, {2, 2, 2}, {1, 2, 4}};
enum { NUM_LAYOUTS = sizeof layouts / sizeof layouts[0] };

/* With coefficients 0, 1 and 2. */
typedef struct found {
  double aux[3];
  tiny_run_t grads[3];
} found_t;

static int world_rank;

static int32_t same_token(int64_t step, int64_t sample, int64_t t)
{
  (void)step;
  (void)sample;
  return tiny_token(0, 0, t);
}

static void give(tiny_given_t *g, const layout_t *l, const char *scope,
                 double coefficient)
{
  tiny_give(g, "train_batch_size=%d", COPIES);
  tiny_give(g, "train_micro_batch_size_per_gpu=%d", l->micro);
  tiny_give(g, "gradient_accumulation_steps=%d", l->accumulation);
  tiny_give(g, "moe.aux_loss=load_balancing");
  tiny_give(g, "moe.aux_loss_scope=%s", scope);
  tiny_give(g, "moe.aux_loss_coef=%g", coefficient);
  tiny_give(g, "model.initializer_range=0.1");
  tiny_give(g, "optimizer.params.lr=0"); /* weights stay as they are */
  tiny_give(g, "optimizer.params.weight_decay=0");
}

static mz_status_t measure(const layout_t *l, MPI_Comm comm, const char *scope,
                           found_t *found)
{
  mz_step_result_t r;
  tiny_t tiny;
  mz_status_t st = MZ_OK;

  for (int c = 0; c < 3 && st == MZ_OK; c++) {
    tiny_given_t g = {.num = 0};

    give(&g, l, scope, c);
    MZ_TRY_GOTO(st, tiny_create(g.all, g.num, comm, &tiny), done);
    tiny.token = same_token;
    MZ_TRY_GOTO(st, tiny_step(&tiny, &r), done);
    found->aux[c] = r.aux_loss;
    MZ_TRY_GOTO(st, tiny_read(&tiny, MZ_PART_GRADS, &found->grads[c]), done);
  done:
    tiny_destroy(&tiny);
  }
  return st;
}

static void free_found(found_t *found)
{
  for (int c = 0; c < 3; c++)
    tiny_run_free(&found->grads[c]);
}

/* What a coefficient adds to element i. */
static double added(const found_t *found, int c, int64_t i)
{
  return (double)found->grads[c].values[i] - found->grads[0].values[i];
}

static bool is_gate(const tiny_run_t *run, int t)
{
  return strstr(run->names[t], ".gate.weight") != NULL;
}

/* Of all gates: the distance of factor * (what c adds to a) to what 1 adds to
 * b, over the norm of the latter. */
static mz_status_t check_added(const char *what, const found_t *a, int c,
                               double factor, const found_t *b)
{
  int gates = 0;

  for (int t = 0; t < a->grads[0].num_tensors; t++) {
    double apart = 0, norm = 0;

    if (!is_gate(&a->grads[0], t)) continue;
    gates++;
    for (int64_t i = a->grads[0].offsets[t]; i < a->grads[0].offsets[t + 1];
         i++) {
      double d = factor * added(a, c, i) - added(b, 1, i);
      apart += d * d;
      norm += added(b, 1, i) * added(b, 1, i);
    }
    MZ_REQUIRE(norm > 0 && sqrt(apart) <= 1e-5 * sqrt(norm), MZ_ERR_DATA,
               "%s, %s: %g apart, norm %g", what, a->grads[0].names[t],
               sqrt(apart), sqrt(norm));
  }
  MZ_REQUIRE(gates == MOES, MZ_ERR_DATA, "%d gates", gates);
  return MZ_OK;
}

static mz_status_t check_layout(const found_t *one, const found_t *other)
{
  for (int c = 0; c < 3; c++)
    MZ_REQUIRE(one->aux[c] > 0 &&
                   fabs(other->aux[c] - one->aux[c]) <= 1e-6 * one->aux[c],
               MZ_ERR_DATA, "balance loss %.9g with coefficient %d, need %.9g",
               other->aux[c], c, one->aux[c]);
  MZ_TRY(check_added("of another layout", other, 1, 1, one));
  return MZ_TRACE(check_added("of coefficient 2, halved", other, 2, 0.5, one));
}

/* Every rank has what one rank finds, to compare with. */
static void try_layouts(const char *scope, found_t *one)
{
  tiny_report(measure(&layouts[0], MPI_COMM_SELF, scope, one), "%s, one rank",
              scope);
  for (int i = 0; i < NUM_LAYOUTS && tiny_num_failed == 0; i++) {
    found_t other = {0};
    mz_status_t st = MZ_OK;
    MPI_Comm part;

    MPI_Comm_split(MPI_COMM_WORLD,
                   world_rank < layouts[i].ranks ? 0 : MPI_UNDEFINED,
                   world_rank, &part);
    if (part != MPI_COMM_NULL) {
      st = measure(&layouts[i], part, scope, &other);
      if (st == MZ_OK) st = check_layout(one, &other);
      MPI_Comm_free(&part);
    }
    tiny_report(st, "%s, layout %d", scope, i);
    free_found(&other);
  }
}

/* --- slopes --- */

/* The element of tensor t with the largest added gradient below a bound. */
static int64_t steepest(const found_t *found, int t, double below)
{
  const int64_t *at = &found->grads[0].offsets[t];
  int64_t best = -1;

  for (int64_t i = at[0]; i < at[1]; i++)
    if (fabs(added(found, 1, i)) < below &&
        (best < 0 || fabs(added(found, 1, i)) > fabs(added(found, 1, best))))
      best = i;
  return best;
}

/* The balance loss with another number at one place, and whether the counts
 * are those of before. */
static mz_status_t aux_at(tiny_t *tiny, int32_t tensor, float *weights,
                          int64_t place, float number,
                          const int64_t counts[MOES][EXPERTS], double *aux_out)
{
  float before = weights[place];
  mz_step_result_t r;

  weights[place] = number;
  MZ_TRY(mz_engine_write(tiny->engine, tensor, MZ_PART_WEIGHTS, weights));
  weights[place] = before;
  MZ_TRY(tiny_step(tiny, &r));
  for (int m = 0; m < MOES; m++)
    MZ_REQUIRE(memcmp(r.moes[m].routed, counts[m], sizeof counts[m]) == 0,
               MZ_ERR_DATA, "the step moves a token of layer %d", m);
  *aux_out = r.aux_loss;
  return MZ_OK;
}

/* (L(w + h) - L(w - h)) / 2h of the balance loss of both layers. */
static mz_status_t check_slope(tiny_t *tiny, int32_t tensor, int64_t place,
                               double wanted,
                               const int64_t counts[MOES][EXPERTS])
{
  const float h = 0x1p-9f;
  float weights[EXPERTS * WIDTH], middle;
  double up, down, slope;

  MZ_REQUIRE(mz_decl_tensor_elements(tiny->decl, tensor) == EXPERTS * WIDTH,
             MZ_ERR_DATA, "tensor %d is no gate", tensor);
  MZ_TRY(mz_engine_read(tiny->engine, tensor, MZ_PART_WEIGHTS, weights));
  middle = weights[place];
  MZ_TRY(aux_at(tiny, tensor, weights, place, middle + h, counts, &up));
  MZ_TRY(aux_at(tiny, tensor, weights, place, middle - h, counts, &down));
  MZ_TRY(mz_engine_write(tiny->engine, tensor, MZ_PART_WEIGHTS, weights));
  slope = (up - down) / ((double)(middle + h) - (double)(middle - h));
  printf("slope %.9g, gradient %.9g\n", slope, wanted);
  MZ_REQUIRE(fabs(slope - wanted) <= 1e-3 * fabs(wanted), MZ_ERR_DATA,
             "place %" PRId64 ": slope %.9g, gradient %.9g", place, slope,
             wanted);
  return MZ_OK;
}

/* Of each gate the steepest places in turn, five in all. */
static mz_status_t check_slopes(tiny_t *tiny, const found_t *one)
{
  int64_t counts[MOES][EXPERTS];
  double below[MOES] = {HUGE_VAL, HUGE_VAL};
  mz_step_result_t r;
  int checked = 0;

  MZ_TRY(tiny_step(tiny, &r));
  for (int m = 0; m < MOES; m++)
    memcpy(counts[m], r.moes[m].routed, sizeof counts[m]);
  while (checked < SLOPES)
    for (int t = 0, m = 0; t < one->grads[0].num_tensors; t++) {
      int64_t i;

      if (!is_gate(&one->grads[0], t)) continue;
      if (checked++ == SLOPES) break;
      i = steepest(one, t, below[m]);
      below[m] = fabs(added(one, 1, i));
      MZ_TRY(check_slope(tiny, t, i - one->grads[0].offsets[t],
                         added(one, 1, i), counts));
      m++;
    }
  return MZ_OK;
}

static mz_status_t try_slopes(const found_t *one)
{
  tiny_given_t g = {.num = 0};
  tiny_t tiny;
  mz_status_t st;

  give(&g, &layouts[0], "group", 1);
  MZ_TRY_GOTO(st, tiny_create(g.all, g.num, MPI_COMM_SELF, &tiny), done);
  tiny.token = same_token;
  MZ_TRY_GOTO(st, check_slopes(&tiny, one), done);
done:
  tiny_destroy(&tiny);
  return st;
}

int main(int argc, char **argv)
{
  found_t by_group = {0}, by_rank = {0};
  int provided, size;

  tiny_inline = argc == 2 && strcmp(argv[1], "inline") == 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  tiny_num_failed = size != 4;
  if (tiny_num_failed == 0) try_layouts("group", &by_group);
  if (tiny_num_failed == 0) try_layouts("rank", &by_rank);
  if (tiny_num_failed == 0)
    tiny_report(world_rank == 0 ? try_slopes(&by_group) : MZ_OK, "slopes %d",
                SLOPES);
  free_found(&by_group);
  free_found(&by_rank);
  MPI_Finalize();
  return tiny_num_failed > 0;
}
