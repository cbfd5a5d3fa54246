/* SPDX-License-Identifier: Apache-2.0 */
/* A network of one's own, declared with the public headers alone and trained on
 * any number of ranks; docs/tutorial.md explains it part by part.
 *
 *   token ids -> vectors [T, 28] -> bridge, tanh [T, 84] -> MoE [T, 84]
 *             -> bridge [T, 10] -> loss
 *
 * Usage: mpirun -n N own_model [KEY=VALUE]...
 * Keys are those of `gpt_moe config`. T tokens of a rank in a micro-batch. */
#include <moezero/engine.h>
#include <moezero/moe.h>
#include <moezero/param.h>
#include <moezero/random.h>

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

enum {
  INPUT = 28,
  WIDTH = 84,
  CLASSES = 10,
  CENTRES = 40, /* four a class */
  EXPERTS = 4,
  MAX_SEQUENCES = 256, /* of a rank and step */
  MAX_IDS = 4096,
  VALID_BATCHES = 4,
  FIRST_VALID_ID = 1 << 30
};

static const char settings[] =
    "{\"train_batch_size\": 64, \"data\": {\"sequence_length\": 4},"
    " \"train\": {\"steps\": 60, \"seed\": 7}, \"gradient_clipping\": 1.0,"
    " \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 0.003,"
    " \"eps\": 1e-6}}, \"zero_optimization\": {\"stage\": 1}}";

#define TRY(call)                                                              \
  do {                                                                         \
    mz_status_t st_ = (call);                                                  \
    if (st_ != MZ_OK) return st_;                                              \
  } while (0)

/* --- the task --- */

/* What the task's random numbers are for. */
enum { CENTRE_OF_ID = MZ_PURPOSE_OWN, CENTRES_PLACE, NOISE };

static int32_t centre_of(int32_t id)
{
  mz_random_t random = mz_random_make(1, 0, CENTRE_OF_ID, 0);

  return (int32_t)(mz_random_u32(&random, (uint64_t)id) % CENTRES);
}

static int32_t label_of(int32_t id) { return centre_of(id) % CLASSES; }

/* The vector that an id stands for: noise around its centre. */
static void vector_of(int32_t id, float *x)
{
  uint32_t centre = (uint32_t)centre_of(id);
  mz_random_t place = mz_random_make(1, centre, CENTRES_PLACE, 0);
  mz_random_t noise = mz_random_make(1, (uint32_t)id, NOISE, 0);

  for (uint64_t i = 0; i < INPUT; i++)
    x[i] = (float)(mz_random_normal(&place, i) + mz_random_normal(&noise, i));
}

/* --- a layer without weights: vectors --- */

typedef struct vectors {
  int32_t x; /* buffer [T, INPUT] */
} vectors_t;

static mz_status_t vectors_forward(const mz_call_t *call, void *self)
{
  const vectors_t *l = self;
  float *x = call->buffers[l->x];

  for (int64_t t = 0; t < call->micro->num_tokens; t++)
    vector_of(call->micro->tokens[t], x + t * INPUT);
  return MZ_OK;
}

static mz_status_t vectors_declare(vectors_t *l, mz_decl_t *decl)
{
  mz_layer_opts_t layer = {.name = "vectors", .self = l};
  mz_compute_opts_t forward = {.name = "vectors",
                               .fn = vectors_forward,
                               .writes = {l->x},
                               .num_writes = 1};

  TRY(mz_decl_layer(decl, &layer));
  return mz_decl_simple(decl, &forward, NULL);
}

/* --- a layer with weights: bridge, y = f(x W^T + b) --- */

typedef struct bridge {
  const char *name, *weight_name, *bias_name;
  int64_t in, out;      /* widths */
  bool squash;          /* f is tanh, else the identity */
  int32_t x, y;         /* buffers [T, in], [T, out] */
  int32_t d_x, d_y;     /* their gradients; d_x -1: nobody wants it */
  int32_t weight, bias; /* tensors [out, in], [out] */
} bridge_t;

static mz_status_t bridge_forward(const mz_call_t *call, void *self)
{
  const bridge_t *l = self;
  const float *w = call->weights[l->weight], *b = call->weights[l->bias];

  for (int64_t t = 0; t < call->micro->num_tokens; t++) {
    const float *x = (const float *)call->buffers[l->x] + t * l->in;
    float *y = (float *)call->buffers[l->y] + t * l->out;

    for (int64_t o = 0; o < l->out; o++) {
      double sum = b[o];
      for (int64_t i = 0; i < l->in; i++)
        sum += (double)w[o * l->in + i] * x[i];
      y[o] = (float)(l->squash ? tanh(sum) : sum);
    }
  }
  return MZ_OK;
}

