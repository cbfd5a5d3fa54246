/* SPDX-License-Identifier: Apache-2.0 */
/* cuDNN's fused attention, through NVIDIA's header-only frontend. The library
 * is opened at run time: a program starts without it, and then the own forms
 * serve. A plan belongs to one shape and direction and is made at its first
 * use; host memory only. Letters: attention.h.
 *
 * cuDNN serves sequences of whole tiles of 128 (its backward fills arrays of
 * lengths from the host otherwise, and every length of a generated text would
 * be a plan of its own). Its deterministic backward stores the gradients of the
 * scores, 2 A S^2 bytes a sequence; so where the workspace does not hold a
 * batch, the plan is for a part of it and runs several times. */
#include "kernels/cuda/attention.h"

#ifdef MZ_HAVE_CUDNN

#ifndef NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#endif
#include <cudnn_frontend.h>

#include <dlfcn.h>
#include <stdio.h>

namespace fe = cudnn_frontend;

namespace cudnn_frontend
{
void *cudnn_dlhandle = NULL; /* what the frontend looks symbols up in */
}

enum { MAX_PLANS = 32, TILE = 128, MIN_VERSION = 90100 };
enum { Q = 1, K, V, O, STATS, DO, DQ, DK, DV };

typedef std::shared_ptr<fe::graph::Graph> graph_t;
typedef std::shared_ptr<fe::graph::Tensor_attributes> tensor_t;

struct plan {
  int batch, sequence, heads, kv_heads, width;
  bool grad, deterministic;
  int part; /* sequences a run, a divisor of batch; 0: cuDNN does not serve it
             */
  graph_t graph;
  std::unordered_map<int64_t, void *> pointers;
};

struct mz_cuda_cudnn {
  cudnnHandle_t handle;
  char name[32];
  int num_plans;
  plan plans[MAX_PLANS];
};

/* --- life --- */

static bool open_library(mz_cuda_cudnn_t *cudnn)
{
  size_t version;

  if (!fe::cudnn_dlhandle)
    fe::cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW);
  if (!fe::cudnn_dlhandle) return false;
  version = fe::detail::get_backend_version();
  if (version < MIN_VERSION) return false;
  snprintf(cudnn->name, sizeof cudnn->name, "cuDNN %zu.%zu.%zu",
           version / 10000, version / 100 % 100, version % 100);
  return fe::detail::create_handle(&cudnn->handle) == CUDNN_STATUS_SUCCESS;
}

mz_status_t mz_cuda_cudnn_create(mz_cuda_cudnn_t **out)
{
  mz_cuda_cudnn_t *cudnn = new (std::nothrow) mz_cuda_cudnn_t();
  bool found = false;

  MZ_REQUIRE(cudnn, MZ_ERR_NOMEM, "plans of cuDNN: %zu bytes", sizeof *cudnn);
  try {
    found = open_library(cudnn);
  } catch (const std::exception &) {
    /* A library without a symbol that the frontend needs: none, for us. */
  }
  if (found)
    *out = cudnn;
  else
    delete cudnn;
  return MZ_OK;
}

void mz_cuda_cudnn_destroy(mz_cuda_cudnn_t *cudnn)
{
  if (!cudnn) return;
  for (int i = 0; i < cudnn->num_plans; i++)
    cudnn->plans[i].graph.reset(); /* before their handle */
  fe::detail::destroy_handle(cudnn->handle);
  delete cudnn;
}

const char *mz_cuda_cudnn_name(const mz_cuda_cudnn_t *cudnn)
{
  return cudnn->name;
}

/* --- graphs --- */

/* [part, heads, S, D] in rows of ld elements. */
static fe::graph::Tensor_attributes
rows_of(const plan &p, int64_t uid, const char *name, int heads, int64_t ld)
{
  return fe::graph::Tensor_attributes()
      .set_name(name)
      .set_uid(uid)
      .set_dim({p.part, heads, p.sequence, p.width})
      .set_stride({p.sequence * ld, p.width, ld, 1});
}

/* [part, A, S, 1], packed. */
static fe::graph::Tensor_attributes stats_of(const plan &p)
{
  int64_t sequence = p.sequence;

  return fe::graph::Tensor_attributes()
      .set_name("stats")
      .set_uid(STATS)
      .set_data_type(fe::DataType_t::FLOAT)
      .set_dim({p.part, p.heads, sequence, 1})
      .set_stride({p.heads * sequence, sequence, 1, 1});
}

/* An output gets the layout that an input would have. */
static void lay_out(const tensor_t &tensor,
                    const fe::graph::Tensor_attributes &as)
{
  tensor->set_output(true)
      .set_uid(as.get_uid())
      .set_dim(as.get_dim())
      .set_stride(as.get_stride())
      .set_data_type(as.get_data_type());
}

