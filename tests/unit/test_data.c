/* SPDX-License-Identifier: Apache-2.0 */
#include "data/batch.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { S = 4, VOCAB = 300 };

static char folder[64];

static void make_folder(void)
{
  strcpy(folder, "/tmp/mz-test-data-XXXXXX");
  cr_assert_not_null(mkdtemp(folder));
}

static void remove_folder(void)
{
  const char *names[] = {"a.txt", "b.txt", "a.bin", "a.tok", "big.bin"};
  char path[128];

  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    snprintf(path, sizeof path, "%s/%s", folder, names[i]);
    unlink(path);
  }
  cr_assert_eq(rmdir(folder), 0);
}

TestSuite(data, .init = make_folder, .fini = remove_folder);
TestSuite(batch, .init = make_folder, .fini = remove_folder);

static char *write_file(const char *name, const void *bytes, size_t num)
{
  static char paths[4][128];
  static int next;
  char *path = paths[next++ % 4];
  FILE *file;

  snprintf(path, sizeof paths[0], "%s/%s", folder, name);
  file = fopen(path, "wb");
  cr_assert_not_null(file);
  cr_assert_eq(fwrite(bytes, 1, num, file), num);
  fclose(file);
  return path;
}

static char *write_text(const char *name, const char *text)
{
  return write_file(name, text, strlen(text));
}

/* A token file whose header counts `count` and that holds `num` ids 0, 1, ...
 */
static char *write_tokens(const char *name, int32_t magic, int32_t version,
                          int32_t count, int num)
{
  static union {
    int32_t header[256];
    uint8_t bytes[1024 + 2 * 100];
  } file;

  memset(&file, 0, sizeof file);
  file.header[0] = magic;
  file.header[1] = version;
  file.header[2] = count;
  for (int i = 0; i < num; i++) {
    uint16_t id = (uint16_t)i;
    memcpy(file.bytes + 1024 + 2 * i, &id, 2);
  }
  return write_file(name, file.bytes, (size_t)(1024 + 2 * num));
}

static mz_status_t open_one(char *path, mz_data_format_t format, int64_t vocab,
                            mz_dataset_t **out)
{
  return mz_dataset_open(&path, NULL, 1, format, vocab, S, out);
}

static void check_refused(char *path, mz_data_format_t format, int64_t vocab,
                          mz_status_t status, const char *message)
{
  mz_dataset_t *d = NULL;

  cr_assert_eq(open_one(path, format, vocab, &d), status);
  cr_assert_null(d);
  cr_assert(strstr(mz_error_message(), path), "%s", mz_error_message());
  cr_assert(strstr(mz_error_message(), message), "%s", mz_error_message());
}

static void check_sample(const mz_dataset_t *d, int64_t index,
                         const int32_t expected[S + 1])
{
  int32_t tokens[S], labels[S];

  cr_assert_eq(mz_dataset_sample(d, index, tokens, labels), MZ_OK);
  cr_assert_eq(memcmp(tokens, expected, sizeof tokens), 0);
  cr_assert_eq(memcmp(labels, expected + 1, sizeof labels), 0);
}

Test(data, text_is_bytes_and_an_end_mark)
{
  const int32_t first[] = {'a', 'b', 'c', 'd', 'e'};
  const int32_t last[] = {'e', 'f', 'g', 0xff, MZ_END_OF_TEXT};
  mz_dataset_t *d;

  cr_assert_eq(
      open_one(write_text("a.txt", "abcdefg\xff"), MZ_DATA_AUTO, 257, &d),
      MZ_OK);
  cr_assert_eq(mz_dataset_num_tokens(d), 9);
  cr_assert_eq(mz_dataset_num_samples(d), 2);
  check_sample(d, 0, first);
  check_sample(d, 1, last);
  mz_dataset_close(&d);
  cr_assert_null(d);
}

Test(data, token_file_is_found_by_its_magic)
{
  const int32_t second[] = {4, 5, 6, 7, 8};
  mz_dataset_t *d;

  cr_assert_eq(
      open_one(write_tokens("a.tok", 20240520, 1, 9, 9), MZ_DATA_AUTO, 9, &d),
      MZ_OK);
  cr_assert_eq(mz_dataset_num_samples(d), 2);
  check_sample(d, 1, second);
  mz_dataset_close(&d);
}

Test(data, format_of_a_file_is_found_without_a_data_set)
{
  mz_data_format_t format = MZ_DATA_AUTO;
  char *path = write_tokens("a.bin", 20240520, 1, 3, 3);

  cr_assert_eq(mz_data_find_format(path, MZ_DATA_AUTO, &format), MZ_OK);
  cr_expect_eq(format, MZ_DATA_TOKENS);
  path = write_text("a.txt", "abc");
  cr_assert_eq(mz_data_find_format(path, MZ_DATA_AUTO, &format), MZ_OK);
  cr_expect_eq(format, MZ_DATA_TEXT);
  cr_expect_eq(mz_data_find_format(path, MZ_DATA_TOKENS, &format), MZ_ERR_DATA);
  cr_expect_eq(mz_data_find_format("/none/a", MZ_DATA_AUTO, &format),
               MZ_ERR_IO);
}

