/* SPDX-License-Identifier: Apache-2.0 */
#include "train/metrics.h"

#include "base/check.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOES_SHOWN = 4 };

static void put_double(FILE *file, const char *name, double value)
{
  if (isfinite(value))
    fprintf(file, "\"%s\": %.17g", name, value);
  else
    fprintf(file, "\"%s\": null", name);
}

/* One object of two lists. */
static void put_numbers(FILE *file, const char *name,
                        const mz_named_number_t *numbers, int32_t num,
                        const mz_named_number_t *more, int32_t num_more)
{
  fprintf(file, ", \"%s\": {", name);
  for (int32_t i = 0; i < num + num_more; i++) {
    const mz_named_number_t *n = i < num ? &numbers[i] : &more[i - num];

    if (i > 0) fputs(", ", file);
    put_double(file, n->name, n->value);
  }
  fputc('}', file);
}

static void put_load(FILE *file, const char *name, const mz_metrics_t *metrics,
                     bool kept)
{
  fprintf(file, ", \"%s\": [", name);
  for (int32_t l = 0; l < metrics->num_moes; l++) {
    const mz_expert_load_t *load = &metrics->experts[l];
    const int64_t *counts = kept ? load->kept : load->routed;

    fputs(l > 0 ? ", [" : "[", file);
    for (int32_t e = 0; e < load->num_experts; e++)
      fprintf(file, "%s%" PRId64, e > 0 ? ", " : "", counts[e]);
    fputc(']', file);
  }
  fputc(']', file);
}

/* A number for each MoE layer. */
static void put_of_loads(FILE *file, const char *name,
                         const mz_metrics_t *metrics,
                         double (*number)(const mz_expert_load_t *load))
{
  fprintf(file, ", \"%s\": [", name);
  for (int32_t l = 0; l < metrics->num_moes; l++)
    fprintf(file, "%s%.17g", l > 0 ? ", " : "", number(&metrics->experts[l]));
  fputc(']', file);
}

static double dead_of(const mz_expert_load_t *load) { return load->dead; }

static double routing_bytes_of(const mz_expert_load_t *load)
{
  return (double)load->routing_bytes;
}

static void put_loads(FILE *file, const mz_metrics_t *metrics)
{
  put_load(file, "expert_counts", metrics, false);
  put_load(file, "expert_kept", metrics, true);
  put_of_loads(file, "expert_dropped", metrics, mz_load_dropped);
  put_of_loads(file, "expert_variance", metrics, mz_load_variance);
  put_of_loads(file, "expert_largest", metrics, mz_load_largest);
  put_of_loads(file, "expert_dead", metrics, dead_of);
  fprintf(file, ", \"expert_window\": %" PRId64, metrics->expert_window);
  put_of_loads(file, "routing_bytes", metrics, routing_bytes_of);
  fprintf(file,
          ", \"exchange_bytes\": {\"sent\": %" PRId64 ", \"planned\": %" PRId64
          "}",
          metrics->exchange_bytes, metrics->planned_exchange_bytes);
}

/* Beside the other times: they differ from run to run. */
static void put_exchange(FILE *file, const mz_metrics_t *metrics)
{
  const mz_named_number_t times[] = {
      {"under_way", metrics->exchange_ms},
      {"exposed", metrics->exposed_ms},
      {"exposed_least", metrics->least_exposed_ms}};

  put_numbers(file, "exchange_ms", times, 3, NULL, 0);
  fputs(", ", file);
  put_double(file, "exchange_exposed",
             metrics->exchange_ms > 0
                 ? metrics->exposed_ms / metrics->exchange_ms
                 : metrics->exposed_ms);
}

static mz_status_t end_line(FILE *file)
{
  fputs("}\n", file);
  MZ_REQUIRE(fflush(file) == 0 && !ferror(file), MZ_ERR_IO,
             "cannot write the metrics: %s", strerror(errno));
  return MZ_OK;
}

mz_status_t mz_metrics_write(FILE *file, const mz_metrics_t *metrics)
{
  const mz_named_number_t numbers[] = {{"loss", metrics->loss},
                                       {"lm_loss", metrics->lm_loss},
                                       {"aux_loss", metrics->aux_loss},
                                       {"z_loss", metrics->z_loss},
                                       {"lr", metrics->lr},
                                       {"grad_norm", metrics->grad_norm},
                                       {"loss_scale", metrics->loss_scale}};

  fprintf(file, "{\"step\": %" PRId64, metrics->step);
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
    fputs(", ", file);
    put_double(file, numbers[i].name, numbers[i].value);
  }
  fprintf(file, ", \"skipped\": %" PRId64 ", \"tokens\": %" PRId64 ", ",
          metrics->skipped, metrics->tokens);
  put_double(file, "tokens_per_s", metrics->tokens_per_s);
  fputs(", ", file);
  put_double(file, "step_ms", metrics->step_ms);
  fputs(", ", file);
  put_double(file, "min_gap", metrics->min_gap);
  put_numbers(file, "time_ms", metrics->time_ms, metrics->num_times,
              metrics->parts_ms, metrics->num_parts);
  put_exchange(file, metrics);
  put_loads(file, metrics);
  put_numbers(file, "bytes", metrics->bytes, metrics->num_bytes, NULL, 0);
  if (metrics->has_param_hash)
    fprintf(file, ", \"param_hash\": \"%016" PRIx64 "\"", metrics->param_hash);
  return MZ_TRACE(end_line(file));
}

