/* SPDX-License-Identifier: Apache-2.0 */
/* What reads checkpoints: slices, damage, descriptors, types, the tool. */
#include "sample.h"

#include "base/alloc.h"
#include "checkpoint/h5.h"
#include "checkpoint/half.h"
#include "checkpoint/sum64.h"
#include "train/differ.h"

#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <moezero/checkpoint.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

#define TOOL MZ_BUILD_ROOT "/h5-gather"

/* Reads every tensor whole and in two parts: value i is i + part / 2. */
static void expect_values(mz_ckpt_t *c)
{
  float values[1000];

  for (int32_t t = 0; t < mz_ckpt_num_tensors(c); t++)
    for (int p = 0; p < MZ_CKPT_NUM_PARTS; p++) {
      int64_t n = mz_ckpt_elements(mz_ckpt_tensor(c, t)), cut = n / 3;
      mz_ckpt_part_t part = (mz_ckpt_part_t)p;

      memset(values, 0xff, sizeof values);
      cr_assert_eq(mz_ckpt_read(c, t, part, 0, cut, values), MZ_OK);
      cr_assert_eq(mz_ckpt_read(c, t, part, cut, n - cut, values + cut), MZ_OK,
                   "%s", mz_error_last());
      for (int64_t i = 0; i < n; i++)
        cr_assert_eq(values[i], (float)i + 0.5f * (float)p,
                     "%s, part %d, element %ld: %g", mz_ckpt_tensor(c, t)->name,
                     p, (long)i, (double)values[i]);
    }
}

static mz_ckpt_t *open_good(const char *folder, const char *name)
{
  char path[2 * SAMPLE_PATH];
  mz_ckpt_t *c;

  snprintf(path, sizeof path, "%s/%s", folder, name);
  cr_assert_eq(mz_ckpt_open(path, &c), MZ_OK, "%s", mz_error_last());
  return c;
}

Test(read, any_range_of_any_tensor)
{
  char folder[SAMPLE_PATH];
  mz_ckpt_t *c;
  float value;

  make_sample(folder, 4);
  c = open_good(folder, "c");
  cr_assert_eq(mz_ckpt_state(c)->step, 2);
  cr_assert_eq(mz_ckpt_state(c)->updates, 1);
  cr_assert_eq(mz_ckpt_state(c)->sampler_position, 16);
  cr_assert_eq(mz_ckpt_state(c)->seed, 77);
  cr_assert_str_eq(mz_ckpt_state(c)->config, "{\"a\": 1}");
  cr_assert_str_eq(mz_ckpt_state(c)->client_state, "of a client");
  cr_assert_str_eq(mz_ckpt_state(c)->tuning, "one\ntwo\n");
  cr_assert_eq(mz_ckpt_num_tensors(c), 7);
  cr_assert_eq(mz_ckpt_find(c, "box"), 1);
  cr_assert_eq(mz_ckpt_find(c, "bo"), -1);
  cr_assert_eq(mz_ckpt_verify(c, 0, 1), MZ_OK);
  expect_values(c);
  cr_assert_eq(mz_ckpt_read(c, 0, MZ_CKPT_WEIGHTS, 61, 0, &value), MZ_OK);
  cr_assert_eq(mz_ckpt_read(c, 0, MZ_CKPT_WEIGHTS, 61, 1, &value), MZ_ERR_ARG);
  cr_assert_eq(mz_ckpt_read(c, 0, MZ_CKPT_WEIGHTS, -1, 1, &value), MZ_ERR_ARG);
  cr_assert_eq(mz_ckpt_read(c, 7, MZ_CKPT_WEIGHTS, 0, 1, &value), MZ_ERR_ARG);
  mz_ckpt_close(&c);
  c = open_good(folder, "c/global_step1");
  cr_assert_eq(mz_ckpt_state(c)->step, 1);
  mz_ckpt_close(&c);
  remove_folder(folder);
}

/* checkpoint.h5 as it was before it had a tuning table, sealed again. */
static void make_older(const char *path)
{
  hid_t file = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT);
  char *bytes = NULL;
  int64_t num;
  FILE *io;

  cr_assert_geq(H5Ldelete(file, "tuning", H5P_DEFAULT), 0);
  cr_assert_geq(H5Fclose(file), 0);
  io = fopen(path, "r+b");
  cr_assert_eq(fseek(io, 0, SEEK_END), 0);
  num = ftell(io) - MZ_USER_BLOCK_BYTES;
  cr_assert_eq(mz_new(num, "checkpoint.h5", &bytes), MZ_OK);
  cr_assert_eq(fseek(io, MZ_USER_BLOCK_BYTES, SEEK_SET), 0);
  cr_assert_eq(fread(bytes, 1, (size_t)num, io), (size_t)num);
  rewind(io);
  fprintf(io, MZ_FORMAT_CHECKPOINT "\nsum64 %016" PRIx64 "\n",
          mz_sum64_end(mz_sum64_part(bytes, 0, num), num));
  fclose(io);
  mz_free(bytes);
}