Test(data, a_rest_shorter_than_a_sequence_and_label_is_unused)
{
  mz_dataset_t *d;

  cr_assert_eq(
      open_one(write_tokens("a.bin", 20240520, 1, 8, 8), MZ_DATA_AUTO, 9, &d),
      MZ_OK);
  cr_assert_eq(mz_dataset_num_samples(d), 1);
  mz_dataset_close(&d);
}

Test(data, sample_outside_is_refused)
{
  int32_t tokens[S], labels[S];
  mz_dataset_t *d;

  cr_assert_eq(open_one(write_text("a.txt", "abcdefgh"), MZ_DATA_AUTO, 257, &d),
               MZ_OK);
  cr_assert_eq(mz_dataset_sample(d, 2, tokens, labels), MZ_ERR_ARG);
  cr_assert_eq(mz_dataset_sample(d, -1, tokens, labels), MZ_ERR_ARG);
  mz_dataset_close(&d);
}

Test(data, weights_say_how_often_a_file_is_passed)
{
  char *paths[] = {write_text("a.txt", "aaaabbbbccccdddd"),
                   write_text("b.txt", "eeeeffff")};
  const double weights[] = {0.5, 2.0};
  const char expected[] = "aceeff";
  int32_t tokens[S], labels[S];
  mz_dataset_t *d;

  cr_assert_eq(mz_dataset_open(paths, weights, 2, MZ_DATA_TEXT, 257, S, &d),
               MZ_OK);
  cr_assert_eq(mz_dataset_num_samples(d), 6);
  for (int i = 0; i < 6; i++) {
    cr_assert_eq(mz_dataset_sample(d, i, tokens, labels), MZ_OK);
    cr_assert_eq(tokens[0], expected[i]);
  }
  mz_dataset_close(&d);
}

Test(data, weights_below_or_at_zero_are_refused)
{
  char *path = write_text("a.txt", "abcdefgh");
  const double zero = 0.0;
  mz_dataset_t *d;

  cr_assert_eq(mz_dataset_open(&path, &zero, 1, MZ_DATA_TEXT, 257, S, &d),
               MZ_ERR_ARG);
  cr_assert(strstr(mz_error_message(), "weight 0, need a number above 0"));
}

Test(data, missing_file_is_named)
{
  char path[128];

  snprintf(path, sizeof path, "%s/none.bin", folder);
  check_refused(path, MZ_DATA_AUTO, VOCAB, MZ_ERR_IO,
                "none.bin: No such file or directory");
}

Test(data, folder_is_refused)
{
  check_refused(folder, MZ_DATA_AUTO, VOCAB, MZ_ERR_IO, "not a regular file");
}

Test(data, empty_file_is_refused)
{
  check_refused(write_text("a.txt", ""), MZ_DATA_AUTO, VOCAB, MZ_ERR_DATA,
                "the file is empty");
}

Test(data, short_file_is_refused_with_the_numbers)
{
  check_refused(write_text("a.txt", "abc"), MZ_DATA_AUTO, VOCAB, MZ_ERR_DATA,
                "4 tokens, need at least 5 for a sequence of 4");
}

Test(data, truncated_token_file_is_refused_with_the_numbers)
{
  check_refused(write_tokens("a.bin", 20240520, 1, 60, 20), MZ_DATA_AUTO, VOCAB,
                MZ_ERR_DATA,
                "truncated: the header counts 60 tokens, the file holds 20");
  check_refused(write_file("a.bin", "\x88\xd8\x34\x01\x01", 5), MZ_DATA_AUTO,
                VOCAB, MZ_ERR_DATA, "truncated: 5 bytes");
}

Test(data, token_file_with_more_than_it_counts_is_refused)
{
  check_refused(write_tokens("a.bin", 20240520, 1, 20, 60), MZ_DATA_AUTO, VOCAB,
                MZ_ERR_DATA,
                "damaged: the header counts 20 tokens, the file holds 60");
  check_refused(write_tokens("a.bin", 20240520, 1, -5, 60), MZ_DATA_AUTO, VOCAB,
                MZ_ERR_DATA, "the header counts -5 tokens");
}

