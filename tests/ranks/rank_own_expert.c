/* SPDX-License-Identifier: Apache-2.0 */
/* An expert that is not ours, through the public headers alone: element h of
 * its output is scale_h x_h + curve_h x_h^2. Beside the experts stands a
 * residual MLP. Gradients equal central differences of the loss on one rank,
 * and every layout of the ranks equals one rank in losses and weights. The
 * first rows of an expert write its gradient, in whichever round they come, and
 * later ones add to it. Usage: rank_own_expert [SEED]. Exit code 0: all agree.
 */
#include <moezero/engine.h>
#include <moezero/moe.h>
#include <moezero/random.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  WIDTH = 8,
  EXPERTS = 4,
  BATCH = 4,
  LENGTH = 4,
  STEPS = 5,
  MAX_ELEMENTS = 256, /* of a tensor */
  MAX_VALUES = 4096   /* of all */
};

static const char settings[] =
    "{\"train_batch_size\": 4, \"data\": {\"sequence_length\": 4},"
    " \"train\": {\"device\": \"cpu\", \"watchdog_s\": 30},"
    " \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 0.01,"
    " \"eps\": 1e-4}}}";

/* Of weights around 1 in fp32 after 5 steps of 0.01, and of the loss; slopes of
 * fp32 losses over a step of 4e-3. */
static const double APART = 1e-5, SLOPES = 1e-3;

static uint64_t seed = 1;

#define TRY(call)                                                              \
  do {                                                                         \
    mz_status_t st_ = (call);                                                  \
    if (st_ != MZ_OK) return st_;                                              \
  } while (0)

/* --- the expert --- */

typedef struct own {
  int32_t scale, curve;  /* tensors [H] of global expert 0 */
  bool has_had[EXPERTS]; /* rows in backward of this step */
} own_t;

static mz_status_t own_declare(void *self, mz_decl_t *decl, int32_t moe)
{
  own_t *own = self;
  mz_tensor_opts_t opts = {.name = "scale",
                           .ndim = 1,
                           .shape = {WIDTH},
                           .init = MZ_INIT_ONE,
                           .param_group = MZ_GROUP_NO_DECAY};

  TRY(mz_decl_expert_tensor(decl, moe, &opts, &own->scale));
  opts.name = "curve";
  return mz_decl_expert_tensor(decl, moe, &opts, &own->curve);
}

static int64_t own_saved_width(const void *self) { return WIDTH; }
static int64_t own_scratch_width(const void *self) { return 0; }
static double own_operations(const void *self) { return 3 * WIDTH; }

static mz_status_t own_forward(void *self, const mz_call_t *call,
                               const mz_expert_rows_t *rows)
{
  const own_t *own = self;
  const mz_window_t *w = rows->window;
  const float *x = rows->x;
  float *y = rows->y, *squares = rows->saved;

  for (int32_t e = 0; e < w->num_experts; e++) {
    const float *scale = call->weights[own->scale + w->first_expert + e];
    const float *curve = call->weights[own->curve + w->first_expert + e];

    for (int32_t i = w->offsets[e] * WIDTH; i < w->offsets[e + 1] * WIDTH;
         i++) {
      squares[i] = x[i] * x[i];
      y[i] = scale[i % WIDTH] * x[i] + curve[i % WIDTH] * squares[i];
    }
  }
  return MZ_OK;
}

/* The array of a tensor's gradient, zeroed where it is not added to. */
static float *grad_of(const mz_call_t *call, int32_t tensor)
{
  float *grad = call->grads[tensor];

  if (!call->accumulate[tensor]) memset(grad, 0, WIDTH * sizeof *grad);
  return grad;
}

static mz_status_t check_flag(own_t *own, const mz_call_t *call, int32_t expert)
{
  int flag = call->accumulate[own->scale + expert];

  if (flag != own->has_had[expert])
    return mz_error_set(MZ_ERR_DATA, __FILE__, __LINE__, __func__,
                        "expert %d: accumulate is %d", (int)expert, flag);
  own->has_had[expert] = true;
  return MZ_OK;
}

