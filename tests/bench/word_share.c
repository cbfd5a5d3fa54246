/* SPDX-License-Identifier: Apache-2.0 */
/**
 * word_share TRAIN HELD_OUT TEXT [NUM_WORDS]: of the first NUM_WORDS (200)
 * words of TEXT that have four or more letters, the share that occurs in
 * HELD_OUT; and the same of a text drawn from the byte bigrams of TRAIN.
 * A word is a longest run of ASCII letters; case does not count.
 */
#include <ctype.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MIN_LETTERS = 4, MAX_LETTERS = 31 };

typedef struct words {
  char (*all)[MAX_LETTERS + 1];
  size_t num, capacity;
} words_t;

static void *must(void *memory)
{
  if (memory) return memory;
  fprintf(stderr, "word_share: no memory\n");
  exit(1);
}

static unsigned char *read_file(const char *path, size_t *size_out)
{
  FILE *file = fopen(path, "rb");
  unsigned char *bytes = NULL;
  size_t size = 0, got;

  if (!file) {
    perror(path);
    exit(1);
  }
  do {
    bytes = must(realloc(bytes, size + (1 << 20)));
    got = fread(bytes + size, 1, 1 << 20, file);
    size += got;
  } while (got > 0);
  fclose(file);
  *size_out = size;
  return bytes;
}

/* Takes letters one by one; a byte that is none ends the word. */
static void take(words_t *words, char *word, size_t *length, int byte)
{
  if (isalpha(byte)) {
    if (*length <= MAX_LETTERS) word[*length] = (char)tolower(byte);
    ++*length;
    return;
  }
  if (*length >= MIN_LETTERS && *length <= MAX_LETTERS) {
    if (words->num == words->capacity) {
      words->capacity = 2 * words->capacity + 256;
      words->all =
          must(realloc(words->all, words->capacity * sizeof *words->all));
    }
    word[*length] = '\0';
    memcpy(words->all[words->num++], word, *length + 1);
  }
  *length = 0;
}

static words_t words_of(const unsigned char *bytes, size_t size)
{
  words_t words = {0};
  char word[MAX_LETTERS + 2];
  size_t length = 0;

  for (size_t i = 0; i < size; i++)
    take(&words, word, &length, bytes[i]);
  take(&words, word, &length, '\n');
  return words;
}

static int by_text(const void *a, const void *b) { return strcmp(a, b); }

static double share(const words_t *text, size_t limit, const words_t *sorted)
{
  size_t num = text->num < limit ? text->num : limit, known = 0;

  for (size_t i = 0; i < num; i++)
    known += bsearch(text->all[i], sorted->all, sorted->num,
                     sizeof *sorted->all, by_text) != NULL;
  return num ? (double)known / (double)num : 0;
}

static uint32_t next_random(uint64_t *state)
{
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(*state >> 33);
}

/* Bytes drawn from how often each follows the one before in @p bytes. */
static words_t words_of_bigrams(const unsigned char *bytes, size_t size,
                                size_t limit)
{
  static uint32_t follow[256][256];
  static uint64_t total[256];
  words_t words = {0};
  char word[MAX_LETTERS + 2];
  size_t length = 0;
  uint64_t state = 1234;
  int byte = ' ';

  for (size_t i = 1; i < size; i++) {
    follow[bytes[i - 1]][bytes[i]]++;
    total[bytes[i - 1]]++;
  }
  while (words.num < limit && total[byte] > 0) {
    uint64_t at = next_random(&state) % total[byte];
    int next = 0;

    while (at >= follow[byte][next])
      at -= follow[byte][next++];
    byte = next;
    take(&words, word, &length, byte);
  }
  return words;
}

int main(int argc, char **argv)
{
  size_t limit = argc == 5 ? (size_t)atol(argv[4]) : 200, size[3];
  unsigned char *bytes[3];
  words_t held_out, text, bigrams;

  if (argc != 4 && argc != 5) {
    fprintf(stderr, "usage: word_share TRAIN HELD_OUT TEXT [NUM_WORDS]\n");
    return 2;
  }
  for (int i = 0; i < 3; i++)
    bytes[i] = read_file(argv[1 + i], &size[i]);
  held_out = words_of(bytes[1], size[1]);
  qsort(held_out.all, held_out.num, sizeof *held_out.all, by_text);
  text = words_of(bytes[2], size[2]);
  bigrams = words_of_bigrams(bytes[0], size[0], limit);
  if (text.num < limit)
    fprintf(stderr, "word_share: only %zu words of four or more letters\n",
            text.num);
  printf("words of four or more letters that occur in the held-out text: "
         "%.3f of %zu, from byte bigrams %.3f\n",
         share(&text, limit, &held_out), text.num < limit ? text.num : limit,
         share(&bigrams, limit, &held_out));
  free(held_out.all);
  free(text.all);
  free(bigrams.all);
  for (int i = 0; i < 3; i++)
    free(bytes[i]);
  return 0;
}
