// SPDX-License-Identifier: Apache-2.0
// What a tiling function asks of its platform; see ../../register/op_impl_registry.h.

#pragma once

#include "register/op_impl_registry.h"

namespace platform_ascendc {

enum class CoreMemType { UB };

class PlatformAscendC {
 public:
  explicit PlatformAscendC(const gert::PlatformInfo* info) : info_(info) {}
  uint32_t GetCoreNumAiv() const { return info_->cores; }
  uint32_t GetLibApiWorkSpaceSize() const { return info_->system_workspace; }
  void GetCoreMemSize(CoreMemType, uint64_t& bytes) const { bytes = info_->ub_bytes; }

 private:
  const gert::PlatformInfo* info_;
};

}  // namespace platform_ascendc