/* d x is written, x is still read by what adds to the gradients. */
static mz_status_t own_input(void *self, const mz_call_t *call,
                             const mz_expert_rows_t *rows)
{
  own_t *own = self;
  const mz_window_t *w = rows->window;
  const float *x = rows->x, *dy = rows->dy;
  float *dx = rows->dx;

  for (int32_t e = 0; e < w->num_experts; e++) {
    const float *scale = call->weights[own->scale + w->first_expert + e];
    const float *curve = call->weights[own->curve + w->first_expert + e];

    for (int32_t i = w->offsets[e] * WIDTH; i < w->offsets[e + 1] * WIDTH; i++)
      dx[i] = dy[i] * (scale[i % WIDTH] + 2 * curve[i % WIDTH] * x[i]);
  }
  return MZ_OK;
}

static mz_status_t own_weights(void *self, const mz_call_t *call,
                               const mz_expert_rows_t *rows)
{
  own_t *own = self;
  const mz_window_t *w = rows->window;
  const float *x = rows->x, *dy = rows->dy, *squares = rows->saved;

  for (int32_t e = 0; e < w->num_experts; e++) {
    int32_t global = w->first_expert + e;
    float *d_scale = grad_of(call, own->scale + global);
    float *d_curve = grad_of(call, own->curve + global);

    if (w->offsets[e] < w->offsets[e + 1]) TRY(check_flag(own, call, global));
    for (int32_t i = w->offsets[e] * WIDTH; i < w->offsets[e + 1] * WIDTH;
         i++) {
      d_scale[i % WIDTH] += dy[i] * x[i];
      d_curve[i % WIDTH] += dy[i] * squares[i];
    }
  }
  return MZ_OK;
}

static mz_status_t own_backward(void *self, const mz_call_t *call,
                                const mz_expert_rows_t *rows)
{
  TRY(own_weights(self, call, rows));
  return own_input(self, call, rows);
}

/* Both gradients by one function, and those of the weights apart. */
static const mz_expert_ops_t own_expert = {.name = "scale and curve",
                                           .declare = own_declare,
                                           .saved_width = own_saved_width,
                                           .scratch_width = own_scratch_width,
                                           .forward = own_forward,
                                           .backward = own_backward,
                                           .operations = own_operations};
static const mz_expert_ops_t own_in_two = {.name = "scale and curve",
                                           .declare = own_declare,
                                           .saved_width = own_saved_width,
                                           .scratch_width = own_scratch_width,
                                           .forward = own_forward,
                                           .backward = own_input,
                                           .backward_weights = own_weights,
                                           .operations = own_operations};
static const mz_expert_ops_t *used = &own_expert;

/* --- around it: vectors of the token ids times a gain, and half the squared
 * distance to others as the loss --- */

typedef struct network {
  own_t own;
  int32_t gain;           /* tensor [H] */
  int32_t x, y, d_x, d_y; /* buffers [T, H] */
} network_t;

static float number(uint32_t what, int32_t id, int32_t h)
{
  mz_random_t random = mz_random_make(seed, what, MZ_PURPOSE_OWN, 0);

  return (float)mz_random_normal(&random, (uint64_t)(id * WIDTH + h));
}

static mz_status_t give_input(const mz_call_t *call, void *self)
{
  network_t *n = self;
  const float *gain = call->weights[n->gain];
  float *x = call->buffers[n->x];

  memset(n->own.has_had, 0, sizeof n->own.has_had);
  for (int64_t i = 0; i < call->micro->num_tokens * WIDTH; i++)
    x[i] = gain[i % WIDTH] *
           number(0, call->micro->tokens[i / WIDTH], (int32_t)(i % WIDTH));
  return MZ_OK;
}

