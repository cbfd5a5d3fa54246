/* SPDX-License-Identifier: Apache-2.0 */
/* Text to an llm.c token file: the first 256 numbers are the int32 header, the
 * rest are ids. Usage: token_file NUMBERS.txt OUT.bin */
#include <inttypes.h>
#include <stdio.h>

int main(int argc, char **argv)
{
  FILE *in = argc == 3 ? fopen(argv[1], "r") : NULL;
  FILE *out = in ? fopen(argv[2], "wb") : NULL;
  int64_t value, n = 0;
  size_t good = 1;

  if (!out) {
    fprintf(stderr, "usage: token_file NUMBERS.txt OUT.bin\n");
    return 2;
  }
  for (; good == 1 && fscanf(in, "%" SCNd64, &value) == 1; n++) {
    int32_t word = (int32_t)value;
    uint16_t id = (uint16_t)value;
    good = n < 256 ? fwrite(&word, sizeof word, 1, out)
                   : fwrite(&id, sizeof id, 1, out);
  }
  fclose(in);
  return fclose(out) != 0 || good != 1;
}