Test(read, a_checkpoint_from_before_the_tuning_table)
{
  char folder[SAMPLE_PATH], path[2 * SAMPLE_PATH];
  mz_ckpt_t *c;

  make_sample(folder, 2);
  snprintf(path, sizeof path, "%s/c/global_step2/" MZ_MASTER_NAME, folder);
  make_older(path);
  c = open_good(folder, "c");
  cr_assert_str_eq(mz_ckpt_state(c)->tuning, "");
  cr_assert_str_eq(mz_ckpt_state(c)->client_state, "of a client");
  expect_values(c);
  mz_ckpt_close(&c);
  remove_folder(folder);
}

Test(read, after_the_folder_was_moved_and_renamed)
{
  char folder[SAMPLE_PATH], output[SAMPLE_TEXT];
  mz_ckpt_t *c;

  make_sample(folder, 4);
  cr_assert_eq(shell(output, "mkdir %s/d && mv %s/c/global_step2 %s/d/mine",
                     folder, folder, folder),
               0);
  c = open_good(folder, "d/mine");
  cr_assert_eq(mz_ckpt_verify(c, 0, 1), MZ_OK);
  expect_values(c);
  mz_ckpt_close(&c);
  cr_assert_eq(chdir(folder), 0);
  cr_assert_eq(mz_ckpt_open("d/mine/", &c), MZ_OK);
  expect_values(c);
  mz_ckpt_close(&c);
  remove_folder(folder);
}

Test(read, with_few_file_descriptors)
{
  char folder[SAMPLE_PATH];
  struct rlimit limit;
  int next, probe;
  mz_ckpt_t *c;

  make_sample(folder, 12);
  c = open_good(folder, "c");
  next = open("/", O_RDONLY);
  close(next);
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = (rlim_t)next + 2;
  cr_assert_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
  cr_assert_eq(mz_ckpt_verify(c, 0, 1), MZ_OK, "%s", mz_error_last());
  expect_values(c);
  while ((probe = open("/", O_RDONLY)) >= 0)
    cr_assert_lt(probe, next + 2);
  mz_ckpt_close(&c);
  remove_folder(folder);
}

/* --- damage: refused by what opens, verifies or gathers, with the file and the
 * reason, and without a file --- */

static void refuse(const char *folder, const char *damage, const char *file,
                   const char *reason)
{
  char output[SAMPLE_TEXT], out[2 * SAMPLE_PATH];
  struct stat info;
  int code;

  cr_assert_eq(
      shell(output, "rm -rf %s/d && cp -r %s/c %s/d", folder, folder, folder),
      0);
  cr_assert_eq(shell(output, "cd %s/d && { %s; } 2>&1", folder, damage), 0,
               "%s: %s", damage, output);
  snprintf(out, sizeof out, "%s/full.h5", folder);
  code = shell(output, TOOL " %s/d -o %s 2>&1", folder, out);
  cr_assert_eq(code, 1, "%s: exit code %d, %s", damage, code, output);
  cr_assert(strstr(output, file) && strstr(output, reason),
            "%s: \"%s\" has not \"%s\" and \"%s\"", damage, output, file,
            reason);
  cr_assert_eq(shell(output, "ls %s", folder), 0);
  cr_assert_str_eq(output, "c\nd\n", "%s leaves %s", damage, output);
  cr_assert_neq(stat(out, &info), 0);
  code = shell(output, TOOL " %s/d --verify 2>&1", folder);
  cr_assert_eq(code, 1, "%s: --verify ends with %d, %s", damage, code, output);
}

Test(damage, of_rank_files_is_refused)
{
  char folder[SAMPLE_PATH];

  make_sample(folder, 4);
  refuse(folder, "rm global_step2/rank_2.h5", "rank_2.h5", "missing");
  refuse(folder, "truncate -s -1024 global_step2/rank_1.h5", "rank_1.h5",
         "truncated");
  refuse(folder, "truncate -s +8 global_step2/rank_1.h5", "rank_1.h5",
         "changed");
  refuse(folder, "cp global_step1/rank_3.h5 global_step2", "rank_3.h5",
         "of another save: step 1");
  refuse(folder, "cp global_step2/rank_0.h5 global_step2/rank_3.h5",
         "rank_3.h5", "it is the file of rank 0");
  refuse(folder,
         "truncate -s $(stat -c %s global_step2/rank_2.h5) zeros && mv zeros "
         "global_step2/rank_2.h5",
         "rank_2.h5", "cannot open it as HDF5");
  remove_folder(folder);
}

