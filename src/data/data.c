/* SPDX-License-Identifier: Apache-2.0 */
#include "data/data.h"

#include "base/alloc.h"
#include "base/check.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
  MAGIC = 20240520,
  MAGIC_32_BIT = 20240801, /* llm.c's files of 32-bit ids */
  VERSION = 1,
  HEADER_BYTES = 256 * 4
};

typedef struct mz_source {
  char *path;
  const uint8_t *map;
  int64_t map_bytes;
  mz_data_format_t format; /* MZ_DATA_TEXT or MZ_DATA_TOKENS */
  int64_t num_tokens;
  int64_t num_windows;
  int64_t first_sample, num_samples;
} mz_source_t;

struct mz_dataset {
  mz_source_t *sources; /* [num] */
  int32_t num;
  int64_t vocab_size, sequence_length;
  int64_t num_samples, num_tokens;
};

static mz_status_t map_file(mz_source_t *source)
{
  mz_status_t st = MZ_OK;
  struct stat info;
  void *map;
  int fd = open(source->path, O_RDONLY | O_CLOEXEC);

  MZ_REQUIRE(fd >= 0, MZ_ERR_IO, "%s: %s", source->path, strerror(errno));
  MZ_REQUIRE_GOTO(fstat(fd, &info) == 0, st, done, MZ_ERR_IO, "%s: %s",
                  source->path, strerror(errno));
  MZ_REQUIRE_GOTO(S_ISREG(info.st_mode), st, done, MZ_ERR_IO,
                  "%s: not a regular file", source->path);
  MZ_REQUIRE_GOTO(info.st_size > 0, st, done, MZ_ERR_DATA,
                  "%s: the file is empty", source->path);
  map = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, fd, 0);
  MZ_REQUIRE_GOTO(map != MAP_FAILED, st, done, MZ_ERR_IO,
                  "%s: cannot map %" PRId64 " bytes: %s", source->path,
                  (int64_t)info.st_size, strerror(errno));
  source->map = map;
  source->map_bytes = (int64_t)info.st_size;
done:
  close(fd);
  return st;
}

static int32_t header_word(const mz_source_t *source, int i)
{
  int32_t word = 0;

  if (source->map_bytes >= (i + 1) * 4)
    memcpy(&word, source->map + i * 4, sizeof word);
  return word;
}

static bool starts_with(const mz_source_t *source, const char *text)
{
  size_t bytes = strlen(text);
  return source->map_bytes >= (int64_t)bytes &&
         memcmp(source->map, text, bytes) == 0;
}

static bool has_suffix(const char *path, const char *suffix)
{
  size_t a = strlen(path), b = strlen(suffix);
  return a >= b && strcmp(path + a - b, suffix) == 0;
}

/* A file named .bin that does not start like a token file is refused rather
 * than read as text: its bytes would train without a complaint. */
static mz_status_t find_format(mz_source_t *source, mz_data_format_t wanted)
{
  int32_t magic = header_word(source, 0);
  bool tokens = magic == MAGIC;

  MZ_REQUIRE(wanted == MZ_DATA_TEXT || magic != MAGIC_32_BIT,
             MZ_ERR_UNSUPPORTED,
             "%s: a file of 32-bit token ids (magic %d), need 16-bit ids "
             "(magic %d)",
             source->path, magic, MAGIC);
  MZ_REQUIRE(wanted == MZ_DATA_TEXT || !(starts_with(source, "\x89HDF\r\n") ||
                                         starts_with(source, "MMIDIDX")),
             MZ_ERR_UNSUPPORTED,
             "%s: HDF5 and Megatron files are not supported yet", source->path);
  MZ_REQUIRE(!(wanted == MZ_DATA_TEXT && tokens), MZ_ERR_DATA,
             "%s: data.format is text, but the file is a token file (magic %d)",
             source->path, MAGIC);
  MZ_REQUIRE(wanted != MZ_DATA_TOKENS || tokens, MZ_ERR_DATA,
             "%s: not a token file: it starts with %d, need magic %d",
             source->path, magic, MAGIC);
  MZ_REQUIRE(wanted == MZ_DATA_TEXT || tokens ||
                 !has_suffix(source->path, ".bin"),
             MZ_ERR_DATA,
             "%s: named .bin but not a token file: it starts with %d, need "
             "magic %d; set data.format to text to read its bytes",
             source->path, magic, MAGIC);
  source->format = tokens ? MZ_DATA_TOKENS : MZ_DATA_TEXT;
  return MZ_OK;
}

