/* SPDX-License-Identifier: Apache-2.0 */
/**
 * byte_entropy FILE: the entropy of the bytes of a file in nats a byte, which a
 * model that knows only how frequent each byte is cannot get below.
 */
#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static double entropy(const int64_t counts[256], int64_t total)
{
  double sum = 0;

  for (int b = 0; b < 256; b++) {
    double p = (double)counts[b] / (double)total;
    if (counts[b] > 0) sum -= p * log(p);
  }
  return sum;
}

int main(int argc, char **argv)
{
  static unsigned char block[1 << 16];
  int64_t counts[256] = {0}, total = 0;
  size_t got;
  FILE *file;

  if (argc != 2) {
    fprintf(stderr, "usage: byte_entropy FILE\n");
    return 2;
  }
  file = fopen(argv[1], "rb");
  if (!file) {
    fprintf(stderr, "%s: %s\n", argv[1], strerror(errno));
    return 1;
  }
  while ((got = fread(block, 1, sizeof block, file)) > 0) {
    for (size_t i = 0; i < got; i++)
      counts[block[i]]++;
    total += (int64_t)got;
  }
  if (ferror(file) || total == 0) {
    fprintf(stderr, "%s: cannot be read, or empty\n", argv[1]);
    fclose(file);
    return 1;
  }
  fclose(file);
  printf("%.4f\n", entropy(counts, total));
  return 0;
}