static mz_status_t gain_grad(const mz_call_t *call, void *self)
{
  const network_t *n = self;
  const float *d_x = call->buffers[n->d_x];
  float *grad = grad_of(call, n->gain);

  for (int64_t i = 0; i < call->micro->num_tokens * WIDTH; i++)
    grad[i % WIDTH] += d_x[i] * number(0, call->micro->tokens[i / WIDTH],
                                       (int32_t)(i % WIDTH));
  return MZ_OK;
}

static mz_status_t loss(const mz_call_t *call, void *self)
{
  const network_t *n = self;
  const float *y = call->buffers[n->y];
  float *d_y = call->buffers[n->d_y];

  for (int64_t i = 0; i < call->micro->num_tokens * WIDTH; i++) {
    double d = (double)y[i] - (double)number(1, call->micro->tokens[i / WIDTH],
                                             (int32_t)(i % WIDTH));

    call->scalars[MZ_SCALAR_LOSS_SUM] += d * d / 2;
    d_y[i] = (float)(call->micro->token_scale * d);
  }
  return MZ_OK;
}

static mz_status_t declare_buffers(network_t *n, mz_decl_t *decl)
{
  struct {
    const char *name;
    int32_t *id;
  } all[] = {{"x", &n->x}, {"y", &n->y}, {"d_x", &n->d_x}, {"d_y", &n->d_y}};

  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
    mz_buffer_opts_t opts = {.name = all[i].name,
                             .category = MZ_CAT_ACTIVATIONS,
                             .kind = MZ_ROWS_TOKENS,
                             .rows = 1,
                             .width = WIDTH};
    TRY(mz_decl_buffer(decl, &opts, all[i].id));
  }
  return MZ_OK;
}

static mz_status_t declare_moe(network_t *n, mz_decl_t *decl, int32_t ep_size)
{
  mz_moe_layer_opts_t layer = {.moe = {.name = "moe",
                                       .num_experts = EXPERTS,
                                       .ep_size = ep_size,
                                       .k = 2,
                                       .aux_loss = MZ_AUX_LOAD_BALANCING,
                                       .aux_coef = 0.1},
                               .hidden_size = WIDTH,
                               .init_std = 1,
                               .norm_topk = true,
                               .in = n->x,
                               .out = n->y,
                               .d_in = n->d_x,
                               .d_out = n->d_y,
                               .beside = MZ_BESIDE_RESIDUAL,
                               .beside_ffn = {.hidden_size = WIDTH,
                                              .intermediate_size = 2 * WIDTH,
                                              .activation = MZ_ACT_SWIGLU,
                                              .bias = true,
                                              .init_std = 0.5,
                                              .output_init_std = 0.5},
                               .expert = used,
                               .expert_self = &n->own};

  return mz_moe_layer(decl, &layer);
}

static mz_status_t declare(network_t *n, mz_decl_t *decl, int32_t ep_size)
{
  mz_layer_opts_t before = {.name = "before", .self = n};
  mz_layer_opts_t behind = {.name = "behind", .self = n};
  mz_tensor_opts_t gain = {.name = "gain",
                           .ndim = 1,
                           .shape = {WIDTH},
                           .init = MZ_INIT_ONE,
                           .param_group = MZ_GROUP_NO_DECAY};
  mz_compute_opts_t give = {
      .name = "x", .fn = give_input, .num_writes = 1, .num_weights = 1};
  mz_compute_opts_t grad = {
      .name = "gain", .fn = gain_grad, .num_reads = 1, .num_grads = 1};
  mz_compute_opts_t measure = {
      .name = "loss", .fn = loss, .num_reads = 1, .num_writes = 1};

  TRY(declare_buffers(n, decl));
  TRY(mz_decl_tensor(decl, &gain, &n->gain));
  give.writes[0] = n->x;
  give.weights[0] = grad.grads[0] = n->gain;
  grad.reads[0] = n->d_x;
  measure.reads[0] = n->y;
  measure.writes[0] = n->d_y;
  TRY(mz_decl_layer(decl, &before));
  TRY(mz_decl_simple(decl, &give, &grad));
  TRY(declare_moe(n, decl, ep_size));
  TRY(mz_decl_layer(decl, &behind));
  return mz_decl_simple(decl, &measure, NULL);
}

