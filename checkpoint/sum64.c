/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/sum64.h"

#include <string.h>

static const uint64_t key_step = UINT64_C(0x9e3779b97f4a7c15);

static inline uint64_t mix(uint64_t x)
{
  x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
  return x ^ (x >> 31);
}

uint64_t mz_sum64_part(const void *bytes, int64_t at, int64_t num_bytes)
{
  const char *from = bytes;
  uint64_t key = ((uint64_t)at / 8 + 1) * key_step, sum = 0, word;

  for (; num_bytes >= 8; num_bytes -= 8, from += 8, key += key_step) {
    memcpy(&word, from, 8);
    sum += mix(word ^ key);
  }
  if (num_bytes > 0) {
    word = 0;
    memcpy(&word, from, (size_t)num_bytes);
    sum += mix(word ^ key);
  }
  return sum;
}

uint64_t mz_sum64_end(uint64_t parts, int64_t file_bytes)
{
  return mix(parts ^ (uint64_t)file_bytes);
}
