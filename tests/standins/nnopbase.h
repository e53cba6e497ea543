// SPDX-License-Identifier: Apache-2.0
// What stands behind an aclTensor handle, for the stand-ins of libnnopbase and of an operator library.

#pragma once

#include <cstdint>
#include <vector>

struct aclTensor {
  void* data;
  int dtype;
  std::vector<int64_t> dims;
};

// Numbers of aclDataType that the operators take.
constexpr int kFloat16 = 1;
constexpr int kInt8 = 2;
constexpr int kInt32 = 3;
constexpr int kBfloat16 = 27;
