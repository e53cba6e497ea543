// SPDX-License-Identifier: Apache-2.0
// GlobalTensor and LocalTensor: typed windows on the two memories. Copies are cheap and share the memory.

#pragma once

#include "access.h"

namespace AscendC {

template <typename T>
class GlobalTensor {
 public:
  using PrimType = T;

  void SetGlobalBuffer(T* buffer) { SetGlobalBuffer(buffer, UINT64_MAX); }

  // With a size, no access may pass it, even where the buffer goes on.
  void SetGlobalBuffer(T* buffer, std::uint64_t size) {
    tidal_sim::Core& core = tidal_sim::current("SetGlobalBuffer");
    address_ = buffer;
    size_ = size;
    place_ = core.device.memory.find(buffer);
    place_.declared = tidal_sim::distance(size, sizeof(T));
  }

  T GetValue(std::uint64_t offset) const {
    T value;
    tidal_sim::read_scalar("GlobalTensor::GetValue", place_, tidal_sim::distance(offset, sizeof(T)), &value,
                           sizeof(T));
    return value;
  }

  void SetValue(std::uint64_t offset, T value) {
    tidal_sim::write_scalar("GlobalTensor::SetValue", place_, tidal_sim::distance(offset, sizeof(T)), &value,
                            sizeof(T));
  }

  GlobalTensor operator[](std::uint64_t offset) const {
    GlobalTensor rest = *this;
    const std::uint64_t bytes = tidal_sim::distance(offset, sizeof(T));
    rest.address_ = reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(address_) + offset * sizeof(T));
    if (size_ != UINT64_MAX) {
      rest.size_ = offset > size_ ? 0 : size_ - offset;
      rest.place_.declared = rest.size_ * sizeof(T);
    }
    if (__builtin_add_overflow(place_.offset, bytes, &rest.place_.offset)) rest.place_.offset = UINT64_MAX;
    return rest;
  }

  // A raw address: what is done through it is not checked.
  const T* GetPhyAddr() const { return address_; }
  T* GetPhyAddr(std::uint64_t offset) const { return (*this)[offset].address_; }

  std::uint64_t GetSize() const { return size_ == UINT64_MAX ? 0 : size_; }

  const tidal_sim::GlobalPlace& Place() const { return place_; }  // of the simulation only

 private:
  T* address_ = nullptr;
  std::uint64_t size_ = UINT64_MAX;
  tidal_sim::GlobalPlace place_;
};

template <typename T>
class LocalTensor {
 public:
  using PrimType = T;

  LocalTensor() = default;
  explicit LocalTensor(const tidal_sim::LocalPlace& place) : place_(place) {}  // of the simulation only

  T GetValue(std::uint32_t index) const {
    T value;
    tidal_sim::read_scalar("LocalTensor::GetValue", place_, std::uint64_t{index} * sizeof(T), &value,
                           sizeof(T));
    return value;
  }

  template <typename U>
  void SetValue(std::uint32_t index, U value) const {
    const T stored = static_cast<T>(value);
    tidal_sim::write_scalar("LocalTensor::SetValue", place_, std::uint64_t{index} * sizeof(T), &stored,
                            sizeof(T));
  }

  LocalTensor operator[](std::uint32_t offset) const {
    const char* const api = "LocalTensor::operator[]";
    const std::uint64_t bytes = std::uint64_t{offset} * sizeof(T);
    if (bytes > place_.bytes)
      tidal_sim::refuse(tidal_sim::current(api).who(api), "UB buffer '",
                        place_.buffer != nullptr ? place_.buffer->name : "(none)", "' offset ",
                        place_.offset + bytes, ": behind the tensor, which ends at ",
                        place_.offset + place_.bytes);
    tidal_sim::LocalPlace rest = place_;
    rest.offset += static_cast<std::uint32_t>(bytes);
    rest.bytes -= static_cast<std::uint32_t>(bytes);
    return LocalTensor(rest);
  }

  template <typename U>
  LocalTensor<U> ReinterpretCast() const {
    return LocalTensor<U>(place_);
  }

  std::uint32_t GetSize() const { return place_.bytes / static_cast<std::uint32_t>(sizeof(T)); }

  // A raw address, as a number: what is done through it is not checked, and in lazy mode a DMA may not have
  // arrived there.
  std::uint64_t GetPhyAddr() const {
    const char* const api = "LocalTensor::GetPhyAddr";
    tidal_sim::Core& core = tidal_sim::current(api);
    core.ub.check(core.who(api), place_, 0, 0, false);
    return reinterpret_cast<std::uintptr_t>(core.ub.data(place_.buffer->offset + place_.offset));
  }

  const tidal_sim::LocalPlace& Place() const { return place_; }  // of the simulation only

 private:
  tidal_sim::LocalPlace place_;
};

}  // namespace AscendC
