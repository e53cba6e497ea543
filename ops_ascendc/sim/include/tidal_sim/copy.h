// SPDX-License-Identifier: Apache-2.0
// DataCopy and DataCopyPad between the two memories, with the limits of the device on their parameters.

#pragma once

#include "tensor.h"
#include "transfer.h"

namespace tidal_sim {

constexpr std::uint32_t kMostBlocks = 4095;
constexpr std::uint32_t kMostPadBytes = 2097151;  // of a block of DataCopyPad

// One block; what is left over behind the last 32 bytes is not copied.
inline Transfer plain(std::uint32_t count, std::size_t size) {
  const std::uint64_t bytes = std::uint64_t{count} * size / kUbBlock * kUbBlock;
  return {1, static_cast<std::uint32_t>(std::min<std::uint64_t>(bytes, UINT32_MAX / kUbBlock * kUbBlock)), 0,
          0};
}

inline void check_blocks(const char* api, std::uint32_t count) {
  if (count > kMostBlocks) refuse(current(api).who(api), "blockCount ", count, " is more than ", kMostBlocks);
}

inline Transfer strided(const char* api, const AscendC::DataCopyParams& given, std::uint32_t global_gap,
                        std::uint32_t local_gap) {
  check_blocks(api, given.blockCount);
  const std::uint32_t bytes = given.blockLen * kUbBlock;
  return {given.blockCount, bytes, bytes + global_gap * kUbBlock, bytes + local_gap * kUbBlock};
}

inline void check_pad(const char* api, const AscendC::DataCopyExtParams& given, std::size_t size) {
  check_blocks(api, given.blockCount);
  const Caller who = current(api).who(api);
  if (given.blockLen > kMostPadBytes)
    refuse(who, "blockLen ", given.blockLen, " is more than ", kMostPadBytes, " bytes");
  if (given.blockLen % size != 0)
    refuse(who, "blockLen ", given.blockLen, " is no multiple of the element's ", size, " bytes");
}

}  // namespace tidal_sim

namespace AscendC {

// GM to UB: count * sizeof(T) bytes, rounded down to a multiple of 32.
template <typename T>
void DataCopy(const LocalTensor<T>& to, const GlobalTensor<T>& from, std::uint32_t count) {
  tidal_sim::copy_in("DataCopy GM to UB", to.Place(), from.Place(), tidal_sim::plain(count, sizeof(T)));
}

template <typename T>
void DataCopy(const GlobalTensor<T>& to, const LocalTensor<T>& from, std::uint32_t count) {
  tidal_sim::copy_out("DataCopy UB to GM", to.Place(), from.Place(), tidal_sim::plain(count, sizeof(T)));
}

template <typename T>
void DataCopy(const LocalTensor<T>& to, const GlobalTensor<T>& from, const DataCopyParams& blocks) {
  const char* const api = "DataCopy GM to UB";
  tidal_sim::copy_in(api, to.Place(), from.Place(),
                     tidal_sim::strided(api, blocks, blocks.srcGap, blocks.dstGap));
}

template <typename T>
void DataCopy(const GlobalTensor<T>& to, const LocalTensor<T>& from, const DataCopyParams& blocks) {
  const char* const api = "DataCopy UB to GM";
  tidal_sim::copy_out(api, to.Place(), from.Place(),
                      tidal_sim::strided(api, blocks, blocks.dstGap, blocks.srcGap));
}

// GM to UB, any number of bytes: each block begins at a multiple of 32 bytes in UB.
template <typename T>
void DataCopyPad(const LocalTensor<T>& to, const GlobalTensor<T>& from, const DataCopyExtParams& blocks,
                 const DataCopyPadExtParams<T>& pad) {
  const char* const api = "DataCopyPad GM to UB";
  static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8);
  tidal_sim::check_pad(api, blocks, sizeof(T));
  tidal_sim::Transfer plan{blocks.blockCount, blocks.blockLen,
                           std::uint64_t{blocks.blockLen} + blocks.srcStride, 0};
  plan.left = pad.leftPadding * static_cast<std::uint32_t>(sizeof(T));
  plan.right = pad.rightPadding * static_cast<std::uint32_t>(sizeof(T));
  const tidal_sim::Caller who = tidal_sim::current(api).who(api);
  if (plan.left > tidal_sim::kUbBlock || plan.right > tidal_sim::kUbBlock)
    tidal_sim::refuse(who, "padding of ", plan.left, " and ", plan.right, " bytes; each may have ",
                      tidal_sim::kUbBlock);
  if (!pad.isPad && plan.left + plan.right != 0)
    tidal_sim::refuse(who, "padding of ", plan.left, " and ", plan.right,
                      " bytes is undefined without isPad; set it, or pad nothing");
  plan.local_step = plan.local_bytes() + std::uint64_t{blocks.dstStride} * tidal_sim::kUbBlock;
  plan.fill_bytes = sizeof(T);
  std::memcpy(plan.fill.data(), &pad.paddingValue, sizeof(T));
  tidal_sim::copy_in(api, to.Place(), from.Place(), plan);
}

template <typename T>
void DataCopyPad(const GlobalTensor<T>& to, const LocalTensor<T>& from, const DataCopyExtParams& blocks) {
  const char* const api = "DataCopyPad UB to GM";
  static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8);
  tidal_sim::check_pad(api, blocks, sizeof(T));
  tidal_sim::Transfer plan{blocks.blockCount, blocks.blockLen,
                           std::uint64_t{blocks.blockLen} + blocks.dstStride, 0};
  plan.local_step = plan.local_bytes() + std::uint64_t{blocks.srcStride} * tidal_sim::kUbBlock;
  tidal_sim::copy_out(api, to.Place(), from.Place(), plan);
}

}  // namespace AscendC
