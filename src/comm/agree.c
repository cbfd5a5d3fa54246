/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Small collectives outside of a step, as gathers over the exchange lane of
 * group 0. They return after their own message only.
 */
#include "comm/comm_impl.h"

#include <stdio.h>
#include <string.h>

enum { MESSAGE_BYTES = 1024 };

static mz_status_t gather_and_wait(mz_comm_t *comm, const mz_msg_t *msg)
{
  mz_ticket_t ticket;

  MZ_TRY(mz_comm_post(comm, MZ_LANE_EXCHANGE, msg, &ticket));
  return MZ_TRACE(mz_comm_wait(comm, ticket));
}

/* One integer of every rank into comm->values. */
static mz_status_t gather_values(mz_comm_t *comm, int64_t value)
{
  for (int r = 0; r < comm->size; r++) {
    comm->counts[r] = 1;
    comm->displs[r] = r;
  }
  return MZ_TRACE(gather_and_wait(comm, &(mz_msg_t){
                                            .kind = MZ_MSG_GATHER,
                                            .element_bytes = sizeof value,
                                            .send = &value,
                                            .send_count = 1,
                                            .recv = comm->values,
                                            .recv_counts = comm->counts,
                                            .recv_displs = comm->displs,
                                        }));
}

mz_status_t mz_comm_broadcast(mz_comm_t *comm, void *bytes, int64_t num_bytes,
                              int root)
{
  MZ_REQUIRE(comm && num_bytes >= 0 && (bytes || num_bytes == 0) && root >= 0 &&
                 root < comm->size,
             MZ_ERR_ARG, "broadcast of %" PRId64 " bytes at %p from rank %d",
             num_bytes, bytes, root);
  for (int r = 0; r < comm->size; r++) {
    comm->counts[r] = r == root ? num_bytes : 0;
    comm->displs[r] = 0;
  }
  return MZ_TRACE(gather_and_wait(comm, &(mz_msg_t){
                                            .kind = MZ_MSG_GATHER,
                                            .element_bytes = 1,
                                            .recv = bytes,
                                            .recv_counts = comm->counts,
                                            .recv_displs = comm->displs,
                                            .bound = num_bytes,
                                        }));
}

mz_status_t mz_comm_gather(mz_comm_t *comm, int64_t value,
                           const int64_t **values_out)
{
  MZ_REQUIRE(comm && values_out, MZ_ERR_ARG, "a pointer is NULL");
  MZ_TRY(gather_values(comm, value));
  *values_out = comm->values;
  return MZ_OK;
}

mz_status_t mz_comm_min_max(mz_comm_t *comm, int64_t value, int64_t *min_out,
                            int64_t *max_out)
{
  int64_t min = value, max = value;

  MZ_REQUIRE(comm && min_out && max_out, MZ_ERR_ARG, "a pointer is NULL");
  MZ_TRY(gather_values(comm, value));
  for (int r = 0; r < comm->size; r++) {
    if (comm->values[r] < min) min = comm->values[r];
    if (comm->values[r] > max) max = comm->values[r];
  }
  *min_out = min;
  *max_out = max;
  return MZ_OK;
}

mz_status_t mz_comm_agree(mz_comm_t *comm, mz_status_t status)
{
  char text[MESSAGE_BYTES];
  mz_status_t worst = MZ_OK;
  int first = -1;

  MZ_REQUIRE(comm, MZ_ERR_ARG, "comm is NULL");
  /* Kept here: the calls below may record errors of their own. */
  snprintf(text, sizeof text, "%s", mz_error_message());
  if (status != MZ_OK && text[0] == '\0')
    snprintf(text, sizeof text, "%s", mz_status_text(status));
  MZ_TRY(gather_values(comm, status));
  for (int r = 0; r < comm->size; r++) {
    if (comm->values[r] == MZ_OK) continue;
    if (first < 0) first = r;
    if ((int64_t)worst < comm->values[r]) worst = (mz_status_t)comm->values[r];
  }
  if (first < 0) return MZ_OK;
  MZ_TRY(mz_comm_broadcast(comm, text, sizeof text, first));
  MZ_FAIL(worst, "rank %d: %s", first, text);
}
