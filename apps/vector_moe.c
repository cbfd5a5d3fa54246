/* SPDX-License-Identifier: Apache-2.0 */
/* A small classifier with a MoE layer in place of a hidden one, on vectors of
 * an HDF5 file, with the public headers alone:
 *
 *   rows of the file [T, 84] -> MoE of 8 experts, each Linear(84, 84) [T, 84]
 *                            -> Linear(84, 10) -> loss
 *
 * Usage: mpirun -n N vector_moe FILE.h5 [experts=E] [KEY=VALUE]...
 * Makes FILE.h5 unless it is there. Keys are those of `gpt_moe config` about
 * batches, training and ZeRO; the network's own numbers stand in declare below.
 * On an even number of ranks two share a set of experts (ep_size 2). T tokens
 * of a rank in a micro-batch; a token is a row of the file. */
#include "vector_data.h"

#include <moezero/engine.h>
#include <moezero/moe.h>

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  EXPERTS = 8,
  MAX_SEQUENCES = 256, /* of a rank and step */
  MAX_IDS = 4096
};

static const char settings[] =
    "{\"train_batch_size\": 64, \"data\": {\"sequence_length\": 4},"
    " \"train\": {\"steps\": 160, \"seed\": 7, \"device\": \"cpu\"},"
    " \"gradient_clipping\": 1.0,"
    " \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 0.005,"
    " \"eps\": 1e-6}}, \"zero_optimization\": {\"stage\": 2}}";

#define TRY(call)                                                              \
  do {                                                                         \
    mz_status_t st_ = (call);                                                  \
    if (st_ != MZ_OK) return st_;                                              \
  } while (0)

#define FAIL(code, ...)                                                        \
  mz_error_set((code), __FILE__, __LINE__, __func__, __VA_ARGS__)

/* --- Linear(84, 84): an expert of one's own --- */

typedef struct expert {
  int32_t weight, bias; /* tensors of expert 0; the others' ids follow */
} expert_t;

static mz_status_t expert_declare(void *self, mz_decl_t *decl, int32_t moe)
{
  expert_t *e = self;
  mz_tensor_opts_t weight = {.name = "weight",
                             .ndim = 2,
                             .shape = {WIDTH, WIDTH},
                             .init = MZ_INIT_NORMAL,
                             .init_std = 1 / sqrt((double)WIDTH),
                             .param_group = MZ_GROUP_DECAY};
  mz_tensor_opts_t bias = {.name = "bias",
                           .ndim = 1,
                           .shape = {WIDTH},
                           .init = MZ_INIT_ZERO,
                           .param_group = MZ_GROUP_NO_DECAY};

  TRY(mz_decl_expert_tensor(decl, moe, &weight, &e->weight));
  return mz_decl_expert_tensor(decl, moe, &bias, &e->bias);
}

static int64_t expert_width(const void *self)
{
  (void)self;
  return 0; /* backward needs x alone */
}

static double expert_operations(const void *self)
{
  (void)self;
  return WIDTH * WIDTH;
}

/* y = x W^T + b of one row. */
static void map_row(const float *w, const float *b, int64_t out, const float *x,
                    float *y)
{
  for (int64_t o = 0; o < out; o++) {
    double sum = b[o];
    for (int64_t i = 0; i < WIDTH; i++)
      sum += (double)w[o * WIDTH + i] * x[i];
    y[o] = (float)sum;
  }
}

/* d_w += d_y^T x, d_b += d_y, d_x = d_y W; d_x NULL: nobody wants it. */
static void map_row_back(const float *w, int64_t out, const float *x,
                         const float *d_y, float *d_w, float *d_b, float *d_x)
{
  for (int64_t i = 0; i < WIDTH && d_x; i++)
    d_x[i] = 0;
  for (int64_t o = 0; o < out; o++) {
    d_b[o] += d_y[o];
    for (int64_t i = 0; i < WIDTH; i++) {
      d_w[o * WIDTH + i] += d_y[o] * x[i];
      if (d_x) d_x[i] += d_y[o] * w[o * WIDTH + i];
    }
  }
}

/* A gradient begins with 0, unless there is something to add to. */
static void begin_grad(const mz_call_t *call, int32_t tensor, int64_t num)
{
  if (!call->accumulate[tensor])
    memset(call->grads[tensor], 0, (size_t)num * sizeof(float));
}