/* One bit, anywhere: in what HDF5 wrote or in the values. */
Test(damage, of_any_bit_is_refused)
{
  char folder[SAMPLE_PATH], command[512];

  make_sample(folder, 4);
  for (int permille = 1; permille < 1000; permille += 83) {
    snprintf(command, sizeof command,
             "python3 -c \"import sys; n = sys.argv[1]; b = bytearray(open(n, "
             "'rb').read()); b[len(b) * %d // 1000] ^= 16; open(n, "
             "'wb').write(b)\" global_step2/rank_1.h5",
             permille);
    refuse(folder, command, "rank_1.h5", ":");
  }
  remove_folder(folder);
}

static void refuse_open(const char *folder, const char *damage,
                        mz_status_t status, const char *reason)
{
  char output[SAMPLE_TEXT], path[2 * SAMPLE_PATH];
  mz_ckpt_t *c = NULL;

  cr_assert_eq(
      shell(output, "rm -rf %s/d && cp -r %s/c %s/d", folder, folder, folder),
      0);
  cr_assert_eq(shell(output, "cd %s/d && { %s; } 2>&1", folder, damage), 0);
  snprintf(path, sizeof path, "%s/d", folder);
  cr_assert_eq(mz_ckpt_open(path, &c), status, "%s: %s", damage,
               mz_error_message());
  cr_assert_null(c);
  cr_assert(strstr(mz_error_message(), reason), "%s: \"%s\" has not \"%s\"",
            damage, mz_error_message(), reason);
}

Test(damage, of_checkpoint_h5_and_latest_is_refused)
{
  char folder[SAMPLE_PATH];

  make_sample(folder, 4);
  refuse_open(folder, "rm global_step2/checkpoint.h5", MZ_ERR_IO,
              "global_step2/checkpoint.h5: No such file or directory");
  refuse_open(folder, "truncate -s 100 global_step2/checkpoint.h5", MZ_ERR_DATA,
              "checkpoint.h5: not moezero's, or it was cut");
  refuse_open(folder, "truncate -s -1 global_step2/checkpoint.h5", MZ_ERR_DATA,
              "checkpoint.h5: damaged");
  refuse_open(folder,
              "printf x | dd of=global_step2/checkpoint.h5 bs=1 seek=5000 "
              "conv=notrunc",
              MZ_ERR_DATA, "checkpoint.h5: damaged");
  refuse_open(folder, "echo ../x > latest", MZ_ERR_DATA,
              "latest: it does not name a folder beside it");
  refuse_open(folder, "echo global_step9 > latest", MZ_ERR_IO,
              "global_step9/checkpoint.h5: No such file or directory");
  refuse_open(folder, "rm latest", MZ_ERR_DATA, "no checkpoint: neither");
  remove_folder(folder);
}

/* --- 16 bits --- */

static uint16_t half_of(mz_dtype_t dtype, float value)
{
  uint16_t half;

  mz_half_from_f32(dtype, 1, &value, &half);
  return half;
}

Test(half, rounds_to_nearest_even)
{
  cr_assert_eq(half_of(MZ_F16, 1.0f), 0x3c00);
  cr_assert_eq(half_of(MZ_F16, -2.0f), 0xc000);
  cr_assert_eq(half_of(MZ_F16, 65504.0f), 0x7bff);
  cr_assert_eq(half_of(MZ_F16, 1.0f + 0x1p-11f), 0x3c00);
  cr_assert_eq(half_of(MZ_F16, 1.0f + 0x3p-11f), 0x3c02);
  cr_assert_eq(half_of(MZ_F16, 0x1p-14f), 0x0400);
  cr_assert_eq(half_of(MZ_F16, 0x1p-24f), 0x0001);
  cr_assert_eq(half_of(MZ_F16, 0x1p-25f), 0x0000);
  cr_assert_eq(half_of(MZ_F16, 0x3p-25f), 0x0002);
  cr_assert_eq(half_of(MZ_F16, -0.0f), 0x8000);
  cr_assert_eq(half_of(MZ_BF16, 1.0f), 0x3f80);
  cr_assert_eq(half_of(MZ_BF16, 1.0f + 0x1p-8f), 0x3f80);
  cr_assert_eq(half_of(MZ_BF16, 1.0f + 0x3p-8f), 0x3f82);
}