Test(data, wrong_magic_and_version_are_refused)
{
  check_refused(write_tokens("a.bin", 7, 1, 20, 20), MZ_DATA_TOKENS, VOCAB,
                MZ_ERR_DATA, "starts with 7, need magic 20240520");
  check_refused(write_tokens("a.bin", 7, 1, 20, 20), MZ_DATA_AUTO, VOCAB,
                MZ_ERR_DATA, "named .bin but not a token file");
  check_refused(write_tokens("a.bin", 20240520, 2, 20, 20), MZ_DATA_AUTO, VOCAB,
                MZ_ERR_DATA, "version 2 of the token file, need 1");
  check_refused(write_tokens("a.bin", 20240801, 7, 20, 20), MZ_DATA_AUTO, VOCAB,
                MZ_ERR_UNSUPPORTED, "32-bit token ids");
}

Test(data, format_that_does_not_match_is_refused)
{
  check_refused(write_tokens("a.bin", 20240520, 1, 20, 20), MZ_DATA_TEXT, VOCAB,
                MZ_ERR_DATA, "data.format is text, but the file is a token");
  check_refused(write_text("a.txt", "plain text"), MZ_DATA_TOKENS, VOCAB,
                MZ_ERR_DATA, "not a token file");
  check_refused(write_text("a.txt", "\x89HDF\r\n\x1a\n more"), MZ_DATA_AUTO,
                VOCAB, MZ_ERR_UNSUPPORTED, "not supported yet");
}

Test(data, token_id_outside_the_vocabulary_is_refused_at_open)
{
  check_refused(write_tokens("a.bin", 20240520, 1, 60, 60), MZ_DATA_AUTO, 32,
                MZ_ERR_DATA,
                "token id 32 at place 32 is not below model.vocab_size 32");
  check_refused(write_text("a.txt", "abcdefgh"), MZ_DATA_AUTO, 256, MZ_ERR_DATA,
                "token ids 0 to 256, model.vocab_size is 256");
}

/* A sparse file above MZ_SCAN_BYTES: zeros, and one bad id in its last sample
 * but for the rest. */
Test(data, large_files_are_checked_when_a_sample_is_read)
{
  int64_t count = MZ_SCAN_BYTES / 2 + 1;
  char *path = write_tokens("big.bin", 20240520, 1, (int32_t)count, 0);
  int64_t last = (count - 1) / S - 1;
  int32_t tokens[S], labels[S];
  mz_dataset_t *d;
  FILE *file = fopen(path, "r+b");

  cr_assert_not_null(file);
  cr_assert_eq(fseek(file, 1024 + 2 * (long)(last * S + 2), SEEK_SET), 0);
  cr_assert_eq(fwrite("\x39\x05", 1, 2, file), 2);
  cr_assert_eq(fflush(file), 0);
  cr_assert_eq(ftruncate(fileno(file), 1024 + 2 * count), 0);
  fclose(file);
  cr_assert_eq(open_one(path, MZ_DATA_AUTO, VOCAB, &d), MZ_OK);
  cr_assert_eq(mz_dataset_sample(d, 0, tokens, labels), MZ_OK);
  cr_assert_eq(mz_dataset_sample(d, last, tokens, labels), MZ_ERR_DATA);
  cr_assert(strstr(mz_error_message(), "token id 1337"));
  mz_dataset_close(&d);
}

/* A sparse text of 4 GiB + 8 bytes with a mark in its last sample. */
Test(data, offsets_have_64_bits)
{
  int64_t bytes = (INT64_C(1) << 32) + 8;
  char *path = write_text("a.txt", "x");
  const int32_t last[] = {0, 0, 0, '!', MZ_END_OF_TEXT};
  FILE *file = fopen(path, "r+b");
  mz_dataset_t *d;

  cr_assert_not_null(file);
  cr_assert_eq(fseek(file, (long)bytes - 1, SEEK_SET), 0);
  cr_assert_eq(fputc('!', file), '!');
  fclose(file);
  cr_assert_eq(open_one(path, MZ_DATA_AUTO, 257, &d), MZ_OK);
  cr_assert_eq(mz_dataset_num_samples(d), bytes / S);
  check_sample(d, bytes / S - 1, last);
  mz_dataset_close(&d);
}

/* --- batches --- */

enum { MOST_ROWS = 16 };

typedef struct memory {
  int32_t tokens[MOST_ROWS * S], labels[MOST_ROWS * S], sequences[MOST_ROWS];
  int32_t most[MOST_ROWS];
  int64_t places[MOST_ROWS], samples[MOST_ROWS];
} memory_t;

static mz_batch_t batch_of(memory_t *m)
{
  mz_batch_t b = {m->tokens,  m->labels,    m->places,
                  m->samples, m->sequences, m->most};
  return b;
}

/* 18 samples; sample i starts with the letter 'a' + i. */
static mz_dataset_t *letters(void)
{
  char text[18 * S + 1] = {0};
  mz_dataset_t *d;

  for (int i = 0; i < 18 * S; i++)
    text[i] = (char)('a' + i / S);
  cr_assert_eq(open_one(write_text("a.txt", text), MZ_DATA_TEXT, 257, &d),
               MZ_OK);
  cr_assert_eq(mz_dataset_num_samples(d), 18);
  return d;
}