static mz_status_t expert_forward(void *self, const mz_call_t *call,
                                  const mz_expert_rows_t *rows)
{
  const expert_t *e = self;
  const mz_window_t *window = rows->window;

  for (int32_t j = 0; j < window->num_experts; j++) {
    int32_t expert = window->first_expert + j;
    const float *w = call->weights[e->weight + expert];
    const float *b = call->weights[e->bias + expert];

    for (int64_t r = window->host_offsets[j]; r < window->host_offsets[j + 1];
         r++)
      map_row(w, b, WIDTH, (const float *)rows->x + r * WIDTH,
              (float *)rows->y + r * WIDTH);
  }
  return MZ_OK;
}

static mz_status_t expert_backward(void *self, const mz_call_t *call,
                                   const mz_expert_rows_t *rows)
{
  const expert_t *e = self;
  const mz_window_t *window = rows->window;

  for (int32_t j = 0; j < window->num_experts; j++) {
    int32_t weight = e->weight + window->first_expert + j;
    int32_t bias = e->bias + window->first_expert + j;

    begin_grad(call, weight, WIDTH * WIDTH);
    begin_grad(call, bias, WIDTH);
    for (int64_t r = window->host_offsets[j]; r < window->host_offsets[j + 1];
         r++)
      map_row_back(call->weights[weight], WIDTH,
                   (const float *)rows->x + r * WIDTH,
                   (const float *)rows->dy + r * WIDTH, call->grads[weight],
                   call->grads[bias], (float *)rows->dx + r * WIDTH);
  }
  return MZ_OK;
}

static const mz_expert_ops_t expert_ops = {.name = "linear",
                                           .declare = expert_declare,
                                           .saved_width = expert_width,
                                           .scratch_width = expert_width,
                                           .forward = expert_forward,
                                           .backward = expert_backward,
                                           .operations = expert_operations};

/* --- the layers around it --- */

typedef struct network {
  const rows_t *rows;   /* what token ids stand for */
  expert_t expert;      /* of the MoE layer */
  int32_t weight, bias; /* of Linear(84, 10) */
  int32_t x, y, logits; /* buffers [T, WIDTH], [T, WIDTH], [T, CLASSES] */
  int32_t d_x, d_y, d_logits;
  int64_t right; /* labels that had the largest logit */
} network_t;

static mz_status_t rows_forward(const mz_call_t *call, void *self)
{
  const network_t *n = self;

  for (int64_t t = 0; t < call->micro->num_tokens; t++) {
    int32_t row = call->micro->tokens[t];

    if (row < 0 || row >= n->rows->num)
      return FAIL(MZ_ERR_DATA, "row %d of %" PRId64, row, n->rows->num);
    memcpy((float *)call->buffers[n->x] + t * WIDTH,
           n->rows->x + (int64_t)row * WIDTH, WIDTH * sizeof(float));
  }
  return MZ_OK;
}

static mz_status_t output_forward(const mz_call_t *call, void *self)
{
  const network_t *n = self;

  for (int64_t t = 0; t < call->micro->num_tokens; t++)
    map_row(call->weights[n->weight], call->weights[n->bias], CLASSES,
            (const float *)call->buffers[n->y] + t * WIDTH,
            (float *)call->buffers[n->logits] + t * CLASSES);
  return MZ_OK;
}

static mz_status_t output_backward(const mz_call_t *call, void *self)
{
  const network_t *n = self;

  begin_grad(call, n->weight, CLASSES * WIDTH);
  begin_grad(call, n->bias, CLASSES);
  for (int64_t t = 0; t < call->micro->num_tokens; t++)
    map_row_back(call->weights[n->weight], CLASSES,
                 (const float *)call->buffers[n->y] + t * WIDTH,
                 (const float *)call->buffers[n->d_logits] + t * CLASSES,
                 call->grads[n->weight], call->grads[n->bias],
                 (float *)call->buffers[n->d_y] + t * WIDTH);
  return MZ_OK;
}

