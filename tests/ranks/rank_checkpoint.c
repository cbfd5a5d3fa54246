/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints of TINY: to stop and go on is as not to stop, on the same and on
 * any other layout. Layouts of fewer ranks run on a part of the ranks.
 * Usage: rank_checkpoint bitwise|relayout|twelve|gather|experts|weights FOLDER
 * [KEY=VALUE]... */
#include "tiny.h"

#include "base/alloc.h"
#include "base/check.h"
#include "train/save.h"

#include <math.h>
#include <moezero/checkpoint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ARGUMENTS: of the command line; the tests have assignments of their own. */
enum {
  MAX_ASSIGNMENTS = 16,
  ARGUMENTS = 8,
  HALF = 10,
  PARTS = MZ_CKPT_NUM_PARTS
};

static const mz_tensor_part_t part_of[PARTS] = {
    MZ_PART_WEIGHTS, MZ_PART_EXP_AVG, MZ_PART_EXP_AVG_SQ};

typedef struct layout {
  int np, ep, stage;
} layout_t;

typedef struct tests {
  int rank, world, num_run, num_failed;
  const char *folder;
  const char *given[MAX_ASSIGNMENTS]; /* further assignments of a test */
  int num_given;
} tests_t;

static void report(tests_t *t, const char *name, mz_status_t st)
{
  int ok = st == MZ_OK, all_ok = 0;

  MPI_Allreduce(&ok, &all_ok, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  t->num_run++;
  t->num_failed += !all_ok;
  if (!ok)
    fprintf(stderr, "rank %d: %s: %s: %s\n", t->rank, name, mz_status_text(st),
            mz_error_last());
}

static mz_status_t create(const tests_t *t, layout_t l, int batch,
                          MPI_Comm comm, tiny_t *tiny_out)
{
  char own[4][64];
  const char *all[MAX_ASSIGNMENTS + 4];
  int n = 0;

  snprintf(own[0], 64, "moe.ep_size=%d", l.ep);
  snprintf(own[1], 64, "zero_optimization.stage=%d", l.stage);
  snprintf(own[2], 64, "train_micro_batch_size_per_gpu=%d", batch / l.np);
  snprintf(own[3], 64, "train_batch_size=%d", batch);
  for (; n < 4; n++)
    all[n] = own[n];
  for (int i = 0; i < t->num_given; i++)
    all[n++] = t->given[i];
  return MZ_TRACE(tiny_create(all, n, comm, tiny_out));
}

/* The first np ranks; MPI_COMM_NULL on the others. */
static MPI_Comm first_ranks(const tests_t *t, int np)
{
  MPI_Comm part;

  MPI_Comm_split(MPI_COMM_WORLD, t->rank < np ? 0 : MPI_UNDEFINED, t->rank,
                 &part);
  return part;
}

/* What a step leaves: with its expert counts, routed and kept, and the bits of
 * the gates' biases, as one sum in which each has a weight of its own. */
typedef struct step {
  double loss, grad_norm;
  uint64_t counts;
} step_t;

static uint64_t sum_counts(const mz_step_result_t *r)
{
  uint64_t sum = 0;
  uint32_t bits;

  for (int32_t m = 0; m < r->num_moes; m++)
    for (int32_t e = 0; e < r->moes[m].num_experts; e++) {
      sum = 31 * sum + (uint64_t)r->moes[m].routed[e];
      sum = 31 * sum + (uint64_t)r->moes[m].kept[e];
      if (!r->moes[m].bias) continue;
      memcpy(&bits, &r->moes[m].bias[e], sizeof bits);
      sum = 31 * sum + bits;
    }
  return sum;
}

/* Steps until there are @p until; results[step - 1] of those. */
static mz_status_t train(tiny_t *tiny, int until, step_t *results)
{
  while (mz_engine_steps(tiny->engine) < until) {
    step_t *s = &results[mz_engine_steps(tiny->engine)];
    mz_step_result_t r;

    MZ_TRY(tiny_step(tiny, &r));
    *s = (step_t){r.loss, r.grad_norm, sum_counts(&r)};
  }
  return MZ_OK;
}

static int64_t num_values(const mz_decl_t *decl)
{
  int64_t n = 0;

  for (int32_t i = 0; i < mz_decl_num_tensors(decl); i++)
    n += mz_decl_tensor_elements(decl, i);
  return n;
}

/* Weights and moments, whole: [parts, elements]. */
static mz_status_t read_all(tiny_t *tiny, float **values_out)
{
  int64_t at = 0;

  MZ_TRY(mz_new(PARTS * num_values(tiny->decl), "values", values_out));
  for (int p = 0; p < PARTS; p++)
    for (int32_t i = 0; i < mz_decl_num_tensors(tiny->decl); i++) {
      MZ_TRY(mz_engine_read(tiny->engine, i, part_of[p], *values_out + at));
      at += mz_decl_tensor_elements(tiny->decl, i);
    }
  return MZ_OK;
}

static mz_status_t same_values(const tiny_t *tiny, const float *a,
                               const float *b)
{
  int64_t n = PARTS * num_values(tiny->decl);

  for (int64_t i = 0; i < n; i++)
    MZ_REQUIRE(memcmp(&a[i], &b[i], sizeof *a) == 0, MZ_ERR_DATA,
               "value %" PRId64 " of %" PRId64 " is %.9g, not %.9g", i, n,
               (double)b[i], (double)a[i]);
  return MZ_OK;
}

/* Relative; bound 0: the same bits. */
static mz_status_t same_results(const step_t *a, const step_t *b, int first,
                                int last, double bound)
{
  for (int i = first; i < last; i++) {
    MZ_REQUIRE(fabs(a[i].loss - b[i].loss) <= bound * fabs(a[i].loss) &&
                   fabs(a[i].grad_norm - b[i].grad_norm) <=
                       bound * a[i].grad_norm,
               MZ_ERR_DATA, "step %d: loss %.17g, norm %.17g; not %.17g, %.17g",
               i + 1, b[i].loss, b[i].grad_norm, a[i].loss, a[i].grad_norm);
    MZ_REQUIRE(bound > 0 || a[i].counts == b[i].counts, MZ_ERR_DATA,
               "step %d: the expert counts differ", i + 1);
  }
  return MZ_OK;
}

static mz_status_t resume_at(tiny_t *tiny, const char *dir)
{
  return MZ_TRACE(mz_save_resume(tiny->engine, tiny->config, dir, NULL, NULL));
}

/* --- bitwise: the same layout --- */

static mz_status_t stop_and_go_on(const tests_t *t, layout_t l, MPI_Comm comm,
                                  const char *dir)
{
  step_t straight[2 * HALF], halves[2 * HALF];
  float *wanted = NULL, *found = NULL;
  tiny_t tiny = {0};
  mz_status_t st;

  MZ_TRY_GOTO(st, create(t, l, 8, comm, &tiny), done);
  MZ_TRY_GOTO(st, train(&tiny, 2 * HALF, straight), done);
  MZ_TRY_GOTO(st, read_all(&tiny, &wanted), done);
  tiny_destroy(&tiny);
  MZ_TRY_GOTO(st, create(t, l, 8, comm, &tiny), done);
  MZ_TRY_GOTO(st, train(&tiny, HALF, halves), done);
  MZ_TRY_GOTO(st, mz_save_step(tiny.engine, tiny.config, dir), done);
  tiny_destroy(&tiny);
  MZ_TRY_GOTO(st, create(t, l, 8, comm, &tiny), done);
  MZ_TRY_GOTO(st, resume_at(&tiny, dir), done);
  MZ_REQUIRE_GOTO(mz_engine_steps(tiny.engine) == HALF, st, done, MZ_ERR_DATA,
                  "resumed at step %" PRId64, mz_engine_steps(tiny.engine));
  MZ_TRY_GOTO(st, train(&tiny, 2 * HALF, halves), done);
  MZ_TRY_GOTO(st, same_results(straight, halves, 0, 2 * HALF, 0), done);
  MZ_TRY_GOTO(st, read_all(&tiny, &found), done);
  MZ_TRY_GOTO(st, same_values(&tiny, wanted, found), done);
done:
  tiny_destroy(&tiny);
  mz_free(wanted);
  mz_free(found);
  return st;
}

static void test_bitwise(tests_t *t)
{
  static const int sizes[][2] = {{1, 1}, {2, 1}, {2, 2}, {4, 1}, {4, 2}};

  t->given[t->num_given++] = "model.dropout=0.1";
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
    for (int stage = 0; stage <= 3; stage++) {
      layout_t l = {sizes[i][0], sizes[i][1], stage};
      char name[64], dir[512];
      MPI_Comm comm;
      mz_status_t st = MZ_OK;

      if (l.np > t->world) continue;
      comm = first_ranks(t, l.np);
      snprintf(name, sizeof name, "np%d-ep%d-stage%d", l.np, l.ep, stage);
      snprintf(dir, sizeof dir, "%s/%s", t->folder, name);
      if (comm != MPI_COMM_NULL) st = stop_and_go_on(t, l, comm, dir);
      if (comm != MPI_COMM_NULL) MPI_Comm_free(&comm);
      report(t, name, st);
    }
}

/* --- relayout: another one --- */

typedef struct unstopped {
  layout_t layout;
  step_t results[2 * HALF];
  float *values; /* at the save */
} unstopped_t;

static mz_status_t run_unstopped(const tests_t *t, unstopped_t *u, int batch,
                                 MPI_Comm comm)
{
  tiny_t tiny = {0};
  mz_status_t st;

  MZ_TRY_GOTO(st, create(t, u->layout, batch, comm, &tiny), done);
  MZ_TRY_GOTO(st, train(&tiny, HALF, u->results), done);
  MZ_TRY_GOTO(st, mz_save_step(tiny.engine, tiny.config, t->folder), done);
  MZ_TRY_GOTO(st, read_all(&tiny, &u->values), done);
  MZ_TRY_GOTO(st, train(&tiny, 2 * HALF, u->results), done);
done:
  tiny_destroy(&tiny);
  return st;
}

static mz_status_t go_on(const tests_t *t, const unstopped_t *u, layout_t l,
                         int batch, MPI_Comm comm)
{
  step_t results[2 * HALF];
  float *found = NULL;
  tiny_t tiny = {0};
  mz_status_t st;

  MZ_TRY_GOTO(st, create(t, l, batch, comm, &tiny), done);
  MZ_TRY_GOTO(st, resume_at(&tiny, t->folder), done);
  MZ_TRY_GOTO(st, read_all(&tiny, &found), done);
  MZ_TRY_GOTO(st, same_values(&tiny, u->values, found), done);
  MZ_TRY_GOTO(st, train(&tiny, 2 * HALF, results), done);
  MZ_TRY_GOTO(st, same_results(u->results, results, HALF, 2 * HALF, 1e-5),
              done);
done:
  tiny_destroy(&tiny);
  mz_free(found);
  return st;
}

static void try_layouts(tests_t *t, layout_t from, int batch,
                        const layout_t *to, int num)
{
  unstopped_t u = {.layout = from};
  MPI_Comm comm = first_ranks(t, from.np);
  mz_status_t st = MZ_OK;

  if (comm != MPI_COMM_NULL) st = run_unstopped(t, &u, batch, comm);
  report(t, "the run that saves", st);
  if (comm != MPI_COMM_NULL) MPI_Comm_free(&comm);
  for (int i = 0; i < num; i++) {
    char name[64];

    comm = first_ranks(t, to[i].np);
    snprintf(name, sizeof name, "to np %d ep %d stage %d", to[i].np, to[i].ep,
             to[i].stage);
    st = comm == MPI_COMM_NULL ? MZ_OK : go_on(t, &u, to[i], batch, comm);
    report(t, name, st);
    if (comm != MPI_COMM_NULL) MPI_Comm_free(&comm);
  }
  mz_free(u.values);
}

static void test_relayout(tests_t *t)
{
  static const layout_t to[] = {{2, 1, 1}, {1, 1, 0}, {3, 1, 2},
                                {4, 4, 0}, {2, 2, 3}, {3, 1, 3}};

  try_layouts(t, (layout_t){4, 2, 3}, 12, to, 6);
}

/* Twelve files, whose names sort as 0, 1, 10, 11, 2. */
static void test_twelve(tests_t *t)
{
  static const layout_t to[] = {{5, 1, 1}, {6, 2, 3}};

  t->given[t->num_given++] = "comm.thread=false";
  try_layouts(t, (layout_t){12, 4, 3}, 60, to, 2);
}

/* --- gather: the file against the parameters --- */

static mz_status_t compare_file(const char *path, const tiny_t *tiny,
                                const float *values)
{
  mz_ckpt_t *file = NULL;
  float *read = NULL;
  int64_t at = 0, total = num_values(tiny->decl);
  mz_status_t st;

  MZ_TRY_GOTO(st, mz_ckpt_open(path, &file), done);
  MZ_REQUIRE_GOTO(mz_ckpt_num_tensors(file) == mz_decl_num_tensors(tiny->decl),
                  st, done, MZ_ERR_DATA, "%d tensors",
                  mz_ckpt_num_tensors(file));
  MZ_TRY_GOTO(st, mz_new(total, "read", &read), done);
  for (int p = 0; p < PARTS; p++)
    for (int32_t i = 0; i < mz_decl_num_tensors(tiny->decl); i++) {
      const char *name = mz_decl_tensor_name(tiny->decl, i);
      int64_t n = mz_decl_tensor_elements(tiny->decl, i);
      int32_t tensor = mz_ckpt_find(file, name);

      MZ_TRY_GOTO(st, mz_ckpt_read(file, tensor, (mz_ckpt_part_t)p, 0, n, read),
                  done);
      MZ_REQUIRE_GOTO(memcmp(read, values + at, (size_t)n * 4) == 0, st, done,
                      MZ_ERR_DATA, "%s: part %d differs", name, p);
      at += n;
    }
done:
  mz_ckpt_close(&file);
  mz_free(read);
  return st;
}

static mz_status_t gather_one(const tests_t *t, layout_t l)
{
  char dir[512], path[600];
  float *values = NULL;
  tiny_t tiny = {0};
  mz_ckpt_t *ckpt = NULL;
  mz_ckpt_gather_opts_t opts = {path, MZ_F32, true};
  mz_status_t st;

  snprintf(dir, sizeof dir, "%s/stage%d", t->folder, l.stage);
  snprintf(path, sizeof path, "%s/full.h5", dir);
  MZ_TRY_GOTO(st, create(t, l, 8, MPI_COMM_WORLD, &tiny), done);
  for (int i = 0; i < 3; i++) {
    mz_step_result_t result;
    MZ_TRY_GOTO(st, tiny_step(&tiny, &result), done);
  }
  MZ_TRY_GOTO(st, read_all(&tiny, &values), done);
  MZ_TRY_GOTO(st, mz_save_step(tiny.engine, tiny.config, dir), done);
  if (t->rank != 0) goto done;
  MZ_TRY_GOTO(st, mz_ckpt_open(dir, &ckpt), done);
  MZ_TRY_GOTO(st, mz_ckpt_gather(ckpt, &opts), done);
  MZ_TRY_GOTO(st, compare_file(path, &tiny, values), done);
  MZ_TRY_GOTO(st, compare_file(mz_ckpt_path(ckpt), &tiny, values), done);
done:
  mz_ckpt_close(&ckpt);
  tiny_destroy(&tiny);
  mz_free(values);
  return st;
}

static void test_gather(tests_t *t)
{
  t->given[t->num_given++] = "moe.num_experts=[4,8]";
  for (int stage = 0; stage <= 3; stage++) {
    char name[32];

    snprintf(name, sizeof name, "stage %d", stage);
    report(t, name, gather_one(t, (layout_t){4, 2, stage}));
  }
}

/* --- experts: each to its own place --- */

/* Global expert e: weights e + 1, moments 10 (e + 1) and 100 (e + 1). */
static float constant_of(const char *name, int part)
{
  static const float factor[PARTS] = {1, 10, 100};
  const char *experts = strstr(name, ".experts.");

  return experts ? factor[part] * (float)(atoi(experts + 9) + 1) : 0.5f;
}

static mz_status_t fill(tiny_t *tiny)
{
  float *values = NULL;
  mz_status_t st = MZ_OK;

  MZ_TRY(mz_new(num_values(tiny->decl), "values", &values));
  for (int p = 0; p < PARTS && st == MZ_OK; p++)
    for (int32_t i = 0; i < mz_decl_num_tensors(tiny->decl); i++) {
      const char *name = mz_decl_tensor_name(tiny->decl, i);

      for (int64_t j = 0; j < mz_decl_tensor_elements(tiny->decl, i); j++)
        values[j] = constant_of(name, p);
      MZ_TRY_GOTO(st, mz_engine_write(tiny->engine, i, part_of[p], values),
                  done);
    }
done:
  mz_free(values);
  return st;
}

static mz_status_t expect_filled(const tiny_t *tiny, const float *values)
{
  int64_t at = 0;

  for (int p = 0; p < PARTS; p++)
    for (int32_t i = 0; i < mz_decl_num_tensors(tiny->decl); i++) {
      const char *name = mz_decl_tensor_name(tiny->decl, i);

      for (int64_t j = 0; j < mz_decl_tensor_elements(tiny->decl, i); j++, at++)
        MZ_REQUIRE(values[at] == constant_of(name, p), MZ_ERR_DATA,
                   "%s[%" PRId64 "], part %d is %g", name, j, p,
                   (double)values[at]);
    }
  return MZ_OK;
}

static mz_status_t fill_and_save(const tests_t *t, layout_t l, MPI_Comm comm,
                                 const char *dir)
{
  tiny_t tiny = {0};
  mz_status_t st;

  MZ_TRY_GOTO(st, create(t, l, 8, comm, &tiny), done);
  MZ_TRY_GOTO(st, fill(&tiny), done);
  MZ_TRY_GOTO(st, mz_save_step(tiny.engine, tiny.config, dir), done);
done:
  tiny_destroy(&tiny);
  return st;
}

static mz_status_t load_filled(const tests_t *t, layout_t l, MPI_Comm comm,
                               const char *dir)
{
  float *values = NULL;
  tiny_t tiny = {0};
  mz_ckpt_t *ckpt = NULL;
  mz_status_t st;

  MZ_TRY_GOTO(st, create(t, l, 8, comm, &tiny), done);
  MZ_TRY_GOTO(st, resume_at(&tiny, dir), done);
  MZ_TRY_GOTO(st, read_all(&tiny, &values), done);
  MZ_TRY_GOTO(st, expect_filled(&tiny, values), done);
  MZ_TRY_GOTO(st, mz_ckpt_open(dir, &ckpt), done);
  MZ_TRY_GOTO(st, compare_file(mz_ckpt_path(ckpt), &tiny, values), done);
done:
  mz_ckpt_close(&ckpt);
  tiny_destroy(&tiny);
  mz_free(values);
  return st;
}

static void try_experts(tests_t *t, layout_t l)
{
  MPI_Comm all = first_ranks(t, l.np), two = first_ranks(t, 2);
  char dir[512];
  mz_status_t st = MZ_OK;

  snprintf(dir, sizeof dir, "%s/np%d-stage%d", t->folder, l.np, l.stage);
  if (all != MPI_COMM_NULL) st = fill_and_save(t, l, all, dir);
  report(t, "filled experts", st);
  l.np = 2;
  if (two != MPI_COMM_NULL) st = load_filled(t, l, two, dir);
  report(t, dir, st);
  if (all != MPI_COMM_NULL) MPI_Comm_free(&all);
  if (two != MPI_COMM_NULL) MPI_Comm_free(&two);
}

static void test_experts(tests_t *t)
{
  for (int np = 2; np <= 4; np += 2)
    for (int stage = 0; stage <= 3; stage++)
      try_experts(t, (layout_t){np, 2, stage});
}

/* --- weights: a start from them --- */

static mz_status_t start_from(const tests_t *t, layout_t l, const char *path,
                              const float *weights, double loss)
{
  tests_t still = *t;
  float *found = NULL;
  tiny_t tiny = {0};
  mz_step_result_t result;
  mz_status_t st;

  still.given[still.num_given++] = "optimizer.params.lr=0";
  MZ_TRY_GOTO(st, create(&still, l, 8, MPI_COMM_WORLD, &tiny), done);
  MZ_TRY_GOTO(st, mz_save_init_from(tiny.engine, path), done);
  MZ_REQUIRE_GOTO(mz_engine_steps(tiny.engine) == 0, st, done, MZ_ERR_DATA,
                  "steps came with the weights");
  MZ_TRY_GOTO(st, tiny_step(&tiny, &result), done);
  MZ_TRY_GOTO(st, read_all(&tiny, &found), done);
  MZ_REQUIRE_GOTO(memcmp(found, weights, (size_t)num_values(tiny.decl) * 4) ==
                      0,
                  st, done, MZ_ERR_DATA, "the step changed the weights");
  tiny_destroy(&tiny);
  MZ_TRY_GOTO(st, create(t, l, 8, MPI_COMM_WORLD, &tiny), done);
  MZ_TRY_GOTO(st, mz_save_init_from(tiny.engine, path), done);
  MZ_TRY_GOTO(st, tiny_step(&tiny, &result), done);
  MZ_REQUIRE_GOTO(fabs(result.loss - loss) < 0.05 * loss, st, done, MZ_ERR_DATA,
                  "loss %g after a start from loss %g", result.loss, loss);
done:
  tiny_destroy(&tiny);
  mz_free(found);
  return st;
}

/* Batches repeat only by their kind: the same steps give the same data. */
static mz_status_t train_and_gather(const tests_t *t, float **weights,
                                    double *loss_out)
{
  char path[600];
  tiny_t tiny = {0};
  step_t results[2 * HALF];
  mz_ckpt_t *ckpt = NULL;
  mz_ckpt_gather_opts_t opts = {path, MZ_F32, false};
  mz_status_t st;

  snprintf(path, sizeof path, "%s/full.h5", t->folder);
  MZ_TRY_GOTO(st, create(t, (layout_t){2, 2, 3}, 8, MPI_COMM_WORLD, &tiny),
              done);
  MZ_TRY_GOTO(st, train(&tiny, 2 * HALF, results), done);
  MZ_TRY_GOTO(st, read_all(&tiny, weights), done);
  *loss_out = results[2 * HALF - 1].loss;
  MZ_TRY_GOTO(st, mz_save_step(tiny.engine, tiny.config, t->folder), done);
  if (t->rank != 0) goto done;
  MZ_TRY_GOTO(st, mz_ckpt_open(t->folder, &ckpt), done);
  MZ_TRY_GOTO(st, mz_ckpt_gather(ckpt, &opts), done);
done:
  mz_ckpt_close(&ckpt);
  tiny_destroy(&tiny);
  return st;
}

static void test_weights(tests_t *t)
{
  char path[600];
  float *weights = NULL;
  double loss = 0;
  mz_status_t st = train_and_gather(t, &weights, &loss);

  report(t, "the run that saves", st);
  snprintf(path, sizeof path, "%s/full.h5", t->folder);
  for (int stage = 0; stage <= 3; stage++) {
    layout_t l = {2, 1 + stage % 2, stage};

    report(t, "from a checkpoint", start_from(t, l, t->folder, weights, loss));
    report(t, "from one file", start_from(t, l, path, weights, loss));
  }
  mz_free(weights);
}

int main(int argc, char **argv)
{
  static const struct {
    const char *name;
    void (*run)(tests_t *t);
  } all[] = {{"bitwise", test_bitwise}, {"relayout", test_relayout},
             {"twelve", test_twelve},   {"gather", test_gather},
             {"experts", test_experts}, {"weights", test_weights}};
  tests_t t = {.folder = argc > 2 ? argv[2] : ""};
  int provided;

  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &t.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &t.world);
  for (int i = 3; i < argc && t.num_given < ARGUMENTS; i++)
    t.given[t.num_given++] = argv[i];
  mkdir(t.folder, 0777);
  for (size_t i = 0; i < sizeof all / sizeof all[0] && argc > 2; i++)
    if (strcmp(argv[1], all[i].name) == 0) all[i].run(&t);
  if (t.rank == 0) printf("%d checks, %d failed\n", t.num_run, t.num_failed);
  MPI_Finalize();
  return t.num_failed > 0 || t.num_run == 0;
}
