// SPDX-License-Identifier: Apache-2.0
// The keywords and macros of kernel sources.

#pragma once

#include <cstdarg>
#include <cstdio>
#include <type_traits>

#include "sync.h"

#define __aicore__
#define __global__
#define __gm__
#define __ubuf__

namespace tidal_sim {

enum class TaskType { KERNEL_TYPE_AIV_ONLY, KERNEL_TYPE_MIX_AIV_1_0 };

inline void declare_type(TaskType type) {
  current("KERNEL_TASK_TYPE_DEFAULT").type =
      type == TaskType::KERNEL_TYPE_MIX_AIV_1_0 ? KernelType::MixAiv10 : KernelType::AivOnly;
}

// The tiling data, which lies in GM like any tensor, and so must be a buffer of the launch.
inline void read_tiling(const void* from, void* to, std::size_t bytes) {
  Core& core = current("GET_TILING_DATA_WITH_STRUCT");
  const GlobalPlace place = core.device.memory.find(from);
  GlobalMemory::check(core.who("GET_TILING_DATA_WITH_STRUCT"), place, 0, bytes, Way::Read);
  std::memcpy(to, from, bytes);
}

[[noreturn, gnu::format(printf, 3, 4)]] inline void assertion(const char* expression, int line,
                                                              const char* format, ...) {
  char message[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof(message), format, arguments);
  va_end(arguments);
  refuse(current("ASSERT_MSG").who("ASSERT_MSG"), message, " (", expression, ", line ", line, ")");
}

}  // namespace tidal_sim

namespace AscendC {

// The part of the workspace that is the kernel's own. The workspace of a launch has no other part.
inline GM_ADDR GetUserWorkspace(GM_ADDR workspace) { return workspace; }

}  // namespace AscendC

#define KERNEL_TASK_TYPE_DEFAULT(type) ::tidal_sim::declare_type(::tidal_sim::TaskType::type)
#define REGISTER_TILING_DEFAULT(type) static_assert(std::is_trivially_copyable_v<type>)
#define GET_TILING_DATA_WITH_STRUCT(type, name, address) \
  type name;                                             \
  ::tidal_sim::read_tiling((address), &name, sizeof(type))
#define TILING_KEY_IS(key) (::tidal_sim::current("TILING_KEY_IS").tiling_key_is(key))
#define ASCEND_IS_AIC (::AscendC::g_coreType == ::AscendC::AIC)
#define ASCEND_IS_AIV (::AscendC::g_coreType == ::AscendC::AIV)
#define ASSERT_MSG(expression, ...)                                                \
  do {                                                                             \
    if (!(expression)) ::tidal_sim::assertion(#expression, __LINE__, __VA_ARGS__); \
  } while (false)
