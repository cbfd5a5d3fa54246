/* SPDX-License-Identifier: Apache-2.0 */
#include "train/feed.h"

#include "base/alloc.h"
#include "base/check.h"

struct mz_feed {
  const mz_config_values_t *config;
  bool trains;
  mz_dataset_t *train, *valid; /* NULL: not trains, without data.valid */
  mz_sampler_t sampler;
  mz_batch_layout_t layout;
  mz_batch_t batch;
  FILE *log;
};

static mz_status_t make_batch(mz_feed_t *feed)
{
  mz_batch_t *b = &feed->batch;
  int64_t A = feed->layout.accumulation, rows, elements;

  MZ_TRY(mz_mul_i64(A, feed->layout.micro_sequences, &rows));
  MZ_TRY(mz_mul_i64(rows, feed->layout.sequence_length, &elements));
  MZ_TRY(mz_new(elements, "tokens of a step", &b->tokens));
  MZ_TRY(mz_new(elements, "labels of a step", &b->labels));
  MZ_TRY(mz_new(rows, "places of a step", &b->places));
  MZ_TRY(mz_new(rows, "samples of a step", &b->samples));
  MZ_TRY(mz_new(A, "sequences of a step", &b->sequences));
  return MZ_TRACE(mz_new(A, "sequences of a step", &b->max_sequences));
}

static mz_status_t open_files(mz_feed_t *feed)
{
  const mz_data_config_t *data = &feed->config->data;
  int64_t vocab = feed->config->model.vocab_size;

  if (feed->trains)
    MZ_TRY(mz_dataset_open(data->train, data->train_weight, data->num_train,
                           data->format, vocab, data->sequence_length,
                           &feed->train));
  if (data->num_valid == 0) return MZ_OK;
  return MZ_TRACE(mz_dataset_open(data->valid, data->valid_weight,
                                  data->num_valid, data->format, vocab,
                                  data->sequence_length, &feed->valid));
}

static mz_status_t create(const mz_config_t *config, int rank, int size,
                          bool trains, mz_feed_t **feed_out)
{
  const mz_config_values_t *values = mz_config_values(config);
  mz_feed_t *feed = NULL;
  mz_status_t st;

  *feed_out = NULL;
  MZ_TRY_GOTO(st, mz_new(1, "feed", &feed), done);
  feed->config = values;
  feed->trains = trains;
  feed->layout = (mz_batch_layout_t){
      .rank = rank,
      .size = size,
      .micro_sequences = values->train_micro_batch_size_per_gpu,
      .accumulation = values->gradient_accumulation_steps,
      .sequence_length = values->data.sequence_length};
  MZ_TRY_GOTO(st, open_files(feed), done);
  MZ_TRY_GOTO(st, make_batch(feed), done);
  feed->sampler =
      (mz_sampler_t){(uint64_t)values->data.seed, mz_feed_num_train(feed)};
  *feed_out = feed;
  feed = NULL;
done:
  mz_feed_destroy(&feed);
  return st;
}

mz_status_t mz_feed_create(const mz_config_t *config, int rank, int size,
                           mz_feed_t **feed_out)
{
  return MZ_TRACE(create(config, rank, size, true, feed_out));
}

mz_status_t mz_feed_create_valid(const mz_config_t *config, int rank, int size,
                                 mz_feed_t **feed_out)
{
  MZ_REQUIRE(mz_config_values(config)->data.num_valid > 0, MZ_ERR_CONFIG,
             "data.valid: nothing is given to evaluate");
  return MZ_TRACE(create(config, rank, size, false, feed_out));
}

void mz_feed_destroy(mz_feed_t **feed)
{
  mz_feed_t *f = *feed;

  if (!f) return;
  mz_free(f->batch.max_sequences);
  mz_free(f->batch.sequences);
  mz_free(f->batch.samples);
  mz_free(f->batch.places);
  mz_free(f->batch.labels);
  mz_free(f->batch.tokens);
  mz_dataset_close(&f->valid);
  mz_dataset_close(&f->train);
  mz_free(f);
  *feed = NULL;
}

void mz_feed_set_log(mz_feed_t *feed, FILE *log) { feed->log = log; }

int64_t mz_feed_num_train(const mz_feed_t *feed)
{
  return feed->train ? mz_dataset_num_samples(feed->train) : 0;
}

int64_t mz_feed_num_valid(const mz_feed_t *feed)
{
  return feed->valid ? mz_dataset_num_samples(feed->valid) : 0;
}

int64_t mz_feed_num_eval_batches(const mz_feed_t *feed)
{
  int64_t all, limit = feed->config->train.eval_steps;

  if (!feed->valid) return 0;
  all = mz_batch_num_in_order(feed->valid, &feed->layout);
  return limit > 0 ? mz_min_i64(all, limit) : all;
}

/* debug.sample_ids */
static void log_samples(const mz_feed_t *feed, int64_t step)
{
  int64_t m = feed->layout.micro_sequences;

  if (!feed->config->debug.sample_ids || !feed->log) return;
  fprintf(feed->log, "step %" PRId64 " samples", step + 1);
  for (int64_t j = 0; j < feed->layout.accumulation; j++)
    for (int64_t i = 0; i < feed->batch.sequences[j]; i++)
      fprintf(feed->log, " %" PRId64, feed->batch.samples[j * m + i]);
  fputc('\n', feed->log);
  fflush(feed->log);
}

static mz_step_data_t data_of(const mz_feed_t *feed, int64_t num_micro)
{
  const mz_batch_t *b = &feed->batch;
  mz_step_data_t data = {(int32_t)num_micro, b->tokens,    b->labels,
                         b->places,          b->sequences, b->max_sequences};
  return data;
}

mz_status_t mz_feed_train(mz_feed_t *feed, int64_t step,
                          mz_step_data_t *data_out)
{
  *data_out = data_of(feed, feed->layout.accumulation);
  MZ_TRY(mz_batch_fill(feed->train, &feed->sampler, &feed->layout, step,
                       &feed->batch));
  log_samples(feed, step);
  return MZ_OK;
}

mz_status_t mz_feed_valid(mz_feed_t *feed, int64_t batch,
                          mz_step_data_t *data_out)
{
  int64_t num = feed->layout.accumulation;

  MZ_TRY(mz_batch_fill(feed->valid, NULL, &feed->layout, batch, &feed->batch));
  while (num > 0 && feed->batch.max_sequences[num - 1] == 0)
    num--;
  *data_out = data_of(feed, num);
  return MZ_OK;
}
