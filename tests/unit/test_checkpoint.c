/* SPDX-License-Identifier: Apache-2.0 */
/* To stop and go on, gather and start from weights, on TINY under mpirun; saves
 * that fail. */
#include "sample.h"

#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>

static void run_tiny(int ranks, const char *what)
{
  char folder[SAMPLE_PATH];

  make_folder(folder);
  run_ranks(ranks, "tests/ranks/rank_checkpoint", 240, "%s %s", what, folder);
  remove_folder(folder);
}

Test(resume, is_bitwise_the_unstopped_run_at_every_stage)
{
  run_tiny(4, "bitwise");
}

Test(resume, is_bitwise_in_bf16_with_a_residual_mlp_too)
{
  char folder[SAMPLE_PATH];

  make_folder(folder);
  run_ranks(2, "tests/ranks/rank_checkpoint", 240,
            "bitwise %s bf16.enabled=true moe.use_residual=true", folder);
  remove_folder(folder);
}

/* Biases of gates are in no tensor of the model. */
Test(resume, brings_the_biases_of_the_gates_and_shared_experts)
{
  static const char *const what[] = {"bitwise", "relayout"};
  char folder[SAMPLE_PATH];

  for (int i = 0; i < 2; i++) {
    make_folder(folder);
    run_ranks(4, "tests/ranks/rank_checkpoint", 240,
              "%s %s moe.bias_update_rate=0.01 moe.num_shared_experts=1 "
              "moe.shared_expert_gate=true",
              what[i], folder);
    remove_folder(folder);
  }
}

Test(resume, on_another_layout_goes_on_with_the_same_loss)
{
  run_tiny(4, "relayout");
}

Test(resume, from_twelve_files_on_five_ranks) { run_tiny(12, "twelve"); }

Test(resume, brings_every_expert_to_its_place) { run_tiny(4, "experts"); }

Test(init_from, keeps_the_weights_through_a_step_of_rate_zero)
{
  run_tiny(2, "weights");
}

/* A reader that is not ours, in another folder. */
static void compare_in_python(const char *folder, int stage)
{
  static const char script[] =
      "import h5py, numpy, sys\n"
      "v = h5py.File(sys.argv[1])['model']; f = h5py.File(sys.argv[2])\n"
      "assert f['exp_avg'] and f['exp_avg_sq']\n"
      "names = [n for n in f if isinstance(f[n], h5py.Dataset)]\n"
      "assert sorted(names) == sorted(v) and len(names) > 40, names\n"
      "for n in names:\n"
      "  assert v[n].is_virtual and v[n].dtype == numpy.float32, n\n"
      "  assert numpy.array_equal(f[n][...], v[n][...]), n\n"
      "print(len(names), 'tensors')\n";
  char output[SAMPLE_TEXT];
  int code = shell(output,
                   "cd / && /usr/bin/python3 -c \"%s\" "
                   "%s/stage%d/global_step3/checkpoint.h5 %s/stage%d/full.h5 "
                   "2>&1",
                   script, folder, stage, folder, stage);

  cr_assert_eq(code, 0, "stage %d: %s", stage, output);
}

Test(gather, equals_the_parameters_at_every_stage)
{
  char folder[SAMPLE_PATH], output[SAMPLE_TEXT];

  make_folder(folder);
  run_ranks(4, "tests/ranks/rank_checkpoint", 120, "gather %s", folder);
  if (shell(output, "/usr/bin/python3 -c 'import h5py' 2>&1") == 0)
    for (int stage = 0; stage <= 3; stage++)
      compare_in_python(folder, stage);
  else
    cr_log_warn("python3-h5py is missing: virtual datasets are not compared");
  remove_folder(folder);
}

static void run_save(int ranks, const char *what)
{
  char folder[SAMPLE_PATH];

  make_folder(folder);
  run_ranks(ranks, "tests/ranks/rank_save", 60, "%s %s/c", what, folder);
  remove_folder(folder);
}

Test(save, overwrites_nothing_and_keeps_what_it_is_told)
{
  run_save(4, "again");
}

Test(save, on_a_bad_path_of_one_rank_fails_on_all) { run_save(2, "path"); }

Test(save, beyond_the_quota_of_one_rank_fails_on_all) { run_save(3, "limit"); }

Test(save, on_a_full_disk_leaves_the_older_step)
{
  char folder[SAMPLE_PATH];

  make_folder(folder);
  if (mount("tmpfs", folder, "tmpfs", 0, "size=36m") != 0) {
    remove_folder(folder);
    cr_skip_test("a file system can only be mounted by root");
  }
  run_ranks(2, "tests/ranks/rank_save", 60, "full %s/c", folder);
  cr_assert_eq(umount(folder), 0);
  remove_folder(folder);
}

/* The peak of a child, in MiB. */
static double peak_of_tool(const char *from, const char *to)
{
  struct rusage usage;
  int status;
  pid_t child = fork();

  if (child == 0) {
    execl(MZ_BUILD_ROOT "/h5-gather", "h5-gather", from, "-o", to, NULL);
    _exit(127);
  }
  cr_assert_eq(wait4(child, &status, 0, &usage), child);
  cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  return (double)usage.ru_maxrss / 1024;
}

Test(gather, of_a_model_of_2_GiB_needs_at_most_256_MiB, .timeout = 600)
{
  char folder[SAMPLE_PATH], from[SAMPLE_PATH + 8], to[SAMPLE_PATH + 8];
  struct statvfs disk;
  struct stat info;
  double peak;

  make_folder(folder);
  cr_assert_eq(statvfs(folder, &disk), 0);
  if ((double)disk.f_bavail * (double)disk.f_frsize < 0x1p30 * 10) {
    remove_folder(folder);
    cr_skip_test("needs 10 GiB of disk");
  }
  snprintf(from, sizeof from, "%s/c", folder);
  snprintf(to, sizeof to, "%s/full.h5", folder);
  run_ranks(2, "tests/ranks/rank_save", 300, "large %s 2080", from);
  peak = peak_of_tool(from, to);
  cr_assert_eq(stat(to, &info), 0);
  remove_folder(folder);
  cr_assert_gt((double)info.st_size, 0x1p31);
  cr_assert_leq(peak, 256.0, "h5-gather had %g MiB", peak);
}
