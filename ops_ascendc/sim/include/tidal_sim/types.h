// SPDX-License-Identifier: Apache-2.0
// The plain types that kernels name: 16-bit numbers, positions, pipes, events and the parameters of copies.

#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

// The kernels only move 16-bit numbers, so these have no arithmetic.
struct half {
  std::uint16_t bits;
};
struct bfloat16_t {
  std::uint16_t bits;
};
inline bool operator==(half a, half b) { return a.bits == b.bits; }
inline bool operator!=(half a, half b) { return a.bits != b.bits; }
inline bool operator==(bfloat16_t a, bfloat16_t b) { return a.bits == b.bits; }
inline bool operator!=(bfloat16_t a, bfloat16_t b) { return a.bits != b.bits; }
static_assert(std::is_trivial_v<half> && sizeof(half) == 2);
static_assert(std::is_trivial_v<bfloat16_t> && sizeof(bfloat16_t) == 2);

using GM_ADDR = std::uint8_t*;

enum pipe_t { PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPE_ALL };
enum event_t { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };

namespace AscendC {

using TEventID = std::int8_t;

enum class TPosition : std::uint8_t { GM, VECIN, VECCALC, VECOUT };
using QuePosition = TPosition;

// A_B: pipe B waits for what pipe A was given before. The order is that of tidal_sim::kEvents.
enum class HardEvent : std::uint8_t {
  MTE2_V,
  V_MTE2,
  MTE3_V,
  V_MTE3,
  MTE2_MTE3,
  MTE3_MTE2,
  MTE2_S,
  S_MTE2,
  MTE3_S,
  S_MTE3,
  V_S,
  S_V,
};

enum class CacheLine : std::uint8_t { SINGLE_CACHE_LINE, ENTIRE_DATA_CACHE };
enum class DcciDst : std::uint8_t { CACHELINE_ALL, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };

// Lengths and gaps in units of 32 bytes. A gap lies between the end of a block and the start of the next.
struct DataCopyParams {
  DataCopyParams() = default;
  DataCopyParams(std::uint16_t count, std::uint16_t length, std::uint16_t source_gap,
                 std::uint16_t destination_gap)
      : blockCount(count), blockLen(length), srcGap(source_gap), dstGap(destination_gap) {}

  std::uint16_t blockCount = 1;
  std::uint16_t blockLen = 0;
  union {
    std::uint16_t srcGap = 0;
    std::uint16_t srcStride;
  };
  union {
    std::uint16_t dstGap = 0;
    std::uint16_t dstStride;
  };
};

// blockLen in bytes; a gap in bytes on the side of GM, in units of 32 bytes on the side of UB.
struct DataCopyExtParams {
  DataCopyExtParams() = default;
  DataCopyExtParams(std::uint16_t count, std::uint32_t length, std::uint32_t source_gap,
                    std::uint32_t destination_gap, std::uint32_t reserved)
      : blockCount(count),
        blockLen(length),
        srcStride(source_gap),
        dstStride(destination_gap),
        rsv(reserved) {}

  std::uint16_t blockCount = 1;
  std::uint32_t blockLen = 0;
  std::uint32_t srcStride = 0;
  std::uint32_t dstStride = 0;
  std::uint32_t rsv = 0;
};

// Elements to add on the left and right of each block, at most 32 bytes on each side.
template <typename T>
struct DataCopyPadExtParams {
  DataCopyPadExtParams() = default;
  DataCopyPadExtParams(bool pad, std::uint8_t left, std::uint8_t right, T value)
      : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}

  bool isPad = false;
  std::uint8_t leftPadding = 0;
  std::uint8_t rightPadding = 0;
  T paddingValue{};
};

}  // namespace AscendC
