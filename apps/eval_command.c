/* SPDX-License-Identifier: Apache-2.0 */
/* gpt_moe eval: the loss of saved weights over data.valid. */
#include "commands.h"
#include "job.h"

#include "base/check.h"
#include <moezero/gpt.h>
#include "train/evaluate.h"
#include "train/save.h"

#include <math.h>
#include <mpi.h>
#include <stdio.h>

static mz_status_t start_up(job_t *job)
{
  MZ_TRY(job_read_config_anywhere(job, NULL, 0));
  MZ_TRY(job_settle(job, mz_feed_create_valid(job->config, job->rank, job->size,
                                              &job->feed)));
  MZ_TRY(job_compare(job, "data.valid", mz_feed_num_valid(job->feed)));
  MZ_TRY(job_settle(job, mz_decl_create(&job->decl)));
  MZ_TRY(job_settle(job,
                    mz_gpt_declare(mz_config_values(job->config), job->decl)));
  MZ_TRY(mz_engine_create_inference(job->config, job->decl, MPI_COMM_WORLD,
                                    &job->engine));
  return MZ_TRACE(mz_save_init_from(job->engine, job->options->from));
}

/* A token of a text is a byte, but for the mark at the end of each file. */
static void print(bool json, bool text, double loss, int64_t tokens)
{
  if (json) {
    printf("{\"eval_loss\": %.17g, \"perplexity\": %.17g", loss, exp(loss));
    if (text) printf(", \"nat_per_byte\": %.17g", loss);
    printf(", \"tokens\": %" PRId64 "}\n", tokens);
    return;
  }
  printf("loss %.6f nat a token", loss);
  if (text) printf(", %.6f nat a byte", loss);
  printf(", perplexity %.4f, over %" PRId64 " tokens\n", exp(loss), tokens);
}

static mz_status_t run(job_t *job)
{
  const mz_data_config_t *data;
  mz_data_format_t format;
  int64_t tokens;
  double loss;

  MZ_TRY(start_up(job));
  MZ_TRY(mz_evaluate(job->engine, job->feed, &loss, &tokens));
  data = &mz_config_values(job->config)->data;
  MZ_TRY(job_settle(
      job, mz_data_find_format(data->valid[0], data->format, &format)));
  if (job->rank == 0)
    print(job->options->json, format == MZ_DATA_TEXT, loss, tokens);
  return MZ_OK;
}

int command_eval(const options_t *options)
{
  job_t job = {0};
  mz_status_t st = job_create(options, &job);

  if (st == MZ_OK) st = run(&job);
  return job_end(&job, st);
}