static mz_status_t count_tokens(mz_source_t *source)
{
  int64_t count, held;

  if (source->format == MZ_DATA_TEXT) {
    source->num_tokens = source->map_bytes + 1;
    return MZ_OK;
  }
  MZ_REQUIRE(source->map_bytes >= HEADER_BYTES, MZ_ERR_DATA,
             "%s: truncated: %" PRId64 " bytes, the header alone has %d",
             source->path, source->map_bytes, HEADER_BYTES);
  MZ_REQUIRE(header_word(source, 1) == VERSION, MZ_ERR_DATA,
             "%s: version %d of the token file, need %d", source->path,
             header_word(source, 1), VERSION);
  count = header_word(source, 2);
  held = (source->map_bytes - HEADER_BYTES) / 2;
  MZ_REQUIRE(
      count >= 0 && source->map_bytes == HEADER_BYTES + 2 * count, MZ_ERR_DATA,
      "%s: %s: the header counts %" PRId64 " tokens, the file holds %" PRId64,
      source->path, held < count ? "truncated" : "damaged", count, held);
  source->num_tokens = count;
  return MZ_OK;
}

static int32_t token_at(const mz_source_t *source, int64_t i)
{
  uint16_t id;

  if (source->format == MZ_DATA_TEXT)
    return i < source->map_bytes ? source->map[i] : MZ_END_OF_TEXT;
  memcpy(&id, source->map + HEADER_BYTES + 2 * i, sizeof id);
  return id;
}

static mz_status_t id_too_large(const mz_source_t *source, int32_t id,
                                int64_t place, int64_t vocab_size)
{
  MZ_FAIL(MZ_ERR_DATA,
          "%s: token id %" PRId32 " at place %" PRId64
          " is not below model.vocab_size %" PRId64,
          source->path, id, place, vocab_size);
}

static mz_status_t check_ids(const mz_source_t *source, int64_t vocab_size)
{
  if (source->format == MZ_DATA_TEXT) {
    MZ_REQUIRE(vocab_size > MZ_END_OF_TEXT, MZ_ERR_DATA,
               "%s: a text has the token ids 0 to %d, model.vocab_size is "
               "%" PRId64,
               source->path, MZ_END_OF_TEXT, vocab_size);
    return MZ_OK;
  }
  if (source->map_bytes > MZ_SCAN_BYTES) return MZ_OK;
  for (int64_t i = 0; i < source->num_tokens; i++) {
    int32_t id = token_at(source, i);
    if (id >= vocab_size) return id_too_large(source, id, i, vocab_size);
  }
  return MZ_OK;
}

static mz_status_t count_samples(mz_source_t *source, int64_t S, double weight)
{
  double samples;

  MZ_REQUIRE(source->num_tokens > S, MZ_ERR_DATA,
             "%s: %" PRId64 " tokens, need at least %" PRId64
             " for a sequence of %" PRId64 " and its last label",
             source->path, source->num_tokens, S + 1, S);
  source->num_windows = (source->num_tokens - 1) / S;
  samples = fmax(1.0, round(weight * (double)source->num_windows));
  MZ_REQUIRE(samples <= 0x1p53, MZ_ERR_OVERFLOW,
             "%s: weight %g gives %g samples, at most 2^53", source->path,
             weight, samples);
  source->num_samples = (int64_t)samples;
  return MZ_OK;
}

static mz_status_t open_source(mz_source_t *source, const char *path,
                               double weight, mz_data_format_t format,
                               const mz_dataset_t *dataset)
{
  MZ_TRY(mz_string_copy(path, &source->path));
  MZ_REQUIRE(isfinite(weight) && weight > 0, MZ_ERR_ARG,
             "%s: weight %g, need a number above 0", path, weight);
  MZ_TRY(map_file(source));
  MZ_TRY(find_format(source, format));
  MZ_TRY(count_tokens(source));
  MZ_TRY(check_ids(source, dataset->vocab_size));
  return MZ_TRACE(count_samples(source, dataset->sequence_length, weight));
}