static void describe(const plan &p, const mz_cuda_heads_t &h)
{
  fe::graph::Graph &g = *p.graph;
  tensor_t q = g.tensor(rows_of(p, Q, "q", p.heads, h.ld));
  tensor_t k = g.tensor(rows_of(p, K, "k", p.kv_heads, h.ld));
  tensor_t v = g.tensor(rows_of(p, V, "v", p.kv_heads, h.ld));

  if (!p.grad) {
    auto out = g.sdpa(q, k, v,
                      fe::graph::SDPA_attributes()
                          .set_name("attention")
                          .set_generate_stats(true)
                          .set_causal_mask(true)
                          .set_attn_scale(h.scale));

    lay_out(out[0], rows_of(p, O, "o", p.heads, h.ldo)
                        .set_data_type(fe::DataType_t::BFLOAT16));
    lay_out(out[1], stats_of(p));
    return;
  }
  tensor_t o = g.tensor(rows_of(p, O, "o", p.heads, h.ldo));
  tensor_t dout = g.tensor(rows_of(p, DO, "dout", p.heads, h.ldo));
  tensor_t stats = g.tensor(stats_of(p));
  auto out = g.sdpa_backward(q, k, v, o, dout, stats,
                             fe::graph::SDPA_backward_attributes()
                                 .set_name("attention_grad")
                                 .set_causal_mask(true)
                                 .set_attn_scale(h.scale)
                                 .set_deterministic_algorithm(p.deterministic));
  const fe::DataType_t bf16 = fe::DataType_t::BFLOAT16;

  lay_out(out[0], rows_of(p, DQ, "dq", p.heads, h.ld).set_data_type(bf16));
  lay_out(out[1], rows_of(p, DK, "dk", p.kv_heads, h.ld).set_data_type(bf16));
  lay_out(out[2], rows_of(p, DV, "dv", p.kv_heads, h.ld).set_data_type(bf16));
}

/* Whether there is a plan for p.part sequences within the workspace. */
static bool build(const mz_kernels_t *kernels, cudnnHandle_t handle, plan &p,
                  const mz_cuda_heads_t &h)
{
  int64_t bytes = 0;

  p.graph = std::make_shared<fe::graph::Graph>();
  p.graph->set_io_data_type(fe::DataType_t::BFLOAT16)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  describe(p, h);
  if (p.graph->validate().is_bad() ||
      p.graph->build_operation_graph(handle).is_bad() ||
      p.graph->create_execution_plans({fe::HeurMode_t::A}).is_bad())
    return false;
  p.graph->deselect_workspace_greater_than(kernels->workspace_bytes);
  return p.graph->check_support().is_good() &&
         p.graph->build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE)
             .is_good() &&
         p.graph->get_workspace_size(bytes).is_good() &&
         bytes <= kernels->workspace_bytes;
}

/* The most sequences at once that the workspace serves. */
static void make(const mz_kernels_t *kernels, cudnnHandle_t handle, plan &p,
                 const mz_cuda_heads_t &h)
{
  bool stores = p.grad && p.deterministic;
  int64_t sequence_bytes =
      stores ? 2 * (int64_t)p.heads * p.sequence * p.sequence : 0;

  for (int runs = 1; runs <= p.batch; runs++) {
    p.part = p.batch / runs;
    if (p.batch % runs != 0 ||
        p.part * sequence_bytes > kernels->workspace_bytes)
      continue;
    if (build(kernels, handle, p, h)) return;
    if (!stores) break; /* a smaller part would not help */
  }
  p.part = 0;
  p.graph.reset();
}

static plan *find(mz_cuda_cudnn_t *cudnn, const mz_cuda_heads_t &h, bool grad,
                  bool deterministic)
{
  for (int i = 0; i < cudnn->num_plans; i++) {
    plan &p = cudnn->plans[i];

    if (p.batch == h.batch && p.sequence == h.sequence && p.heads == h.heads &&
        p.kv_heads == h.kv_heads && p.width == h.width && p.grad == grad &&
        p.deterministic == deterministic)
      return &p;
  }
  return NULL;
}

/* NULL: no more plans are made. */
static plan *find_or_make(const mz_kernels_t *kernels, mz_cuda_cudnn_t *cudnn,
                          const mz_cuda_heads_t &h, bool grad)
{
  bool deterministic = kernels->deterministic != 0;
  plan *p = find(cudnn, h, grad, deterministic);

  if (p || cudnn->num_plans == MAX_PLANS) return p;
  mz_device_settle(kernels->device); /* the library loads */
  p = &cudnn->plans[cudnn->num_plans++];
  p->batch = h.batch;
  p->sequence = h.sequence;
  p->heads = h.heads;
  p->kv_heads = h.kv_heads;
  p->width = h.width;
  p->grad = grad;
  p->deterministic = deterministic;
  try {
    make(kernels, cudnn->handle, *p, h);
  } catch (const std::exception &) {
    p->part = 0;
    p->graph.reset();
  }
  return p;
}

