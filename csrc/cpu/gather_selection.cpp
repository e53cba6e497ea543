// SPDX-License-Identifier: Apache-2.0
// Three phases: plan each row without writing, copy the rows of all plans at once, commit the status.

#include "tidal/gather_selection.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace tidal {
namespace {

constexpr int32_t kNone = -1;

// Where each id of a row's old status is. Open addressing; at most half full.
class SlotOfId {
 public:
  explicit SlotOfId(int64_t topk) {
    int bits = 6;
    while ((int64_t{1} << bits) < 2 * topk) ++bits;
    shift_ = 32 - bits;
    entries_.resize(size_t{1} << bits);
  }

  void fill(const int32_t* ids, int64_t count) {
    std::fill(entries_.begin(), entries_.end(), Entry{kNone, kNone});
    for (int32_t slot = 0; slot < count; ++slot) {
      if (ids[slot] < 0) continue;
      Entry& entry = find(ids[slot]);
      if (entry.id == kNone) entry = {ids[slot], slot};
    }
  }

  // The slot of the first copy; the second time there is none, so that an id given twice gets two slots.
  int32_t take(int32_t id) {
    Entry& entry = find(id);
    return entry.id == id ? std::exchange(entry.slot, kNone) : kNone;
  }

 private:
  struct Entry {
    int32_t id;
    int32_t slot;
  };

  Entry& find(int32_t id) {
    Entry* const entries = entries_.data();
    const size_t mask = entries_.size() - 1;
    size_t at = (static_cast<uint32_t>(id) * 2654435769u) >> shift_;
    while (entries[at].id != kNone && entries[at].id != id) at = (at + 1) & mask;
    return entries[at];
  }

  int shift_;
  std::vector<Entry> entries_;
};

// Positions are below 2^31, and a division of 32 bits takes half as long as one of 64.
int64_t divided(int64_t position, int64_t size) {
  return static_cast<uint32_t>(position) / static_cast<uint32_t>(std::min<int64_t>(size, UINT32_MAX));
}

// Token rows to copy between two caches; the same list serves kv and rope.
struct Copies {
  std::vector<int64_t> from;
  std::vector<int64_t> to;

  void add(int64_t source, int64_t target, int64_t tokens) {
    for (int64_t token = 0; token < tokens; ++token) {
      from.push_back(source + token);
      to.push_back(target + token);
    }
  }
};

// The ids of a row by slot, and where their bytes come from: a slot of the row, or kNone for the pool.
struct RowPlan {
  int64_t row;
  int64_t length;  // tokens that the row sees
  std::vector<int32_t> ids;
  std::vector<int32_t> sources;
};

class Planner {
 public:
  Planner(const SelectionCall& call, SelectionCounts& counts)
      : call_(call), counts_(counts), slot_of_(call.topk) {}

  std::vector<RowPlan> plans;
  Copies first;      // hits that leave a slot which another id takes
  Copies moves;      // hits from slots past the row's end
  Copies fetches;    // from the full pool
  Copies exchanges;  // pairs that change places

  void plan(int64_t row) {
    const int64_t request = row / call_.queries;
    const int64_t seen = call_.lengths[request] - (call_.queries - 1 - row % call_.queries);
    if (seen <= 0) return;
    RowPlan plan{row, seen, {}, {}};
    choose(plan, call_.lengths[request] - call_.queries);
    const int64_t end = static_cast<int64_t>(plan.ids.size()) - 1;
    int64_t largest = end;
    if (call_.by_blocks && end > 0) {
      largest = std::max_element(plan.ids.begin(), plan.ids.end()) - plan.ids.begin();
      std::swap(plan.ids[largest], plan.ids[end]);
      std::swap(plan.sources[largest], plan.sources[end]);
    }
    list(plan, largest, end);
    plans.push_back(std::move(plan));
  }

 private:
  // Gives each valid id its slot. Positions of the request from `stable` on were written in this step.
  void choose(RowPlan& plan, int64_t stable) {
    const int32_t* ids = call_.ids + plan.row * call_.topk;
    const int32_t* status = call_.status + plan.row * (call_.topk + 1);
    // The partial block of the last call, if any, was its last: whole blocks alone can be used again.
    const int64_t whole = call_.by_blocks ? status[call_.topk] / call_.block : call_.topk;
    slot_of_.fill(status, call_.topk);
    valid_.clear();
    found_.clear();
    for (int64_t i = 0; i < call_.topk; ++i) {
      const int32_t id = ids[i];
      if (id < 0 && call_.by_blocks) break;
      if (id < 0 || id * call_.block >= plan.length) continue;
      const int32_t slot = slot_of_.take(id);
      const bool trusted = slot != kNone && slot < whole && (id + int64_t{1}) * call_.block <= stable;
      valid_.push_back(id);
      found_.push_back(trusted ? slot : kNone);
    }
    const auto count = static_cast<int32_t>(valid_.size());
    plan.ids.assign(count, kNone);
    plan.sources.assign(count, kNone);
    for (int32_t i = 0; i < count; ++i) {
      if (found_[i] != kNone && found_[i] < count) plan.ids[found_[i]] = valid_[i];
    }
    int32_t free = 0;
    for (int32_t i = 0; i < count; ++i) {
      int32_t slot = found_[i];
      if (slot == kNone || slot >= count) {
        while (plan.ids[free] != kNone) ++free;
        slot = free;
      }
      plan.ids[slot] = valid_[i];
      plan.sources[slot] = found_[i];
      if (found_[i] == kNone) {
        ++counts_.fetched;
        check_page(plan, valid_[i]);
      } else {
        ++counts_.hits;
      }
    }
  }

