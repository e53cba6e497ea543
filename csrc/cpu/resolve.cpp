// SPDX-License-Identifier: Apache-2.0

#include "tidal/resolve.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "resolve_request.h"

namespace tidal {
namespace {

// Entries and slots for which a thread of its own pays. To start and join one took 25 us, some 170 us when
// the machine was busy; so many take about 60 us.
constexpr int64_t kWorkPerThread = 16384;

// The whole call.
class Step {
 public:
  Step(const SlotState& state, const Seats& seats, const SelectionBatch& batch, const ResolveOutput& out,
       int64_t eager_rows)
      : state_(state),
        seats_(seats),
        batch_(batch),
        out_(out),
        eager_rows_(eager_rows),
        extent_rows_(seats.extent_rows),
        page_tokens_(batch.page_tokens) {}

  // Whether nothing in the batch leads outside the memory at hand. Also notes where misses may go.
  bool accepts(std::vector<uint8_t>& taken) {
    if (batch_.query_start[0] != 0 || batch_.query_start[batch_.requests] != batch_.queries) return false;
    room(taken, seats_.count);
    int64_t checked = 0;
    bool fine = true;
    for (; checked < batch_.requests && fine; ++checked) fine = accepts(checked, taken.data());
    for (int64_t i = 0; i < checked; ++i) {
      const int32_t seat = batch_.seat[i];
      if (seat >= 0 && seat < seats_.count) taken[static_cast<size_t>(seat)] = 0;
    }
    return fine;
  }

  // Most misses that a request may have.
  int64_t most_misses(int64_t i) const {
    const int64_t seat = batch_.seat[i], start = batch_.start[i];
    const int64_t entries = (batch_.query_start[i + 1] - batch_.query_start[i]) * batch_.width;
    if (is_listed(i) || start > eager_rows_) return std::min(entries, start);
    return start - std::min<int64_t>(std::max(state_.filled[seat], 0), start);
  }

  // Entries and slots that a request makes one look at.
  int64_t work(int64_t i) const {
    const int64_t entries = (batch_.query_start[i + 1] - batch_.query_start[i]) * batch_.width;
    return is_listed(i) ? entries + seats_.capacity[batch_.seat[i]] : std::max(entries, most_misses(i));
  }

  // Resolves requests [first, end); their misses go from `at` on. Counts the misses of i in miss_start[i +
  // 1].
  bool run(int64_t first, int64_t end, int64_t at, Scratch& scratch, ResolveCounts& counts) const {
    for (int64_t i = first; i < end; ++i) {
      const int64_t seat = batch_.seat[i], query = batch_.query_start[i], before = counts.fetched;
      const Request request{batch_,
                            state_.held,
                            state_.order,
                            state_.arena_rows,
                            seats_.extents + seat * seats_.max_extents,
                            extent_rows_,
                            page_tokens_,
                            batch_.pages + i * batch_.pages_stride,
                            seats_.capacity[seat],
                            query,
                            batch_.query_start[i + 1] - query,
                            batch_.start[i],
                            eager_rows_,
                            state_.listed + seat,
                            state_.filled + seat,
                            state_.length + seat,
                            out_.slots + query * batch_.width,
                            out_.written + query,
                            out_.miss_rows + at + before,
                            out_.miss_slots + at + before};
      if (!is_listed(i)) {
        resolve_in_place(request, scratch, counts);
      } else if (!resolve_listed(request, scratch, counts)) {
        return false;
      }
      out_.miss_start[i + 1] = static_cast<int32_t>(counts.fetched - before);
    }
    return true;
  }

 private:
  bool is_listed(int64_t i) const {
    const int64_t seat = batch_.seat[i];
    const int64_t queries = batch_.query_start[i + 1] - batch_.query_start[i];
    return state_.listed[seat] != 0 || batch_.start[i] + queries > seats_.capacity[seat];
  }

