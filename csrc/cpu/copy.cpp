// SPDX-License-Identifier: Apache-2.0

#include "tidal/copy.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#  include <immintrin.h>
#  define TIDAL_X86 1
#endif
#define TIDAL_INLINE inline __attribute__((always_inline))

namespace tidal {
namespace {

// How rows are fetched. The numbers are from a virtual EPYC 9004 whose host backs guest memory with 4 KiB
// pages, so that nearly every row of a large pool misses the TLB although the pool is on 2 MiB pages. Random
// rows of a 2 GiB pool into slots that are not in the cache, one thread, GB/s with rows of 1,152 and 656
// bytes:
//    4.5   3.0  row after row
//    9.5   7.0  asking for each line of the row 8 ahead while copying, into the second level, because the
//               first tracks too few misses at once
//   13.0   9.0  in two turns for each kGroup rows: first ask for all, then copy all. A copy that waits for a
//               line holds up the page walks of the rows behind it; asking never waits. Walking to the next
//               group's pages between the copies of this one gives 8.8 and 5.9.
//   12.3  11.9  memcpy of as many contiguous bytes
// Reading alone reaches 11 with the TLB cold and 22 with it warm: a page walk takes some 26 ns.
constexpr int64_t kLine = 64;
constexpr int kGroup = 64;
// Lines are asked for this many rows after their page, when its walk is over: a request for a page that is
// still being walked to is dropped, and so is one that finds the queue full.
constexpr int kWalk = 4;
// For that reason lines are asked for again this many rows before they are copied.
constexpr int kAgain = 4;
// From so many bytes on, stores pass the caches by. A decode step goes through the slots of all layers, so
// that a layer's are not in the cache when its turn comes, and fetching them only to overwrite them halves
// the speed.
constexpr int64_t kStreamBytes = int64_t{1} << 20;

// Turns row numbers into addresses. Pages of a power of two rows need no division, which costs as much as
// four cache lines; rows without gaps between pages count as one page.
template <class Byte>
class Addresses {
 public:
  explicit Addresses(const PagedRows<Byte>& rows)
      : base_(rows.base), row_stride_(rows.row_stride), page_stride_(rows.page_stride) {
    const bool flat =
        rows.pages <= 1 || rows.page_tokens == 0 || rows.page_stride == rows.page_tokens * rows.row_stride;
    if (flat) {
      mask_ = INT64_MAX;
      shift_ = 63;
    } else if ((rows.page_tokens & (rows.page_tokens - 1)) == 0) {
      mask_ = rows.page_tokens - 1;
      shift_ = __builtin_ctzll(static_cast<uint64_t>(rows.page_tokens));
    } else {
      page_tokens_ = rows.page_tokens;
    }
  }

  Byte* of(int64_t row) const {
    const int64_t page = page_tokens_ == 0 ? row >> shift_ : row / page_tokens_;
    const int64_t inside = page_tokens_ == 0 ? row & mask_ : row - page * page_tokens_;
    return base_ + page * page_stride_ + inside * row_stride_;
  }

 private:
  Byte* base_;
  int64_t row_stride_;
  int64_t page_stride_;
  int64_t page_tokens_ = 0;  // 0: shift and mask serve
  int64_t mask_ = 0;
  int shift_ = 0;
};

// Copies fewer bytes than a register holds, without touching what is beside them: a masked load would reach
// into the next line, which nobody has asked for.
inline void copy_few(uint8_t* to, const uint8_t* from, int64_t bytes) {
  for (int64_t part = 32; part > 0; part /= 2) {
    if ((bytes & part) == 0) continue;
    switch (part) {  // of a size that the compiler knows
      case 32:
        std::memcpy(to, from, 32);
        break;
      case 16:
        std::memcpy(to, from, 16);
        break;
      case 8:
        std::memcpy(to, from, 8);
        break;
      case 4:
        std::memcpy(to, from, 4);
        break;
      case 2:
        std::memcpy(to, from, 2);
        break;
      default:
        *to = *from;
    }
    to += part;
    from += part;
  }
}

struct Scalar {
  template <bool kStream>
  static void copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  static void finish() {}
};

#if TIDAL_X86
struct Avx2 {
  static constexpr int64_t kWidth = 32;
  template <bool kStream>
  __attribute__((target("avx2"))) static void copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
    int64_t at = 0;
    if (kStream) {
      at = std::min<int64_t>(bytes, -reinterpret_cast<intptr_t>(to) & (kWidth - 1));
      copy_few(to, from, at);
    }
    for (; at + kWidth <= bytes; at += kWidth) {
      const __m256i part = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at));
      if (kStream) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at), part);
      } else {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + at), part);
      }
    }
    copy_few(to + at, from + at, bytes - at);
  }
  static void finish() { _mm_sfence(); }
};

