/* SPDX-License-Identifier: Apache-2.0 */
/* Algorithms of products chosen by timing, and their table as text. */
#include "kernels/cuda/products_impl.h"

#include <stdio.h>
#include <string.h>

/* Timed runs of a candidate after one that loads it; characters of a line. */
enum { REPEATS = 5, LINE_CHARS = 320, ALGO_WORDS = 8 };

static_assert(sizeof(cublasLtMatmulAlgo_t) == ALGO_WORDS * sizeof(uint64_t),
              "the text holds an algorithm as eight words");

extern "C" mz_status_t mz_cuda_products_tune(mz_cuda_products_t *products,
                                             bool on)
{
  for (int i = 0; on && i < 2; i++)
    if (!products->timed[i]) MZ_CUDA(cudaEventCreate(&products->timed[i]));
  products->tune = on;
  return MZ_OK;
}

/* --- timing --- */

/* What is timed: a product by one algorithm, or (algo NULL) in parts with the
 * own kernel of its activation. */
typedef struct contender {
  mz_cuda_products_t *products;
  const mz_product_t *p;
  const mz_product_place_t *place;
  mz_product_problem_t *problem;
  const cublasLtMatmulAlgo_t *algo;
  void *d;
} contender_t;

static mz_status_t run_parts(const contender_t *c)
{
  mz_product_t part = mz_cuda_product_part(c->p);
  int64_t count = mz_product_d_elements(c->p);

  MZ_TRY(mz_cuda_product_run(c->products, &part, c->place));
  if (c->p->epilogue == MZ_PRODUCT_GELU)
    return MZ_TRACE(
        mz_cuda_gelu(c->p->out, c->p->aux, c->p->d, count, c->place->stream));
  return MZ_TRACE(
      mz_cuda_dgelu(c->p->out, c->p->aux, c->p->d, count, c->place->stream));
}

static mz_status_t run_once(const contender_t *c, bool *can_out)
{
  cublasStatus_t status;

  *can_out = true;
  if (!c->algo) return MZ_TRACE(run_parts(c));
  status = mz_cuda_product_start(c->products, c->p, c->problem, c->algo, c->d,
                                 c->place);
  *can_out = status == CUBLAS_STATUS_SUCCESS;
  return MZ_OK;
}

/* @param ms_out  Milliseconds of all runs; left alone if it cannot run. */
static mz_status_t time_contender(const contender_t *c, float *ms_out)
{
  cudaEvent_t *timed = c->products->timed;
  bool can;

  MZ_TRY(run_once(c, &can));
  if (!can) return MZ_OK;
  MZ_CUDA(cudaEventRecord(timed[0], c->place->stream));
  for (int i = 0; i < REPEATS; i++)
    MZ_TRY(run_once(c, &can));
  MZ_CUDA(cudaEventRecord(timed[1], c->place->stream));
  MZ_CUDA(cudaEventSynchronize(timed[1]));
  MZ_CUDA(cudaEventElapsedTime(ms_out, timed[0], timed[1]));
  return MZ_OK;
}

/* Where candidates write: over and over into the output, which is written
 * anyway, or, when it is added to, into the workspace behind the products.
 * NULL: it does not fit there. */
static void *timing_target(const mz_cuda_products_t *products,
                           const mz_product_t *p)
{
  int64_t bytes = mz_product_d_elements(p) * (int64_t)mz_dtype_bytes(p->out);

  if (!p->add) return p->d;
  return bytes <= products->behind_bytes ? products->workspace + products->bytes
                                         : NULL;
}

/* The algorithm found by timing the same product that does not add. */
static bool borrow(const mz_cuda_products_t *products,
                   mz_product_choice_t *choice)
{
  mz_product_key_t key = choice->key;
  int32_t at;

  key.flags &= ~(uint32_t)MZ_KEY_ADD;
  at = mz_cuda_product_find(products, &key);
  if (at < 0 || products->choices[at].form != MZ_FORM_WHOLE) return false;
  choice->algo = products->choices[at].algo;
  return true;
}