  bool accepts(int64_t i, uint8_t* taken) const {
    const int64_t seat = batch_.seat[i], start = batch_.start[i];
    const int64_t queries = int64_t{batch_.query_start[i + 1]} - batch_.query_start[i];
    if (seat < 0 || seat >= seats_.count || taken[seat] != 0) return false;
    taken[seat] = 1;
    if (queries < 0 || batch_.query_start[i + 1] > batch_.queries || start < 0 || start + queries > INT32_MAX)
      return false;
    const int64_t capacity = seats_.capacity[seat];
    const int64_t extents = (capacity + seats_.extent_rows - 1) / seats_.extent_rows;
    if (capacity < 0 || extents > seats_.max_extents) return false;
    const auto limit = static_cast<uint32_t>(state_.arena_rows / seats_.extent_rows);
    const int32_t* const own = seats_.extents + seat * seats_.max_extents;
    bool inside = true;
    for (int64_t e = 0; e < extents; ++e) inside &= static_cast<uint32_t>(own[e]) < limit;
    return inside && (!is_listed(i) || queries * (batch_.width + 1) <= capacity);
  }

  const SlotState& state_;
  const Seats& seats_;
  const SelectionBatch& batch_;
  const ResolveOutput& out_;
  const int64_t eager_rows_;
  const Divisor extent_rows_;
  const Divisor page_tokens_;
};

// Requests of one worker.
struct Part {
  int64_t first;
  int64_t end;
  int64_t misses_at;
  ResolveCounts counts{};
  bool fine = true;
};

// Cuts the batch into as many parts of about equal work.
std::vector<Part> split(const Step& step, int64_t requests, int64_t work, int64_t workers) {
  std::vector<Part> parts;
  if (requests == 0) return {Part{0, 0, 0}};
  int64_t first = 0, done = 0, misses = 0, misses_at = 0;
  for (int64_t i = 0; i < requests; ++i) {
    done += step.work(i);
    misses += step.most_misses(i);
    const auto cut = static_cast<int64_t>(parts.size()) + 1;
    if (i + 1 < requests && (cut == workers || done * workers < work * cut)) continue;
    parts.push_back(Part{first, i + 1, misses_at});
    first = i + 1;
    misses_at = misses;
  }
  return parts;
}

// What the calling thread keeps between calls.
struct Workplace {
  std::vector<uint8_t> taken;  // a mark for each seat; all zero between calls
  std::vector<Scratch> scratch;
};

}  // namespace

Resolution resolve(const SlotState& state, const Seats& seats, const SelectionBatch& batch,
                   const ResolveOutput& out, int64_t eager_rows, int threads) {
  static thread_local Workplace place;
  Step step(state, seats, batch, out, eager_rows);
  Resolution result{ResolveStatus::kRefused, {}};
  if (!step.accepts(place.taken)) return result;
  int64_t work = 0, misses = 0;
  for (int64_t i = 0; i < batch.requests; ++i) {
    work += step.work(i);
    misses += step.most_misses(i);
  }
  if (misses > out.miss_room) {
    result.status = ResolveStatus::kNoRoom;
    result.counts.fetched = misses;
    return result;
  }
  const int64_t workers =
      std::max<int64_t>(1, std::min({int64_t{threads}, batch.requests, work / kWorkPerThread}));
  if (static_cast<int64_t>(place.scratch.size()) < workers)
    place.scratch.resize(static_cast<size_t>(workers));
  std::vector<Part> parts = split(step, batch.requests, work, workers);
  std::vector<std::thread> others;
  for (size_t w = 1; w < parts.size(); ++w) {
    others.emplace_back([&step, &part = parts[w], &scratch = place.scratch[w]] {
      part.fine = step.run(part.first, part.end, part.misses_at, scratch, part.counts);
    });
  }
  parts[0].fine = step.run(parts[0].first, parts[0].end, 0, place.scratch[0], parts[0].counts);
  for (std::thread& other : others) other.join();
  result.status = ResolveStatus::kDone;
  for (const Part& part : parts) {
    if (!part.fine) result.status = ResolveStatus::kBroken;
    // The misses of the parts close up.
    const auto bytes = static_cast<size_t>(part.counts.fetched) * sizeof(int64_t);
    std::memmove(out.miss_rows + result.counts.fetched, out.miss_rows + part.misses_at, bytes);
    std::memmove(out.miss_slots + result.counts.fetched, out.miss_slots + part.misses_at, bytes);
    result.counts.fetched += part.counts.fetched;
    result.counts.hits += part.counts.hits;
    result.counts.misses += part.counts.misses;
    result.counts.evictions += part.counts.evictions;
    result.counts.invalid += part.counts.invalid;
  }
  out.miss_start[0] = 0;
  for (int64_t i = 0; i < batch.requests; ++i) out.miss_start[i + 1] += out.miss_start[i];
  return result;
}

}  // namespace tidal