Test(half, every_value_comes_back)
{
  static const mz_dtype_t dtypes[] = {MZ_F16, MZ_BF16};

  for (int d = 0; d < 2; d++)
    for (uint32_t i = 0; i < 65536; i++) {
      uint16_t half = (uint16_t)i;
      float value;

      mz_half_to_f32(dtypes[d], 1, &half, &value);
      if (isnan(value))
        cr_assert(isnan(value) && half_of(dtypes[d], value) & 0x7fff);
      else
        cr_assert_eq(half_of(dtypes[d], value), half, "%x", half);
    }
}

Test(half, says_which_value_is_too_large)
{
  const float values[] = {1, INFINITY, NAN, 65519.0f, 65520.0f};
  const float large[] = {3.4e38f};
  uint16_t half[5];

  cr_assert_eq(mz_half_from_f32(MZ_F16, 5, values, half), 4);
  cr_assert_eq(mz_half_from_f32(MZ_F16, 4, values, half), -1);
  cr_assert_eq(mz_half_from_f32(MZ_BF16, 5, values, half), -1);
  cr_assert_eq(mz_half_from_f32(MZ_BF16, 1, large, half), 0);
}

/* --- the checksum --- */

Test(sum64, is_the_same_in_pieces_and_differs_for_any_change)
{
  unsigned char bytes[61];
  uint64_t whole, parts;

  for (int i = 0; i < 61; i++)
    bytes[i] = (unsigned char)(7 * i);
  whole = mz_sum64_end(mz_sum64_part(bytes, 0, 61), 61);
  parts = mz_sum64_part(bytes + 40, 40, 21) + mz_sum64_part(bytes, 0, 16) +
          mz_sum64_part(bytes + 16, 16, 24);
  cr_assert_eq(mz_sum64_end(parts, 61), whole);
  cr_assert_neq(mz_sum64_end(mz_sum64_part(bytes, 0, 61), 62), whole);
  for (int bit = 0; bit < 61 * 8; bit++) {
    bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
    cr_assert_neq(mz_sum64_end(mz_sum64_part(bytes, 0, 61), 61), whole);
    bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
  }
}

/* --- gather --- */

Test(gather, writes_any_type_and_is_read_back)
{
  static const mz_dtype_t dtypes[] = {MZ_F32, MZ_BF16, MZ_F16};
  char folder[SAMPLE_PATH], path[SAMPLE_PATH + 16];
  float values[61];

  make_sample(folder, 4);
  snprintf(path, sizeof path, "%s/full.h5", folder);
  for (int d = 0; d < 3; d++) {
    mz_ckpt_gather_opts_t opts = {path, dtypes[d], true};
    mz_ckpt_t *c = open_good(folder, "c");

    cr_assert_eq(mz_ckpt_gather(c, &opts), MZ_OK, "%s", mz_error_last());
    mz_ckpt_close(&c);
    c = open_good(folder, "full.h5");
    cr_assert_null(mz_ckpt_state(c));
    cr_assert_eq(mz_ckpt_verify(c, 0, 1), MZ_OK);
    if (d == 0) expect_values(c);
    cr_assert_eq(mz_ckpt_read(c, mz_ckpt_find(c, "small"), MZ_CKPT_WEIGHTS, 0,
                              61, values),
                 MZ_OK);
    for (int i = 0; i < 61; i++) /* whole numbers to 256 are exact in all */
      cr_assert_eq(values[i], (float)i);
    mz_ckpt_close(&c);
  }
  remove_folder(folder);
}

Test(gather, without_moments_cannot_give_them)
{
  char folder[SAMPLE_PATH], path[SAMPLE_PATH + 16];
  mz_ckpt_gather_opts_t opts = {path, MZ_F32, false};
  mz_ckpt_t *c;
  float value;

  make_sample(folder, 4);
  snprintf(path, sizeof path, "%s/full.h5", folder);
  c = open_good(folder, "c");
  cr_assert_eq(mz_ckpt_gather(c, &opts), MZ_OK);
  mz_ckpt_close(&c);
  c = open_good(folder, "full.h5");
  cr_assert_not(mz_ckpt_has(c, MZ_CKPT_EXP_AVG));
  cr_assert_eq(mz_ckpt_read(c, 0, MZ_CKPT_EXP_AVG, 0, 1, &value), MZ_ERR_ARG);
  opts.optimizer = true;
  cr_assert_eq(mz_ckpt_gather(c, &opts), MZ_ERR_ARG);
  opts.dtype = MZ_I32;
  cr_assert_eq(mz_ckpt_gather(c, &opts), MZ_ERR_UNSUPPORTED);
  mz_ckpt_close(&c);
  remove_folder(folder);
}