/* Softmax cross-entropy: adds a token's loss and writes its gradient. */
static void loss_token(network_t *n, const mz_call_t *call, int64_t t)
{
  const float *z = (const float *)call->buffers[n->logits] + t * CLASSES;
  float *d_z = (float *)call->buffers[n->d_logits] + t * CLASSES;
  int32_t label = call->micro->labels[t];
  double most = z[0], sum = 0;

  for (int i = 1; i < CLASSES; i++)
    most = fmax(most, z[i]);
  for (int i = 0; i < CLASSES; i++)
    sum += exp(z[i] - most);
  for (int i = 0; i < CLASSES; i++)
    d_z[i] = (float)(call->micro->token_scale *
                     (exp(z[i] - most) / sum - (i == label)));
  call->scalars[MZ_SCALAR_LOSS_SUM] += most + log(sum) - z[label];
  n->right += z[label] >= most;
}

static mz_status_t loss_forward(const mz_call_t *call, void *self)
{
  for (int64_t t = 0; t < call->micro->num_tokens; t++) {
    int32_t label = call->micro->labels[t];

    if (label < 0 || label >= CLASSES)
      return FAIL(MZ_ERR_DATA, "label %d, need 0..%d", label, CLASSES - 1);
    loss_token(self, call, t);
  }
  return MZ_OK;
}

/* --- the network --- */

static mz_status_t token_buffer(mz_decl_t *decl, const char *name,
                                int64_t width, int32_t *buffer_out)
{
  mz_buffer_opts_t opts = {.name = name,
                           .category = MZ_CAT_ACTIVATIONS,
                           .kind = MZ_ROWS_TOKENS,
                           .rows = 1,
                           .width = width,
                           .dtype = MZ_F32};

  return mz_decl_buffer(decl, &opts, buffer_out);
}

static mz_status_t declare_buffers(network_t *n, mz_decl_t *decl)
{
  TRY(token_buffer(decl, "x", WIDTH, &n->x));
  TRY(token_buffer(decl, "d_x", WIDTH, &n->d_x));
  TRY(token_buffer(decl, "y", WIDTH, &n->y));
  TRY(token_buffer(decl, "d_y", WIDTH, &n->d_y));
  TRY(token_buffer(decl, "logits", CLASSES, &n->logits));
  return token_buffer(decl, "d_logits", CLASSES, &n->d_logits);
}

static mz_status_t declare_experts(network_t *n, mz_decl_t *decl,
                                   int32_t experts, int32_t ep_size)
{
  mz_moe_layer_opts_t layer = {.moe = {.name = "moe",
                                       .num_experts = experts,
                                       .ep_size = ep_size,
                                       .k = 1,
                                       .aux_loss = MZ_AUX_LOAD_BALANCING,
                                       .aux_coef = 0.01},
                               .hidden_size = WIDTH,
                               .block = 0,
                               .init_std = 0.1,
                               .in = n->x,
                               .out = n->y,
                               .d_in = n->d_x,
                               .d_out = n->d_y,
                               .expert = &expert_ops,
                               .expert_self = &n->expert};

  return mz_moe_layer(decl, &layer);
}

static mz_status_t declare_output(network_t *n, mz_decl_t *decl)
{
  mz_layer_opts_t layer = {.name = "output", .self = n};
  mz_tensor_opts_t weight = {.name = "output.weight",
                             .ndim = 2,
                             .shape = {CLASSES, WIDTH},
                             .init = MZ_INIT_NORMAL,
                             .init_std = 1 / sqrt((double)WIDTH),
                             .param_group = MZ_GROUP_DECAY,
                             .block = 1};
  mz_tensor_opts_t bias = {.name = "output.bias",
                           .ndim = 1,
                           .shape = {CLASSES},
                           .init = MZ_INIT_ZERO,
                           .param_group = MZ_GROUP_NO_DECAY,
                           .block = 1};
  mz_compute_opts_t forward = {.name = "output", .fn = output_forward};
  mz_compute_opts_t backward = {.name = "output_grad", .fn = output_backward};

  TRY(mz_decl_tensor(decl, &weight, &n->weight));
  TRY(mz_decl_tensor(decl, &bias, &n->bias));
  forward.reads[forward.num_reads++] = n->y;
  forward.writes[forward.num_writes++] = n->logits;
  forward.weights[forward.num_weights++] = n->weight;
  forward.weights[forward.num_weights++] = n->bias;
  backward.reads[backward.num_reads++] = n->y;
  backward.reads[backward.num_reads++] = n->d_logits;
  backward.writes[backward.num_writes++] = n->d_y;
  backward.weights[backward.num_weights++] = n->weight;
  backward.grads[backward.num_grads++] = n->weight;
  backward.grads[backward.num_grads++] = n->bias;
  TRY(mz_decl_layer(decl, &layer));
  return mz_decl_simple(decl, &forward, &backward);
}

