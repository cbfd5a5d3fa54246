/* SPDX-License-Identifier: Apache-2.0 */
/* When gathered weights come and go. The order of all uses is known, so a set
 * whose room is needed goes when its next use is the farthest (Belady 1966),
 * and what comes next is gathered ahead.
 *
 * A stay begins and ends with a use: what an eviction takes has left right
 * after its last use, and the time until the eviction is free for prefetches.
 */
#include "plan/sketch.h"

#include "base/alloc.h"
#include "base/check.h"

enum {
  NEVER = INT32_MAX,
  MOST_AHEAD = 32 /* stays posted ahead: half of the queue's ring, so that a
                     post does not wait for what is needed much later */
};

/* A set while the items pass by. */
typedef struct holder {
  int32_t last_use;  /* number of its last use; -1: none yet */
  int32_t next_item; /* of its next use */
  int32_t needed_at; /* item that needs it now */
  int32_t stay;      /* its last one; -1: none yet */
  int32_t place;     /* in held; -1: not gathered */
} holder_t;

typedef struct keeper {
  mz_sketch_t *s;
  const mz_plan_opts_t *opts;
  int32_t num_uses;
  int32_t *next_item; /* by use: item of the set's next use, or NEVER */
  uint8_t *near;      /* by use: that is within the reuse distance */
  int64_t *sums;      /* [items + 1]: a Fenwick tree of elements */
  holder_t *holders;  /* by set */
  int32_t *held;      /* sets that are gathered */
  int32_t num_held;
  int64_t held_elements;
  int64_t *live; /* by item: elements gathered or on the way */
} keeper_t;

static int64_t elements_of(const keeper_t *k, int32_t set)
{
  return k->s->sets[set].elements;
}

/* --- uses --- */

/* The set of weight j of an item; -1: its weights are always there. */
static int32_t set_at(const keeper_t *k, int64_t item, int32_t j)
{
  int32_t set = k->s->items[item].weights[j];
  return k->s->sets[set].gathers ? set : -1;
}

static mz_status_t check_needs(const keeper_t *k)
{
  int64_t most = 0;

  for (int64_t i = 0; i < k->s->num_items; i++) {
    int64_t sum = 0;

    for (int32_t j = 0; j < k->s->items[i].num_weights; j++)
      if (set_at(k, i, j) >= 0) sum += elements_of(k, set_at(k, i, j));
    most = mz_max_i64(most, sum);
  }
  MZ_REQUIRE(most <= k->opts->max_live_parameters, MZ_ERR_CONFIG,
             "zero_optimization.stage3_max_live_parameters is %" PRId64
             ", the largest step needs %" PRId64,
             k->opts->max_live_parameters, most);
  return MZ_OK;
}

/* Fenwick 1994: sums of items [0, end) of numbers that change. */
static int64_t sum_before(const keeper_t *k, int64_t end)
{
  int64_t sum = 0;

  for (; end > 0; end -= end & -end)
    sum += k->sums[end];
  return sum;
}

static void add_at(keeper_t *k, int64_t item, int64_t elements)
{
  for (item++; item <= k->s->num_items; item += item & -item)
    k->sums[item] += elements;
}

/* Every set counts at the item of its last use, so the sum between two uses of
 * one set is that of the distinct other sets used between: the reuse distance,
 * the room it would take to keep everything. */
static void find_distances(keeper_t *k, int32_t *item_of_use)
{
  int32_t use = 0;

  for (int32_t i = 0; i < k->s->num_items; i++) {
    int32_t first = use;

    for (int32_t j = 0; j < k->s->items[i].num_weights; j++) {
      int32_t set = set_at(k, i, j), last;

      if (set < 0) continue;
      last = k->holders[set].last_use;
      item_of_use[use] = i;
      k->next_item[use++] = NEVER;
      if (last < 0) continue;
      k->next_item[last] = i;
      k->near[last] = sum_before(k, i) - sum_before(k, item_of_use[last] + 1) <=
                      k->opts->max_reuse_distance;
    }
    for (int32_t j = 0; j < k->s->items[i].num_weights; j++) {
      int32_t set = set_at(k, i, j);
      holder_t *h;

      if (set < 0) continue;
      h = &k->holders[set];
      if (h->last_use >= 0)
        add_at(k, item_of_use[h->last_use], -elements_of(k, set));
      add_at(k, i, elements_of(k, set));
      h->last_use = first++;
    }
  }
}

/* --- stays --- */

static void let_go(keeper_t *k, int32_t set)
{
  int32_t place = k->holders[set].place, moved = k->held[--k->num_held];

  k->held[place] = moved;
  k->holders[moved].place = place;
  k->holders[set].place = -1;
  k->held_elements -= elements_of(k, set);
}

/* Room for @p elements at an item; what the item needs stays. There is enough,
 * since the item's needs alone are within the limit. */
static void make_room(keeper_t *k, int32_t item, int64_t elements)
{
  while (k->held_elements + elements > k->opts->max_live_parameters) {
    int32_t farthest = -1;

    for (int32_t i = 0; i < k->num_held; i++) {
      const holder_t *h = &k->holders[k->held[i]];
      if (h->needed_at == item) continue;
      if (farthest < 0 || h->next_item > k->holders[farthest].next_item)
        farthest = k->held[i];
    }
    MZ_ASSERT(farthest >= 0);
    let_go(k, farthest);
  }
}