Test(batch, places_follow_micro_batch_then_rank)
{
  mz_batch_layout_t layout = {1, 2, 2, 2, S}; /* rank 1 of 2, m 2, A 2 */
  const int64_t places[] = {2, 3, 6, 7};
  mz_dataset_t *d = letters();
  memory_t memory;
  mz_batch_t batch = batch_of(&memory);

  cr_assert_eq(mz_batch_fill(d, NULL, &layout, 1, &batch), MZ_OK);
  for (int i = 0; i < 4; i++) {
    cr_assert_eq(memory.places[i], places[i]);
    cr_assert_eq(memory.samples[i], 8 + places[i]);
    cr_assert_eq(memory.tokens[i * S], 'a' + 8 + places[i]);
  }
  mz_dataset_close(&d);
}

/* The samples of a step as a set of 8 places, from any number of ranks. */
static void gather_step(const mz_dataset_t *d, int size, int64_t m, int64_t A,
                        int64_t step, int64_t samples[8])
{
  mz_sampler_t sampler = {1234, mz_dataset_num_samples(d)};
  memory_t memory;
  mz_batch_t batch = batch_of(&memory);

  for (int rank = 0; rank < size; rank++) {
    mz_batch_layout_t layout = {rank, size, m, A, S};
    cr_assert_eq(mz_batch_fill(d, &sampler, &layout, step, &batch), MZ_OK);
    for (int64_t i = 0; i < A * m; i++)
      samples[memory.places[i]] = memory.samples[i];
  }
}

Test(batch, order_does_not_depend_on_the_layout)
{
  const int layouts[][3] = {{1, 4, 2}, {2, 2, 2}, {2, 4, 1},
                            {4, 1, 2}, {4, 2, 1}, {8, 1, 1}};
  mz_dataset_t *d = letters();
  int64_t one[8], other[8];

  for (int64_t step = 0; step < 7; step++) {
    gather_step(d, 1, 8, 1, step, one);
    for (size_t k = 0; k < sizeof layouts / sizeof layouts[0]; k++) {
      gather_step(d, layouts[k][0], layouts[k][1], layouts[k][2], step, other);
      cr_assert_eq(memcmp(one, other, sizeof one), 0);
    }
  }
  mz_dataset_close(&d);
}

Test(batch, steps_run_through_epochs_without_loss)
{
  mz_dataset_t *d = letters();
  int64_t samples[8];
  int seen[18] = {0};

  /* 9 steps of 8 are 4 epochs of 18 */
  for (int64_t step = 0; step < 9; step++) {
    gather_step(d, 2, 4, 1, step, samples);
    for (int i = 0; i < 8; i++)
      seen[samples[i]]++;
  }
  for (int i = 0; i < 18; i++)
    cr_assert_eq(seen[i], 4);
  mz_dataset_close(&d);
}

Test(batch, validation_takes_each_sample_once_and_keeps_the_rest)
{
  mz_dataset_t *d = letters();
  memory_t memory;
  mz_batch_t batch = batch_of(&memory);
  int seen[18] = {0}, without = 0;

  for (int rank = 0; rank < 4; rank++) {
    mz_batch_layout_t layout = {rank, 4, 2, 1, S};
    cr_assert_eq(mz_batch_num_in_order(d, &layout), 3);
    for (int64_t step = 0; step < 3; step++) {
      cr_assert_eq(mz_batch_fill(d, NULL, &layout, step, &batch), MZ_OK);
      without += memory.sequences[0] == 0;
      cr_assert_eq(memory.most[0], 2);
      for (int i = 0; i < memory.sequences[0]; i++)
        seen[memory.samples[i]]++;
      for (int i = memory.sequences[0]; i < 2; i++) {
        cr_assert_eq(memory.samples[i], -1);
        cr_assert_eq(memory.labels[i * S], -1);
        cr_assert_eq(memory.tokens[i * S], 0);
      }
    }
  }
  for (int i = 0; i < 18; i++)
    cr_assert_eq(seen[i], 1);
  cr_assert_eq(without, 3, "ranks 1 to 3 have nothing in the last batch");
  mz_dataset_close(&d);
}

Test(batch, position_beyond_64_bits_is_refused)
{
  mz_batch_layout_t layout = {0, 1, 8, 1, S};
  mz_dataset_t *d = letters();
  memory_t memory;
  mz_batch_t batch = batch_of(&memory);

  cr_assert_eq(mz_batch_fill(d, NULL, &layout, INT64_MAX / 8, &batch),
               MZ_ERR_OVERFLOW);
  cr_assert_eq(mz_batch_fill(d, NULL, &layout, -1, &batch), MZ_ERR_ARG);
  mz_dataset_close(&d);
}