Test(gather, survives_no_memory)
{
  char folder[SAMPLE_PATH], path[SAMPLE_PATH + 16], from[SAMPLE_PATH + 16];
  mz_ckpt_gather_opts_t opts = {path, MZ_F32, true};
  mz_status_t st = MZ_ERR_NOMEM;
  struct stat info;
  int n;

  make_sample(folder, 4);
  snprintf(path, sizeof path, "%s/full.h5", folder);
  snprintf(from, sizeof from, "%s/c", folder);
  for (n = 1; n < 200 && st != MZ_OK; n++) {
    mz_ckpt_t *c = NULL;

    mz_alloc_fail_at(n);
    st = mz_ckpt_open(from, &c);
    if (st == MZ_OK) st = mz_ckpt_gather(c, &opts);
    mz_alloc_fail_at(0);
    mz_ckpt_close(&c);
    cr_assert(st == MZ_OK || st == MZ_ERR_NOMEM, "%s", mz_error_last());
    cr_assert_eq(stat(path, &info) == 0, st == MZ_OK);
  }
  cr_assert(st == MZ_OK && n > 10, "%d allocations", n);
  remove_folder(folder);
}

/* --- the tool --- */

static void tool(const char *args, int code, const char *text)
{
  char output[SAMPLE_TEXT];
  int found = shell(output, TOOL " %s 2>&1", args);

  cr_assert_eq(found, code, "h5-gather %s: exit code %d\n%s", args, found,
               output);
  cr_assert(strstr(output, text), "h5-gather %s: \"%s\" has not \"%s\"", args,
            output, text);
}

Test(tool, lists_verifies_and_gathers)
{
  char folder[SAMPLE_PATH], args[4 * SAMPLE_PATH];

  make_sample(folder, 4);
  snprintf(args, sizeof args, "%s/c --list", folder);
  tool(args, 0,
       "box                                              [5, 7, 11] "
       "385\n");
  tool(args, 0, "7 tensors, 468 elements, step 2, ");
  snprintf(args, sizeof args, "%s/c --verify", folder);
  tool(args, 0, "4 rank files, ");
  snprintf(args, sizeof args, "%s/c -o %s/full.h5 --dtype=fp16", folder,
           folder);
  tool(args, 0, "7 tensors, 468 elements, fp16: ");
  snprintf(args, sizeof args, "%s/full.h5 --list --verify", folder);
  tool(args, 0, "7 tensors, 468 elements, ");
  snprintf(args, sizeof args, "%s/c -o %s/no/full.h5", folder, folder);
  tool(args, 1, "No such file or directory");
  run_ranks(3, "h5-gather", 60, "%s/c -o %s/again.h5", folder, folder);
  snprintf(args, sizeof args, "%s/again.h5 --list", folder);
  tool(args, 0, "7 tensors, 468 elements, ");
  remove_folder(folder);
}

Test(tool, refuses_a_wrong_command_line)
{
  tool("", 2, "no checkpoint given");
  tool("/tmp", 2, "nothing to do");
  tool("/tmp -o x --format safetensors", 2,
       "not supported yet: --format safetensors");
  tool("/tmp -o x --format zip", 2, "--format is h5, not zip");
  tool("/tmp -o x --dtype fp64", 2, "--dtype is fp32, bf16 or fp16, not fp64");
  tool("/tmp --all", 2, "unknown option --all");
  tool("/tmp /var --list", 2, "one checkpoint expected, found also /var");
  tool("--help", 0, "usage: h5-gather CKPT -o FILE");
  tool("/nowhere --list", 1, "/nowhere: No such file or directory");
  tool("/usr --list", 1, "/usr: no checkpoint: neither checkpoint.h5 nor");
}

/* --- configurations --- */

static void collect(void *ctx, const char *line)
{
  strcat(strcat((char *)ctx, line), "\n");
}

Test(differ, says_every_key_that_differs)
{
  char lines[512] = "";

  cr_assert_eq(mz_differ("{\"a\": {\"b\": 1, \"c\": [1, 2]}, \"d\": 0.5}",
                         "{\"a\": {\"b\": 2, \"c\": [1, 2]}, \"e\": \"x\"}",
                         collect, lines),
               MZ_OK);
  cr_assert_str_eq(lines, "a.b: 1 -> 2\nd: 0.5 -> not set\n"
                          "e: not set -> \"x\"\n");
  cr_assert_eq(mz_differ("{", "{}", collect, lines), MZ_ERR_DATA);
}