/* A layer of one forward step, which reads (-1: nothing) and writes. */
static mz_status_t declare_step(network_t *n, mz_decl_t *decl, const char *name,
                                mz_compute_fn fn, int32_t reads, int32_t writes)
{
  mz_layer_opts_t layer = {.name = name, .self = n};
  mz_compute_opts_t forward = {.name = name,
                               .fn = fn,
                               .reads = {reads},
                               .num_reads = reads >= 0,
                               .writes = {writes},
                               .num_writes = 1};

  TRY(mz_decl_layer(decl, &layer));
  return mz_decl_simple(decl, &forward, NULL);
}

static mz_status_t declare(network_t *n, mz_decl_t *decl, int32_t experts,
                           int32_t ep_size)
{
  TRY(declare_buffers(n, decl));
  TRY(declare_step(n, decl, "rows", rows_forward, -1, n->x));
  TRY(declare_experts(n, decl, experts, ep_size));
  TRY(declare_output(n, decl));
  return declare_step(n, decl, "loss", loss_forward, n->logits, n->d_logits);
}

/* --- the program --- */

typedef struct program {
  int rank, size;
  int32_t experts;
  rows_t train, valid;
  network_t network;
  mz_config_t *config;
  mz_decl_t *decl;
  mz_engine_t *engine;
  int32_t tokens[MAX_IDS], labels[MAX_IDS];
  int64_t samples[MAX_SEQUENCES];
  int32_t sequences[MAX_SEQUENCES];
} program_t;

/* This rank's part of the global batch that begins with a row: micro-batch j
 * takes its sequences in a row, and of those each rank some in a row. Behind
 * the last row of the file the first one follows. */
static mz_status_t fill(program_t *p, const rows_t *rows, int64_t first,
                        mz_step_data_t *data_out)
{
  const mz_config_values_t *v = mz_config_values(p->config);
  int64_t a = v->gradient_accumulation_steps, S = v->data.sequence_length;
  int64_t m = v->train_micro_batch_size_per_gpu;

  if (a * m > MAX_SEQUENCES || a * m * S > MAX_IDS)
    return FAIL(MZ_ERR_CONFIG,
                "a rank's batch of %" PRId64 " sequences is too large", a * m);
  for (int64_t j = 0; j < a; j++) {
    p->sequences[j] = (int32_t)m;
    for (int64_t i = 0; i < m; i++) {
      int64_t at = j * m + i, sample = (j * p->size + p->rank) * m + i;

      p->samples[at] = sample;
      for (int64_t t = 0; t < S; t++) {
        int64_t row = (first + sample * S + t) % rows->num;
        p->tokens[at * S + t] = (int32_t)row;
        p->labels[at * S + t] = rows->label[row];
      }
    }
  }
  p->network.rows = rows;
  *data_out = (mz_step_data_t){.num_micro = (int32_t)a,
                               .tokens = p->tokens,
                               .labels = p->labels,
                               .samples = p->samples,
                               .sequences = p->sequences,
                               .max_sequences = p->sequences};
  return MZ_OK;
}

