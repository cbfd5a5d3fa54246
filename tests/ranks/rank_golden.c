/* SPDX-License-Identifier: Apache-2.0 */
/**
 * One step of a small model against PyTorch's float64 reference.
 * rank_golden FILE GROUP [bound=B] [KEY=VALUE]...; FILE is of tests/golden,
 * whose make_golden.py says what a group holds; the assignments change the
 * layout. Exit code 0: loss and every gradient agree to a relative B, 1e-5
 * where not given (L2).
 */
#include <moezero/config.h>
#include <moezero/engine.h>

#include "base/alloc.h"
#include "base/check.h"
#include <moezero/gpt.h>

#include <hdf5.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CONFIG_MAX = 8192 };
static double bound = 1e-5;

/* After an unexpected failure the others would wait for this rank. */
#define MUST(call)                                                             \
  do {                                                                         \
    if ((call) != MZ_OK) {                                                     \
      fprintf(stderr, "%s:%d: %s\n", __func__, __LINE__, mz_error_last());     \
      MPI_Abort(MPI_COMM_WORLD, 1);                                            \
    }                                                                          \
  } while (0)

static void must_hdf5(bool good, const char *what)
{
  if (good) return;
  fprintf(stderr, "HDF5: %s\n", what);
  MPI_Abort(MPI_COMM_WORLD, 1);
}

static void read_all(hid_t group, const char *part, const char *name,
                     hid_t type, int64_t elements, void *values)
{
  char path[2 * MZ_NAME_MAX];
  hid_t set, space;

  snprintf(path, sizeof path, "%s%s", part, name);
  set = H5Dopen2(group, path, H5P_DEFAULT);
  must_hdf5(set >= 0, path);
  space = H5Dget_space(set);
  must_hdf5(H5Sget_simple_extent_npoints(space) == elements, path);
  must_hdf5(H5Dread(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) >= 0,
            path);
  H5Sclose(space);
  H5Dclose(set);
}

static double read_number(hid_t group, const char *name)
{
  double value = NAN;
  hid_t attribute = H5Aopen(group, name, H5P_DEFAULT);

  must_hdf5(attribute >= 0, name);
  must_hdf5(H5Aread(attribute, H5T_NATIVE_DOUBLE, &value) >= 0, name);
  H5Aclose(attribute);
  return value;
}

static void read_config(hid_t group, char text[CONFIG_MAX])
{
  hid_t attribute = H5Aopen(group, "config", H5P_DEFAULT), type;

  must_hdf5(attribute >= 0, "config");
  type = H5Aget_type(attribute);
  memset(text, 0, CONFIG_MAX);
  must_hdf5(H5Tget_size(type) < CONFIG_MAX, "config is too long");
  must_hdf5(H5Aread(attribute, type, text) >= 0, "config");
  H5Tclose(type);
  H5Aclose(attribute);
}

static void write_weights(mz_engine_t *engine, const mz_decl_t *decl,
                          hid_t group)
{
  for (int32_t t = 0; t < mz_decl_num_tensors(decl); t++) {
    int64_t elements = mz_decl_tensor_elements(decl, t);
    float *values = NULL;

    MUST(mz_new(elements, "weights", &values));
    read_all(group, "weights/", mz_decl_tensor_name(decl, t), H5T_NATIVE_FLOAT,
             elements, values);
    MUST(mz_engine_write(engine, t, MZ_PART_WEIGHTS, values));
    mz_free(values);
  }
}

/* This rank's samples of the one micro-batch of the step. */
static void run_step(mz_engine_t *engine, const mz_config_values_t *config,
                     hid_t group, int rank, mz_step_result_t *result)
{
  int64_t S = config->data.sequence_length, batch = config->train_batch_size;
  int64_t m = config->train_micro_batch_size_per_gpu;
  int32_t sequences = (int32_t)m, *tokens = NULL, *labels = NULL;
  int64_t *samples = NULL;
  mz_step_data_t data = {
      .num_micro = 1, .sequences = &sequences, .max_sequences = &sequences};

  MUST(mz_new(batch * S, "tokens", &tokens));
  MUST(mz_new(batch * S, "labels", &labels));
  MUST(mz_new(m, "samples", &samples));
  read_all(group, "tokens", "", H5T_NATIVE_INT32, batch * S, tokens);
  read_all(group, "labels", "", H5T_NATIVE_INT32, batch * S, labels);
  for (int64_t i = 0; i < m; i++)
    samples[i] = rank * m + i;
  data.tokens = tokens + rank * m * S;
  data.labels = labels + rank * m * S;
  data.samples = samples;
  MUST(mz_engine_step(engine, &data, result));
  mz_free(tokens);
  mz_free(labels);
  mz_free(samples);
}

