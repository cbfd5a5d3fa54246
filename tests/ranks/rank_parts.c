/* SPDX-License-Identifier: Apache-2.0 */
/* wall_clock_breakdown on any number of ranks, at every stage:
 *   rank_parts add     the parts of a step are those of the model, and add up
 *   rank_parts same    no bit of the training is another one; off: no part
 *   rank_parts delay   messages that are late are no gaps
 * A last word "inline" runs without the communication thread, "cuda" on a GPU;
 * there a late message is seen only as far as the GPU waits for it, so not with
 * delay. Exit code 0: all is right. */
#include "tiny.h"

#include "base/check.h"
#include "train/engine_impl.h"

#include <stdio.h>
#include <string.h>

enum { NUM_STAGES = 4, NUM_STEPS = 10, DELAY_MS = 5 };

static int world_size;
static const char *device = "cpu";

/* A dense block and one with experts; micro-batches, experts on all ranks. */
static void give_model(tiny_given_t *g, int stage, bool breakdown)
{
  tiny_give(g, "train.device=%s", device);
  tiny_give(g, "moe.layers={\"every\": 2}");
  tiny_give(g, "moe.ep_size=%d", world_size);
  tiny_give(g, "train_batch_size=%d", 4 * world_size);
  tiny_give(g, "gradient_accumulation_steps=2");
  tiny_give(g, "gradient_clipping=1.0");
  tiny_give(g, "moe.aux_loss=load_balancing");
  tiny_give(g, "zero_optimization.stage=%d", stage);
  tiny_give(g, "wall_clock_breakdown=%s", breakdown ? "true" : "false");
}

/* Milliseconds of a part, and of all that begin with it and a dot. */
static double part(const mz_step_result_t *r, const char *name)
{
  size_t length = strlen(name);
  double sum = 0;

  for (int32_t i = 0; i < r->num_parts; i++) {
    const char *other = r->parts_ms[i].name;
    if (strncmp(other, name, length) == 0 &&
        (other[length] == '\0' || other[length] == '.'))
      sum += r->parts_ms[i].value;
  }
  return sum;
}

static mz_status_t expect(const mz_step_result_t *r, const char *name)
{
  MZ_REQUIRE(part(r, name) > 0, MZ_ERR_DATA, "no %s in step %" PRId64, name,
             r->step);
  return MZ_OK;
}

/* --- add --- */

static mz_status_t expect_steps(const tiny_t *tiny, const mz_step_result_t *r)
{
  const mz_decl_t *d = tiny->decl;

  for (int pass = 0; pass < 2; pass++)
    for (int64_t s = 0; s < d->num_steps[pass]; s++) {
      const mz_step_t *step = &d->steps[pass][s];
      int32_t modes = step->compute.modes;

      if (step->kind == MZ_STEP_COMPUTE && (!modes || modes & MZ_IN_TRAIN))
        MZ_TRY(expect(r, step->compute.name));
    }
  return MZ_OK;
}

static mz_status_t expect_rest(const mz_step_result_t *r, int stage)
{
  static const char *const always[] = {"gaps",
                                       "attention.linear",
                                       "attention.attention",
                                       "attention_grad.linear_dgrad",
                                       "attention_grad.linear_wgrad",
                                       "attention_grad.attention_grad",
                                       "mlp.linear",
                                       "mlp_grad.gelu",
                                       "experts.linear",
                                       "experts_wgrad.linear_wgrad",
                                       "route.gate",
                                       "route.permute",
                                       "route_grad.gate_grad",
                                       "combine.combine",
                                       "loss_grad.xent",
                                       "update.sum_squares",
                                       "update.adamw",
                                       "message.counts",
                                       "message.tokens",
                                       "message.statistics",
                                       "message.scalars"};

  for (size_t i = 0; i < sizeof always / sizeof always[0]; i++)
    MZ_TRY(expect(r, always[i]));
  if (world_size == 1) return MZ_OK;
  MZ_TRY(expect(r, "bulk.reduce_ranks"));
  MZ_TRY(expect(r, "message.grads"));
  if (stage == 1 || stage == 2) MZ_TRY(expect(r, "message.weights"));
  if (stage == 3) MZ_TRY(expect(r, "message.params"));
  return MZ_OK;
}