struct Avx512 {
  static constexpr int64_t kWidth = 64;
  template <bool kStream>
  __attribute__((target("avx512f"))) static void copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
    int64_t at = 0;
    if (kStream) {
      at = std::min<int64_t>(bytes, -reinterpret_cast<intptr_t>(to) & (kWidth - 1));
      copy_few(to, from, at);
    }
    for (; at + kWidth <= bytes; at += kWidth) {
      const __m512i part = _mm512_loadu_si512(from + at);
      if (kStream) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), part);
      } else {
        _mm512_storeu_si512(to + at, part);
      }
    }
    copy_few(to + at, from + at, bytes - at);
  }
  static void finish() { _mm_sfence(); }
};
#endif

struct Pair {
  uint8_t* to;
  const uint8_t* from;
};

TIDAL_INLINE void ask_for(const uint8_t* row, int64_t bytes) {
  const uint8_t* const end = row + bytes;
  for (const uint8_t* at = row - (reinterpret_cast<uintptr_t>(row) & (kLine - 1)); at < end; at += kLine) {
    __builtin_prefetch(at, 0, 2);
  }
}

// Has the pages of a group walked to, and then its source lines fetched. Inlined by force: GCC 12 takes a
// function that only prefetches for one without effects, and drops the call.
TIDAL_INLINE void ask_for_group(const Pair* group, int count, int64_t bytes) {
  for (int i = 0; i < count + kWalk; ++i) {
    if (i < count) {
      __builtin_prefetch(group[i].from, 0, 2);
      __builtin_prefetch(group[i].from + bytes - 1, 0, 2);
      // A destination's first and last line may be shared with its neighbours; these are needed, too.
      __builtin_prefetch(group[i].to, 1, 3);
      if ((reinterpret_cast<uintptr_t>(group[i].to + bytes) & (kLine - 1)) != 0)
        __builtin_prefetch(group[i].to + bytes - 1, 1, 3);
    }
    if (i >= kWalk) ask_for(group[i - kWalk].from, bytes);
  }
}

template <class Way, bool kStream>
void copy_rows(const RowCopy& copy, int64_t first, int64_t end) {
  const Addresses<const uint8_t> source(copy.source);
  const Addresses<uint8_t> destination(copy.destination);
  const int64_t bytes = copy.source.row_bytes;
  Pair group[kGroup];
  for (int64_t i = first; i < end;) {
    int count = 0;
    for (; i < end && count < kGroup; ++i) {
      const int64_t to = copy.destination_rows ? copy.destination_rows[i] : i;
      if (to < 0) continue;
      if (copy.source_rows[i] >= 0) {
        group[count++] = {destination.of(to), source.of(copy.source_rows[i])};
      } else {
        std::memset(destination.of(to), 0, static_cast<size_t>(bytes));
      }
    }
    ask_for_group(group, count, bytes);
    for (int j = 0; j < count; ++j) {
      if (j + kAgain < count) ask_for(group[j + kAgain].from, bytes);
      Way::template copy<kStream>(group[j].to, group[j].from, bytes);
    }
  }
  if (kStream) Way::finish();
}

template <class Way>
void copy_by(const RowCopy& copy, int64_t first, int64_t end) {
  const int64_t bytes = copy.source.row_bytes;
  if (bytes == 0) return;
  if (copy.count * bytes > kStreamBytes) {
    copy_rows<Way, true>(copy, first, end);
  } else {
    copy_rows<Way, false>(copy, first, end);
  }
}

}  // namespace

bool has_path(CopyPath path) {
#if TIDAL_X86
  if (path == CopyPath::kAvx512) return __builtin_cpu_supports("avx512f");
  if (path == CopyPath::kAvx2) return __builtin_cpu_supports("avx2");
#endif
  return path == CopyPath::kScalar;
}

CopyPath best_path() {
  if (has_path(CopyPath::kAvx512)) return CopyPath::kAvx512;
  if (has_path(CopyPath::kAvx2)) return CopyPath::kAvx2;
  return CopyPath::kScalar;
}

int64_t first_outside(const int64_t* indices, int64_t count, int64_t rows) {
  // The sign bit of either sum says "outside". Without a branch this runs at four indices a cycle.
  uint64_t signs = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto index = static_cast<uint64_t>(indices[i]);
    signs |= (index + 1) | (static_cast<uint64_t>(rows) - 1 - index);
  }
  if (static_cast<int64_t>(signs) >= 0) return -1;
  return std::find_if(indices, indices + count, [=](int64_t index) { return index < -1 || index >= rows; }) -
         indices;
}

void copy_part(const RowCopy& copy, int64_t first, int64_t end, CopyPath path) {
  switch (path) {
#if TIDAL_X86
    case CopyPath::kAvx512:
      return copy_by<Avx512>(copy, first, end);
    case CopyPath::kAvx2:
      return copy_by<Avx2>(copy, first, end);
#endif
    default:
      return copy_by<Scalar>(copy, first, end);
  }
}

}  // namespace tidal