/* The gradient of x W^T + b: tanh' = 1 - tanh^2. */
static float bridge_slope(const bridge_t *l, const mz_call_t *call, int64_t t,
                          int64_t o)
{
  float y = ((const float *)call->buffers[l->y])[t * l->out + o];
  float d_y = ((const float *)call->buffers[l->d_y])[t * l->out + o];

  return l->squash ? d_y * (1 - y * y) : d_y;
}

static void bridge_weight_grad(const bridge_t *l, const mz_call_t *call)
{
  const float *x = call->buffers[l->x];
  float *d_w = call->grads[l->weight], *d_b = call->grads[l->bias];

  for (int64_t o = 0; o < l->out; o++) {
    if (!call->accumulate[l->bias]) d_b[o] = 0;
    for (int64_t i = 0; i < l->in && !call->accumulate[l->weight]; i++)
      d_w[o * l->in + i] = 0;
    for (int64_t t = 0; t < call->micro->num_tokens; t++) {
      float d = bridge_slope(l, call, t, o);

      d_b[o] += d;
      for (int64_t i = 0; i < l->in; i++)
        d_w[o * l->in + i] += d * x[t * l->in + i];
    }
  }
}

static mz_status_t bridge_backward(const mz_call_t *call, void *self)
{
  const bridge_t *l = self;
  const float *w;

  bridge_weight_grad(l, call);
  if (l->d_x < 0) return MZ_OK;
  w = call->weights[l->weight];
  for (int64_t t = 0; t < call->micro->num_tokens; t++) {
    float *d_x = (float *)call->buffers[l->d_x] + t * l->in;

    for (int64_t i = 0; i < l->in; i++)
      d_x[i] = 0;
    for (int64_t o = 0; o < l->out; o++) {
      float d = bridge_slope(l, call, t, o);
      for (int64_t i = 0; i < l->in; i++)
        d_x[i] += d * w[o * l->in + i];
    }
  }
  return MZ_OK;
}

static mz_status_t bridge_tensors(bridge_t *l, mz_decl_t *decl, int32_t block)
{
  mz_tensor_opts_t weight = {.name = l->weight_name,
                             .ndim = 2,
                             .shape = {l->out, l->in},
                             .init = MZ_INIT_NORMAL,
                             .init_std = 1 / sqrt((double)l->in),
                             .param_group = MZ_GROUP_DECAY,
                             .block = block};
  mz_tensor_opts_t bias = {.name = l->bias_name,
                           .ndim = 1,
                           .shape = {l->out},
                           .init = MZ_INIT_ZERO,
                           .param_group = MZ_GROUP_NO_DECAY,
                           .block = block};

  TRY(mz_decl_tensor(decl, &weight, &l->weight));
  return mz_decl_tensor(decl, &bias, &l->bias);
}

static mz_status_t bridge_declare(bridge_t *l, mz_decl_t *decl, int32_t block)
{
  mz_layer_opts_t layer = {.name = l->name, .self = l};
  mz_compute_opts_t forward = {.name = "bridge",
                               .fn = bridge_forward,
                               .reads = {l->x},
                               .num_reads = 1,
                               .writes = {l->y},
                               .num_writes = 1};
  mz_compute_opts_t backward = {.name = "bridge_grad",
                                .fn = bridge_backward,
                                .reads = {l->x, l->y, l->d_y},
                                .num_reads = 3,
                                .writes = {l->d_x},
                                .num_writes = l->d_x < 0 ? 0 : 1};

  TRY(bridge_tensors(l, decl, block));
  forward.weights[forward.num_weights++] = l->weight;
  forward.weights[forward.num_weights++] = l->bias;
  if (l->d_x >= 0) backward.weights[backward.num_weights++] = l->weight;
  backward.grads[backward.num_grads++] = l->weight;
  backward.grads[backward.num_grads++] = l->bias;
  TRY(mz_decl_layer(decl, &layer));
  return mz_decl_simple(decl, &forward, &backward);
}

/* --- its gradient against central differences --- */

enum { CHECK_T = 3, CHECK_IN = 5, CHECK_OUT = 4 };

/* The sum of d_y y: what backward computes the gradient of. */
static double check_value(const mz_call_t *call, bridge_t *l)
{
  const float *y = call->buffers[l->y], *d_y = call->buffers[l->d_y];
  double sum = 0;

  bridge_forward(call, l);
  for (int i = 0; i < CHECK_T * CHECK_OUT; i++)
    sum += (double)d_y[i] * y[i];
  return sum;
}

