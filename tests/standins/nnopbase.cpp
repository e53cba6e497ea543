// SPDX-License-Identifier: Apache-2.0
// A stand-in for libnnopbase: makes and destroys descriptions of tensors, refuses what the documentation
// forbids, and counts what was made and not destroyed.

#include "nnopbase.h"

#include <atomic>

namespace {

constexpr int kFormatNd = 2;
constexpr std::uintptr_t kAlignment = 32;

std::atomic<int64_t> alive{0};

// Whether the view is the whole storage, element after element: what a contiguous tensor is described as.
bool Contiguous(const int64_t* dims, const int64_t* strides, uint64_t rank) {
  int64_t expected = 1;
  for (uint64_t i = rank; i-- > 0;) {
    if (dims[i] < 0 || strides[i] != expected) return false;
    expected *= dims[i];
  }
  return true;
}

}  // namespace

extern "C" {

aclTensor* aclCreateTensor(const int64_t* view_dims, uint64_t view_rank, int dtype, const int64_t* strides,
                           int64_t offset, int format, const int64_t* storage_dims, uint64_t storage_rank,
                           void* data) {
  if (format != kFormatNd || offset != 0 || storage_rank != view_rank) return nullptr;
  if (reinterpret_cast<std::uintptr_t>(data) % kAlignment != 0) return nullptr;
  if (!Contiguous(view_dims, strides, view_rank)) return nullptr;
  for (uint64_t i = 0; i < view_rank; ++i) {
    if (storage_dims[i] != view_dims[i]) return nullptr;
  }
  ++alive;
  return new aclTensor{data, dtype, {view_dims, view_dims + view_rank}};
}

int aclDestroyTensor(const aclTensor* tensor) {
  if (tensor == nullptr) return 161001;
  --alive;
  delete tensor;
  return 0;
}

// Descriptions that were made and not destroyed.
int64_t standin_tensors_alive() { return alive; }

}  // extern "C"
