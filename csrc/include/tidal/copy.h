// SPDX-License-Identifier: Apache-2.0
// Copies rows, chosen one by one, from one paged array to another. One kernel serves gathers, scatters and
// fetches.

#pragma once

#include <cstdint>

namespace tidal {

// Rows in memory: pages of `page_tokens` rows, `row_bytes` each. Strides are bytes. Row r is in page r /
// page_tokens.
template <class Byte>
struct PagedRows {
  Byte* base;
  int64_t pages;
  int64_t page_tokens;
  int64_t page_stride;
  int64_t row_stride;
  int64_t row_bytes;

  int64_t rows() const { return pages * page_tokens; }
};
using SourceRows = PagedRows<const uint8_t>;
using DestinationRows = PagedRows<uint8_t>;

// One copy: row source_rows[i] goes to row destination_rows[i], for i in [0, count). Source row -1 stands for
// zeros, destination row -1 for a row to skip. Without destination_rows the destination is dense: i goes to
// row i. A row that is read must not be written by the same copy, and no row is written twice.
struct RowCopy {
  SourceRows source;
  DestinationRows destination;
  const int64_t* source_rows;
  const int64_t* destination_rows;
  int64_t count;
};

// Ways to copy a row. A way that the processor lacks must not be asked for.
enum class CopyPath : int { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };

bool has_path(CopyPath path);
CopyPath best_path();

// Position of the first index outside [-1, rows), or -1 where there is none.
int64_t first_outside(const int64_t* indices, int64_t count, int64_t rows);

// Copies the part [first, end) of a copy whose indices were checked, on the calling thread.
void copy_part(const RowCopy& copy, int64_t first, int64_t end, CopyPath path);

// Copies all of it with at most `threads` threads, the caller among them. The others are started once for the
// process and sleep between copies. Small copies stay on the caller.
void copy_all(const RowCopy& copy, int threads, CopyPath path);

}  // namespace tidal