static mz_status_t gather(keeper_t *k, int32_t set, int32_t item)
{
  mz_stay_t stay = {.set = set, .first = item, .last = item, .target = -1};
  mz_sketch_t *s = k->s;
  holder_t *h = &k->holders[set];

  make_room(k, item, elements_of(k, set));
  stay.earliest = h->stay >= 0 ? s->stays[h->stay].last + 1 : 0;
  MZ_TRY(mz_grow(&s->stays, &s->cap_stays, s->num_stays + 1, "stays"));
  h->stay = (int32_t)s->num_stays;
  s->stays[s->num_stays++] = stay;
  h->place = k->num_held;
  k->held[k->num_held++] = set;
  k->held_elements += elements_of(k, set);
  return MZ_OK;
}

static mz_status_t make_stays(keeper_t *k)
{
  int32_t use = 0;

  for (int32_t i = 0; i < k->s->num_items; i++) {
    int32_t num = k->s->items[i].num_weights, first = use;

    for (int32_t j = 0; j < num; j++)
      if (set_at(k, i, j) >= 0) k->holders[set_at(k, i, j)].needed_at = i;
    for (int32_t j = 0; j < num; j++) {
      int32_t set = set_at(k, i, j);

      if (set < 0) continue;
      if (k->holders[set].place < 0) MZ_TRY(gather(k, set, i));
      k->s->stays[k->holders[set].stay].last = i;
      k->holders[set].next_item = k->next_item[use++];
    }
    for (int32_t j = 0; j < num; j++) {
      int32_t set = set_at(k, i, j);

      if (set < 0) continue;
      if (k->next_item[first] == NEVER || !k->near[first]) let_go(k, set);
      first++;
    }
  }
  return MZ_OK;
}

/* --- posts --- */

static void count_live(keeper_t *k)
{
  const mz_sketch_t *s = k->s;

  for (int64_t i = 0; i < s->num_stays; i++) {
    const mz_stay_t *stay = &s->stays[i];
    k->live[stay->first] += elements_of(k, stay->set);
    k->live[stay->last + 1] -= elements_of(k, stay->set);
  }
  for (int64_t i = 1; i < s->num_items; i++)
    k->live[i] += k->live[i - 1];
}

/* The first item, not before @p item, from which on there is room for a stay
 * until it begins. */
static int32_t room_from(const keeper_t *k, const mz_stay_t *stay, int32_t item)
{
  int64_t limit = k->opts->max_live_parameters - elements_of(k, stay->set);
  int32_t at = stay->first;

  while (at > item && at > stay->earliest && k->live[at - 1] <= limit)
    at--;
  return at;
}

/* Whether the bucket has room for one more. A set that is larger than it, as
 * the experts of a large layer are, goes ahead alone: else the step that needs
 * it would wait for all of it. */
static bool fits_bucket(const keeper_t *k, int64_t ahead, int64_t size)
{
  int64_t bucket = k->opts->prefetch_bucket_size;

  return ahead + size <= bucket || (ahead == 0 && bucket > 0);
}

/* Stays are posted in their order: at their first item, or before it as far as
 * the live limit and the prefetch bucket (elements posted for later items)
 * allow, MOST_AHEAD at once. */
static void place_posts(keeper_t *k)
{
  mz_sketch_t *s = k->s;
  int64_t next = 0, begun = 0, ahead = 0;
  int32_t from = -1; /* of stay number next; -1: not looked for yet */

  for (int32_t i = 0; i < s->num_items; i++) {
    for (; begun < s->num_stays && s->stays[begun].first == i; begun++)
      if (begun < next) ahead -= elements_of(k, s->stays[begun].set);
    for (; next < s->num_stays; next++, from = -1) {
      mz_stay_t *stay = &s->stays[next];
      int64_t size = elements_of(k, stay->set);

      stay->post = i;
      if (stay->first == i) continue;
      if (!fits_bucket(k, ahead, size) || next - begun >= MOST_AHEAD) break;
      if (from < 0) from = room_from(k, stay, i);
      if (from > i) break;
      ahead += size;
      for (int32_t j = i; j < stay->first; j++)
        k->live[j] += size;
    }
  }
  for (int64_t i = 0; i < s->num_items; i++)
    s->plan->peak_gathered = mz_max_i64(s->plan->peak_gathered, k->live[i]);
}

static mz_status_t create(keeper_t *k, int32_t **item_of_use)
{
  const mz_sketch_t *s = k->s;

  for (int64_t i = 0; i < s->num_items; i++)
    k->num_uses += s->items[i].num_weights;
  MZ_TRY(mz_new(k->num_uses, "items of uses", item_of_use));
  MZ_TRY(mz_new(k->num_uses, "next uses", &k->next_item));
  MZ_TRY(mz_new(k->num_uses, "distances of uses", &k->near));
  MZ_TRY(mz_new(s->num_items + 1, "sums of uses", &k->sums));
  MZ_TRY(mz_new(s->num_sets, "holders of sets", &k->holders));
  MZ_TRY(mz_new(s->num_sets, "gathered sets", &k->held));
  MZ_TRY(mz_new(s->num_items + 1, "gathered elements", &k->live));
  for (int64_t i = 0; i < s->num_sets; i++)
    k->holders[i] =
        (holder_t){.last_use = -1, .needed_at = -1, .stay = -1, .place = -1};
  return MZ_OK;
}

mz_status_t mz_sketch_make_stays(mz_sketch_t *s)
{
  keeper_t k = {.s = s, .opts = &s->plan->opts};
  int32_t *item_of_use = NULL;
  mz_status_t st;

  MZ_TRY_GOTO(st, check_needs(&k), done);
  MZ_TRY_GOTO(st, create(&k, &item_of_use), done);
  find_distances(&k, item_of_use);
  MZ_TRY_GOTO(st, make_stays(&k), done);
  count_live(&k);
  place_posts(&k);
done:
  mz_free(item_of_use);
  mz_free(k.next_item);
  mz_free(k.near);
  mz_free(k.sums);
  mz_free(k.holders);
  mz_free(k.held);
  mz_free(k.live);
  return st;
}