mz_status_t mz_metrics_write_eval(FILE *file, int64_t step, double eval_loss,
                                  int64_t tokens)
{
  fprintf(file, "{\"step\": %" PRId64 ", ", step);
  put_double(file, "eval_loss", eval_loss);
  fprintf(file, ", \"eval_tokens\": %" PRId64, tokens);
  return MZ_TRACE(end_line(file));
}

mz_status_t mz_metrics_cut(FILE *file, int64_t step)
{
  char *line = NULL;
  size_t room = 0;
  ssize_t bytes;
  int64_t keep = 0;
  int result;

  rewind(file);
  while ((bytes = getline(&line, &room, file)) > 0) {
    int64_t found;

    if (sscanf(line, "{\"step\": %" SCNd64, &found) != 1 || found > step ||
        line[bytes - 1] != '\n')
      break;
    keep += bytes;
  }
  free(line);
  result = fflush(file) == 0 ? ftruncate(fileno(file), keep) : -1;
  MZ_REQUIRE(result == 0 && fseek(file, 0, SEEK_END) == 0, MZ_ERR_IO,
             "the metrics: %s", strerror(errno));
  return MZ_OK;
}

/* snprintf at the end of what stands in text. */
static void append(char *text, size_t text_bytes, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static void append(char *text, size_t text_bytes, const char *format, ...)
{
  size_t used = strlen(text);
  va_list args;

  va_start(args, format);
  vsnprintf(text + used, text_bytes - used, format, args);
  va_end(args);
}

static void append_left(char *text, size_t text_bytes, double left_s)
{
  int64_t s = llround(left_s);

  if (left_s < 0 || !isfinite(left_s)) return;
  if (s >= 3600)
    append(text, text_bytes, "  ETA %" PRId64 ":%02" PRId64 ":%02" PRId64,
           s / 3600, s / 60 % 60, s % 60);
  else
    append(text, text_bytes, "  ETA %" PRId64 ":%02" PRId64, s / 60, s % 60);
}

static void append_load(char *text, size_t text_bytes,
                        const mz_metrics_t *metrics)
{
  double worst = 0;
  int32_t worst_layer = 0;

  if (metrics->num_moes == 0) return;
  append(text, text_bytes, "  load");
  for (int32_t l = 0; l < metrics->num_moes; l++) {
    double load = mz_load_largest(&metrics->experts[l]);

    if (metrics->num_moes <= MOES_SHOWN)
      append(text, text_bytes, " %.2f", load);
    if (load > worst) {
      worst = load;
      worst_layer = l;
    }
  }
  if (metrics->num_moes > MOES_SHOWN)
    append(text, text_bytes, " at most %.2f (MoE layer %" PRId32 ")", worst,
           worst_layer);
}

/* What should not be there: no word of it when it is not. */
static void append_losses(char *text, size_t text_bytes,
                          const mz_metrics_t *metrics)
{
  int64_t routed = 0, kept = 0, dead = 0;

  for (int32_t l = 0; l < metrics->num_moes; l++) {
    const mz_expert_load_t *load = &metrics->experts[l];

    dead += load->dead;
    for (int32_t e = 0; e < load->num_experts; e++) {
      routed += load->routed[e];
      kept += load->kept[e];
    }
  }
  if (kept < routed)
    append(text, text_bytes, "  dropped %.1f%%",
           100 * (double)(routed - kept) / (double)routed);
  if (dead > 0 && metrics->expert_window == MZ_LOAD_WINDOW)
    append(text, text_bytes, "  dead %" PRId64, dead);
}

void mz_metrics_progress(const mz_metrics_t *metrics, int64_t num_steps,
                         double left_s, char *text, size_t text_bytes)
{
  text[0] = '\0';
  append(text, text_bytes,
         "step %" PRId64 "/%" PRId64 "  loss %.4f  lr %.2e  %.0f tokens/s",
         metrics->step, num_steps, metrics->loss, metrics->lr,
         metrics->tokens_per_s);
  append_left(text, text_bytes, left_s);
  append_load(text, text_bytes, metrics);
  append_losses(text, text_bytes, metrics);
}