mz_status_t mz_dataset_open(char *const *paths, const double *weights,
                            int32_t num, mz_data_format_t format,
                            int64_t vocab_size, int64_t sequence_length,
                            mz_dataset_t **dataset_out)
{
  mz_dataset_t *dataset = NULL;
  mz_status_t st;

  *dataset_out = NULL;
  MZ_REQUIRE(num >= 1, MZ_ERR_ARG, "no data file given");
  MZ_REQUIRE(vocab_size >= 1 && sequence_length >= 1, MZ_ERR_ARG,
             "vocab_size %" PRId64 ", sequence_length %" PRId64
             ", need at least 1",
             vocab_size, sequence_length);
  MZ_TRY_GOTO(st, mz_new(1, "data set", &dataset), done);
  MZ_TRY_GOTO(st, mz_new(num, "data files", &dataset->sources), done);
  dataset->vocab_size = vocab_size;
  dataset->sequence_length = sequence_length;
  for (int32_t i = 0; i < num; i++) {
    mz_source_t *source = &dataset->sources[i];
    dataset->num = i + 1;
    MZ_TRY_GOTO(st,
                open_source(source, paths[i], weights ? weights[i] : 1.0,
                            format, dataset),
                done);
    source->first_sample = dataset->num_samples;
    dataset->num_samples += source->num_samples;
    dataset->num_tokens += source->num_tokens;
  }
  *dataset_out = dataset;
  dataset = NULL;
done:
  mz_dataset_close(&dataset);
  return st;
}

static void close_source(mz_source_t *source)
{
  if (source->map)
    munmap((void *)(uintptr_t)source->map, (size_t)source->map_bytes);
  mz_free(source->path);
}

mz_status_t mz_data_find_format(const char *path, mz_data_format_t wanted,
                                mz_data_format_t *format_out)
{
  mz_source_t source = {0};
  mz_status_t st;

  MZ_TRY_GOTO(st, mz_string_copy(path, &source.path), done);
  MZ_TRY_GOTO(st, map_file(&source), done);
  MZ_TRY_GOTO(st, find_format(&source, wanted), done);
  *format_out = source.format;
done:
  close_source(&source);
  return st;
}

void mz_dataset_close(mz_dataset_t **dataset)
{
  mz_dataset_t *d = *dataset;

  if (!d) return;
  for (int32_t i = 0; i < d->num; i++)
    close_source(&d->sources[i]);
  mz_free(d->sources);
  mz_free(d);
  *dataset = NULL;
}

int64_t mz_dataset_num_samples(const mz_dataset_t *dataset)
{
  return dataset->num_samples;
}

int64_t mz_dataset_num_tokens(const mz_dataset_t *dataset)
{
  return dataset->num_tokens;
}

/* floor(j n / samples) without overflow of the product. */
static int64_t window_of(const mz_source_t *source, int64_t j)
{
  return (int64_t)((__int128)j * source->num_windows / source->num_samples);
}

mz_status_t mz_dataset_sample(const mz_dataset_t *dataset, int64_t index,
                              int32_t *tokens_out, int32_t *labels_out)
{
  const mz_source_t *source = dataset->sources;
  int64_t S = dataset->sequence_length, start;
  int32_t id;

  MZ_REQUIRE(index >= 0 && index < dataset->num_samples, MZ_ERR_ARG,
             "sample %" PRId64 " of %" PRId64, index, dataset->num_samples);
  while (index >= source->first_sample + source->num_samples)
    source++;
  start = window_of(source, index - source->first_sample) * S;
  for (int64_t t = 0; t <= S; t++) {
    id = token_at(source, start + t);
    if (id >= dataset->vocab_size)
      return id_too_large(source, id, start + t, dataset->vocab_size);
    if (t < S) tokens_out[t] = id;
    if (t > 0) labels_out[t - 1] = id;
  }
  return MZ_OK;
}