/* The largest difference between grad and the slope along each value. */
static double check_slopes(const mz_call_t *call, bridge_t *l, float *values,
                           const float *grad, int num)
{
  const float h = 0x1p-7f;
  double worst = 0;

  for (int i = 0; i < num; i++) {
    float middle = values[i];
    double up, down;

    values[i] = middle + h;
    up = check_value(call, l);
    values[i] = middle - h;
    down = check_value(call, l);
    values[i] = middle;
    worst = fmax(worst, fabs((up - down) / (2 * (double)h) - grad[i]));
  }
  return worst;
}

static void check_fill(float *values, int num, uint32_t what)
{
  mz_random_t random = mz_random_make(2, what, MZ_PURPOSE_OWN, 0);

  for (int i = 0; i < num; i++)
    values[i] = (float)mz_random_normal(&random, (uint64_t)i);
}

static mz_status_t check_bridge(double *worst_out)
{
  float x[CHECK_T * CHECK_IN], w[CHECK_OUT * CHECK_IN], b[CHECK_OUT];
  float y[CHECK_T * CHECK_OUT], d_y[CHECK_T * CHECK_OUT];
  float d_x[CHECK_T * CHECK_IN], d_w[CHECK_OUT * CHECK_IN], d_b[CHECK_OUT];
  bridge_t l = {.in = CHECK_IN,
                .out = CHECK_OUT,
                .squash = true,
                .y = 1,
                .d_x = 2,
                .d_y = 3,
                .bias = 1};
  mz_micro_t micro = {.num_tokens = CHECK_T};
  mz_call_t call = {.micro = &micro,
                    .buffers = (void *[]){x, y, d_x, d_y},
                    .weights = (const void *[]){w, b},
                    .grads = (void *[]){d_w, d_b},
                    .accumulate = (const uint8_t[]){0, 0}};

  check_fill(x, CHECK_T * CHECK_IN, 0);
  check_fill(w, CHECK_OUT * CHECK_IN, 1);
  check_fill(b, CHECK_OUT, 2);
  check_fill(d_y, CHECK_T * CHECK_OUT, 3);
  check_value(&call, &l);
  TRY(bridge_backward(&call, &l));
  *worst_out = fmax(check_slopes(&call, &l, x, d_x, CHECK_T * CHECK_IN),
                    check_slopes(&call, &l, w, d_w, CHECK_OUT * CHECK_IN));
  *worst_out = fmax(*worst_out, check_slopes(&call, &l, b, d_b, CHECK_OUT));
  /* h^2 / 6 times the third derivative of tanh, at most 2, times what x and
   * d_y add up to; rounding of y, 1e-7 / h, is less */
  if (!(*worst_out < 2e-3))
    return mz_error_set(MZ_ERR_INTERNAL, __FILE__, __LINE__, __func__,
                        "gradient of bridge: off by %g", *worst_out);
  return MZ_OK;
}

/* --- the loss: softmax cross-entropy --- */

typedef struct loss {
  int32_t logits, d_logits; /* buffers [T, CLASSES] */
  int64_t right;            /* labels that had the largest logit */
} loss_t;

/* Adds the loss of token t and writes the gradient of its logits. */
static void loss_token(loss_t *l, const mz_call_t *call, int64_t t)
{
  const float *z = (const float *)call->buffers[l->logits] + t * CLASSES;
  float *d_z = (float *)call->buffers[l->d_logits] + t * CLASSES;
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
  l->right += z[label] >= most;
}

static mz_status_t loss_forward(const mz_call_t *call, void *self)
{
  for (int64_t t = 0; t < call->micro->num_tokens; t++) {
    int32_t label = call->micro->labels[t];

    if (label < 0 || label >= CLASSES)
      return mz_error_set(MZ_ERR_DATA, __FILE__, __LINE__, __func__,
                          "label %d, need 0..%d", label, CLASSES - 1);
    loss_token(self, call, t);
  }
  return MZ_OK;
}

static mz_status_t loss_declare(loss_t *l, mz_decl_t *decl)
{
  mz_layer_opts_t layer = {.name = "loss", .self = l};
  mz_compute_opts_t forward = {.name = "loss",
                               .fn = loss_forward,
                               .reads = {l->logits},
                               .num_reads = 1,
                               .writes = {l->d_logits},
                               .num_writes = 1};

  TRY(mz_decl_layer(decl, &layer));
  return mz_decl_simple(decl, &forward, NULL);
}