/* --- runs --- */

typedef struct program {
  network_t network;
  mz_config_t *config;
  mz_decl_t *decl;
  mz_engine_t *engine;
  int rank, size;
} program_t;

static mz_status_t create(program_t *p, MPI_Comm comm, int32_t ep_size,
                          const char *const *assignments, int num)
{
  memset(p, 0, sizeof *p);
  MPI_Comm_rank(comm, &p->rank);
  MPI_Comm_size(comm, &p->size);
  TRY(mz_config_parse(settings, "settings", assignments, num, &p->config));
  TRY(mz_config_resolve(p->config, p->size));
  TRY(mz_decl_create(&p->decl));
  TRY(declare(&p->network, p->decl, ep_size));
  return mz_engine_create(p->config, p->decl, comm, &p->engine);
}

static void destroy(program_t *p)
{
  mz_engine_destroy(&p->engine);
  mz_decl_destroy(&p->decl);
  mz_config_destroy(&p->config);
}

/* This rank's part of a batch of BATCH sequences. */
static mz_status_t step(program_t *p, int number_of_step,
                        mz_step_result_t *result)
{
  int32_t tokens[BATCH * LENGTH], labels[BATCH * LENGTH] = {0};
  int64_t samples[BATCH];
  int32_t sequences = BATCH / p->size;
  mz_step_data_t data = {.num_micro = 1,
                         .tokens = tokens,
                         .labels = labels,
                         .samples = samples,
                         .sequences = &sequences,
                         .max_sequences = &sequences};

  for (int32_t i = 0; i < sequences; i++) {
    samples[i] = p->rank * sequences + i;
    for (int t = 0; t < LENGTH; t++)
      tokens[i * LENGTH + t] =
          (int32_t)((number_of_step * BATCH + samples[i]) * LENGTH + t);
  }
  return mz_engine_step(p->engine, &data, result);
}

typedef struct outcome {
  double loss[STEPS], gap;
  int64_t num_values;
  float values[MAX_VALUES]; /* all weights behind each other */
} outcome_t;

static mz_status_t run(MPI_Comm comm, int32_t ep_size,
                       const char *const *assignments, int num, outcome_t *out)
{
  program_t p;
  mz_step_result_t result;

  memset(out, 0, sizeof *out);
  out->gap = HUGE_VAL;
  TRY(create(&p, comm, ep_size, assignments, num));
  for (int s = 0; s < STEPS; s++) {
    TRY(step(&p, s, &result));
    out->loss[s] = result.loss;
    out->gap = fmin(out->gap, result.min_gap);
  }
  for (int32_t t = 0; t < mz_decl_num_tensors(p.decl); t++) {
    TRY(mz_engine_read(p.engine, t, MZ_PART_WEIGHTS,
                       out->values + out->num_values));
    out->num_values += mz_decl_tensor_elements(p.decl, t);
  }
  destroy(&p);
  return MZ_OK;
}

static double distance(const outcome_t *a, const outcome_t *b)
{
  double worst = a->num_values == b->num_values ? 0 : HUGE_VAL;

  for (int s = 0; s < STEPS; s++)
    worst = fmax(worst, fabs(a->loss[s] - b->loss[s]) / fabs(a->loss[s]));
  for (int64_t i = 0; i < a->num_values; i++)
    worst = fmax(worst, fabs((double)a->values[i] - (double)b->values[i]));
  return worst;
}

