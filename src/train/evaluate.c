/* SPDX-License-Identifier: Apache-2.0 */
#include "train/evaluate.h"

#include "base/check.h"
#include "comm/comm.h"

mz_status_t mz_evaluate(mz_engine_t *engine, mz_feed_t *feed, double *loss_out,
                        int64_t *labels_out)
{
  int64_t num = mz_feed_num_eval_batches(feed), labels = 0, some;
  double sum = 0, part;
  mz_step_data_t data;

  for (int64_t b = 0; b < num; b++) {
    MZ_TRY(
        mz_comm_agree(mz_engine_comm(engine), mz_feed_valid(feed, b, &data)));
    MZ_TRY(mz_engine_eval(engine, &data, &part, &some));
    sum += part;
    labels += some;
  }
  *loss_out = sum / (double)labels;
  *labels_out = labels;
  return MZ_OK;
}