mz_status_t mz_cuda_product_tune(mz_cuda_products_t *products,
                                 const mz_product_t *p,
                                 const mz_product_place_t *place,
                                 mz_product_choice_t *choice)
{
  cublasLtMatmulAlgo_t algos[MZ_PRODUCTS_CANDIDATES];
  mz_product_problem_t problem;
  contender_t c = {products, p, place, &problem, NULL, NULL};
  float best = 0, ms;
  int found;

  choice->timed = true;
  choice->form = MZ_FORM_PARTS;
  MZ_TRY(mz_cuda_product_search(products, p, choice->key.bucket, place, algos,
                                MZ_PRODUCTS_CANDIDATES, &found));
  if (found == 0) return MZ_OK;
  choice->form = MZ_FORM_WHOLE;
  choice->algo = algos[0];
  c.d = timing_target(products, p);
  if (!c.d) {
    borrow(products, choice);
    return MZ_OK;
  }
  MZ_TRY(mz_cuda_product_describe(p, p->rows, &problem));
  for (int i = 0; i < found; i++) {
    ms = -1;
    c.algo = &algos[i];
    MZ_TRY(time_contender(&c, &ms));
    if (ms < 0 || (best > 0 && ms >= best)) continue;
    best = ms;
    choice->algo = algos[i];
  }
  if (p->epilogue != MZ_PRODUCT_GELU && p->epilogue != MZ_PRODUCT_DGELU)
    return MZ_OK;
  c.algo = NULL;
  MZ_TRY(time_contender(&c, &ms));
  if (best == 0 || ms <= best) choice->form = MZ_FORM_PARTS;
  return MZ_OK;
}

/* --- text --- */

/* How a choice was made; begins its line. */
static const char MARK_TIMED = 't', MARK_GUESSED = 'g';

static int print_choice(const mz_product_choice_t *choice, char *line)
{
  const mz_product_key_t *key = &choice->key;
  int n =
      snprintf(line, LINE_CHARS,
               "%c %" PRIu32 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64
               " %" PRIx32 " %d ",
               choice->timed ? MARK_TIMED : MARK_GUESSED, key->kind, key->n,
               key->k, key->ldn, key->bucket, key->flags, (int)choice->form);

  for (int i = 0; i < ALGO_WORDS; i++)
    n += snprintf(line + n, (size_t)(LINE_CHARS - n), "%016" PRIx64,
                  choice->algo.data[i]);
  return n + snprintf(line + n, (size_t)(LINE_CHARS - n), "\n");
}

extern "C" mz_status_t
mz_cuda_products_export(const mz_cuda_products_t *products, char **text_out)
{
  char *text = NULL;
  int at;

  MZ_TRY(mz_new((int64_t)(products->num_choices + 1) * LINE_CHARS,
                "text of the products", &text));
  at = snprintf(text, LINE_CHARS, "cublaslt %zu sm %d\n", cublasLtGetVersion(),
                products->capability);
  for (int32_t i = 0; i < products->num_choices; i++)
    at += print_choice(&products->choices[i], text + at);
  *text_out = text;
  return MZ_OK;
}

static bool read_choice(const char *line, mz_product_choice_t *choice)
{
  mz_product_key_t *key = &choice->key;
  int form = -1, at = 0;
  char mark = 0;

  memset(choice, 0, sizeof *choice);
  sscanf(line,
         "%c %" SCNu32 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64
         " %" SCNx32 " %d %n",
         &mark, &key->kind, &key->n, &key->k, &key->ldn, &key->bucket,
         &key->flags, &form, &at);
  if (at == 0 || (mark != MARK_TIMED && mark != MARK_GUESSED)) return false;
  if (form != MZ_FORM_WHOLE && form != MZ_FORM_PARTS) return false;
  choice->timed = true;
  choice->form = (mz_product_form_t)form;
  for (int i = 0; i < ALGO_WORDS; i++, at += 16)
    if (sscanf(line + at, "%16" SCNx64, &choice->algo.data[i]) != 1 ||
        strspn(line + at, "0123456789abcdef") < 16)
      return false;
  return line[at] == '\0';
}

extern "C" mz_status_t mz_cuda_products_import(mz_cuda_products_t *products,
                                               const char *text)
{
  mz_product_choice_t choice;
  size_t version = 0;
  int capability = 0, number = 1;
  const char *line;
  char copy[LINE_CHARS]; /* sscanf looks for the end of what it reads */

  MZ_REQUIRE(sscanf(text, "cublaslt %zu sm %d", &version, &capability) == 2,
             MZ_ERR_ARG, "not a table of products: %.40s", text);
  MZ_REQUIRE(version == cublasLtGetVersion() &&
                 capability == products->capability,
             MZ_ERR_UNSUPPORTED,
             "table of products of cuBLASLt %zu on compute capability %d, here "
             "are %zu and %d",
             version, capability, cublasLtGetVersion(), products->capability);
  for (line = strchr(text, '\n'); line && line[1]; line = strchr(line, '\n')) {
    line++;
    number++;
    snprintf(copy, sizeof copy, "%.*s", (int)strcspn(line, "\n"), line);
    MZ_REQUIRE(read_choice(copy, &choice), MZ_ERR_ARG,
               "table of products, line %d: %.60s", number, copy);
    MZ_REQUIRE(mz_cuda_product_keep(products, &choice), MZ_ERR_FIT,
               "table of products: more than %d choices",
               (int)MZ_PRODUCTS_ENTRIES);
  }
  return MZ_OK;
}