/* ep_size x stage, with rows saved and sent again, weights apart in half. */
static mz_status_t check_layouts(int world, double *worst, int *num_run)
{
  static const int stages[] = {0, 3};
  static outcome_t reference, other;
  char words[3][64];
  const char *all[3] = {words[0], words[1], words[2]};

  TRY(run(MPI_COMM_SELF, 1, all, 0, &reference));
  if (reference.gap < 1e-3)
    return mz_error_set(MZ_ERR_DATA, __FILE__, __LINE__, __func__,
                        "a gate gap of %g may flip a choice", reference.gap);
  for (int32_t ep = 1; ep <= world; ep *= 2)
    for (int i = 0; i < 8; i++) {
      used = i < 4 ? &own_expert : &own_in_two;
      snprintf(words[0], 64, "zero_optimization.stage=%d", stages[i % 2]);
      snprintf(words[1], 64, "moe.saved_rows=%g", i % 4 < 2 ? 1.25 : 0.25);
      snprintf(words[2], 64, "debug.poison=true");
      TRY(run(MPI_COMM_WORLD, ep, all, 3, &other));
      *worst = fmax(*worst, distance(&reference, &other));
      ++*num_run;
    }
  return MZ_OK;
}

/* --- central differences, along the gradient of each tensor --- */

static mz_status_t loss_at(program_t *p, int32_t tensor, const float *start,
                           const float *direction, double way, double *loss_out)
{
  float moved[MAX_ELEMENTS];
  mz_step_result_t result;

  for (int64_t i = 0; i < mz_decl_tensor_elements(p->decl, tensor); i++)
    moved[i] = (float)((double)start[i] + way * (double)direction[i]);
  TRY(mz_engine_write(p->engine, tensor, MZ_PART_WEIGHTS, moved));
  TRY(step(p, 0, &result));
  *loss_out = result.loss;
  return mz_engine_write(p->engine, tensor, MZ_PART_WEIGHTS, start);
}

static mz_status_t check_slope(program_t *p, int32_t tensor, double *worst)
{
  const double h = 4e-3;
  float start[MAX_ELEMENTS], direction[MAX_ELEMENTS];
  int64_t elements = mz_decl_tensor_elements(p->decl, tensor);
  double norm = 0, up, down, error;
  mz_step_result_t result;

  TRY(step(p, 0, &result));
  TRY(mz_engine_read(p->engine, tensor, MZ_PART_WEIGHTS, start));
  TRY(mz_engine_read(p->engine, tensor, MZ_PART_GRADS, direction));
  for (int64_t i = 0; i < elements; i++)
    norm += (double)direction[i] * (double)direction[i];
  norm = sqrt(norm);
  for (int64_t i = 0; i < elements; i++)
    direction[i] = (float)((double)direction[i] / norm);
  TRY(loss_at(p, tensor, start, direction, h, &up));
  TRY(loss_at(p, tensor, start, direction, -h, &down));
  error = fabs((up - down) / (2 * h) - norm) / norm;
  if (!(error <= SLOPES))
    fprintf(stderr, "%s: gradient %.5g, off by %.1e\n",
            mz_decl_tensor_name(p->decl, tensor), norm, error);
  *worst = fmax(*worst, error);
  return MZ_OK;
}

static mz_status_t check_slopes(double *worst)
{
  static const char *const rate[] = {"optimizer.params.lr=0"};
  program_t p;

  TRY(create(&p, MPI_COMM_SELF, 1, rate, 1));
  for (int32_t t = 0; t < mz_decl_num_tensors(p.decl); t++)
    TRY(check_slope(&p, t, worst));
  destroy(&p);
  return MZ_OK;
}

int main(int argc, char **argv)
{
  int provided, rank, world, num_run = 0, good, all_good;
  double apart = 0, slopes = 0;
  mz_status_t st;

  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  if (argc > 1) seed = strtoull(argv[1], NULL, 10);
  st = check_slopes(&slopes);
  if (st == MZ_OK) st = check_layouts(world, &apart, &num_run);
  /* the others would wait for this rank */
  if (st != MZ_OK) {
    fprintf(stderr, "rank %d: %s\n", rank, mz_error_last());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  good = num_run > 0 && apart <= APART && slopes <= SLOPES;
  if (rank == 0)
    printf("%d layouts, at most %.2g apart; slopes off by %.2g\n", num_run,
           apart, slopes);
  MPI_Allreduce(&good, &all_good, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  MPI_Finalize();
  return !all_good;
}
