// SPDX-License-Identifier: Apache-2.0
// What the host tiling of both operators works on: names, element types and shapes, without any header of
// CANN, so that the operator's host library, the simulation and the tests run the same checks. Errors are one
// line of text each.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tidal {
namespace host {

enum class Element { kHalf, kBfloat16, kInt8, kInt32, kOther };

struct Argument {
  const char* name;
  Element element;
  std::vector<int64_t> dims;
};

struct Platform {
  int64_t cores;             // vector cores that can run at once
  int64_t ub_bytes;          // of one core
  int64_t system_workspace;  // bytes that come before the operator's own
};

// How to start a kernel.
template <typename Tiling>
struct Launch {
  Tiling tiling = Tiling();
  uint64_t key = 0;
  int64_t cores = 1;
  int64_t workspace = 0;  // bytes, the system's included
};

inline const char* NameOf(Element element) {
  static const char* const kNames[] = {"float16", "bfloat16", "int8", "int32", "another type"};
  return kNames[static_cast<int>(element)];
}

inline int64_t BytesOf(Element element) { return element == Element::kInt8 ? 1 : 2; }

inline std::string Text(const std::vector<int64_t>& dims) {
  std::string text = "[";
  for (const int64_t dim : dims) text += (text.size() > 1 ? ", " : "") + std::to_string(dim);
  return text + "]";
}

// "name: shape [1, 2]: expected ..."
inline std::string ShapeError(const Argument& argument, const std::string& expected) {
  return std::string(argument.name) + ": shape " + Text(argument.dims) + ": expected " + expected;
}

inline std::string CheckInt32(const Argument& argument) {
  if (argument.element == Element::kInt32) return "";
  return std::string(argument.name) + ": " + NameOf(argument.element) + ": expected int32";
}

inline int64_t Divided(int64_t amount, int64_t unit) { return (amount + unit - 1) / unit; }
inline int64_t RoundedUp(int64_t amount, int64_t unit) { return Divided(amount, unit) * unit; }

}  // namespace host
}  // namespace tidal
