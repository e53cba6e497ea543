// SPDX-License-Identifier: Apache-2.0
// A copy by several threads: the process's own copy stream, whose threads sleep between copies.

#include <algorithm>
#include <atomic>

#include "tidal/copy.h"
#include "tidal/stream.h"

namespace tidal {
namespace {

constexpr int64_t kRowsPerThread = 512;  // below this a thread costs more than it saves

// Made at the first use and never destroyed, so that no order of destruction at exit matters. A forked
// process makes its own and leaves the inherited one alone.
CopyStream& helpers() {
  static std::atomic<CopyStream*> current{nullptr};
  CopyStream* found = current.load(std::memory_order_acquire);
  while (found == nullptr || !found->usable()) {
    auto* fresh = new CopyStream(0);
    if (current.compare_exchange_strong(found, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;
  }
  return *found;
}

}  // namespace

void copy_all(const RowCopy& copy, int threads, CopyPath path) {
  const auto useful = static_cast<int>(std::min<int64_t>(threads, copy.count / kRowsPerThread));
  if (useful < 2) {
    copy_part(copy, 0, copy.count, path);
  } else {
    helpers().run(copy, useful, path);
  }
}

}  // namespace tidal