/* --- runs --- */

/* The sequences from b on. */
static void point(plan &p, const mz_cuda_heads_t &h, int b)
{
  const __nv_bfloat16 *qkv = (const __nv_bfloat16 *)h.qkv;
  const __nv_bfloat16 *dout = (const __nv_bfloat16 *)h.dout;
  __nv_bfloat16 *dqkv = (__nv_bfloat16 *)h.dqkv;

  p.pointers[Q] = (void *)(qkv + mz_cuda_query_at(h, b, 0, 0));
  p.pointers[K] = (void *)(qkv + mz_cuda_key_at(h, b, 0, 0));
  p.pointers[V] = (void *)(qkv + mz_cuda_value_at(h, b, 0, 0));
  p.pointers[O] = (__nv_bfloat16 *)h.out + mz_cuda_out_at(h, b, 0, 0);
  p.pointers[STATS] = h.lse + mz_cuda_stats_at(h, b, 0, 0);
  if (!p.grad) return;
  p.pointers[DO] = (void *)(dout + mz_cuda_out_at(h, b, 0, 0));
  p.pointers[DQ] = dqkv + mz_cuda_query_at(h, b, 0, 0);
  p.pointers[DK] = dqkv + mz_cuda_key_at(h, b, 0, 0);
  p.pointers[DV] = dqkv + mz_cuda_value_at(h, b, 0, 0);
}

static mz_status_t run(const mz_kernels_t *kernels, mz_cuda_cudnn_t *cudnn,
                       plan &p, const mz_cuda_heads_t &h, cudaStream_t stream)
{
  cudnnStatus_t status = fe::detail::set_stream(cudnn->handle, stream);

  MZ_REQUIRE(status == CUDNN_STATUS_SUCCESS, MZ_ERR_CUDA,
             "cuDNN does not take the stream: status %d", (int)status);
  for (int b = 0; b < h.batch; b += p.part) {
    point(p, h, b);
    fe::error_t error =
        p.graph->execute(cudnn->handle, p.pointers, kernels->workspace);

    MZ_REQUIRE(error.is_good(), MZ_ERR_CUDA, "%s: %s", cudnn->name,
               error.get_message().c_str());
  }
  return MZ_OK;
}

mz_status_t mz_cuda_cudnn_attention(const mz_kernels_t *kernels,
                                    mz_cuda_cudnn_t *cudnn,
                                    const mz_cuda_heads_t *h, bool grad,
                                    cudaStream_t stream, bool *served_out)
{
  plan *p;

  *served_out = false;
  if (h->sequence % TILE != 0 || h->width % 8 != 0) return MZ_OK;
  p = find_or_make(kernels, cudnn, *h, grad);
  if (!p || p->part == 0) return MZ_OK;
  try {
    MZ_TRY(run(kernels, cudnn, *p, *h, stream));
  } catch (const std::exception &error) {
    MZ_FAIL(MZ_ERR_CUDA, "%s: %s", cudnn->name, error.what());
  }
  *served_out = true;
  return MZ_OK;
}

bool mz_cuda_cudnn_serves(const mz_kernels_t *kernels, mz_cuda_cudnn_t *cudnn,
                          const mz_cuda_heads_t *h, bool grad)
{
  const plan *p = find(cudnn, *h, grad, kernels->deterministic != 0);

  return p && p->part > 0;
}

#else

mz_status_t mz_cuda_cudnn_create(mz_cuda_cudnn_t **out)
{
  *out = NULL;
  return MZ_OK;
}

void mz_cuda_cudnn_destroy(mz_cuda_cudnn_t *cudnn) { (void)cudnn; }

const char *mz_cuda_cudnn_name(const mz_cuda_cudnn_t *cudnn)
{
  (void)cudnn;
  return "";
}

mz_status_t mz_cuda_cudnn_attention(const mz_kernels_t *kernels,
                                    mz_cuda_cudnn_t *cudnn,
                                    const mz_cuda_heads_t *h, bool grad,
                                    cudaStream_t stream, bool *served_out)
{
  (void)kernels, (void)cudnn, (void)h, (void)grad, (void)stream;
  *served_out = false;
  return MZ_OK;
}

bool mz_cuda_cudnn_serves(const mz_kernels_t *kernels, mz_cuda_cudnn_t *cudnn,
                          const mz_cuda_heads_t *h, bool grad)
{
  (void)kernels, (void)cudnn, (void)h, (void)grad;
  return false;
}

#endif
