// SPDX-License-Identifier: Apache-2.0
// Copies rows of a paged pool, chosen one by one, into a dense buffer.

#pragma once

#include <cstdint>

namespace tidal {

// Rows of one layer: pages of `page_tokens` rows, `row_bytes` each. Strides are bytes.
struct RowPool {
  const uint8_t* base;
  int64_t pages;
  int64_t page_tokens;
  int64_t page_stride;
  int64_t row_stride;
  int64_t row_bytes;
};

// Ways to copy a row. A way that the processor lacks must not be asked for.
enum class CopyPath : int { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };

bool has_path(CopyPath path);
CopyPath best_path();

// Copies row slots[i] to out + i * out_stride, for `count` slots; slot -1 fills the row with zeros.
// Returns -1, or the position of the first slot outside [-1, pages * page_tokens): then nothing was written.
// `threads` workers share the rows (the caller is one of them). Pool and output must not overlap.
int64_t gather_rows(const RowPool& pool, const int64_t* slots, int64_t count, uint8_t* out,
                    int64_t out_stride, int threads, CopyPath path);

}  // namespace tidal