/* --- the network --- */

typedef struct network {
  vectors_t vectors;
  bridge_t input, output;
  loss_t loss;
} network_t;

/* A buffer [T, width] of the model's dtype, which is fp32 here. */
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

static mz_status_t declare_experts(mz_decl_t *decl, int32_t ep_size,
                                   const network_t *n)
{
  mz_ffn_opts_t ffn = {.hidden_size = WIDTH,
                       .intermediate_size = 2 * WIDTH,
                       .activation = MZ_ACT_GELU,
                       .bias = true,
                       .init_std = 0.1,
                       .output_init_std = 0.1};
  mz_expert_ops_t expert;
  mz_moe_layer_opts_t layer = {.moe = {.name = "moe",
                                       .num_experts = EXPERTS,
                                       .ep_size = ep_size,
                                       .k = 2,
                                       .aux_loss = MZ_AUX_LOAD_BALANCING,
                                       .aux_coef = 0.01},
                               .hidden_size = WIDTH,
                               .block = 1,
                               .init_std = 0.1,
                               .norm_topk = true,
                               .in = n->input.y,
                               .out = n->output.x,
                               .d_in = n->input.d_y,
                               .d_out = n->output.d_x,
                               .expert = &expert};

  TRY(mz_ffn_expert(&ffn, &expert, &layer.expert_self));
  return mz_moe_layer(decl, &layer);
}

static mz_status_t declare(network_t *n, mz_decl_t *decl, int32_t ep_size)
{
  n->input = (bridge_t){.name = "input",
                        .weight_name = "input.weight",
                        .bias_name = "input.bias",
                        .in = INPUT,
                        .out = WIDTH,
                        .squash = true,
                        .d_x = -1};
  n->output = (bridge_t){.name = "output",
                         .weight_name = "output.weight",
                         .bias_name = "output.bias",
                         .in = WIDTH,
                         .out = CLASSES};
  TRY(token_buffer(decl, "vectors", INPUT, &n->vectors.x));
  TRY(token_buffer(decl, "input.y", WIDTH, &n->input.y));
  TRY(token_buffer(decl, "input.d_y", WIDTH, &n->input.d_y));
  TRY(token_buffer(decl, "moe.y", WIDTH, &n->output.x));
  TRY(token_buffer(decl, "moe.d_y", WIDTH, &n->output.d_x));
  TRY(token_buffer(decl, "logits", CLASSES, &n->output.y));
  TRY(token_buffer(decl, "d_logits", CLASSES, &n->output.d_y));
  n->input.x = n->vectors.x;
  n->loss.logits = n->output.y;
  n->loss.d_logits = n->output.d_y;

  TRY(vectors_declare(&n->vectors, decl));
  TRY(bridge_declare(&n->input, decl, 0));
  TRY(declare_experts(decl, ep_size, n));
  TRY(bridge_declare(&n->output, decl, 2));
  return loss_declare(&n->loss, decl);
}

/* --- the program --- */

typedef struct program {
  int rank, size;
  network_t network;
  mz_config_t *config;
  mz_decl_t *decl;
  mz_engine_t *engine;
  int32_t tokens[MAX_IDS], labels[MAX_IDS];
  int64_t samples[MAX_SEQUENCES];
  int32_t sequences[MAX_SEQUENCES];
} program_t;

/* This rank's part of the global batch whose first id is given: micro-batch j
 * takes its sequences in a row, and of those each rank some in a row. */
static mz_status_t fill(program_t *p, int64_t first_id,
                        mz_step_data_t *data_out)
{
  const mz_config_values_t *v = mz_config_values(p->config);
  int64_t a = v->gradient_accumulation_steps, S = v->data.sequence_length;
  int64_t m = v->train_micro_batch_size_per_gpu;

  if (a * m > MAX_SEQUENCES || a * m * S > MAX_IDS)
    return mz_error_set(MZ_ERR_CONFIG, __FILE__, __LINE__, __func__,
                        "a rank's batch of %" PRId64 " sequences is too large",
                        a * m);
  for (int64_t j = 0; j < a; j++) {
    p->sequences[j] = (int32_t)m;
    for (int64_t i = 0; i < m; i++) {
      int64_t row = j * m + i, sample = (j * p->size + p->rank) * m + i;

      p->samples[row] = sample;
      for (int64_t t = 0; t < S; t++) {
        p->tokens[row * S + t] = (int32_t)(first_id + sample * S + t);
        p->labels[row * S + t] = label_of(p->tokens[row * S + t]);
      }
    }
  }
  *data_out = (mz_step_data_t){.num_micro = (int32_t)a,
                               .tokens = p->tokens,
                               .labels = p->labels,
                               .samples = p->samples,
                               .sequences = p->sequences,
                               .max_sequences = p->sequences};
  return MZ_OK;
}