static mz_status_t try_add(int stage)
{
  tiny_given_t g = {.num = 0};
  double all = 0, steps = 0, sum;
  mz_step_result_t r;
  tiny_t tiny;
  mz_status_t st;

  give_model(&g, stage, true);
  MZ_TRY_GOTO(st, tiny_create(g.all, g.num, MPI_COMM_WORLD, &tiny), done);
  for (int i = 0; i < NUM_STEPS; i++) {
    MZ_TRY_GOTO(st, tiny_step(&tiny, &r), done);
    MZ_TRY_GOTO(st, expect_steps(&tiny, &r), done);
    MZ_TRY_GOTO(st, expect_rest(&r, stage), done);
    sum = 0;
    for (int32_t k = 0; k < r.num_parts; k++)
      sum += r.parts_ms[k].value;
    /* two clocks: the device's, in steps of its own, and the host's */
    MZ_REQUIRE_GOTO(sum <= 1.01 * r.ms, st, done, MZ_ERR_DATA,
                    "parts of %g ms in a step of %g ms", sum, r.ms);
    all += sum;
    steps += r.ms;
  }
  MZ_REQUIRE_GOTO(all >= 0.5 * steps, st, done, MZ_ERR_DATA,
                  "parts of %g ms in steps of %g ms", all, steps);
done:
  tiny_destroy(&tiny);
  return st;
}

/* --- same --- */

static mz_status_t run(int stage, bool breakdown, tiny_run_t *out)
{
  tiny_given_t g = {.num = 0};

  give_model(&g, stage, breakdown);
  return MZ_TRACE(tiny_run(g.all, g.num, MPI_COMM_WORLD, NUM_STEPS, out));
}

static mz_status_t expect_none(int stage)
{
  tiny_given_t g = {.num = 0};
  mz_step_result_t r;
  tiny_t tiny;
  mz_status_t st;

  give_model(&g, stage, false);
  MZ_TRY_GOTO(st, tiny_create(g.all, g.num, MPI_COMM_WORLD, &tiny), done);
  MZ_TRY_GOTO(st, tiny_step(&tiny, &r), done);
  MZ_REQUIRE_GOTO(r.num_parts == 0 && !r.parts_ms, st, done, MZ_ERR_DATA,
                  "%d parts without the key", r.num_parts);
done:
  tiny_destroy(&tiny);
  return st;
}

static mz_status_t try_same(int stage)
{
  tiny_run_t off = {.num_steps = 0}, on = {.num_steps = 0};
  mz_status_t st;

  MZ_TRY_GOTO(st, run(stage, false, &off), done);
  MZ_TRY_GOTO(st, run(stage, true, &on), done);
  MZ_REQUIRE_GOTO(memcmp(off.loss, on.loss, sizeof off.loss) == 0 &&
                      off.hash == on.hash,
                  st, done, MZ_ERR_DATA, "the training is another one");
  MZ_TRY_GOTO(st, expect_none(stage), done);
done:
  tiny_run_free(&off);
  tiny_run_free(&on);
  return st;
}

/* --- delay --- */

/* Each message of the exchange lane is posted late: the scalars before the
 * first micro-batch and after the last; of the one MoE layer in each of two
 * micro-batches counts once, tokens there and back, forward and backward. */
static mz_status_t try_delay(int stage)
{
  tiny_given_t g = {.num = 0};
  mz_step_result_t r;
  tiny_t tiny;
  mz_status_t st;

  give_model(&g, stage, true);
  tiny_give(&g, "debug.delay_ms=%d", DELAY_MS);
  MZ_TRY_GOTO(st, tiny_create(g.all, g.num, MPI_COMM_WORLD, &tiny), done);
  MZ_TRY_GOTO(st, tiny_step(&tiny, &r), done);
  MZ_REQUIRE_GOTO(part(&r, "message.scalars") >= 2 * DELAY_MS &&
                      part(&r, "message.counts") >= 2 * DELAY_MS &&
                      part(&r, "message.tokens") >= 8 * DELAY_MS,
                  st, done, MZ_ERR_DATA, "scalars %g ms, counts %g, tokens %g",
                  part(&r, "message.scalars"), part(&r, "message.counts"),
                  part(&r, "message.tokens"));
  MZ_REQUIRE_GOTO(part(&r, "gaps") < part(&r, "message"), st, done, MZ_ERR_DATA,
                  "step %g ms, messages %g, gaps %g", r.ms, part(&r, "message"),
                  part(&r, "gaps"));
done:
  tiny_destroy(&tiny);
  return st;
}

int main(int argc, char **argv)
{
  static const struct {
    const char *name;
    mz_status_t (*attempt)(int stage);
  } cases[] = {{"add", try_add}, {"same", try_same}, {"delay", try_delay}};
  int provided, found = 0;

  if (argc < 2) return 2;
  tiny_inline = strcmp(argv[argc - 1], "inline") == 0;
  if (strcmp(argv[argc - 1], "cuda") == 0) device = "cuda";
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    if (strcmp(argv[1], cases[i].name) != 0) continue;
    found = 1;
    for (int stage = 0; stage < NUM_STAGES; stage++)
      tiny_report(cases[i].attempt(stage), "%s, stage %d", cases[i].name,
                  stage);
  }
  MPI_Finalize();
  return found ? tiny_num_failed > 0 : 2;
}