static int check_number(const char *name, double value, double wanted)
{
  double error = fabs(value - wanted) / fmax(fabs(wanted), 1e-30);

  if (error <= bound) return 0;
  fprintf(stderr, "%s is %.9g, reference %.9g\n", name, value, wanted);
  return 1;
}

static int check_gradient(mz_engine_t *engine, const mz_decl_t *decl,
                          hid_t group, int32_t tensor)
{
  int64_t elements = mz_decl_tensor_elements(decl, tensor);
  const char *name = mz_decl_tensor_name(decl, tensor);
  float *own = NULL, *wanted = NULL;
  double error = 0, norm = 0;

  MUST(mz_new(elements, "gradient", &own));
  MUST(mz_new(elements, "reference", &wanted));
  MUST(mz_engine_read(engine, tensor, MZ_PART_GRADS, own));
  read_all(group, "grads/", name, H5T_NATIVE_FLOAT, elements, wanted);
  for (int64_t i = 0; i < elements; i++) {
    double d = (double)own[i] - (double)wanted[i];
    error += d * d;
    norm += (double)wanted[i] * (double)wanted[i];
  }
  mz_free(own);
  mz_free(wanted);
  if (sqrt(error) <= bound * sqrt(norm)) return 0;
  fprintf(stderr, "%s: gradient is off by %.3g of %.3g\n", name, sqrt(error),
          sqrt(norm));
  return 1;
}

static int compare(hid_t group, const char *const *assignments,
                   int num_assignments)
{
  char text[CONFIG_MAX];
  mz_config_t *config = NULL;
  mz_decl_t *decl = NULL;
  mz_engine_t *engine = NULL;
  mz_step_result_t result;
  int rank, size, bad = 0;

  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  read_config(group, text);
  MUST(mz_config_parse(text, "golden", assignments, num_assignments, &config));
  MUST(mz_config_resolve(config, size));
  MUST(mz_decl_create(&decl));
  MUST(mz_gpt_declare(mz_config_values(config), decl));
  MUST(mz_engine_create(config, decl, MPI_COMM_WORLD, &engine));
  write_weights(engine, decl, group);
  run_step(engine, mz_config_values(config), group, rank, &result);

  bad += check_number("loss", result.loss, read_number(group, "loss"));
  bad += check_number("lm_loss", result.lm_loss, read_number(group, "lm_loss"));
  bad +=
      check_number("aux_loss", result.aux_loss, read_number(group, "aux_loss"));
  bad += check_number("z_loss", result.z_loss, read_number(group, "z_loss"));
  if (fabs(result.min_gap - read_number(group, "min_gap")) > 10 * bound) {
    fprintf(stderr, "smallest gap is %.6f\n", result.min_gap);
    bad++;
  }
  for (int32_t t = 0; t < mz_decl_num_tensors(decl); t++)
    bad += check_gradient(engine, decl, group, t);
  mz_engine_destroy(&engine);
  mz_decl_destroy(&decl);
  mz_config_destroy(&config);
  return bad;
}

int main(int argc, char **argv)
{
  int provided, bad, worst = 1, first = 3;
  hid_t file, group;

  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  if (argc < 3) MPI_Abort(MPI_COMM_WORLD, 2);
  file = H5Fopen(argv[1], H5F_ACC_RDONLY, H5P_DEFAULT);
  must_hdf5(file >= 0, argv[1]);
  group = H5Gopen2(file, argv[2], H5P_DEFAULT);
  must_hdf5(group >= 0, argv[2]);
  if (argc > first && strncmp(argv[first], "bound=", 6) == 0)
    bound = atof(argv[first++] + 6);
  bad = compare(group, (const char *const *)argv + first, argc - first);
  H5Gclose(group);
  H5Fclose(file);
  MPI_Allreduce(&bad, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Finalize();
  return worst != 0;
}
