/* SPDX-License-Identifier: Apache-2.0 */
/* h5-gather: one file with the whole model from a checkpoint. No MPI: under
 * mpirun the process of rank 0 works and the others end at once. */
#include <moezero/checkpoint.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

static const char help[] =
    "usage: h5-gather CKPT -o FILE [OPTION]...   write the whole model\n"
    "       h5-gather CKPT --list                name, shape and size of each "
    "tensor\n"
    "       h5-gather CKPT --verify              read all, compare checksums\n"
    "\n"
    "CKPT is a folder global_step<N>, or the folder above it (its `latest` is\n"
    "taken), or a file that h5-gather wrote.\n"
    "\n"
    "  -o FILE           the file to write; replaced only when all went well\n"
    "  --format h5       HDF5, a dataset a tensor (the default)\n"
    "  --dtype TYPE      of the weights: fp32 (the default), fp16, bf16 (as\n"
    "                    16-bit integers with an attribute dtype = \"bf16\")\n"
    "  --optimizer       also exp_avg/NAME and exp_avg_sq/NAME, in fp32\n"
    "\n"
    "exit codes: 0 done, 1 failed, 2 usage\n";

typedef struct options {
  const char *from, *to, *format, *dtype_name;
  mz_dtype_t dtype;
  bool list, verify, optimizer;
} options_t;

static int refuse(const char *what, const char *word)
{
  fprintf(stderr, "h5-gather: %s%s\ntry h5-gather --help\n", what, word);
  return EXIT_USAGE;
}

/* As Open MPI, PMIx and PMI tell it to any process that they start. */
static bool another_works(void)
{
  static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK",
                                      "PMI_RANK"};

  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    const char *rank = getenv(names[i]);
    if (rank) return strcmp(rank, "0") != 0;
  }
  return false;
}

/* Takes "--name VALUE" or "--name=VALUE"; false: another word. */
static bool take(int argc, char **argv, int *at, const char *name,
                 const char **value_out)
{
  size_t bytes = strlen(name);

  if (strncmp(argv[*at], name, bytes) != 0) return false;
  if (argv[*at][bytes] == '=') {
    *value_out = argv[*at] + bytes + 1;
    return true;
  }
  if (argv[*at][bytes] != '\0') return false;
  *value_out = *at + 1 < argc ? argv[++*at] : "";
  return true;
}

static int check_options(options_t *o)
{
  if (!o->from) return refuse("no checkpoint given", "");
  if (!o->to && !o->list && !o->verify)
    return refuse("nothing to do: give -o FILE, --list or --verify", "");
  if (o->to && !*o->to) return refuse("-o needs a file", "");
  if (strcmp(o->format, "safetensors") == 0)
    return refuse("not supported yet: --format safetensors", "");
  if (strcmp(o->format, "h5") != 0)
    return refuse("--format is h5, not ", o->format);
  if (strcmp(o->dtype_name, "fp32") == 0)
    o->dtype = MZ_F32;
  else if (strcmp(o->dtype_name, "bf16") == 0)
    o->dtype = MZ_BF16;
  else if (strcmp(o->dtype_name, "fp16") == 0)
    o->dtype = MZ_F16;
  else
    return refuse("--dtype is fp32, bf16 or fp16, not ", o->dtype_name);
  return EXIT_DONE;
}

static int read_options(int argc, char **argv, options_t *o)
{
  *o = (options_t){.format = "h5", .dtype_name = "fp32"};
  for (int i = 1; i < argc; i++) {
    if (take(argc, argv, &i, "-o", &o->to) ||
        take(argc, argv, &i, "--format", &o->format) ||
        take(argc, argv, &i, "--dtype", &o->dtype_name))
      continue;
    if (strcmp(argv[i], "--list") == 0)
      o->list = true;
    else if (strcmp(argv[i], "--verify") == 0)
      o->verify = true;
    else if (strcmp(argv[i], "--optimizer") == 0)
      o->optimizer = true;
    else if (argv[i][0] == '-')
      return refuse("unknown option ", argv[i]);
    else if (o->from)
      return refuse("one checkpoint expected, found also ", argv[i]);
    else
      o->from = argv[i];
  }
  return check_options(o);
}

static int64_t total_elements(const mz_ckpt_t *ckpt)
{
  int64_t total = 0;

  for (int32_t i = 0; i < mz_ckpt_num_tensors(ckpt); i++)
    total += mz_ckpt_elements(mz_ckpt_tensor(ckpt, i));
  return total;
}

static void list(const mz_ckpt_t *ckpt)
{
  const mz_ckpt_state_t *state = mz_ckpt_state(ckpt);

  for (int32_t i = 0; i < mz_ckpt_num_tensors(ckpt); i++) {
    const mz_ckpt_tensor_t *t = mz_ckpt_tensor(ckpt, i);

    printf("%-48s [", t->name);
    for (int32_t d = 0; d < t->ndim; d++)
      printf("%s%" PRId64, d ? ", " : "", t->shape[d]);
    printf("] %" PRId64 "\n", mz_ckpt_elements(t));
  }
  printf("%" PRId32 " tensors, %" PRId64 " elements", mz_ckpt_num_tensors(ckpt),
         total_elements(ckpt));
  if (state) printf(", step %" PRId64, state->step);
  printf(", %s\n", mz_ckpt_path(ckpt));
}

static mz_status_t verify(mz_ckpt_t *ckpt)
{
  mz_status_t st = mz_ckpt_verify(ckpt, 0, 1);

  if (st != MZ_OK) return st;
  if (mz_ckpt_state(ckpt))
    printf("%" PRId32 " rank files, %.3f GiB: every checksum is right: %s\n",
           mz_ckpt_num_files(ckpt), (double)mz_ckpt_bytes(ckpt) * 0x1p-30,
           mz_ckpt_path(ckpt));
  else
    printf("%s is a one-file model, which has no checksums: its structure is "
           "sound\n",
           mz_ckpt_path(ckpt));
  return MZ_OK;
}

static mz_status_t gather(mz_ckpt_t *ckpt, const options_t *o)
{
  const mz_ckpt_gather_opts_t opts = {o->to, o->dtype, o->optimizer};
  mz_status_t st = mz_ckpt_gather(ckpt, &opts);

  if (st == MZ_OK)
    printf("%" PRId32 " tensors, %" PRId64 " elements, %s: %s\n",
           mz_ckpt_num_tensors(ckpt), total_elements(ckpt), o->dtype_name,
           o->to);
  return st;
}

static mz_status_t work(const options_t *o)
{
  mz_ckpt_t *ckpt;
  mz_status_t st = mz_ckpt_open(o->from, &ckpt);

  if (st == MZ_OK && o->list) list(ckpt);
  if (st == MZ_OK && o->verify) st = verify(ckpt);
  if (st == MZ_OK && o->to) st = gather(ckpt, o);
  mz_ckpt_close(&ckpt);
  return st;
}

int main(int argc, char **argv)
{
  options_t options;
  mz_status_t st;
  int code;

  if (argc > 1 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"))) {
    fputs(help, stdout);
    return EXIT_DONE;
  }
  if (another_works()) return EXIT_DONE;
  code = read_options(argc, argv, &options);
  if (code != EXIT_DONE) return code;
  st = work(&options);
  if (st == MZ_OK && fflush(stdout) != 0) return EXIT_FAILED;
  if (st == MZ_OK) return EXIT_DONE;
  fprintf(stderr, "h5-gather: %s\n", mz_error_message());
  return EXIT_FAILED;
}
