/* SPDX-License-Identifier: Apache-2.0 */
/* TINY: the small model of the tests, its batches, and whole runs of it on any
 * communicator. */
#ifndef MZ_TESTS_TINY_H
#define MZ_TESTS_TINY_H

#include <moezero/config.h>
#include <moezero/engine.h>

enum {
  TINY_SEQUENCE = 16,
  TINY_VOCAB = 64,
  TINY_MAX_BATCH = 64,
  TINY_MAX_GIVEN = 16,
  TINY_VALUE = 256
};

/* Assignments that a case puts together. */
typedef struct tiny_given {
  char values[TINY_MAX_GIVEN][TINY_VALUE];
  const char *all[TINY_MAX_GIVEN];
  int num;
} tiny_given_t;

void tiny_give(tiny_given_t *given, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* What a run leaves behind. */
typedef struct tiny_run {
  int num_steps;
  double loss[64], norm[64];
  uint64_t hash;  /* of the parameters at the end */
  double min_gap; /* smallest over the steps */
  float *values;  /* all parameters, in order of tensors */
  int64_t num_values;
  int64_t *offsets; /* [num_tensors + 1] */
  int num_tensors;
  char **names;
  char *tuning; /* this rank's table at the end */
} tiny_run_t;

/* An engine on TINY with assignments "key=value" over it. */
typedef struct tiny {
  mz_config_t *config;
  mz_decl_t *decl;
  mz_engine_t *engine;
  MPI_Comm comm;
  /* what a test may set before a step */
  int64_t first_sample; /* of the global batch */
  bool ragged;          /* every second micro-batch has half of the sequences */
  int32_t (*token)(int64_t step, int64_t sample, int64_t t); /* NULL: ours */
} tiny_t;

/* Engines make progress inline: comm.thread is false unless an assignment says
 * otherwise. */
extern bool tiny_inline;

/* The tuning table that engines take, the same on all ranks; NULL: none. */
extern const char *tiny_tuning;

/* TINY's configuration for the ranks of comm. */
mz_status_t tiny_config(const char *const *assignments, int num, MPI_Comm comm,
                        mz_config_t **config_out);

mz_status_t tiny_create(const char *const *assignments, int num, MPI_Comm comm,
                        tiny_t *tiny_out);
void tiny_destroy(tiny_t *tiny);

/* Token t of a sample of a step: a noisy sequence. */
int32_t tiny_token(int64_t step, int64_t sample, int64_t t);

/* From now on SIGUSR2 prints where the messages of the engine that lives stand,
 * also while it waits. Before MPI makes its threads. */
void tiny_watch(void);

/* One optimizer step on the global batch of that step. */
mz_status_t tiny_step(tiny_t *tiny, mz_step_result_t *result_out);

/* Forward only over the batch of the next step. */
mz_status_t tiny_eval(tiny_t *tiny, double *loss_sum_out, int64_t *labels_out);

/* All tensors of a part, and the hash of the parameters, into run's fields. */
mz_status_t tiny_read(tiny_t *tiny, mz_tensor_part_t part, tiny_run_t *run);

/* create, num_steps steps, read everything, destroy. */
mz_status_t tiny_run(const char *const *assignments, int num, MPI_Comm comm,
                     int num_steps, tiny_run_t *run_out);
void tiny_run_free(tiny_run_t *run);

/* Largest relative differences: of losses, of norms, of a tensor in L2. */
typedef struct tiny_apart {
  double loss, norm, tensor;
  const char *name; /* of the tensor; borrowed from the first run */
} tiny_apart_t;

tiny_apart_t tiny_compare(const tiny_run_t *a, const tiny_run_t *b);

/* Whether a case passed on all ranks of the world, which all call this: rank 0
 * prints that it is right, a rank that has an error prints that. The format and
 * what follows name the case. */
void tiny_report(mz_status_t st, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Cases that did not. */
extern int tiny_num_failed;

#endif