static mz_status_t create(program_t *p, int num, char **assignments)
{
  TRY(mz_config_parse(settings, "settings", (const char *const *)assignments,
                      num, &p->config));
  TRY(mz_config_resolve(p->config, p->size));
  TRY(mz_decl_create(&p->decl));
  TRY(declare(&p->network, p->decl, EXPERTS % p->size == 0 ? p->size : 1));
  TRY(mz_decl_apply_groups(p->decl, &mz_config_values(p->config)->optimizer));
  return mz_engine_create(p->config, p->decl, MPI_COMM_WORLD, &p->engine);
}

static mz_status_t train(program_t *p)
{
  const mz_config_values_t *v = mz_config_values(p->config);
  int64_t ids = v->train_batch_size * v->data.sequence_length;
  mz_step_data_t data;
  mz_step_result_t result;

  for (int64_t step = 0; step < v->train.steps; step++) {
    TRY(fill(p, step * ids, &data));
    TRY(mz_engine_step(p->engine, &data, &result));
    if (p->rank == 0 && (step == 0 || result.step % 10 == 0))
      printf("step %" PRId64 " loss %.8f\n", result.step, result.loss);
  }
  return MZ_OK;
}

/* Accuracy on ids that training has not seen, beside what always saying the
 * most frequent class would reach. */
static mz_status_t validate(program_t *p)
{
  const mz_config_values_t *v = mz_config_values(p->config);
  int64_t ids = v->train_batch_size * v->data.sequence_length;
  int64_t right, labels, all = 0, of_class[CLASSES] = {0}, most = 0;
  mz_step_data_t data;
  double loss_sum;

  p->network.loss.right = 0;
  for (int64_t b = 0; b < VALID_BATCHES; b++) {
    int64_t first = FIRST_VALID_ID + b * ids;

    TRY(fill(p, first, &data));
    TRY(mz_engine_eval(p->engine, &data, &loss_sum, &labels));
    all += labels;
    for (int64_t i = 0; i < ids; i++)
      of_class[label_of((int32_t)(first + i))]++;
  }
  MPI_Allreduce(&p->network.loss.right, &right, 1, MPI_INT64_T, MPI_SUM,
                MPI_COMM_WORLD);
  for (int i = 0; i < CLASSES; i++)
    if (of_class[i] > most) most = of_class[i];
  if (p->rank == 0)
    printf("accuracy %.4f, baseline %.4f\n", (double)right / (double)all,
           (double)most / (double)all);
  return MZ_OK;
}

/* One expert's tensor, whole, wherever it lives. */
static mz_status_t look(program_t *p)
{
  const char *name = "moe.experts.3.up.weight";
  int32_t tensor = mz_decl_find_tensor(p->decl, name);
  int64_t shape[4], num = mz_decl_tensor_elements(p->decl, tensor);
  mz_params_t *params;
  const float *values;
  double squares = 0;

  mz_decl_tensor_shape(p->decl, tensor, shape);
  TRY(mz_param_gather(p->engine, &tensor, 1, &params));
  values = mz_param_values(params, tensor);
  for (int64_t i = 0; i < num; i++)
    squares += (double)values[i] * values[i];
  if (p->rank == 0)
    printf("%s [%" PRId64 ", %" PRId64 "] root mean square %.6f\n", name,
           shape[0], shape[1], sqrt(squares / (double)num));
  return mz_param_release(&params, MZ_NOT_MODIFIED);
}

static mz_status_t run(program_t *p, int num, char **assignments)
{
  double worst;

  TRY(check_bridge(&worst));
  if (p->rank == 0) printf("gradient of bridge: off by %.1e\n", worst);
  TRY(create(p, num, assignments));
  TRY(train(p));
  TRY(validate(p));
  return look(p);
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
  st = run(&p, argc - 1, argv + 1);
  if (st != MZ_OK && p.rank == 0)
    fprintf(stderr, "own_model: %s\n", mz_error_last());
  if (st == MZ_ERR_PEER || st == MZ_ERR_MPI || st == MZ_ERR_CUDA)
    MPI_Abort(MPI_COMM_WORLD, 1);
  mz_engine_destroy(&p.engine);
  mz_decl_destroy(&p.decl);
  mz_config_destroy(&p.config);
  MPI_Finalize();
  return st == MZ_OK ? 0 : 1;
}