/* Rank 0 makes the file; all read it when it is there. */
static mz_status_t open_data(program_t *p, const char *path)
{
  int ok = 1;
  mz_status_t st = MZ_OK;

  if (p->rank == 0) st = vector_data_make(path);
  ok = st == MZ_OK;
  MPI_Bcast(&ok, 1, MPI_INT, 0, MPI_COMM_WORLD);
  if (ok) st = vector_data_read(path, &p->train, &p->valid);
  ok = ok && st == MZ_OK;
  MPI_Allreduce(MPI_IN_PLACE, &ok, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (!ok && st == MZ_OK) st = FAIL(MZ_ERR_IO, "%s: another rank failed", path);
  return st;
}

static mz_status_t create(program_t *p, int num, char **assignments)
{
  int32_t ep_size = p->size % 2 == 0 && p->experts % 2 == 0 ? 2 : 1;

  p->network.rows = &p->train;
  TRY(mz_config_parse(settings, "settings", (const char *const *)assignments,
                      num, &p->config));
  TRY(mz_config_resolve(p->config, p->size));
  if (mz_config_uses_cuda(mz_config_values(p->config)))
    return FAIL(MZ_ERR_UNSUPPORTED,
                "train.device: cuda, but the steps of this program read and "
                "write host memory; allowed: cpu");
  TRY(mz_decl_create(&p->decl));
  TRY(declare(&p->network, p->decl, p->experts, ep_size));
  TRY(mz_decl_apply_groups(p->decl, &mz_config_values(p->config)->optimizer));
  return mz_engine_create(p->config, p->decl, MPI_COMM_WORLD, &p->engine);
}

static int64_t rows_of_a_step(const program_t *p)
{
  const mz_config_values_t *v = mz_config_values(p->config);

  return v->train_batch_size * v->data.sequence_length;
}

static mz_status_t train(program_t *p)
{
  int64_t steps = mz_config_values(p->config)->train.steps;
  mz_step_data_t data;
  mz_step_result_t r;

  for (int64_t step = 0; step < steps; step++) {
    TRY(fill(p, &p->train, step * rows_of_a_step(p), &data));
    TRY(mz_engine_step(p->engine, &data, &r));
    if (p->rank != 0 || (r.step % 20 != 0 && step > 0)) continue;
    printf("step %" PRId64 " loss %.8f, rows by expert", r.step, r.loss);
    for (int32_t e = 0; e < r.moes[0].num_experts; e++)
      printf(" %" PRId64, r.moes[0].routed[e]);
    printf("\n");
  }
  return MZ_OK;
}

/* Accuracy on rows that training has not seen, beside what always saying their
 * most frequent class would reach. */
static mz_status_t validate(program_t *p)
{
  int64_t rows = rows_of_a_step(p), all = 0, labels, most = 0;
  int64_t of_class[CLASSES] = {0};
  mz_step_data_t data;
  double loss_sum;

  p->network.right = 0;
  for (int64_t first = 0; first + rows <= p->valid.num; first += rows) {
    TRY(fill(p, &p->valid, first, &data));
    TRY(mz_engine_eval(p->engine, &data, &loss_sum, &labels));
    for (int64_t i = 0; i < rows; i++)
      of_class[p->valid.label[first + i]]++;
    all += labels;
  }
  MPI_Allreduce(MPI_IN_PLACE, &p->network.right, 1, MPI_INT64_T, MPI_SUM,
                MPI_COMM_WORLD);
  for (int i = 0; i < CLASSES; i++)
    if (of_class[i] > most) most = of_class[i];
  if (p->rank == 0)
    printf("accuracy %.4f, majority baseline %.4f, of %" PRId64 " rows\n",
           (double)p->network.right / (double)all, (double)most / (double)all,
           all);
  return MZ_OK;
}

static mz_status_t run(program_t *p, int argc, char **argv)
{
  int next = 2;

  if (argc < 2 || argv[1][0] == '-')
    return FAIL(MZ_ERR_ARG,
                "usage: vector_moe FILE.h5 [experts=E] [KEY=VALUE]...");
  p->experts = EXPERTS;
  if (argc > 2 && strncmp(argv[2], "experts=", 8) == 0) {
    p->experts = (int32_t)strtol(argv[2] + 8, NULL, 10);
    next = 3;
  }
  TRY(open_data(p, argv[1]));
  TRY(create(p, argc - next, argv + next));
  TRY(train(p));
  return validate(p);
}

int main(int argc, char **argv)
{
  static program_t p;
  mz_status_t st;
  int provided;

  /* validate calls MPI beside the engine's communication thread */
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &p.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &p.size);
  st = run(&p, argc, argv);
  if (st != MZ_OK && p.rank == 0)
    fprintf(stderr, "vector_moe: %s\n", mz_error_last());
  if (st == MZ_ERR_PEER || st == MZ_ERR_MPI || st == MZ_ERR_CUDA)
    MPI_Abort(MPI_COMM_WORLD, 1);
  mz_engine_destroy(&p.engine);
  mz_decl_destroy(&p.decl);
  mz_config_destroy(&p.config);
  MPI_Finalize();
  return st == MZ_OK ? 0 : 1;
}