  // Lists the copies of a row. Only the ids at `one` and `two`, which have changed places, may come from a
  // used slot.
  void list(const RowPlan& plan, int64_t one, int64_t two) {
    const auto count = static_cast<int64_t>(plan.ids.size());
    const bool exchanged = one != two && plan.sources[one] == two && plan.sources[two] == one;
    if (exchanged) exchanges.add(token_of(plan.row, one), token_of(plan.row, two), call_.block);
    for (int64_t slot = 0; slot < count; ++slot) {
      const int64_t source = plan.sources[slot];
      if (source == slot) continue;
      const int64_t target = token_of(plan.row, slot);
      if (source == kNone) {
        fetch(plan, plan.ids[slot], target);
        continue;
      }
      ++counts_.moved;
      if (source >= count) {
        moves.add(token_of(plan.row, source), target, call_.block);
      } else if (!exchanged) {
        first.add(token_of(plan.row, source), target, call_.block);
      }
    }
  }

  void check_page(const RowPlan& plan, int32_t id) {
    const int64_t page = page_of(plan, id);
    if ((page < 0 || page >= call_.full.kv.pages) && counts_.wrong_row < 0) {
      counts_.wrong_row = plan.row;
      counts_.wrong_id = id;
    }
  }

  int64_t page_of(const RowPlan& plan, int32_t id) const {
    const int32_t* pages = call_.full_table + plan.row / call_.queries * call_.full_pages;
    return pages[divided(id * call_.block, call_.full.kv.page_tokens)];
  }

  void fetch(const RowPlan& plan, int32_t id, int64_t target) {
    const int64_t start = id * call_.block;
    const int64_t size = call_.full.kv.page_tokens;
    const int64_t from = page_of(plan, id) * size + start - divided(start, size) * size;
    fetches.add(from, target, std::min(call_.block, plan.length - start));
  }

  int64_t token_of(int64_t row, int64_t slot) const {
    const int64_t size = call_.selection.kv.page_tokens;
    const int64_t start = slot * call_.block;
    const int64_t page = divided(start, size);
    return (call_.selection_table[row * call_.selection_pages + page] - page) * size + start;
  }

  const SelectionCall& call_;
  SelectionCounts& counts_;
  SlotOfId slot_of_;
  std::vector<int32_t> valid_;
  std::vector<int32_t> found_;
};

SourceRows readable(const DestinationRows& rows) {
  return {rows.base, rows.pages, rows.page_tokens, rows.page_stride, rows.row_stride, rows.row_bytes};
}

uint8_t* row_at(const DestinationRows& rows, int64_t token) {
  const int64_t page = token / rows.page_tokens;
  return rows.base + page * rows.page_stride + (token - page * rows.page_tokens) * rows.row_stride;
}

void copy(const Planner& plan, const DestinationRows& selection, const SourceRows& full, int threads,
          CopyPath path) {
  if (selection.row_bytes == 0) return;
  for (size_t i = 0; i < plan.exchanges.from.size(); ++i) {
    uint8_t* one = row_at(selection, plan.exchanges.from[i]);
    std::swap_ranges(one, one + selection.row_bytes, row_at(selection, plan.exchanges.to[i]));
  }
  const auto run = [&](const SourceRows& source, const Copies& copies) {
    const auto count = static_cast<int64_t>(copies.from.size());
    if (count > 0) copy_all({source, selection, copies.from.data(), copies.to.data(), count}, threads, path);
  };
  run(readable(selection), plan.first);
  run(readable(selection), plan.moves);
  run(full, plan.fetches);
}

void commit(const SelectionCall& call, const RowPlan& plan) {
  int32_t* status = call.status + plan.row * (call.topk + 1);
  std::fill(std::copy(plan.ids.begin(), plan.ids.end(), status), status + call.topk, kNone);
  int64_t tokens = 0;
  for (const int64_t id : plan.ids) tokens += std::min(call.block, plan.length - id * call.block);
  status[call.topk] = call.actual[plan.row] = static_cast<int32_t>(tokens);
}

}  // namespace

SelectionCounts gather_selection(const SelectionCall& call, int threads, CopyPath path) {
  SelectionCounts counts;
  Planner planner(call, counts);
  for (int64_t row = 0; row < call.requests * call.queries; ++row) planner.plan(row);
  if (counts.wrong_row >= 0) return counts;
  copy(planner, call.selection.kv, call.full.kv, threads, path);
  copy(planner, call.selection.rope, call.full.rope, threads, path);
  for (const RowPlan& plan : planner.plans) commit(call, plan);
  counts.fetched_rows = static_cast<int64_t>(planner.fetches.from.size());
  return counts;
}

}  // namespace tidal
